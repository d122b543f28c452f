"""The worker: runs the operations of one group in a process that may be killed at any moment.

One thread reads requests and starts operations. The thread on which an operation ends, Gloo's own, sends the
answer, so that no other thread has to wake up. The worker gets the name of its group's class, and imports it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, Callable, Sequence

import torch

from torchft.process_group._errors import POINT_TO_POINT, explained
from torchft.process_group._gloo.connections import GlooConnections
from torchft.process_group._gloo.operations import _LOOK_SEC, Operations
from torchft.process_group._gloo.scheduling import calm_loops
from torchft.process_group.base import BaseProcessGroup
from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.sharing import Borrowing
from torchft.process_group.native import native_error, set_operation_timeout
from torchft.process_group.reconfigure import meeting_store
from torchft.utils import DeviceThread


def main(channel: socket.socket, settings: dict[str, Any]) -> None:
    """Serves one trainer until the trainer closes its end.

    Args:
        channel: this end of the channel.
        settings: `group` is the class as "module:name", `path` is sys.path, `pytorch` the trainer's version,
            `sharing` the module for each device, `prepare` the index of the device whose context is to be
            made at once, or None.
    """
    worker = Worker(channel)
    process = os.pidfd_open(os.getpid())
    worker.answer(0, descriptors=(process,))  # first: the trainer kills this process by the descriptor
    os.close(process)
    try:
        worker.load(**settings)
        worker.serve()
    except Exception as e:
        worker.answer(0, error=e)
        raise


class Worker:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._group: Any = None
        self._pg: Any = None
        self._modules: dict[str, str] = {}
        self._index = 0
        self._sharings: dict[int, Borrowing] = {}
        # A training step has fewer different operations. Notes may change what the records mean.
        self._decoded = lru_cache(512)(self._decode)
        # The names of operations without an answer so far.
        self._in_flight: dict[int, str] = {}

    def answer(
        self,
        operation: int,
        mark: Any = None,
        error: BaseException | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Sends an answer, see `protocol`."""
        encoded = None if error is None else protocol.encode_error(error)
        try:
            protocol.send(self._channel, (operation, mark, encoded), descriptors)
        except ConnectionError:
            # The trainer has closed its end of the socket.
            os._exit(0)

    def load(
        self,
        group: str,
        path: list[str],
        pytorch: str,
        sharing: dict[str, str],
        prepare: int | None,
    ) -> None:
        # Two versions differ in options and handles of memory: the result could be wrong without an error.
        if pytorch != torch.__version__:
            raise RuntimeError(
                f"the worker has imported PyTorch {torch.__version__} from {torch.__path__[0]}, and the "
                f"trainer has PyTorch {pytorch}: the trainer's sys.path must name the folder of its own "
                "PyTorch first"
            )
        sys.path[:] = path
        module, name = group.split(":")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        self._group = found
        self._modules = sharing
        # One thread, because this process only transfers data, and the trainer's threads need the processors.
        torch.set_num_threads(1)
        if prepare is not None:
            self._prepare(found._device, prepare)

    def _module(self, device: str) -> ModuleType:
        return importlib.import_module(self._modules[device])

    def _prepare(self, device: str, index: int) -> None:
        """Makes `index` the current device, and creates its context."""
        if device != "cpu":
            self._module(device).prepare(torch.device(device, index))

    def _sharing(self, device: int) -> Borrowing:
        if device not in self._sharings:
            name = protocol.DEVICES[device]
            # A host backend also accepts tensors on a device, which is prepared when the first one arrives.
            if name != self._group._device:
                self._prepare(name, self._index)
            self._sharings[device] = self._module(name).worker()
        return self._sharings[device]

    def serve(self) -> None:
        while True:
            try:
                (kind, *rest), descriptors = protocol.receive(self._channel)
            except EOFError:
                return
            if kind == protocol.RUN:
                try:
                    self._run(*rest)
                except Exception as e:
                    self.answer(rest[0], error=e)
            elif kind == protocol.NOTE:
                operation, device, note = rest
                self._decoded.cache_clear()
                self._sharing(device).notified(note, descriptors[0] if descriptors else None)
                self.answer(operation)
            elif kind == protocol.PING:
                self.answer(0)
            elif kind == protocol.CHECK:
                self.answer(rest[0], error=None if self._pg is None else native_error(self._pg))
            elif kind == protocol.SET_TIMEOUT:
                if self._pg is not None:
                    set_operation_timeout(self._pg, timedelta(seconds=rest[0]))
            elif kind == protocol.CONFIGURE:
                operation, settings = rest
                try:
                    self._configure(**settings)
                except Exception as e:
                    self.answer(operation, error=e)
                else:
                    self.answer(operation)

    def _configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        timeout: float,
        connect_timeout: float,
        global_ranks: list[int] | None,
        device: int,
        environment: dict[str, str],
    ) -> None:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        group = self._group
        self._index = device
        self._prepare(group._device, device)
        group._worker_timeout = timedelta(seconds=timeout)
        group._worker_global_ranks = global_ranks
        store = meeting_store(store_addr, world_size, timedelta(seconds=connect_timeout))
        self._pg = group._create_pg(store, rank, world_size)
        if group._queues:
            self._watch(partial(native_error, self._pg))
            return
        calm_loops()
        operations = Operations(group._name, GlooConnections(store, rank, world_size))

        def broken() -> Exception | None:
            names = list(self._in_flight.values())
            return operations.over(not set(names).issubset(POINT_TO_POINT)) if names else None

        if operations.connections:
            self._watch(broken)

    def _watch(self, find: Callable[[], Exception | None]) -> None:
        """Reports a fatal error: one of the backend, after which the device may never reach the next event,
        or the end of a connection for which operations in flight wait. Then this process ends, so that no
        operation writes to tensors that were returned to the user.
        """

        def watch() -> None:
            while (error := find()) is None:
                time.sleep(_LOOK_SEC)
            self.answer(0, error=error)
            os._exit(1)

        DeviceThread(watch, "torchft_watch").start()

    # Operations

    def _decode(self, device: int, record: bytes) -> tuple[str, Callable[..., Any], list[Any], timedelta]:
        """An operation's name, function, arguments, and timeout; 0 for the group's."""
        name, arguments = protocol.decode_call(record, lambda ref: self._sharing(device).borrow(ref))
        timeout = timedelta(milliseconds=arguments.pop() if name in POINT_TO_POINT else 0)
        pg = self._pg
        # Without PyTorch's dispatcher, which takes longer than the start of a small operation.
        plain = type(pg) is BaseProcessGroup and name == "allreduce"
        if plain and protocol.DEVICES[device] == "cpu":
            pg = pg._get_backend(torch.device("cpu"))
        return name, getattr(pg, name), arguments, timeout

    def _run(self, operation: int, device: int, mark: Any, record: bytes) -> None:
        name, function, arguments, timeout = self._decoded(device, record)
        # A device that queues work, whose streams wait; None: an operation has finished when it ends.
        queue = None if mark is None else self._sharing(device)
        if queue is not None:
            queue.follow(mark)
        explain = partial(explained, self._group._name, name, tuple(arguments))
        try:
            work = function(*arguments)
        except RuntimeError as e:
            raise explain(e) from e
        if self._group._queues:
            if work is not None:  # None if NCCL queued it on the current stream itself (`asyncOp=False`)
                # The current stream waits, not this thread.
                work.wait()
            self.answer(operation, None if queue is None else queue.mark())
            return
        self._in_flight[operation] = name
        try:
            # The works of Gloo's send and recv have no future. That of tensors on a device has a callback
            # on a thread without a device.
            future = None if queue is not None else work.get_future()
        except RuntimeError:
            future = None
        if future is None:
            wait = partial(work.wait, timeout) if timeout else work.wait
            DeviceThread(self._end, "torchft_wait", (operation, wait, explain, queue)).start()
        else:
            future.add_done_callback(lambda done: self._end(operation, done.value, explain, queue))

    def _end(
        self,
        operation: int,
        wait: Callable[[], object],
        explain: Callable[[Exception], Exception],
        queue: Borrowing | None,
    ) -> None:
        """Answers when an operation has ended; `wait` raises its error."""
        if not hasattr(_kept, "state"):
            _kept.state = ctypes.pythonapi.PyGILState_Ensure()
        try:
            wait()
            mark = None if queue is None else queue.mark()
        except Exception as e:
            self.answer(operation, error=explain(e))
        else:
            self.answer(operation, mark)
        del self._in_flight[operation]


# Python's state of Gloo's threads, which would be made and freed with each operation.
_kept = threading.local()
