"""Which exceptions say that data or code is at fault, and what a rank does when the job stops."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from torchft._manager import poison, signals
from torchft._manager.poison import JobStopped, digest
from torchft._manager.settings import STOPPED_STATUS
from torchft._manager.step.failures import PeerFailed
from torchft._torchft import MemberFailure
from torchft.process_group import ProcessGroupDummy

if TYPE_CHECKING:
    from tests.unit.manager.conftest import Fixture

NOTICE = MemberFailure(0, "", "ValueError in step 3", 0)


def caught(raiser: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as e:  # noqa: PT011
        raiser()
    return e.value


def raising(error: BaseException) -> Callable[[], object]:
    def raiser() -> object:
        raise error

    return raiser


def wrapped(outer: BaseException, cause: BaseException) -> Callable[[], object]:
    def raiser() -> object:
        try:
            raise cause
        except BaseException as e:
            raise outer from e

    return raiser


@pytest.mark.parametrize(
    ("raiser", "name"),
    [
        (raising(ValueError("NaN")), "ValueError"),
        (raising(RuntimeError("of the script")), "RuntimeError"),
        (raising(torch.OutOfMemoryError("too long")), "OutOfMemoryError"),
        (raising(FileNotFoundError("shard-7")), "FileNotFoundError"),
        (lambda: [][7], "IndexError"),
        (lambda: torch.ones(2) + torch.ones(3), "RuntimeError"),
        (lambda: torch.nn.Linear(2, 2)(torch.ones(3)), "RuntimeError"),
        # a check of torchft's that the script breaks
        (lambda: signals._checked(-1), "ValueError"),
        (wrapped(RuntimeError("could not be read"), KeyError("label")), "KeyError"),
        # none of these says anything about data or code
        (raising(KeyboardInterrupt()), None),
        (raising(SystemExit(1)), None),
        (raising(MemoryError()), None),
        (raising(ConnectionResetError()), None),
        (raising(TimeoutError("no quorum in time")), None),
        (raising(OSError(5, "input/output error")), None),
        (raising(dist.DistNetworkError("Connection closed by peer")), None),
        (raising(StopIteration()), None),
        (wrapped(RuntimeError("could not be read"), ConnectionError("the file system")), None),
        (lambda: poison.Poison.check(_stopped()), None),
    ],
)
def test_the_digest_of_an_exception(raiser: Callable[[], object], name: str | None) -> None:
    found = digest(caught(raiser), 7)
    assert (found and found["type"]) == name
    if found is not None:
        assert found["step"] == 7 and found["unit"] == ""
        assert " in " in found["place"]


def _stopped() -> Any:
    rank = object.__new__(poison.Poison)
    rank.stopped = "it stops"
    return rank


def test_what_torchft_raises_when_peers_fail_says_nothing(fixture: Fixture) -> None:
    manager = fixture.manager(pg=ProcessGroupDummy(0, 1))
    manager._failures.known[manager._quorum_id] = [MemberFailure(manager._quorum_id, "b", "killed", 0)]
    error = caught(manager._failures.check)
    assert isinstance(error, PeerFailed) and digest(error, 1) is None


def test_equal_exceptions_have_equal_digests_and_others_do_not() -> None:
    def one() -> None:
        raise ValueError("a text that differs: 0x7f12")

    def other() -> None:
        raise ValueError("a text that differs: 0x7f34")

    assert digest(caught(one), 1) == digest(caught(one), 1)
    assert digest(caught(one), 1) != digest(caught(other), 1)
    assert digest(caught(one), 1) != digest(caught(one), 2)
    found = digest(caught(one), 1, [4, 5])
    assert found is not None and found["unit"] == "4, 5"


@pytest.mark.parametrize(
    ("error", "device"),
    [
        (torch.OutOfMemoryError("too long"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), True),
        (ValueError("NaN"), False),
    ],
)
def test_an_error_of_the_device_is_one_of_the_group(error: Exception, device: bool) -> None:
    found = digest(caught(raising(error)), 1)
    assert found is not None and found["device"] is device


def test_an_exception_is_reported_once_and_its_answer_awaited(fixture: Fixture) -> None:
    manager = fixture.manager(pg=ProcessGroupDummy(0, 1))
    reports: list[Any] = []

    def report(raised: Any) -> bool:
        reports.append(raised)
        threading.Thread(target=manager._poison.judged, args=[NOTICE]).start()
        return True

    manager._logger.raised = report  # type: ignore[method-assign]
    manager._poison.raised(None)
    manager._poison.raised(ValueError("before the first quorum"))
    assert reports == []
    manager.start_quorum()
    manager.wait_quorum()
    manager._poison.raised(KeyboardInterrupt())
    assert reports == []
    for _ in range(2):
        manager._poison.raised(caught(raising(ValueError("NaN"))))
    assert len(reports) == 1
    assert reports[0]["type"] == "ValueError" and "ValueError: NaN" in reports[0]["text"]
    assert manager._poison.stopped == NOTICE.reason


def test_a_request_that_is_refused_says_that_the_job_stops(fixture: Fixture) -> None:
    manager = fixture.manager(pg=ProcessGroupDummy(0, 1))
    refused = RuntimeError("quorum: the job stops: the same exception has ended a and b")
    manager._poison.raised(refused)
    assert not manager._poison.stopped, "the text alone says nothing"
    refused.refusal = "poisoned"  # type: ignore[attr-defined]
    manager._poison.raised(refused)
    assert "ended a and b" in manager._poison.stopped


def test_a_step_does_not_begin_when_the_job_stops(fixture: Fixture) -> None:
    manager = fixture.manager(pg=ProcessGroupDummy(0, 1))
    manager._poison.stop(NOTICE)
    with pytest.raises(JobStopped) as e:
        manager.start_quorum()
    assert e.value.code == STOPPED_STATUS and e.value.reason == NOTICE.reason


SCRIPT = """
from torchft._manager import poison
from torchft._torchft import MemberFailure

class Rank:
    quorum_id, step = 1, 3

class Errors:
    class step:
        undecided, unit, skip = True, [4, 5], "0.1.2"

class Log:
    def raised(self, raised):
        rank.judged(MemberFailure(0, "", VERDICT, 0))
        return True

rank = poison.Poison(Rank(), Errors(), Log())
raise ValueError("NaN")
"""


@pytest.mark.parametrize(
    ("verdict", "status"), [("twice the same", STOPPED_STATUS), pytest.param("", 1, marks=pytest.mark.slow)]
)
def test_a_process_ends_with_a_status_of_its_own(verdict: str, status: int) -> None:
    script = SCRIPT.replace("VERDICT", repr(verdict))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stderr
    assert ended.stderr.count("ValueError: NaN") == 1
    assert ("the job stops, with status 65" in ended.stderr) == bool(verdict)
