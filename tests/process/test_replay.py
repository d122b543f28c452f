"""With replay, kill -9 in mid-step costs time but no step.

Groups of a job are killed one after another, each at another point of a step. The weights of the others are
compared with each other, and with those of one plain loop over the batches of the groups that took part in
each step.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from causes import SILENCE_MS
from processes import HERE, START_TIMEOUT_S, Job, ours_path
from replay_model import reference
from torch.distributed import TCPStore

STEPS = 9
FAILURES = (2, 4, 6)  # steps


@pytest.mark.parametrize(
    ("kind", "groups", "places"),
    [
        pytest.param("gloo", 4, ("bucket1", "forward", "bucket0"), id="gloo"),
        # Slow: these differ only in the kind of process group, and test_abort and test_chaos cover the kinds.
        pytest.param("isolated", 3, ("bucket1",), id="isolated", marks=pytest.mark.slow),
        pytest.param("native", 4, ("bucket1", "forward", "bucket0"), id="native", marks=pytest.mark.slow),
        pytest.param(
            "gloo", 4, ("commit", "bucket0", "bucket1"), id="gloo, other places", marks=pytest.mark.slow
        ),
        pytest.param(
            "isolated",
            4,
            ("commit", "forward", "bucket0"),
            id="isolated, four groups",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_kill_9_costs_no_step(kind: str, groups: int, places: tuple[str, ...], tmp_path: Path) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with Job() as job:
        _, lighthouse = job.lighthouse(
            ours_path(), min_replicas=1, join_timeout_ms=30_000, heartbeat_timeout_ms=SILENCE_MS
        )
        children = []
        for group in range(groups):
            # The first groups are killed first, because one of them hosts the primary's store.
            failure = ("--fail_at", FAILURES[group], "--place", places[group]) if group < len(places) else ()
            common = ("--group", group, "--groups", groups, "--lighthouse", lighthouse, "--kind", kind)
            rest = ("--store", store.port, "--steps", STEPS, "--save", tmp_path / f"{group}.pt")
            children.append(
                job.python(
                    f"group{group}", HERE / "replay_worker.py", *common, *rest, *failure, path=ours_path()
                )
            )
        job.wait(lambda: all(c.of("ready") for c in children), START_TIMEOUT_S, "all groups are ready")
        mortal, survivors = children[: len(places)], children[len(places) :]
        for child in mortal:
            child.expected_to_live = False
        for child in children:
            child.send(do="go")
        job.wait_exit(survivors, START_TIMEOUT_S)
        ends = [child.of("finished")[0] for child in survivors]

        everybody = list(range(groups))
        expected = []
        for step in range(STEPS):
            # A group that fails after the vote participated in the step.
            failed = [g for g, place in enumerate(places) if step > FAILURES[g] - (place != "commit")]
            expected.append([g for g in everybody if g not in failed])
        for end in ends:
            assert end["commits"] == [True] * STEPS, f"a step was lost\n{job.report()}"
            assert end["participants"] == expected, job.report()
            assert end["batches"] == sum(map(len, expected))
        assert all(child.returncode == -9 for child in mortal)
    weights = [torch.load(tmp_path / f"{group}.pt") for group in everybody[len(places) :]]
    for name, value in reference(expected).items():
        torch.testing.assert_close(weights[0][name], value, msg=lambda m, name=name: f"{name}: {m}")
        assert all(torch.equal(weights[0][name], others[name]) for others in weights)
