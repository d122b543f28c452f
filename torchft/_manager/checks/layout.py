"""Checks that the groups of a quorum reduce the same tensors, before any tensor is sent.

Wrappers of models and optimizers register the parameters. LocalSGD and DiLoCo describe what they reduce in
lines of text (``Manager.register_layout``), and so do the loaders of :mod:`torchft.data`. A digest of the
parameters goes to the lighthouse with each request: it refuses a group that differs from the groups of the
job, which lose no step (go/quorum/fit.go).

The groups of a quorum compare as well, because the lighthouse may be upstream's: a digest of all lines is one
of the settings in their handles (_agreement.py). The lines themselves are in the store that the handle names,
and are only read if digests differ. A difference costs the other groups a step.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable
from datetime import timedelta
from typing import Callable, Optional, Sequence

import torch
from torch.nn.parameter import is_lazy

from torchft._agreement import EQUAL, LAYOUT, LOADER, difference, differing, explained, texts_of
from torchft._manager.checks.loader import NAME
from torchft._manager.quorum.plan import Plan
from torchft.checkpointing.codec.layout import local_part
from torchft.process_group._attempt import in_time
from torchft.process_group.reconfigure import create_store_client
from torchft.utils import dtype_name

# A TCPStore tries to connect for about twice its timeout: a few seconds.
_FETCH_TIMEOUT = timedelta(seconds=2)
_SHOWN = 6  # lines of each side in an error

_OF_LOADER = f"{NAME}: "
_REFUSAL = re.compile(r"reduces other tensors than member (\S+), which is in the job: rank (\d+) has ")

# Returns the lines of a group, given the address of its store and the digest; None if they cannot be read.
Read = Callable[[str, str], Optional[list[str]]]


class LayoutDiffers(ValueError):
    """Another group reduces other tensors, or trains on other data. `must_end`: this group has to change."""

    def __init__(self, message: str, must_end: bool) -> None:
        super().__init__(message)
        self.must_end = must_end


def digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def announcement(lines: Optional[Sequence[str]]) -> list[tuple[str, str]]:
    """What a group with these lines announces; nothing if they are None."""
    if lines is None:
        return []
    return [
        (LAYOUT, digest(lines)),
        (LOADER, NAME if any(line.startswith(_OF_LOADER) for line in lines) else ""),
    ]


class Layout:
    """The layout of the tensors that a rank reduces, which its handle announces to the other groups.

    Args:
        publish: puts the lines into the store of this rank's handle, given their digest.

    Attributes:
        lines: those of :meth:`add`; None: it was not called.
        announces: what this rank's handle announces.
    """

    def __init__(self, publish: Callable[[str, str], None]) -> None:
        self._publish = publish
        self.announces: list[tuple[str, str]] = []
        self.lines: Optional[list[str]] = None
        self._of_models: list[tuple[str, torch.Tensor]] = []
        self._of_optimizers: list[tuple[str, torch.Tensor]] = []
        self._parameters: list[str] = []
        self._for_lighthouse: Optional[str] = None
        self._explained: tuple[Optional[Exception], Optional[LayoutDiffers]] = (None, None)

    def add(self, what: str, lines: Sequence[str]) -> None:
        """Adds a line for each tensor of ``what``."""
        self.lines = [*(self.lines or ()), *(f"{what}: {line}" for line in lines)]
        self._announce()

    def add_parameters(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Adds the parameters of a model. No effect after the first request: see :meth:`for_lighthouse`."""
        if self._for_lighthouse is None:
            self._of_models += named

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds the parameters of an optimizer that belong to no model of :meth:`add_parameters`."""
        if self._for_lighthouse is None:
            self._of_optimizers += [
                (f"optimizer's [{i}][{j}]", parameter)
                for i, group in enumerate(optimizer.param_groups)
                for j, parameter in enumerate(group["params"])
            ]

    def for_lighthouse(self) -> str:
        """The digest for the lighthouse, which compares it and shows it to people; empty: nothing is known.

        It is fixed at the first request. What is registered later is not in it, since it is not in that of a
        group which joins then: that group has not come so far.
        """
        if self._for_lighthouse is None:
            found: dict[int, tuple[str, torch.Tensor]] = {}
            for name, tensor in self._of_models + self._of_optimizers:
                found.setdefault(id(tensor), (name, tensor))
            self._of_models, self._of_optimizers = [], []
            self._parameters = [f"parameter: {name} {describe(tensor)}" for name, tensor in found.values()]
            elements = sum(local_part(tensor).numel() for _, tensor in found.values() if not is_lazy(tensor))
            size = f" of {elements} elements" if elements else ""
            lines = [line for line in self.compared() or () if not line.startswith(_OF_LOADER)]
            self._for_lighthouse = f"{len(lines)} tensors{size}, digest {digest(lines)}" if lines else ""
            self._announce()
        return self._for_lighthouse

    def check(self, plan: Plan, new_here: bool) -> None:
        """Calls :func:`check_layouts`, which reads the lines of other groups from their stores."""
        check_layouts(plan, self.compared(), new_here=new_here, read=read_layout)

    def explain(self, error: Exception, group_rank: int) -> Optional[LayoutDiffers]:
        """Calls :func:`refused`, which reads the lines of another group from its store, once for an error."""
        if self._explained[0] is not error:
            self._explained = error, refused(error, self.compared(), group_rank, read_layout)
        return self._explained[1]

    def compared(self) -> Optional[list[str]]:
        """The lines that are compared with those of the other groups; None if nothing was registered."""
        return [*self._parameters, *(self.lines or ())] or self.lines

    def _announce(self) -> None:
        lines = self.compared()
        self.announces = announcement(lines)
        if lines is not None:
            self._publish(digest(lines), "\n".join(lines))


def refused(
    error: Exception, ours: Optional[Sequence[str]], group_rank: int, read: Read
) -> Optional[LayoutDiffers]:
    """The error of a rank whose group was refused, with the tensors that differ; None for any other error.

    Args:
        error: the error of a request for a quorum. Its text is made in go/quorum/fit.go.
        ours: the lines of this rank.
        group_rank: this rank. The lighthouse names one rank that differs; the others may not.
        read: as in :func:`check_layouts`.
    """
    text, _, where = str(error).partition("; its list is in ")
    found = _REFUSAL.search(text)
    if found is None:
        return None
    store = re.match(r"the store at (\S+) under layout/(\S+)", where)
    if store is None or ours is None or int(found[2]) != group_rank:
        return LayoutDiffers(text, must_end=True)
    here, there = _named(ours, read(store[1], store[2]))
    return LayoutDiffers(f"{text}: here {here}; there {there}", must_end=True)


def describe(tensor: torch.Tensor) -> str:
    """Describes type and shape of the part of a tensor in this process: ``float32[2, 3]``."""
    if is_lazy(tensor):
        return "of unknown shape"
    local = local_part(tensor)
    return f"{dtype_name(local.dtype)}{list(local.shape)}"


def check_layouts(plan: Plan, ours: Optional[Sequence[str]], *, new_here: bool, read: Read) -> None:
    """Raises LayoutDiffers if a group of this quorum announces another layout than ``ours``.

    The error says which group has to change: the one that joined last. At step 0 this is each group that
    differs from the first one; later, a group that differs from its source, and that heals or has committed
    no step yet. Without handles it is this group, if it joins: the others cannot compare.

    Args:
        ours: lines, None if nothing was registered.
        new_here: whether this group has committed no step since its process began.
        read: reads the lines of another group.
    """
    mine, names, handles = dict(announcement(ours)), plan.replica_ids, plan.handles
    if not handles and plan.replica_world_size > 1:
        others = [name for name in names if name != names[plan.replica_rank]]
        names = [name for name in others if name in plan.without_handles] or others
        handles = [""] * len(names)
    peers = [texts_of(handle) for handle in handles]
    found = {rank: key for rank, peer in enumerate(peers) if (key := differing(mine, peer, LOADER, LAYOUT))}
    if not found:
        return
    judge = plan.source.replica_rank if plan.source is not None and plan.max_step > 0 else 0
    must_end = (judge in found or not plan.handles) and (plan.heal or new_here)
    other = judge if must_end and judge in found else min(found)
    key, theirs = found[other], peers[other]
    if key == LOADER or ours is None:
        raise LayoutDiffers(explained(key, mine, names[other], theirs), must_end)
    # Native: no store.
    here, there = _named(ours, read(theirs["store"], theirs[key]) if "store" in theirs else None)
    raise LayoutDiffers(difference(EQUAL[key].name, here, names[other], there, EQUAL[key].allowed), must_end)


def read_layout(address: str, layout: str) -> Optional[list[str]]:
    """The lines of a group, from its own store; None if the store is not reached within a few seconds."""

    def read() -> list[str]:
        store = create_store_client(address, timeout=_FETCH_TIMEOUT)
        return store.get(f"layout/{layout}").decode().splitlines()

    with contextlib.suppress(Exception):
        return in_time(read, 3 * _FETCH_TIMEOUT)
    return None


def _named(ours: Sequence[str], theirs: Optional[list[str]]) -> tuple[str, str]:
    """The lines that only this group has, and those that only the other group has."""
    if theirs is None:
        return "other lines", "lines that could not be read from its store"
    here = [line for line in ours if line not in set(theirs)]
    there = [line for line in theirs if line not in set(ours)]
    if not here and not there:
        return "the same lines", "the same, in another order"
    return _listed(here), _listed(there)


def _listed(lines: list[str]) -> str:
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return ", ".join(lines[:_SHOWN]) + more if lines else "nothing"
