"""A training job as one object: the parts of torchft, made from the environment, and the rules of a loop.

    job = torchft.Job()
    model, optimizer = job.prepare(net, adam)
    for step in job.loader(dataset, global_batch_size=512, micro_batch_size=32):
        for batch in step:
            step.backward(criterion(model(batch[0]), batch[1]))
        step.commit()

It decides nothing: each line here can be written with the published names, as in docs/training_loops.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Optional

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchft._job import parameters, values
from torchft._job.checkpoints import Checkpoints, check_every
from torchft._job.start import connect, end_with_torchrun, group_mesh, group_name, pick_device
from torchft._manager.snapshots.copies import State
from torchft.data._stream_reader import is_stream
from torchft.data.loader import ElasticDataLoader
from torchft.manager import JobFinished, Manager
from torchft.optim import OptimizerWrapper

if TYPE_CHECKING:
    from os import PathLike

    from torch.distributed.device_mesh import DeviceMesh

    from torchft.data._step import LoaderStep, Unit

_STATE_KEY = "torchft.job"  # of this rank's objects in the state of a heal
_OWN_KEYS = ("model", "optimizer", "manager", "data")


class Job:
    """One rank of a training job: its process group, Manager, state and signals, made from the environment.

    torchrun and ``torchft run`` set the environment; ``python script.py`` is a group of one rank. It needs
    TORCHFT_LIGHTHOUSE. REPLICA_GROUP_ID names the group; default: the index of a task of Kubernetes or Slurm,
    or 0. SIGTERM makes the group leave after the step that comes next.

    Args:
        device: "cpu", "cuda", or "auto": a GPU of this rank if there is one.
        isolated: run operations between groups in another process, which can be killed.
        reproducible: weights have the same bits however many groups there are, and whatever fails
            (``Manager(reproducible_reduction=True)``); costs 8 bytes for each element of a parameter.
        checkpoint_dir: the folder to resume from and to save to, in the format of
            torch.distributed.checkpoint, shared by the hosts of a group; None: no checkpoints.
        checkpoint_every: committed steps between two checkpoints, at least 1; the last step has one, too.
            They are written from the copy in shared memory, while training goes on; without ``snapshots``,
            when the loop asks for the next step.
        manager: a Manager to use in place of the one that is made; ``isolated`` and ``reproducible`` are its
            settings then.
        settings: further arguments of :class:`Manager`: ``timeout``, ``heal``, ``compare_commits``, …
            ``snapshots`` is "auto": if all groups fail, the next ones go on from a copy in shared memory.
            ``replay_failed_step`` is on: when a group fails in mid-step, the others compute its units only.
            False saves the memory of a copy of the gradients.

    Attributes:
        device: the device of this rank.
        name: "group G rank R", for logs.
        manager: the Manager, for all that this class does not do.

    Raises:
        ValueError: a setting is missing or out of range.
    """

    def __init__(
        self,
        *,
        device: str = "auto",
        isolated: bool = False,
        reproducible: bool = False,
        checkpoint_dir: Optional[str | PathLike[str]] = None,
        checkpoint_every: int = 100,
        manager: Optional[Manager] = None,
        **settings: Any,
    ) -> None:
        if manager is not None and (settings or isolated or reproducible):
            raise ValueError(
                f"manager was given: {[*settings, 'isolated', 'reproducible']} are its own settings"
            )
        check_every(checkpoint_every)
        self.device = pick_device(device)
        if manager is None:
            end_with_torchrun()
            manager = connect(self.device, isolated, reproducible_reduction=reproducible, **settings)
        self.manager = manager
        self._checkpoints = Checkpoints(checkpoint_dir, checkpoint_every, manager)
        self.name = f"group {group_name()} rank {manager._settings.group_rank}"
        self._ranks = manager._settings.group_world_size
        self._models: list[nn.Module] = []  # as they were given
        self._wrapped: list[nn.Module] = []  # as the loop uses them
        self._optimizers: list[Optimizer] = []
        self._steppers: list[Optimizer] = []  # as the loop uses them
        self._schedulers: list[LRScheduler] = []
        self._scaler: Optional[GradScaler] = None
        self._losses: values.LossSum  # from the first model on
        self._others: dict[str, Any] = {}
        self._stage: Optional[str] = None  # key of this rank's part of a checkpoint
        self._loader: Optional[ElasticDataLoader] = None
        self._mesh: Optional[DeviceMesh] = None
        manager.register_state_dict_fn(_STATE_KEY, self._load_state, self._state)

    # Before the loop

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks of this group, as one dimension "shard", for ``fully_shard``."""
        if self._mesh is None:
            self._mesh = group_mesh(self.device)
        return self._mesh

    def prepare(self, *objects: Any) -> Any:
        """Takes what the loop trains, and returns it as the loop is to use it: one object, or a tuple.

        A model comes back in a :class:`DistributedDataParallel`, or, if ``fully_shard`` has sharded it, as it
        is. An optimizer comes back in an :class:`OptimizerWrapper`. Schedulers step after each commit, a
        GradScaler scales in :meth:`JobStep.backward`; any other object goes through :meth:`state`.

        Raises:
            TypeError: an object has no ``state_dict`` and ``load_state_dict``.
            ValueError: the object does not fit those given before.
        """
        if self._loader is not None:
            raise ValueError("prepare() comes before loader(): the first step may have begun")
        made = tuple(self._prepare(each) for each in objects)
        return made[0] if len(made) == 1 else made

    def _prepare(self, given: Any) -> Any:
        parameters.check_plain(given)
        stage = parameters.is_stage(given)
        if stage or isinstance(given, nn.Module):
            self._models.append(given.submod if stage else given)
            if len(self._models) == 1:
                self._losses = values.LossSum(self._models[0], self.device)
            self._wrapped.append(given.submod if stage else self._wrap(given))
            self._stage = f"stage {self.manager._settings.group_rank}" if stage else self._stage
            return given if stage else self._wrapped[-1]
        if isinstance(given, Optimizer):
            self._optimizers.append(given)
            self._steppers.append(given if self._averages_weights else OptimizerWrapper(self.manager, given))
            return self._steppers[-1]
        if isinstance(given, GradScaler):
            if self._scaler is not None:
                raise ValueError("a GradScaler was given already: one scales all losses of a step")
            self._scaler = given
        if isinstance(given, LRScheduler):
            self._schedulers.append(given)
        return self.state(f"{type(given).__name__}.{len(self._others)}", given)

    def _wrap(self, model: nn.Module) -> nn.Module:
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if self._averages_weights:
            return model
        for module in sharded if not self._reproducible else ():  # then the loader reduces
            module.set_all_reduce_hook(self._average)
        return model if sharded else values.DistributedDataParallel(self.manager, model, self._losses)

    @property
    def _averages_weights(self) -> bool:
        """Whether LocalSGD or DiLoCo average weights, in place of the gradients of each step."""
        return self.manager._data.averages_weights

    def _average(self, gradient: torch.Tensor) -> None:
        self.manager.allreduce(gradient).wait()

    def state(self, name: str, given: Any) -> Any:
        """Adds an object to the state of a heal and of checkpoints, and returns it.

        Args:
            name: of the object; the same in all groups.
            given: an object with ``state_dict()`` and ``load_state_dict(state)``, equal in all groups. In a
                checkpoint, tensors are those of one rank of a group, unless they are DTensors.
        """
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(given, method, None)):
                raise TypeError(f"{name}: a {type(given).__name__} has no {method}, so none could heal it")
        if name in self._others or name in _OWN_KEYS:
            raise ValueError(f"name={name!r} is taken: allowed is any name but {[*_OWN_KEYS, *self._others]}")
        self._others[name] = given
        return given

    def loader(
        self, dataset: Any, *, global_batch_size: int, micro_batch_size: int, **options: Any
    ) -> JobLoader:
        """Makes the loop over the steps of the job. It resumes from the newest checkpoint, and ends in all
        groups at once, or when this group is drained.

        Args:
            dataset: as in :class:`ElasticDataLoader`, like the other arguments. Unless it is a stream, random
                numbers depend on the unit alone (``reproducible_rng``).
        """
        if self._loader is not None:
            raise ValueError("this job has a loop already: one serves all epochs (epochs=...)")
        self._checkpoints.check_state(self._averages_weights)
        parameters.check_models(self._models, self._optimizers)
        parameters.check_scaler(self._scaler, self._models, self._ranks)
        for name in ("shuffle", "reproducible_rng"):  # a stream has an order and random numbers of its own
            options.setdefault(name, not is_stream(dataset))
        self._loader = ElasticDataLoader(
            self.manager,
            dataset,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            **options,
        )
        if self._scaler is not None and not self._averages_weights:
            self._loader.compare(self._scaler.get_scale)
            # A group that heals takes over the scale before gradients are multiplied and divided by it.
            self.manager._use_async_quorum = False
        for parameter in values.replicated(self._wrapped, self._loader):
            dist.broadcast(parameter.detach(), 0)  # ranks heal from others' counterparts: all begin alike
        self.manager._snapshots.state = State(self._checkpoint, self._resume, self._before_loading)
        self._checkpoints.resume(self._read_into, self._resume)
        return JobLoader(self, self._loader)

    # State

    def _state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(parameters.root_of(self._models)),
            # Not get_optimizer_state_dict: it gives a new optimizer a state by a step, which Adam counts.
            "optimizer": [optimizer.state_dict() for optimizer in self._optimizers],
            **{name: each.state_dict() for name, each in self._others.items()},
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        set_model_state_dict(parameters.root_of(self._models), state["model"])
        for optimizer, of in zip(self._optimizers, state["optimizer"]):
            optimizer.load_state_dict(of)
        self._load_others(state)

    def _load_others(self, state: dict[str, Any]) -> None:
        for name, each in self._others.items():
            each.load_state_dict(state[name])

    def _checkpoint(self) -> dict[str, Any]:
        """Returns the state of a checkpoint, by the names of parameters: for any number of ranks."""
        assert self._loader is not None
        model, optimizer = get_state_dict(parameters.root_of(self._models), self._optimizers)
        others = {name: each.state_dict() for name, each in self._others.items()}
        own = {"model": model, "optimizer": optimizer, **others}
        common = {"manager": self.manager.state_dict(), "data": self._loader.state_dict()}
        return {**common, **(own if self._stage is None else {self._stage: own})}

    def _before_loading(self) -> dict[str, Any]:
        """Returns what a rank has before it loads a copy. An optimizer has no state yet, and gets none here:
        that would take a step of it.
        """
        others = {name: each.state_dict() for name, each in self._others.items()}
        own = {"model": get_model_state_dict(parameters.root_of(self._models)), "optimizer": {}, **others}
        return {"manager": {}, "data": {}, **(own if self._stage is None else {self._stage: own})}

    def _read_into(self) -> dict[str, Any]:
        """Returns the state that a checkpoint is read into."""
        parameters.forget_gradients(self._optimizers)
        return self._checkpoint()

    def _resume(self, state: dict[str, Any]) -> None:
        assert self._loader is not None
        parameters.forget_gradients(self._optimizers)
        own = state if self._stage is None else state[self._stage]
        model, optimizer = own["model"], own["optimizer"]
        root = parameters.root_of(self._models)
        set_state_dict(root, self._optimizers, model_state_dict=model, optim_state_dict=optimizer)
        self._load_others(own)
        self.manager.load_state_dict(state["manager"])
        self._loader.load_state_dict(state["data"])

    # The loop

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self.manager.current_step()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Surrounds an evaluation, a checkpoint or a compilation: :meth:`torchft.Manager.phase`."""
        return self.manager.phase(name)

    @property
    def _reproducible(self) -> bool:
        return self.manager._settings.reproducible_reduction

    def _reduce(self) -> torch.Tensor:
        """Reduces what the models or the loader do not reduce themselves. Returns the mean loss."""
        averaged = self._reproducible or self._losses.carried
        if not (self._reproducible or self._averages_weights):
            own = [] if averaged else [self._losses]
            parameters.reduce_plain([*self._wrapped, *own], self.manager)
            if (group := dist.group.WORLD) is not None:
                assert self._loader is not None
                parameters.average_in_group(values.replicated(self._wrapped, self._loader), group)
        return self._losses.mean(averaged)

    def shutdown(self) -> None:
        """Leaves the job. The loop calls it at its end, and the process at its own."""
        if self._ranks > 1 and dist.is_initialized():
            dist.barrier()  # rank 0 ends the manager server, from which the others need their last quorum
        self.manager.shutdown(finished=not self.manager.draining())


class JobLoader(Iterator["JobStep"]):
    """The steps of a job, each a batch of all groups together. A step that is not committed comes again."""

    def __init__(self, job: Job, loader: ElasticDataLoader) -> None:
        self._job = job
        self._loader = loader
        self._last: Optional[JobStep] = None

    def __next__(self) -> JobStep:
        job = self._job
        if self._last is not None and not self._last.ended:
            error = RuntimeError(f"step {job.step + 1} was not ended: call step.commit() after its batches")
            job.manager.report_error(error)  # the other groups must not wait for this one
            raise error
        if self._last is not None and self._last.counted:
            job._checkpoints.save(job._checkpoint, last=self._loader.at_end)  # with what the loop did since
        try:
            step = next(self._loader)
        except StopIteration:
            self._last = None  # it is saved
            job._checkpoints.end()
            job.shutdown()
            raise
        except JobFinished:
            job.shutdown()
            if self._loader.at_end:  # it has begun with the weights of the last step
                raise StopIteration from None
            raise
        for optimizer in job._steppers:
            optimizer.zero_grad()
        job._losses.zero_grad()
        self._last = JobStep(job, step)
        return self._last

    def _leave(self) -> None:
        """Ends the loop here, at the same step in all groups, after the checkpoint of that step."""
        if self._last is not None and self._last.counted:
            self._job._checkpoints.save(self._job._checkpoint, last=True)
            self._job._checkpoints.end()
        self._job.shutdown()


class JobStep:
    """One step of all groups: iterate over its batches, then call :meth:`commit`."""

    def __init__(self, job: Job, step: LoaderStep) -> None:
        self._job = job
        self._step = step
        self._unit: Optional[Unit] = None
        self._backward = False  # whether the unit had its backward pass
        self.ended, self.counted, self._reduced = False, False, 0
        self._loss: Optional[torch.Tensor] = None

    @property
    def epoch(self) -> int:
        """The epoch of this step's batch, from 0."""
        return self._step.position.epoch

    @property
    def participants(self) -> int:
        """The number of groups whose batches count."""
        return self._step.participants

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of this rank, on its device. Each belongs into one call of :meth:`backward`."""
        job = self._job
        for unit in self._step:
            with unit.accumulate(*job._wrapped, job._losses):
                self._unit, self._backward = unit, False
                yield values.on_device(unit.data, job.device)
                if not self._backward:
                    raise RuntimeError(
                        "a batch had no backward pass: call step.backward(loss) for each batch of a step; "
                        "one that must not count has a loss multiplied by 0"
                    )
        self._unit = None
        self._loss = job._reduce()
        self._reduced = len(job.manager._current.inputs)

    def backward(self, loss: torch.Tensor) -> None:
        """Runs the backward pass of a batch, once. Gradients are reduced during that of the last one.

        Args:
            loss: the mean over the samples of the batch, a tensor of one element.
        """
        values.check_loss(loss)
        scaler, weighted = self._job._scaler, loss * self.weight
        scaled = weighted if scaler is None else scaler.scale(weighted)
        self._run(scaled, self._job._losses(weighted))

    @property
    def weight(self) -> float:
        """The factor of this batch's mean loss, for a schedule of pipeline stages."""
        return self._current("weight").weight

    def ran(self, weighted: Optional[torch.Tensor] = None) -> None:
        """Declares that both passes of this batch have run, in place of :meth:`backward`.

        Args:
            weighted: its loss times :attr:`weight`, of one element; None in a rank that computes no loss.
        """
        self._run(*(() if weighted is None else (self._job._losses(weighted),)))

    def _run(self, *losses: torch.Tensor) -> None:
        self._current("backward()")
        if self._backward:
            raise RuntimeError("step.backward() was called twice for a batch: give it the sum of the losses")
        torch.autograd.backward(losses)
        self._backward = True

    def _current(self, what: str) -> Unit:
        if self._unit is None:
            raise RuntimeError(f"step.{what} belongs into `for batch in step`, once for each batch")
        return self._unit

    def _batches_ended(self, what: str) -> None:
        """Refuses what would use gradients that the last batch, or its end, has not completed."""
        if self._unit is not None:
            raise RuntimeError(f"step.{what}() belongs after `for batch in step`, run to its end")

    @property
    def loss(self) -> float:
        """The mean of the losses over the samples of all groups' batches (with LocalSGD and DiLoCo, of this
        group's); NaN if a group failed in this step.

        Raises:
            RuntimeError: it was called before the end of the batches.
        """
        if self._loss is None:
            raise RuntimeError("step.loss belongs after `for batch in step`, run to its end")
        return math.nan if self._step.failed else self._loss.item()

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients so that their norm is at most ``max_norm``. Call it between the batches and
        :meth:`commit`.

        Returns:
            The norm of all gradients before, a tensor of one element.

        Raises:
            RuntimeError: it was called before the end of the batches.
        """
        self._batches_ended("clip")
        job = self._job
        if job._scaler is not None:
            for optimizer in job._steppers:
                job._scaler.unscale_(optimizer)
        assert job._loader is not None
        stages = job._ranks > 1 and job._loader.data_world_size == 1
        return parameters.clip((p for model in job._models for p in model.parameters()), max_norm, stages)

    def commit(self) -> bool:
        """Ends the step: if all ranks of this group have the sum of all gradients, optimizers and schedulers
        step.

        Returns:
            Whether the step counts. If not, its batch comes again. With LocalSGD and DiLoCo always True.

        Raises:
            RuntimeError: it was called before in this step, or before the end of the batches.
        """
        if self.ended:
            raise RuntimeError("step.commit() was called twice: a step ends once")
        self._batches_ended("commit")
        values.check_reduced_once(self._job.manager, self._reduced)
        self.ended = True
        job = self._job
        # With infinities there is no vote: then the batch comes again.
        for optimizer in job._steppers if parameters.finite(job._scaler, job._steppers) else ():
            optimizer.step() if job._scaler is None else job._scaler.step(optimizer)
        if job._scaler is not None:
            job._scaler.update()
        if self._step.committed is False or (self._step.committed is None and not job._averages_weights):
            return False
        self.counted = True
        for scheduler in job._schedulers:
            scheduler.step()
        return True
