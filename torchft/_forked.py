"""A forked child has copies of its parent's objects, but neither their threads nor their connections."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import TypeVar

T = TypeVar("T")

# Whether `torchft.launch`'s ready process has forked this process, which ends with its stand-in.
stood_for = False


def refusal(what: str) -> RuntimeError:
    """The error for the use of a parent's object in a forked child."""
    return RuntimeError(
        f"{what} was made before this process was forked: its threads and connections belong to the parent; "
        "use the 'spawn' or 'forkserver' start method"
    )


_makers: weakref.WeakSet[Maker] = weakref.WeakSet()


class Maker:
    """The process that made an object.

    Args:
        what: names the object in errors.

    Attributes:
        here: whether this is that process.
    """

    __slots__ = ("__weakref__", "_what", "here")

    def __init__(self, what: str) -> None:
        self._what = what
        self.here = True
        _makers.add(self)

    def check(self) -> None:
        """Raises RuntimeError in a forked child: the call would wait for a thread that does not exist."""
        if not self.here:
            raise refusal(self._what)


# Objects whose destructors join their threads, or end a process without these (PyTorch's TCPStore).
_threaded: weakref.WeakSet[object] = weakref.WeakSet()


def threaded(thing: T) -> T:
    """Registers an object whose destructor joins threads: forked children never destroy it. Returns it."""
    _threaded.add(thing)
    return thing


def _in_child() -> None:
    for maker in list(_makers):
        maker.here = False
    for thing in list(_threaded):
        # More than a reference, which the end of Python drops.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


os.register_at_fork(after_in_child=_in_child)
