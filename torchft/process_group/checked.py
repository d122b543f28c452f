"""TORCHFT_CHECK_COLLECTIVES=1: ranks compare their next collective, and raise an error if it differs instead
of hanging.

Before each collective every rank writes a description of it to the store of the group, and reads the others'.
If they differ, all ranks raise the same error in that call. The backend is not called then: Gloo would end
the process if sizes differ, and wait until its timeout if operations differ. So in this mode a call returns
only when all ranks have made it, and takes a millisecond or more. Sends and receives concern two ranks and
are not compared.

PyTorch's own wrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL; seen: 2.15) compares neither the reduction nor the
root, and an abort does not end its wait for a rank that does not come.
"""

from __future__ import annotations

import sys
import threading
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Optional

import torch
from torch.distributed import Store

from torchft._checks import switch
from torchft.process_group._errors import POINT_TO_POINT, tensors_of
from torchft.utils import dtype_name

#: 1: ranks name the first collective that differs between groups; slow, to find why a job hangs. Default: 0.
CHECK_COLLECTIVES = "TORCHFT_CHECK_COLLECTIVES"

# Operations whose arguments may differ between ranks, with the index of the argument that is compared.
_COMPARED_ARGUMENT = {"gather": 1, "scatter": 0, "gather_single": 1}
_SIZES_DIFFER = ("alltoall", "alltoall_base", "all_to_all_single")
_NOT_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


def enabled() -> bool:
    """Whether collectives are compared; a ValueError if the variable is neither 0 nor 1."""
    return switch(CHECK_COLLECTIVES)


def describe(name: str, args: tuple[Any, ...], opts: object) -> Optional[str]:
    """A collective in one line, equal on all ranks that call the same; None if it is not compared."""
    if name in POINT_TO_POINT:
        return None
    tensors = tensors_of(args[_COMPARED_ARGUMENT[name]] if name in _COMPARED_ARGUMENT else args)
    kinds = [f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in tensors]
    if name in _SIZES_DIFFER:
        kinds = sorted({kind.partition("[")[0] for kind in kinds})
    if len(kinds) > 8:  # a few sizes are enough to recognize the call; a digest distinguishes the rest
        kinds[8:] = [f"… {len(kinds)} tensors, {zlib.crc32(str(kinds).encode()):08x}"]
    parts = [", ".join(kinds)] if kinds else []
    reduce_op = getattr(opts, "reduceOp", opts)
    # ReduceOp wraps RedOpType, which prints as RedOpType.SUM.
    if type(reduce_op).__name__ in ("RedOpType", "ReduceOp"):
        parts.append(f"op {str(getattr(reduce_op, 'op', reduce_op)).rpartition('.')[2]}")
    root = getattr(opts, "rootRank", None)
    if root is not None:
        parts.append(f"root {root}")
    return f"{name}({'; '.join(parts)})"


def _caller() -> str:
    """File and line of the caller outside of torch and torchft."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_OURS):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


def first_difference(views: list[str]) -> Optional[int]:
    """The first rank whose description of a collective differs from rank 0's."""
    # The place of the call, at the end of the description, may differ.
    calls = [view.partition(")")[0] for view in views]
    return next((rank for rank, view in enumerate(calls) if view != calls[0]), None)


class Checker:
    """Compares the collectives of one set of peers.

    Args:
        store: store that all ranks share, with a prefix for this set of peers.
        timeout: how long to wait until the other ranks make the same call.
    """

    def __init__(self, name: str, store: Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._name = name
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_sec = timeout.total_seconds()
        self._lock = threading.Lock()
        self._calls = 0
        self._error: Optional[Exception] = None
        self._closed = threading.Event()

    def close(self, error: Exception) -> None:
        """Makes current and later waits for the other ranks raise `error`."""
        self._error = self._error or error
        self._closed.set()

    def check(self, name: str, args: tuple[Any, ...], opts: object) -> None:
        """Waits until all ranks have called the same collective. RuntimeError, also by every later call: they
        call different ones, or a rank calls none in time.
        """
        what = describe(name, args, opts)
        if what is None:
            return
        with self._lock:
            number, self._calls = self._calls, self._calls + 1
            if self._error is not None:
                raise self._error
            self._store.set(f"{number}/{self._rank}", what + _caller())
        keys = [f"{number}/{rank}" for rank in range(self._world_size)]
        deadline, pause = time.monotonic() + self._timeout_sec, 0.0005
        while not self._store.check(keys):
            if self._closed.wait(pause):
                assert self._error is not None
                raise self._error
            pause = min(2 * pause, 0.02)
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                self._fail(
                    f"rank {self._rank} calls {what} as collective {number}; of the ranks {missing} none "
                    f"came in {self._timeout_sec:g} s: they called {number} collectives, all like ours"
                )
        views = [view.decode() for view in self._store.multi_get(keys)]
        differs = first_difference(views)
        if differs is not None:
            self._fail(
                f"collective {number} differs between ranks: rank 0 calls {views[0]}, "
                f"rank {differs} calls {views[differs]}"
            )
        if number > 0:
            # A rank that has written this description has read all previous ones.
            self._store.delete_key(f"{number - 1}/{self._rank}")

    def _fail(self, text: str) -> NoReturn:
        self.close(RuntimeError(f"{self._name}: {text}"))
        assert self._error is not None
        raise self._error
