"""All groups fail at once: the next ones go on from the newest copy in shared memory."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch

from tests.integration import test_job as jobs
from tests.integration.cluster import Cluster, Gate, Rank, results
from tests.integration.test_loader import Training, check, one_process
from tests.integration.test_training import Loop
from tests.unit.waiting import wait_until
from torchft import _keeper
from torchft._manager.rank import Position
from torchft._manager.snapshots.copies import Snapshots
from torchft.checkpointing.snapshots import remote, slots
from torchft.data import ElasticDataLoader


def crash(rank: Rank) -> str:
    rank.crash()
    return "crashed"


def together(groups: int) -> Callable[[Rank, ElasticDataLoader], None]:
    def wait(rank: Rank, loader: ElasticDataLoader) -> None:
        rank.cluster.wait_for_healthy(groups)

    return wait


def saved(group: str, rank: int = 0) -> list[int]:
    """The steps of the complete slots of a rank."""
    said: list[str] = []
    found = slots.found(slots.job_name(), group, rank, said.append)
    return [header.step for path, header in found if header.group == group]


class Steps:
    """Records the steps that each rank found to begin with, and those that it loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began: list[int] = []  # 0: it found none
        self.loaded: list[int] = []
        seek, load = Snapshots.seek, Snapshots.load

        def seeks(snapshots: Snapshots, beyond: int) -> bool:
            found = seek(snapshots, beyond)
            newest = snapshots.found(Position(0, 0, -1))
            self.began.append(0 if newest is None else newest.step)
            return found

        def loads(snapshots: Snapshots) -> Optional[Position]:
            position = load(snapshots)
            if position is not None:
                self.loaded.append(position.step)
            return position

        monkeypatch.setattr(Snapshots, "seek", seeks)
        monkeypatch.setattr(Snapshots, "load", loads)


def twice(training: Any, groups: int, world_size: int = 1, fewer: int = 0) -> list[Any]:
    """Runs all groups until they crash, then new ones, with a new lighthouse, to their end."""
    with Cluster(min_replicas=groups) as cluster:
        results(*(cluster.start(training, group, world_size) for group in range(groups)))
    with Cluster(min_replicas=groups - fewer) as cluster:
        return results(*(cluster.start(training, group, world_size) for group in range(groups - fewer)))


@pytest.mark.parametrize(
    "settings",
    [
        {"use_async_quorum": True},
        {"replay_failed_step": True},
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in ({"use_async_quorum": False}, {"heal": "at_once"}, {"reproducible_reduction": True})
        ),
    ],
)
def test_the_next_groups_end_with_the_weights_of_one_process(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)
    training = Training(settings={**settings, "snapshots": 1}, before=together(2))
    training.events = {(0, 0, 4): crash, (1, 0, 4): crash}
    ended = twice(training, groups=2)
    check(training, ended)
    assert steps.began == [0, 0, 3, 3] or max(steps.began[2:]) == 4, steps.began


def on_new_hosts(training: Any, world_size: int, lost: Path) -> tuple[list[Any], int]:
    """Runs two groups until they crash, then new ones on a new host. Of the old hosts one is left: its keeper
    has the copies of group 0. Returns what the new groups return, and the newest step of that host.
    """
    with Cluster(min_replicas=2) as cluster:
        results(*(cluster.start(training, group, world_size) for group in range(2)))
    name = slots.job_name()
    shutil.rmtree(lost / name / "group_1")
    newest = min(max(saved("group_0", rank)) for rank in range(world_size))
    with Cluster(min_replicas=2) as cluster, pytest.MonkeyPatch.context() as patch:
        _keeper.ensure(name, cluster.lighthouse.address())
        wait_until(lambda: remote.held(cluster.lighthouse.address(), name) != [])
        patch.setenv(_keeper.ROOT_ENV, str(lost.with_name(f"{lost.name}-new")))
        try:
            ended = results(*(cluster.start(training, group, world_size) for group in range(2)))
        finally:
            shutil.rmtree(_keeper.root())
    return ended, newest


@pytest.mark.usefixtures("keepers")
def test_the_memory_of_another_host_is_enough(
    monkeypatch: pytest.MonkeyPatch, memory_of_snapshots: Path
) -> None:
    steps = Steps(monkeypatch)
    training = Training(settings={"snapshots": 1}, before=together(2))
    training.events = {(0, 0, 4): crash, (1, 0, 4): crash}
    ended, newest = on_new_hosts(training, 1, memory_of_snapshots)
    check(training, ended)
    assert steps.began[2:] == [newest] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("keepers")
def test_each_rank_fetches_its_own_copy(monkeypatch: pytest.MonkeyPatch, memory_of_snapshots: Path) -> None:
    steps = Steps(monkeypatch)
    loop = Loop(steps=12, start_with=1, settings={"snapshots": 3})
    loop.events = {(group, 9, 0): lambda rank: rank.crash() for group in range(2)}
    ended, newest = on_new_hosts(loop, 2, memory_of_snapshots)
    assert ended == [[0 + 1 / 2 + 11 * 1.5] * 4, [1 + 2 / 2 + 11 * 1.5] * 4] * 2
    assert steps.began[4:] == [newest] * 4


def on_hosts_of_their_own(patch: pytest.MonkeyPatch) -> None:
    """Lets each group find its own copies only."""
    found = slots.found
    patch.setattr(
        slots,
        "found",
        lambda job, group, rank, say, lighthouse: [
            each for each in found(job, group, rank, say, lighthouse) if each[1].group == group
        ],
    )
    patch.setattr(remote, "held", lambda lighthouse, job, say: [])  # the hosts have no keepers


def tear(group: str, step: int) -> None:
    """Takes the header of the copy of a step, if there is one."""
    for name in slots.SLOTS:
        path = slots.folder_of(slots.job_name(), group, 0) / name
        if path.exists() and slots.read_header(path).step == step:
            path.write_bytes(bytes(5000))


def flip(group: str, step: int) -> None:
    """Changes a bit in the copies of a step, or of all if it is -1."""
    for name in slots.SLOTS:
        path = slots.folder_of(slots.job_name(), group, 0) / name
        if path.exists() and step in (-1, slots.read_header(path).step):
            bad = bytearray(path.read_bytes())
            bad[slots.PAGE + 3] ^= 1
            path.write_bytes(bad)


@pytest.mark.parametrize(
    "settings",
    [
        {"use_async_quorum": True},
        {"replay_failed_step": True},
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in (
                {"use_async_quorum": False},
                {"heal": "in_passing"},
                {"reproducible_reduction": True},
            )
        ),
    ],
)
def test_a_copy_that_is_found_damaged_after_it_won_costs_a_step_and_the_next_older_one_wins(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other group is to heal from the one that has it. Both go on from the step before."""
    steps = Steps(monkeypatch)
    training = Training(settings={**settings, "snapshots": 1}, before=together(2))
    training.events = {(0, 0, 4): crash, (1, 0, 4): crash}
    with Cluster(min_replicas=2) as cluster:
        results(*(cluster.start(training, group) for group in range(2)))
    behind, ahead = sorted(("group_0", "group_1"), key=lambda group: max(saved(group)))
    newest = max(saved(ahead))
    tear(behind, newest)
    flip(ahead, newest)
    with pytest.MonkeyPatch.context() as patch:
        on_hosts_of_their_own(patch)
        with Cluster(min_replicas=2) as cluster:
            ended = results(*(cluster.start(training, group) for group in range(2)))
    check(training, ended)
    assert f"the copy of step {newest} in" in caplog.text and "region 0 is damaged" in caplog.text
    assert f"no copy of step {newest}, which this group announced, can be loaded" in caplog.text
    assert sorted(steps.began[2:]) == [newest - 1, newest]
    assert steps.loaded and set(steps.loaded) == {newest - 1}


def test_a_group_with_a_newer_copy_wins_and_the_others_heal(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    training = Training(settings={"snapshots": 1}, before=together(2))
    training.events = {(0, 0, 4): crash, (1, 0, 4): crash}
    with Cluster(min_replicas=2) as cluster:
        results(*(cluster.start(training, group) for group in range(2)))
    newest = max(saved("group_0") + saved("group_1"))
    with pytest.MonkeyPatch.context() as patch:
        on_hosts_of_their_own(patch)
        tear("group_1", newest)
        with Cluster(min_replicas=2) as cluster:
            ended = results(*(cluster.start(training, group) for group in range(2)))
    check(training, ended)
    assert sorted(steps.began[2:]) == [newest - 1, newest]
    assert steps.loaded == [newest], "the other group heals, and loads nothing"


def test_any_group_begins_with_the_copy_of_any_other_one_on_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch)
    training = Training(settings={"snapshots": 1})
    training.events = {(0, 0, 5): crash}
    training.before = together(1)
    with Cluster() as cluster:
        results(cluster.start(training, 0))
    training.committed.clear()
    with Cluster() as cluster:
        (ended,) = results(cluster.start(training, 7))
    torch.testing.assert_close(ended, one_process(), rtol=0, atol=1e-9)
    assert steps.began == [0, 4] or steps.began == [0, 5]


@pytest.mark.parametrize("every", [1, pytest.param(3, marks=pytest.mark.slow), "auto"])
def test_all_ranks_of_a_group_copy_the_same_steps(every: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    loop = Loop(steps=12, start_with=1, settings={"snapshots": every})
    loop.events = {(group, 9, 0): lambda rank: rank.crash() for group in range(2)}
    with Cluster(min_replicas=2) as cluster:
        results(*(cluster.start(loop, group, world_size=2) for group in range(2)))
    begun = [saved(f"group_{group}", rank) for group in range(2) for rank in range(2)]
    assert all(set(one) & set(begun[0]) for one in begun)
    with Cluster(min_replicas=2) as cluster:
        ended = results(*(cluster.start(loop, group, world_size=2) for group in range(2)))
    # Each rank has its own primary at step 0, which is the only one whose gradient counts there.
    assert ended == [[0 + 1 / 2 + 11 * 1.5] * 4, [1 + 2 / 2 + 11 * 1.5] * 4] * 2
    assert steps.began[:4] == [0] * 4 and set(steps.began[4:]) <= set(begun[0]) and min(steps.began[4:]) > 0
    assert saved("group_0") != begun[0], "they are copied again"


@pytest.mark.slow
def test_a_job_that_has_ended_leaves_nothing(memory_of_snapshots: Path) -> None:
    loop = Loop(steps=5, settings={"snapshots": 1})

    def ends(rank: Rank) -> list[float]:
        weights = loop(rank)
        assert saved("group_0") == [4, 3]
        assert rank.manager is not None
        rank.manager.shutdown(finished=True)
        return weights

    with Cluster() as cluster:
        assert results(cluster.start(ends, 0)) == [[5.0] * 4]
    assert [path for path in memory_of_snapshots.iterdir() if path.is_dir()] == [], (
        "only the keeper has files"
    )


def restarted(loop: Callable[[Rank], Any], again: Callable[[Rank], Any], world_size: int = 1) -> list[Any]:
    with Cluster() as cluster:
        results(cluster.start(loop, 0))
    with Cluster() as cluster:
        return results(cluster.start(again, 0, world_size))


def test_another_model_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    class Larger(Loop):
        def __call__(self, rank: Rank) -> list[float]:
            weights = torch.zeros(5)
            manager = rank.start_manager(
                load_state_dict=lambda state: weights.copy_(state["weights"]),
                state_dict=lambda: {"weights": weights},
                **self.settings,
            )
            manager.start_quorum()
            return [manager.current_step(), *weights.tolist()]

    loop = Loop(steps=4, settings={"snapshots": 1})
    again = Larger(settings={"snapshots": 1})
    assert restarted(loop, again) == [[0.0] * 6]
    refused = [line for line in caplog.messages if "is not loaded: " in line]
    assert len(refused) == 2 and "the copy of step 3 in" in refused[0]
    assert "['weights'] is float32 [4] there and float32 [5] in this group" in refused[0]


def test_another_number_of_ranks_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(steps=4, settings={"snapshots": 1})
    again = Loop(steps=4, settings={"snapshots": 1})
    assert restarted(loop, again, world_size=2) == [[4.0] * 4] * 2
    assert "is not loaded: it is of a group of 1 ranks, and this one has 2" in caplog.text


def test_a_load_that_fails_ends_the_process_with_the_remedy() -> None:
    loop = Loop(steps=4, settings={"snapshots": 1})

    def broken(group: int, weights: torch.Tensor, state: dict[str, Any]) -> None:
        raise OSError("broken")

    again = Loop(steps=4, settings={"snapshots": 1}, load=broken)
    with pytest.raises(RuntimeError, match=r"copy of step 3 in .* could not be loaded.*broken; with TORCHFT"):
        restarted(loop, again)


def test_a_second_trainer_of_the_same_name_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    def run(rank: Rank) -> list[float]:
        folder = slots.folder_of(slots.job_name(), "group_0", 0)
        taken = slots.hold(folder)
        assert taken is not None
        return Loop(steps=3, settings={"snapshots": 1})(rank)

    with Cluster() as cluster:
        assert results(cluster.start(run, 0)) == [[3.0] * 4]
    assert "another process, which lives, has the slots of this rank" in caplog.text
    assert saved("group_0") == []


def test_no_room(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(slots.os, "pwrite", full)
    with Cluster() as cluster:
        assert results(cluster.start(Loop(steps=5, settings={"snapshots": 1}), 0)) == [[5.0] * 4]
    off = [line for line in caplog.messages if "no copy of this rank's state is made" in line]
    assert len(off) == 1 and "no room for a copy of" in off[0] and off[0].endswith("No space left on device")


def test_damaged_copies_are_named_and_the_next_older_one_is_loaded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)

    def again(rank: Rank) -> list[float]:
        flip("group_0", 5)
        return Loop(steps=8, settings={"snapshots": 1})(rank)

    assert restarted(Loop(steps=6, settings={"snapshots": 1}), again) == [[8.0] * 4]
    assert steps.began == [0, 5] and steps.loaded == [4]
    assert "the copy of step 5 in" in caplog.text and "region 0 is damaged" in caplog.text


@pytest.mark.slow
def test_a_copy_that_hangs_is_abandoned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    hang, real = threading.Event(), slots.os.pwrite

    def pwrite(file: int, data: Any, offset: int) -> int:
        if saved("group_0"):
            hang.wait(60)
        return real(file, data, offset)

    monkeypatch.setattr("torchft._manager.snapshots.copies._LONGEST_WAIT_SEC", 0.2)
    monkeypatch.setattr(slots.os, "pwrite", pwrite)
    try:
        with Cluster() as cluster:
            assert results(cluster.start(Loop(steps=5, settings={"snapshots": 1}), 0)) == [[5.0] * 4]
        assert "a copy has not ended within 0.2 s" in caplog.text
        assert saved("group_0") == [1]
    finally:
        hang.set()


@pytest.mark.parametrize(
    "settings",
    [
        {"heal": "in_passing"},
        pytest.param({"heal": "at_once"}, marks=pytest.mark.slow),
        pytest.param({"use_async_quorum": False}, marks=pytest.mark.slow),
    ],
)
def test_one_group_of_a_running_job_that_returns_heals_and_loads_nothing(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)
    on_hosts_of_their_own(monkeypatch)
    training = Training(settings={**settings, "snapshots": 1}, start_with=2)
    later = Gate()

    def wait(rank: Rank) -> Optional[str]:
        later.open()  # the job is at a later step than each copy of the other group
        rank.cluster.wait_for_another()
        return None

    training.events = {(1, 0, 2): crash, (0, 0, 5): wait}
    with Cluster() as cluster:
        first = [cluster.start(training, group) for group in range(2)]
        results(first[1])
        later.wait()
        ended = results(first[0], cluster.start(training, 1))
    for weights in ended:
        torch.testing.assert_close(weights, one_process(), rtol=0, atol=1e-9)
    assert steps.began[:2] == [0, 0] and steps.began[2] >= 1
    assert steps.loaded == []


def test_a_job_loads_the_next_older_copy_after_a_lost_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)

    def stop(rank: Rank) -> bool:
        rank.crash()
        return True

    loop = jobs.Loop(settings={"snapshots": 1}, events={(0, 5): stop})
    with Cluster() as cluster:
        results(cluster.start(loop, 0))
    flip("group_0", newest := max(saved("group_0")))
    with Cluster() as cluster:
        (ended,) = results(cluster.start(loop, 0))
    torch.testing.assert_close(ended, jobs.one_process()[0], rtol=1e-9, atol=1e-12)
    assert steps.began[1:] == [newest] and steps.loaded == [newest - 1]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in ({"reproducible_reduction": True}, {"heal": "in_passing"})
        ),
    ],
)
def test_a_job_goes_on_with_its_schedule_and_position(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)

    def stop(rank: Rank) -> bool:
        rank.crash()
        return True

    loop = jobs.Loop(settings={**settings, "snapshots": 1}, start_with=2)
    loop.events = {(0, 4): stop, (1, 4): stop}
    ended = twice(loop, groups=2)
    weights, losses = jobs.one_process()
    for each in ended:
        torch.testing.assert_close(each, weights, rtol=1e-6, atol=1e-9)
    assert [max(loop.losses[step]) for step in range(jobs.STEPS)] == pytest.approx(losses, rel=1e-5)
    assert max(steps.began[2:]) >= 3


def test_if_no_copy_can_be_loaded_a_job_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps(monkeypatch)

    def stop(rank: Rank) -> bool:
        rank.crash()
        return True

    def loop(**more: Any) -> jobs.Loop:
        job = {"checkpoint_dir": tmp_path, "checkpoint_every": 3}
        return jobs.Loop(settings={"snapshots": 1}, job=job, **more)

    with Cluster() as cluster:
        results(cluster.start(loop(events={(0, 5): stop}), 0))
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    flip("group_0", -1)
    again = loop()
    with Cluster() as cluster:
        (ended,) = results(cluster.start(again, 0))
    torch.testing.assert_close(ended, jobs.one_process()[0], rtol=1e-9, atol=1e-12)
    assert steps.began[1] > 3 and steps.loaded == []
    assert min(again.losses) == 3 and "goes on from step 3, of the checkpoint" in caplog.text


def test_a_job_refuses_another_model_and_trains_from_the_beginning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(rank: Rank) -> bool:
        rank.crash()
        return True

    loop = jobs.Loop(settings={"snapshots": 1}, events={(0, 4): stop})
    with Cluster() as cluster:
        results(cluster.start(loop, 0))
    other = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()
    monkeypatch.setattr(jobs, "_MODEL", other)
    with Cluster() as cluster:
        (ended,) = results(cluster.start(loop, 0))
    torch.testing.assert_close(ended, jobs.one_process()[0], rtol=1e-9, atol=1e-12)
    assert "['model']['0.weight'] is float64 [3, 4] there and float64 [5, 4] in this group" in caplog.text


def test_local_sgd_makes_no_copies(caplog: pytest.LogCaptureFixture) -> None:
    from torchft.local_sgd import LocalSGD

    def run(rank: Rank) -> int:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manager = rank.start_manager(
            load_state_dict=model.load_state_dict,
            state_dict=model.state_dict,
            use_async_quorum=False,
            snapshots=1,
        )
        with LocalSGD(manager, model, optimizer, sync_every=2):
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        return manager.current_step()

    with Cluster() as cluster:
        assert results(cluster.start(run, 0)) == [3]
    assert "with LocalSGD and DiLoCo each group has weights of its own between two averages" in caplog.text
    assert saved("group_0") == []


@pytest.fixture(autouse=True)
def logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
