"""Hugging Face's Trainer with torchft: its callbacks run where a step begins and where the gradients are
ready.

The Trainer sees a world of one process: use one process per group (`torchrun --nproc_per_node 1`).
"""

import os
import signal
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments  # pyrefly: ignore[missing-import]

from torchft import Manager, Optimizer
from torchft.process_group import ProcessGroupGloo

net = torch.nn.Linear(8, 2)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.net(x), labels)}


model = Model()
adam = torch.optim.Adam(model.parameters())


def load_state_dict(state: Any) -> None:
    net.load_state_dict(state["net"])
    adam.load_state_dict(state["adam"])


manager = Manager(
    pg=ProcessGroupGloo(),
    load_state_dict=load_state_dict,
    state_dict=lambda: {"net": net.state_dict(), "adam": adam.state_dict()},
    min_replica_size=1,
)
manager.leave_on(signal.SIGTERM)


class Step(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        manager.start_quorum()  # the Trainer never calls the optimizer's zero_grad

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        for work in [manager.allreduce(p.grad) for p in model.parameters() if p.grad is not None]:
            work.wait()

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = manager.current_step() >= 100 or manager.draining()


for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    # The Manager has read them; with them the Trainer would make its own process group.
    os.environ.pop(name, None)
images = [{"x": torch.rand(8), "labels": 1} for _ in range(1000)]
schedule = torch.optim.lr_scheduler.ConstantLR(adam, factor=1.0)
arguments = TrainingArguments(
    # Not used: the Manager's step ends the training, because not all steps of the Trainer commit.
    max_steps=1_000_000,
    max_grad_norm=0,  # it would clip before the average; clip in on_pre_optimizer_step
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=images,
    callbacks=[Step()],
    optimizers=(Optimizer(manager, adam), schedule),
)
trainer.train()
manager.shutdown()
