"""Devices that a rank cannot use: the error names them, only that group ends, and the others train on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from tests.integration.cluster import DEADLINE, Cluster, Gate, Rank, results
from tests.late import load
from torchft._job.start import pick_device
from torchft._manager.checks.device import claim_device
from torchft.process_group import ProcessGroup, nccl

load()
from tests.late.group import ProcessGroupLate  # noqa: E402
from tests.late.isolated import ProcessGroupBabyLate  # noqa: E402
from tests.late.workers import ProcessGroupBabyFull  # noqa: E402


def late_pg(group: int) -> ProcessGroup:
    return ProcessGroupLate(timeout=DEADLINE)


@pytest.fixture(autouse=True)
def not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process, where no device was used by NCCL."""
    monkeypatch.setattr(nccl, "_rehearsed", set())


class Group:
    """The state of a group that trains with others."""

    def __init__(self, rank: Rank, device: int) -> None:
        torch.accelerator.set_device_index(device)
        self.device = torch.device("late", device)
        self.weights = {"w": torch.ones(4, device=self.device)}
        self.manager = rank.start_manager(
            state_dict=lambda: self.weights, load_state_dict=self.weights.update
        )

    def step(self) -> int:
        """Returns the number of groups that committed it; 0 if it was lost."""
        self.manager.start_quorum()
        gradient: Tensor = torch.ones(4, device=self.device)
        self.manager.allreduce(gradient).wait()
        return self.manager.num_participants() if self.manager.should_commit() else 0


def forever(group: Group) -> None:
    while True:
        group.step()


def steps(group: Group, number: int, participants: int) -> None:
    while number > 0:
        number -= group.step() == participants


def trains_beside(
    second: Callable[[Rank], None], make_pg: Callable[[int], ProcessGroup] = late_pg, world_size: int = 1
) -> list[int]:
    """Group 0 trains; group 1 begins after its first step, and ends with a crash. Returns the number of
    groups that committed each step of group 0, at least ten.
    """
    trains, ended = Gate(), threading.Event()

    def run(rank: Rank) -> list[int]:
        if rank.group == 1:
            rank.cluster.wait(trains)
            second(rank)
            rank.crash()
            ended.set()
            return []
        group, participants = Group(rank, 0), []
        # The last step may be lost.
        while not ended.is_set() or len(participants) < 10 or not participants[-1]:
            participants.append(group.step())
            trains.open()
        return participants

    with Cluster(make_pg=make_pg) as cluster:
        first, *_ = results(cluster.start(run, 0), cluster.start(run, 1, world_size=world_size))
    return first


def test_a_device_that_is_full_from_the_start_costs_the_others_nothing(late: Any) -> None:
    def second(rank: Rank) -> None:
        group = Group(rank, 5)
        late.fill(5, True)
        with pytest.raises(RuntimeError, match="torchft-late: late:5 has too little memory for NCCL"):
            group.step()

    assert set(trains_beside(second)) == {1}


@pytest.mark.slow  # 40 s of timeouts
def test_a_device_that_is_full_when_a_group_joins_ends_its_own_group(late: Any) -> None:
    """The connection with the new group does not fit, also after PyTorch has returned what it keeps."""
    full, ended = Gate(), threading.Event()

    def run(rank: Rank) -> None:
        if rank.group == 2:
            rank.cluster.wait(full)
        group = Group(rank, rank.group)
        if rank.group == 1:
            steps(group, 2, participants=2)
            late.fill(1, True)
            full.open()
            with pytest.raises(
                RuntimeError, match="late:1 has too little memory for the connection with the other"
            ):
                forever(group)
            rank.crash()
            ended.set()
            return
        while not ended.is_set():
            group.step()
        steps(group, 2, participants=2)

    with Cluster(make_pg=late_pg) as cluster:
        results(*(cluster.start(run, group) for group in range(3)))


def claimed(monkeypatch: pytest.MonkeyPatch, devices: list[int], uuids: list[str]) -> list[str]:
    """The ranks of a group begin a step, each on its device; returns their errors, "" for none."""
    store, errors = HashStore(), []
    for rank, (device, uuid) in enumerate(zip(devices, uuids)):
        torch.accelerator.set_device_index(device)
        monkeypatch.setattr(
            torch.late, "get_device_properties", lambda _, uuid=uuid: SimpleNamespace(uuid=uuid)
        )  # type: ignore[attr-defined]
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        try:
            claim_device(store, "group:1", rank)
            claim_device(store, "group:1", rank)
            errors.append("")
        except ValueError as e:
            errors.append(str(e))
    return errors


def test_two_ranks_on_one_device_are_refused_by_name(late: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer devices than ranks; or LOCAL_RANK has no device, and the rank is on another one's."""
    torch.empty(0, device="late")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    first, second, third = claimed(monkeypatch, [0, 1, 0], ["GPU-6", "GPU-7", "GPU-6"])
    assert not first and not second
    assert third == (
        "two ranks of the group use one device, GPU-6: rank 0 (LOCAL_RANK=0, CUDA_VISIBLE_DEVICES=6,7, 8 "
        "visible) on "
        "late:0, and rank 2 (LOCAL_RANK=2, CUDA_VISIBLE_DEVICES=6,7, 8 visible) on late:0. Start at most as "
        "many ranks "
        "on a host as it has devices, and let each rank set its own, as torch.cuda.set_device(LOCAL_RANK) "
        "does; "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 allows it"
    )
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert claimed(monkeypatch, [0, 0], ["GPU-6", "GPU-6"]) == ["", ""]


@pytest.mark.parametrize(
    ("devices", "uuids", "refused"),
    [
        ([0, 0], ["GPU-0", "GPU-1"], False),  # CUDA_VISIBLE_DEVICES=0 and =1
        ([1, 0], ["GPU-1", "GPU-1"], True),  # CUDA_VISIBLE_DEVICES=0,1 and =1
    ],
)
def test_visible_devices_that_differ_between_ranks(
    late: Any, monkeypatch: pytest.MonkeyPatch, devices: list[int], uuids: list[str], refused: bool
) -> None:
    torch.empty(0, device="late")
    assert bool(claimed(monkeypatch, devices, uuids)[1]) == refused


@pytest.mark.slow  # 30 s of a timeout; the rule is that of the tests above
def test_the_group_of_such_ranks_ends_and_another_trains_on(late: Any) -> None:
    ended, refused = threading.Event(), list[str]()

    def second(rank: Rank) -> None:
        group = Group(rank, 3)
        try:
            group.manager.start_quorum()
        except ValueError as e:
            refused.append(str(e))
            ended.set()
        assert ended.wait(60)  # torchrun ends the other ranks of the group, too

    assert set(trains_beside(second, world_size=2)) == {1}
    (error,) = refused
    assert "two ranks of the group use one device, late-3" in error


@pytest.mark.slow  # its workers import PyTorch; the rule is that of the test in the trainer
def test_a_worker_whose_device_is_full_ends_its_own_group(late: Any) -> None:
    def second(rank: Rank) -> None:
        group = Group(rank, 1)
        with pytest.raises(
            RuntimeError, match="late:1 has too little memory for the connection with the other"
        ):
            forever(group)

    def pg(group: int) -> ProcessGroup:
        return (ProcessGroupBabyFull if group == 1 else ProcessGroupBabyLate)(timeout=DEADLINE)

    participants = trains_beside(second, pg)
    assert participants[-1] == 1 and participants.count(0) <= 3


@pytest.mark.parametrize(("local_rank", "devices", "expected"), [("5", 4, None), ("3", 4, 3), ("5", 1, 0)])
def test_a_job_names_a_rank_without_a_device(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, devices: int, expected: int | None
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    if expected is None:
        with pytest.raises(
            ValueError, match=r"LOCAL_RANK=5 has no device: 4 are visible \(CUDA_VISIBLE_DEVICES=0,1,2,3"
        ):
            pick_device("cuda")
    else:
        assert pick_device("cuda") == torch.device("cuda", expected)
