"""Reading by the loader: the DataLoader's arguments, reading ahead, and random numbers."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, Optional

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from tests.unit.data.test_loader import Alone, Raises, make, train
from torchft._manager.quorum.plan import Plan as QuorumPlan
from torchft.data import _lanes
from torchft.data._prefetch import ReadFailed
from torchft.data.position import DataPlan, DataPosition

SAMPLES = 60
SIZES: dict[str, Any] = dict(global_batch_size=12, micro_batch_size=2, shuffle=False)
PLAN = DataPlan(SAMPLES, 12, 2, shuffle=False)


class Counting(Dataset):
    """Counts how often each of its samples is read, in all processes."""

    def __init__(self) -> None:
        self.reads = torch.zeros(SAMPLES, dtype=torch.int64).share_memory_()
        self.lock = multiprocessing.get_context("fork").Lock()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        with self.lock:
            self.reads[index] += 1
        return index


class Changing(Alone):
    """The Manager of a group while other groups join and leave."""

    rank_now: Optional[int] = 0  # rank among the participants
    participants = 1
    speeds: tuple[int, ...] = ()

    def _begin_batch(self) -> QuorumPlan:
        fields = {**super()._begin_batch().__dict__}
        fields.update(participating_rank=self.rank_now, participants=self.participants, speeds=self.speeds)
        return QuorumPlan(**fields)


def processes() -> set[Optional[int]]:
    return {process.pid for process in multiprocessing.active_children()}


@pytest.fixture(autouse=True)
def workers_end() -> Iterator[None]:
    yield
    assert processes() == set()


# Units that are read ahead


def trained_after_changes(
    changes: dict[int, tuple[Optional[int], int]],
    speeds: Callable[[int], tuple[int, ...]] = lambda step: (),
    **settings: Any,
) -> tuple[list[list[int]], list[int]]:
    """Returns the samples of each step, and how often each sample was read.

    Args:
        changes: by step: this group's rank and the number of participants from then on.
        speeds: of the participants in a step.
    """
    data, manager = Counting(), Changing()
    loader = make(data, manager, **{**SIZES, **settings})
    steps = []
    for number in range(len(loader)):
        manager.rank_now, manager.participants = changes.get(number, (manager.rank_now, manager.participants))
        manager.speeds = speeds(number)
        steps.append([index for unit in next(loader) if unit.weight for index in unit.data.tolist()])
        manager.decide(True)
    assert next(loader, None) is None
    return steps, data.reads.tolist()


def samples_of(step: int, rank: int, participants: int) -> list[int]:
    return [
        index
        for unit in PLAN.share(DataPosition(0, step), rank, participants).units
        for index in unit.indices
    ]


# Units read ahead at the end of a step: none, fewer than the share of a step, and more than a step has.
AHEAD = [
    {"num_workers": 0},
    {"num_workers": 1, "prefetch_factor": 2},
    {"num_workers": 2, "prefetch_factor": 4},
]


@pytest.mark.parametrize("settings", AHEAD)
def test_without_a_change_each_sample_is_read_once(settings: dict[str, Any]) -> None:
    steps, reads = trained_after_changes({0: (1, 2)}, **settings)
    assert steps == [samples_of(step, 1, 2) for step in range(5)]
    trained = {index for step in steps for index in step}
    assert reads == [int(index in trained) for index in range(SAMPLES)]


@pytest.mark.parametrize("settings", AHEAD)
def test_units_that_stay_after_a_failure_are_read_once(settings: dict[str, Any]) -> None:
    """The first of two groups is alone from step 2 on, and units that it has read ahead are part of its new
    share.
    """
    steps, reads = trained_after_changes({0: (0, 2), 2: (0, 1)}, **settings)
    assert steps == [samples_of(step, 0, 2 if step < 2 else 1) for step in range(5)]
    trained = {index for step in steps for index in step}
    assert reads == [int(index in trained) for index in range(SAMPLES)]


@pytest.mark.parametrize("settings", AHEAD)
def test_units_that_stay_after_a_cut_by_other_speeds_are_read_once(settings: dict[str, Any]) -> None:
    def speeds(step: int) -> tuple[int, ...]:
        return (200, 100) if step in (2, 3) else ()

    steps, reads = trained_after_changes({0: (0, 2)}, speeds, **settings)
    assert [len(step) for step in steps] == [6, 6, 8, 8, 6]  # of 12
    assert steps[:2] + steps[4:] == [samples_of(step, 0, 2) for step in (0, 1, 4)]
    assert steps[2][:6] == samples_of(2, 0, 2)
    trained = {index for step in steps for index in step}
    read = {index for index, count in enumerate(reads) if count}
    assert trained <= read and set(reads) <= {0, 1}


@pytest.mark.parametrize(("settings", "ahead"), list(zip(AHEAD, (0, 2, 8))))
def test_units_of_another_group_are_dropped_and_others_are_read_once(
    settings: dict[str, Any], ahead: int
) -> None:
    """A group that was alone is the second of two from step 1 on."""
    steps, reads = trained_after_changes({1: (1, 2)}, **settings)
    assert steps == [samples_of(step, 1 if step else 0, 2 if step else 1) for step in range(5)]
    trained = {index for step in steps for index in step}
    foreseen = [index for step in (1, 2) for index in samples_of(step, 0, 1)][: 2 * ahead]
    dropped = set(foreseen) - trained
    assert bool(dropped) == bool(ahead)
    assert reads == [int(index in trained | dropped) for index in range(SAMPLES)]


def test_a_group_that_does_not_take_part_reads_one_unit_of_a_step() -> None:
    steps, reads = trained_after_changes({0: (None, 2), 3: (1, 2)}, num_workers=1, prefetch_factor=4)
    assert steps == [*([[]] * 3), *(samples_of(step, 1, 2) for step in (3, 4))]
    assert [index for index, count in enumerate(reads[:36]) if count] == [0, 1, 12, 13, 24, 25]


# Arguments of the DataLoader


def double(samples: list[tuple[torch.Tensor]]) -> list[int]:
    return [2 * int(sample[0]) for sample in samples]


def test_the_collate_function_is_the_users() -> None:
    for workers in (0, 1):
        loader = make(collate_fn=double, shuffle=False, num_workers=workers)
        assert [unit.data for _, units in train(loader) for unit in units] == [
            [0, 2],
            [4, 6],
            [8, 10],
            [12, 14],
            [16, 18],
        ]


class Where(Raises):
    """Reports in which process a sample was read, and the arguments of its worker."""

    workers: list[int] = []  # noqa: RUF012 (of the process)

    def __getitem__(self, index: int) -> tuple[int, int, list[int]]:
        return index, os.getpid(), list(Where.workers)


def report(worker: int) -> None:
    Where.workers.append(worker)


def as_read(samples: list[Any]) -> list[Any]:
    return samples


def read_by(**settings: Any) -> list[tuple[int, int, list[int]]]:
    loader = make(Where(), collate_fn=as_read, shuffle=False, **settings)
    return [sample for _, units in train(loader) for unit in units for sample in unit.data]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_start_in_the_context_and_with_the_function_that_are_given(context: str) -> None:
    samples = read_by(num_workers=2, worker_init_fn=report, multiprocessing_context=context)
    assert [index for index, _, _ in samples] == list(range(10))
    assert os.getpid() not in {pid for _, pid, _ in samples}
    assert [workers for _, _, workers in samples] == [[unit % 2] for unit in range(5) for _ in range(2)], (
        "in turns, once each"
    )


def test_a_context_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="multiprocessing_context"):
        make(num_workers=1, multiprocessing_context="thread")


class Reports(Raises):
    """Reports each sample that is read."""

    def __init__(self) -> None:
        self.read = multiprocessing.get_context("fork").Semaphore(0)

    def __getitem__(self, index: int) -> int:
        self.read.release()
        return index


@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_prefetch_factor_is_the_number_of_units_read_ahead(prefetch_factor: int) -> None:
    data = Reports()
    loader = make(data, global_batch_size=2, num_workers=1, prefetch_factor=prefetch_factor)
    steps = iter(loader)
    (unit,) = next(steps)
    assert len(unit.indices) == 2
    for _ in range(2 * (1 + prefetch_factor)):
        assert data.read.acquire(timeout=60), "it was not read ahead"
    assert not data.read.acquire(block=False)
    loader._manager.drained = True  # type: ignore[attr-defined]
    assert next(steps, None) is None


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
@pytest.mark.parametrize("workers", [0, 1])
def test_memory_is_pinned_where_there_is_an_accelerator(workers: int) -> None:
    """tests/gpu/test_loader.py looks at the memory."""
    loader = make(pin_memory=True, shuffle=False, num_workers=workers)
    assert loader._lanes.lanes[0].dataloader.pin_memory
    pinned = [unit.data[0] for _, units in train(loader) for unit in units]
    assert torch.cat(pinned).tolist() == list(range(10))
    assert all(part.is_pinned() is torch.accelerator.is_available() for part in pinned)


def spare(persistent: bool) -> tuple[list[int], set[Optional[int]]]:
    """Runs a group that does not participate, so that reading restarts in each step. Returns the readers, and
    the remaining workers at the end.
    """
    manager = Changing()
    manager.rank_now = None
    loader = make(Where(), manager, collate_fn=as_read, num_workers=1, persistent_workers=persistent)
    pids = [unit.data[0][1] for _, units in train(loader) for unit in units]
    return pids, processes()


def test_persistent_workers_read_to_the_end_of_the_job_and_end_with_it() -> None:
    pids, left = spare(persistent=True)
    assert len(pids) == 3 and len(set(pids)) == 1
    assert left == set()
    pids, left = spare(persistent=False)
    assert len(pids) == 3 and left == set()


class Once(Raises):
    """Fails when a sample is read for the first time."""

    def __init__(self, fail: Callable[[], None]) -> None:
        self.fail, self.failed = fail, multiprocessing.get_context("fork").Event()

    def __getitem__(self, index: int) -> int:
        if not self.failed.is_set():
            self.failed.set()
            self.fail()
        return index


def disk_is_busy() -> None:
    raise OSError("the disk is busy")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (disk_is_busy, "OSError: .*the disk is busy"),
        (killed, "DataLoader worker .*(killed by signal|exited)"),
    ],
)
def test_a_loop_may_continue_after_a_sample_that_could_not_be_read(
    fail: Callable[[], None], message: str, persistent: bool
) -> None:
    manager = Alone()
    loader = make(Once(fail), manager, shuffle=False, num_workers=1, persistent_workers=persistent)
    step = next(loader)
    with pytest.raises(ReadFailed, match=f"(?s)unit 0 of batch 0 of epoch 0 could not be read: .*{message}"):
        list(step)
    assert len(manager.errors) == 1, "the other groups are not notified"
    assert processes() == set(), "the traceback of the error keeps them"
    manager.decide(False)
    read = [unit.data.tolist() for _, units in train(loader) for unit in units]
    assert read == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


# Random numbers


class Noise(Raises):
    """Draws from numpy's global generator and from a separate one."""

    def __getitem__(self, index: int) -> tuple[float, float]:
        return float(numpy.random.rand()), float(numpy.random.permutation(1000)[0])


def drawn(workers: int, seed: int = 0, rank: int = 0, participants: int = 1) -> dict[tuple[int, int], Any]:
    """Returns the values of each unit of a job, by batch and unit."""
    manager = Changing()
    manager.rank_now, manager.participants = rank, participants
    loader = make(Noise(), manager, reproducible_rng=True, seed=seed, num_workers=workers, shuffle=False)
    return {
        (step.position.batch, unit.indices[0]): [part.tolist() for part in unit.data]
        for step, units in train(loader)
        for unit in units
        if unit.weight
    }


def test_numbers_of_numpy_depend_on_the_unit_alone() -> None:
    numpy.random.seed(5)
    before = numpy.random.get_state()[1].tolist()  # type: ignore[index]
    alone = drawn(workers=0)
    assert numpy.random.get_state()[1].tolist() == before  # type: ignore[index]
    assert len({str(numbers) for numbers in alone.values()}) == len(alone) == 5
    numpy.random.seed(6)
    assert drawn(workers=1) == alone
    assert {**drawn(0, rank=0, participants=2), **drawn(1, rank=1, participants=2)} == alone
    assert drawn(workers=0, seed=1) != alone


class Torch(Raises):
    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))


def test_without_numpy_the_others_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers() -> list[Any]:
        return [
            unit.data.tolist() for _, units in train(make(Torch(), reproducible_rng=True)) for unit in units
        ]

    expected = numbers()
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert numbers() == expected


def test_no_garbage_is_collected_while_torch_holds_the_mutex_of_its_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread that takes Python's lock meanwhile, and wants the mutex, would wait for ever."""
    generator, collects = torch.default_generator, list[bool]()

    class Noted:
        def get_state(self) -> torch.Tensor:
            collects.append(gc.isenabled())
            return generator.get_state()

        def __getattr__(self, name: str) -> Any:
            return getattr(generator, name)

    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    monkeypatch.setattr(torch, "default_generator", Noted())
    with _lanes._seeded(7):
        first = torch.rand(1)
    with _lanes._seeded(7):
        assert torch.equal(torch.rand(1), first)
    assert torch.equal(torch.rand(1), drawn), "the state of before is restored"
    assert collects == [False, False] and gc.isenabled()
