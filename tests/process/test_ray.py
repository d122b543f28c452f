"""python/examples/ray_ddp.py on a local Ray cluster: an actor's process is killed, its group is replaced and heals."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from test_train_demo import EXAMPLES, ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'torchft[ray]'")


def run(*options: str, timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "ray_ddp.py"), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.slow  # Ray's own start takes half a minute where tests share a small machine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_actor_comes_back_with_its_group(ranks: int) -> None:
    for _ in range(3):
        done = run("--ranks", str(ranks), "--steps", "60", "--kill-at", "20", "--time-limit", "300", timeout=400)
        if "timed out during startup" not in done.stderr:  # Ray gives its processes 15 s to start
            break
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "equal" or "equal" in lines, done.stdout
    assert any("group 1 lost an actor (" in line for line in lines)
    assert any(line.startswith("group 0: 1 lives") for line in lines)  # the other one never ended
    back = next(
        re.match(r"group 1: 2 lives, \d+ steps, healed at steps \[(.*)\]", line) for line in lines if "2 lives" in line
    )
    assert back is not None and any(int(step) > 20 for step in back[1].split(", "))
    digests = re.findall(r"group \d rank \d  ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert len(digests) == 2 * ranks and len(set(digests)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--groups", "0"], "--groups must be at least 1, got 0"),
        (["--kill-at", "500"], "--kill-at must lie between 0 and --steps (500), got 500"),
        (["--kill-at", "5", "--groups", "1"], "someone has to survive"),
        (["--kill-at", "5", "--address", "auto"], "without --address only"),
    ],
)
def test_bad_options_are_named(options: list[str], message: str) -> None:
    done = run(*options, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
