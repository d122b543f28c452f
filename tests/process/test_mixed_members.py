"""Members of both upstream versions and of ours request quorums from one lighthouse, ours or an upstream one.

An upstream nightly cannot train together with an upstream 0.2.0, because it needs handles, which the other
does not send. They can only share the lighthouse, so `member.py` uses nothing else.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from lighthouses import Cluster, cluster
from mixed import PHASE_TIMEOUT_S, Group, assert_equal_weights, status, wait_in_step
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

            job.wait(
                lambda: all(map(there, members)), seconds, f"{[m.name for m in members]} are in one quorum"
            )

        members = [start(name) for name in paths]
        in_step(members, START_TIMEOUT_S)
        members[2].kill()
        in_step(members[:2], STEPS_S)
        members[2] = start("stable")
        in_step(members, START_TIMEOUT_S)
        by_step = [{e["step"]: e["quorum_id"] for e in m.of("step") if e["members"] == 3} for m in members]
        common = set.intersection(*map(set, by_step))
        assert common
        assert not [s for s in common if len({ids[s] for ids in by_step}) > 1], (
            "a step has one quorum for all"
        )


def follower(c: Cluster) -> str:
    """The address of a lighthouse that does not lead: as upstream's groups have one name for all
    lighthouses.
    """
    return c.addresses[(c.leader() + 1) % 3]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_members_of_all_generations_outlast_the_leader_of_a_cluster(tmp_path: Path) -> None:
    paths = {"ours": ours_path(), "nightly": upstream_path("nightly"), "stable": upstream_path("stable")}
    with cluster(tmp_path, lighthouses=3, groups=0) as c:
        address = follower(c)
        c.members = [
            c.job.python(
                name,
                HERE / "member.py",
                path=path,
                env={"TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": name},
            )
            for name, path in paths.items()
        ]
        c.steps(20, members=3)
        began = [len(member.of("step")) for member in c.members]
        c.lighthouses[c.leader()].kill()
        print(f"the members go on after {c.steps(3, members=3):.2f} s")
        c.steps(20, members=3)
        for member, first in zip(c.members, began, strict=True):
            assert all(step["committed"] and step["members"] == 3 for step in member.of("step")[first - 1 :])


@pytest.mark.slow  # in make test: the test above
@pytest.mark.timeout(300)
@pytest.mark.parametrize("generation", ["nightly", "stable"])
def test_upstream_groups_train_while_the_leader_of_a_cluster_is_killed(
    generation: str, tmp_path: Path
) -> None:
    path = upstream_path(generation)
    with cluster(tmp_path, lighthouses=3, groups=0) as c:
        address = follower(c)
        groups = [Group(c.job, number, path, ()) for number in range(2)]
        c.job.wait(lambda: all(g.child.events for g in groups), START_TIMEOUT_S, "all have imported torchft")
        for group in groups:
            group.join(address)
        c.job.wait(
            lambda: all(f"worker_{i}:" in status(address) for i in range(2)), PHASE_TIMEOUT_S, "it knows both"
        )
        for group in groups:
            group.child.send(do="train")
        wait_in_step(c.job, groups, after=0)
        last = max(group.last_step() for group in groups)
        c.lighthouses[c.leader()].kill()
        wait_in_step(c.job, groups, after=last + 5)
        assert_equal_weights(groups)
        assert all(
            step["committed"] for group in groups for step in group.child.of("step") if step["step"] > 1
        )
