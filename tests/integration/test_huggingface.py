"""Hugging Face's Trainer with torchft: steps, schedule and weights of one process, whatever fails."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import nn
from upstream import client_path

from tests.integration.cluster import Cluster, Rank, crash_and_wait, results, runs_twice_and_trains_once
from torchft.data.position import DataPlan, DataPosition

# A test installs Transformers. test_job.py checks the same promises of the Job that the Trainer drives.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),  # of Transformers
]
SAMPLES, EPOCHS, BATCH, UNIT, STEPS, SEED = 60, 4, 16, 4, 16, 5


class Net(nn.Module):
    """Takes and returns what a model of Transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        made = self.layers(x)
        return {"loss": (made - labels).square().mean(), "logits": made}


_NET = Net()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(client_path("transformers"))])
    importlib.import_module("torchft.huggingface")  # which may take longer than groups wait for each other


def samples() -> list[dict[str, torch.Tensor]]:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    return [{"x": each, "labels": each.sum(0, keepdim=True)} for each in x]


def rate(step: int) -> float:
    """The Trainer's linear schedule, after a number of steps."""
    return 0.01 * (1 - step / STEPS)


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def one_process() -> torch.Tensor:
    """The weights after the whole batches, with PyTorch only."""
    plan, net, data = DataPlan(SAMPLES, BATCH, UNIT, True, SEED, EPOCHS), copy.deepcopy(_NET), samples()
    adam, position, step = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.0), DataPosition(), 0
    while position != plan.end:
        indices = [index for unit in plan.share(position, 0, 1).units for index in unit.indices]
        adam.zero_grad()
        batch = [torch.stack([data[index][name] for index in indices]) for name in ("x", "labels")]
        net(*batch)["loss"].backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        adam.param_groups[0]["lr"] = rate(step)
        adam.step()
        position, step = plan.advance(position), step + 1
    return flat(net)


@dataclass
class Script:
    """A user's script, as a thread of each group."""

    precision: str
    folder: Path
    start_with: int = 1
    max_steps: int = -1
    job: dict[str, Any] = field(default_factory=dict)  # further settings
    # Called before a step, by (group, committed steps); True ends the script as a crash.
    events: dict[tuple[int, int], Callable[[Rank], bool]] = field(default_factory=dict)
    # of each step that the Trainer counts, by group: the step, the epochs, and the learning rate after it
    seen: dict[int, list[tuple[float, ...]]] = field(default_factory=dict)

    def __call__(self, rank: Rank) -> Optional[tuple[torch.Tensor, int, float]]:
        from transformers import TrainerCallback, TrainingArguments

        from torchft.huggingface import TorchftTrainer

        script = self

        class Crash(Exception):
            pass

        class Watch(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                event = script.events.pop((rank.group, state.global_step), None)
                if event is not None and event(rank):
                    raise Crash

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                now = (state.global_step, state.epoch, kwargs["optimizer"].param_groups[0]["lr"])
                script.seen.setdefault(rank.group, []).append(now)

        net = copy.deepcopy(_NET)
        arguments = TrainingArguments(
            output_dir=str(self.folder / str(rank.group)),
            num_train_epochs=EPOCHS,
            max_steps=self.max_steps,
            per_device_train_batch_size=UNIT,
            learning_rate=0.01,
            max_grad_norm=0.5,
            seed=SEED,
            bf16=self.precision == "bf16",
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = TorchftTrainer(
            net,
            arguments,
            train_dataset=samples(),
            global_batch_size=BATCH,
            job={"manager": rank.start_manager(), **self.job},
            callbacks=[],
        )
        trainer.add_callback(Watch())  # behind the Trainer's own
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=10**6)
        if self.precision == "fp16":  # which Accelerate refuses on a CPU
            trainer.accelerator.scaler = scaler
            compute, half = trainer.compute_loss, torch.autocast("cpu", dtype=torch.float16)
            trainer.compute_loss = half(compute)
        rank.cluster.wait_for_healthy(self.start_with)
        try:
            trainer.train()
        except Crash:
            return None
        return flat(net), trainer.state.global_step, scaler.get_scale()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_group_is_killed_and_heals(precision: str, tmp_path: Path) -> None:
    killed, crash, wait = crash_and_wait()
    alone = Script(precision, tmp_path)
    with Cluster() as cluster:
        (expected,) = results(cluster.start(alone, 0))
    assert expected is not None
    if precision == "fp32":
        torch.testing.assert_close(expected[0], one_process(), rtol=1e-3, atol=1e-5)
    script = Script(precision, tmp_path, start_with=2, events={(1, 2): crash, (0, 6): wait})
    with Cluster() as cluster:
        groups = [cluster.start(script, group) for group in range(2)]
        cluster.wait(killed)
        script.start_with = 1
        ended = results(groups[0], cluster.start(script, 1))

    steps = [(n, n / 4, rate(n)) for n in range(1, STEPS + 1)]
    assert [each for step in alone.seen[0] for each in step] == pytest.approx([e for s in steps for e in s])
    assert script.seen[0] == alone.seen[0]
    healed = script.seen[1][2:]
    assert 2 < healed[0][0] <= 8 and healed == alone.seen[0][int(healed[0][0]) - 1 :]
    for each in ended:
        assert each is not None and each[1:] == expected[1:] and each[1] == STEPS
        torch.testing.assert_close(each[0], expected[0], rtol=1e-2, atol=1e-3)
    assert ended[0] is not None and ended[1] is not None and torch.equal(ended[0][0], ended[1][0])


def test_groups_end_at_the_same_step(tmp_path: Path) -> None:
    script = Script("fp32", tmp_path, start_with=2, max_steps=6)
    with Cluster(min_replicas=2) as cluster:
        one, other = results(*(cluster.start(script, group) for group in range(2)))
    assert one is not None and other is not None and torch.equal(one[0], other[0])
    assert one[1] == other[1] == 6 and script.seen[0] == script.seen[1]
    assert [seen[1] for seen in script.seen[0]] == [step / 4 for step in range(1, 7)]


def test_the_last_of_max_steps_has_a_checkpoint_which_a_script_that_runs_again_ends_with(
    tmp_path: Path,
) -> None:
    script = Script("fp32", tmp_path, max_steps=6, job={"checkpoint_dir": tmp_path, "checkpoint_every": 4})
    runs_twice_and_trains_once(script, tmp_path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps: choose global_batch_size"),
        ({"dataloader_drop_last": True}, "each sample counts once an epoch"),
        ({"eval_strategy": "epoch"}, "eval_strategy='epoch': allowed are 'no' and 'steps'"),
        ({"save_strategy": "epoch"}, "save_strategy='epoch': allowed are 'no' and 'steps'"),
        ({"save_strategy": "best", "metric_for_best_model": "loss"}, "save_strategy='best': allowed are"),
        (
            {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2},
            "load_best_model_at_end",
        ),
        ({}, r"callbacks with a state, which would not heal: \['EarlyStoppingCallback'\]; max_steps ends"),
    ],
)
def test_what_depends_on_the_number_of_groups_is_refused(
    setting: dict[str, Any], message: str, tmp_path: Path
) -> None:
    from transformers import EarlyStoppingCallback, TrainingArguments

    from torchft.huggingface import TorchftTrainer

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **setting)
    data = samples()
    trainer = TorchftTrainer(
        copy.deepcopy(_NET), arguments, train_dataset=data, eval_dataset=data, global_batch_size=BATCH
    )
    if not setting:
        trainer.add_callback(EarlyStoppingCallback())
    with pytest.raises(ValueError, match=message):
        trainer.train()
