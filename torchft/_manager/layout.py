"""Checks that the groups of a quorum reduce the same tensors, before any tensor is sent.

Wrappers of models and optimizers register the parameters. LocalSGD and DiLoCo describe what they reduce in
lines of text (``Manager.register_layout``). A digest of all this goes to the lighthouse with each request: it
refuses a group that differs from the groups of the job, which lose no step (go/quorum/fit.go).

The groups of a quorum compare as well, because the lighthouse may be upstream's. Each group's reconfigure
handle carries a digest of its lines; the lines themselves are in the store that the handle names, and are
only read if digests differ. Groups that announce nothing (upstream and native groups) are not compared. A
difference costs the other groups a step.

The loaders of :mod:`torchft.data` use the same mechanism, with one more rule: if one group has such a loader,
all must have one. A prefix of the digest says that a group has a loader; then a handle without a digest
counts as different. A native handle has a digest only with a loader.
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

from torchft._manager.handles import LAYOUT, announced, bare
from torchft._manager.loader import NAME as LOADER
from torchft._manager.plan import Plan
from torchft.checkpointing._places import local_part
from torchft.process_group._attempt import in_time
from torchft.process_group.reconfigure import Handle, create_store_client

# A TCPStore tries to connect for about twice its timeout: a few seconds.
_FETCH_TIMEOUT = timedelta(seconds=2)
_SHOWN = 6  # lines of each side in an error

_WITH_LOADER = "loader-"
_OF_LOADER = f"{LOADER}: "
_REFUSAL = re.compile(r"reduces other tensors than member (\S+), which is in the job: rank (\d+) has ")


class LayoutDiffers(ValueError):
    """Another group reduces different tensors, or trains on different data.

    Attributes:
        must_end: whether this group has to change, so that its process must end.
    """

    def __init__(self, message: str, must_end: bool) -> None:
        super().__init__(message)
        self.must_end = must_end


def digest(lines: Sequence[str]) -> str:
    prefix = _WITH_LOADER if any(line.startswith(_OF_LOADER) for line in lines) else ""
    return prefix + hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def announced_natively(layout: str) -> str:
    """The text that a native handle announces for a layout: the digest if this group has a loader, else nothing."""
    return layout if _has_loader(layout) else ""


class Layout:
    """The layout of the tensors that a rank reduces, which its handle announces to the other groups.

    Args:
        announce: puts the digest and the lines into this rank's handle.

    Attributes:
        lines: those of :meth:`add`; None: it was not called.
    """

    def __init__(self, announce: Callable[[str, str], None]) -> None:
        self._announce = announce
        self.lines: Optional[list[str]] = None
        self._of_models: list[tuple[str, torch.Tensor]] = []
        self._of_optimizers: list[tuple[str, torch.Tensor]] = []
        self._parameters: list[str] = []
        self._for_lighthouse: Optional[str] = None
        self._explained: tuple[Optional[Exception], Optional[LayoutDiffers]] = (None, None)

    def add(self, what: str, lines: Sequence[str]) -> None:
        """Adds a line for each tensor of ``what``."""
        self.lines = [*(self.lines or ()), *(f"{what}: {line}" for line in lines)]
        self._announce_lines()

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
            self._announce_lines()
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

    def _announce_lines(self) -> None:
        lines = self.compared()
        if lines is not None:
            self._announce(digest(lines), "\n".join(lines))


def refused(
    error: Exception,
    ours: Optional[Sequence[str]],
    group_rank: int,
    read: Callable[[Handle], Optional[list[str]]],
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
    theirs = read(Handle(id=found[1], store=store[1], layout=store[2]))
    return LayoutDiffers(f"{text}: {_describe(ours, theirs)}", must_end=True)


def describe(tensor: torch.Tensor) -> str:
    """Describes type and shape of the part of a tensor in this process: ``float32[2, 3]``."""
    if is_lazy(tensor):
        return "of unknown shape"
    local = local_part(tensor)
    return f"{str(local.dtype).removeprefix('torch.')}{list(local.shape)}"


def check_layouts(
    plan: Plan, ours: Optional[Sequence[str]], *, new_here: bool, read: Callable[[Handle], Optional[list[str]]]
) -> None:
    """Raises LayoutDiffers if another group of this quorum announces other lines than ``ours``.

    The error says which group has to change: the one that joined last. At step 0 this is each group that differs from
    the first one; later, a group that differs from its source, and that heals or has committed no step yet.

    Args:
        plan: the plan of this rank.
        ours: lines, None if nothing was registered.
        new_here: whether this group has committed no step since its process began.
        read: returns the lines of a group, None if they cannot be read.
    """
    mine = None if ours is None else digest(ours)
    if _has_loader(mine) and not plan.handles and plan.replica_world_size > 1:
        without = ", ".join(plan.without_handles or plan.replica_ids)
        raise LayoutDiffers(
            f"this group trains with an {LOADER}, which torchft 0.2.0 does not have: among {without} is a group that "
            "announces nothing, so it would divide the sum of weighted gradients by the number of groups",
            must_end=plan.heal or new_here,
        )
    peers = [_decode(text) for text in plan.handles]
    differing = [i for i, peer in enumerate(peers) if _differ(peer.layout, mine)]
    if not differing:
        return
    judge = plan.source.replica_rank if plan.source is not None and plan.max_step > 0 else 0
    must_end = judge in differing and (plan.heal or new_here)
    other = judge if must_end else differing[0]
    raise LayoutDiffers(_explain(plan.replica_ids[other], ours, peers[other], read), must_end)


def _differ(one: Optional[str], other: Optional[str]) -> bool:
    if one is None or other is None:  # a group that announces nothing
        return _has_loader(one) != _has_loader(other)
    return one != other


def _has_loader(layout: Optional[str]) -> bool:
    return layout is not None and layout.startswith(_WITH_LOADER)


def _explain(
    name: str, ours: Optional[Sequence[str]], peer: Handle, read: Callable[[Handle], Optional[list[str]]]
) -> str:
    here = ours is not None and _has_loader(digest(ours))
    if here != _has_loader(peer.layout):
        who, other = ("this group", name) if here else (name, "this group")
        return (
            f"{who} trains with an {LOADER}, which weights gradients by samples, and {other} without: it would divide "
            "their sum by the number of groups; all groups of a job need one, made before their first step"
        )
    assert ours is not None
    return f"this group {'trains on other data' if here else 'reduces other tensors'} than {name}: " + _describe(
        ours, read(peer)
    )


def read_layout(peer: Handle) -> Optional[list[str]]:
    """The lines of a group, from its own store; None if the store is not reached within a few seconds."""

    def read() -> list[str]:
        store = create_store_client(peer.store, timeout=_FETCH_TIMEOUT)
        return store.get(f"layout/{peer.layout}").decode().splitlines()

    with contextlib.suppress(Exception):
        return in_time(read, 3 * _FETCH_TIMEOUT)
    return None


def _decode(text: str) -> Handle:
    try:
        return Handle.decode(text)
    except ValueError:  # the handle of a native group, which is no JSON
        return Handle(id=bare(text), store="", layout=announced(text, LAYOUT) or None)


def _describe(ours: Sequence[str], theirs: Optional[list[str]]) -> str:
    if theirs is None:
        return "its lines could not be read from its store"
    here = [line for line in ours if line not in set(theirs)]
    there = [line for line in theirs if line not in set(ours)]
    if not here and not there:
        return "the same, in another order"
    return f"here {_listed(here)}; there {_listed(there)}"


def _listed(lines: list[str]) -> str:
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return ", ".join(lines[:_SHOWN]) + more if lines else "nothing"
