"""Members of both upstream versions and of ours request quorums from one lighthouse, ours or an upstream one.

An upstream nightly cannot train together with an upstream 0.2.0, because it needs handles, which the other does not
send. They can only share the lighthouse, so `member.py` uses nothing else.
"""

from __future__ import annotations

import pytest
from processes import HERE, START_TIMEOUT_S, Child, Job, ours_path
from upstream import upstream_path

STEPS_S = 60


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "lighthouse", ["ours", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nightly", "stable"))]
)
def test_all_generations_are_in_one_quorum(lighthouse: str) -> None:
    paths = {"ours": ours_path(), "nightly": upstream_path("nightly"), "stable": upstream_path("stable")}
    with Job() as job:
        _, address = job.lighthouse(paths[lighthouse], min_replicas=1, join_timeout_ms=500)

        def start(name: str) -> Child:
            env = {"TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": name}
            return job.python(name, HERE / "member.py", path=paths[name], env=env)

        def in_step(members: list[Child], seconds: float) -> None:
            """Wait until exactly these members have done three steps in a quorum."""
            since = {m.name: len(m.of("step")) for m in members}

            def there(m: Child) -> bool:
                return len([e for e in m.of("step")[since[m.name] :] if e["members"] == len(members)]) >= 3

            job.wait(lambda: all(map(there, members)), seconds, f"{[m.name for m in members]} are in one quorum")

        members = [start(name) for name in paths]
        in_step(members, START_TIMEOUT_S)
        members[2].kill()
        in_step(members[:2], STEPS_S)
        members[2] = start("stable")
        in_step(members, START_TIMEOUT_S)
        by_step = [{e["step"]: e["quorum_id"] for e in m.of("step") if e["members"] == 3} for m in members]
        common = set.intersection(*map(set, by_step))
        assert common
        assert not [s for s in common if len({ids[s] for ids in by_step}) > 1], "a step has one quorum for all"
