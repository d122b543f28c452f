"""Ray Train's own support for torchft, unmodified, on a local Ray cluster: a worker's process is killed, Ray
replaces it, and it heals.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from test_train_demo import EXAMPLES, ROOT


def run(*options: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "ray_ddp.py"), *options],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",  # not 60, on a small machine
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install '.[ray]'")
@pytest.mark.slow  # Ray takes half a minute to start on a small machine that is busy with tests
@pytest.mark.timeout(1900)
def test_a_killed_worker_is_replaced_and_heals() -> None:
    # The survivor waits for the other one, so that the training does not end before that is back.
    options = ("--epochs", "2", "--kill-at", "20", "--min-workers", "2")
    for _ in range(3):
        done = run(*options, timeout=600)
        if "timed out during startup" not in done.stderr:  # Ray gives its processes 15 s to start
            break
    assert done.returncode == 0, done.stdout + done.stderr
    ends = re.findall(r"^group (\d): steps (\d+) to (\d+)  ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert [end[:3] for end in ends] == [("0", "1", "100"), ("1", "21", "100")], done.stdout
    assert ends[0][3] == ends[1][3] and done.stdout.splitlines()[-1] == "equal"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "--workers must be at least 1, got 0"),
        (["--min-workers", "3"], "--min-workers must be at most --workers (2), got 3"),
        (["--kill-at", "500", "--epochs", "10"], "--kill-at must lie between 0 and 500, got 500"),
        (["--kill-at", "5", "--workers", "1"], "someone has to survive"),
    ],
)
def test_bad_options_are_named(options: list[str], message: str) -> None:
    done = run(*options, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
