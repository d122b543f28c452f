"""A child of the fork server behaves like the same script started as a program."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest
from forkserver import ForkServer
from processes import Child, Job, JobFailed, child_environment, ours_path
from upstream import upstream_path

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd_open")

LISTING = """
import ctypes, json, os, sys
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
print(json.dumps({
    "event": "listing",
    "argv": sys.argv,
    "name": __name__,
    "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "path": sys.path,
    "cwd": os.getcwd(),
    "environment": dict(os.environ),
    "in C": getenv(b"SPECIAL").decode(),
    "session": os.getsid(0) == os.getpid(),
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
    "stdin": sys.stdin.read(),
}))
"""
WAIT_S = 60


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """A server for these tests only, since they also run with FORK_SERVER=0. It does not import PyTorch,
    which is faster.
    """
    server = ForkServer(child_environment(ours_path()), ["logging"])
    yield server
    server.close()


@pytest.fixture(params=["forked", "by itself"])
def job(server: ForkServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(processes, "fork_server", server if request.param == "forked" else None)
    with Job() as job:
        yield job


def run(job: Job, folder: Path, text: str, *args: object, path: Path | None = None, **env: str) -> Child:
    script = folder / "script.py"
    script.write_text(text)
    child = job.python("child", script, *args, path=path or ours_path(), env=env)
    child.expected_to_live = False
    return child


def ended(job: Job, child: Child) -> int:
    job.wait(lambda: child.returncode is not None, WAIT_S, "it ends")
    child._reader.join(WAIT_S)  # its last events may arrive after its exit status
    assert child.returncode is not None
    return child.returncode


def test_arguments_environment_and_descriptors_are_those_of_a_program(job: Job, tmp_path: Path) -> None:
    child = run(job, tmp_path, LISTING, "one", 2, SPECIAL="yes")
    child._process.stdin.close()  # type: ignore[union-attr]
    assert ended(job, child) == 0, job.report()
    (listing,) = child.of("listing")
    script = str(tmp_path / "script.py")
    assert listing["argv"] == [script, "one", "2"] and listing["file"] == script
    assert listing["name"] == "__main__" and listing["main"]
    assert (
        listing["path"][:2] == [str(tmp_path), str(ours_path())]
        and str(processes.HERE) not in listing["path"]
    )
    assert listing["cwd"] == job._folder.name and listing["session"] and listing["stdin"] == ""
    assert (
        listing["environment"] == child_environment(ours_path(), {"SPECIAL": "yes"})
        and listing["in C"] == "yes"
    )
    assert listing["descriptors"][:3] == [0, 1, 2] and len(listing["descriptors"]) == 4, (
        "the fourth is the listing's own"
    )


@pytest.mark.parametrize(
    ("text", "status", "expected"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('why it ends')", 1, "why it ends"),
        ("def f():\n    raise ValueError('a mistake')\nf()\n", 1, 'script.py", line 2, in f\n'),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'at its end', file=sys.stderr)", 0, "at its end"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=[1000], daemon=True).start()",
            0,
            "",
        ),
        ("import threading\nthreading.Timer(0.1, lambda: open('late', 'w')).start()", 0, ""),
    ],
)
def test_a_child_ends_like_a_program(job: Job, tmp_path: Path, text: str, status: int, expected: str) -> None:
    child = run(job, tmp_path, text)
    assert ended(job, child) == status, job.report()
    assert expected in child.log_tail(20)
    assert Path(job._folder.name, "late").exists() == ("late" in text), "the process waits for other threads"


def test_a_child_ends_with_its_parent_and_a_sibling_does_not_keep_its_pipes_open(
    job: Job, tmp_path: Path
) -> None:
    reads = "import sys; sys.stdin.read(); print('[]')"
    first, second = run(job, tmp_path, reads), run(job, tmp_path, reads)
    first._process.stdin.close()  # type: ignore[union-attr]
    assert ended(job, first) == 0 and second.returncode is None
    second.kill()
    assert second.returncode == -signal.SIGKILL


def test_a_kill_also_kills_grandchildren(job: Job, tmp_path: Path) -> None:
    text = "import json, subprocess\nchild = subprocess.Popen(['sleep', '1000'])\n"
    parent = run(
        job, tmp_path, text + "print(json.dumps({'event': 'pid', 'pid': child.pid}))\nchild.wait()\n"
    )
    job.wait(lambda: parent.of("pid"), WAIT_S, "it has a child")
    pid = parent.of("pid")[0]["pid"]
    assert os.getsid(pid) == os.getsid(parent.pid) == parent.pid
    parent.kill()
    job.wait(
        lambda: not Path(f"/proc/{pid}").exists() or "Z (zombie)" in state(pid), WAIT_S, "its child ends"
    )


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "Z (zombie)"


@pytest.mark.slow
def test_upstream_and_ours_in_two_children(job: Job, tmp_path: Path) -> None:
    text = "import json, torchft; print(json.dumps({'event': 'torchft', 'file': torchft.__file__}))"
    paths = [ours_path(), upstream_path("nightly")]
    for path in paths:
        child = run(job, tmp_path, text, path=path)
        assert ended(job, child) == 0, job.report()
        assert Path(child.of("torchft")[0]["file"]) == path / "torchft" / "__init__.py"


def test_variables_that_python_reads_at_its_start_prevent_a_fork(server: ForkServer) -> None:
    usual = child_environment(ours_path())
    assert server.can_start(usual)
    assert server.can_start({**usual, "PYTHONPATH": "/elsewhere", "RANK": "0", "TORCHFT_LOG_LEVEL": "debug"})
    assert server.can_start(
        {**usual, "TORCHINDUCTOR_CACHE_DIR": "/tmp", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    )
    assert not server.can_start({**usual, "OMP_NUM_THREADS": "2"})
    assert not server.can_start({**usual, "TORCH_LOGS": "+all"})
    assert not server.can_start({**usual, "PYTHONHASHSEED": "1"})
    assert not server.can_start({name: value for name, value in usual.items() if name != "OMP_NUM_THREADS"})


def test_imports_of_a_test_do_not_prevent_a_fork(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server.can_start(child_environment(ours_path()))
    monkeypatch.setenv("KMP_INIT_AT_FORK", "FALSE")  # scikit-learn sets it in the process that imports it
    assert server.can_start(child_environment(ours_path()))


def test_pytorch_starts_no_thread_when_it_is_imported() -> None:
    """Otherwise children would be started as programs, and tests would take longer without any notice."""
    server = processes.fork_server
    assert server is None or server.can_start(child_environment(ours_path()))


def test_the_server_imports_what_a_program_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH may name another PyTorch than the installed one."""
    (tmp_path / "logging_elsewhere.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer(child_environment(ours_path()), ["logging_elsewhere"])
    try:
        assert server.can_start(child_environment(ours_path()))
    finally:
        server.close()


def test_children_end_with_their_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer(child_environment(ours_path()), [])
    monkeypatch.setattr(processes, "fork_server", server)
    with Job() as job:
        child = run(job, tmp_path, "import time; time.sleep(1000)")
        child.expected_to_live = True
        server.close()
        with pytest.raises(JobFailed, match="child ended with -9 before: it prints"):
            job.wait(lambda: child.events, WAIT_S, "it prints")
