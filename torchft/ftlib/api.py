"""FTLib: averages over members that may join and fail, listed by a consensus, connected by a library."""

# No postponed annotations here: PyTorch compares annotations of communication hooks with types.

import contextlib
import importlib
import io
import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Callable, Optional, TypeVar, Union

import torch
import torch.distributed as dist
from torch import nn

from torchft.checkpointing._serialization import (
    _streaming_load,
    _streaming_save,
    allow_checkpoint_types,
    pickle_allowed,
)
from torchft.ftlib.consensus import Consensus, ConsensusStatus, FTAllReduceStatus
from torchft.ftlib.flag import Flag, FlagEvent
from torchft.ftlib.framework import Framework, ProcessGroupFramework
from torchft.ftlib.views import INCOMPLETE, MemberProgress, RankAssignScheme, View, source

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class RebuildFailed(RuntimeError):
    """The communicator could not be rebuilt; ``__cause__`` is the reason. The next call retries."""


class FTLib:
    """The interface for a training loop. Made by :meth:`init`; only one thread at a time may use it.

    With ``state_dict`` and ``load_state_dict``, all members have the state of the most advanced member after
    each rebuild; :attr:`step` belongs to the state. After a ``load_state_dict`` that raised an error, the
    member neither trains nor gives its state to others until a later rebuild has loaded a complete one.

    Attributes:
        rank: rank of this member in the last communicator.
        size: number of members of the last communicator.
        step: number of gradient averages in the state, see :meth:`wait_gradients_ready`.
        error: the error of the last call; None if it succeeded.
    """

    def __init__(
        self,
        consensus: Consensus,
        framework: Framework,
        state_dict: Optional[Callable[[], Any]] = None,
        load_state_dict: Optional[Callable[[Any], None]] = None,
    ) -> None:
        if (state_dict is None) != (load_state_dict is None):
            raise ValueError("state_dict and load_state_dict belong together: give both or none")
        self.rank, self.size, self.step = 0, 1, 0
        self.error: Optional[BaseException] = None
        self._consensus = consensus
        self._framework = framework
        self._state_dict = state_dict
        self._load_state_dict = load_state_dict
        self._made_in = -1  # the view of the last step; see `MemberProgress.view`
        self._view: Optional[View] = None
        self._ended = (-1, "")  # the latest view in which a member failed, and the reason
        self._flag = Flag()
        self._flag_lock = threading.Lock()
        self._collective = threading.Lock()  # held during each collective
        # the answer of an active consensus, valid until the next collective
        self._answer: Optional[ConsensusStatus] = None
        self._overlapped: Optional[_Overlapped] = None
        consensus.attach(self)

    @classmethod
    def init(
        cls,
        consensus: Union[str, Consensus],
        framework: Union[dist.ProcessGroup, Framework],
        *,
        state_dict: Optional[Callable[[], Any]] = None,
        load_state_dict: Optional[Callable[[Any], None]] = None,
        rebuild_timeout: timedelta = timedelta(seconds=60),
        **settings: Any,
    ) -> "FTLib":
        """
        Args:
            consensus: "gossip", "lighthouse", "shared_storage", or a :class:`~torchft.ftlib.Consensus` of
                your own.
            framework: a process group of torchft without peers, or a :class:`~torchft.ftlib.Framework` of
                your own.
            state_dict: returns the state that all members must share: weights, the optimizer's state.
            load_state_dict: loads this state.
            rebuild_timeout: timeout for connecting a process group with its new peers.
            settings: settings of the consensus: arguments of :class:`torchft.ftlib.gossip.Gossip`,
                :class:`torchft.ftlib.lighthouse.Lighthouse` or
                :class:`torchft.ftlib.shared_storage.SharedStorage`.

        Raises:
            ValueError: an unknown consensus, or a setting that is not allowed.
            RuntimeError: the consensus cannot reach its seeds, lighthouse or directory in time.
        """
        if not isinstance(framework, Framework):
            framework = ProcessGroupFramework(framework, rebuild_timeout)
        if not isinstance(consensus, Consensus):
            consensus = _make_consensus(consensus, settings)
        elif settings:
            raise TypeError(f"{', '.join(settings)}: a consensus of your own has its settings already")
        try:
            return cls(consensus, framework, state_dict, load_state_dict)
        except BaseException:
            consensus.close()
            raise

    # Membership

    def initialized(self) -> bool:
        """Whether the communicator connects all members."""
        if self._consensus.active and self._flag.initialized and self.confirm() is ConsensusStatus.FAIL:
            self._advance(FlagEvent.JOINED)  # or a member has failed: the consensus reports which one
        return self._flag.initialized

    def skip_allreduce(self) -> bool:
        """Whether this member is alone, so that there is nothing to average."""
        return self.initialized() and self.confirm() is ConsensusStatus.SKIP_ALLREDUCE

    def confirm(self) -> ConsensusStatus:
        """Whether the last list of members holds. An active consensus is asked once a collective."""
        if not self._consensus.active:
            if not self._flag.initialized or self._view is None:
                return ConsensusStatus.FAIL
            alone = len(self._view.members) == 1
            return ConsensusStatus.SKIP_ALLREDUCE if alone else ConsensusStatus.SUCCESS
        if self._answer is None:
            try:
                self._answer = self._consensus.confirm()
            except Exception as e:
                self.error = e
                _logger.warning("the consensus could not be asked: %s", e)
                self._answer = ConsensusStatus.FAIL
        return self._answer

    def get_member_list(self) -> View:
        """Waits until the members agree on a view, and confirms it."""
        view = self._view = self._consensus.get_member_list()
        ended, reason = self._ended
        if ended == view.number:  # the report of its end came before the view
            raise RuntimeError(f"view {ended} does not hold any more: {reason}")
        alone = len(view.members) == 1
        self._answer = ConsensusStatus.SKIP_ALLREDUCE if alone else ConsensusStatus.SUCCESS
        return view

    def new_member_join(self) -> None:
        """Lets the communicator be rebuilt after this collective: a process wants to become a member."""
        self._advance(FlagEvent.JOINED)

    def member_failed(self, view: int, reason: str) -> None:
        """Fails a collective that waits for a member of this view, which has failed or left."""
        self._ended = max(self._ended, (view, reason))
        if self._view is not None and self._view.number == view:
            if self._flag.initialized:
                _logger.warning("view %d: %s", view, reason)
            self._advance(FlagEvent.MEMBER_FAILED)
            try:
                self._framework.abort()
            # an error must not end the consensus's calling thread, which may also renew this member's record
            except Exception as e:
                _logger.warning("view %d: the communicator could not be aborted: %s", view, e)

    # Collectives

    def execute(self, func: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Calls a function that runs collectives, with a communicator of all members, which may be this
        member alone.

        Raises:
            RebuildFailed: the function was not called.
            Exception: the function's error; the communicator is then rebuilt before the next call.
        """
        status = self._prepare()
        if status is FTAllReduceStatus.FAIL:
            raise RebuildFailed(f"no communicator: {self.error}") from self.error
        if status is FTAllReduceStatus.NO_NEED or (
            status is FTAllReduceStatus.ABORT and self.skip_allreduce()
        ):
            return func(*args, **kwargs)
        with self._in_collective():
            return func(*args, **kwargs)

    def allreduce_average(self, tensors: list[torch.Tensor]) -> FTAllReduceStatus:
        """Averages each tensor over all members, in place. It raises only for mistakes of the caller; other
        errors are returned as a status.
        """
        status = self._prepare()
        if status is not None:
            return status
        try:
            with self._in_collective():
                self._framework.allreduce_average(tensors)
        except Exception as e:
            return self._failed("average", e)
        return FTAllReduceStatus.SUCCESS

    def wait_gradients_ready(self, model: nn.Module) -> FTAllReduceStatus:
        """Averages every gradient over all members, or waits for the averages that :func:`allreduce_hook` has
        begun. A gradient that this member does not have counts as zero.

        After SUCCESS and NO_NEED, :attr:`step` has grown by one: step the optimizer before the next call.
        """
        overlapped, self._overlapped = self._overlapped, None
        status = overlapped.end() if overlapped else self.allreduce_average(_gradients(model))
        if status in (FTAllReduceStatus.SUCCESS, FTAllReduceStatus.NO_NEED):
            assert self._view is not None
            self.step, self._made_in = self.step + 1, self._view.number
        return status

    def close(self) -> None:
        """Leaves the job; the other members continue. The process group still belongs to the caller."""
        self._consensus.close()
        self._framework.abort()

    def _prepare(self) -> Optional[FTAllReduceStatus]:
        """Prepares a collective. Returns a status if it must not begin, else None."""
        # averages that were not waited for, perhaps because the backward pass raised an error
        if self._overlapped is not None:
            self._overlapped.end()
        if not self.initialized():
            return FTAllReduceStatus.ABORT if self._rebuild() else FTAllReduceStatus.FAIL
        if self.skip_allreduce():
            self._answer = None
            return FTAllReduceStatus.NO_NEED
        return None

    @contextlib.contextmanager
    def _in_collective(self) -> Iterator[None]:
        with self._collective:
            self._advance(FlagEvent.BEGUN)
            self._answer = None
            try:
                yield
            except BaseException:
                self._advance(FlagEvent.FAILED)
                raise
            self._advance(FlagEvent.ENDED)

    def _rebuild(self) -> bool:
        """Connects the members of a new view, and makes their states equal."""
        self._advance(FlagEvent.REBUILDING)
        try:
            self._framework.abort()  # peers that wait for this member in a collective must rebuild, too
            view = self.get_member_list()
            rank, size = RankAssignScheme.get_rank_rand_size(view.identities, self._consensus.identity)
            if not self._framework.rebuild(rank, size, view.address):
                raise RebuildFailed(f"view {view.number}: the framework could not connect {size} members")
            self.rank, self.size = rank, size
            self._make_equal()
        except BaseException as e:
            self._advance(FlagEvent.FAILED)
            if not isinstance(e, Exception):
                raise
            self._failed("rebuild", e)
            return False
        self._advance(FlagEvent.REBUILT)
        return True

    def _make_equal(self) -> None:
        if self._state_dict is None or self._load_state_dict is None:
            return
        progress = [MemberProgress(self._made_in, self.step)]
        device = self._framework.device
        if self.size > 1:
            gathered = self._framework.allgather(torch.tensor(progress[0], dtype=torch.int64, device=device))
            progress = [MemberProgress(*each.tolist()) for each in gathered]
        root, behind = source(progress)
        if progress[root].view == INCOMPLETE:
            raise RuntimeError("no member has a complete state: load_state_dict has failed in all of them")
        if not behind:
            return
        written = io.BytesIO()
        if self.rank == root:
            _streaming_save(self._state_dict(), written)
        length = torch.tensor([written.tell()], dtype=torch.int64, device=device)
        self._framework.broadcast(length, root)
        content = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
        if self.rank == root:
            content.copy_(torch.frombuffer(written.getbuffer(), dtype=torch.uint8))
        self._framework.broadcast(content, root)
        if self.rank in behind:
            allow_checkpoint_types()
            received = _streaming_load(
                io.BytesIO(content.cpu().numpy().tobytes()), weights_only=not pickle_allowed()
            )
            # If it fails, the state may be a mixture, which must not be trained or given away.
            self._made_in = INCOMPLETE
            self._load_state_dict(received)
            self._made_in, self.step = progress[root]

    def _failed(self, what: str, error: Exception) -> FTAllReduceStatus:
        self.error = error
        _logger.warning("%s: %s: %s", what, type(error).__name__, error)
        return FTAllReduceStatus.FAIL

    def _advance(self, event: FlagEvent) -> None:
        with self._flag_lock:
            self._flag = self._flag.after(event)


def allreduce_hook(ftlib: FTLib, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of PyTorch's DistributedDataParallel: averages overlap with the backward pass.

    ``ddp = DistributedDataParallel(model, process_group=ProcessGroupDummy(0, 1),
    find_unused_parameters=True)``, then ``ddp.register_comm_hook(ftlib, allreduce_hook)``: buckets are then
    equal in all members. Call ``wait_gradients_ready`` after each backward pass: it returns the status,
    because the hook never raises.
    """
    if ftlib._overlapped is None or ftlib._overlapped.over(bucket):
        ftlib._overlapped = _Overlapped(ftlib)
    return ftlib._overlapped.add(bucket)


class _Overlapped:
    """The averages of one backward pass, from the first bucket to ``end``; they count as one collective."""

    def __init__(self, ftlib: FTLib) -> None:
        self._ftlib = ftlib
        self._open = contextlib.ExitStack()
        self._status = ftlib._prepare()
        self._error: Optional[Exception] = None
        self._works: list[Optional[dist.Work]] = []
        self._whole = True  # whether all buckets of the pass were added
        self._ended = False
        if self._status is None:
            self._open.enter_context(ftlib._in_collective())

    def over(self, bucket: dist.GradBucket) -> bool:
        """Whether the bucket is of a later pass: this one was ended, or its backward pass raised an error."""
        return self._ended or (not self._whole and bucket.index() == 0)

    def add(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer, self._whole = bucket.buffer(), bucket.is_last()
        if self._status is None and self._error is None:
            try:
                work = self._ftlib._framework.start_average(buffer)
                self._works.append(work)
                if work is not None:
                    # Also if the work failed: the status then shows it.
                    return work.get_future().then(lambda _: buffer)
            except Exception as e:
                self._error = e
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def end(self) -> FTAllReduceStatus:
        """Waits for the averages. Those of an incomplete pass are invalid: peers wait for its last bucket."""
        if self._status is None:
            self._status = self._wait()
        self._ended = True
        return self._status

    def _wait(self) -> FTAllReduceStatus:
        try:
            with self._open:
                if self._error is not None:
                    raise self._error
                if not self._whole:
                    raise RuntimeError(
                        "the backward pass ended before its last bucket of gradients, with an error"
                    )
                for work in self._works:
                    self._ftlib._framework.finish_average(work)
        except Exception as e:
            return self._ftlib._failed("average", e)
        return FTAllReduceStatus.SUCCESS


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _make_consensus(name: str, settings: dict[str, Any]) -> Consensus:
    kinds = {"gossip": "Gossip", "lighthouse": "Lighthouse", "shared_storage": "SharedStorage"}
    if name not in kinds:
        allowed = ", ".join(map(repr, kinds))
        raise ValueError(f"consensus={name!r} is not allowed; allowed: {allowed}, or a Consensus")
    return getattr(importlib.import_module(f"torchft.ftlib.{name}"), kinds[name])(**settings)
