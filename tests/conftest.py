"""Fixtures for every test: settings of the user's environment are removed. (The limit of a test is `timeout`
in pyproject.toml.)
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

from torchft import _keeper

pytest_plugins = ["tests.bounded", "tests.policy"]

# How long after the limit of a test, which pytest-timeout holds with a signal, the process is ended: where
# the main thread hangs in native code, no Python handles a signal.
HANGS_S = float(os.environ.get("HANGS_S", "60"))
# How long the process may take to end after its last test, in seconds.
EXIT_S = float(os.environ.get("EXIT_S", "120"))
_STDERR = pytest.StashKey[int]()

# PyTorch's TCPStore looks up the name of every address that connects, even of loopback, and waits 5 s if the
# DNS does not answer. Tests that create dozens of stores meet this even if answers are rarely lost.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_configure(config: pytest.Config) -> None:
    """SIGQUIT writes the stacks of all threads to stderr, also while a test's output is captured.

    python/build/lanes.py sends it to a run that takes too long.
    """
    config.stash[_STDERR] = os.dup(2)  # not captured
    faulthandler.register(signal.SIGQUIT, file=config.stash[_STDERR], all_threads=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ends the process, with the stacks of all threads, if the limit of this test does not end it."""
    mark = item.get_closest_marker("timeout")
    limit = mark.args[0] if mark else item.config.getini("timeout")
    if limit:
        faulthandler.dump_traceback_later(float(limit) + HANGS_S, exit=True, file=item.config.stash[_STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Limits the end of the process, which joins threads that a test has left behind: it fails with their
    stacks.
    """
    faulthandler.dump_traceback_later(EXIT_S, exit=True, file=config.stash[_STDERR])


def pytest_collection_finish() -> None:
    """Excludes all objects of the imported modules from garbage collections, which would take a tenth of a
    second longer.

    Triton must not be imported yet, because it prints errors at exit about objects that were not collected;
    no test module imports it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def state_of_lighthouses(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes the lighthouse command keep the last quorum of a job in the test's directory instead of the
    user's home.
    """
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes settings of the user's shell, such as a lighthouse or host name. Tests set what they need."""
    for name in list(os.environ):
        if name.startswith("TORCHFT_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def memory_of_snapshots(no_settings_from_outside: None, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """The folder of the test's snapshots: no test goes on from the state of another one."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="torchft-test-", dir=memory if memory.is_dir() else None))
    monkeypatch.setenv("TORCHFT_SNAPSHOT_MEMORY", str(path))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_forward_of_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps one module per process whose forward pass runs, and restores the previous one after it:
    with a thread per replica the last to end restores one that has ended. Compilation in later tests, which
    splits the graph of that module, would see it.
    """
    monkeypatch.setattr(DistributedDataParallel, "_active_ddp_module", None)


@pytest.fixture
def keepers() -> None:
    """For a test in whose own process keepers are started. They end with their folder."""


@pytest.fixture(autouse=True)
def no_keeper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a test start no keeper, a process that outlives them, unless it has `keepers`."""
    if "keepers" not in request.fixturenames:
        monkeypatch.setattr(_keeper, "start", lambda folder: None)
