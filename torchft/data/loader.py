"""A data loader for groups that fail and join: each sample counts once per epoch, in batches independent of
the groups.

:mod:`torchft.data.position` decides which samples a step trains on, and which rank computes which of them.
The Manager knows the groups of a step and whether it is committed (``torchft/_manager/checks/loader.py``).
This module connects both with PyTorch's DataLoader.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, Optional

import torch

from torchft._manager.checks.audit import chosen
from torchft._manager.edge import device_of
from torchft.data._lanes import lanes_of_indices, lanes_of_stream
from torchft.data._prefetch import Key, ReadFailed, Task
from torchft.data._reproducible import ReproducibleSum, add_in_group, group_of_ranks
from torchft.data._skipped import SkippedUnits
from torchft.data._source_states import SourceStates
from torchft.data._step import AuditedUnit, LoaderStep, Membership, Unit, UnitsSkipped
from torchft.data._stream_reader import Read, is_stream, shards_of
from torchft.data.agreement import GroupAction, next_action
from torchft.data.local_steps import Account
from torchft.data.position import DataPlan, DataPosition, PlannedUnit, PositionDiffers, RankShare
from torchft.data.streams import StreamPlan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from torchft._manager.checks.loader import LocalSteps
    from torchft._manager.quorum.plan import Plan
    from torchft._manager.settings import Settings
    from torchft.manager import Manager

logger: logging.Logger = logging.getLogger(__name__)

# Others may have other kernels, and other random numbers for the same seed.
_TORCH = ".".join(torch.__version__.split(".")[:2])
STATE_KEY = "torchft.data"  # key of the position in the state of a heal
_OF_NO_STEP = "of_no_step"  # marks a state that was saved with weights of no step

# Arguments of PyTorch's DataLoader that are refused because the job's plan determines them.
_DECIDED = {
    "batch_size": "give global_batch_size and micro_batch_size",
    "sampler": "the order is that of shuffle and seed",
    "batch_sampler": "the batches are those of global_batch_size and micro_batch_size",
    "drop_last": "the last batch of an epoch holds what is left: each sample counts once",
    "in_order": "units are taken in their order",
}


class ElasticDataLoader:
    """Yields the units of this rank for each step, for any number of participating groups.

    An iteration begins a step of the Manager, and waits until its quorum is known. A step that is not
    committed is repeated, divided among the groups of the next quorum. All groups of a job must have such a
    loader, with equal settings. The gradients of a step are the sum over groups, which is not divided,
    because each loss is multiplied by ``unit.weight``.

    Make it before the first step. With ``replay_failed_step`` groups keep the gradients of a step that a peer
    has failed in, and the repeated step has only the units of which no group keeps any: docs/replay.md. With
    LocalSGD and DiLoCo a step of the loader is one of the inner optimizer, which is never repeated, and
    samples may be lost: :attr:`lost` counts them.

    Args:
        manager: the Manager of this rank.
        dataset: map-style dataset with a length, or a stream: an IterableDataset, a streaming dataset of
            Hugging Face, or anything else whose ``__iter__`` begins anew; the same in all groups.
        global_batch_size: samples of a step, over all groups; the number of groups does not matter.
        micro_batch_size: samples of a unit; divides ``global_batch_size``.
        shuffle: whether each epoch has a new order; False for a stream.
        seed: seed of the epochs' orders.
        epochs: number of epochs, after which the iteration ends in all groups at once.
        data_rank: number of this rank among the ranks of its group that read different data; default: its
            rank in the group. Ranks of one data rank (tensor or pipeline parallelism) pass the same number.
        data_world_size: the number of different data ranks in a group; default: the number of its ranks.
        reduction_in_group: how gradients are reduced over those ranks: "mean", as FSDP2 does, or "sum". With
            the Manager's ``reproducible_reduction`` this is ignored, and gradients are added.
        data_group: process group of the ranks of this replica group, in which ``reproducible_reduction``
            adds, and a stream's samples are counted; default: PyTorch's default one.
        reproducible_rng: whether random numbers depend only on seed, epoch and unit, and not on the rank:
            those of the dataset (torch, random, and numpy if it is imported), and torch's in
            :meth:`Unit.accumulate`.
        on_poison: what happens to a unit with which two groups, or two lives of one, end by the same
            exception: "stop" (the job ends, once, with status 65), or "skip": all groups leave the unit out,
            as if its loss was 0. The file ``torchft_skipped_units.jsonl`` in the working directory of a rank
            0 gets a line with its indices, and so does the log.
        dataloader: further arguments of PyTorch's DataLoader: ``num_workers``, ``collate_fn``,
            ``pin_memory``, …

    Raises:
        TypeError: an iterator, which can be read once, or an argument of DataLoader that the plan determines.
        ValueError: a setting is out of range, or the Manager has a setting that excludes a loader.
    """

    def __init__(
        self,
        manager: Manager,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int = 1,
        data_rank: Optional[int] = None,
        data_world_size: Optional[int] = None,
        reduction_in_group: str = "mean",
        data_group: Optional[ProcessGroup] = None,
        reproducible_rng: bool = False,
        on_poison: str = "stop",
        **dataloader: Any,
    ) -> None:
        if not is_stream(dataset):
            _check_dataset(dataset)
        for name, instead in _DECIDED.items():
            if name in dataloader:
                raise TypeError(f"{name}={dataloader[name]!r}: ElasticDataLoader takes no {name}; {instead}")
        if reduction_in_group not in ("mean", "sum"):
            raise ValueError(f"reduction_in_group is {reduction_in_group!r}: allowed are 'mean' and 'sum'")
        if on_poison not in ("stop", "skip"):
            raise ValueError(f"on_poison is {on_poison!r}: allowed are 'stop' and 'skip'")
        if (data_rank is None) != (data_world_size is None):
            raise ValueError(
                f"data_rank is {data_rank}, and data_world_size is {data_world_size}: they belong together"
            )
        settings = manager._settings
        self._manager = manager
        self._stream: Optional[StreamPlan] = None
        self._audits = manager._audits if settings.audit else None
        if self._audits is not None and not (reproducible_rng and not is_stream(dataset)):
            raise ValueError(
                f"audit={settings.audit:g} needs units that any group computes alike: give "
                "reproducible_rng=True and a dataset with __getitem__ and __len__, or audit=0"
            )
        if is_stream(dataset):
            _check_stream(shuffle, reproducible_rng, on_poison == "skip", settings)
            self._stream = StreamPlan.of(global_batch_size, micro_batch_size, epochs, shards_of(dataset))
        self._plan = self._stream or DataPlan(
            len(dataset), global_batch_size, micro_batch_size, shuffle, seed, epochs
        )
        self._left_out = SkippedUnits(on_poison == "skip", self._plan, manager._logger)
        # A share is computed when its units are read ahead, by each lane, and again in its step.
        self._shares = lru_cache(maxsize=32)(self._plan.share)
        self._position = DataPosition()
        self._data_rank = settings.group_rank if data_rank is None else data_rank
        self._data_world_size = settings.group_world_size if data_world_size is None else data_world_size
        self._factor = self._data_world_size if reduction_in_group == "mean" else 1
        self._speeds: tuple[int, ...] = ()  # by which the last step was cut
        self._compared: list[Callable[[], float]] = []
        self._scale = 1.0  # factor for losses with LocalSGD and DiLoCo, whose groups do not sum gradients
        self._reduction_in_group = reduction_in_group
        self._reproducible_rng = reproducible_rng
        self.share(None, 1)  # raises for a data rank that is out of range
        self._exact: Optional[ReproducibleSum] = None
        if settings.reproducible_reduction:
            group = group_of_ranks(manager, self._data_world_size, data_group, "reproducible_reduction=True")
            self._exact = ReproducibleSum(manager, self._plan.num_units(DataPosition()), group)
            self._factor = 1

        self._source_states = SourceStates()  # of a stream
        self._states_loaded = False  # whether workers that run do not have those states
        self._lanes = (
            lanes_of_indices(dataset, self._seed if reproducible_rng else None, **dataloader)
            if self._stream is None
            else lanes_of_stream(dataset, self._stream, self._source_states, **dataloader)
        )
        self._in_group: Optional[ProcessGroup] = None  # in which its ranks add up what they have read
        if self._stream is not None and self._data_world_size > 1:
            self._in_group = group_of_ranks(manager, self._data_world_size, data_group, "a stream")
        self._kept_counted = 0  # of a stream: what this rank has counted in the last attempt at a step
        self._ended = 0  # of a stream: the turns that have ended in this epoch, see StreamPlan.after
        # of a stream: position and ended turns after this step
        self._following: Optional[tuple[DataPosition, int]] = None
        # membership, skipped units and position of the forecast's next step
        self._forecast: Optional[tuple[Membership, frozenset[str], DataPosition]] = None
        # The last unit of a group that does not participate. One that heals over steps stays at its position.
        self._again: Optional[tuple[Key, Any]] = None
        self._account = Account()  # counts the samples of LocalSGD's or DiLoCo's inner steps
        self._local_steps: Optional[LocalSteps] = None
        self._counted = 0
        self._step: Optional[LoaderStep] = None  # the step that has begun and is not decided
        self._skipped: Optional[UnitsSkipped] = None  # why the last step was lost
        manager._attach_loader(self)
        manager.register_state_dict_fn(STATE_KEY, self.load_state_dict, self._state)
        manager.register_commit_hook(self._decided)

    # Positions

    @property
    def position(self) -> DataPosition:
        """The position of the next step: epoch and batch, from 0."""
        return self._position

    @property
    def data_world_size(self) -> int:
        """The number of different data ranks in a group."""
        return self._data_world_size

    @property
    def settings(self) -> list[str]:
        """The settings that must be equal in all groups, one per line: else gradients have no common mean."""
        return [
            *(f"{name}={getattr(self._plan, name)}" for name in self._plan.compared),
            f"data_world_size={self._data_world_size}",
            f"reduction_in_group={self._reduction_in_group}",
            f"reproducible_rng={self._reproducible_rng}",
            f"torch={_TORCH}",
            *(["on_poison=skip"] if self._left_out.enabled else []),
        ]

    @property
    def digest(self) -> str:
        """A digest (64 bits in hex) of settings, position, the scales of ``reproducible_reduction`` and the
        values of :meth:`compare`, equal in all groups.
        """
        digest = self._plan.digest(self._position)
        more = [str(self._ended)] if self._ended else []
        more += [] if self._exact is None else [self._exact.digest]
        more += [str(value()) for value in self._compared]
        if not more:
            return digest
        return hashlib.sha256(" ".join([digest, *more]).encode()).hexdigest()[:16]

    def compare(self, value: Callable[[], float]) -> None:
        """Compares a value with the positions of the groups: the scale of a ``torch.amp.GradScaler``, which
        one group alone lowers if a step fails before the others see its infinities. A group that differs from
        the first one heals. Call it before the first step, in all groups.

        Args:
            value: returns the value, which is part of the state of a heal: ``scaler.get_scale``, say.
        """
        self._compared.append(value)

    def state_dict(self) -> dict[str, Any]:
        """The position, for a checkpoint. It belongs to the weights after the optimizer's step, so save both
        then. It is the same in all groups, but for the states of a stream's readers. A job may resume from it
        with any number of groups.

        While this group heals in passing, its weights are of no step. A state of that time cannot be loaded,
        so that no job resumes from a checkpoint with such weights.
        """
        state = self._state()
        if self._manager._weights_are_inconsistent():
            state[_OF_NO_STEP] = True
        return state

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(self._plan.save(self._position))
        if self._local_steps is not None:
            state["samples"] = self._account.save()
        if self._exact is not None:
            state["scales"] = self._exact.state_dict()
        if self._stream is not None:
            state["ended"] = self._ended
            at = self._position
            if readers := self._source_states.save(at.epoch, self._stream.first_block(at)):
                state["readers"] = readers
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues at the position of a :meth:`state_dict`.

        Raises:
            PositionDiffers: it was saved with another dataset, seed or global batch size.
            ValueError: it was saved while a group healed in passing, with weights of no step; or, with
                ``reproducible_reduction``, it belongs to another model.
        """
        if state_dict.get(_OF_NO_STEP):
            raise ValueError(
                "the checkpoint was saved while its group healed in passing; its weights are of no step: "
                "use another one, and save only after a step that was committed (`if step.committed`)"
            )
        position = self._plan.load(state_dict)
        if "samples" in state_dict:
            self._account.load(state_dict["samples"])
        if self._exact is not None:
            self._exact.load_state_dict(state_dict.get("scales"))
        self._manager._again.forget()
        self._position, self._ended = position, state_dict.get("ended", 0)
        if "readers" in state_dict:
            self._source_states.load(position.epoch, state_dict["readers"])
            self._states_loaded = True

    def __len__(self) -> int:
        """The number of steps of the whole job. TypeError: the dataset is a stream, of unknown length."""
        if self._stream is not None:
            raise TypeError("the dataset is a stream: its number of steps is not known before its end")
        return self._plan.batches_per_epoch * self._plan.epochs

    def share(
        self,
        rank: Optional[int],
        participants: int,
        speeds: tuple[int, ...] = (),
        kept: Collection[int] = (),
        own: Collection[int] = (),
    ) -> RankShare:
        """The units of this rank at its position; at the end of the job, those of the first step, with weight
        0.

        Args:
            rank: rank of this group among the participants, None if it is not one.
            participants: groups whose gradients count.
            speeds: of these groups, by which the batch is cut: see :meth:`DataPlan.share`.
            kept, own: the units that participants keep, and this group: see there.
        """
        position = self._position
        if rank is None and self.at_end:
            position = DataPosition()  # any position is valid, because the weight is 0
        of_rank = rank, participants, self._data_rank, self._data_world_size
        skipped = self._left_out.of(position)
        if kept or own:
            return self._plan.share(position, *of_rank, kept, own, speeds, skipped)
        return self._shares(position, *of_rank, speeds=speeds, skipped=skipped)

    def check_samples(self, counted: int, participants: int) -> None:
        """Raises SamplesDiffer unless a step at this position has ``counted`` samples for this data rank."""
        if self.at_end:
            return
        if self._stream is None:
            self.share(None, participants).check(counted)
        else:
            self._following = self._stream.after(self._position, self._ended, counted)

    @property
    def is_stream(self) -> bool:
        """Whether the groups have to count the samples of each step."""
        return self._stream is not None

    @property
    def at_end(self) -> bool:
        """Whether the position is behind the last step of the job."""
        return self._position == self._plan.end

    def units_added(self) -> bool:
        """Whether the gradients of a reduction contain all units of this rank; False before the first unit.

        Raises:
            UnitsSkipped: they contain only some of the units.
        """
        if self._step is None or not self._step._added:
            return False
        self._check_units(self._step)
        return True

    def verify(self) -> None:
        """Raises an error unless all units are in the gradients. A heal must be loaded before."""
        if self._local_steps is not None:
            return
        self._check_units(self._step)
        if self._exact is not None and not (self._step is None and self.at_end):
            skipped = len(self._left_out.of(self._position))
            self._exact.verify(self._plan.num_units(self._position) - skipped)

    def _check_units(self, step: Optional[LoaderStep]) -> None:
        if step is None and self.at_end:
            return
        try:
            if step is None:
                raise UnitsSkipped(
                    f"the step has no units: {type(self).__name__} begins each step of its Manager"
                )
            step.check()
        except UnitsSkipped as e:
            self._skipped = e
            raise

    def _decided(self, step: int, committed: bool, participants: int) -> None:
        if self._local_steps is not None:
            self._average_decided(self._local_steps, committed)
            return
        ended, self._step = self._step, None
        following, self._following = self._following, None
        if ended is not None:
            ended.committed = committed
            self._kept_counted = ended.counted
        if committed:
            self._left_out.committed(step, self._position)
            if self._exact is not None:
                self._exact.commit()
            if following is None:
                self._position = self._plan.advance(self._position)
            else:
                self._position, self._ended = following

    # Steps

    def __iter__(self) -> Iterator[LoaderStep]:
        return self

    def __next__(self) -> LoaderStep:
        """Begins a step.

        Raises:
            StopIteration: the job is at its end, in all groups; or this group is drained.
            UnitsSkipped: the last step was lost, because the loop left out some of its units.
            PositionDiffers: groups of several ranks were restored at different positions, and their Managers
                at step 0.
            TimeoutError: the job is at its end, and other groups have not healed in time.
        """
        skipped, self._skipped = self._skipped, None
        if skipped is not None:
            raise skipped
        if self._local_steps is not None:
            return self._next_inner(self._local_steps)
        manager = self._manager
        if manager.draining():
            self._end()
        deadline = time.monotonic() + manager._quorum_timeout.total_seconds()
        while True:
            before = self._position
            plan = manager._begin_batch()
            self._check_ranks_alike(before)
            what = next_action(
                at_end=self.at_end,
                heals_in_background=plan.heal and (plan.in_background or manager._in_passing.joining),
                all_up_to_date=plan.num_up_to_date == plan.replica_world_size,
            )
            if what is GroupAction.TRAINS:
                break
            if what is GroupAction.ENDS and manager._ends_together():
                self._end()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"timed out after {manager._quorum_timeout.total_seconds():g} s: the job is at its end, "
                    f"and of {plan.replica_world_size} groups {plan.num_up_to_date} are up to date; the "
                    "others have not healed to it"
                )
            manager._pass_step()
        if self._exact is not None:
            self._exact.begin_step()
        membership = Membership(plan.participating_rank, plan.participants, plan.speeds)
        again = manager._again
        kept = self._kept(plan)
        records = plan.leads and manager._settings.group_rank == 0
        self._left_out.begin(plan.skipped, self._position, kept, records)
        share = self.share(*membership, kept, again.units)
        if membership.rank is not None and again.enabled:
            rank, participants, speeds = membership
            left = kept | self._left_out.of(share.position)
            parts = self._plan.parts(share.position, rank, participants, self._data_world_size, left, speeds)
            again.computes(share.position, itertools.chain(*parts))
        audited = self._audited(plan, membership)
        self._expect(membership, share, audited)
        self._step = LoaderStep(self, share, membership, again.attempts, audited)
        if again.units:  # their samples were counted when they were read
            self._step.counted = self._kept_counted
        # A group that computes fewer units than others is slower than its own time shows.
        units = self._plan.num_units(share.position)
        usual = units / (membership.participants * self._data_world_size)
        passes = len(share.units) + (audited is not None and not audited.own)
        manager._own_time.computes(0 if kept or membership.rank is None else passes / usual)
        if membership.speeds != self._speeds and membership.rank is not None:
            self._speeds = membership.speeds
            how = "by the speeds of the groups" if membership.speeds else "evenly"
            manager._logger.info(f"a batch is cut {how}: this rank has {len(share.units)} of {units} units")
        return self._step

    def _audited(self, plan: Plan, membership: Membership) -> Optional[AuditedUnit]:
        """The unit that all participants compute in this step, the same for all. None if there is none, or
        this group is no participant; or if no group has one for all its ranks: these run as many passes, so
        they choose the same group, one in which all of them count units.
        """
        manager, audits, data, position = self._manager, self._audits, self._plan, self._position
        if audits is None:
            return None
        number = max(plan.max_step, manager.current_step())  # that of the job, also before a heal
        if not audits.begin(manager._current, plan, number, data.seed) or membership.rank is None:
            return None
        own, participants, speeds = membership
        ranks, left = self._data_world_size, self._left_out.of(position)
        groups = range(participants)
        owners = [
            group for group in groups if all(data.parts(position, group, participants, ranks, left, speeds))
        ]
        if not owners:
            return None
        owner = owners[chosen(number, len(owners), data.seed, "group")]
        of_rank = owner, participants, self._data_rank, ranks
        share = data.share(position, *of_rank, speeds=speeds, skipped=left)
        counted = [unit for unit in share.units if unit.weight]
        place = chosen(number, len(counted), data.seed, "unit")
        return AuditedUnit(place, replace(counted[place], last=False), own=owner == own)

    def _kept(self, plan: Plan) -> frozenset[int]:
        """The units whose gradients the groups of a quorum keep from an earlier attempt at this step."""
        manager = self._manager
        try:
            kept = manager._again.begin(manager._current, plan, self._position)
        except Exception as e:
            manager._report_own_error(e)
            return frozenset()
        if kept:
            missing = self._plan.num_units(self._position) - len(kept)
            manager._logger.info(
                f"batch {self._position.batch} of epoch {self._position.epoch} comes again: "
                f"{plan.participants} groups compute the {missing} units of the failed group again"
            )
        return kept

    def _check_ranks_alike(self, before: DataPosition) -> None:
        """Raises PositionDiffers if ranks of this group may have got different positions.

        At step 0 (init_sync) each rank takes over the state of a rank of another group; ranks of this group
        may heal from different groups. No comparison would detect that, because ranks compare with their
        counterparts only.
        """
        manager = self._manager
        now = self._position
        if now != before and manager._settings.group_world_size > 1 and manager.current_step() == 0:
            raise PositionDiffers(
                f"the groups began at different positions: this rank was at batch {before.batch} of epoch "
                f"{before.epoch}, and took over batch {now.batch} of epoch {now.epoch}; other ranks of this "
                "group may have taken over another one. Restore all groups from checkpoints of one step, "
                "and load the Manager's state_dict, too"
            )

    def _end(self) -> NoReturn:
        self._stop_reading()
        raise StopIteration

    def _stop_reading(self) -> None:
        """Ends the DataLoader's worker processes. Reading starts again with the next step."""
        self._lanes.stop()
        self._forecast = None

    # Steps of LocalSGD and DiLoCo: those of their inner optimizer

    @property
    def lost(self) -> int:
        """With LocalSGD and DiLoCo: number of samples of past batches that are in no committed average, for
        this data rank, summed over all groups.
        """
        return self._account.lost

    @property
    def committed(self) -> int:
        """With LocalSGD and DiLoCo: number of samples of past batches that are in committed averages."""
        return self._account.committed

    def steps_by_itself(self, local_steps: LocalSteps) -> None:
        """Makes a step of the loader one of the inner optimizer of this LocalSGD or DiLoCo.

        Raises:
            ValueError: the dataset is a stream, ``on_poison`` is "skip", or the Manager audits gradients.
        """
        if self._audits is not None:
            raise ValueError(
                f"audit={self._manager._settings.audit:g}: with LocalSGD and DiLoCo groups have different "
                "weights between two averages, so no other group can compute a unit again: give audit=0"
            )
        if self._left_out.enabled:
            raise ValueError(
                "on_poison is 'skip': with LocalSGD and DiLoCo, whose groups take inner steps without the "
                "others, only 'stop' is allowed"
            )
        if self._stream is not None:
            raise ValueError(
                "the dataset is a stream, and LocalSGD and DiLoCo take inner steps without the other groups, "
                "which have to find the end of an epoch together: give a dataset with __getitem__ and __len__"
            )
        self._local_steps = local_steps

    def send_samples(self) -> int:
        """Begins to compare the groups' samples. Returns this rank's samples that the reduction contains."""
        if self._local_steps is not None:
            return self._account.send()
        if self._step is None:
            return 0
        if self._stream is not None:
            return self._step.total
        # A reduction before the first unit contains no gradients of units (units_added() checks that): the
        # planned number is returned.
        return self._step.samples if self._step._added else self._step._share.samples

    def samples_averaged(self, counted: int) -> None:
        """Sets the number of samples in an average, over all groups, before the average is committed."""
        self._counted = counted

    def inner_step_ended(self) -> None:
        """Ends a step of the inner optimizer."""
        step, self._step = self._step, None
        if step is not None:
            self._account.trained(step.samples, step._share.expected)
            self._position = self._plan.advance(self._position)
            with contextlib.suppress(UnitsSkipped):
                self._check_units(step)

    def _average_decided(self, local_steps: LocalSteps, committed: bool) -> None:
        lost = self._account.lost
        if committed:
            self._account.averaged(self._counted)
        else:
            self._account.failed(local_steps.keeps_own_weights)
        level = logging.WARNING if self._account.lost > lost else logging.INFO
        where = f"epoch {self._position.epoch}, batch {self._position.batch}"
        logger.log(level, "%s: inner steps so far: %s", where, self._account)

    def _next_inner(self, local_steps: LocalSteps) -> LoaderStep:
        """Begins an inner step: the groups of the last quorum share the batch; no quorum is requested."""
        manager = self._manager
        if not local_steps.entered:
            raise RuntimeError(f"steps are taken inside of `with {type(local_steps).__name__}(...)` only")
        if manager._current.plan is None:
            local_steps.synchronize()  # to get the first quorum, and to take over weights and position
        plan = manager._current.plan
        assert plan is not None
        if manager.draining() or self._position == self._plan.end:
            self._account.failed(kept=False)  # the samples since the last average will be in no average
            self._end()
        membership = Membership(plan.replica_rank, plan.replica_world_size)
        # Then only spares do not participate: their samples would be in no average.
        if not plan.in_background:
            membership = Membership(plan.participating_rank, plan.participants)
        share = self.share(*membership)
        of_group = sum(
            self._plan.share(
                share.position, membership.rank, membership.participants, rank, self._data_world_size
            ).samples
            for rank in range(self._data_world_size)
        )
        # With this factor, the losses of a group add up to the mean over its own samples.
        self._scale = self._plan.batch_size(share.position) / max(1, of_group)
        self._expect(membership, share)
        self._step = LoaderStep(self, share, membership)
        return self._step

    # Reading

    def _expect(
        self, membership: Membership, share: RankShare, audited: Optional[AuditedUnit] = None
    ) -> None:
        """Makes the DataLoader read the units of this step and the next ones, unless it does already."""
        if self._states_loaded:
            self._states_loaded = False
            self._stop_reading()
        more = [] if audited is None or audited.own else [audited.unit]
        skipped = self._left_out.names
        if more or self._forecast != (membership, skipped, share.position):
            self._lanes.expect(lambda: self._foresee(membership, share, more))
        following = self._next(share.position)
        self._forecast = None if membership.rank is None else (membership, skipped, following)

    def _next(self, position: DataPosition) -> DataPosition:
        """The next position, as far as it is known."""
        if self._stream is None:
            return self._plan.advance(position)
        return self._stream.next(position, self._ended)

    def _foresee(
        self, membership: Membership, share: RankShare, more: Sequence[PlannedUnit]
    ) -> Iterator[Task]:
        """Yields the units from this step on, for an unchanged membership and unchanged skipped units; first
        some more of this step. If the group does not participate, only those of this step.
        """
        yield from (Task(Key(share.position, unit.number), unit) for unit in more)
        while True:
            position = share.position
            yield from (Task(Key(position, unit.number), unit) for unit in share.units)
            position = self._next(position)
            if membership.rank is None or position == self._plan.end:
                return
            rank, participants, speeds = membership
            of_rank = rank, participants, self._data_rank, self._data_world_size
            share = self._shares(position, *of_rank, speeds=speeds, skipped=self._left_out.of(position))

    def _read(self, step: LoaderStep, place: int) -> Unit:
        position, unit = step.position, step.planned(place)
        key = Key(position, unit.number)
        again, self._again = self._again, None
        try:
            data = again[1] if again is not None and again[0] == key else self._lanes.take(key)
        except ReadFailed as e:
            failure = ReadFailed(
                f"unit {unit.number} of batch {position.batch} of epoch {position.epoch} could not be read: "
                f"{e}"
            )
            self._manager._report_own_error(failure)  # other groups must not wait for this group's part
            self._stop_reading()  # a worker process may have ended
            raise failure from e
        except BaseException:  # Ctrl-C: what is read ahead is forecast anew
            self._stop_reading()
            raise
        if step._membership.rank is None:
            self._again = key, data
        if self._stream is not None:
            data, unit = self._count(step, place, data)
        seed = self._seed(key) if self._reproducible_rng else None
        return Unit(step, place, data, unit.weight * self._factor * self._scale, seed)

    def _count(self, step: LoaderStep, place: int, read: Read) -> tuple[Any, PlannedUnit]:
        """Puts what was read of a stream in the place of what was planned. Returns samples and unit."""
        plan, planned = self._stream, step._share.units[place]
        assert plan is not None
        samples, more = (read.samples, read.more) if planned.weight else (0, False)
        unit = replace(
            planned, indices=planned.indices[: read.samples], weight=samples / plan.global_batch_size
        )
        step.put(place, unit, plan.count(samples, more))
        if read.saved is not None:
            self._source_states.put(read.saved, step.position.epoch, plan.first_block(step.position))
        if planned.last:
            step.total = self._total(step.counted)
        return read.data, unit

    def _total(self, counted: int) -> int:
        """The sum of a number over the ranks of this group that read different data."""
        if self._in_group is None:
            return counted
        total = torch.tensor([counted], dtype=torch.int64, device=device_of(self._in_group))
        add_in_group(self._manager, self._in_group, [total])
        return int(total.item())

    def _seed(self, key: Key) -> int:
        text = (
            f"torchft.data rng 1: {self._plan.seed}, {key.position.epoch}, {key.position.batch}, {key.unit}"
        )
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _check_stream(shuffle: bool, reproducible_rng: bool, skips: bool, settings: Settings) -> None:
    """Raises a ValueError if a setting excludes a stream."""
    if skips:
        raise ValueError(
            "on_poison is 'skip', and the dataset is a stream, whose samples come one after the other: only "
            "'stop' is allowed"
        )
    if shuffle:
        raise ValueError(
            "shuffle is True, and the dataset is a stream, whose order is its own: give shuffle=False, and "
            "shuffle the stream with a seed (in Hugging Face's datasets: dataset.shuffle(seed=0))"
        )
    for name, given in (
        ("reproducible_rng", reproducible_rng),
        ("reproducible_reduction", settings.reproducible_reduction),
    ):
        if given:
            raise ValueError(
                f"{name} is True, and the dataset is a stream: its samples depend on what was read before; "
                f"give {name}=False, or a dataset with __getitem__ and __len__"
            )


def _check_dataset(dataset: Any) -> None:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}: it needs __getitem__ and __len__, or "
            "__iter__, to be read as a stream"
        )
    if len(dataset) < 1:
        raise ValueError("the dataset has no samples: allowed are 1 and more")
