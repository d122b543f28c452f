"""Streaming DiLoCo on the test device: inner steps run while a fragment is reduced, and nothing is read too
early.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.integration.cluster import DEADLINE, Rank
from tests.late import load
from torchft.local_sgd import DiLoCo
from torchft.process_group import ProcessGroup, ProcessGroupGloo

load()
from tests.late.test_jobs import (  # noqa: E402
    ProcessGroupHasty,
    ProcessGroupSlow,
    batch,
    late_pg,
    model_of,
    on_device,
    run,
)

SYNCS = 4


class Streaming:
    """Two fragments, each reduced during an inner step. Groups keep a share of their own parameters."""

    def __init__(self, on_cpu: bool = False, quantized: bool = False) -> None:
        self.on_cpu, self.quantized = on_cpu, quantized

    def __call__(self, rank: Rank) -> list[torch.Tensor]:
        device = torch.device("cpu") if self.on_cpu else on_device(rank)
        model = model_of(0).to(device)
        inner = torch.optim.Adam(model.parameters(), lr=1e-2)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        manager = rank.start_manager(init_sync=False, use_async_quorum=False)
        rank.cluster.wait_for_healthy(2)
        with DiLoCo(
            manager,
            [model[:2], model[2:]],
            inner,
            outer,
            sync_every=6,
            fragment_sync_delay=1,
            fragment_update_alpha=0.25,
            should_quantize=self.quantized,
        ) as diloco:
            for step in range(SYNCS * 3):
                x, y = (t.to(device) for t in batch(step, rank.group))
                inner.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                inner.step()
            assert manager.current_step() == SYNCS
            own = [p.detach().cpu().clone() for p in model.parameters()]
            diloco.restore_global_parameters()
        return [*own, *(p.detach().cpu() for p in model.parameters())]


def cpu_pg(group: int) -> ProcessGroup:
    return ProcessGroupGloo(timeout=DEADLINE)


@pytest.fixture(scope="module")
def on_cpu() -> list[list[torch.Tensor]]:
    """The final weights on the CPU: each group's own, and the global ones."""
    ends = run(Streaming(on_cpu=True), cpu_pg)
    own, shared = zip(*[(end[: len(end) // 2], end[len(end) // 2 :]) for end in ends])
    assert all(map(torch.equal, *shared)) and not all(map(torch.equal, *own))
    return ends


@pytest.mark.parametrize("schedule", ["at once", "delayed", "slow collectives"])
def test_the_weights_are_those_of_the_cpu(late, on_cpu, schedule: str) -> None:
    if schedule == "delayed":
        late.delays(7, 0, 500)
    make_pg = late_pg if schedule != "slow collectives" else lambda group: ProcessGroupSlow(timeout=DEADLINE)
    for ours, theirs in zip(run(Streaming(), make_pg), on_cpu):
        assert all(map(torch.equal, ours, theirs))


def test_a_group_that_takes_queued_work_for_finished_is_detected(late, on_cpu) -> None:
    ends = run(Streaming(), lambda group: ProcessGroupHasty(timeout=DEADLINE))
    assert not all(all(map(torch.equal, ours, theirs)) for ours, theirs in zip(ends, on_cpu))


def test_quantized_fragments_have_the_bits_of_the_cpu(late) -> None:
    late.delays(11, 0, 500)
    for ours, theirs in zip(
        run(Streaming(quantized=True), late_pg),
        run(Streaming(on_cpu=True, quantized=True), cpu_pg),
    ):
        assert all(map(torch.equal, ours, theirs))
