"""The messages between an isolated group and its worker."""

from __future__ import annotations

import pickle
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

from torchft.process_group import _PickleSafeOptions
from torchft.process_group.isolated import protocol
from torchft.process_group.isolated.messages import receive, send


def fields(opts: Any) -> dict[str, Any]:
    values = {name: getattr(opts, name) for name in dir(opts) if not name.startswith("_")}
    if "reduceOp" in values:
        values["reduceOp"] = values["reduceOp"].__getstate__()
    return values


def options() -> list[Any]:
    made: list[Any] = []
    for kind in protocol._OPTIONS_CLASSES:
        opts: Any = kind()
        opts.timeout = timedelta(milliseconds=1234)
        for name, value in {"rootRank": 3, "rootTensor": 1, "asyncOp": False, "device_ids": [2, 5]}.items():
            if hasattr(opts, name):
                setattr(opts, name, value)
        if hasattr(opts, "reduceOp"):
            opts.reduceOp = ReduceOp.MAX
        made += [kind(), opts]
    return made


@pytest.mark.parametrize("opts", options(), ids=lambda opts: type(opts).__name__)
def test_options_arrive_unchanged(opts: Any) -> None:
    assert fields(protocol.decode_options(protocol.encode_options(opts))) == fields(opts)
    safe = pickle.loads(pickle.dumps(_PickleSafeOptions.safe_args((1, [opts], "x"))))
    number, (back,), text = _PickleSafeOptions.unsafe_args(safe)
    assert (number, text, fields(back)) == (1, "x", fields(opts))


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL, the only backend with PREMUL_SUM")
def test_a_factor_arrives() -> None:
    opts = c10d.AllreduceOptions()
    opts.reduceOp = dist._make_nccl_premul_sum(0.25)
    assert protocol.decode_options(protocol.encode_options(opts)).reduceOp.__getstate__()[1] == 0.25
    opts.reduceOp = dist._make_nccl_premul_sum(torch.ones(1))
    with pytest.raises(ValueError, match="a tensor as its factor"):
        protocol.encode_options(opts)


def sent(opts: Any) -> Any:
    encoded, seconds = protocol.options(opts)
    assert seconds == opts.timeout.total_seconds()
    return fields(protocol.read_body(protocol.code("barrier") + encoded, lambda *_: torch.zeros(0))[1][0])


@pytest.mark.parametrize("kind", [c10d.AllreduceOptions, c10d.AllreduceCoalescedOptions, c10d.ReduceOptions])
def test_options_that_are_encoded_once_are_distinguished(kind: Any) -> None:
    given = []
    for name in ("reduceOp", "timeout", "asyncOp", "rootRank", "rootTensor"):
        opts = kind()
        if hasattr(opts, name):
            values = {"reduceOp": ReduceOp.MAX, "timeout": timedelta(seconds=7), "asyncOp": not getattr(opts, name)}
            setattr(opts, name, values.get(name, 3))
            given += [opts, kind()]
    for opts in given + given:
        assert sent(opts) == fields(opts)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL, the only backend with PREMUL_SUM")
def test_factors_are_distinguished() -> None:
    opts = c10d.AllreduceOptions()
    for factor in (0.25, 0.5):
        opts.reduceOp = dist._make_nccl_premul_sum(factor)
        assert sent(opts) == fields(opts)


def test_invalid_options_are_named() -> None:
    with pytest.raises(TypeError, match=r"dict: options of torch\.distributed are needed"):
        protocol.encode_options({})


def test_arguments_arrive_unchanged() -> None:
    body = b"".join(
        [
            protocol.code("alltoall_base"),
            protocol.tensor((0, b"one")),
            protocol.tensors([(1, b""), (0, b"x" * 300)]),
            protocol.lists([[(0, b"a")], [], [(2, b"b"), (0, b"c")]]),
            protocol.integer(-7),
            protocol.integers([]),
            protocol.integers([1 << 40, -1]),
            protocol.options(c10d.AllToAllOptions())[0],
        ]
    )
    name, arguments = protocol.read_body(body, lambda device, ref: (device, ref))  # type: ignore[arg-type, return-value]
    assert name == "alltoall_base"
    assert arguments[:-1] == [
        (0, b"one"),
        [(1, b""), (0, b"x" * 300)],
        [[(0, b"a")], [], [(2, b"b"), (0, b"c")]],
        -7,
        [],
        [1 << 40, -1],
    ]
    assert isinstance(arguments[-1], c10d.AllToAllOptions)


def test_marks_precede_the_body() -> None:
    for items in ([], [(1, b"mark")], [(0, b""), (2, b"m" * 100)]):
        assert protocol.read_marks(protocol.marks(items) + b"body") == (items, b"body")


def test_answers_are_separated_wherever_the_pipe_cuts_them() -> None:
    sent = [protocol.Answer(kind, 1 << 40 | kind, b"x" * (7 * kind)) for kind in range(5)]
    data = b"".join(protocol.answer(*answer) for answer in sent)
    for size in (1, 5, 13, 14, len(data)):
        got: list[protocol.Answer] = []
        rest = b""
        for at in range(0, len(data), size):
            answers, rest = protocol.read_answers(rest + data[at : at + size])
            got += answers
        assert (got, rest) == (sent, b"")


def test_an_answer_is_written_in_one_piece() -> None:
    assert len(protocol.answer(protocol.FAILED, 1, b"x" * 10_000)) == 4096


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("a\nb"), ValueError, "a\nb"),
        (RuntimeError("c"), RuntimeError, "c"),
        (dist.DistBackendError("d"), dist.DistBackendError, "d"),
        (OSError("e"), RuntimeError, "OSError: e"),
        (KeyboardInterrupt(), RuntimeError, "KeyboardInterrupt: "),
        (dist.Work, RuntimeError, "pybind11_type: <class"),
    ],
    ids=str,
)
def test_errors_keep_a_class_that_both_ends_know(error: Any, kind: type, text: str) -> None:
    decoded = protocol.decode_error(protocol.encode_error(error))
    assert type(decoded) is kind and str(decoded).startswith(text)


def test_long_messages_are_sent_too() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        for data in (b"x", b"\xff" * 2, b"y" * 1_000_000):
            send(left, data)
            assert receive(right) == (data, [])
        left.close()
        assert receive(right) == (b"", [])
