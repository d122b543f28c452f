"""A lighthouse is killed with SIGKILL during a job, which continues with the restarted one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from lighthouses import cluster


@pytest.mark.timeout(240)
def test_a_lighthouse_is_killed_and_restarted_during_a_job(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        c.steps(20, members=2)
        for _ in range(2):
            before = len(c.members[0].of("step"))
            last = max(c.quorum_ids())
            c.lighthouses[0].kill()
            time.sleep(1)
            c.lighthouses[0] = c.start_lighthouse(0)
            took = c.steps(1)
            print(f"the job continues {took:.2f} s after the lighthouse listens again")
            c.steps(20, members=2)
            assert min(c.quorum_ids(before)) >= last, "ids never fall; with the same members, a quorum keeps its id"
        for member in c.members:
            ids = [e["quorum_id"] for e in member.of("step")]
            steps = [e["step"] for e in member.of("step")]
            assert ids == sorted(ids) and steps == sorted(steps)
