"""The error messages of failed operations, and the tensors among an operation's arguments."""

from __future__ import annotations

import re
from typing import Any, Callable

import torch

# Operations between two ranks.
POINT_TO_POINT = ("send", "recv", "recv_anysource")

# Texts in the errors of PyTorch's backends for an operation, option or dtype that they do not support.
_UNSUPPORTED = re.compile(
    r"does not support|not supported|unsupported|invalid scalar type|not implemented|cannot use",
    re.IGNORECASE,
)


# Texts of timeouts: Gloo's "Timed out waiting" and "Application timeout caused pair closure", a store's "wait
# timeout after".
_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)
_TIMED_OUT = "timed out"  # the text that scripts look for


def explained(group: str, name: str, args: tuple[Any, ...], error: Exception) -> Exception:
    """Returns the error for the caller: the backend's error or, if the operation is not supported, an error
    that also names the process group and the operation.

    For an unsupported dtype, PyTorch's text is only "Invalid scalar type".
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or _UNSUPPORTED.search(text) is None:
        return named_timeout(error)
    kinds = sorted({f"{t.dtype} on {t.device.type}" for t in tensors_of(args)})
    unsupported = RuntimeError(f"{group} does not support {name} of {', '.join(kinds) or 'this'}: {text}")
    unsupported.__cause__ = error
    return unsupported


def named_timeout(error: Exception) -> Exception:
    """The same error; for a timeout whose text lacks "timed out", a copy with these words appended."""
    text = str(error)
    if not isinstance(error, RuntimeError) or _TIMED_OUT in text or _TIMEOUT.search(text) is None:
        return error
    named = type(error)(f"{text} ({_TIMED_OUT})")
    named.__cause__ = error.__cause__
    return named


def copied(error: Exception) -> Exception:
    """Returns a copy of an error, for another caller to raise.

    A raised exception refers to the frames that it passed, and so to their variables. A stored exception
    would keep alive a group that nothing else refers to.
    """
    return type(error)(*error.args)


def refuse_meta(group: Callable[[], str], name: str, args: object) -> None:
    """Refuses tensors on the meta device among `args`, by a ValueError. PyTorch would return without calling
    a backend, and the peers would wait for this rank.
    """
    if any(tensor.is_meta for tensor in tensors_of(args)):
        raise ValueError(
            f"{group()}: {name} of a tensor on the meta device: dense tensors with memory are needed"
        )


def tensors_of(args: object) -> list[torch.Tensor]:
    if isinstance(args, torch.Tensor):
        return [args]
    found: list[torch.Tensor] = []
    if isinstance(args, (list, tuple)):
        for arg in args:
            found += tensors_of(arg)
    return found
