"""python/examples/ray_ddp.py on a local Ray cluster: an actor's process is killed, its group is replaced and
heals.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_train_demo import EXAMPLES, ROOT

# A stub of Ray that suffices to import the example, which checks its arguments before it starts Ray.
STAND_IN = {
    "ray/__init__.py": (
        "def remote(*given, **options):\n    return given[0] if given else lambda decorated: decorated\n"
    ),
    "ray/util/__init__.py": "",
    "ray/util/placement_group.py": "placement_group = remove_placement_group = None\n",
    "ray/util/scheduling_strategies.py": "PlacementGroupSchedulingStrategy = None\n",
}


def run(*options: str, timeout: float, stand_in: Path | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(p) for p in (stand_in, ROOT) if p)
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "ray_ddp.py"), *options],
        env={**os.environ, "PYTHONPATH": path, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install '.[ray]'")
@pytest.mark.slow  # Ray takes half a minute to start on a small machine that is busy with tests
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_actor_comes_back_with_its_group(ranks: int) -> None:
    for _ in range(3):
        done = run(
            "--ranks", str(ranks), "--steps", "60", "--kill-at", "20", "--time-limit", "300", timeout=400
        )
        if "timed out during startup" not in done.stderr:  # Ray gives its processes 15 s to start
            break
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "equal" or "equal" in lines, done.stdout
    assert any("an actor of group 1 failed (" in line for line in lines)
    assert any(line.startswith("group 0: 1 lives") for line in lines)  # the other group never ended
    back = next(
        re.match(r"group 1: 2 lives, \d+ steps, healed at steps \[(.*)\]", line)
        for line in lines
        if "2 lives" in line
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
def test_bad_options_are_named(options: list[str], message: str, tmp_path: Path) -> None:
    for name, text in STAND_IN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = run(*options, timeout=60, stand_in=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
