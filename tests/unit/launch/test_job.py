"""How a job manages its groups: it restarts, adds, drains and kills them, and it may fail."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from torchft._manager.settings import BAD_NODE_STATUS, STOPPED_STATUS
from torchft.launch import job as module
from torchft.launch import process_tree
from torchft.launch.group import ReplicaGroup
from torchft.launch.job import HostFails, JobStops, LocalJob, ScriptFailed
from torchft.launch.lighthouse import LaunchError
from torchft.launch.progress import line
from torchft.launch.restarts import FRUITLESS_LIVES, of_device, restart_delay


class FakeGroup:
    """A group whose events the test determines."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.starts = 0
        self.status: int | None = None
        self.terminated = 0
        self.log = Path(f"group-{number}.log")
        self.port = self.leave_on = self.returns = ""

    def start(self, lighthouse: str, env: dict[str, str]) -> None:
        self.starts += 1
        self.status = None
        self.port, self.leave_on = env["TORCHFT_MANAGER_PORT"], env["TORCHFT_LEAVE_ON"]
        self.returns, self.run = env.get("TORCHFT_RETURNS", ""), env["TORCHFT_RUN_ID"]

    def kill(self) -> list[int]:
        if self.status is None:
            self.status = -9
        return []

    def terminate(self) -> None:
        self.terminated += 1


class Cluster:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, replicas: int, most: int, **options: Any) -> None:
        self.now = 0.0
        self.groups: list[FakeGroup] = []
        self.training: dict[int, int] = {}  # group: step
        self.standby: set[int] = set()
        self.ended = False  # whether the training is complete
        self.time = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(module, "time", self.time)
        self.drained: list[str] = []
        self.can_drain = True  # whether the lighthouse can drain groups
        monkeypatch.setattr(module, "status", lambda lighthouse: self._status())
        monkeypatch.setattr(
            module, "drain", lambda lighthouse, name: self.drained.append(name) or self.can_drain
        )
        self.job = LocalJob(self._make, replicas, most, "http://lighthouse", **options)  # type: ignore[arg-type]

    def _make(self, number: int) -> FakeGroup:
        self.groups.append(FakeGroup(number))
        return self.groups[-1]

    def _status(self) -> dict[str, Any]:
        members = [
            {
                "replica_id": f"g{i}",
                "address": f"http://host:{self.groups[i].port}",
                "step": step,
                "in_quorum": True,
            }
            for i, step in self.training.items()
        ]
        members += [
            {
                "replica_id": f"g{i}",
                "address": f"http://host:{self.groups[i].port}",
                "step": 0,
                "in_quorum": False,
                "standby": True,
            }
            for i in self.standby
        ]
        ended = {"ended": self.groups[0].run} if self.ended else {}
        return {"quorum_id": len(self.training), "members": members, **ended}

    def pass_time(self, seconds: float) -> bool:
        self.now += seconds
        return self.job.tick()

    def end_before_a_step(self, number: int) -> None:
        """A group ends before it takes part in a step, as often as that is allowed."""
        for _ in range(FRUITLESS_LIVES):
            self.groups[number].status = 1
            self.pass_time(0)
            self.pass_time(6)
            self.pass_time(6)

    def states(self) -> list[str]:
        return [member.state for member in self.job.members]


def test_a_job_that_stops_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 2, 2)
    cluster.training = {0: 5, 1: 5}
    assert cluster.pass_time(1)
    stopped = {"stopped": "the job stops: ValueError", "members": []}
    monkeypatch.setattr(module, "status", lambda _: stopped)
    cluster.groups[0].status = cluster.groups[1].status = 1
    with pytest.raises(JobStops, match="the job stops: ValueError") as e:
        cluster.pass_time(1)
    assert e.value.status == STOPPED_STATUS and e.value.logs == ()
    assert [group.starts for group in cluster.groups] == [1, 1]


# The exit codes of the ranks of both groups: before and after the training has ended. 66: it was told so.
@pytest.mark.parametrize(
    ("lives", "status"),
    [
        ([[3, 66], [3, 66]], 3),  # all fail behind the loop
        ([[0], [3, 66]], 3),
        ([[0], [3, 0]], None),  # it has resumed from a checkpoint
        ([[3, 3, 3, 3], [0]], 3),
        ([[0], [-9, 66]], None),  # it was lost with its host
        ([[-9, 66], [-9, 66]], 1),
        ([[-9, 66], [4, 66]], 4),
    ],
)
def test_a_script_that_fails_behind_its_loop(
    monkeypatch: pytest.MonkeyPatch, lives: list[list[int]], status: int | None
) -> None:
    codes: dict[Path, int] = {}
    monkeypatch.setattr(module, "exit_code", codes.__getitem__)
    monkeypatch.setattr(module, "error_of", lambda log: "OSError: the disk is full")
    cluster = Cluster(monkeypatch, 2, 2)
    cluster.training = {0: 5, 1: 5}
    assert cluster.pass_time(1)
    cluster.training, cluster.ended = {}, True
    with contextlib.ExitStack() as raises:
        if status is not None:
            error = raises.enter_context(pytest.raises(ScriptFailed))
        while True:
            for group, ends in zip(cluster.groups, lives):
                if group.status is None and ends:
                    code = codes[group.log] = ends.pop(0)
                    group.status = 0 if code == 0 else 1
            if not cluster.pass_time(6):
                break
    assert not any(lives)
    assert [group.returns for group in cluster.groups] == [
        "1" if group.starts > 1 else "" for group in cluster.groups
    ]
    if status is not None:
        assert error.value.status == status and error.value.logs == ()
        assert "after the training was complete, and ran to its end in no life" in str(error.value)
        assert ("OSError: the disk is full; see group-" in str(error.value)) == (status > 1)


def test_a_group_that_failed_before_the_end_is_done_if_it_comes_back_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "exit_code", lambda log: cluster.code)
    cluster: Any = Cluster(monkeypatch, 2, 2)
    cluster.training, cluster.code = {0: 5, 1: 5}, 3
    assert cluster.pass_time(1)
    cluster.groups[1].status = 1
    assert cluster.pass_time(0) and cluster.pass_time(0)
    cluster.ended, cluster.code = True, 66
    cluster.groups[1].status, cluster.groups[0].status = 1, 0
    assert not cluster.pass_time(1)
    assert cluster.states() == ["done", "came back after the end"]


@pytest.mark.parametrize(("status", "ended"), [(1, False), (-9, True), (1, True)])
def test_a_script_may_end_with_the_status_of_a_late_group(
    monkeypatch: pytest.MonkeyPatch, status: int, ended: bool
) -> None:
    monkeypatch.setattr(module, "exit_code", lambda log: 66)
    cluster = Cluster(monkeypatch, 2, 2)
    cluster.training, cluster.ended = {0: 5, 1: 5}, ended
    assert cluster.pass_time(1)
    cluster.groups[1].status = status
    assert cluster.pass_time(0) and cluster.pass_time(0)
    assert cluster.groups[1].starts == 2, "it was not told that the training has ended"


@pytest.mark.parametrize(("codes", "error"), [([2, 2, 2], LaunchError), ([2, -11, 2], HostFails)])
def test_a_script_that_ends_alike_in_each_life_is_at_fault(
    monkeypatch: pytest.MonkeyPatch, codes: list[int], error: type[LaunchError]
) -> None:
    monkeypatch.setattr(module, "exit_code", lambda log: codes[min(cluster.groups[0].starts, 3) - 1])
    cluster: Any = Cluster(monkeypatch, 1, 1)
    assert cluster.pass_time(1)
    with pytest.raises(LaunchError) as raised:
        cluster.end_before_a_step(0)
    assert raised.type is error and ("each with status 2" in str(raised.value)) == (error is LaunchError)


@pytest.mark.parametrize(("fruitless", "delay"), [(0, 0.0), (1, 1.0), (2, 5.0), (FRUITLESS_LIVES, None)])
def test_the_delay_of_a_restart(fruitless: int, delay: float | None) -> None:
    assert restart_delay(fruitless) == delay


def test_a_group_that_fails_in_training_is_restarted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 2, 2)
    cluster.training = {0: 5, 1: 5}
    assert cluster.pass_time(1)
    assert cluster.states() == ["training", "training"]
    cluster.groups[1].status = -9
    cluster.training = {0: 6}
    assert cluster.pass_time(1)
    assert cluster.pass_time(0)
    assert cluster.groups[1].starts == 2 and cluster.states()[1] == "starting again"


@pytest.mark.parametrize(("env", "leave_on"), [(None, "SIGTERM"), ("", "")])
def test_groups_drain_on_sigterm(monkeypatch: pytest.MonkeyPatch, env: str | None, leave_on: str) -> None:
    if env is not None:  # a user sets it to the empty string, so that signals do not drain groups
        monkeypatch.setenv("TORCHFT_LEAVE_ON", env)
    cluster = Cluster(monkeypatch, 1, 1)
    cluster.pass_time(1)
    assert cluster.groups[0].leave_on == leave_on


def test_a_group_that_never_reaches_a_step_is_not_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_NODE_NAME", "here")
    cluster = Cluster(monkeypatch, 1, 1)
    for life in range(1, FRUITLESS_LIVES):
        cluster.groups[0].status = 1
        cluster.pass_time(0)
        assert cluster.pass_time(0.5) and cluster.groups[0].starts == life, "not at once"
        cluster.pass_time(5)
        assert cluster.groups[0].starts == life + 1
    cluster.groups[0].status = 1
    with pytest.raises(
        HostFails,
        match="group 0 ended 3 times before it took part in a step, the last time with status 1; "
        "no group is started on node here any more",
    ) as error:
        cluster.pass_time(0)
    assert error.value.status == BAD_NODE_STATUS and error.value.logs == (Path("group-0.log"),)


def test_a_group_that_never_reaches_a_step_is_not_restarted_and_the_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, 2, 2)
    cluster.training = {0: 5}
    cluster.end_before_a_step(1)
    assert cluster.groups[1].starts == FRUITLESS_LIVES
    assert cluster.states() == [
        "training",
        "not restarted: ended with status 1 and never took part, see group-1.log",
    ]
    assert cluster.groups[0].status is None and cluster.groups[0].starts == 1

    cluster.job.scale(2)  # the script was repaired
    assert cluster.groups[1].starts == FRUITLESS_LIVES + 1 and cluster.states()[1] == "starting again"
    cluster.groups[1].status = 1
    cluster.pass_time(0)
    cluster.pass_time(6)
    assert cluster.groups[1].starts == FRUITLESS_LIVES + 2, "it has as many attempts as at first"

    for _ in range(FRUITLESS_LIVES):
        cluster.groups[1].status = 1
        cluster.pass_time(6)
        cluster.pass_time(6)
    assert cluster.pass_time(1)
    cluster.groups[0].status = 0
    with pytest.raises(LaunchError, match="group 1 ended 3 times before it took part in a step") as error:
        cluster.pass_time(1)
    assert error.value.logs == (Path("group-1.log"),)
    assert cluster.states()[0] == "done", "the others have finished"
    assert error.value.status == 1, "on this host, too"


def test_a_host_on_which_no_group_comes_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_NODE_NAME", "here")
    monkeypatch.setattr(module, "error_of", lambda log: f"RuntimeError: CUDA error of {log}")
    cluster = Cluster(monkeypatch, 2, 2)
    cluster.training = {0: 5, 1: 5}
    assert cluster.pass_time(1)
    cluster.training = {}
    cluster.groups[0].status = cluster.groups[1].status = 1  # the device fails
    assert cluster.pass_time(0) and cluster.pass_time(0)
    cluster.end_before_a_step(0)
    with pytest.raises(HostFails) as error:
        cluster.end_before_a_step(1)
    assert [group.starts for group in cluster.groups] == [1 + FRUITLESS_LIVES, 1 + FRUITLESS_LIVES]
    assert error.value.status == BAD_NODE_STATUS
    assert "RuntimeError: CUDA error of group-1.log" in str(error.value) and "node here" in str(error.value)


@pytest.mark.parametrize(
    ("error", "of_it"),
    [
        ("RuntimeError: CUDA error: an illegal memory access was encountered", True),
        ("RuntimeError: No CUDA GPUs are available", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("RuntimeError: Found no NVIDIA driver on your system", True),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", True),
        ("RuntimeError: Expected all tensors to be on the same device, found cuda:0 and cpu!", False),
        ("ValueError: this SHIP is no device", False),
        ("", False),
    ],
)
def test_the_error_of_a_device(error: str, of_it: bool) -> None:
    assert of_device(error) is of_it


def test_the_error_of_a_device_is_not_taken_for_one_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "error_of", lambda log: "RuntimeError: CUDA unknown error")
    cluster = Cluster(monkeypatch, 1, 1)
    with pytest.raises(HostFails, match="RuntimeError: CUDA unknown error; no group is started on node"):
        cluster.end_before_a_step(0)
    assert cluster.groups[0].starts == FRUITLESS_LIVES


def test_a_group_that_was_removed_after_it_could_not_start_does_not_fail_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, 2, 2)
    cluster.training = {0: 5}
    cluster.end_before_a_step(1)
    assert cluster.states()[1].startswith("not restarted")
    cluster.job.scale(1)
    cluster.groups[0].status = 0
    assert not cluster.pass_time(1), "all others have finished"
    assert cluster.states() == ["done", "left"]


def test_a_job_whose_script_raises_the_same_error_twice_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third attempt would not help."""
    monkeypatch.setattr(module, "error_of", lambda log: "KeyError: 'LR'")
    cluster = Cluster(monkeypatch, 1, 1)
    cluster.groups[0].status = 1
    assert cluster.pass_time(0) and cluster.pass_time(1) and cluster.groups[0].starts == 2
    cluster.groups[0].status = 1
    with pytest.raises(LaunchError, match="the script ends before its first step: KeyError: 'LR'") as error:
        cluster.pass_time(0)
    assert error.value.logs == (Path("group-0.log"),)

    both = Cluster(monkeypatch, 2, 2)
    both.groups[0].status = both.groups[1].status = 1
    with pytest.raises(LaunchError, match="the script ends before its first step: KeyError: 'LR'"):
        both.pass_time(0)


def test_an_error_from_before_the_job_trained_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "error_of", lambda log: "OSError: the device is busy")
    cluster = Cluster(monkeypatch, 1, 1)
    cluster.groups[0].status = 1
    cluster.pass_time(0)
    cluster.pass_time(1)
    cluster.training = {0: 5}
    cluster.pass_time(1)
    cluster.training = {}
    for _ in range(2):
        cluster.groups[0].status = 1
        assert cluster.pass_time(0) and cluster.pass_time(1)
    assert cluster.groups[0].starts == 4


def test_a_job_that_has_trained_does_not_end_at_an_error_that_all_groups_raise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All were killed, and the storage that they start from does not answer for a moment."""
    monkeypatch.setattr(module, "error_of", lambda log: "OSError: the storage does not answer")
    cluster = Cluster(monkeypatch, 2, 2)
    cluster.training = {0: 5, 1: 5}
    cluster.pass_time(1)
    cluster.training = {}
    for starts in (2, 3):
        cluster.groups[0].status = cluster.groups[1].status = 1
        assert cluster.pass_time(0) and cluster.pass_time(1)
        assert [group.starts for group in cluster.groups] == [starts, starts]
    cluster.end_before_a_step(0)
    assert cluster.states()[0].startswith("not restarted") and cluster.groups[1].status is None


def test_a_group_that_raises_while_others_train_has_all_its_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have shown that the script can start."""
    monkeypatch.setattr(module, "error_of", lambda log: "OSError: the device is busy")
    cluster = Cluster(monkeypatch, 2, 2)
    cluster.training = {0: 5}
    cluster.end_before_a_step(1)
    assert cluster.groups[1].starts == FRUITLESS_LIVES and cluster.groups[0].status is None


def test_the_rate_of_groups_in_lockstep(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 2, 2)
    rates = []
    for second in range(5):
        # One of them asks for the next step already.
        cluster.training = {0: 1000 + 50 * second, 1: 999 + 50 * second}
        cluster.pass_time(1)
        rates.append(str(cluster.job.pace))
    assert rates == ["", *4 * ["50.0 steps/s"]]
    cluster.training = {0: 1250}
    cluster.pass_time(1)
    cluster.training = {0: 1300, 1: 0}  # it heals, to a step of which it has trained nothing
    cluster.pass_time(1)
    cluster.training = {0: 1350, 1: 1350}
    cluster.pass_time(1)
    assert str(cluster.job.pace) == "50.0 steps/s"


def test_the_job_is_over_when_all_have_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 2, 2)
    cluster.groups[0].status = 0
    assert cluster.pass_time(1)
    cluster.groups[1].status = 0
    assert not cluster.pass_time(1)
    assert cluster.states() == ["done", "done"] and [group.starts for group in cluster.groups] == [1, 1]


def test_kills_spare_the_last_group_and_are_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    for _ in range(2):
        cluster = Cluster(monkeypatch, 3, 3, kill_every=10.0, seed=7)
        cluster.training = {0: 1, 1: 1, 2: 1}
        cluster.pass_time(9)
        assert cluster.job.kills == 0
        cluster.pass_time(1)
        assert cluster.job.kills == 1
        killed.append([group.status for group in cluster.groups])
        assert killed[-1].count(-9) == 1
    assert killed[0] == killed[1]

    alone = Cluster(monkeypatch, 2, 2, kill_every=10.0)
    alone.training = {0: 1}  # the other one has not joined yet
    alone.pass_time(30)
    assert alone.job.kills == 0


def test_the_next_tick_comes_early_if_a_group_ends_or_is_to_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(monkeypatch, 2, 2)
    cluster.training = {0: 5, 1: 5}

    def sleep(seconds: float) -> None:
        cluster.now += seconds
        if cluster.now > 5.02:
            cluster.groups[0].status = -9

    cluster.time.sleep = sleep
    cluster.pass_time(1)
    cluster.job.pause()
    assert cluster.now == pytest.approx(1.1)
    cluster.now = 5.0
    cluster.job.pause()
    assert cluster.now == pytest.approx(5.03)
    cluster.pass_time(0)
    cluster.job.pause()
    assert cluster.now == pytest.approx(5.03), "it is started again at once"


def test_a_standby_is_started_like_the_others_and_ends_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 2, 2, standby=1, kill_every=100.0)
    cluster.training, cluster.standby = {0: 5, 1: 5}, {2}
    cluster.pass_time(1)
    assert cluster.states() == ["training", "training", "standby"]
    assert "step" not in line(cluster.job.members[2], cluster.job.pace)
    cluster.groups[2].status = 1
    cluster.pass_time(0)
    cluster.pass_time(0)
    assert cluster.groups[2].starts == 2, "it was ready, so it is started at once"
    cluster.pass_time(1)
    cluster.training = {1: 5}
    cluster.pass_time(100)
    assert cluster.job.kills == 1 and cluster.groups[2].status is None, "a standby is not killed"
    cluster.groups[0].status = cluster.groups[1].status = 0
    cluster.groups[2].status = None
    assert cluster.pass_time(1)
    assert [group.terminated for group in cluster.groups] == [0, 0, 1]
    cluster.groups[2].status = 143
    assert not cluster.pass_time(1) and cluster.states() == ["done", "done", "left"]


def test_the_number_of_groups_beside_a_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    takes = True
    monkeypatch.setattr(module, "limit", lambda _, most: limits.append(most) or takes)
    cluster = Cluster(monkeypatch, 2, 4, standby=1)
    cluster.training, cluster.standby = {0: 5, 1: 5}, {2}
    cluster.pass_time(1)
    cluster.job.scale(3)  # the standby trains, and the new group stands by
    assert limits == [3] and [group.starts for group in cluster.groups] == [1, 1, 1, 1]
    cluster.training, cluster.standby = {0: 5, 2: 5, 3: 5}, {1}  # group 1 had failed
    cluster.pass_time(1)
    takes = False
    with pytest.raises(ValueError, match="does not take 2 as its max_replicas"):
        cluster.job.scale(2)
    assert cluster.drained == [] and cluster.job.wanted == 3
    takes = True
    cluster.job.scale(2)
    assert cluster.drained == ["g3"] and cluster.job.wanted == 2, "no standby is drained"
    cluster.groups[3].status = 0
    cluster.training = {0: 6, 2: 6}
    cluster.pass_time(1)
    assert cluster.states() == ["training", "standby", "training", "left"]
    cluster.job.scale(4)
    assert [group.starts for group in cluster.groups] == [1, 1, 1, 2, 1]
    assert limits == [3, 2, 2, 4]
    # The next leader of a cluster begins with the number of the start.
    status = cluster._status()
    monkeypatch.setattr(module, "status", lambda _: {**status, "max_replicas": 2})
    cluster.pass_time(1)
    assert limits[-1] == 4 and len(limits) == 5


def test_beside_standbys_a_group_that_trains_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "limit", lambda *_: True)
    cluster = Cluster(monkeypatch, 3, 4, standby=1)
    cluster.training = {0: 5, 1: 5, 2: 5}  # group 3 has not yet been seen to stand by
    cluster.pass_time(1)
    cluster.job.scale(2)
    assert cluster.drained == ["g2"]


def test_adding_and_draining_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 1, 3)
    cluster.job.scale(3)
    assert [group.starts for group in cluster.groups] == [1, 1, 1]
    cluster.job.scale(2)
    assert [group.terminated for group in cluster.groups] == [0, 0, 1]
    with pytest.raises(ValueError, match="group 2 is still leaving"):
        cluster.job.scale(3)
    assert cluster.job.wanted == 2
    cluster.groups[2].status = 143
    cluster.pass_time(1)
    assert cluster.states()[2] == "left"
    assert cluster.pass_time(60) and cluster.groups[2].starts == 1, "it is not started again"
    cluster.job.scale(3)
    assert cluster.groups[2].starts == 2 and cluster.job.wanted == 3
    cluster.groups[2].status = 1
    cluster.pass_time(1)
    cluster.job.scale(2)  # while it waits to be started again
    assert cluster.pass_time(60) and cluster.states()[2] == "left" and cluster.groups[2].starts == 2
    with pytest.raises(
        ValueError, match=r"^0 replica groups are not allowed; allowed: 1 .* to 3 \(MAX of --replicas\)$"
    ):
        cluster.job.scale(0)
    with pytest.raises(ValueError, match=r"to 3 .*; to allow them, start it with --replicas 1:4$"):
        cluster.job.scale(4)


def test_a_job_is_not_scaled_below_the_groups_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 3, 4, least=2)
    with pytest.raises(
        ValueError, match=r"^1 replica groups are not allowed; allowed: 2 \(--min-replicas\) to 4 "
    ):
        cluster.job.scale(1)
    cluster.job.scale(2)
    assert [group.terminated for group in cluster.groups] == [0, 0, 1]


def test_fewer_groups_drain_training_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 3, 3)
    cluster.training = {0: 5, 1: 5, 2: 5}
    cluster.pass_time(1)
    cluster.job.scale(1)
    assert cluster.drained == ["g1", "g2"] and [group.terminated for group in cluster.groups] == [0, 0, 0]
    cluster.groups[1].status = 0  # its script drains on request
    cluster.pass_time(1)
    assert cluster.states()[1:] == ["left", "leaving"]
    cluster.pass_time(module._DRAIN_SEC)
    assert cluster.groups[2].terminated == 1, "its script does not drain on request"
    cluster.pass_time(1)
    assert cluster.groups[2].terminated == 1, "once is enough"


def test_a_group_that_cannot_be_drained_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 2, 2)
    cluster.training = {0: 5, 1: 5}
    cluster.can_drain = False
    cluster.pass_time(1)
    cluster.job.scale(1)
    assert cluster.groups[1].terminated == 1


def test_all_groups_have_the_grace_period_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, 2, 2)
    left_at = []

    def pass_time(seconds: float) -> None:
        cluster.now += seconds
        if cluster.now >= 8.0 and not left_at:
            left_at.append(cluster.now)
            cluster.groups[0].status = 0

    cluster.time.sleep = pass_time
    cluster.job.end(grace=25.0)
    assert [group.terminated for group in cluster.groups] == [1, 1]
    assert [group.status for group in cluster.groups] == [0, -9] and left_at
    assert 25.0 < cluster.now < 30.0


@pytest.mark.parametrize(
    ("name", "there", "expected"),
    [
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", None, "0"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", "1"),
        ("RES_OPTIONS", None, "timeout:1 attempts:3"),
        ("RES_OPTIONS", "timeout:9", "timeout:9"),
        ("TORCHFT_SNAPSHOTS", None, "auto"),
        ("TORCHFT_SNAPSHOTS", "0", "0"),
    ],
)
def test_ranks_begin_with_settings_that_a_script_could_make_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, there: str | None, expected: str
) -> None:
    """Also if a script makes its world before it imports torchft."""
    monkeypatch.delenv(name, raising=False)
    if there is not None:
        monkeypatch.setenv(name, there)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(process_tree, "start", lambda command, log, env: started.append(env))
    ReplicaGroup(0, 1, ["script.py"], tmp_path / "log").start("http://localhost:1")
    assert started[0][name] == expected
