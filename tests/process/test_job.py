"""Jobs of real processes with several ranks a group end as one process does.

Two ranks may print at once: Python writes the end of a line by itself, so the lines of a log may be joined.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from waiting import wait_for

from torchft.coordination import LighthouseServer
from torchft.data.position import DataPlan, DataPosition
from torchft.launch.group import ReplicaGroup

pytestmark = pytest.mark.slow  # tests/integration/test_job.py has groups of one rank
CHECKPOINTS = Path(__file__).with_name("stages_script.py")


def one_process() -> tuple[list[float], list[float]]:
    """Trains the stages as one model; returns the norm of all gradients and the loss of each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1))
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    inputs = torch.randn(64, 4)
    plan, position = DataPlan(64, 16, 4, epochs=2), DataPosition()
    norms, losses = [], []
    while position != plan.end:
        indices = [index for unit in plan.share(position, 0, 1).units for index in unit.indices]
        adam.zero_grad()
        x = inputs[indices]
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())
        losses.append(loss.item())
        adam.step()
        position = plan.advance(position)
    return norms, losses


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("pipeline_script.py", ""),
        *(("ranks_script.py", kind) for kind in ("ddp", "reproducible", "fsdp")),
        *(pytest.param("ranks_script.py", kind, marks=pytest.mark.slow) for kind in ("compiled", "tensor")),
    ],
)
def test_ranks_of_a_group_are_stages_have_parts_or_read_different_data(
    script: str, kind: str, tmp_path: Path
) -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
    command = [str(Path(__file__).with_name(script)), kind, "2"]
    groups = [ReplicaGroup(i, 2, command, tmp_path / f"{i}.log", nproc=2) for i in range(2)]
    try:
        for group in groups:
            group.start(lighthouse.address())
        wait_for(lambda: all(group.status is not None for group in groups), "the end", seconds=200)
    finally:
        for group in groups:
            group.kill()
        lighthouse.shutdown()
    ends, found = [], set()
    for group in groups:
        log = group.log.read_text()
        assert group.status == 0, log
        steps = re.findall(r"step (\d+) norm ([\d.]+) loss ([\d.]+)", log)
        found |= {int(step) for step, _, _ in steps}
        norms, losses = one_process()
        for step, norm, loss in steps:
            assert float(norm) == pytest.approx(norms[int(step) - 1], rel=1e-4)
            assert float(loss) == pytest.approx(losses[int(step) - 1], rel=1e-4)
        ends.append(sorted(re.findall(r"rank \d step 8 weights [0-9a-f]{64}", log)))
    assert sorted(found) == list(range(1, 9))  # one group trains on while the other one connects
    assert ends[0] == ends[1] and len(ends[0]) == 2


@pytest.mark.timeout(120)
def test_ranks_resume_from_the_checkpoint_that_rank_0_finds_each_its_stage(tmp_path: Path) -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    folders = [str(tmp_path / name) for name in ("all", "of_rank_0")]
    group = ReplicaGroup(0, 1, [str(CHECKPOINTS), *folders], tmp_path / "0.log", nproc=2)
    try:
        group.start(lighthouse.address())
        wait_for(lambda: group.status is not None, "the end", seconds=100)
    finally:
        group.kill()
        lighthouse.shutdown()
    log = group.log.read_text()
    assert group.status == 0, log
    weights = sorted(re.findall(r"rank \d weight \d+\.\d", log))
    assert weights == ["rank 0 weight 10.0", "rank 1 weight 11.0"]
