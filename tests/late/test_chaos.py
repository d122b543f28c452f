"""tests/process/test_chaos.py with groups whose weights and collectives are on the test device."""

from __future__ import annotations

import pytest
from chaos import Chaos
from processes import Job


# test_processes.py also kills a group, but without checking the history.
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_groups_are_killed_and_stopped(job_server: None) -> None:
    with Job() as job:
        chaos = Chaos(job, kind="late", groups=2)
        chaos.start()
        chaos.kill(1, phase="in bucket 1")
        chaos.kill(0, phase="before the vote")
        chaos.kill_all()
        chaos.stop(0, phase="in bucket 0")
        chaos.finish()
