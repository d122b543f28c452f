"""Lightning's Trainer with `TorchftStrategy`: counters and weights of one process, whatever fails."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from upstream import client_path
from waiting import wait_for

from tests.integration.cluster import Cluster, Rank, crash_and_wait, results, runs_twice_and_trains_once
from torchft.coordination import LighthouseServer
from torchft.data.position import DataPlan, DataPosition
from torchft.launch.group import ReplicaGroup

# A test installs Lightning. test_job.py checks the same promises of the Job that the strategy drives.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # Lightning's own
]
SAMPLES, EPOCHS, BATCH, UNIT, STEPS = 60, 4, 16, 4, 16
SIGTERM = Path(__file__).parents[1] / "process" / "lightning_script.py"
_NET = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.fixture(autouse=True)
def lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path, str(client_path("lightning"))])
    import lightning

    return lightning


def samples() -> TensorDataset:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def optimizers(net: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    return adam, torch.optim.lr_scheduler.StepLR(adam, 5, 0.5)


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def one_process() -> torch.Tensor:
    """The weights after the whole batches, with PyTorch only."""
    plan, (x, y), net = (
        DataPlan(SAMPLES, BATCH, UNIT, True, 0, EPOCHS),
        samples().tensors,
        copy.deepcopy(_NET),
    )
    position, (adam, schedule) = DataPosition(), optimizers(net)
    while position != plan.end:
        indices = [index for unit in plan.share(position, 0, 1).units for index in unit.indices]
        adam.zero_grad()
        (net(x[indices]) - y[indices]).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        adam.step()
        schedule.step()
        position = plan.advance(position)
    return flat(net)


@dataclass
class Script:
    """A user's script, as a thread of each group."""

    precision: str = "32-true"
    start_with: int = 1
    max_steps: int = -1
    job: dict[str, Any] = field(default_factory=dict)  # further settings
    # Called before a step, by (group, committed steps); True ends the script as a crash.
    events: dict[tuple[int, int], Callable[[Rank], bool]] = field(default_factory=dict)
    # of each committed step, by group: the step, the epoch, its batch, and the learning rate after it
    seen: dict[int, list[tuple[int, int, int, float]]] = field(default_factory=dict)

    def __call__(self, rank: Rank) -> Optional[tuple[torch.Tensor, int, int, float]]:
        import lightning
        from lightning.pytorch.plugins import MixedPrecision

        from torchft.lightning import TorchftStrategy

        script = self

        class Crash(Exception):
            pass

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = copy.deepcopy(_NET)

            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                loss = (self.net(batch[0]) - batch[1]).square().mean()
                self.log("loss", loss, on_epoch=True)
                return loss

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                assert not torch.is_grad_enabled()
                self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

            def configure_optimizers(self) -> Any:
                adam, schedule = optimizers(self.net)
                return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        class Watch(lightning.Callback):
            steps = 0

            def setup(self, trainer: Any, module: Any, stage: str) -> None:
                trainer.strategy.job.state("watch", self)

            def state_dict(self) -> dict[str, Any]:
                return {"steps": self.steps}

            def load_state_dict(self, state: dict[str, Any]) -> None:
                self.steps = state["steps"]

            def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
                event = script.events.pop((rank.group, trainer.global_step), None)
                if event is not None and event(rank):
                    raise Crash

            def on_train_batch_end(
                self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                rate = trainer.optimizers[0].param_groups[0]["lr"]
                if batch.counted:
                    self.steps += 1
                    assert self.steps == trainer.global_step
                    assert outputs["loss"].isfinite()
                    now = (trainer.global_step, trainer.current_epoch, batch_idx, rate)
                    script.seen.setdefault(rank.group, []).append(now)

        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=10**6)
        half = self.precision == "16-mixed"  # which the Trainer refuses on a CPU, unless it is a plugin
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=TorchftStrategy(global_batch_size=BATCH, manager=rank.start_manager(), **self.job),
            max_epochs=EPOCHS if self.max_steps < 0 else None,
            max_steps=self.max_steps,
            gradient_clip_val=0.5,
            callbacks=[Watch()],
            plugins=MixedPrecision("16-mixed", "cpu", scaler) if half else None,
            precision=None if half else self.precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        rank.cluster.wait_for_healthy(self.start_with)
        module, data = Module(), DataLoader(samples(), batch_size=UNIT, shuffle=True)
        try:
            trainer.fit(module, data, DataLoader(samples(), batch_size=SAMPLES))
        except Crash:
            return None
        return flat(module.net), trainer.global_step, trainer.current_epoch, scaler.get_scale()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_group_is_killed_and_heals(precision: str) -> None:
    killed, crash, wait = crash_and_wait()
    alone = Script(precision)
    with Cluster() as cluster:
        (expected,) = results(cluster.start(alone, 0))
    assert expected is not None
    if precision == "32-true":
        torch.testing.assert_close(expected[0], one_process(), rtol=1e-4, atol=1e-6)
    script = Script(precision, start_with=2, events={(1, 2): crash, (0, 6): wait})
    with Cluster() as cluster:
        groups = [cluster.start(script, group) for group in range(2)]
        cluster.wait(killed)
        script.start_with = 1
        ended = results(groups[0], cluster.start(script, 1))

    steps = [(n + 1, n // 4, n % 4, 0.01 * 0.5 ** ((n + 1) // 5)) for n in range(STEPS)]
    assert alone.seen[0] == steps
    assert script.seen[0] == steps
    healed = script.seen[1][2:]
    again = steps[healed[0][0] - 1 :]
    assert 2 < healed[0][0] <= 8 and healed[1:] == again[1:]
    # Lightning has numbered the batch that the group healed in before.
    assert healed[0][:2] + healed[0][3:] == again[0][:2] + again[0][3:]
    for each in ended:
        assert each is not None and each[1:] == expected[1:] and each[1:3] == (STEPS, EPOCHS)
        torch.testing.assert_close(each[0], expected[0], rtol=1e-2, atol=1e-3)
    assert ended[0] is not None and ended[1] is not None and torch.equal(ended[0][0], ended[1][0])


def test_groups_end_at_the_same_step() -> None:
    script = Script(start_with=2, max_steps=6)
    with Cluster(min_replicas=2) as cluster:
        one, other = results(*(cluster.start(script, group) for group in range(2)))
    assert one is not None and other is not None and torch.equal(one[0], other[0])
    assert one[1:] == other[1:] and one[1:3] == (6, 2)  # Lightning counts an epoch that it has begun
    assert script.seen[0] == script.seen[1]


def test_the_last_of_max_steps_has_a_checkpoint_which_a_script_that_runs_again_ends_with(
    tmp_path: Path,
) -> None:
    script = Script(max_steps=6, job={"checkpoint_dir": tmp_path, "checkpoint_every": 4})
    runs_twice_and_trains_once(script, tmp_path)


def test_sigterm_drains_the_group_and_lightnings_handler_does_not_end_it(tmp_path: Path) -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    group = ReplicaGroup(0, 1, [str(SIGTERM), str(client_path("lightning"))], tmp_path / "0.log")
    try:
        group.start(lighthouse.address())
        wait_for(lambda: group.status is not None, "the end", seconds=300)
    finally:
        group.kill()
        lighthouse.shutdown()
    log = group.log.read_text()
    assert group.status == 0, log
    assert re.search("behind fit: drained after step [34]$", log, re.MULTILINE), log


@pytest.mark.parametrize(
    ("trainer", "data", "message"),
    [
        ({"accumulate_grad_batches": 2}, {}, "does not take accumulate_grad_batches"),
        ({"limit_train_batches": 3}, {}, "does not take limit_train_batches"),
        (
            {"max_time": "00:01:00:00"},
            {},
            r"callbacks with a state, which would not heal: \['Timer'\]",
        ),
        (
            {"stops": True},
            {},
            r"callbacks with a state, which would not heal: \['EarlyStopping'\]; give it to",
        ),
        ({}, {"drop_last": True}, "each sample counts once an epoch"),
        ({}, {"sampler": [1, 0]}, "without a sampler of its own"),
    ],
)
def test_what_depends_on_the_number_of_groups_is_refused(
    trainer: dict[str, Any], data: dict[str, Any], message: str, lightning: Any
) -> None:
    from torchft.lightning import TorchftStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = copy.deepcopy(_NET)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return optimizers(self.net)[0]

    def loop(rank: Rank) -> None:
        strategy = TorchftStrategy(global_batch_size=BATCH, manager=rank.start_manager())
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        given = dict(trainer)
        if given.pop("stops", False):
            given["callbacks"] = [lightning.pytorch.callbacks.EarlyStopping("loss")]
        made = lightning.Trainer(accelerator="cpu", devices=1, strategy=strategy, **quiet, **given)
        with pytest.raises(ValueError, match=message):
            made.fit(Module(), DataLoader(samples(), batch_size=UNIT, **data))

    with Cluster() as cluster:
        results(cluster.start(loop, 0))
