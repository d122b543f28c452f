"""A small version of `make train-total`: all but the keeper is killed, and the job goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "python" / "examples" / "total_loss.py"


@pytest.mark.slow  # test_total_loss.py kills everything of a smaller job
@pytest.mark.timeout(240)
def test_everything_but_the_keeper_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--kill-at", "40", "--time-limit", "100"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    killed = re.search(r"^step (\d+): (\d+) processes got SIGKILL", done.stdout, re.MULTILINE)
    goes_on = re.search(r"^It goes on from step (\d+): (\d+) steps? made again", done.stdout, re.MULTILINE)
    assert killed and goes_on, done.stdout
    assert int(killed[2]) >= 6, "a launcher, a lighthouse, two agents and two trainers"
    assert 0 < int(goes_on[1]) <= int(killed[1]) + 2
    assert "Left is the keeper, process" in done.stdout
    assert "complete" in done.stdout, "the list of snapshots"
    assert list(tmp_path.glob("torchft-total*")) == [], "it removes its logs"
