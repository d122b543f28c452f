"""The source is killed while a group trains along: another source replaces it, and all groups end
with the same bits.
"""

from __future__ import annotations

import pytest
from causes import SILENCE_MS
from processes import HERE, START_TIMEOUT_S, Child, Job, ours_path

RATE = 4_000_000  # bytes per second: the state of 1.6 MB arrives over many steps
STEPS = 3
JOINS = "group_2"


@pytest.mark.slow  # 25 s; tests/integration/test_heal_along.py lets a source fail in threads
def test_the_source_is_killed() -> None:
    with Job() as job:
        _, lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=30_000, heartbeat_timeout_ms=SILENCE_MS
        )

        def start(group: int) -> Child:
            where = (
                "--group",
                group,
                "--lighthouse",
                lighthouse,
                "--rate",
                RATE,
                "--joins",
                JOINS,
                "--steps",
                STEPS,
            )
            return job.python(f"group_{group}", HERE / "along_worker.py", *where, path=ours_path())

        first = [start(group) for group in range(2)]
        job.wait(lambda: all(child.of("ready") for child in first), START_TIMEOUT_S, "two groups are ready")
        for child in first:
            child.send(do="go")
        job.wait(
            lambda: all(len(child.of("committed")) >= 3 for child in first),
            START_TIMEOUT_S,
            "two groups train",
        )
        joins = start(2)  # not earlier, because the first quorum would wait for it
        joins.send(do="go")
        heals = job.wait(
            lambda: [event for event in joins.of("heals") if not event["far"].startswith("0 ")],
            START_TIMEOUT_S,
            "some of the state has arrived",
        )
        assert not joins.of("committed"), job.report()
        source, survivor = first if heals[0]["source"].startswith("group_0:") else first[::-1]
        source.kill()
        job.wait_exit([survivor, joins], START_TIMEOUT_S)
        ends = [child.of("finished")[0] for child in (survivor, joins)]
        assert ends[0]["digest"] == ends[1]["digest"], job.report()
        assert ends[0]["step"] == ends[1]["step"]
        assert not [event for event in joins.of("heals") if "at once" in event["far"]], job.report()
        # The survivor skipped no step: a step that the kill interrupted was repeated.
        steps = [event["step"] for event in survivor.of("committed")]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
