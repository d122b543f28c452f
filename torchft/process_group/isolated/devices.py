"""The memory and events of each device type that a trainer shares with a worker, and what is queued there."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, Callable, Optional

from torchft.process_group.isolated.operation import _OpMetadata
from torchft.process_group.isolated.sharing import Sharing

# Makes the trainer's end for a device type, from its number and a function that sends notes to the worker.
MakeSharing = Callable[[int, Callable[[Any, Optional[int]], None]], Sharing]


class Devices:
    """The trainer's ends, one for each device type. `notify` sends a note to a device's other end."""

    def __init__(self, make: MakeSharing, notify: Callable[[int, Any, Optional[int]], None]) -> None:
        self._make = make
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
                    self._sharings[device] = self._make(device, partial(self._notify, device))
        return self._sharings[device]

    # Order

    def marks(self, op: _OpMetadata) -> tuple[tuple[int, Any], ...]:
        """Marks behind the work queued so far on the devices of an operation, for the worker to wait for."""
        marks = [
            (device, self._sharings[device].mark()) for device in {device for device, _ in op.registrations}
        ]
        return tuple([item for item in marks if item[1] is not None])

    def follow(self, op: _OpMetadata) -> bool:
        """Makes the current stream wait for the operation; False if only the host can (`Sharing.follow`)."""
        followed = [self._sharings[device].follow(mark) for device, mark in op.marks]
        return all(followed)

    def reached(self, op: _OpMetadata) -> bool:
        """Whether the worker's device has finished an operation."""
        return all(self._sharings[device].reached(mark) for device, mark in op.marks)

    # Registrations of operations that have ended, but not on the device

    def hold(self, op: _OpMetadata) -> None:
        """Keeps the operation's registrations until the worker's device has finished it."""
        with self._lock:
            self.queued.append(op)

    def release_reached(self) -> None:
        # Operations stay in the list until they are reached: another thread may be waiting for its end.
        for op in list(self.queued):
            if self.reached(op):
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
