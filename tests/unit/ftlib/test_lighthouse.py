"""Consensus by the lighthouse: views of real quorums, and errors of a wrong address or job."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from torchft._torchft import QuorumResult
from torchft.coordination import LighthouseServer
from torchft.ftlib import ConsensusStatus, FTLib, Identity
from torchft.ftlib.lighthouse import Lighthouse, _view
from torchft.process_group import ProcessGroupGloo

SOON = timedelta(seconds=30)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TORCHFT_HOST", "localhost")
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    yield server.address()
    server.shutdown()


class Recorder:
    def __init__(self) -> None:
        self.failed: list[int] = []

    def new_member_join(self) -> None:
        raise AssertionError("an active consensus is asked")

    def member_failed(self, view: int, reason: str) -> None:
        self.failed.append(view)


def test_views_follow_joins_failures_and_failed_collectives(address: str) -> None:
    a = Lighthouse("a", address, timeout=SOON)
    a.attach(Recorder())
    alone = a.get_member_list()
    assert alone.identities == [a.identity]
    assert a.confirm() is ConsensusStatus.SKIP_ALLREDUCE
    b = Lighthouse("b", address, timeout=SOON)
    b.attach(Recorder())
    with ThreadPoolExecutor(1) as threads:
        joined = threads.submit(b.get_member_list)
        while a.confirm() is not ConsensusStatus.FAIL:
            pass  # until b's request has arrived; each answer comes from the lighthouse
        both = a.get_member_list()
        assert both == joined.result(30) and both.number > alone.number
        assert sorted(both.identities) == [a.identity, b.identity]

        holds = threads.submit(b.confirm)
        assert a.confirm() is holds.result(30) is ConsensusStatus.SUCCESS

        failed = threads.submit(b.get_member_list)  # its collective failed: the same members get a new view
        assert a.confirm() is ConsensusStatus.FAIL
        again = a.get_member_list()
        assert again == failed.result(30)
        assert again.members == both.members and again.number > both.number
    b.close()
    assert a.get_member_list().identities == [a.identity]
    a.close()


def test_no_lighthouse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match="lighthouse_addr is None and TORCHFT_LIGHTHOUSE is not set"):
        FTLib.init("lighthouse", ProcessGroupGloo())
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:1"):
        FTLib.init(
            "lighthouse",
            ProcessGroupGloo(),
            lighthouse_addr="http://127.0.0.1:1",
            connect_timeout=timedelta(seconds=0.3),
        )


def test_a_wrong_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("secret", "guess"):
        (tmp_path / name).write_text(f"{name}\n")
    monkeypatch.setenv("TORCHFT_HOST", "localhost")
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(tmp_path / "secret"))
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(tmp_path / "guess"))
    with pytest.raises(RuntimeError, match="not the job's"):
        Lighthouse("a", server.address(), timeout=SOON, connect_timeout=SOON).get_member_list()
    server.shutdown()


def test_two_jobs_on_one_port(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members = []
    for job in ("red", "blue"):
        monkeypatch.setenv("TORCHFT_JOB_ID", job)
        members.append(Lighthouse("a", address, timeout=SOON))
    assert [member.get_member_list().identities for member in members] == [
        [member.identity] for member in members
    ]
    for member in members:
        member.close()


def test_a_refused_setting_leaves_no_resources(address: str) -> None:
    with pytest.raises(ValueError, match="state_dict and load_state_dict belong together"):
        FTLib.init("lighthouse", ProcessGroupGloo(), state_dict=dict, lighthouse_addr=address)


@pytest.mark.parametrize(
    ("replica_ids", "handles", "without"),
    [
        (["a:1", "b:uuid"], ["h:1", "h:2"], []),
        (["a:1", "b:2"], ["h:1", '{"id": "x", "store": "h:2"}'], []),
        (["a:1", "b:2"], [], ["b:2"]),
    ],
)
def test_groups_that_do_not_use_ftlib_are_named(
    replica_ids: list[str], handles: list[str], without: list[str]
) -> None:
    result = QuorumResult(
        quorum_id=7, replica_ids=replica_ids, reconfigure_handles=handles, replicas_without_handles=without
    )
    with pytest.raises(RuntimeError, match=r"quorum 7: .*b:.* use FTLib: give it a TORCHFT_JOB_ID"):
        _view(result)


def test_a_name_may_have_colons() -> None:
    result = QuorumResult(quorum_id=7, replica_ids=["rack:1:23"], reconfigure_handles=["h:1"])
    assert _view(result).identities == [Identity("rack:1", 23)]
