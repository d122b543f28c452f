"""PyTorch's streaming format, and the types that are allowed in it.

`_streaming_load` and `_streaming_save` are PyTorch's own. Data from the network is read by PyTorch's
restricted unpickler, which makes objects of listed types only and never imports a name:
`allow_checkpoint_types` lists the types that state dicts and their structure consist of. All of them are
plain values and containers, so that nothing a peer sends can run code. Users add their own types with
`torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

import collections
import datetime
import pickle
from typing import Any, Callable, List, Tuple, Union

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch.distributed._serialization import _Entry, _streaming_load, _streaming_save

from torchft._checks import switch
from torchft.checkpointing.transport import CheckpointError

__all__ = [
    "_Entry",
    "_streaming_load",
    "_streaming_save",
    "allow_checkpoint_types",
    "explain",
    "pickle_allowed",
]

#: 1: read every pickle of a peer, as upstream does: anybody who can pose as a source can then run code.
#: Default: 0.
ALLOW_PICKLE_ENV = "TORCHFT_ALLOW_PICKLE"

_Global = Union[Callable[..., Any], Tuple[Callable[..., Any], str]]


def _fresh_leaf() -> pytree.TreeSpec:
    return pytree.TreeSpec(None, None, [])


class _LeafOfAClass:
    """Stands for PyTorch's class of leaves, which warns when it is instantiated."""

    def __new__(cls) -> pytree.TreeSpec:  # type: ignore[misc]
        return _fresh_leaf()


def _structure_types() -> List[_Global]:
    """TreeSpec and the containers that it refers to."""
    # a pickle of protocol 2 has these under their names of Python 2, which the unpickler translates
    types: List[_Global] = [dict, list, tuple, bytes, frozenset, collections.defaultdict, collections.deque]
    types.append(pytree.TreeSpec)
    if hasattr(pytree, "treespec_leaf"):
        # a new object: PyTorch's default is one for the whole process, which a forged pickle could change
        types.append((_fresh_leaf, "torch.utils._pytree.treespec_leaf"))
        # this is how PyTorch up to 2.11 pickles a leaf, here or at a peer
        types.append((_LeafOfAClass, "torch.utils._pytree.LeafSpec"))
    else:
        types.append(pytree.LeafSpec)
    return types


def _numpy_types() -> List[_Global]:
    """Numpy's scalars and arrays: learning rates and random states are often of these types."""
    core = getattr(np, "_core", None) or np.core  # numpy 2 renamed it
    types: List[_Global] = [np.ndarray, np.dtype, core.multiarray.scalar, core.multiarray._reconstruct]
    for name in ("scalar", "_reconstruct"):
        function = getattr(core.multiarray, name)
        # peers with the other major version write the other path
        types += [(function, f"numpy.core.multiarray.{name}"), (function, f"numpy._core.multiarray.{name}")]
    if hasattr(np, "dtypes"):
        types += [t for t in vars(np.dtypes).values() if isinstance(t, type) and issubclass(t, np.dtype)]
    return types


def allow_checkpoint_types() -> None:
    """Adds the types that checkpoints consist of to PyTorch's list of safe globals.

    The list belongs to the process and has no lock, so entries are added once and stay: a `safe_globals`
    block that ends in one thread would take them from a load in another. It is checked before every load
    because anyone may call `clear_safe_globals`.
    """
    missing = set(_ALLOWED) - set(torch.serialization.get_safe_globals())
    if missing:
        torch.serialization.add_safe_globals(list(missing))


_ALLOWED: List[_Global] = [_Entry, *_structure_types(), *_numpy_types(), datetime.timedelta]


def pickle_allowed() -> bool:
    """Whether the user accepts any pickle from the network, so that a false source can run code here."""
    return switch(ALLOW_PICKLE_ENV)


def explain(error: Exception, what: str) -> CheckpointError:
    """Rewrites the restricted unpickler's refusal so that it names the remedy."""
    text = str(error).split("\n")[0]
    if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in text:
        name = text.split("GLOBAL ", 1)[1].split(" ", 1)[0]
        return CheckpointError(
            f"{what} contains {name}, which is not loaded from the network unless it is allowed: call "
            f"torch.serialization.add_safe_globals([{name}]) at the start of the program, on every replica "
            "group, if loading such an object is safe, or keep it out of the state dict; "
            f"{ALLOW_PICKLE_ENV}=1 allows every type, also to a process that poses as a source"
        )
    return CheckpointError(f"{what} cannot be read: {type(error).__name__}: {text}")
