"""A process group that creates one of PyTorch's for each set of peers, or forwards to another group.

One class does it all: an abort on any thread may meet a connection, a hand-over or an operation in progress,
and each step of these is safe only in view of the others.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, ContextManager, List, NamedTuple, Optional, TypeVar

import torch
from torch.distributed import PrefixStore, Store, Work
from torch.distributed.distributed_c10d import AllreduceCoalescedOptions

from torchft._checks import check_positive
from torchft._forked import refusal, threaded
from torchft._handoff import Handed, hand_off, prepare
from torchft.process_group._attempt import ConnectionAttempt, running
from torchft.process_group._errors import copied, explained, named_timeout, refuse_meta
from torchft.process_group._gloo.operations import Operations
from torchft.process_group._gloo.reaper import reap
from torchft.process_group.base import (
    _NO_OPTIONS,
    BaseProcessGroup,
    NewPeers,
    ProcessGroup,
    add_operations,
    configure_group,
    reduction_options,
)
from torchft.process_group.checked import Checker, enabled
from torchft.process_group.native import (
    abort_group,
    connections_of,
    errors_of,
    reconfigure_group,
    set_operation_timeout,
)
from torchft.process_group.reconfigure import (
    ReconfigureOptions,
    check_rank,
    is_native,
    meeting_store,
    plan_rendezvous,
    supports_reconfigure,
)
from torchft.work import _DummyWork

T = TypeVar("T")

_NO_CONTEXT = nullcontext()

_logger: logging.Logger = logging.getLogger(__name__)

# Groups that created their parent themselves, or whose parent is a native group.
_owners: weakref.WeakSet[ProcessGroupWrapper] = weakref.WeakSet()
# For each native group, shared by all wrappers of it: an object that identifies its present peers, the
# operations in flight among them, and the checker of these operations.
_shared: weakref.WeakKeyDictionary[
    BaseProcessGroup, tuple[object, Optional[Operations], Optional[Checker]]
] = weakref.WeakKeyDictionary()
_shared_lock = threading.Lock()


class _Connected(NamedTuple):
    """A group that is connected with its peers."""

    pg: BaseProcessGroup
    operations: Optional[Operations]
    store: Store  # in which the peers met


class ProcessGroupWrapper(ProcessGroup):
    """Connects its `parent` with peers, and forwards every operation to it.

    Without `pg` each `configure` replaces the parent by a new group from `_create_pg`. With `pg` that group
    is always the parent, and it is reconfigured itself.

    Subclasses may override `_create_pg`, `_opts_hook`, `_run_context` and `_wrap_work`.

    Args:
        timeout: default timeout of operations, and timeout of connecting to new peers.
        pg: the group to wrap, one of torchft or a native one.
    """

    _reduces_each_dtype = True

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        pg: Optional[BaseProcessGroup] = None,
    ) -> None:
        super().__init__(0, 1)
        check_positive("timeout", timeout)
        prepare()
        self._timeout = timeout
        self._pg: Optional[BaseProcessGroup] = pg
        self._given: bool = pg is not None
        self._given_errored = errors_of(pg) if isinstance(pg, ProcessGroup) else None
        if pg is not None and not isinstance(pg, ProcessGroup):
            _owners.add(self)
            threaded(pg)
        self._dropping: list[Handed] = []  # that abort and destroy former groups
        self._operations: Optional[Operations] = None
        self._checker: Optional[Checker] = None
        self._aborted: Optional[Exception] = None
        self._attempt: Optional[ConnectionAttempt[_Connected]] = None  # the one that a thread waits for
        self._standby: Optional[ConnectionAttempt[_Connected]] = None
        self._standby_lock = threading.Lock()
        # The options by which the latest peers were to connect; None: by `configure`.
        self._options: Optional[ReconfigureOptions] = None
        self._global_ranks: Optional[list[int]] = None
        self._store_addr = ""  # where the latest peers meet

    # Methods that subclasses override

    def _create_pg(self, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        """Creates a group whose ranks meet in `store`; all peers call it."""
        raise NotImplementedError(f"{type(self).__name__}._create_pg")

    def _opts_hook(self, opts: T) -> T:
        """The options that the parent gets instead of `opts`."""
        return opts

    def _wrap_work(self, work: Work, opts: object) -> Work:
        """The work that the caller gets instead of the parent's `work`."""
        return work

    def _run_context(self) -> ContextManager[None]:
        """Surrounds every call of the parent."""
        return _NO_CONTEXT

    def _check_tensors(self, name: str, args: tuple[Any, ...]) -> None:
        """Refuses tensors that the parent cannot take."""
        tensors = args[0] if len(args) == 1 else None  # mostly one flat list
        if type(tensors) is not list or any(type(t) is not torch.Tensor or t.is_meta for t in tensors):
            refuse_meta(self.getBackendName, name, args)

    @property
    def _connect_timeout(self) -> timedelta:
        """The timeout of connecting to new peers: the group's, or the caller's if that is shorter."""
        given = self._options.timeout if self._options is not None else None
        return min(self._timeout, given or self._timeout)

    def _reset(self) -> None:
        """Resets the state that belongs to the old peers, before new ones are connected."""
        self._aborted = None

    def _interrupt(self, pg: BaseProcessGroup) -> None:
        """Ends the operations in flight in `pg`, without waiting for them."""
        pg.abort()

    def _watch(self, pg: BaseProcessGroup, store: Store, rank: int, world_size: int) -> Optional[Operations]:
        """An object that ends the operations in flight in `pg`; None if the abort of `pg` does so itself."""
        return None

    # Peers

    def _connect_with(self, peers: NewPeers, options: Optional[ReconfigureOptions]) -> None:
        self._reset()
        if not self._given:
            check_rank(peers.rank, peers.world_size)
            self._options, self._global_ranks = options, peers.global_ranks
            self._replace(self._connecting_with(peers.store_addr, peers.rank, peers.world_size))
        elif isinstance(self._pg, ProcessGroup):
            configure_group(self._pg, peers, options)
        else:
            raise RuntimeError(
                f"{self.getBackendName()}: the native group behind it has no configure, only reconfigure"
            )

    def _connecting_with(
        self, store_addr: str, rank: int, world_size: int, standby: bool = False
    ) -> ConnectionAttempt[_Connected]:
        """An attempt to connect with peers, which has not begun."""
        self._store_addr = store_addr

        def connect() -> _Connected:
            store = meeting_store(store_addr, world_size, self._connect_timeout)
            pg = threaded(self._create_pg(store, rank, world_size))
            return _Connected(pg, self._watch(pg, store, rank, world_size), store)

        return ConnectionAttempt(connect, self._discard, self._connect_timeout, standby)

    def _discard(self, box: list[_Connected]) -> None:
        """Drops the only element of `box`. The caller holds no other reference."""
        if box[0].operations is not None:
            box[0].operations.end(RuntimeError("the connection was aborted"))
        self._drop([box.pop().pg])

    def _replace(self, attempt: ConnectionAttempt[_Connected]) -> None:
        """Gives up the present peers, waits until the attempt has connected others, and uses those."""
        error = RuntimeError(f"{self.getBackendName()} was given other peers")
        self._release(error)
        whole = attempt
        if attempt.standby:
            whole = ConnectionAttempt(partial(self._used, attempt), self._discard, self._connect_timeout)
        self._attempt = whole
        try:
            if not self._take_standby(attempt):
                self.abandon_standby(error)  # another one
            pg, self._operations, store = whole.result()
            _owners.add(self)
            if enabled():
                name, where = self.getBackendName(), PrefixStore("check", store)
                self._checker = Checker(name, where, pg.rank(), pg.size(), self._timeout)
            self._pg = pg
        except RuntimeError as e:
            raise named_timeout(e) from e.__cause__
        finally:
            self._attempt = None
        # An abort abandons the attempt first, then releases `_pg`: one that has not found `_pg` is seen.
        if whole.abandoned is not None:
            aborted, box = whole.abandoned, [pg]
            del pg
            self._release(aborted)
            reap(box)  # this may be the last reference
            raise copied(aborted)

    @property
    def _reduces_sparse(self) -> bool:  # type: ignore[override]
        return not (self._given and isinstance(self._pg, ProcessGroup)) or self._pg._reduces_sparse

    @property
    def _averages(self) -> bool:  # type: ignore[override]
        return self._given and isinstance(self._pg, ProcessGroup) and self._pg._averages

    @property
    def connects_standby(self) -> bool:
        """Whether the group can connect with other peers while it keeps the present ones."""
        kind, base = type(self), ProcessGroupWrapper
        own = (kind.configure, kind.reconfigure) == (base.configure, base.reconfigure)
        return own and not self._given

    def connect_standby(self, opts: ReconfigureOptions) -> ConnectionAttempt[Any]:
        """Begins to connect with other peers, on a thread. Until :meth:`hand_over` the group keeps the
        present ones.

        Both connections exist for that time, and nothing on a device waits for the new peers. An abort of the
        group ends both connections.

        Args:
            opts: as for `reconfigure`; all of these peers call this method, and then :meth:`hand_over`.

        Returns:
            The attempt, to see whether it has ended.

        Raises:
            ValueError: as for `reconfigure`.
        """
        meeting = plan_rendezvous(opts.handles, self.get_reconfigure_handle(), self._group_rank)
        self.abandon_standby(RuntimeError(f"{self.getBackendName()} connects with other peers"))
        if self._pg is None:
            self._reset()
        self._options = opts
        self._global_ranks = meeting.global_ranks
        attempt = self._connecting_with(
            meeting.address(opts.uuid), meeting.rank, meeting.world_size, standby=True
        )
        with self._standby_lock:
            self._standby = attempt
        _owners.add(self)
        attempt.start()
        return attempt

    def hand_over(self) -> None:
        """Gives up the present peers for those of `connect_standby`. Waits until these are connected.

        Raises:
            RuntimeError: there are no such peers, or they could not be connected.
        """
        attempt = self._standby
        if attempt is None:
            raise RuntimeError(f"{self.getBackendName()} has no other peers to hand over to")
        self._reset()
        self._replace(attempt)

    def abandon_standby(self, error: Exception, attempt: Optional[ConnectionAttempt[Any]] = None) -> None:
        """Ends the attempt of `connect_standby`, if there is one: `attempt`, if it still is the latest."""
        attempt = attempt or self._standby
        if attempt is not None and self._take_standby(attempt):
            attempt.abandon(error)

    def _take_standby(self, attempt: ConnectionAttempt[Any]) -> bool:
        """Makes the caller responsible for an attempt; False if it is not the latest, or was taken."""
        with self._standby_lock:
            mine = self._standby is attempt
            if mine:
                self._standby = None
            return mine

    def _used(self, attempt: ConnectionAttempt[_Connected]) -> _Connected:
        """The result of an attempt, after the first use. Runs in another attempt, which an abort ends."""
        whole = running()
        assert whole is not None
        whole.when_abandoned(partial(attempt.abandon, RuntimeError(f"{self.getBackendName()} was aborted")))
        box = [attempt.result()]
        try:
            self._use_first(box[0].pg)
        except BaseException:
            self._discard(box)
            raise
        return box.pop()

    def _use_first(self, pg: BaseProcessGroup) -> None:
        """Prepares the first use of peers that were a standby connection."""

    @property
    def supports_reconfigure(self) -> bool:
        return not self._given or supports_reconfigure(self._pg)

    def set_rank_info(
        self,
        replica_id: str,
        group_rank: int,
        group_world_size: int,
        global_rank: Optional[int] = None,
    ) -> None:
        super().set_rank_info(replica_id, group_rank, group_world_size, global_rank)
        if isinstance(self._pg, ProcessGroup) and self._given:
            self._pg.set_rank_info(replica_id, group_rank, group_world_size, global_rank)

    def announce_layout(self, digest: str, text: str) -> None:
        super().announce_layout(digest, text)
        if isinstance(self._pg, ProcessGroup) and self._given:
            self._pg.announce_layout(digest, text)

    def get_reconfigure_handle(self) -> str:
        if self._given:
            return self.parent.get_reconfigure_handle()
        return super().get_reconfigure_handle()

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        if self._reconfigures_itself():
            self._reset()
            if is_native(self._pg):
                reconfigure_group(self.parent, opts)
                return _DummyWork(None)
            return self.parent.reconfigure(opts)
        return super().reconfigure(opts)

    def _reconfigures_itself(self) -> bool:
        """Whether the innermost group has its own `reconfigure`, so that `configure` is not needed."""
        pg = self._pg
        if not self._given or pg is None:
            return False
        if isinstance(pg, ProcessGroupWrapper) and (type(pg).reconfigure is ProcessGroupWrapper.reconfigure):
            return pg._reconfigures_itself()
        return is_native(pg) or type(pg).reconfigure is not ProcessGroup.reconfigure

    # State

    @property
    def parent(self) -> BaseProcessGroup:
        """The group that does the work."""
        pg = self._pg
        if pg is None:
            # After an abort the error is not an AssertionError, because the caller made no mistake.
            aborted = self._aborted  # read once: another thread may be connecting with other peers
            if aborted is not None:
                raise copied(aborted)
            raise AssertionError("process group not initialized")
        return pg

    def _peers_now(self) -> object:
        parent = self.parent
        return parent._peers_now() if isinstance(parent, ProcessGroup) else parent

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pg={self._pg!r})"

    def size(self) -> int:
        return self.parent.size()

    def rank(self) -> int:
        return self.getRank()

    def getRank(self) -> int:
        # PyTorch calls this before there are peers. Its own groups then return 0.
        pg = self._pg
        return 0 if pg is None else pg.rank()

    def getBackendName(self) -> str:
        pg = self._pg
        if isinstance(pg, ProcessGroup):
            return f"{type(self).__name__}[{pg.getBackendName()}]"
        return type(self).__name__

    def set_timeout(self, timeout: timedelta) -> None:
        check_positive("timeout", timeout)
        self._timeout = timeout
        pg = self._pg
        if pg is not None:
            set_operation_timeout(pg, timeout)

    def errored(self) -> Optional[Exception]:
        return self._given_errored() if self._given_errored is not None else self._aborted

    def share_buffer(self, tensor: torch.Tensor) -> bool:
        pg = self._pg
        return isinstance(pg, ProcessGroup) and pg.share_buffer(tensor)

    def abort(self, errored: bool = True) -> None:
        """Ends the operations in flight, without waiting for them.

        Args:
            errored: whether `errored()` returns this abort until there are new peers.
        """
        if self._given and isinstance(self._pg, ProcessGroup):
            self._pg.abort()
            return
        error = RuntimeError(
            f"{self.getBackendName()} was aborted and has no peers until it is configured again"
        )
        if errored and self._pg is not None:
            self._aborted = error
        if self._given:
            self._end_operations(error)
            abort_group(self.parent)
            return
        attempt = self._attempt
        if attempt is not None:
            attempt.abandon(error)
        self._release_both(error)

    def shutdown(self) -> None:
        super().shutdown()
        if self._given:
            if isinstance(self._pg, ProcessGroup):
                self._pg.shutdown()
            # A native group belongs to its creator.
            return
        self._release_both(RuntimeError(f"{self.getBackendName()} was shut down"))

    def _end_operations(self, error: Exception) -> None:
        operations, self._operations = self._operations, None
        checker, self._checker = self._checker, None
        if operations is not None:
            operations.end(error)
        if checker is not None:
            checker.close(error)

    def __del__(self) -> None:
        # The garbage collector may call this on any thread, so it must neither wait nor take a lock. At exit
        # no thread can be started: see `_release_all`.
        if not hasattr(self, "_given") or sys.is_finalizing():
            return
        if self._given:
            self._leave()
        elif self._pg is not None or self._standby is not None:
            hand_off(self._release_unreferenced, "torchft_reaper")

    def _release_unreferenced(self) -> None:
        self._release_both(RuntimeError("the process group is not referenced any more"))

    def _leave(self) -> None:
        """Drops a native group, without an abort. Calls `reap`, since it may be the last reference."""
        pg, self._pg = self._pg, None
        if pg is not None and not isinstance(pg, ProcessGroup):
            box: list[object] = [pg]
            del pg
            reap(box)

    def _forget(self) -> None:
        """In a forked child: the connections belong to the parent, which goes on to use them."""
        self._aborted = refusal(self.getBackendName())
        if self._operations is not None:
            self._operations.forget(self._aborted)
        self._pg = self._operations = self._checker = self._attempt = self._standby = None
        self._standby_lock = threading.Lock()  # a thread of the parent may have held the old one

    def _release_both(self, error: Exception) -> None:
        """Drops the parent, and the standby connection."""
        self.abandon_standby(error)
        self._release(error)

    def _release(self, error: Exception) -> None:
        """Drops the parent, and does not wait: threads that wait in it get its own error, or `error`."""
        box = [self._pg]  # read once: another thread may release it too
        self._pg = None
        if box[0] is not None:
            self._end_operations(error)
            self._drop(box)

    def _drop(self, box: list[Any]) -> None:
        """Destroys the only element of `box`, on another thread. The caller holds no other reference."""
        self._dropping = [handed for handed in self._dropping if not handed.over]
        try:
            self._interrupt(box[0])
        except Exception:
            _logger.exception("%s: could not abort the old group", self.getBackendName())
        self._dropping.append(reap(box))

    # Operations

    def _in_flight(self) -> tuple[Optional[Operations], Optional[Checker]]:
        """Returns two objects for the operations among the parent's present peers: the one that ends their
        waits, None if the parent's abort does so; and the one that compares the calls of all ranks, None if
        they are not compared.
        """
        pg = self._pg
        if not self._given or type(pg) is not BaseProcessGroup:
            return self._operations, self._checker
        # A native group may be reconfigured without this wrapper, and others of it share its operations.
        meeting = _meeting(pg)
        with _shared_lock:
            known = _shared.get(pg)
            if known is None or known[0] != meeting:
                gloo = all(pg._get_backend(device).name() == "gloo" for device in pg._device_types)
                self._operations = Operations(pg.name(), connections_of(pg)) if gloo else None
                if enabled():
                    # The handle of a group with peers contains the uuid of their reconfiguration:
                    # backend:rank:uuid:…
                    uuid = pg.get_reconfigure_handle().split(":")[2]
                    store = PrefixStore(f"check/{uuid}", pg.get_group_store())
                    self._checker = Checker(pg.name(), store, pg.rank(), pg.size(), self._timeout)
                known = _shared[pg] = (meeting, self._operations, self._checker)
        _, self._operations, self._checker = known
        return self._operations, self._checker

    def _run(self, name: str, *args: Any, opts: Any = _NO_OPTIONS) -> Any:
        """Forwards an operation to the parent."""
        # Read before the parent, so that a reconfiguration in between ends this operation too.
        operations, checker = self._in_flight()
        with self._run_context():
            parent: Any = self.parent
            if checker is not None:
                checker.check(name, args, opts)
            self._check_tensors(name, args)
            given = args if opts is _NO_OPTIONS else (*args, self._opts_hook(opts))
            try:
                work = getattr(parent, name)(*given)
            except RuntimeError as e:
                if isinstance(parent, ProcessGroup):
                    raise
                # The error's traceback keeps this frame, and the frame must not keep the group, whose
                # destruction waits for operations.
                parent = None
                raise explained(self.getBackendName(), name, args, e) from e.__cause__
            if operations is not None:
                work = operations.guard(work, name, args)
            return self._wrap_work(work, None if opts is _NO_OPTIONS else opts)

    def allreduce_coalesced(self, tensors: List[torch.Tensor], opts: Any) -> Work:
        # PyTorch accepts only this class of options here.
        return super().allreduce_coalesced(tensors, reduction_options(opts, AllreduceCoalescedOptions))

    def monitored_barrier(self, timeout: Optional[timedelta] = None, wait_all_ranks: bool = False) -> None:
        """Waits until all ranks have called it; otherwise raises an error that names the missing ranks.

        Args:
            timeout: timeout of the wait; None: the group's.
            wait_all_ranks: whether rank 0 names all missing ranks, not only the first.
        """
        timeout = self._timeout if timeout is None else timeout
        operations, _ = self._in_flight()
        with self._run_context():
            parent: Any = self.parent

            def call() -> None:
                parent.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

            # monitored_barrier returns no work: the caller's thread waits.
            call() if operations is None else operations.call(call)


add_operations(
    ProcessGroupWrapper,
    (
        "reduce",
        "gather",
        "scatter",
        "alltoall",
        "allgather_coalesced",
        "_allgather_base",
        "all_gather_single",
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "recv_anysource",
    ),
)


def _meeting(pg: BaseProcessGroup) -> object:
    """An object that changes when a native group gets new peers; None if there is no such object."""
    connections = connections_of(pg)
    return pg.get_reconfigure_handle() if connections is None and enabled() else connections


def abortable(pg: BaseProcessGroup) -> BaseProcessGroup:
    """The group whose operations to call, so that an abort of `pg` ends all waits for them.

    A group of torchft is returned itself. In a native Gloo group an operation may hang if its connections are
    cut at the wrong moment, above all in a process that was stopped meanwhile; so a wrapper with its own end
    for waits is returned.
    """
    return ProcessGroupWrapper(pg=pg) if is_native(pg) else pg


def _forget_all() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()
    _shared.clear()
    for group in list(_owners):
        group._forget()
    _owners.clear()


os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def _release_all() -> None:
    """Releases all groups at the end, while threads can still start; `_gloo.reaper` then waits for them."""
    for group in list(_owners):
        if group._given:
            group._leave()
        else:
            group._release_both(RuntimeError("the process ends"))
