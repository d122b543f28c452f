"""Which operations torchft begins with new peers. tests/late/test_connecting.py has what they are for."""

from __future__ import annotations

from typing import Any, Optional
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import AllreduceOptions

from torchft.process_group import ProcessGroupNCCL, ProcessGroupXCCL, _first_operation
from torchft.process_group._first_operation import AllreduceKind, RecordedAllreduces, agreed, first_operation
from torchft.process_group.reconfigure import Handle


def test_allreduces_are_recorded_by_kind() -> None:
    recorded = RecordedAllreduces()
    assert recorded.encode() == ""
    opts = AllreduceOptions()
    opts.reduceOp = ReduceOp.AVG
    recorded.add([torch.ones(256, dtype=torch.bfloat16), torch.ones(0)], opts.reduceOp)
    recorded.add([torch.ones(1 << 24)], ReduceOp.SUM)  # counts as 32 MiB
    recorded.add([torch.ones(1), torch.ones(1, dtype=torch.int64)], ReduceOp.SUM)
    recorded.add([torch.ones(3)], ReduceOp.MAX)
    assert recorded.encode() == "avg/bfloat16/9,sum/float32/2,sum/float32/25"


@pytest.mark.parametrize(
    ("announced", "expected"),
    [
        (["", ""], []),
        (
            ["sum/float32/2,avg/float32/9", "", "sum/float32/2"],
            [("avg", "float32", 9), ("sum", "float32", 2)],
        ),
        (["sum/float32/2", None], None),  # an older version, or an isolated group
    ],
)
def test_peers_agree(announced: list[Optional[str]], expected: Optional[list[tuple[str, str, int]]]) -> None:
    assert agreed(announced) == expected


@pytest.mark.parametrize(
    "text", ["max/float32/2", "sum/int8/2", "sum/float32/26", "sum/float32/-1", "sum/float32"]
)
def test_an_unknown_kind_is_refused(text: str) -> None:
    """Otherwise the peers would begin different operations."""
    with pytest.raises(ValueError, match=r"allreduce|unpack"):
        agreed([text])


def test_operations_have_the_sizes_of_their_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[torch.dtype, int, str]] = []

    def allreduce(tensors: list[torch.Tensor], opts: Any) -> MagicMock:
        (tensor,) = tensors
        begun.append((tensor.dtype, tensor.numel(), "avg" if opts.reduceOp == ReduceOp.AVG else "sum"))
        return MagicMock(number=len(begun))

    monkeypatch.setattr(
        _first_operation, "_first", {torch.device("cpu"): (MagicMock(), torch.zeros(1 << 25).byte())}
    )
    monkeypatch.setattr(_first_operation, "get_stream_context", MagicMock())
    group: Any = MagicMock(allreduce=allreduce)
    first_operation(group, torch.device("cpu"))
    first_operation(group, torch.device("cpu"), 0)
    assert begun == [(torch.float32, 1, "sum"), (torch.float32, 0, "sum")]
    begun.clear()
    kinds = [
        AllreduceKind("avg", "bfloat16", 9),
        AllreduceKind("sum", "float32", 1),
        AllreduceKind("sum", "float32", 2),
        AllreduceKind("sum", "float32", 25),
    ]
    assert first_operation(group, torch.device("cpu"), kinds=kinds).number == len(begun)  # type: ignore[attr-defined]
    assert begun == [
        (torch.float32, 1, "sum"),
        (torch.bfloat16, 256, "avg"),
        (torch.bfloat16, 512, "avg"),
        (torch.float32, 2, "sum"),
        (torch.float32, 1 << 23, "sum"),
    ]


@pytest.mark.parametrize("kind", [ProcessGroupNCCL, ProcessGroupXCCL])
def test_a_group_announces_what_it_has_run(kind: Any) -> None:
    group = kind()
    assert Handle.decode(group.get_reconfigure_handle()).first == ""
    group._recorded.add([torch.ones(1)], ReduceOp.SUM)
    assert Handle.decode(group.get_reconfigure_handle()).first == "sum/float32/2"
    group.shutdown()
