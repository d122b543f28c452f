"""The calls of each step: votes, and rounds whose results are returned once."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.waiting import wait_until
from torchft._manager.edge import as_server
from torchft._manager.observe.log import _ManagerLogger
from torchft._manager.poison import digest
from torchft._manager.rank import RankState
from torchft._torchft import LighthouseServer, ManagerClient, ManagerServer, QuorumRequest

SOON = timedelta(seconds=20)
RANKS = 4


@pytest.fixture
def client() -> Iterator[ManagerClient]:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    server = ManagerServer(
        replica_id="group",
        lighthouse_addr=lighthouse.address(),
        hostname="127.0.0.1",
        bind="127.0.0.1:0",
        store_addr="store:1",
        world_size=RANKS,
        heartbeat_interval=timedelta(milliseconds=100),
        connect_timeout=SOON,
        quorum_retries=0,
    )
    client = ManagerClient(server.address(), SOON)
    yield client
    client.shutdown()
    server.shutdown()
    lighthouse.shutdown()


def test_threads_vote_for_several_ranks_over_one_client(client: ManagerClient) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(RANKS) as threads:
            for step in range(20):
                votes = [
                    threads.submit(client.should_commit, rank, step, rank != 2 or step % 2 == 0, SOON)
                    for rank in range(RANKS)
                ]
                assert [vote.result() for vote in votes] == [step % 2 == 0] * RANKS
    finally:
        sys.setswitchinterval(interval)


def test_a_vote_has_numbers_of_a_live_client(client: ManagerClient) -> None:
    go = client._go
    for wrong, error in [
        ((0, 0, 1, True, 1), RuntimeError),  # another thread has shut the client down
        ((1 << 60, 0, 1, True, 1), RuntimeError),
        ((1, 0, "text", True, 1), TypeError),
        ((1, 0, 2**64, True, 1), OverflowError),
        ((1,), TypeError),
    ]:
        with pytest.raises(error):
            go.vote(*wrong)


def test_a_client_that_was_shut_down_takes_no_calls(client: ManagerClient) -> None:
    with pytest.raises(TimeoutError):
        client.should_commit(0, 0, True, timedelta(milliseconds=10))
    client.shutdown()
    for call in (lambda: client.should_commit(0, 0, True, SOON), lambda: begin(client)):
        with pytest.raises(RuntimeError, match="this object is shut down"):
            call()


def begin(client: ManagerClient, timeout: timedelta = SOON) -> Any:
    return client._begin_round(QuorumRequest(0, 0, "", False, 0), timeout)


def test_the_result_of_a_round_is_returned_once(client: ManagerClient) -> None:
    begun = begin(client, timedelta(milliseconds=10))
    with pytest.raises(TimeoutError):
        client._end_round(begun)
    with pytest.raises(RuntimeError, match="no such operation"):
        client._end_round(begun)


def test_a_round_that_nobody_waits_for_is_dropped(client: ManagerClient) -> None:
    gc.collect()
    before = client._go.pyapi_Handles()  # objects that other tests dropped may end in the meantime
    dropped = [begin(client) for _ in range(50)]
    del dropped
    wait_until(lambda: client._go.pyapi_Handles() <= before)


def test_reports_have_the_fields_of_the_server(
    client: ManagerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = as_server(client, 0)
    log = _ManagerLogger(RankState(SOON), "group", 0, server.report)
    sent: list[str] = []
    report = type(client)._report

    def reported(client: ManagerClient, **fields: Any) -> None:
        sent.extend(fields)
        report(client, **fields)

    monkeypatch.setattr(ManagerClient, "_report", reported)
    server.suspect(1, ["peer"])
    server.request_drain()
    log.counted("nonfinite_syncs", 2)
    log.heal_progress(1 << 40, 1 << 41)
    log.phase("EVALUATION")
    log.phase("")
    log.stalled("allreduce", "stacks")
    log.raised(digest(ValueError("NaN"), 3) or {})
    log._recovered({"transfer": 0.5, "load": 1.0}, healed=True, bytes=1 << 40)
    kinds = ["suspected", "drain", "counted", "healing", "progress", "progress", "stacks", "raised"]
    assert sent == [*kinds, "recovered"]
    with pytest.raises(ValueError, match="unheard_of"):
        client._report(unheard_of=1)
    client.shutdown()
    with pytest.raises(RuntimeError, match="this object is shut down"):
        client._report(drain=True)
    server.request_drain()  # which is not an error of the Manager


def test_an_unknown_counter_is_refused_by_name(client: ManagerClient) -> None:
    with pytest.raises(
        ValueError, match=r'no counter of a rank is named "nonfinite_steps", only: .*nonfinite_syncs'
    ):
        client._report(counted={"name": "nonfinite_steps", "number": 1})
    with pytest.raises(ValueError, match="number=-1 must be at least 0"):
        client._report(counted={"name": "nonfinite_syncs", "number": -1})
