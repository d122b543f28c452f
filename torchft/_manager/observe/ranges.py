"""The Manager's ranges in the PyTorch profiler, with the same names as upstream's."""

from __future__ import annotations

from functools import wraps
from typing import Callable, ParamSpec, TypeVar

from torch.autograd import profiler
from torch.profiler import record_function

P = ParamSpec("P")
T = TypeVar("T")


def ranged(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Shows calls of a function as `torchft::manager::{name}`, at the cost of one more Python call."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def in_range(*args: P.args, **kwargs: P.kwargs) -> T:
            if not profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with record_function(f"torchft::manager::{name}"):
                return function(*args, **kwargs)

        return in_range

    return decorate
