"""ManagerServer and ManagerClient: quorums and votes of real servers in one process."""

from __future__ import annotations

import copy
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from torchft._torchft import (
    LighthouseClient,
    LighthouseServer,
    ManagerClient,
    ManagerServer,
    QuorumRequest,
    QuorumResult,
)

T = TypeVar("T")
SOON = timedelta(seconds=20)


class Groups:
    """A lighthouse, and the manager servers of replica groups."""

    def __init__(self, groups: int, world_size: int = 1) -> None:
        self.lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=groups)
        self.servers = [self.server(f"group{i}", world_size) for i in range(groups)]
        self.threads = ThreadPoolExecutor(groups * world_size)

    def server(self, replica_id: str, world_size: int = 1, **changed: Any) -> ManagerServer:
        settings: dict[str, Any] = dict(
            replica_id=replica_id,
            lighthouse_addr=self.lighthouse.address(),
            hostname="127.0.0.1",
            bind="127.0.0.1:0",
            store_addr=f"{replica_id}:29500",
            world_size=world_size,
            heartbeat_interval=timedelta(milliseconds=100),
            connect_timeout=SOON,
            quorum_retries=0,
        )
        return ManagerServer(**{**settings, **changed})

    def client(self, group: int) -> ManagerClient:
        return ManagerClient(self.servers[group].address(), SOON)

    def together(self, *calls: Callable[[], T]) -> list[Future[T]]:
        futures = [self.threads.submit(call) for call in calls]
        for future in futures:
            future.exception(timeout=60)
        return futures

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
        self.lighthouse.shutdown()
        self.threads.shutdown()


@pytest.fixture
def groups() -> Iterator[Callable[..., Groups]]:
    made: list[Groups] = []

    def make(*args: int, **more: Any) -> Groups:
        made.append(Groups(*args, **more))
        return made[-1]

    yield make
    for g in made:
        g.close()


def ask(
    client: ManagerClient, rank: int = 0, step: int = 0, timeout: timedelta = SOON, **more: Any
) -> QuorumResult:
    request: dict[str, Any] = dict(
        checkpoint_metadata=f"metadata{rank}", shrink_only=False, commit_failures=0, **more
    )
    return client._quorum(group_rank=rank, step=step, timeout=timeout, **request)


def test_quorum_result_has_its_defaults_and_can_be_set() -> None:
    defaults = dict(
        quorum_id=0,
        replica_rank=0,
        replica_world_size=1,
        recover_src_manager_address="",
        recover_src_replica_rank=None,
        recover_dst_replica_ranks=[],
        store_address="",
        max_step=0,
        max_replica_rank=None,
        max_world_size=1,
        heal=False,
        commit_failures=0,
        replica_ids=[],
        reconfigure_handles=[],
        replicas_without_handles=[],
        committed_quorum_id=0,
        replay=False,
        additional_source_addresses=[],
        help_dst_replica_ranks=[],
        draining=False,
        speeds=[],
        max_speeds=[],
        skipped=[],
    )
    result = QuorumResult()
    assert vars(result) == defaults
    for name, value in dict(quorum_id=3, heal=True, replica_ids=["a"], max_replica_rank=1).items():
        setattr(result, name, value)
        assert getattr(result, name) == value
    result.recover_dst_replica_ranks.append(1)
    assert QuorumResult().recover_dst_replica_ranks == []
    assert copy.deepcopy(result) == result


def test_two_groups_agree_on_a_quorum(groups: Callable[..., Groups]) -> None:
    job = groups(2)
    clients = [job.client(0), job.client(1)]
    first, second = (f.result() for f in job.together(*(lambda c=c: ask(c) for c in clients)))

    assert first.quorum_id == second.quorum_id > 0
    assert first.replica_ids == second.replica_ids == ["group0", "group1"]
    assert (first.replica_rank, second.replica_rank) == (0, 1)
    assert first.replica_world_size == second.replica_world_size == 2
    assert (first.max_step, first.max_world_size) == (0, 2)
    assert first.store_address == second.store_address == "group0:29500"
    assert (first.heal, second.heal) == (False, True)
    assert first.recover_dst_replica_ranks == [1]
    assert (second.recover_src_replica_rank, second.recover_src_manager_address) == (
        0,
        job.servers[0].address(),
    )
    # The healing group asks where the source serves its state
    assert (
        ManagerClient(second.recover_src_manager_address, SOON)._checkpoint_metadata(0, SOON) == "metadata0"
    )

    assert [
        f.result() for f in job.together(*(lambda c=c: c.should_commit(0, 0, True, SOON) for c in clients))
    ] == [
        True,
        True,
    ]
    third, fourth = (f.result() for f in job.together(*(lambda c=c: ask(c, step=1) for c in clients)))
    assert third.quorum_id == fourth.quorum_id == first.quorum_id
    assert not third.heal
    assert not fourth.heal


def test_without_init_sync_nobody_heals_at_step_0(groups: Callable[..., Groups]) -> None:
    job = groups(2)
    clients = [job.client(0), job.client(1)]
    results = job.together(*(lambda c=c: ask(c, init_sync=False) for c in clients))
    assert [f.result().heal for f in results] == [False, False]


def test_a_group_behind_heals(groups: Callable[..., Groups]) -> None:
    job = groups(2)
    clients = {5: job.client(0), 2: job.client(1)}
    ahead, behind = (
        f.result() for f in job.together(*(lambda s=s, c=c: ask(c, step=s) for s, c in clients.items()))
    )
    assert (ahead.max_step, behind.max_step) == (5, 5)
    assert (ahead.max_replica_rank, behind.max_replica_rank) == (0, None)
    assert behind.heal
    assert ahead.max_world_size == 1


def test_a_job_that_regresses_is_said_to_its_ranks_and_in_its_history(groups: Callable[..., Groups]) -> None:
    job = groups(2)
    job.lighthouse.shutdown()
    job.lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000)
    job.servers = [job.server(f"group{i}") for i in range(2)]
    ahead, behind = job.client(0), job.client(1)
    job.together(lambda: ask(ahead, step=5), lambda: ask(behind, step=2))
    job.servers[0].shutdown()
    assert ask(behind, step=2).max_step == 2
    notices = iter(lambda: behind._wait_notice(SOON), None)
    kind, notice = next(n for n in notices if n[0] not in ("failed", "progress"))
    assert kind == "regressed" and "had reached step 5" in notice.reason
    with urllib.request.urlopen(job.lighthouse.address() + "/api/v1/history", timeout=10) as answer:
        (event,) = (e for e in json.load(answer)["events"] if e["kind"] == "regressed")
    assert event["reason"] == notice.reason and event["step"] == 2
    with urllib.request.urlopen(job.lighthouse.address() + "/metrics", timeout=10) as answer:
        assert b'torchft_regressions_total{training_job="default"} 1' in answer.read()


def test_handles_are_returned_when_every_rank_sent_one(groups: Callable[..., Groups]) -> None:
    job = groups(2)
    clients = [job.client(0), job.client(1)]
    calls = (lambda i=i, c=c: ask(c, reconfigure_handle=f"handle{i}") for i, c in enumerate(clients))
    results = job.together(*calls)
    assert [f.result().reconfigure_handles for f in results] == [["handle0", "handle1"]] * 2


def test_a_failed_commit_makes_a_new_quorum(groups: Callable[..., Groups]) -> None:
    job = groups(1)
    client = job.client(0)

    def failures(count: int) -> QuorumResult:
        return client._quorum(
            group_rank=0,
            step=0,
            checkpoint_metadata="",
            shrink_only=False,
            timeout=SOON,
            commit_failures=count,
        )

    first, second = failures(0), failures(1)
    assert second.quorum_id == first.quorum_id + 1
    assert second.commit_failures == 1


def test_the_ranks_of_a_group_wait_for_each_other(groups: Callable[..., Groups]) -> None:
    job = groups(1, 2)
    ranks = [job.client(0) for _ in range(2)]
    asking = (lambda r=r: ask(ranks[r], rank=r, group_world_size=2) for r in range(2))
    results = [f.result() for f in job.together(*asking)]
    assert results[0].quorum_id == results[1].quorum_id
    assert ranks[0]._checkpoint_metadata(1, SOON) == "metadata1"

    def votes(*ballots: bool, step: int) -> list[bool]:
        calls = (lambda r=r, v=v: ranks[r].should_commit(r, step, v, SOON) for r, v in enumerate(ballots))
        return [f.result() for f in job.together(*calls)]

    assert votes(True, True, step=0) == [True, True]
    assert votes(True, False, step=1) == [False, False]
    assert votes(True, True, step=1) == [True, True]


def test_votes_on_different_steps_never_mix(groups: Callable[..., Groups]) -> None:
    job = groups(1, 2)
    ranks = [job.client(0) for _ in range(2)]
    stale = job.threads.submit(ranks[0].should_commit, 0, 3, True, SOON)
    newer = job.threads.submit(ranks[1].should_commit, 1, 4, True, SOON)
    # In either order, the rank with the older step gets an error, and the other one waits.
    with pytest.raises(RuntimeError, match="step 3"):
        stale.result(timeout=60)
    with pytest.raises(TimeoutError):
        newer.result(timeout=0.5)
    job.servers[0].shutdown()
    with pytest.raises(RuntimeError, match="is shutting down"):
        newer.result(timeout=60)


def test_a_rank_whose_wait_ends_also_ends_that_of_its_sibling(groups: Callable[..., Groups]) -> None:
    error = ""
    for seconds in (1, 10):  # longer if rank 0 asked after that
        job = groups(1, 3)
        long = job.threads.submit(ask, job.client(0), rank=0)
        short = job.threads.submit(ask, job.client(0), rank=1, timeout=timedelta(seconds=seconds))
        with pytest.raises(TimeoutError):
            short.result(timeout=60)
        with pytest.raises((RuntimeError, TimeoutError)) as caught:
            long.result(timeout=60)
        error = str(caught.value)
        if "rank 1" in error:
            break
    assert "rank 1" in error


def test_another_world_size_is_refused_naming_both(groups: Callable[..., Groups]) -> None:
    job = groups(1, 2)
    with pytest.raises(RuntimeError, match=r"(?s)3.*2|2.*3"):
        ask(job.client(0), group_world_size=3)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"step": "1"}, TypeError, "str"),
        ({"reconfigure_handle": None}, TypeError, "reconfigure_handle=None is not allowed; allowed: a str"),
        ({"commit_failures": 2**63}, ValueError, "commit_failures=9223372036854775808 is not allowed"),
        ({"unheard_of": 1}, TypeError, "unheard_of"),
    ],
)
def test_an_invalid_request_is_refused(
    groups: Callable[..., Groups], changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    request: dict[str, Any] = dict(
        group_rank=0, step=0, checkpoint_metadata="", shrink_only=False, timeout=SOON, commit_failures=0
    )
    with pytest.raises(error, match=text):
        groups(1).client(0)._quorum(**{**request, **changes})


def test_the_core_refuses_a_field_that_it_does_not_know(groups: Callable[..., Groups]) -> None:
    client = groups(1).client(0)
    with pytest.raises(ValueError, match='unknown field "unheard_of"'):
        client._go.pyapi_ManagerRoundStart(client._handle, '{"unheard_of": 1}', 1)


def test_each_round_has_the_fields_of_its_request(groups: Callable[..., Groups]) -> None:
    client = groups(1).client(0)
    for step, committed in ((0, -1), (1, 3), (2, 3), (3, 3), (4, 5)):
        request = QuorumRequest(0, step, "", False, 0, committed_quorum_id=committed)
        result = client._end_round(client._begin_round(request, SOON))
        assert (result.max_step, result.committed_quorum_id) == (step, committed)


def test_an_unknown_rank_has_no_metadata(groups: Callable[..., Groups]) -> None:
    with pytest.raises(RuntimeError, match="rank 5"):
        groups(1).client(0)._checkpoint_metadata(5, SOON)


def test_no_quorum_in_time_is_a_timeout_error(groups: Callable[..., Groups]) -> None:
    with pytest.raises(TimeoutError, match="quorum"):
        ask(groups(2).client(0), timeout=timedelta(milliseconds=100))


def test_a_lighthouse_that_is_not_there_is_named_with_the_time_tried(groups: Callable[..., Groups]) -> None:
    job = groups(1)
    ended = job.lighthouse.address()
    job.lighthouse.shutdown()
    with pytest.raises(RuntimeError, match=rf"{ended}: timed out after 100ms"):
        job.server("late", connect_timeout=timedelta(milliseconds=100))


def test_any_text_arrives_unchanged(groups: Callable[..., Groups]) -> None:
    job = groups(1)
    # The server does not report the job's group.
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    text = 'ü "quoted" \\ </script> \u2028 \U0001f600'
    server = job.server(text, lighthouse_addr=lighthouse.address())
    try:
        result = ask(ManagerClient(server.address(), SOON), reconfigure_handle=text)
        assert result.replica_ids == [text]
        assert result.reconfigure_handles == [text]
    finally:
        server.shutdown()
        lighthouse.shutdown()


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        ("world_size", 0, ValueError),
        ("world_size", -1, ValueError),
        ("world_size", 2**63, ValueError),
        ("world_size", "2", TypeError),
        ("heartbeat_interval", timedelta(0), ValueError),
        ("heartbeat_interval", timedelta(seconds=-1), ValueError),
        ("connect_timeout", timedelta(0), ValueError),
        ("connect_timeout", 5.0, TypeError),
        ("quorum_retries", -1, ValueError),
        ("replica_id", "", ValueError),
        ("hostname", "a b", ValueError),
        ("bind", "no-port", ValueError),
        ("lighthouse_addr", "localhost:29510", RuntimeError),
        ("lighthouse_addr", "", RuntimeError),
    ],
)
def test_a_bad_setting_of_the_server_is_named(
    groups: Callable[..., Groups], setting: str, value: object, error: type[Exception]
) -> None:
    job = groups(1)
    with pytest.raises(error, match=setting):
        job.server(**{"replica_id": "group", setting: value})


def test_a_missing_file_of_the_lighthouse_is_waited_for(
    groups: Callable[..., Groups], tmp_path: Path
) -> None:
    """A scheduler moves the lighthouse to another host, and it writes the file there."""
    where = str(tmp_path / "lighthouse")
    with pytest.raises(RuntimeError, match=r"timed out after 500ms: .*lighthouse.*no such file"):
        groups(1).server("group", lighthouse_addr=where, connect_timeout=timedelta(milliseconds=500))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (dict(rank=-1), "group_rank"),
        (dict(timeout=timedelta(0)), "timeout"),
        (dict(timeout=timedelta(microseconds=-1)), "timeout"),
    ],
)
def test_a_bad_argument_of_a_call_is_named(
    groups: Callable[..., Groups], arguments: dict[str, Any], named: str
) -> None:
    client = groups(1).client(0)
    with pytest.raises(ValueError, match=named):
        ask(client, **arguments)


def test_the_job_is_read_from_the_current_environment(
    groups: Callable[..., Groups], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native library copies the environment when it is loaded; later changes apply, too."""
    job = groups(1)
    for name in ("red", "blue", ""):
        monkeypatch.setenv("TORCHFT_JOB_ID", name)
        job.servers.append(job.server("a"))
        LighthouseClient(job.lighthouse.address(), SOON).heartbeat("alone", SOON)

    def healthy() -> dict[str, int]:
        with urllib.request.urlopen(f"{job.lighthouse.address()}/jobs", timeout=10) as response:
            return {one["job"]: one["healthy"] for one in json.load(response)}

    deadline = time.monotonic() + 60
    while healthy() != {"blue": 2, "default": 3, "red": 2}:
        assert time.monotonic() < deadline, healthy()
        time.sleep(0.01)
    monkeypatch.setenv("TORCHFT_JOB_ID", "a/b")
    with pytest.raises(ValueError, match=r'TORCHFT_JOB_ID\) is "a/b": it must be 1 to 128 letters'):
        job.server("a")
    monkeypatch.setenv("TORCHFT_JOB_ID", "")
    monkeypatch.setenv("TORCHFT_RUN_ID", "first run")
    with pytest.raises(ValueError, match=r'TORCHFT_RUN_ID is "first run": it must be 1 to 128 letters'):
        job.server("a")


def test_the_longest_timedelta_is_a_timeout(groups: Callable[..., Groups]) -> None:
    assert ask(groups(1).client(0), timeout=timedelta.max).quorum_id > 0


@pytest.mark.parametrize(
    ("committed", "heals"),
    [
        ((7, 9), [True, False]),
        ((9, 9), [False, False]),
        ((-1, 9), [True, False]),  # the first group begins with a checkpoint on disk
        ((0, 9), [False, False]),  # like upstream, it does not report its quorum
    ],
)
def test_an_equal_step_of_an_older_quorum_is_behind(
    groups: Callable[..., Groups], committed: tuple[int, int], heals: list[bool]
) -> None:
    """Two groups were separated, and each committed a step without the other."""
    two = groups(2)
    asking = [partial(ask, two.client(i), step=5, committed_quorum_id=committed[i]) for i in range(2)]
    results = [f.result() for f in two.together(*asking)]
    assert [result.heal for result in results] == heals
    assert {result.committed_quorum_id for result in results} == {0 if 0 in committed else 9}


@pytest.mark.parametrize(("announced", "replay"), [((True, True), True), ((True, False), False)])
def test_a_step_is_replayed_if_all_groups_announce_it(
    groups: Callable[..., Groups], announced: tuple[bool, bool], replay: bool
) -> None:
    two = groups(2)
    asking = [partial(ask, two.client(i), step=5, replays_failed_steps=announced[i]) for i in range(2)]
    results = [f.result() for f in two.together(*asking)]
    assert [result.replay for result in results] == [replay, replay]


def latest(groups: Groups) -> tuple[int, int]:
    """Returns the quorum after which the lighthouse continues, and the step that the job has reached; 0
    without one.
    """
    with urllib.request.urlopen(f"{groups.lighthouse.address()}/status", timeout=10) as answer:
        status = json.load(answer)
    return status["quorum_id"], status["max_step"]


FAREWELL_SEC = 0.2  # a group that ends waits no longer for the lighthouse


@pytest.mark.parametrize("finished", [2, 1, 0])
def test_a_training_that_ended_on_purpose_is_forgotten(groups: Callable[..., Groups], finished: int) -> None:
    for _ in range(20):  # again if a group did not wait until the lighthouse knew why it ended
        g = groups(2)
        clients = [g.client(0), g.client(1)]
        before = g.together(*[partial(ask, client, step=7) for client in clients])[0].result()
        took = []
        for number, server in enumerate(g.servers):
            if number < finished:
                server._finish()
            began = time.monotonic()
            server.shutdown()
            took.append(time.monotonic() - began)
            server._finish()  # too late, and without an error
        if max(took) < FAREWELL_SEC:
            break
    if finished < 2:
        assert latest(g) == (before.quorum_id, 7)
        return
    assert latest(g) == (0, 0)
    g.servers = [g.server("other0"), g.server("other1")]
    clients = [g.client(0), g.client(1)]
    after = g.together(*[partial(ask, client, step=0) for client in clients])[0].result()
    assert after.quorum_id > before.quorum_id and after.max_step == 0
