"""The safe encoding with mutated bytes: the result is always a state or a CheckpointError.

The tests mutate real structures at random: they change bytes of the JSON text, and replace, copy and drop its
values. A failure shows the seed.
"""

from __future__ import annotations

import collections
import copy
import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from torchft.checkpointing.codec.encoding import Encoded, decode
from torchft.checkpointing.codec.stream import storage_bytes
from torchft.checkpointing.transport import CheckpointError

STATE = {
    "model": {"weight": torch.arange(12.0).reshape(3, 4), "bias": torch.nn.Parameter(torch.ones(4))},
    "view": torch.arange(10)[2:8:2],
    "ordered": collections.OrderedDict(a=1, b=[None, True, 1.5, "text"]),
    "plain": (1 << 70, 1j, b"bytes", torch.Size([2, 3]), torch.float16, torch.device("cpu")),
    "numpy": {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(2.5),
        "large": np.zeros(2000),
    },
    "pickled": {1, 2, 3},
}
# Values that may occur at any place of JSON data.
STRANGE = [
    None,
    True,
    -1,
    0,
    1 << 40,
    1 << 62,
    1e308,
    float("nan"),
    "",
    "T",
    "__class__",
    "float64",
    "cuda:99",
    "P",
    [],
    {},
]
TAGS = ["l", "t", "s", "d", "o", "i", "c", "b", "dtype", "device", "T", "D", "spec", "n", "P"]
ROUNDS = 400


def paths(tree: Any, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    found = [path]
    if isinstance(tree, list):
        for i, item in enumerate(tree):
            found += paths(item, (*path, i))
    return found


def at(tree: Any, path: tuple[int, ...]) -> Any:
    for i in path:
        tree = tree[i]
    return tree


def mutated(tree: Any, rng: random.Random) -> Any:
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        places = [path for path in paths(tree) if path]
        if not places:
            return tree
        path = rng.choice(places)
        parent, i = at(tree, path[:-1]), path[-1]
        change = rng.randrange(6)
        if change == 0:
            parent[i] = rng.choice(STRANGE)
        elif change == 1:
            del parent[i]
        elif change == 2:
            parent.insert(i, copy.deepcopy(at(tree, rng.choice(places))))
        elif change == 3:
            parent[i] = copy.deepcopy(at(tree, rng.choice(places)))
        elif change == 4 and type(parent[i]) is int:
            parent[i] += rng.choice([-1, 1, 7, 1 << 31, -(1 << 33)])
        elif parent and isinstance(parent[0], str):
            parent[0] = rng.choice(TAGS)
    return tree


def flats(encoded: Encoded) -> list[torch.Tensor]:
    return [storage_bytes(storage).clone() for storage in encoded.storages]


@pytest.fixture(scope="module")
def encoded() -> Encoded:
    return Encoded(STATE)


def check(tree: Any, regions: list[torch.Tensor], why: str) -> bool:
    """Returns whether the tree was decoded."""
    sizes, refused = [region.numel() for region in regions], ""
    try:
        touch(decode(tree, regions, "the state"))
    except CheckpointError as error:
        refused = str(error)
    assert [region.untyped_storage().nbytes() for region in regions] == sizes, f"{why}: memory grew"
    assert refused.startswith("the state") or not refused, why
    return not refused


def touch(value: Any) -> None:
    """Reads every tensor: one that extends beyond its memory would end the process."""
    if isinstance(value, torch.Tensor):
        if value.numel() <= 1 << 20:  # an expanded tensor may have any size
            value.detach().clone()
    elif isinstance(value, dict):
        for item in value.values():
            touch(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            touch(item)


def test_changed_values(encoded: Encoded) -> None:
    seed = random.randrange(1 << 32)
    tree, understood = json.loads(encoded.structure), 0
    for i in range(ROUNDS):
        rng = random.Random(seed + i)
        understood += check(mutated(tree, rng), flats(encoded), f"random.Random({seed + i})")
    # The mutations are useful only if some of the trees are decoded and others are refused.
    assert 0 < understood < ROUNDS


def test_changed_bytes(encoded: Encoded) -> None:
    seed = random.randrange(1 << 32)
    for i in range(ROUNDS):
        rng = random.Random(seed + i)
        raw = bytearray(encoded.structure)
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        if rng.random() < 0.2:
            del raw[rng.randrange(len(raw)) :]
        try:
            tree = json.loads(bytes(raw))
        except ValueError:
            continue  # the caller of decode reports this error
        check(tree, flats(encoded), f"random.Random({seed + i})")


@pytest.mark.parametrize(
    "tree",
    [
        ["T", 0, "float32", 0, [1 << 40, 1 << 40], [0, 0], 0],
        ["T", 0, "float32", 0, [1 << 40], [0], 0],
        ["T", 0, "float32", 1 << 62, [1], [1], 0],
        ["T", 0, "float32", 0, [1 << 62, 4], [1 << 62, 1], 0],
        ["T", 0, "quint4x2", 0, [4], [1], 0],
        ["T", 0, "bits16", 0, [1], [1], 2],
        ["n", "O", [1], 0],
        ["n", "S1000000000000", [1], 0],
        ["n", "<f8", [-1, -1], 0],
        ["s", "a"],
        ["i", "0x" + "f" * 10_000],
        ["i", "9" * 10_000],
        ["device", "cuda:99"],
        ["d", ["l"], 1],
        ["P", "gARdcQAu", [], "list"],
        ["l", *([["l"]] * 3), ["T"]],
    ],
)
def test_ends_of_the_scale(encoded: Encoded, tree: Any) -> None:
    check(tree, flats(encoded), str(tree)[:100])


def test_deep_nesting() -> None:
    tree: Any = None
    for _ in range(50_000):
        tree = ["l", tree]
    with pytest.raises(CheckpointError, match="nested too deeply"):
        decode(tree, [], "the state")
