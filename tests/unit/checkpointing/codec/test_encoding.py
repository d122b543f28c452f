"""The safe encoding: states are received unchanged, and no data from a peer runs code or reads beyond its
memory.
"""

from __future__ import annotations

import collections
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.checkpointing.checkpoint_states import Evil, assert_same, training_state
from torchft.checkpointing.codec.encoding import Encoded, decode
from torchft.checkpointing.codec.stream import storage_bytes
from torchft.checkpointing.transport import CheckpointError


def through(state: Any) -> Any:
    encoded = Encoded(state)
    return decode(
        json.loads(encoded.structure), [storage_bytes(s).clone() for s in encoded.storages], "the state"
    )


def test_a_training_state() -> None:
    assert_same(through(training_state()), training_state())


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            0,
            -(2**63),
            2**64,
            2**14000,
            0.1,
            -0.0,
            math.inf,
            "",
            "größe\x00\ud800",
            b"",
            b"\xff" * 5,
        ),
        *((), [], {}, {1: {None: ()}}, {(1, "a"): 1, True: 2, 0.5: 3, b"k": 4}, 3 - 2j, torch.Size([2, 0])),
        *(
            torch.float8_e4m3fn,
            torch.device("cuda:1"),
            collections.OrderedDict([((1,), [1])]),
            {1, 2},
            slice(1, 2),
        ),
    ],
)
def test_values(value: Any) -> None:
    if isinstance(value, slice):
        with pytest.raises(CheckpointError, match=r"\['a'\]\[0\], a builtins.slice, .*add_safe_globals"):
            through({"a": [value]})
        return
    got = through({"a": value})["a"]
    assert type(got) is type(value) and got == value
    if isinstance(value, (dict, tuple)):
        assert repr(got) == repr(value)


def test_nan_and_signed_zero() -> None:
    got = through([math.nan, -0.0])
    assert math.isnan(got[0]) and math.copysign(1, got[1]) == -1


@pytest.mark.parametrize(
    "array",
    [
        *(
            np.arange(5000.0),
            np.float32(3),
            np.array(["a", "bc"]),
            np.zeros((0, 3)),
            np.array(5),
            np.bool_(True),
        ),
        *(np.arange(6).reshape(2, 3).T, np.array(["2020-01-01"], "datetime64[D]"), np.array([1], ">i4")),
    ],
)
def test_numpy(array: Any) -> None:
    got = through(array)
    assert type(got) is type(array) and got.dtype == array.dtype and np.array_equal(got, array)


def test_shared_memory_stays_shared() -> None:
    base = torch.arange(10.0)
    got = through({"whole": base, "part": base[2:4], "odd": torch.complex(base, base).conj()})
    got["whole"][2] = 100
    assert got["part"][0] == 100


def test_memory_is_not_copied() -> None:
    state = {"a": torch.ones(1000)}
    encoded = Encoded(state)
    assert encoded.storages[0].data_ptr() == state["a"].data_ptr()
    flat = storage_bytes(encoded.storages[0])
    got = decode(json.loads(encoded.structure), [flat], "the state")
    assert got["a"].data_ptr() == state["a"].data_ptr()


def test_a_state_that_refers_to_itself() -> None:
    state: dict[str, Any] = {}
    state["me"] = [state]
    with pytest.raises(CheckpointError, match="refers to itself"):
        Encoded(state)


def test_unpicklable_objects_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"\['a'\]\[1\], a builtins.function, cannot be sent"):
        Encoded({"a": [1, lambda: 0]})


class Mine:
    def __init__(self) -> None:
        self.a = torch.ones(3)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mine) and torch.equal(self.a, other.a)


def test_a_registered_type() -> None:
    with pytest.raises(
        CheckpointError, match=r"\['x'\], a .*Mine, contains .*Mine, .*add_safe_globals\(\[.*Mine\]\)"
    ):
        through({"x": Mine()})
    with torch.serialization.safe_globals([Mine]):
        assert through({"x": Mine()}) == {"x": Mine()}


def test_code_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = tmp_path / "witness"
    with pytest.raises(CheckpointError, match=r"\['x'\].*system.*TORCHFT_ALLOW_PICKLE=1"):
        through({"x": Evil(str(witness))})
    assert not witness.exists()
    monkeypatch.setenv("TORCHFT_ALLOW_PICKLE", "1")
    through({"x": Evil(str(witness))})
    assert witness.exists()
    monkeypatch.setenv("TORCHFT_ALLOW_PICKLE", "yes")
    with pytest.raises(CheckpointError, match=r"TORCHFT_ALLOW_PICKLE='yes': allowed are 0 \(off\) and 1"):
        through({"x": Evil(str(witness))})


def tensor(**changes: Any) -> list[Any]:
    fields = {
        "region": 0,
        "dtype": "float32",
        "offset": 0,
        "shape": [2],
        "strides": [1],
        "flags": 0,
        **changes,
    }
    return ["T", *fields.values()]


@pytest.mark.parametrize(
    "tree",
    [
        *(
            {"a": 1},
            [],
            ["?"],
            ["i", "x"],
            ["b", "*"],
            ["dtype", "Tensor"],
            ["dtype", "float33"],
            ["device", "moon"],
        ),
        *(
            ["d", 1],
            ["d", ["l"], 1],
            ["s", "a"],
            ["n", "O", [1], 0],
            ["n", "f4", [3], 0],
            ["c"],
        ),
        *(
            ["__init__", 1],
            ["decode", 1],
            [["l"]],
            ["n", "f4", [100], 5],
            ["n", "V8", None, 0],
            ["P", "", [], ""],
        ),
        *(["P", "gAJLAQ==", [], "x"], ["D", tensor(), 1, 0], ["D", ["l"], 1]),
        tensor(region=1),
        tensor(region=-1),
        tensor(region="0"),
        tensor(region=True),
        tensor(dtype="nn"),
        tensor(shape=[3]),
        tensor(offset=1),
        tensor(offset=-1),
        tensor(shape=[-1]),
        tensor(shape=[2, 1]),
        tensor(shape=[2**62, 2**62], strides=[2**62, 1]),
        tensor(strides=[2**63]),
        tensor(strides=[0.5]),
    ],
)
def test_a_forged_structure_is_refused(tree: Any) -> None:
    with pytest.raises(CheckpointError, match="the state"):
        decode(tree, [torch.zeros(8, dtype=torch.uint8)], "the state")


def test_a_forged_depth_is_refused() -> None:
    tree: Any = 1
    for _ in range(100_000):
        tree = ["l", tree]
    with pytest.raises(CheckpointError, match="nested too deeply"):
        decode(tree, [], "the state")
