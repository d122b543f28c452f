"""Gossip as consensus: views of real nodes, FTLib over them in threads, and errors of bad settings."""

from __future__ import annotations

import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import free_port
from torch import nn

from tests.unit.ftlib.plugins import Recorder, StoreFramework, shared_store
from tests.unit.waiting import wait_until
from torchft._torchft import _load
from torchft.ftlib import ConsensusStatus, FTAllReduceStatus, FTLib, RebuildFailed, View
from torchft.ftlib.gossip import Gossip
from torchft.process_group import ProcessGroupGloo

SOON = timedelta(seconds=30)
AT_ONCE = timedelta(seconds=0.3)
SUCCESS, FAIL, ABORT, NO_NEED = (FTAllReduceStatus[name] for name in ("SUCCESS", "FAIL", "ABORT", "NO_NEED"))


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHFT_HOST", "localhost")
    gc.collect()
    before = _load().pyapi_Handles()
    yield
    gc.collect()
    # Objects that other tests dropped may end in the meantime.
    wait_until(lambda: _load().pyapi_Handles() <= before)
    assert not [thread for thread in threading.enumerate() if thread.name == "torchft_ftlib_gossip"]


def names(view: View) -> list[str]:
    return [identity.name for identity in view.identities]


def together(*members: Gossip) -> View:
    """Returns the view of members that all request one."""
    with ThreadPoolExecutor(len(members)) as threads:
        views = [threads.submit(member.get_member_list) for member in members]
        assert len({view.result(60) for view in views}) == 1
        return views[0].result()


def test_members_agree_join_and_leave() -> None:
    a = Gossip(name="a", timeout=SOON)
    recorder = Recorder()
    a.attach(recorder)
    first = a.get_member_list()
    assert names(first) == ["a"]
    b = Gossip(seeds=a.address, name="b", timeout=SOON)
    with ThreadPoolExecutor(1) as threads:
        joined = threads.submit(b.get_member_list)
        wait_until(lambda: recorder.joins)
        both = a.get_member_list()
        assert both == joined.result(60) and names(both) == ["a", "b"] and both.number > first.number
    b.close()
    wait_until(lambda: recorder.failed)
    assert recorder.failed[0] == (both.number, "b has left the view")
    assert names(a.get_member_list()) == ["a"]
    a.close()
    a.close()
    with pytest.raises(RuntimeError, match="shut down"):
        a.get_member_list()


def test_a_later_incarnation_replaces_a_failed_one_at_once() -> None:
    """The other members do not have to notice its end first."""
    a = Gossip(name="a", timeout=SOON)
    killed = Gossip(seeds=a.address, name="b", timeout=SOON)
    assert names(together(a, killed)) == ["a", "b"]  # `killed` requests nothing until `again` has replaced it
    again = Gossip(seeds=[a.address], name="b", timeout=SOON)
    view = together(a, again)
    assert again.identity in view.identities and killed.identity not in view.identities
    with pytest.raises(
        RuntimeError, match="b is no member any more: a later incarnation of it has taken its place"
    ):
        killed.get_member_list()
    for member in (killed, again, a):
        member.close()


def test_a_later_incarnation_replaces_an_earlier_one_though_its_clock_is_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a = Gossip(name="a", timeout=SOON)
    killed = Gossip(seeds=a.address, name="b", timeout=SOON)
    together(a, killed)
    with monkeypatch.context() as clock:
        clock.setattr("torchft.ftlib.gossip.time.time_ns", lambda: 1)
        again = Gossip(seeds=a.address, name="b", timeout=SOON)
    view = together(a, again)
    assert again.identity > killed.identity and again.identity in view.identities
    for member in (killed, again, a):
        member.close()


def fails(call: Callable[[timedelta], object], error: type[Exception], message: str) -> None:
    """Expects that the call, which gets a timeout, fails with this message.

    Such a call takes all of its timeout. So the timeout is longer only after one that was too short for an
    answer.
    """
    for timeout in (AT_ONCE, 10 * AT_ONCE, SOON):
        with pytest.raises(error) as raised:
            call(timeout)
        if re.search(message, str(raised.value)):
            return
    raise AssertionError(str(raised.value))


def test_a_list_of_members_that_is_not_complete_in_time() -> None:
    a = Gossip(name="a", timeout=SOON)
    a.get_member_list()

    def waits_for_a(timeout: timedelta) -> None:
        with closing(Gossip(seeds=a.address, name="c", timeout=timeout)) as waits:
            waits.get_member_list()

    def waits_alone(timeout: timedelta) -> None:
        with closing(Gossip(name="a", min_members=2, timeout=timeout)) as alone:
            alone.get_member_list()

    fails(waits_for_a, TimeoutError, r"list of members: timed out after .*: waits for a")
    a.close()
    fails(waits_alone, TimeoutError, "1 of 2 members")


def test_seeds_found_the_job_together() -> None:
    ports = [free_port() for _ in range(3)]
    seeds = ",".join(f"localhost:{port}" for port in ports)
    with ThreadPoolExecutor(3) as threads:
        opened = [threads.submit(Gossip, seeds, f"m{i}", port, 1, SOON) for i, port in enumerate(ports)]
        members = [future.result(60) for future in opened]
    members.pop().close()
    assert names(together(*members)) == ["m0", "m1"]
    members.pop().close()
    again = Gossip(seeds=seeds, name="m1", port=ports[1], timeout=SOON)  # one of the seeds is its own address
    assert names(together(members[0], again)) == ["m0", "m1"]
    again.close()
    members[0].close()


def test_a_seed_that_does_not_answer() -> None:
    port = free_port()
    began = time.monotonic()
    with pytest.raises(
        RuntimeError, match=rf"none of the seeds localhost:{port} answered within 300ms: .*refused"
    ):
        FTLib.init("gossip", ProcessGroupGloo(), seeds=f"localhost:{port}", connect_timeout=AT_ONCE)
    assert time.monotonic() - began < SOON.total_seconds()


@pytest.mark.parametrize("differs", ["TORCHFT_TOKEN_FILE", "TORCHFT_JOB_ID"])
def test_a_node_of_another_job_or_token_is_refused(
    differs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"{name}\n")
        (tmp_path / name).chmod(0o600)
    monkeypatch.setenv("TORCHFT_TOKEN_FILE", str(tmp_path / "one"))
    monkeypatch.setenv("TORCHFT_JOB_ID", "one")
    a = Gossip(name="a", timeout=SOON)
    view = a.get_member_list()
    monkeypatch.setenv(differs, str(tmp_path / "two") if differs == "TORCHFT_TOKEN_FILE" else "two")
    refused = f"a node answers, and refuses this one: .*{differs}"
    fails(lambda timeout: Gossip(seeds=a.address, name="b", connect_timeout=timeout), RuntimeError, refused)
    with pytest.raises(RuntimeError, match=r"port \d+ of TCP and UDP cannot be used: .*in use"):
        Gossip(name="b", port=int(a.address.rpartition(":")[2]))
    monkeypatch.setenv(differs, str(tmp_path / "one") if differs == "TORCHFT_TOKEN_FILE" else "one")
    b = Gossip(seeds=a.address, name="b", timeout=SOON)
    assert together(a, b).number > view.number
    b.close()
    a.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": "host"}, 'seeds: "host" is not allowed; allowed: host:port'),
        ({"seeds": ["host:1", "host:99999"]}, 'seeds: "host:99999" is not allowed'),
        ({"port": 65536}, "port=65536 is not allowed; allowed: 0 to 65535"),
        ({"min_members": 0}, "min_members=0 is not allowed; allowed: 1 and more"),
        ({"name": "a.b"}, r"name='a\.b' is not allowed; allowed: letters, digits"),
        ({"name": "a" * 400}, r"metadata of this member have up to \d+ bytes; allowed: 512"),
        ({"connect_timeout": timedelta(0)}, "connect_timeout=.* is not allowed"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FTLib.init("gossip", ProcessGroupGloo(), **settings)


class Counted(Gossip):
    """Counts what FTLib asks."""

    lists = 0

    def get_member_list(self) -> View:
        self.lists += 1
        return super().get_member_list()

    def confirm(self) -> ConsensusStatus:
        raise AssertionError("a passive consensus is not asked")


def test_initialized_is_reset_by_a_join_a_failed_collective_and_a_failed_member() -> None:
    """FTLib never calls confirm; get_member_list confirms; execute rebuilds first, and passes on errors."""
    store = shared_store()
    a = Counted(name="a", timeout=SOON)
    ftlib = FTLib.init(a, StoreFramework(store))
    assert ftlib.confirm() is ConsensusStatus.FAIL and not ftlib.initialized()
    assert ftlib.allreduce_average([torch.ones(1)]) is ABORT
    assert (
        ftlib.initialized() and ftlib.skip_allreduce() and ftlib.confirm() is ConsensusStatus.SKIP_ALLREDUCE
    )
    assert ftlib.allreduce_average([torch.ones(1)]) is NO_NEED and a.lists == 1

    b = Counted(seeds=a.address, name="b", timeout=SOON)
    other = FTLib.init(b, StoreFramework(store))
    with ThreadPoolExecutor(1) as threads:
        joined = threads.submit(other.execute, lambda: other.size)
        wait_until(lambda: not ftlib.initialized())  # a join
        assert ftlib.allreduce_average([torch.ones(1)]) is ABORT
        assert joined.result(60) == 2
        assert ftlib.confirm() is ConsensusStatus.SUCCESS and not ftlib.skip_allreduce()

        mean, averaged = torch.zeros(1), threads.submit(other.allreduce_average, [torch.ones(1)])
        assert ftlib.allreduce_average([mean]) is SUCCESS is averaged.result(60) and mean == 0.5
        assert ftlib.initialized() and (a.lists, b.lists) == (2, 1)

        with pytest.raises(ZeroDivisionError):
            ftlib.execute(lambda: 1 // 0)
        assert not ftlib.initialized()  # a failed collective
        again = threads.submit(lambda: [other.allreduce_average([mean]) for _ in range(2)])
        assert ftlib.allreduce_average([mean]) is ABORT and ftlib.initialized() and a.lists == 3
        assert again.result(60) == [FAIL, ABORT]

    other.close()
    wait_until(lambda: not ftlib.initialized())  # a failed member
    assert ftlib.execute(lambda: ftlib.size) == 1
    ftlib.close()
    ftlib.new_member_join()
    with pytest.raises(RebuildFailed, match="shut down"):
        ftlib.execute(pytest.fail)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # PyTorch's reader of a state
def test_three_members_train_one_joins_late_and_one_leaves() -> None:
    store, ended = shared_store(), threading.Barrier(3)
    founder = Gossip(name="a", timeout=SOON)
    sizes: set[int] = set()

    def member(name: str, consensus: Gossip, until: Callable[[FTLib], bool]) -> list[float]:
        torch.manual_seed(ord(name))
        model = nn.Linear(3, 1)
        ftlib = FTLib.init(
            consensus,
            StoreFramework(store),
            state_dict=model.state_dict,
            load_state_dict=model.load_state_dict,
        )
        while not until(ftlib):
            model.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            if ftlib.wait_gradients_ready(model) in (SUCCESS, NO_NEED):
                sizes.add(ftlib.size)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 0.1 * parameter.grad  # type: ignore[operator]
        if name != "b":
            ended.wait(60)
        ftlib.close()
        return [p for each in model.parameters() for p in each.flatten().tolist()]

    def join(name: str, until: Callable[[FTLib], bool]) -> list[float]:
        return member(name, Gossip(seeds=founder.address, name=name, timeout=SOON), until)

    left = threading.Event()

    def leaves(ftlib: FTLib) -> bool:
        if 3 in sizes and ftlib.step > 5:
            left.set()
        return left.is_set()

    def stays(ftlib: FTLib) -> bool:
        if left.is_set() and ftlib.size == 2 and ftlib.initialized() and not stop:
            stop.append(ftlib.step + 5)
        return bool(stop) and ftlib.step >= stop[0]

    stop: list[int] = []
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(member, "a", founder, stays)
        second, third = threads.submit(join, "b", leaves), threads.submit(join, "c", stays)
        second.result(60)
        ended.wait(60)
        assert first.result(60) == third.result(60)
    assert sizes >= {2, 3}
