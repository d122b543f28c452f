"""Lightning's Trainer with torchft, in a script with automatic optimization:

from torchft.lightning import TorchftStrategy
trainer = lightning.Trainer(devices=1, strategy=TorchftStrategy(global_batch_size=512), max_epochs=3)
trainer.fit(module, DataLoader(dataset, batch_size=32, shuffle=True))
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
from lightning.pytorch import LightningModule, Trainer  # pyrefly: ignore[missing-import]
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator  # pyrefly: ignore[missing-import]
from lightning.pytorch.callbacks import Callback, Checkpoint  # pyrefly: ignore[missing-import]
from lightning.pytorch.strategies import SingleDeviceStrategy  # pyrefly: ignore[missing-import]
from lightning.pytorch.trainer import call  # pyrefly: ignore[missing-import]
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from torchft._manager import signals
from torchft.job import Job, JobLoader, JobStep

# What the samples are trained on is decided by the job; the rest of a DataLoader's settings is kept.
_KEPT = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")


class TorchftStrategy(SingleDeviceStrategy):
    """Each item that the Trainer reads is a step of a :class:`torchft.Job`; a process is a group of one rank.

    A step is a batch of all groups together: that of ``training_step`` is a micro-batch with the
    ``batch_size`` of the DataLoader. A lost step comes again, so each sample counts once an epoch, and
    ``trainer.global_step``, ``trainer.current_epoch`` and all schedules count committed steps only; they are
    those of the others in a group that heals. ``training_step`` returns the mean loss of a micro-batch, or a
    dict with it; the output that callbacks get has the mean over all groups' batches. A GradScaler
    (``precision="16-mixed"``) takes over the scale of the others. One group writes the Trainer's checkpoints.

    Args:
        global_batch_size: samples of a step over all groups; a multiple of the DataLoader's ``batch_size``.
        settings: arguments of :class:`torchft.Job`, such as ``checkpoint_dir``, which a job resumes from.

    Attributes:
        job: the job; from the Trainer's ``setup`` hooks on.

    Raises:
        ValueError: by ``Trainer.fit``, for what would train differently in another number of groups:
            ``accumulate_grad_batches``, ``limit_train_batches``, a sampler, ``drop_last``, a schedule that
            follows a metric, ``ckpt_path``, manual optimization, or several ranks in a group; and for
            callbacks with a state, such as EarlyStopping, that their ``setup`` has not given to
            ``trainer.strategy.job.state(name, callback)``.
    """

    strategy_name = "torchft"
    job: Job

    def __init__(self, *, global_batch_size: int, **settings: Any) -> None:
        super().__init__()
        self._global_batch_size, self._settings = global_batch_size, settings
        self._steps: Optional[JobLoader] = None
        self._step: Optional[JobStep] = None  # the one that the Trainer has read last
        self._length = 0  # steps of an epoch

    @property
    def is_global_zero(self) -> bool:
        return getattr(self, "job", None) is None or self.job.manager.participating_rank() in (0, None)

    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, (CPUAccelerator, CUDAAccelerator)):
            raise ValueError(f"accelerator is {type(self.accelerator).__name__}: allowed are cpu and cuda")
        cuda = isinstance(self.accelerator, CUDAAccelerator)
        self.job = Job(device="cuda" if cuda else "cpu", **self._settings)
        if self.job._ranks > 1:
            raise ValueError(f"WORLD_SIZE is {self.job._ranks}: each process is a group of one rank here")
        self._root_device = self.job.device
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if not trainer.training and trainer.state.fn != "fit":
            return
        module = self.lightning_module
        plateau = [each.reduce_on_plateau for each in self.lr_scheduler_configs]
        own = [type(each).__name__ for each in trainer.callbacks if self._keeps_state(each)]
        for wrong, what in (
            (not module.automatic_optimization, "manual optimization: call step.commit() of a torchft.Job"),
            (trainer.accumulate_grad_batches != 1, "accumulate_grad_batches: choose global_batch_size"),
            (trainer.limit_train_batches != 1.0, "limit_train_batches: choose max_steps or max_epochs"),
            (any(plateau), "a schedule that follows a metric: groups would have different learning rates"),
            (own, f"callbacks with a state, which would not heal: {own}; give it to strategy.job.state()"),
            (trainer.ckpt_path is not None, "ckpt_path: TorchftStrategy(checkpoint_dir=...) resumes"),
        ):
            if wrong:
                raise ValueError(f"TorchftStrategy does not take {what}")
        self.model = self.job.prepare(module)
        self.job.prepare(*self.optimizers)
        if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:
            self.job.prepare(scaler)
        for i, config in enumerate(self.lr_scheduler_configs):
            self.job.state(f"scheduler.{i}", config.scheduler)
        # The loader clears gradients, before the forward pass. Schedules step in Lightning's order.
        module.optimizer_zero_grad = _nothing
        module.lr_scheduler_step = self._unless_lost(module.lr_scheduler_step)

    def _keeps_state(self, callback: Callback) -> bool:
        """Whether a callback has a state that heals with nothing, unless it only saves."""
        none = type(callback).state_dict is Callback.state_dict or isinstance(callback, Checkpoint)
        return not none and all(each is not callback for each in self.job._others.values())

    def _unless_lost(self, step: Callable[..., None]) -> Callable[..., None]:
        def stepped(*args: Any) -> None:
            if self._step is not None and self._step.counted:
                step(*args)

        return stepped

    def process_dataloader(self, dataloader: Any) -> Any:
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return dataloader
        if not isinstance(dataloader, DataLoader) or type(dataloader.sampler) not in (
            RandomSampler,
            SequentialSampler,
        ):
            raise ValueError("the training data has to be one DataLoader without a sampler of its own")
        if dataloader.drop_last or not dataloader.batch_size:
            raise ValueError("drop_last and batch_sampler: each sample counts once an epoch")
        epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else 1_000_000_000
        self._steps = self.job.loader(
            dataloader.dataset,
            global_batch_size=self._global_batch_size,
            micro_batch_size=dataloader.batch_size,
            shuffle=isinstance(dataloader.sampler, RandomSampler),
            epochs=epochs,
            **{name: value for name in _KEPT if (value := getattr(dataloader, name))},
        )
        assert self.job._loader is not None
        self._length = len(self.job._loader) // epochs
        return _Epoch(self.job, self._steps, self._length, trainer)

    def batch_to_device(
        self, batch: Any, device: Optional[torch.device] = None, dataloader_idx: int = 0
    ) -> Any:
        if isinstance(batch, JobStep):
            return batch  # the job moves its micro-batches
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, step: JobStep, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        trainer = module.trainer
        self._step, output = step, None
        for batch in step:
            trainer._logger_connector.on_batch_start(batch)  # for the batch size of what the step logs
            output = super().training_step(self.batch_to_device(batch), *args, **kwargs)
            loss = output["loss"] if isinstance(output, dict) else output
            call._call_callback_hooks(trainer, "on_before_backward", loss)
            call._call_lightning_module_hook(trainer, "on_before_backward", loss)
            step.backward(loss)
            call._call_callback_hooks(trainer, "on_after_backward")
            call._call_lightning_module_hook(trainer, "on_after_backward")
        return {**(output if isinstance(output, dict) else {}), "loss": torch.tensor(step.loss)}

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return closure_loss  # the passes are part of training_step

    def optimizer_step(
        self,
        optimizer: Any,
        closure: Callable[[], Any],
        model: Optional[LightningModule] = None,
        **kwargs: Any,
    ) -> Any:
        result, step = closure(), self._step
        assert step is not None
        if self.job._scaler is not None:
            for each in self.job._steppers:
                self.job._scaler.unscale_(each)
        self.precision_plugin._after_closure(model or self.lightning_module, optimizer)
        step.commit()
        self._count(step)
        return result

    def _count(self, step: JobStep) -> None:
        """Sets the Trainer's counters to the job's, before the Trainer counts this step as completed."""
        fit, loader = self.lightning_module.trainer.fit_loop, self.job._loader
        assert loader is not None
        epoch, done = loader.position.epoch, loader.position.batch
        if step.counted and done == 0:  # the position is behind the last batch of the epoch
            epoch, done = epoch - 1, self._length
        for progress, begun, ended in (
            (fit.epoch_progress.current, epoch + 1, epoch),
            (fit.epoch_loop.batch_progress.current, done, done - 1),
        ):
            progress.ready = progress.started = begun
            progress.processed = progress.completed = ended
        fit._data_fetcher.fetched = done
        fit._data_fetcher.done = fit.epoch_loop.batch_progress.is_last_batch = done == self._length
        fit.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = (
            self.job.step - 1
        )

    def on_train_start(self) -> None:
        """Puts back the job's handler of SIGTERM: Lightning's would end the process, in place of a drain."""
        connector = self.lightning_module.trainer._signal_connector
        if signal.SIGTERM in signals.installed() and signal.SIGTERM in connector._original_handlers:
            # and Lightning does not put it back after the job has removed it
            signal.signal(signal.SIGTERM, connector._original_handlers.pop(signal.SIGTERM))

    def on_train_end(self) -> None:
        """Leaves the job, after its last checkpoint."""
        assert self.job._loader is not None and self._steps is not None
        if self.job._loader.at_end:
            next(self._steps, None)
        else:
            self._steps._leave()

    def teardown(self) -> None:
        for name in ("optimizer_zero_grad", "lr_scheduler_step"):
            vars(self.lightning_module).pop(name, None)
        super().teardown()


class _Epoch:
    """The steps of a job. The Trainer takes those of an epoch, by its counters, and then begins anew."""

    def __init__(self, job: Job, steps: JobLoader, length: int, trainer: Trainer) -> None:
        self._job, self._steps, self._length, self._trainer = job, steps, length, trainer

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[JobStep]:
        if not 0 <= self._trainer.max_steps <= self._job.step:  # with the checkpoint of the last step
            yield from self._steps
        self._trainer.should_stop = True  # the job has ended, or this group was drained


def _nothing(*args: Any) -> None:
    pass
