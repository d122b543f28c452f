"""Sources that are opened with a state: after a heal, a restart, and by another worker process."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.unit.data.streaming import Files, Sequential, Skipping, Stateful, Whole
from tests.unit.data.test_lanes import SIZES, train
from tests.unit.data.test_loader import Alone
from tests.unit.data.test_loader_reading import Changing
from torchft.data import ElasticDataLoader, _stream_reader
from torchft.data._source_states import NotLoaded, Saved, SourceStates, has_state, load, save
from torchft.data.position import DataPosition

# torchdata 0.11 calls what PyTorch 2.15 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def saved(block: int, source: int = 3, epoch: int = 1) -> Saved:
    return Saved(epoch, source, block, b"")


def test_a_state_after_a_lost_step_is_not_used() -> None:
    states = SourceStates()
    for block, first in ((4, 0), (8, 4), (12, 8), (12, 8)):  # the last step comes again
        states.put(saved(block), 1, first)
    assert states.before(1, 3, 11) == saved(8)
    assert states.before(1, 3, 12) == saved(12)
    assert states.before(1, 3, 7) is None, "states of past steps are kept"
    assert states.save(1, 8) == [(3, 8, b"")]


def test_states_are_those_of_an_epoch() -> None:
    states = SourceStates()
    states.put(saved(4), 1, 4)
    assert states.before(2, 3, 9) is None
    states.put(saved(0, epoch=2), 2, 0)
    assert states.before(2, 3, 9) == saved(0, epoch=2) and states.save(1, 9) == []


def test_saved_states_are_loaded() -> None:
    states, others = SourceStates(), SourceStates()
    for source in (5, 2):
        states.put(saved(4, source), 1, 4)
    others.put(saved(9, 7), 1, 9)
    others.load(1, states.save(1, 4))
    assert others.save(1, 4) == [(2, 4, b""), (5, 4, b"")] and others.before(1, 7, 9) is None


@pytest.mark.parametrize(
    ("data", "has"),
    [(Whole(1), True), (Stateful([1]), True), (Files([1]), False), (Skipping([1]), False), ([1], False)],
)
def test_what_has_a_state(data: Any, has: bool) -> None:
    assert has_state(data) is has


def test_a_dataloader_has_the_state_of_its_dataset() -> None:
    assert has_state(StatefulDataLoader(Resuming(3))) and not has_state(StatefulDataLoader(Numbers(3)))
    assert not has_state(DataLoader(Resuming(3)))


def test_a_dataset_that_skips_is_not_asked_for_a_state() -> None:
    class Both(Skipping):
        state_dict = load_state_dict = None

    assert not has_state(Both([1]))


class Custom:
    pass


def test_only_plain_values_are_loaded() -> None:
    state = {"rng": torch.arange(3), "files": [("a", 1)], "buffer": b"x"}
    assert str(load(save(state))) == str(state)
    with pytest.raises(NotLoaded, match=r"(?s)its state cannot be loaded: .*Custom"):
        load(save({"a": Custom()}))


# In a loader


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_stream_reader, "_INTERVAL", 0)
    yield
    assert not multiprocessing.active_children()


class Numbers(IterableDataset):
    """Has no state, so that torchdata skips by reading."""

    def __init__(self, length: int) -> None:
        self.data = Sequential(length)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def samples(self, epoch: int) -> Any:
        return self.data.samples(epoch)


class Resuming(Numbers):
    """Has a state of its own, which torchdata saves with its."""

    def __init__(self, length: int) -> None:
        self.data = Whole(length)

    def state_dict(self) -> Any:
        return self.data.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.data.load_state_dict(state)


def make(data: Any, **settings: Any) -> ElasticDataLoader:
    return ElasticDataLoader(Alone(), data, **{**SIZES, "epochs": 2, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "workers"),
    [
        (71, 0),
        pytest.param(25, 1, marks=pytest.mark.slow),
        pytest.param(60, 0, marks=pytest.mark.slow),
        pytest.param(72, 0, marks=pytest.mark.slow),
    ],
)  # 72: full batches
@pytest.mark.parametrize(
    "kind",
    [Whole, lambda n: Stateful([n - 20, 0, 20]), Numbers, Resuming],
    ids=["whole", "cut", "plain", "state"],
)
def test_a_reader_takes_over_the_state_of_another(kind: Any, length: int, workers: int) -> None:
    """A new loader after each step, as after a heal or a restart."""
    found, state = [], None
    while state is None or state["epoch"] < 2:
        data = kind(length)
        if isinstance(data, Numbers):
            data = StatefulDataLoader(data, batch_size=None)
        loader = make(data, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        found.append([tuple(sample[1:]) for sample in train(loader, 1)[0]])
        state = loader.state_dict()
        if found[-1] and state["batch"]:
            assert ("readers" in state) == (kind is not Numbers)
        if state["batch"] and not workers and isinstance(data, Stateful | Whole):
            # A batch, and one sample ahead: what is before is not read again.
            assert data.log["read"] <= len(found[-1]) + len(state["readers"])
    samples = sorted(sample for step in found for sample in step)
    expected = sorted(sample[1:] for sample in kind(length).samples(0))
    assert samples == sorted(2 * expected)


@pytest.mark.parametrize("kind", [pytest.param(Numbers, marks=pytest.mark.slow), Resuming])
def test_torchdatas_own_worker_processes_read(kind: Any) -> None:
    """Two of them give samples in turns; the state is one for both."""
    found, state = [], None
    for steps in (2, 1, None):
        data = StatefulDataLoader(kind(40), batch_size=None, num_workers=2)
        loader = make(data)
        if state is not None:
            loader.load_state_dict(state)
        found += [sample[2] for step in train(loader, steps) for sample in step]
        state = loader.state_dict()
        if data._iterator is not None:
            data._iterator._shutdown_workers()
    # By itself each of torchdata's workers reads all samples of such a dataset.
    assert sorted(found) == sorted(4 * list(range(40)))


def test_worker_processes_that_would_start_others_are_refused() -> None:
    data = StatefulDataLoader(Numbers(40), batch_size=None, num_workers=2)
    with pytest.raises(
        ValueError, match="num_workers is 3, and the dataset is a StatefulDataLoader with num_w"
    ):
        make(data, num_workers=3)


class Epochs(Numbers):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return ((self.epoch, *rest) for _, *rest in self.data)


def test_the_dataset_of_a_stateful_dataloader_gets_the_epoch() -> None:
    steps = train(make(StatefulDataLoader(Epochs(5), batch_size=None)))
    assert [{epoch for epoch, *_ in step} for step in steps] == [{0}, {1}]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_running_group_that_falls_behind_goes_on_with_the_state(workers: int) -> None:
    data = Whole(1200)
    ahead, behind = make(Whole(1200)), make(data, num_workers=workers)
    train(ahead, 80)
    assert train(behind, 2)[1][0] == (0, 0, 12)
    read = data.log["read"]
    behind.load_state_dict(ahead._state())
    assert train(behind, 1)[0] == [(0, 0, number) for number in range(960, 972)]
    assert data.log["read"] - read <= 13


class Odd(Whole):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "custom": Custom()}


def test_a_state_that_cannot_be_loaded_is_replaced_by_reading(caplog: pytest.LogCaptureFixture) -> None:
    first = make(Odd(60))
    train(first, 2)
    second = make(Odd(60))
    second.load_state_dict(first.state_dict())
    with caplog.at_level(logging.WARNING):
        assert train(second, 1)[0][0] == (0, 0, 24)
    assert "source 0 of the stream is read from its begin up to block 12: its state cannot be" in caplog.text


def test_a_stateless_stream_saves_no_state() -> None:
    loader = make(Sequential(60))
    train(loader, 2)
    assert "readers" not in loader.state_dict()


def test_a_lost_step_does_not_move_the_state() -> None:
    manager = Changing()
    loader = ElasticDataLoader(manager, Whole(60), **SIZES)  # type: ignore[arg-type]
    for committed in (True, False, False):
        position = loader.position
        list(next(loader))
        loader.check_samples(loader.send_samples(), 1)
        if not committed:
            assert [block for _, block, _ in loader._state()["readers"]] == [6]
        manager.decide(committed)
    assert position == DataPosition(0, 1)
    assert [block for _, block, _ in loader._state()["readers"]] == [6]
    loader._stop_reading()
