"""The trainer's side of an isolated group: a process group of PyTorch whose operations run in a worker."""

from __future__ import annotations

import importlib
import math
import os
import sys
import time
import weakref
from datetime import timedelta
from typing import Any, ClassVar, Optional, Union

import torch
from torch.distributed import PrefixStore, Store, Work

from torchft._checks import check_positive, switch
from torchft._handoff import hand_off, prepare
from torchft.process_group._errors import POINT_TO_POINT, copied
from torchft.process_group._timeout import given_timeout
from torchft.process_group.base import (
    _NO_OPTIONS,
    BaseProcessGroup,
    NewPeers,
    ProcessGroup,
    add_operations,
    reduction_options,
)
from torchft.process_group.checked import Checker, enabled
from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.channel import Channel
from torchft.process_group.isolated.operation import WorkerTimedOut, _OpMetadata, operation
from torchft.process_group.isolated.standby import Workers, started
from torchft.process_group.reconfigure import ReconfigureOptions, check_rank, meeting_store
from torchft.utils import current_device

#: 0: isolated groups keep no worker ready, which saves host memory and makes each new quorum slower.
#: Default: 1.
STANDBY_ENV = "TORCHFT_ISOLATED_STANDBY"
#: 1: the worker kept ready has a context on the GPU, which costs device memory and makes a new quorum
#: faster. Default: 0.
STANDBY_CONTEXT_ENV = "TORCHFT_ISOLATED_STANDBY_CONTEXT"

# Extra seconds for the answer of the worker, which has the same deadline for connecting.
_GRACE_SEC = 1.0


class ProcessGroupBaby(ProcessGroup):
    """A group whose operations run in a worker, a process that can be killed without harm to this one.

    A subclass overrides `_create_pg`, which creates the group in the worker. The worker imports the module of
    the subclass, so it must not be defined in `__main__`.

    Args:
        timeout: default timeout of operations, and timeout of connecting to new peers; in seconds, if a
            number.
        standby: whether the next worker is started in advance, so that reconfiguring does not wait for it. It
            costs some 50 MB. None: TORCHFT_ISOLATED_STANDBY ("1" or "0"), by default yes.
        standby_context: whether that worker also creates the device's context in advance, which costs device
            memory. None: TORCHFT_ISOLATED_STANDBY_CONTEXT, by default no.
    """

    _reduces_each_dtype = True

    # Attributes that subclasses set

    # The device type of the backend.
    _device: ClassVar[str] = "cpu"
    # Whether `wait` of the backend's work returns when the operation is queued on the device, not finished.
    _queues: ClassVar[bool] = False
    # For each `tensor.device.type`, the module that shares its memory.
    _sharing: ClassVar[dict[str, str]] = {
        "cpu": "torchft.process_group.isolated.host",
        "cuda": "torchft.process_group.isolated.cuda",
        "xpu": "torchft.process_group.isolated.cuda",
    }
    _name: ClassVar[str] = "torchft-baby"

    _reduces_sparse = False

    # Set in the worker, before `_create_pg` is called there.
    _worker_timeout: ClassVar[timedelta] = timedelta(seconds=60)
    _worker_global_ranks: ClassVar[Optional[list[int]]] = None

    @classmethod
    def _create_pg(cls, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        """In the worker: connects with the peers over `store`. Each peer does the same."""
        raise NotImplementedError(f"{cls.__name__}._create_pg")

    def __init__(
        self,
        timeout: Union[float, timedelta] = 60.0,
        standby: Optional[bool] = None,
        standby_context: Optional[bool] = None,
    ) -> None:
        super().__init__(0, 1)
        self._timeout = _as_timeout(timeout)
        self._peers: Optional[tuple[int, int]] = None
        # Whether there was a worker before.
        self._warm = False
        self._aborted: Optional[Exception] = None
        self._shut_down: Optional[Exception] = None
        self._checker: Optional[Checker] = None
        self._starting: dict[int, tuple[Channel, _OpMetadata]] = {}
        self._workers = Workers(
            type(self),
            standby=switch(STANDBY_ENV, default=True, given=standby),
            context=switch(STANDBY_CONTEXT_ENV, given=standby_context),
        )
        prepare()
        weakref.finalize(self, hand_off, self._workers.close, "torchft_workers")  # workers end under a lock
        self._workers.prepare()

    # Peers

    def _connect_with(self, peers: NewPeers, options: Optional[ReconfigureOptions]) -> None:
        rank, world_size = peers.rank, peers.world_size
        check_rank(rank, world_size)
        self._end(RuntimeError(f"{self._name} was given new peers"))
        self._aborted = self._shut_down = None
        given = options.timeout if options is not None else None
        timeout = min(self._timeout, given or self._timeout).total_seconds()
        settings = {
            "store_addr": peers.store_addr,
            "rank": rank,
            "world_size": world_size,
            "timeout": self._timeout.total_seconds(),
            "connect_timeout": timeout,
            "global_ranks": peers.global_ranks,
            "device": current_device() or 0,
            "environment": dict(os.environ),
        }
        try:
            # An abort also ends a worker that is still connecting.
            worker = started(self._workers.take)
            began = time.monotonic()
            try:
                connecting = worker.request(protocol.CONFIGURE, timeout + _GRACE_SEC, settings)
                self._workers.prepare()  # the next worker is forked while this one connects
                worker.answered(connecting, "connect with its peers")
            except Exception as e:
                # The worker's own deadline for connecting precedes this one. When it passes, the worker
                # reports an error of the store or the backend.
                if self._aborted is not None or time.monotonic() - began < timeout:
                    raise
                raise WorkerTimedOut(
                    f"{self._name}: connecting with its peers timed out after {timeout:g} seconds: {e}"
                ) from e
        except BaseException:
            self._end(RuntimeError(f"{self._name} has no peers until it is configured again"))
            raise
        if enabled():
            store = meeting_store(peers.store_addr, world_size, timedelta(seconds=timeout))
            self._checker = Checker(self._name, PrefixStore("check", store), rank, world_size, self._timeout)
        self._peers = rank, world_size
        self._warm = True
        if self._worker is not worker:  # an abort or a shutdown has ended the worker since it answered
            error = self._shut_down or self._aborted or RuntimeError(f"{self._name} was aborted")
            self._end(error)
            raise copied(error)

    def get_reconfigure_handle(self) -> str:
        """The handle by which peers find this group.

        The first call waits for the standby worker: peers that receive the handle will wait for this group,
        and should not have to wait for the start of an interpreter.

        Raises:
            Exception: the reason why there is no worker.
        """
        if not self._warm:
            started(self._workers.first)
            self._warm = True
        return super().get_reconfigure_handle()

    # State

    @property
    def _worker(self) -> Optional[Channel]:
        """The present worker, which may still be connecting; None after an abort."""
        return self._workers.given

    def size(self) -> int:
        """The number of peers; -1 if there are none."""
        peers = self._peers
        return -1 if peers is None else peers[1]

    def rank(self) -> int:
        return self.getRank()

    def getRank(self) -> int:
        peers = self._peers
        return 0 if peers is None else peers[0]

    def getBackendName(self) -> str:
        return self._name

    def num_active_work(self) -> int:
        """The number of operations that have not ended."""
        worker = self._worker
        return 0 if worker is None or worker.broken is not None else worker.in_flight

    def set_timeout(self, timeout: timedelta) -> None:
        check_positive("timeout", timeout)
        self._timeout = timeout
        worker = self._worker
        if worker is not None and worker.broken is None:
            worker.notify(protocol.SET_TIMEOUT, timeout.total_seconds())

    def _peers_now(self) -> object:
        return self._worker or self

    def errored(self) -> Optional[Exception]:
        """The group's error: waits for the device, which may hang, and asks the worker's backend."""
        worker = self._worker
        if worker is None:
            return self._aborted
        if worker.broken is None and not worker.drain(self._timeout.total_seconds()):
            return RuntimeError(f"{self._name}: timed out: the device is not done within {self._timeout}")
        if self._aborted is None and worker.broken is None:
            try:
                worker.check(self._timeout.total_seconds())
            except Exception as e:
                return e
        return self._aborted or worker.broken

    def share_buffer(self, tensor: torch.Tensor) -> bool:
        module = self._sharing.get(tensor.device.type)
        share = None if module is None else getattr(importlib.import_module(module), "share", None)
        return share is not None and share(tensor)

    def abort(self, errored: bool = True) -> None:
        """Kills the worker. All waits for its operations raise an error at once. `errored`: whether `errored`
        returns the error, until there are new peers.
        """
        error = RuntimeError(f"{self._name} was aborted and has no peers until it is configured again")
        if errored and self._worker is not None:
            self._aborted = error
        self._end(error)

    def shutdown(self) -> None:
        """Kills the worker and the standby worker. `configure` starts new ones.

        Until then operations raise OSError, the same error as with upstream's closed pipe.
        """
        super().shutdown()
        self._shut_down = OSError(
            f"handle is closed: {self._name} was shut down and has no peers until it is configured again"
        )
        self._end(self._shut_down)
        self._workers.close()

    def _end(self, error: Exception) -> None:
        self._peers = None
        checker, self._checker = self._checker, None
        if checker is not None:
            checker.close(error)
        self._workers.end(error)

    # Operations

    def _started(self, op_id: int) -> tuple[Channel, _OpMetadata]:
        return self._starting[op_id]

    def _run(self, name: str, *args: Any, opts: Any = _NO_OPTIONS) -> Work:
        """Sends an operation to the worker."""
        channel = self._connected()
        checker = self._checker  # read once: an abort on another thread clears it
        if checker is not None:
            checker.check(name, args, opts)
        access = None
        if name in POINT_TO_POINT:
            opts = _given_ms()
        elif opts is _NO_OPTIONS:
            opts = None
        elif name in ("allreduce", "allreduce_coalesced"):
            opts = reduction_options(opts, protocol.OPERATIONS[name][-1])
        elif name == "broadcast":
            # The root's tensors are only read, those of the others only written, so each is copied in one
            # direction at most.
            access = "r" if opts.rootRank == self.getRank() else "w"
        op = operation(channel.devices.sharing, self._name, name, (*args, opts), access, self._timeout)
        channel.start(op)
        # `_BabyWork` looks it up by its number.
        self._starting[op.op_id] = channel, op
        try:
            # Read from the package: a replacement put there must take effect.
            return sys.modules["torchft.process_group"]._BabyWork(self, op.op_id, op.stream)
        finally:
            del self._starting[op.op_id]

    def _connected(self) -> Channel:
        """The worker that is connected with peers; an error says why there is none."""
        worker = self._worker
        if worker is None or self._peers is None:
            error = self._shut_down or self._aborted
            raise copied(error) if error else AssertionError("process group not initialized")
        return worker


add_operations(ProcessGroupBaby, [name for name in protocol.OPERATIONS if name not in vars(ProcessGroup)])


def _given_ms() -> int:
    """The timeout in milliseconds of a send or receive that begins now; 0 for the group's."""
    given = given_timeout()
    return 0 if given is None else math.ceil(given / timedelta(milliseconds=1))


def _as_timeout(timeout: Union[float, timedelta]) -> timedelta:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(seconds, (int, float)) or not 0 < seconds < float("inf"):
        raise ValueError(f"timeout={timeout!r}: a timedelta above zero is needed, or seconds")
    return timedelta(seconds=seconds)
