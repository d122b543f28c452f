"""The loader of one rank without peers: its units, its errors, and its reading."""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import random
import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Generator, Iterator, Optional
from unittest.mock import create_autospec

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from torchft._manager import signals
from torchft._manager.observe.log import _ManagerLogger
from torchft._manager.observe.own_time import OwnTime
from torchft._manager.quorum.plan import Plan as QuorumPlan
from torchft._manager.settings import resolve
from torchft._manager.step.again import Again
from torchft.data import ElasticDataLoader
from torchft.data._prefetch import ReadFailed
from torchft.data._step import LoaderStep, StepEnded, UnitsSkipped
from torchft.data.position import DataPlan, DataPosition, PositionDiffers
from torchft.manager import Manager

DATA = TensorDataset(torch.arange(10))
SIZES: dict[str, Any] = dict(global_batch_size=4, micro_batch_size=2)


class Alone(Manager):
    """The Manager of a group without peers, which commits at once."""

    def __init__(self, group_rank: int = 0, group_world_size: int = 1) -> None:
        self._settings = resolve(
            dict(
                rank=group_rank,
                world_size=group_world_size,
                store_addr="localhost",
                store_port=1,
                lighthouse_addr="http://localhost:1",
                port=None,
                timeout=timedelta(seconds=1),
                quorum_timeout=timedelta(seconds=1),
                connect_timeout=timedelta(seconds=1),
                heartbeat_interval=timedelta(seconds=1),
                quorum_retries=0,
            )
        )
        self._quorum_timeout = self._settings.quorum_timeout
        self.errors: list[Exception] = []
        self.hooks: list[Callable[[int, bool, int], None]] = []
        self.drained = False
        self._current: Any = SimpleNamespace()  # the step in progress
        self._logger = create_autospec(_ManagerLogger)
        self._again = Again(False, self._logger)
        self._own_time = create_autospec(OwnTime, instance=True)
        self.up_to_date = 1
        self.groups = 1
        self.passed = 0
        self.inconsistent = False

    def _weights_are_inconsistent(self) -> bool:
        return self.inconsistent

    def _attach_loader(self, loader: Any) -> None:
        pass

    def register_state_dict_fn(self, key: str, load_state_dict: Any, state_dict: Any) -> None:
        pass

    def register_commit_hook(self, hook: Callable[[int, bool, int], None]) -> None:
        self.hooks.append(hook)

    def draining(self) -> bool:
        return self.drained

    def _begin_batch(self) -> QuorumPlan:
        fields: dict[str, Any] = dict.fromkeys(QuorumPlan.__dataclass_fields__)
        fields.update(
            participating_rank=0,
            participants=1,
            handles=[],
            replica_rank=0,
            in_background=True,
            speeds=(),
            num_up_to_date=self.up_to_date,
            replica_world_size=self.groups,
        )
        return QuorumPlan(**fields)

    def _ends_together(self) -> bool:
        return True

    def _pass_step(self) -> None:
        self.passed += 1
        self.up_to_date += 1

    def _report_own_error(self, e: Exception) -> None:
        self.errors.append(e)

    def decide(self, committed: bool) -> None:
        for hook in self.hooks:
            hook(0, committed, 1)


def make(dataset: Any = DATA, manager: Optional[Alone] = None, **settings: Any) -> ElasticDataLoader:
    return ElasticDataLoader(manager or Alone(), dataset, **{**SIZES, **settings})


def train(loader: ElasticDataLoader) -> Generator[tuple[LoaderStep, list[Any]], Optional[bool], None]:
    """Trains steps, each of which is committed unless the caller sends False."""
    for step in loader:
        committed = yield step, list(step)
        loader._manager.decide(committed is not False)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_sample_once_an_epoch_in_the_order_of_the_plan(num_workers: int) -> None:
    loader = make(seed=7, epochs=2, num_workers=num_workers)
    assert len(loader) == 6
    plan = DataPlan(10, 4, 2, seed=7, epochs=2)
    position, ended = DataPosition(), 0
    for step, units in train(loader):
        assert step.position == position and len(step) == len(units)
        for unit, planned in zip(units, plan.share(position, 0, 1).units):
            assert unit.data[0].tolist() == list(planned.indices) == list(unit.indices)
            assert (unit.weight, unit.last) == (planned.weight, planned.last)
        position, ended = plan.advance(position), ended + 1
    assert ended == len(loader) and loader.position == plan.end
    assert multiprocessing.active_children() == []


def test_a_lost_step_is_repeated() -> None:
    steps = train(make(shuffle=False))
    step, first = next(steps)
    assert step.committed is None
    repeated, again = steps.send(False)
    assert step.committed is False
    assert (
        [unit.data[0].tolist() for unit in first]
        == [unit.data[0].tolist() for unit in again]
        == [[0, 1], [2, 3]]
    )
    _, second = next(steps)
    assert repeated.committed is True
    assert [unit.data[0].tolist() for unit in second] == [[4, 5], [6, 7]]


def test_a_job_resumes_at_a_saved_position() -> None:
    loader = make(epochs=2)
    steps = train(loader)
    for _ in range(3):
        next(steps)
    saved = loader.state_dict()
    restored = make(epochs=2, micro_batch_size=4)
    restored.load_state_dict(saved)
    assert restored.position == loader.position == DataPosition(0, 2)
    ours = [index for unit in next(steps)[1] for index in unit.indices]
    loader.load_state_dict(saved)
    (unit,) = next(train(restored))[1]
    assert ours != list(unit.indices)  # the first loader is one step ahead
    assert list(unit.indices) == [index for unit in next(train(loader))[1] for index in unit.indices]


def test_a_checkpoint_with_weights_of_no_step_is_refused() -> None:
    manager = Alone()
    loader = make(manager=manager)
    manager.inconsistent = True
    with pytest.raises(ValueError, match=r"saved while its group healed in passing.*if step\.committed"):
        make().load_state_dict(loader.state_dict())
    manager.inconsistent = False
    make().load_state_dict(loader.state_dict())


def test_a_position_of_other_data_is_refused() -> None:
    with pytest.raises(
        PositionDiffers, match="seed is 0, and the saved position is of a run in which it was 1"
    ):
        make().load_state_dict(make(seed=1).state_dict())


@pytest.mark.parametrize(
    ("reduction", "factor"),
    [("mean", 2), ("sum", 1)],
)
def test_the_weight_has_the_factor_of_the_reduction_in_the_group(reduction: str, factor: int) -> None:
    weights = []
    for rank in range(2):
        loader = make(manager=Alone(rank, 2), reduction_in_group=reduction)
        weights += [unit.weight for unit in next(train(loader))[1]]
    assert sum(weights) == factor


def test_ranks_with_the_same_data_rank_read_the_same_units() -> None:
    indices = [
        [
            unit.indices
            for unit in next(train(make(manager=Alone(rank, 2), data_rank=0, data_world_size=1)))[1]
        ]
        for rank in range(2)
    ]
    assert indices[0] == indices[1] and len(indices[0]) == 2


def test_a_drained_group_gets_no_further_step() -> None:
    manager = Alone()
    steps = train(make(manager=manager))
    next(steps)
    manager.drained = True
    assert next(steps, None) is None


def test_at_the_end_a_group_waits_for_those_that_heal() -> None:
    manager = Alone()
    loader = make(manager=manager)
    loader.load_state_dict({**loader.state_dict(), "epoch": 1})
    manager.groups = 3
    assert next(train(loader), None) is None
    assert manager.passed == 2


def test_the_wait_for_groups_that_do_not_heal_ends_at_the_quorum_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = Alone()
    loader = make(manager=manager)
    loader.load_state_dict({**loader.state_dict(), "epoch": 1})
    manager.groups, manager._quorum_timeout = 2, timedelta(0)
    with pytest.raises(
        TimeoutError, match="timed out after 0 s: the job is at its end, and of 2 groups 1 are up to"
    ):
        next(loader)


# Reading


class Raises(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        raise OSError(f"no sample {index}")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_raises(num_workers: int) -> None:
    manager = Alone()
    loader = make(Raises(), manager, shuffle=False, num_workers=num_workers)
    with pytest.raises(
        ReadFailed, match=r"(?s)unit 0 of batch 0 of epoch 0 could not be read: OSError: .*no sample 0"
    ):
        next(train(loader))
    assert len(manager.errors) == 1, "the other groups are not notified"


class Crashes(Raises):
    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow  # PyTorch may take five seconds to end its workers
def test_a_worker_that_is_killed() -> None:
    loader = make(Crashes(), num_workers=1, timeout=0.3)
    with pytest.raises(ReadFailed, match=r"DataLoader worker .*(killed by signal|exited unexpectedly)"):
        next(train(loader))


class Preempted(Raises):
    """A dataset whose worker gets SIGTERM, which torchrun and Slurm send to all processes of a rank."""

    worker_id: Optional[int] = None

    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return Preempted.worker_id


def report(worker: int) -> None:
    Preempted.worker_id = worker


@pytest.fixture
def leaves_on_sigterm() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a test of a command may have left a handler
    handlers = signals.Signals()
    handlers.install((signal.SIGTERM,))
    yield
    assert signals._watch is not None and signals._watch._deadline.left(0.0) is None, (
        "it was not for this process"
    )
    handlers.close(lambda: False)
    assert signal.signal(signal.SIGTERM, before) is signal.SIG_DFL


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_group_that_leaves_on_a_signal_ignore_it(leaves_on_sigterm: None, context: str) -> None:
    loader = make(Preempted(), num_workers=1, multiprocessing_context=context, worker_init_fn=report)
    assert [len(unit.data) for _, units in train(loader) for unit in units] == [2] * 5


def test_arguments_of_the_dataloader_reach_it() -> None:
    loader = make(collate_fn=lambda samples: [int(sample[0]) for sample in samples], shuffle=False)
    assert [unit.data for unit in next(train(loader))[1]] == [[0, 1], [2, 3]]


class Random(Raises):
    def __getitem__(self, index: int) -> tuple[float, float]:
        return float(torch.rand(())), random.random()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reproducible_random_numbers_depend_on_the_unit_alone(num_workers: int) -> None:
    def numbers(**settings: Any) -> list[Any]:
        loader = make(Random(), reproducible_rng=True, epochs=2, **settings)
        drawn = []
        for unit in (unit for _, units in train(loader) for unit in units):
            with unit.accumulate():
                drawn.append((unit.data, float(torch.rand(()))))
        return drawn

    torch.manual_seed(5)
    before = torch.get_rng_state(), random.getstate()
    first = [data for data, _ in numbers(num_workers=num_workers)]
    assert random.getstate() == before[1]
    torch.manual_seed(6)
    assert str(first) == str([data for data, _ in numbers()])
    draws = [drawn for _, drawn in numbers()]
    assert draws == [drawn for _, drawn in numbers()] and len(set(draws)) == len(draws)
    assert str(first) != str([data for data, _ in numbers(seed=1)])


# Accumulation


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def no_sync(self) -> Any:
        self.log.append("no_sync")
        return torch.no_grad()  # any context


class Sharded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    def set_requires_gradient_sync(self, value: bool) -> None:
        self.log.append(value)


def test_gradients_are_reduced_with_the_last_unit_only() -> None:
    wrapped, sharded, plain = Wrapped(), Sharded(), nn.Linear(1, 1)
    for unit in next(make()):
        with unit.accumulate(wrapped, sharded, plain):
            assert torch.is_grad_enabled() is unit.last
    assert wrapped.log == ["no_sync"] and sharded.log == [False, True]


def refused(loader: ElasticDataLoader) -> str:
    """Returns the errors about units that were left out: before a reduction, before the vote, and in the
    loop.
    """
    messages = []
    for ask in (loader.units_added, loader.verify, lambda: next(loader)):
        with pytest.raises(UnitsSkipped) as raised:
            ask()
        messages.append(str(raised.value))
    assert messages[0] == messages[1] == messages[2]
    return messages[0]


def test_units_that_were_left_out_are_named() -> None:
    loader = make(shuffle=False, dataset=range(100), global_batch_size=30, micro_batch_size=6)
    assert not loader.units_added(), "before the first unit something else may be reduced"
    for unit in next(loader):
        if unit.indices[0] in (0, 12):
            with unit.accumulate():
                pass
    assert loader.send_samples() == 12
    assert refused(loader).startswith(
        "unit 1 of batch 0 of epoch 0 (samples 6, 7, 8, 9, …), and 2 more of this rank, did not go through "
        "accumulate()"
    )


def test_a_unit_counts_from_the_begin_of_its_passes_unless_they_fail() -> None:
    """A wrapped model reduces in the backward pass of the last unit."""
    loader = make(shuffle=False)
    first, last = next(loader)
    assert loader.send_samples() == 4, "as planned"
    with pytest.raises(ZeroDivisionError), first.accumulate():
        raise ZeroDivisionError
    assert not loader.units_added()
    with first.accumulate():
        pass
    with last.accumulate():
        assert loader.units_added() and loader.send_samples() == 4
    with pytest.raises(ZeroDivisionError), last.accumulate():
        raise ZeroDivisionError
    assert refused(loader).startswith(
        "unit 1 of batch 0 of epoch 0 (samples 2, 3) did not go through accumulate()"
    )


def test_a_step_of_the_manager_without_units_is_not_committed() -> None:
    manager = Alone()
    loader = make(manager=manager)
    with pytest.raises(UnitsSkipped, match="the step has no units: ElasticDataLoader begins each step"):
        loader.verify()
    with pytest.raises(UnitsSkipped):
        next(loader)
    next(train(loader))
    manager.decide(True)
    with pytest.raises(UnitsSkipped, match="the step has no units"):  # otherwise its position would advance
        loader.verify()


# The end of a step


def uses_it_again(step: LoaderStep) -> None:
    next(iter(step))


def keeps_its_units(step: LoaderStep) -> None:
    with kept[0].accumulate():
        pass


kept: list[Any] = []


@pytest.mark.parametrize("use", [uses_it_again, keeps_its_units])
@pytest.mark.parametrize("end", ["a decision", "the next step", "another quorum"])
def test_units_of_a_step_that_has_ended_are_refused(use: Callable[[LoaderStep], None], end: str) -> None:
    """Their gradients would be added to those of another batch, or to those of other groups' parts of it."""
    manager = Alone()
    loader = make(manager=manager)
    step, other = next(loader), None
    kept[:] = list(step)
    step._iterated = False
    if end == "a decision":
        manager.decide(False)
    elif end == "the next step":
        other = next(loader)
    else:
        manager._current = SimpleNamespace()
    ended = "been left for another quorum" if end == "another quorum" else "ended"
    with pytest.raises(
        StepEnded, match=f"the step of batch 0 of epoch 0 has {ended}: its units may be those of other"
    ):
        use(step)
    if other is not None:
        assert len(list(other)) == 2


def test_a_step_is_iterated_once() -> None:
    """A second iteration would read ahead, into this rank's next steps."""
    loader = make(shuffle=False)
    step = next(loader)
    units = list(step)
    with pytest.raises(StepEnded, match=r"is iterated a second time: .* keep those that are needed again"):
        iter(step)
    assert [list(unit.indices) for unit in units] == [[0, 1], [2, 3]]
    loader._manager.decide(True)  # type: ignore[attr-defined]
    assert [list(unit.indices) for unit in next(loader)] == [[4, 5], [6, 7]]


# The log


class Steps:
    """LocalSGD's or DiLoCo's interface for a loader."""

    entered = True

    def __init__(self, keeps_own_weights: bool) -> None:
        self.keeps_own_weights = keeps_own_weights

    def synchronize(self) -> None:
        pass


class Quorums(Alone):
    """The Manager of a group whose quorums are given."""

    def __init__(self, **quorum: Any) -> None:
        super().__init__()
        self.quorum = quorum
        self._current = SimpleNamespace(unit=None, skip="")

    def _begin_batch(self) -> QuorumPlan:
        return replace(super()._begin_batch(), **self.quorum)


@pytest.mark.parametrize("on_poison", ["stop", "skip"])
def test_a_unit_that_the_quorum_names_is_left_out_and_written_down(
    on_poison: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manager = Quorums(leads=True, skipped=())
    loader = make(manager=manager, shuffle=False, on_poison=on_poison)
    seen: list[list[int]] = []
    for step in loader:
        names = []
        for unit in step:
            seen.append(list(unit.indices))
            names.append(manager._current.skip)
        assert (manager._current.unit, manager._current.skip) == (None, ""), "what follows is of no unit"
        if step.position.batch == 1:
            assert names == (["0.1.0"] if on_poison == "skip" else ["", ""])
        manager.quorum["skipped"] = ("0.1.1", "7.7.7", "another name")  # from the second step on
        manager.decide(True)
    assert seen == [[0, 1], [2, 3], [4, 5], *([[6, 7]] if on_poison == "stop" else []), [8, 9]]
    written = tmp_path / "torchft_skipped_units.jsonl"
    if on_poison == "stop":
        assert not written.exists()
    else:
        (line,) = written.read_text().splitlines()
        expected = {"step": 0, "epoch": 0, "batch": 1, "unit": 1, "indices": [6, 7]}
        assert json.loads(line) == expected


@pytest.mark.parametrize("seed", range(20))
def test_each_step_has_its_planned_units_whatever_changes(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units are read ahead for an unchanged quorum: members, speeds and units that are left out change, steps
    are lost, and heals set the position.
    """
    monkeypatch.chdir(tmp_path)
    chance, manager = random.Random(seed), Quorums(participants=2, skipped=("0.0.1",))
    sizes = dict(global_batch_size=6, micro_batch_size=1, epochs=8)
    loader, plan = (
        make(manager=manager, seed=seed, on_poison="skip", **sizes),
        DataPlan(10, seed=seed, **sizes),
    )
    saved, quorum = loader.state_dict(), manager.quorum
    for step in itertools.islice(loader, 100):
        units, at = list(step), step.position
        skipped = [unit for unit in range(6) if f"{at.epoch}.{at.batch}.{unit}" in quorum["skipped"]]
        members = quorum.get("participating_rank", 0), quorum["participants"]
        planned = plan.share(at, *members, speeds=quorum.get("speeds", ()), skipped=skipped).units
        assert [(unit.indices, unit.weight) for unit in units] == [
            (unit.indices, unit.weight) for unit in planned
        ]
        assert all(unit.data[0].tolist() == list(unit.indices) for unit in units)
        manager.decide(chance.random() < 0.8)
        if chance.random() < 0.3:
            groups = quorum["participants"] = chance.randint(1, 4)
            quorum["participating_rank"] = chance.choice([None, *range(groups)])
            quorum["speeds"] = chance.choice([(), tuple(chance.choices(range(1, 5), k=groups))])
        if chance.random() < 0.3:
            name = f"{chance.randrange(8)}.{chance.randrange(2)}.{chance.randrange(3)}"
            quorum["skipped"] = (*quorum["skipped"], name)
        if chance.random() < 0.1:
            loader.load_state_dict(saved)
        elif chance.random() < 0.1:
            saved = loader.state_dict()


def test_units_are_left_out_only_where_it_is_possible() -> None:
    with pytest.raises(ValueError, match="on_poison is 'no': allowed are 'stop' and 'skip'"):
        make(on_poison="no")
    with pytest.raises(ValueError, match="on_poison is 'skip', and the dataset is a stream"):
        make(Stream(), shuffle=False, on_poison="skip")
    with pytest.raises(ValueError, match="on_poison is 'skip': with LocalSGD and DiLoCo"):
        make(on_poison="skip").steps_by_itself(Steps(True))
    assert "on_poison=skip" in make(on_poison="skip").settings
    assert not any("on_poison" in line for line in make().settings), "as in earlier versions"


# With a synchronous quorum, as LocalSGD and DiLoCo have it
PLAN = SimpleNamespace(
    participating_rank=0, participants=1, replica_rank=0, replica_world_size=1, in_background=False
)


@pytest.mark.parametrize(
    ("committed", "keeps_own_weights", "counted", "level", "counts"),
    [
        (True, True, 8, "INFO", "8 samples committed, 0 lost"),
        (True, True, 6, "WARNING", "6 samples committed, 2 lost"),
        (False, True, 0, "INFO", "0 samples committed, 0 lost"),  # the samples are part of the next average
        (False, False, 0, "WARNING", "0 samples committed, 8 lost"),
    ],
)
def test_the_log_has_the_samples_of_each_average(
    committed: bool,
    keeps_own_weights: bool,
    counted: int,
    level: str,
    counts: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "torchft.data.loader")
    manager = Alone()
    manager._current = SimpleNamespace(plan=PLAN)
    loader = make(manager=manager)
    loader.steps_by_itself(Steps(keeps_own_weights))
    for _ in range(2):
        for unit in next(loader):
            with unit.accumulate():
                pass
        loader.inner_step_ended()
    assert loader.send_samples() == 8
    loader.samples_averaged(counted)
    manager.decide(committed)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (
        level,
        f"epoch 0, batch 2: inner steps so far: {counts}",
    )


def test_with_local_steps_a_unit_that_was_left_out_counts_as_lost() -> None:
    manager = Alone()
    manager._current = SimpleNamespace(plan=PLAN)
    loader = make(manager=manager)
    loader.steps_by_itself(Steps(True))
    first, _ = next(loader)
    with first.accumulate():
        pass
    loader.inner_step_ended()
    loader.samples_averaged(loader.send_samples())
    manager.decide(True)
    assert (loader.committed, loader.lost) == (2, 2)
    with pytest.raises(UnitsSkipped, match="unit 1 of batch 0 of epoch 0"):
        next(loader)


# Bad input


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "settings", "error", "match"),
    [
        (
            Stream(),
            {},
            ValueError,
            r"shuffle is True, .* a stream.*give shuffle=False.*dataset.shuffle\(seed",
        ),
        (
            Stream(),
            {"shuffle": False, "reproducible_rng": True},
            ValueError,
            "reproducible_rng is True, and the dataset is a stream",
        ),
        (iter([1]), {"shuffle": False}, TypeError, "an iterator, which can be read once"),
        (object(), {}, TypeError, "dataset is a object: it needs __getitem__ and __len__, or __iter__"),
        ([], {}, ValueError, "the dataset has no samples: allowed are 1 and more"),
        (
            DATA,
            {"micro_batch_size": 3},
            ValueError,
            "global_batch_size is 4: allowed are multiples of micro_batch_size",
        ),
        (DATA, {"epochs": 0}, ValueError, "epochs is 0: allowed are"),
        (
            DATA,
            {"batch_size": 2},
            TypeError,
            "takes no batch_size; give global_batch_size and micro_batch_size",
        ),
        (DATA, {"sampler": [1]}, TypeError, "takes no sampler; the order is that of shuffle and seed"),
        (DATA, {"drop_last": True}, TypeError, "takes no drop_last"),
        (
            DATA,
            {"reduction_in_group": "max"},
            ValueError,
            "reduction_in_group is 'max': allowed are 'mean' and 'sum'",
        ),
        (
            DATA,
            {"data_rank": 1},
            ValueError,
            "data_rank is 1, and data_world_size is None: they belong together",
        ),
        (DATA, {"data_rank": 2, "data_world_size": 2}, ValueError, "data_rank is 2: allowed are .* 0 to 1"),
        (DATA, {"num_workers": -1}, ValueError, "num_workers option should be non-negative"),
    ],
)
def test_bad_settings_are_named(
    dataset: Any, settings: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make(dataset, **settings)


def test_the_announcement_has_all_settings_but_the_position() -> None:
    loader = make()
    announced = loader.settings
    loader.load_state_dict({**loader.state_dict(), "batch": 1})
    assert loader.settings == announced
    assert announced == [
        "length=10",
        "global_batch_size=4",
        "micro_batch_size=2",
        "shuffle=True",
        "seed=0",
        "epochs=1",
        "data_world_size=1",
        "reduction_in_group=mean",
        "reproducible_rng=False",
        f"torch={'.'.join(torch.__version__.split('.')[:2])}",
    ]


def test_a_compared_value_is_in_the_digest_also_after_a_turn_of_a_stream_has_ended() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    scale = 1.0
    loader = make(Stream(), shuffle=False)
    loader.compare(lambda: scale)
    digests = {loader.digest}
    loader.load_state_dict({**loader.state_dict(), "ended": 1})
    digests.add(loader.digest)
    scale = 0.5
    digests.add(loader.digest)
    assert len(digests) == 3
