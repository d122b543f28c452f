"""Hugging Face's Trainer with torchft, in place of the one of transformers:

from torchft.huggingface import TorchftTrainer
TorchftTrainer(model, arguments, train_dataset=texts, global_batch_size=512).train()
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import MethodType
from typing import Any, Optional

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback  # pyrefly: ignore[missing-import]
from transformers.trainer_callback import ExportableState  # pyrefly: ignore[missing-import]

from torchft.job import Job, JobLoader, JobStep


class TorchftTrainer(Trainer):
    """Each item that the Trainer reads is a step of a :class:`torchft.Job`; a process is a group of one rank.

    A step is a batch of all groups together, and ``per_device_train_batch_size`` that of one backward pass. A
    lost step, or one with infinities in fp16, is made again before the Trainer counts it. So each sample
    counts once an epoch, and ``state.global_step``, ``state.epoch``, the Trainer's own schedule and its
    scaler are those of the job: a group that heals takes them over. Logged losses are means over all
    groups' batches. One group writes the Trainer's checkpoints.

    Args:
        args: of the Trainer, like ``kwargs``.
        global_batch_size: samples of a step over all groups; a multiple of ``per_device_train_batch_size``.
        job: arguments of :class:`torchft.Job`, such as ``checkpoint_dir``, which a job resumes from.

    Attributes:
        job: the job, while :meth:`train` runs and after it.

    Raises:
        ValueError: for what would train differently in another number of groups, or is torchft's part:
            ``gradient_accumulation_steps``, ``dataloader_drop_last``, a schedule that follows a metric,
            ``resume_from_checkpoint``, FSDP, DeepSpeed, several ranks in a group, or data without a length;
            and for what a group that heals would do at other steps: ``eval_strategy="epoch"``,
            ``save_strategy`` "epoch" or "best", ``load_best_model_at_end``, and callbacks with a state, such
            as EarlyStoppingCallback.
    """

    job: Job

    def __init__(
        self, *args: Any, global_batch_size: int, job: Optional[dict[str, Any]] = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._global_batch_size, self._settings = global_batch_size, job or {}
        self._steps: Optional[JobLoader] = None
        self._averaged: nn.Module  # the model as the job uses it
        self._max_norm = 0.0
        self.add_callback(_Counters(self))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        own, callbacks = self.args, self.callback_handler.callbacks
        kept = [type(each).__name__ for each in callbacks if isinstance(each, ExportableState)]
        # A group that heals or resumes begins its own epochs in the middle of the others'.
        chosen = {name: str(getattr(own, name).value) for name in ("eval_strategy", "save_strategy")}
        uneven = [f"{name}={value!r}" for name, value in chosen.items() if value not in ("no", "steps")]
        for wrong, what in (
            (resume_from_checkpoint, "resume_from_checkpoint: job={'checkpoint_dir': ...} resumes"),
            (own.gradient_accumulation_steps != 1, "gradient_accumulation_steps: choose global_batch_size"),
            (own.dataloader_drop_last, "dataloader_drop_last: each sample counts once an epoch"),
            (own.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"), "a schedule that follows a metric"),
            (kept, f"callbacks with a state, which would not heal: {kept}; max_steps ends a job"),
            (own.load_best_model_at_end, "load_best_model_at_end: which one is best would not heal"),
            (uneven, f"{', '.join(uneven)}: allowed are 'no' and 'steps'"),
            (self.is_fsdp_enabled or self.is_deepspeed_enabled, "FSDP or DeepSpeed: use torchft.Job"),
            (self.accelerator.num_processes != 1, "several ranks in a group: each process is a group"),
            (isinstance(self.train_dataset, IterableDataset), "data without a length: use torchft.Job"),
        ):
            if wrong:
                raise ValueError(f"TorchftTrainer does not take {what}")
        # Gradients are clipped before the vote, which is part of training_step.
        self._max_norm, own.max_grad_norm = own.max_grad_norm, 0.0
        try:
            return super().train(None, *args, **kwargs)
        finally:
            own.max_grad_norm = self._max_norm

    def get_train_dataloader(self) -> Any:
        return _Epoch(self)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        self.optimizer.step = MethodType(_nothing, self.optimizer)  # the vote is part of training_step
        return super().create_scheduler(*args, **kwargs)

    def _begin(self) -> JobLoader:
        """Begins the job, when the Trainer has made optimizer and schedule, and reads its first item."""
        own = self.args
        self.job = Job(device="cuda" if own.device.type == "cuda" else "cpu", **self._settings)
        optimizer = self.optimizer  # Accelerate's
        self._averaged, _ = self.job.prepare(self.model, optimizer.optimizer)
        if self.accelerator.scaler is not None:
            self.job.prepare(self.accelerator.scaler)
        self.job.state("scheduler", self.lr_scheduler)
        steps = self.state.max_steps
        return self.job.loader(
            self.train_dataset,
            global_batch_size=self._global_batch_size,
            micro_batch_size=own.per_device_train_batch_size,
            epochs=math.ceil(steps / len(self.get_train_dataloader())),
            seed=own.data_seed or own.seed,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator, description="training"),
            num_workers=own.dataloader_num_workers,
        )

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        step: JobStep = inputs["step"]
        model.train()
        while True:
            for batch in step:
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(self._averaged, batch)
                step.backward(loss)
            if self._max_norm > 0:
                step.clip(self._max_norm)
            mean = torch.tensor(step.loss, device=self.args.device)
            if step.commit():
                break
            assert self._steps is not None
            again = next(self._steps, None)
            if again is None:  # this group was drained
                self.control.should_training_stop = True
                break
            step = again
        self.state.global_step = self.job.step - 1  # the Trainer counts this step afterwards
        return mean


class _Epoch:
    """The steps of a job. The Trainer takes as many as an epoch has, and then begins anew."""

    def __init__(self, trainer: TorchftTrainer) -> None:
        self._trainer, self.dataset = trainer, trainer.train_dataset

    def __len__(self) -> int:
        return math.ceil(len(self.dataset) / self._trainer._global_batch_size)

    def __iter__(self) -> Iterator[dict[str, JobStep]]:
        trainer = self._trainer
        if trainer._steps is None:
            trainer._steps = trainer._begin()
        # With the checkpoint of the last step there is none.
        for step in trainer._steps if trainer.job.step < trainer.state.max_steps else ():
            yield {"step": step}
        trainer.control.should_training_stop = True


class _Counters(TrainerCallback):
    """Sets the Trainer's epoch to the job's, also in a group that heals; ends the job after the training."""

    def __init__(self, trainer: TorchftTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.epoch = state.global_step / len(self._trainer.get_train_dataloader())
        control.should_save &= self._trainer.job.manager.participating_rank() == 0

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save &= self._trainer.job.manager.participating_rank() == 0

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        job, steps = self._trainer.job, self._trainer._steps
        assert job._loader is not None and steps is not None
        if job._loader.at_end:
            next(steps, None)  # after the last checkpoint, it leaves the job
        else:
            steps._leave()


def _nothing(*args: Any) -> None:
    pass
