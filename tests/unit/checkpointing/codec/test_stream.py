"""The streaming format: it is the same as PyTorch's, and its content is not trusted."""

from __future__ import annotations

import collections
import contextlib
import io
import pickle
import sys
import threading
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch.distributed._serialization import _Entry

from tests.unit.checkpointing.checkpoint_states import (
    Evil,
    assert_same,
    odd_tensors,
    plain_values,
    training_state,
)
from torchft.checkpointing._serialization import _streaming_load, _streaming_save
from torchft.checkpointing.codec.stream import (
    pickle_object,
    read_object,
    storage_bytes,
    tensor_memory,
    unpickle,
)
from torchft.checkpointing.transport import CheckpointError


def written(obj: object) -> bytes:
    pickled = pickle_object(obj)
    data = pickled.prefix + b"".join(bytes(tensor_memory(storage_bytes(s))) for s in pickled.storages)
    assert len(data) == pickled.nbytes
    return data


def read(data: bytes, size: int | None = None) -> Any:
    return read_object(io.BytesIO(data), "a stream", size)


def test_round_trip() -> None:
    assert_same(read(written(training_state())), training_state())


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_pytorch_reads_ours() -> None:
    state = training_state()
    del state["user"]["tensors"]["empty"]  # PyTorch 2.7 cannot read an empty storage
    got = _streaming_load(io.BytesIO(written(state)), weights_only=False)  # type: ignore[arg-type]
    assert_same(got, state)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_we_read_pytorchs() -> None:
    state = training_state()
    # PyTorch writes these in a form that its restricted reader refuses; torchft writes them differently
    del state["user"]["values"]["default"], state["user"]["values"]["deque"]
    file = io.BytesIO()
    _streaming_save(state, file)  # type: ignore[arg-type]
    assert_same(read(file.getvalue()), state)


def test_shared_storage_stays_shared() -> None:
    got = read(written(odd_tensors()))
    got["shared"][2:4] = 5.0
    assert bool((got["shared_view"] == 5.0).all())


def test_one_storage_under_two_dtypes() -> None:
    base = torch.arange(4, dtype=torch.int32)
    state = {"int": base, "float": base.view(torch.float32)}
    assert_same(read(written(state)), state)


def test_tensors_are_read_into_their_own_storage() -> None:
    got = read(written({"a": torch.arange(6.0), "b": torch.ones(2)}))
    assert got["a"].is_contiguous() and got["a"].data_ptr() % got["a"].element_size() == 0
    got["a"].mul_(2)  # writable
    assert got["a"].tolist() == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    "tree",
    [
        {"a": 1, "b": [2, (3, None)]},
        collections.OrderedDict(z=[1], a=(2,)),
        collections.defaultdict(list, x=[1]),
        collections.deque([1, 2], maxlen=3),
        {0: {"nested": {1: []}}, (1, "key"): 5},
        7,
    ],
)
def test_tree_spec(tree: Any) -> None:
    leaves, spec = pytree.tree_flatten(tree)
    got = pytree.tree_unflatten(leaves, read(written(spec)))
    assert got == tree and type(got) is type(tree)


@pytest.mark.skipif(
    not hasattr(pytree.TreeSpec, "__setstate__"), reason="this PyTorch has another state of a TreeSpec"
)
def test_a_spec_that_pytorch_2_11_has_pickled() -> None:
    """PyTorch 2.11 pickles leaves as objects of a class; later versions pickle calls of a function
    instead.
    """
    pickled = (
        b"\x80\x02ctorch.utils._pytree\nTreeSpec\n)\x81](c__builtin__\nlist\nN]ctorch.utils._pytree\nLeafSpec\n)\x81]"
        b"(NN]K\x01K\x01K\x00ebaK\x02K\x01K\x01eb."
    )
    spec = unpickle(pickled, [], "a spec", trusted=False)
    assert pytree.tree_unflatten([7], spec) == [7]


def test_a_forged_spec_cannot_change_the_leaf_that_all_share() -> None:
    if not hasattr(pytree, "treespec_leaf"):
        pytest.skip("this PyTorch has no shared leaf")
    assert read(written([pytree.treespec_leaf()]))[0] is not pytree.treespec_leaf()


@pytest.mark.parametrize("name", ["__init__", "__new__", "__getattribute__", "length", "__del__"])
def test_a_forged_list_of_records_cannot_change_the_class_that_all_share(name: str) -> None:
    def pickled(value: object) -> bytes:
        return pickle.dumps(value, protocol=2)[2:-1]

    before = dict(vars(_Entry))
    # BUILD with (None, {...}) sets attributes on the object below it on the stack, here the class itself
    forged = b"\x80\x02ctorch.distributed._serialization\n_Entry\n" + pickled((None, {name: 5})) + b"b."
    try:
        with pytest.raises(CheckpointError, match="a stream"):
            read(forged)
        assert dict(vars(_Entry)) == before
    finally:
        if dict(vars(_Entry)) != before:  # otherwise later checks would be meaningless
            setattr(_Entry, name, before[name]) if name in before else delattr(_Entry, name)
    assert_same(read(written(training_state())), training_state())


def test_values_keep_their_types() -> None:
    got = read(written(plain_values()))
    assert_same(got, plain_values())
    assert got["default"]["new"] == []
    assert got["deque"].maxlen == 3


# Types that are not allowed


@pytest.mark.parametrize("where", ["structure", "records", "chunk", "spec"])
def test_a_malicious_pickle_runs_no_code(where: str, tmp_path: Any) -> None:
    proof = tmp_path / "proof"
    evil = Evil(str(proof))
    data = {
        "structure": lambda: written({"user": evil}),
        "records": lambda: pickle.dumps([evil], protocol=2),
        "chunk": lambda: written([torch.ones(1), evil]),
        "spec": lambda: written(pytree.TreeSpec(dict, [evil], [])),
    }[where]()
    with pytest.raises(CheckpointError, match="system"):
        read(data)
    assert not proof.exists()
    pickle.loads(pickle.dumps(evil))  # without restrictions the code runs
    assert proof.exists()


@pytest.mark.parametrize(
    "name", ["os.system", "builtins.eval", "builtins.getattr", "subprocess.Popen", "sys.exit"]
)
def test_functions_are_refused_by_name(name: str) -> None:
    module, function = name.rsplit(".", 1)
    structure = f"\x80\x02c{module}\n{function}\nX\x01\x00\x00\x001\x85R.".encode()
    data = pickle.dumps([_Entry("data.pkl", False, len(structure))], protocol=2) + structure
    with pytest.raises(CheckpointError, match="a stream"):
        read(data)


class Settings:
    def __init__(self, depth: int) -> None:
        self.depth = depth


class Point(NamedTuple):
    x: int


def test_a_users_type_is_refused_with_a_remedy_and_then_allowed() -> None:
    data = written({"settings": Settings(3)})
    with pytest.raises(CheckpointError) as refused:
        read(data)
    name = f"{Settings.__module__}.Settings"
    assert name in str(refused.value)
    assert f"torch.serialization.add_safe_globals([{name}])" in str(refused.value)

    with torch.serialization.safe_globals([Settings, Point]):
        assert read(data)["settings"].depth == 3
        assert read(written(Point(4))) == Point(4)


def test_the_list_survives_clear_safe_globals() -> None:
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        assert_same(read(written(plain_values())), plain_values())
    finally:
        torch.serialization.add_safe_globals(before)


def test_reading_in_many_threads() -> None:
    data = written(training_state())
    failed: list[Exception] = []

    def read_it() -> None:
        try:
            for _ in range(5):
                assert_same(read(data), training_state_once)
        except Exception as error:
            failed.append(error)

    training_state_once = read(data)
    threads = [threading.Thread(target=read_it) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed


# Damaged streams


def test_every_way_to_cut_it_short() -> None:
    data = written({"a": torch.arange(8.0), "b": [1, 2], "c": torch.ones(3)})
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            read(data[:length])


def test_a_cut_names_the_record() -> None:
    data = written({"a": torch.arange(8.0)})
    with pytest.raises(CheckpointError, match="cut short: record data/0 ends after 22 of 32 bytes"):
        read(data[:-10])


def test_more_than_announced() -> None:
    with pytest.raises(CheckpointError, match="goes on after its last record"):
        read(written([1]) + b"x")


def stream_of(entries: Any, rest: bytes = b"") -> bytes:
    return pickle.dumps(entries, protocol=2) + rest


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 100,
        b"HTTP/1.1 200 OK\r\n\r\n",
        stream_of(5),
        stream_of([5]),
        stream_of([]),
        b"\x80\x02]ctorch.distributed._serialization\n_Entry\na.",
        b"\x80\x02]cbuiltins\nlist\na.",
        stream_of([_Entry("data.pkl", False, -1)]),
        stream_of([_Entry("data.pkl", False, True)]),
        stream_of([_Entry(5, False, 1)], b"x"),  # type: ignore[arg-type]
        stream_of([_Entry("data.pkl", False, 4)], b"junk"),
        stream_of([_Entry("data.pkl", True, 4)], b"junk"),
        stream_of([_Entry("byteorder", False, 6)], b"middle"),
    ],
)
def test_garbage(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="a stream"):
        read(data)


def test_lengths_beyond_the_body_are_refused() -> None:
    huge = stream_of([_Entry("data/0", True, 1 << 60)])
    with pytest.raises(CheckpointError, match=r"announces 1152921504606846976 bytes .* and has"):
        read(huge, len(huge))
    with pytest.raises(CheckpointError, match="no memory for a tensor of 1152921504606846976 bytes"):
        read(huge)


def test_a_tensor_that_is_larger_than_its_record() -> None:
    data = written({"a": torch.arange(8.0)})
    entries_length = data.index(b"\x80\x02", 1)  # the beginning of the structure
    entries = pickle.loads(data[:entries_length])
    entries[-1].length -= 4
    with pytest.raises(CheckpointError, match="record data/0 has 28 bytes, its tensors need 32"):
        read(stream_of(entries, data[entries_length:-4]))


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_never_raise_other_errors(seed: int) -> None:
    """Damage results in an error of torchft or in other numbers, never in another exception."""
    data = written({"a": torch.arange(4.0), "b": [1, {"c": "text"}]})
    generator = torch.Generator().manual_seed(seed)
    for _ in range(150):
        damaged = bytearray(data)
        position = int(torch.randint(len(data), (1,), generator=generator))
        damaged[position] ^= int(torch.randint(1, 256, (1,), generator=generator))
        with contextlib.suppress(CheckpointError):
            read(bytes(damaged), len(damaged))


def test_the_byte_order_is_marked() -> None:
    assert sys.byteorder.encode() in pickle_object({"a": 1}).prefix
