"""The messages between an isolated group and its worker."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as c10d

from torchft.process_group import _PickleSafeOptions
from torchft.process_group.isolated import protocol


def fields(opts: Any) -> dict[str, Any]:
    values = {name: getattr(opts, name) for name in dir(opts) if not name.startswith("_")}
    if "reduceOp" in values:
        values["reduceOp"] = values["reduceOp"].__getstate__()
    return values


def options() -> list[Any]:
    made: list[Any] = []
    for kind in protocol._FIELDS_OF:
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


def test_invalid_options_are_named() -> None:
    with pytest.raises(TypeError, match=r"dict: options of torch\.distributed are needed"):
        protocol.encode_options({})


@pytest.mark.parametrize("name", protocol.OPERATIONS)
def test_calls_arrive_unchanged(name: str) -> None:
    """Each operation, with an argument of each kind that it has."""
    examples: dict[str, Any] = {"": "a", "[": ["a", "b"], "[[": [["a"], [], ["b", "c"]]}
    integers: dict[str, Any] = {"i": -7, "[i]": [1 << 40, -1]}
    kinds = protocol.OPERATIONS[name]
    given = [
        kind() if isinstance(kind, type) else integers.get(kind, examples["[" * kind.count("[")])
        for kind in kinds
    ]
    made = protocol.encode_call(name, given, lambda tensor, access: (len(access), tensor))
    back, arguments = protocol.decode_call(made, lambda item: item[1])
    assert back == name
    for kind, argument, expected in zip(kinds, arguments, given):
        assert (fields(argument) == fields(expected)) if isinstance(kind, type) else argument == expected


def test_missing_options_are_the_default() -> None:
    made = protocol.encode_call("barrier", [None], lambda *_: None)
    assert fields(protocol.decode_call(made, lambda item: item)[1][0]) == fields(c10d.BarrierOptions())


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


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


Pair = tuple[socket.socket, socket.socket]


def test_records_and_descriptors_arrive(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    for data in (b"x", b"\xff" * 2, b"y" * 1_000_000):
        for descriptors in (0, 1):
            with open(tmp_path / "file") as file:
                protocol.send(pair[0], ("run", 7, data), [file.fileno()] * descriptors)
            record, got = protocol.receive(pair[1])
            assert record == ("run", 7, data) and len(got) == descriptors
            for descriptor in got:
                assert not os.get_inheritable(descriptor)
                assert os.pread(descriptor, 5, 0) == b"hello"
                os.close(descriptor)


def test_the_end_of_the_other_side(pair: Pair) -> None:
    """Its last message arrives even if it has left some unread."""
    protocol.send(pair[0], "unread")
    protocol.send(pair[1], "last words")
    pair[1].close()
    assert protocol.receive(pair[0]) == ("last words", [])
    with pytest.raises(EOFError):
        protocol.receive(pair[0])
    with pytest.raises(BrokenPipeError):
        protocol.send(pair[0], "too late")


def test_a_full_socket_is_an_error_for_a_thread_that_must_not_wait(pair: Pair) -> None:
    def fill() -> None:
        for _ in range(100_000):
            protocol.send(pair[0], bytes(1 << 10), flags=socket.MSG_DONTWAIT)

    with pytest.raises(BlockingIOError):
        fill()


def test_the_text_of_an_error_is_bounded() -> None:
    assert len(str(protocol.decode_error(protocol.encode_error(ValueError("x" * 100_000))))) == 10_000
    assert str(protocol.decode_error(protocol.encode_error(ValueError("\udcff")))) == "?"
