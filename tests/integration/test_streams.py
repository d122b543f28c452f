"""Groups that fail, join and lose steps train on each sample of a stream once an epoch."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any, Optional

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.integration.cluster import DEADLINE, Cluster, Gate, Rank, results
from tests.unit.data import packed
from tests.unit.data.streaming import Files, Sample, Sequential, Whole
from torchft import Optimizer
from torchft.data import ElasticDataLoader, _stream_reader
from torchft.data._prefetch import ReadFailed
from torchft.ddp import DistributedDataParallel
from torchft.local_sgd import LocalSGD
from torchft.process_group import ProcessGroupGloo

SETTINGS: dict[str, Any] = dict(global_batch_size=8, micro_batch_size=2, shuffle=False, epochs=3)


class Training:
    """A loop for any number of groups, and the samples that it has trained on.

    Args:
        data: the stream, whose samples are its own names; or a function that makes that of each group.
        groups: number of groups that begin.
        kills: numbers of commits after which a group fails, and is replaced.
        reduces: whether gradients are reduced; a group alone may leave that out.
        plain: whether the loop itself reduces the gradients of a plain model.
    """

    def __init__(
        self,
        data: Any,
        groups: int,
        kills: tuple[int, ...] = (),
        reduces: bool = True,
        plain: bool = False,
        **settings: Any,
    ) -> None:
        self.data, self.groups, self.reduces, self.plain = data, groups, reduces, plain
        self.samples: Callable[[int], set[Sample]] = getattr(data, "samples", set)  # the oracle, of an epoch
        self.again = 0  # number of steps in which only units of a failed group were computed again
        self.kills = list(kills)
        self.manager = settings.pop("manager", {})
        self.settings = {**SETTINGS, **settings}
        self.restart = Gate()
        self.failed: list[int] = []
        # The samples that a group committed, with their weights, by (step, group)
        self.committed: dict[tuple[int, int], list[tuple[Sample, float]]] = {}

    def __call__(self, rank: Rank) -> Optional[list[float]]:
        net = nn.Linear(1, 1).double()
        nn.init.zeros_(net.weight)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        manager = rank.start_manager(
            load_state_dict=net.load_state_dict, state_dict=net.state_dict, **self.manager
        )
        wraps = self.reduces and not self.plain
        model = DistributedDataParallel(manager, net) if wraps else net
        optimizer = Optimizer(manager, sgd)
        data = self.data() if callable(self.data) else self.data
        loader = ElasticDataLoader(manager, data, collate_fn=list, **self.settings)
        rank.cluster.wait_for_healthy(self.groups if not self.failed else 1)
        kept: list[tuple[Sample, float]] = []  # of the last attempt
        for step in loader:
            number = manager.current_step()
            if rank.group == self.groups - 1 and self.kills and number >= self.kills[0]:
                self.kills.pop(0)
                self.failed.append(rank.group)
                rank.crash()
                self.restart.open()
                return None
            optimizer.zero_grad()
            samples: list[tuple[Sample, float]] = []
            for unit in step:
                with unit.accumulate(model):
                    # The gradient of the weight is the number of samples, over the global batch size.
                    (model(torch.ones(1, 1).double()).sum() * unit.weight).backward()
                read = unit.data[: len(unit.indices)] if unit.weight else []
                samples += [(sample, unit.weight / len(read)) for sample in read]
            for p in net.parameters() if self.plain else ():
                assert p.grad is not None
                manager.allreduce(p.grad).wait()
            optimizer.step()
            samples = [*kept, *samples] if step.again else samples
            kept = samples
            if step.committed:
                self.again += step.again > 0
                self.committed.setdefault((number, rank.group), []).extend(samples)
        with pytest.raises(TypeError, match="a stream: its number of steps is not known"):
            len(loader)
        return [net.weight.item(), manager.current_step()]

    def run(self) -> list[list[float]]:
        with Cluster(min_replicas=1) as cluster:
            running = [cluster.start(self, group=group) for group in range(self.groups)]
            for _ in list(self.kills):
                cluster.wait(self.restart)
                self.restart = Gate()
                running.append(cluster.start(self, group=self.groups - 1))
            return [ended for ended in results(*running) if ended is not None]

    def check(self, ended: list[list[float]]) -> None:
        """Each sample is in one committed step of its epoch; the weights are those of all of them."""
        epochs = self.settings["epochs"]
        seen: Counter[Sample] = Counter()
        for samples in self.committed.values():
            seen.update(sample for sample, _ in samples)
            assert {weight for _, weight in samples} <= {1 / self.settings["global_batch_size"]}
        expected: Counter[Sample] = Counter()
        for epoch in range(epochs):
            expected.update(self.samples(epoch))
        assert seen == expected
        for weight, steps in ended:
            assert weight == pytest.approx(-expected.total() / self.settings["global_batch_size"])
            assert steps == len({number for number, _ in self.committed})


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(
    "data",
    [lambda: Files([9, 4, 0, 7, 11, 3, 2, 5, 6]), lambda: Sequential(29)],
    ids=["shards", "sequential"],
)
def test_each_sample_once(data: Any, groups: int) -> None:
    training = Training(data(), groups)
    training.check(training.run())
    if groups == 1:
        # Each source once an epoch, and nothing is read in vain.
        sources = 8 if isinstance(training.data, Files) else 1
        assert training.data.log["read"] == sum(len(training.data.samples(epoch)) for epoch in range(3))
        assert training.data.log["opened"] == 3 * sources


@pytest.mark.parametrize(
    ("seed", "replays"),
    [
        (2, True),
        *(
            pytest.param(*c, marks=pytest.mark.slow)
            for c in product(range(3), (False, True))
            if c != (2, True)
        ),
    ],
)
def test_groups_fail_and_are_replaced(seed: int, replays: bool) -> None:
    rng = random.Random(seed)
    data = Files([rng.randint(0, 12) for _ in range(6 + 4 * seed)]) if seed else Sequential(60)
    training = Training(data, groups=2 + seed, kills=(2, 7), manager={"replay_failed_step": replays})
    ended = training.run()
    assert len(training.failed) == 2 and len(ended) == 2 + seed
    assert (training.again > 0) == replays
    training.check(ended)


@pytest.mark.slow
def test_groups_of_a_plain_model_fail_and_are_replaced() -> None:
    training = Training(Sequential(60), groups=3, kills=(2, 7), plain=True)
    ended = training.run()
    assert len(training.failed) == 2
    training.check(ended)


class Resuming(Whole, IterableDataset):
    pass


# torchdata 0.11 calls what PyTorch 2.15 deprecates.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_groups_that_fail_are_replaced_by_ones_that_take_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group has torchdata's StatefulDataLoader; one that heals reads on where its source was."""
    monkeypatch.setattr(_stream_reader, "_INTERVAL", 0)
    data: list[Resuming] = []

    def make() -> StatefulDataLoader[Any]:
        data.append(Resuming(160))
        return StatefulDataLoader(data[-1], batch_size=None, collate_fn=tuple)

    training = Training(make, groups=3, kills=(15, 35), epochs=2)
    training.samples = Sequential(160).samples
    ended = training.run()
    assert len(training.failed) == 2
    training.check(ended)
    for one in data[3:]:
        assert one.log["by state"] > 0
        # From the position of its heal, at batch 15 of 20, and one epoch; without a state it were 320.
        assert one.log["read"] < 250


@pytest.mark.parametrize("kind", [packed.Packed, packed.Resuming])
def test_each_token_of_packed_sequences_once(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stream_reader, "_INTERVAL", 0)
    rng = random.Random(1)
    data = kind([rng.randint(0, 40) for _ in range(24)], size=3)
    training = Training(data, groups=3, kills=(3, 9))
    ended = training.run()
    assert len(training.failed) == 2
    sequences = [sequence for step in training.committed.values() for sequence, _ in step]
    assert packed.tokens(sequences) == Counter(dict.fromkeys(range(sum(data.lengths)), 3))
    for weight, _ in ended:
        assert weight == pytest.approx(-len(sequences) / SETTINGS["global_batch_size"])


def test_a_group_heals_in_passing(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(Sequential(60), groups=3, kills=(2,), manager={"heal": "in_passing"}, epochs=40)
    with caplog.at_level(logging.INFO):
        ended = training.run()
    assert any("training along from step" in record.getMessage() for record in caplog.records)
    training.check(ended)


def test_a_group_that_reduces_nothing_finds_the_end() -> None:
    """A group alone needs no reduction; its epochs end all the same."""
    training = Training(Files([3, 4]), groups=1, reduces=False)
    training.check(training.run())


class Raises(Sequential):
    def __iter__(self) -> Any:
        for sample in super().__iter__():
            if sample[2] == 13:
                raise OSError("the file ends in the middle")
            yield sample


def test_a_reader_that_raises_is_named() -> None:
    training = Training(Raises(30), groups=1)
    with pytest.raises(
        ReadFailed, match=r"unit 2 of batch 1 of epoch 0 could not be read: OSError: the file"
    ):
        training.run()


def test_local_sgd_is_refused() -> None:
    def loop(rank: Rank) -> None:
        net = nn.Linear(1, 1)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        manager = rank.start_manager(use_async_quorum=False)
        ElasticDataLoader(manager, Sequential(5), **SETTINGS)
        with pytest.raises(ValueError, match="a stream, and LocalSGD and DiLoCo take inner steps"):
            LocalSGD(manager, net, sgd, sync_every=2)

    with Cluster() as cluster:
        results(cluster.start(loop, group=0))


def test_reproducible_sums_are_refused() -> None:
    def loop(rank: Rank) -> None:
        manager = rank.start_manager(reproducible_reduction=True)
        with pytest.raises(ValueError, match="reproducible_reduction is True, and the dataset is a stream"):
            ElasticDataLoader(manager, Sequential(5), **SETTINGS)

    with Cluster() as cluster:
        results(cluster.start(loop, group=0))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[9, 4, 2, 7, 11, 3, 1, 5, 8, 2, 4, 7], [1, 0, 0, 20]])
def test_ranks_of_a_group_read_different_sources(lengths: list[int]) -> None:
    """They find the end of an epoch together, whichever of them has samples."""
    data = Files(lengths)
    seen: Counter[Sample] = Counter()
    made: list[ProcessGroupGloo] = []

    def loop(rank: Rank) -> int:
        net = nn.Linear(1, 1)
        sgd = torch.optim.SGD(net.parameters(), lr=1.0)
        manager = rank.start_manager(load_state_dict=net.load_state_dict, state_dict=net.state_dict)
        model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, sgd)
        group = ProcessGroupGloo(timeout=DEADLINE)
        group.configure(f"localhost:{rank.store.port}/ranks", "ranks", rank.rank, rank.world_size)
        made.append(group)
        loader = ElasticDataLoader(manager, data, collate_fn=list, data_group=group, **SETTINGS)
        rank.cluster.wait_for_healthy(2)
        for step in loader:
            optimizer.zero_grad()
            samples: list[Sample] = []
            for unit in step:
                with unit.accumulate(model):
                    (model(torch.ones(1, 1)).sum() * unit.weight).backward()
                samples += unit.data[: len(unit.indices)] if unit.weight else []
            optimizer.step()
            if step.committed:
                seen.update(samples)
        return manager.current_step()

    with Cluster(min_replicas=2) as cluster:
        steps = results(*(cluster.start(loop, group=group, world_size=2) for group in range(2)))
    for group in made:
        group.shutdown()
    assert len(set(steps)) == 1
    expected: Counter[Sample] = Counter()
    for epoch in range(3):
        expected.update(data.samples(epoch))
    assert seen == expected
