"""A shared directory as consensus: files, errors of unusable directories, and members in threads."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.ftlib.plugins import Recorder
from tests.unit.waiting import wait_until
from torchft.ftlib import FTLib, shared_storage
from torchft.ftlib.shared_storage import Files, SharedStorage
from torchft.ftlib.storage_rules import Wait
from torchft.ftlib.views import Identity, Member, View
from torchft.process_group import ProcessGroupGloo

SOON = timedelta(seconds=30)


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_HOST", "localhost")


class Lenient(SharedStorage):
    """Records of other members expire only while `others_expire` is set, however late they are renewed.

    Its own record may still be renewed late on a busy machine, and it reports that. So tests look for one
    report among all.
    """

    others_expire = False

    def _look(self) -> Any:
        if not self.others_expire:
            self._seen.clear()
        return super()._look()


def test_members_agree_join_and_leave(tmp_path: Path) -> None:
    recorders = {name: Recorder() for name in "ab"}
    members = {name: Lenient(tmp_path, name=name, timeout=SOON, expiry=timedelta(seconds=2)) for name in "ab"}
    for name, member in members.items():
        member.attach(recorders[name])
    first = members["a"].get_member_list()
    assert [identity.name for identity in first.identities] == ["a"]
    with ThreadPoolExecutor(2) as threads:
        joined = threads.submit(members["b"].get_member_list)
        wait_until(lambda: recorders["a"].joins)
        both = members["a"].get_member_list()
        assert both == joined.result(30) and len(both.members) == 2 and both.number > first.number
    members["a"].others_expire = True  # if the removal of the record takes too long
    members["b"].close()
    wait_until(lambda: (both.number, "b has not renewed its record") in recorders["a"].failed)
    assert [identity.name for identity in members["a"].get_member_list().identities] == ["a"]
    members["a"].close()
    members["a"].close()
    wait_until(lambda: not list(tmp_path.glob("*/member.*")))
    with pytest.raises(RuntimeError, match="closed"):
        members["a"].get_member_list()


def test_a_later_incarnation_replaces_a_failed_one_at_once(tmp_path: Path) -> None:
    killed = SharedStorage(tmp_path, name="a", timeout=SOON, expiry=timedelta(hours=1))
    killed.get_member_list()  # then it stops without leaving
    restarted = SharedStorage(tmp_path, name="a", timeout=SOON, expiry=timedelta(hours=1))
    assert restarted.get_member_list().identities == [restarted.identity]
    with pytest.raises(RuntimeError, match="a later incarnation has replaced it"):
        killed.get_member_list()
    restarted.close()
    killed.close()


def test_a_member_that_cannot_renew_its_record_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    member = SharedStorage(tmp_path, name="a", timeout=SOON, expiry=timedelta(seconds=0.5))
    member.attach(recorder)
    view = member.get_member_list()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Files, "write", full)
    # A renewal that was late before that is reported, too.
    wait_until(lambda: any("No space left on device" in why for _, why in recorder.failed))
    assert {number for number, _ in recorder.failed} == {view.number}
    member.close()


def test_the_time_in_which_the_host_was_suspended_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' clocks went on meanwhile, so the record has expired for them."""
    recorder, suspended = Recorder(), 0.0
    boottime = shared_storage._boottime
    monkeypatch.setattr(shared_storage, "_boottime", lambda: boottime() + suspended)
    member = SharedStorage(tmp_path, name="a", timeout=SOON, expiry=timedelta(seconds=5))
    member.attach(recorder)
    view = member.get_member_list()

    def wakes_up(*_: object) -> None:
        nonlocal suspended
        suspended = 3600.0
        raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))

    monkeypatch.setattr(Files, "write", wakes_up)
    # A renewal that was late before that is reported, too.
    wait_until(
        lambda: any(
            re.match(r"its own record could not be renewed for 3\d{3}\.", why) for _, why in recorder.failed
        )
    )
    assert {number for number, _ in recorder.failed} == {view.number}
    member.close()


class FileServer:
    """Simulates a file server: while it is down, calls on the directory do not return."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self._back = threading.Event()

    def stop(self, call: str, of: str = "") -> None:
        """Makes this call hang from now on, for the member with this name or for all."""
        original = getattr(Files, call)
        self._back.clear()

        def hangs(files: Files, *arguments: Any) -> Any:
            if not of or arguments[0].name == of:
                assert self._back.wait(120)
            return original(files, *arguments)

        self._patch.setattr(Files, call, hangs)

    def back(self) -> None:
        self._back.set()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    server = FileServer(monkeypatch)
    yield server
    server.back()
    wait_until(lambda: directory_threads() == 0)


def directory_threads() -> int:
    return sum(thread.name == "torchft_connect" for thread in threading.enumerate())


@pytest.mark.slow  # test_a_member_whose_directory_hangs_returns
@pytest.mark.parametrize("call", ["write", "records", "latest"])
def test_a_directory_that_hangs(tmp_path: Path, server: FileServer, call: str) -> None:
    """The member reports its own failure, a list of members is an error, and it can be closed."""
    recorder = Recorder()
    member = SharedStorage(tmp_path, name="a", timeout=SOON, expiry=timedelta(seconds=1))
    member.attach(recorder)
    view = member.get_member_list()
    member._timeout = timedelta(seconds=0.2)
    server.stop(call)
    wait_until(lambda: recorder.failed)
    number, why = recorder.failed[0]
    assert number == view.number and why.startswith("its own record could not be renewed for ")
    assert f"directory='{tmp_path}/default' has not answered within" in why
    for _ in range(3):
        with pytest.raises(
            TimeoutError, match=r"has not answered within .* s; check the server of its file system"
        ):
            member.get_member_list()
    member.close()
    wait_until(lambda: directory_threads() <= 1)  # later calls end by their deadlines
    assert directory_threads() == 1, "the first call hangs"


def test_a_member_whose_directory_hangs_returns(tmp_path: Path, server: FileServer) -> None:
    recorders = {name: Recorder() for name in "ab"}
    members = {name: Lenient(tmp_path, name=name, timeout=SOON, expiry=timedelta(seconds=2)) for name in "ab"}
    for name, member in members.items():
        member.attach(recorders[name])
    members["a"].get_member_list()
    with ThreadPoolExecutor(1) as threads:
        joined = threads.submit(members["b"].get_member_list)
        wait_until(lambda: recorders["a"].joins)
        assert members["a"].get_member_list() == joined.result(60)
        server.stop("write", of="b")
        members["a"].others_expire = True
        wait_until(lambda: recorders["b"].failed)
        wait_until(lambda: any(why == "b has not renewed its record" for _, why in recorders["a"].failed))
        back = threads.submit(members["b"].get_member_list)
        assert [identity.name for identity in members["a"].get_member_list().identities] == ["a"]
        joins = recorders["a"].joins
        server.back()
        wait_until(lambda: recorders["a"].joins > joins)
        members["a"].others_expire = False
        assert members["a"].get_member_list() == back.result(60)
    for member in members.values():
        member.close()


def test_a_directory_that_hangs_from_the_start(tmp_path: Path, server: FileServer) -> None:
    server.stop("check")
    with pytest.raises(RuntimeError, match=rf"directory='{tmp_path}/default' has not answered within"):
        SharedStorage(tmp_path, name="a", timeout=timedelta(seconds=0.2))


def test_a_thread_that_cannot_be_started_does_not_block_later_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = SharedStorage(tmp_path, name="a", timeout=SOON)

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            member.get_member_list()
    assert not member._idle.locked(), "the failed call has released the lock"
    assert member.get_member_list().identities == [member.identity]
    member.close()


def test_incarnations_are_ordered_with_any_clocks_of_their_hosts(tmp_path: Path) -> None:
    ahead = Identity("a", 2**62)
    Files(tmp_path / "default").check("a")
    Files(tmp_path / "default").write(ahead, {"address": "host:1", "wants": 0})
    later = SharedStorage(tmp_path, name="a", timeout=SOON)
    assert later.identity > ahead
    assert later.get_member_list().identities == [later.identity]
    later.close()


def test_records_of_members_that_were_killed_are_removed(tmp_path: Path) -> None:
    files = Files(tmp_path / "default")
    files.check("")
    files.write(Identity("killed", 1), {"address": "host:1", "wants": 0})
    member = SharedStorage(tmp_path, name="a", timeout=SOON, expiry=timedelta(seconds=0.05))
    member.attach(Recorder())
    while [identity.name for identity in files.records()] != ["a"]:
        assert member.get_member_list().number < 10_000
    member.close()


@pytest.fixture
def waits_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the deadline of a member pass when it has decided to wait for others.

    A short timeout would also limit the access to the directory, which takes long on a busy machine.
    """
    decide, skipped = shared_storage.decide, 0.0

    def decide_and_skip(*args: Any) -> Any:
        nonlocal skipped
        action = decide(*args)
        if isinstance(action, Wait):
            skipped += 2 * SOON.total_seconds()
        return action

    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + skipped, time_ns=time.time_ns, clock_gettime=time.clock_gettime
    )
    monkeypatch.setattr(shared_storage, "decide", decide_and_skip)
    monkeypatch.setattr(shared_storage, "time", clock)


@pytest.mark.usefixtures("waits_time_out")
def test_a_list_of_members_that_is_not_complete_in_time(tmp_path: Path) -> None:
    expiry = timedelta(hours=1)  # records do not expire, however late they are renewed
    alone = SharedStorage(tmp_path, name="a", min_members=2, timeout=SOON, expiry=expiry)
    with pytest.raises(TimeoutError, match=r"timed out after 30 s: 1 of 2 members"):
        alone.get_member_list()
    alone.close()
    trains = SharedStorage(tmp_path, name="b", timeout=SOON, expiry=expiry)
    trains.get_member_list()
    waits = SharedStorage(tmp_path, name="c", timeout=SOON, expiry=expiry)
    with pytest.raises(TimeoutError, match=r"timed out after 30 s: waits for b"):
        waits.get_member_list()
    waits.close()
    trains.close()


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", fails)
    with pytest.raises(
        ValueError, match=f"directory='{tmp_path}/default' is not allowed: {os.strerror(code)}; allowed"
    ):
        FTLib.init("shared_storage", ProcessGroupGloo(), directory=tmp_path)


def test_bad_settings(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"directory=.*is not allowed: Not a directory"):
        SharedStorage(tmp_path / "file")
    with pytest.raises(ValueError, match="min_members=0 is not allowed"):
        SharedStorage(tmp_path, min_members=0)
    with pytest.raises(ValueError, match="expiry=0s: must be longer than 0s"):
        SharedStorage(tmp_path, expiry=timedelta(0))
    with pytest.raises(ValueError, match=r"name='a\.b' is not allowed"):
        SharedStorage(tmp_path, name="a.b")


def test_each_number_is_created_once(tmp_path: Path) -> None:
    files = Files(tmp_path)
    view = View(3, (Member(Identity("a", 1), "host:1"),))
    assert files.create(view) and not files.create(View(3, (Member(Identity("b", 1), "host:2"),)))
    assert files.latest() == view
    for number in range(4, 20):
        assert files.create(View(number, view.members))
    assert len(list(tmp_path.iterdir())) == 8
    (tmp_path / "view.0000000000000099").write_text("{}")
    with pytest.raises(ValueError, match=r"view\.0000000000000099 is no view of FTLib"):
        files.latest()


def test_each_job_has_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = SharedStorage(tmp_path, name="a", timeout=SOON)
    first.get_member_list()
    monkeypatch.setenv("TORCHFT_JOB_ID", "other")
    other = SharedStorage(tmp_path, name="b", timeout=SOON)
    assert other.get_member_list().identities == [other.identity]
    first.close()
    other.close()
