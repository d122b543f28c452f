"""Loaders of a job that do not fit together: the errors name the cause, and the other groups continue."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, Optional

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.utils.data import TensorDataset

from tests.integration.cluster import Cluster, Rank, results
from tests.integration.test_loader import SAMPLES, SETTINGS, Training, check, dataset, refused, without_loader
from tests.unit.process_group.ranks import native
from torchft.data import ElasticDataLoader
from torchft.data.position import DataPlan, DataPosition, PositionDiffers

PLAN = DataPlan(SAMPLES, **SETTINGS)
END = PLAN.end
LAST = DataPosition(1, PLAN.batches_per_epoch - 1)


def test_a_group_whose_dataset_has_another_length_is_refused_by_name() -> None:
    # The others do not wait until this group has healed: the timeout of that is longer than the one of the
    # test.
    job = Training(settings={"timeout": timedelta(minutes=5)})
    shorter = TensorDataset(*(tensor[:-1] for tensor in dataset().tensors))
    ended, refusal = refused(job, Training(data=shorter))
    assert "ElasticDataLoader: length=40 here, ElasticDataLoader: length=41 in group_0:" in refusal
    check(job, ended)
    assert job.lost and all("length=40" in why for why in job.lost)


@pytest.mark.parametrize(("field", "other"), [("length", 40), ("seed", 4), ("global_batch_size", 24)])
def test_a_group_that_restores_a_position_of_other_data_gets_an_error(field: str, other: int) -> None:
    def restore(rank: Rank, loader: ElasticDataLoader) -> None:
        if rank.group == 1:
            loader.load_state_dict({**loader.state_dict(), field: other})

    job = Training(before=restore)

    def wrong(rank: Rank) -> None:
        with pytest.raises(
            PositionDiffers, match=rf"{field} is .*, and the saved position is .* it was {other}"
        ):
            job(rank)
        rank.crash()

    with Cluster() as cluster:
        first = cluster.start(job, group=0)
        results(cluster.start(wrong, group=1))
        ended = results(first)
    check(job, ended)


def restored(first: DataPosition, second: DataPosition) -> tuple[Training, list[Optional[torch.Tensor]]]:
    """Starts a job of two groups that begin at different positions."""

    def restore(rank: Rank, loader: ElasticDataLoader) -> None:
        position = (first, second)[rank.group]
        loader.load_state_dict({**loader.state_dict(), "epoch": position.epoch, "batch": position.batch})

    job = Training(start_with=2, settings={"init_sync": False}, before=restore)

    def until_the_end(rank: Rank) -> Optional[torch.Tensor]:
        ended = job(rank)
        rank.crash()  # the group ends, as its process would
        return ended

    with Cluster(min_replicas=1) as cluster:
        return job, results(cluster.start(until_the_end, group=0), cluster.start(until_the_end, group=1))


def batches(job: Training) -> list[Counter[int]]:
    """The batches that the groups trained on together, step by step."""
    steps: dict[int, Counter[int]] = {}
    for (_, number), indices in job.committed.items():
        steps.setdefault(number, Counter()).update(indices)
    return [steps[number] for number in sorted(steps)]


def rest_of(position: DataPosition) -> list[Counter[int]]:
    """The batches that a job trains on from a position to its end."""
    found = []
    while position != END:
        found.append(Counter(index for unit in PLAN.share(position, 0, 1).units for index in unit.indices))
        position = PLAN.advance(position)
    return found


BEFORE_LAST = DataPosition(LAST.epoch, LAST.batch - 1)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BEFORE_LAST, DataPosition()),
        (DataPosition(1, 0), LAST),
        (LAST, BEFORE_LAST),
        (LAST, DataPosition()),
        (BEFORE_LAST, LAST),
    ],
)
def test_of_different_positions_the_first_groups_counts(first: DataPosition, second: DataPosition) -> None:
    """Also in the last step of the training: a group that heals in it ends together with the others."""
    job, (one, other) = restored(first, second)
    assert one is not None and other is not None and torch.equal(one, other)
    assert batches(job) == rest_of(first)
    assert len(job.lost) == 2
    assert all("do not train on the same batch" in why for why in job.lost)


@pytest.mark.parametrize(
    ("first", "second"), [(END, LAST), (LAST, END), (END, DataPosition()), (BEFORE_LAST, END), (END, END)]
)
def test_a_group_that_was_restored_at_the_end_compares_before_it_ends(
    first: DataPosition, second: DataPosition
) -> None:
    """It has nothing else to reduce. The comparison is needed, because the group at the end may be the
    correct one.
    """
    job, (one, other) = restored(first, second)
    assert one is not None and other is not None and torch.equal(one, other)
    assert batches(job) == rest_of(first)


def test_ranks_of_a_group_that_would_begin_at_different_positions_are_refused_by_name() -> None:
    """At step 0 each rank takes over the state of one rank of another group, and not all ranks from the same
    group.
    """

    def loop(rank: Rank) -> str:
        manager = rank.start_manager(load_state_dict=lambda state: None, state_dict=dict)
        loader = ElasticDataLoader(manager, dataset(), **SETTINGS)
        # the loader's position only, and not the Manager's
        loader.load_state_dict({**loader.state_dict(), "batch": rank.group + 1})
        rank.cluster.wait_for_healthy(2)
        try:
            next(loader)
        except PositionDiffers as e:
            return str(e)
        return ""

    with Cluster(min_replicas=2) as cluster:
        errors = results(*(cluster.start(loop, group, world_size=2) for group in range(2)))
    of_groups = errors[:2], errors[2:]
    for number, (group, other) in enumerate([(1, 2), (2, 1)]):
        (error,) = filter(None, of_groups[number])
        assert f"this rank was at batch {group} of epoch 0, and took over batch {other} of epoch 0" in error
        assert "load the Manager's state_dict, too" in error


# Native groups, whose handles are PyTorch's own


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "reconfigure"), reason="needs PyTorch >= 2.14: native groups"
)
@pytest.mark.parametrize("with_loader", [True, False])
def test_native_groups_all_have_a_loader_or_are_refused_by_name(with_loader: bool) -> None:
    master = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def make(group: int) -> Any:
        store = TCPStore("localhost", master.port, is_master=False, wait_for_workers=False)
        return native(store, group, 2, prefix="")

    if with_loader:
        job = Training(start_with=2)
        with Cluster(make_pg=make, min_replicas=2) as cluster:
            ended = results(cluster.start(job, group=0), cluster.start(job, group=1))
        check(job, ended)
        assert job.lost == []
        return
    job = Training()
    ended, refusal = refused(job, without_loader, make_pg=make)
    assert "the data loader differs: 'none' here, 'ElasticDataLoader' in group_0:" in refusal
    check(job, ended)
    assert job.lost and all("in group_1:" in why for why in job.lost)
