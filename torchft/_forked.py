"""A forked child has copies of its parent's objects, but neither their threads nor a right to their
connections.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import TypeVar

T = TypeVar("T")


def refusal(what: str) -> RuntimeError:
    """The error for the use of a parent's object in a forked child."""
    return RuntimeError(
        f"{what} was made before this process was forked: its threads and connections belong to the parent; "
        "use the "
        "'spawn' or 'forkserver' start method"
    )


class Maker:
    """The process that made an object.

    Args:
        what: names the object in errors.
    """

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises RuntimeError in a forked child, where the call would wait for a thread that does not
        exist.
        """
        if not self.here:
            raise refusal(self._what)


# Objects whose destructors join their threads, or end the process where these do not exist (PyTorch's
# TCPStore).
_threaded: weakref.WeakSet[object] = weakref.WeakSet()


def threaded(thing: T) -> T:
    """Registers an object whose destructor joins its threads: forked children never destroy it. Returns the
    object.
    """
    _threaded.add(thing)
    return thing


def _keep_all() -> None:
    for thing in list(_threaded):
        # More than a reference, which the end of Python drops.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_keep_all)
