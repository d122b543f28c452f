"""The trainer's ends of a worker, one for each device type, and the memory that is still in use there."""

from __future__ import annotations

import importlib
import threading
from functools import partial
from typing import Callable

from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.operation import _OpMetadata
from torchft.process_group.isolated.sharing import Sharing


class Devices:
    """The trainer's ends, one for each device type.

    Args:
        modules: the module for each `tensor.device.type`, see `sharing`.
        notify: sends a note to the other end for a device: `sharing.Notify`, with the device's number.
    """

    def __init__(self, modules: dict[str, str], notify: Callable[..., None]) -> None:
        self._modules = modules
        self._notify = notify
        # Reentrant: the garbage collector may close a channel on a thread that holds it.
        self._lock = threading.RLock()
        self._sharings: dict[int, Sharing] = {}
        # Operations whose registrations are released when the worker's device has reached the mark.
        self.queued: list[_OpMetadata] = []

    def sharing(self, device: int) -> Sharing:
        """The trainer's end for a device type, made for the first tensor of that type."""
        if device not in self._sharings:  # else no lock: in a forked child it may be held for ever
            with self._lock:
                if device not in self._sharings:
                    module = importlib.import_module(self._modules[protocol.DEVICES[device]])
                    self._sharings[device] = module.trainer(partial(self._notify, device))
        return self._sharings[device]

    # Registrations of operations that have ended, but not on the device

    def hold(self, op: _OpMetadata) -> None:
        """Keeps the operation's registrations until the worker's device has finished it."""
        with self._lock:
            self.queued.append(op)

    def release_reached(self) -> None:
        # Operations stay in the list until they are reached: another thread may be waiting for its end.
        for op in list(self.queued):
            if op.reached():
                with self._lock:
                    if op not in self.queued:  # another thread has released or abandoned it
                        continue
                    self.queued.remove(op)
                op.release()

    def abandon(self) -> None:
        """After a failure of the worker: registrations keep their memory until `close`."""
        with self._lock:
            queued, self.queued = self.queued, []
        for op in queued:
            op.registrations = []
            op.end_timer()

    # The end

    @property
    def any(self) -> bool:
        """Whether memory of a device is shared, and not only host memory."""
        return any(list(self._sharings))

    def free_streams(self) -> None:
        """Lets streams continue that wait for the worker: see `Sharing.free_streams`."""
        for sharing in list(self._sharings.values()):
            sharing.free_streams()

    def close(self) -> None:
        """Ends the sharing. Call it only after the worker has ended: until then its device may write."""
        for sharing in list(self._sharings.values()):
            sharing.close()
