"""The groups of the conformance suite. A new group joins with a row in BACKENDS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, TCPStore

from tests.unit.process_group.ranks import TIMEOUT
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    ProcessGroupWrapper,
    create_store_client,
)
from torchft.process_group.wrapper import abortable

NATIVE = hasattr(dist.ProcessGroup, "reconfigure")


def gloo() -> ProcessGroupGloo:
    return ProcessGroupGloo(timeout=TIMEOUT)


def native(store: TCPStore, rank: int) -> dist.ProcessGroup:
    """A process group as init_process_group(..., enable_reconfigure=True) creates it, without its global
    state.
    """
    own = create_store_client(f"localhost:{store.port}/native", TIMEOUT)
    group = dist.ProcessGroup(own, rank, 3)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(own, rank, 3, timeout=TIMEOUT, enable_reconfigure=True)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


class StubManager:
    """The part of a Manager that a ManagedProcessGroup needs."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg = pg
        self._abortable_pg = abortable(pg)

    def num_participants(self) -> int:
        return self._pg.size()

    def allreduce(self, tensor: torch.Tensor, reduce_op: ReduceOp) -> dist.Work:
        return self._abortable_pg.allreduce([tensor], reduce_op)


def managed(pg: dist.ProcessGroup) -> ManagedProcessGroup:
    return ManagedProcessGroup(StubManager(pg))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Backend:
    """The properties of a group that tests depend on.

    Attributes:
        make: makes a group, given a store and a rank.
        swallows: whether a failed allreduce does not raise.
        wraps: whether it wraps another group, which runs the suite itself.
        checked: whether it has TORCHFT_CHECK_COLLECTIVES.
        missing: the reason why it cannot run here; empty if it can.
    """

    name: str
    make: Callable[[TCPStore, int], Any]
    world_size: int = 3
    device: str = "cpu"
    reduces_and_scatters: bool = NATIVE  # since PyTorch 2.14
    swallows: bool = False
    wraps: bool = False
    native: bool = False
    checked: bool = True
    missing: Optional[str] = None

    def __str__(self) -> str:
        return self.name


_NO_NATIVE = None if NATIVE else "needs PyTorch >= 2.14, whose groups can be reconfigured"
# NCCL before 2.30 does not accept two ranks on one GPU.
_NCCL: dict[str, Any] = dict(world_size=1, device="cuda", reduces_and_scatters=True)

BACKENDS = [
    Backend("gloo", lambda store, rank: gloo()),
    Backend("baby_gloo", lambda store, rank: ProcessGroupBabyGloo(timeout=TIMEOUT)),
    Backend(
        "native",
        lambda store, rank: ProcessGroupWrapper(pg=native(store, rank)),
        native=True,
        missing=_NO_NATIVE,
    ),
    Backend("wrapper", lambda store, rank: ProcessGroupWrapper(pg=gloo()), wraps=True),
    Backend("managed", lambda store, rank: managed(gloo()), wraps=True),
    Backend(
        "managed_native",
        lambda store, rank: managed(native(store, rank)),
        native=True,
        wraps=True,
        missing=_NO_NATIVE,
    ),
    Backend(
        "error_swallowing",
        lambda store, rank: ErrorSwallowingProcessGroupWrapper(gloo()),
        swallows=True,
        wraps=True,
    ),
    Backend("fake", lambda store, rank: FakeProcessGroupWrapper(gloo()), wraps=True),
    Backend(
        "dummy",
        lambda store, rank: ProcessGroupDummy(0, 1),
        world_size=1,
        reduces_and_scatters=True,
        checked=False,
    ),
    Backend("nccl", lambda store, rank: ProcessGroupNCCL(timeout=TIMEOUT), **_NCCL),
    Backend("baby_nccl", lambda store, rank: ProcessGroupBabyNCCL(timeout=TIMEOUT), checked=False, **_NCCL),
]


def backends(*, alone: bool = True, native: bool = True, wrappers: Sequence[str] | None = None) -> list[Any]:
    """The groups to which a test applies, as pytest parameters.

    Args:
        alone: whether it also applies to groups of one rank.
        native: whether it also applies to native groups.
        wrappers: wrappers that can break the tested behavior; with other wrappers the test is marked slow.
            None: all.
    """
    found = []
    for backend in BACKENDS:
        if (backend.world_size == 1 and not alone) or (backend.native and not native):
            continue
        marks = []
        if backend.device == "cuda":
            marks.append(pytest.mark.device)
        if backend.wraps and wrappers is not None and backend.name not in wrappers:
            marks.append(pytest.mark.slow)  # the wrapped group runs the same test
        found.append(pytest.param(backend, id=backend.name, marks=marks))
    return found
