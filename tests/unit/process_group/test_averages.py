"""The error of an average in 16 bits: the bounds that `Manager.allreduce` states."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch.distributed import ReduceOp, TCPStore

from tests.unit.manager.conftest import Fixture, fixture, quorum
from tests.unit.process_group.ranks import TIMEOUT, connect, on_ranks
from torchft.process_group import ProcessGroupDummy, ProcessGroupGloo

__all__ = ["fixture"]


class Sums(ProcessGroupDummy):
    """Adds the values of the other groups, like Gloo with real peers."""

    def __init__(self, store: TCPStore, others: list[torch.Tensor]) -> None:
        super().__init__(0, 1)
        self._store, self._others = store, others

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        mine = [tensors[0], *self._others]
        groups = [ProcessGroupGloo(TIMEOUT) for _ in mine]
        connect(groups, self._store)
        on_ranks(len(mine), lambda rank: groups[rank].allreduce([mine[rank]], ReduceOp.SUM).wait())
        for group in groups:
            group.shutdown()
        return super().allreduce(tensors, opts)


def average(fixture: Fixture, store: TCPStore, values: list[torch.Tensor]) -> torch.Tensor:
    """Returns the result of the first group."""
    count = len(values)
    fixture.client._quorum.return_value = quorum(
        replica_world_size=count, max_world_size=count, replica_ids=[f"group_{i}:uuid" for i in range(count)]
    )
    first, *others = [value.clone() for value in values]
    manager = fixture.manager(pg=Sums(store, others))
    manager.start_quorum()
    return cast(torch.Tensor, manager.allreduce(first).get_future().wait())


@pytest.mark.parametrize("groups", [2, 3, 5])
@pytest.mark.parametrize("magnitude", [100.0, 1e-6], ids=["normal", "subnormal in float16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_average_in_16_bits_is_within_its_bounds(
    fixture: Fixture, store: TCPStore, dtype: torch.dtype, magnitude: float, groups: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    values = [(torch.randn(4096, generator=generator) * magnitude).to(dtype) for _ in range(groups)]
    exact = torch.stack([value.double() for value in values])
    error = (average(fixture, store, values).double() - exact.mean(0)).abs()
    info = torch.finfo(dtype)
    bound = groups / 2 * info.eps * exact.abs().mean(0) + info.smallest_normal * info.eps / 2
    assert (error <= bound).all()
    assert error.max() > 0, "the average is exact, so this does not test the bound"


def test_a_sum_beyond_float16_is_not_finite(fixture: Fixture, store: TCPStore) -> None:
    """The result is infinite, not a wrong finite value: gradient scalers then skip the step, and LocalSGD
    counts the synchronization as not finite.
    """
    values = [torch.full((2,), 20000.0, dtype=torch.float16) for _ in range(4)]
    assert average(fixture, store, values).isinf().all()
    assert average(fixture, store, [value.bfloat16() for value in values]).tolist() == [19968.0] * 2
    assert average(fixture, store, values[:3]).tolist() == [20000.0] * 2, "a sum of 60000 fits into float16"
