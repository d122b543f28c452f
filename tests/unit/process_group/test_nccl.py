"""Tests of NCCL and XCCL that need no device. The others are in tests/gpu."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, ClassVar, Iterator, Optional
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, TCPStore, Work
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)
from torch.futures import Future

from tests.promises import ABORT_S, within
from tests.unit.children import run_python
from tests.unit.process_group.ranks import TIMEOUT, meeting
from tests.unit.waiting import wait_until
from torchft import process_group
from torchft.process_group import (
    TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR,
    TORCHFT_TRIGGER_FR_ON_ABORT,
    ProcessGroupBaby,
    ProcessGroupBabyNCCL,
    ProcessGroupNCCL,
    ProcessGroupXCCL,
    _WorkAcceleratorTimeout,
    trigger_nccl_fr_trace_through_pipe,
)
from torchft.process_group.accelerator import AcceleratorProcessGroup
from torchft.process_group.isolated import groups


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the environment variables that the constructor sets."""
    for name in (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCH_NCCL_ENABLE_MONITORING",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT",
        "TORCHELASTIC_RUN_ID",
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.delenv(TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR, raising=False)


# The flight recorder


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pipe that PyTorch creates for rank 3."""
    path = tmp_path / "trace_3.pipe"
    os.mkfifo(path)
    monkeypatch.setenv(TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR, str(tmp_path / "trace_"))
    return path


@pytest.fixture
def listener(pipe: Path) -> Iterator[int]:
    """PyTorch's end of the pipe."""
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def test_the_trace_is_requested_through_the_pipe(listener: int) -> None:
    assert trigger_nccl_fr_trace_through_pipe(3)
    assert os.read(listener, 128) == b"1\n"


def test_without_the_setting_there_is_no_trace() -> None:
    assert not trigger_nccl_fr_trace_through_pipe(3)


def test_without_a_listener_there_is_no_wait(pipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not trigger_nccl_fr_trace_through_pipe(3)  # without a reader
    assert not trigger_nccl_fr_trace_through_pipe(4)  # without a pipe
    assert "trace_3.pipe" in caplog.text and "trace_4.pipe" in caplog.text


@pytest.mark.parametrize(
    ("value", "errored", "requested"),
    [("true", True, True), ("1", True, True), ("0", True, False), ("true", False, False)],
)
def test_an_abort_requests_the_trace(
    listener: int, monkeypatch: pytest.MonkeyPatch, value: str, errored: bool, requested: bool
) -> None:
    monkeypatch.setenv(TORCHFT_TRIGGER_FR_ON_ABORT, value)
    group = ProcessGroupNCCL()
    group.set_rank_info("replica", 1, 2, 3)
    group.abort(errored=errored)  # there is no communicator to abort
    group._pg = MagicMock(rank=lambda: 0)
    group.abort(errored=errored)
    if requested:
        assert os.read(listener, 128) == b"1\n"
    else:
        assert os.read(listener, 128) == b""


@pytest.mark.parametrize(("global_rank", "rank_env"), [(None, "3"), (7, "3"), (7, "8")])
def test_the_pipe_is_that_of_the_first_group(
    listener: int, monkeypatch: pytest.MonkeyPatch, global_rank: Optional[int], rank_env: str
) -> None:
    """PyTorch has one pipe per process, named after the rank in the process's first NCCL group."""
    monkeypatch.setenv(TORCHFT_TRIGGER_FR_ON_ABORT, "true")
    monkeypatch.setenv("RANK", rank_env)
    group = ProcessGroupNCCL()
    group.set_rank_info("replica", 1, 2, global_rank)
    group._pg = MagicMock(rank=lambda: 3)
    group.abort()
    assert os.read(listener, 128) == b"1\n"


# The groups


def test_groups_can_be_made_without_a_device() -> None:
    assert ProcessGroupNCCL(timedelta(seconds=90)).getBackendName() == "torchft-nccl"
    assert ProcessGroupXCCL().getBackendName() == "torchft-xccl"
    # PyTorch's default is half an hour.
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "90"


@pytest.mark.no_device
def test_errored_without_a_device() -> None:
    group = ProcessGroupNCCL()
    assert group.errored() is None
    group._pg = MagicMock()
    group.abort()
    assert isinstance(group.errored(), RuntimeError)
    with pytest.raises(RuntimeError, match="torchft-nccl was aborted"):
        group.allreduce([torch.ones(1)], ReduceOp.SUM)


# Deadlines


class StillRunning(Work):
    """An operation on a device: its wait returns at once, it ends later."""

    def __init__(self) -> None:
        super().__init__()
        self.future: Future[object] = Future()

    def wait(self, timeout: Optional[timedelta] = None) -> bool:
        return True

    def get_future(self) -> Future[object]:
        return self.future

    def is_completed(self) -> bool:
        return False

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None


class Parent(dist.ProcessGroup):
    """Records its options."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.opts: Any = None
        self.aborts = 0

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> Work:
        self.opts = opts
        return StillRunning()

    def alltoall_base(self, output: torch.Tensor, given: torch.Tensor, *sizes_and_opts: Any) -> Work:
        self.shape, self.sizes = tuple(given.shape), sizes_and_opts[:2]
        return StillRunning()

    def abort(self) -> None:
        self.aborts += 1


@pytest.fixture
def watched() -> Iterator[MagicMock]:
    """Records the watches of streams: callback and timeout of each."""
    with patch.object(process_group, "stream_timeout") as watch:
        yield watch


def accelerated(timeout: timedelta = TIMEOUT) -> tuple[AcceleratorProcessGroup, Parent]:
    group, parent = AcceleratorProcessGroup(timeout), Parent()
    group._pg = parent
    return group, parent


def test_an_operation_is_watched_from_the_wait_on(watched: MagicMock) -> None:
    group, parent = accelerated()
    work = group.allreduce([torch.ones(1)], ReduceOp.SUM)
    assert isinstance(work, _WorkAcceleratorTimeout)
    assert not watched.called
    assert work.wait()
    (abort, timeout), _ = watched.call_args
    assert timeout == TIMEOUT
    abort()
    assert parent.aborts == 1 and isinstance(group._aborted, RuntimeError)


def test_the_deadline_is_that_of_the_wait_else_the_options_else_the_group(watched: MagicMock) -> None:
    group, parent = accelerated()
    opts = AllreduceOptions()
    opts.timeout = timedelta(seconds=7)
    work = group.allreduce([torch.ones(1)], opts)
    work.wait(timedelta(seconds=3))
    work.wait()
    work.synchronize()
    group.allreduce([torch.ones(1)], AllreduceOptions()).wait()
    assert [call.args[1].total_seconds() for call in watched.call_args_list] == [3, 7, 7, 30]
    # PyTorch's own deadline would end the process; the caller's options are not changed.
    assert parent.opts.timeout >= timedelta(days=1)
    assert opts.timeout == timedelta(seconds=7)


def test_a_future_is_watched_once_it_is_done_on_the_host(watched: MagicMock) -> None:
    group, _ = accelerated()
    fut = group.allreduce([torch.ones(1)], ReduceOp.SUM).get_future()
    assert not watched.called
    fut.set_result(None)
    assert watched.call_count == 1


def test_a_blocked_host_thread_leads_to_an_abort() -> None:
    """The host may block in the call itself, or in the wait."""
    aborted = threading.Event()

    class Stuck(Parent):
        def allreduce(self, tensors: list[torch.Tensor], opts: object) -> Work:
            assert aborted.wait(30)
            return StillRunning()

        def abort(self) -> None:
            aborted.set()

    group, _ = accelerated(timedelta(milliseconds=20))
    group._pg = Stuck()
    group.allreduce([torch.ones(1)], ReduceOp.SUM)
    assert isinstance(group._aborted, RuntimeError)

    aborted.clear()

    class WaitsForEver(StillRunning):
        def wait(self, timeout: Optional[timedelta] = None) -> bool:
            return aborted.wait(30)

    class Group(Parent):
        def abort(self) -> None:
            aborted.set()

    assert _WorkAcceleratorTimeout(Group(), WaitsForEver(), timedelta(milliseconds=20)).wait()  # type: ignore[arg-type]


def test_no_thread_waits_for_an_abort_that_hangs() -> None:
    """NCCL frees device memory in an abort, and may hang in it; the caller, the next peers and the timers
    must not.
    """
    may_end, in_it = threading.Event(), threading.Event()

    class Hangs(Parent):
        def abort(self) -> None:
            in_it.set()
            assert may_end.wait(30)

    group, _ = accelerated()
    group._pg = Hangs()
    began = time.monotonic()
    group.abort()
    assert in_it.is_set() and time.monotonic() - began < within(ABORT_S)
    assert isinstance(group._aborted, RuntimeError)
    may_end.set()


@pytest.mark.parametrize("trigger", ["", "true"])
def test_a_caller_of_abort_does_not_destroy_the_group(monkeypatch: pytest.MonkeyPatch, trigger: str) -> None:
    """The destruction waits for the device. Here the abort itself ends at once, so another reference is the
    last.
    """
    destroyed_by: list[threading.Thread] = []

    class Destroyed(Parent):
        def __del__(self) -> None:
            destroyed_by.append(threading.current_thread())

    def reap(box: list[Any]) -> None:
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()

    monkeypatch.setattr(process_group.wrapper, "reap", reap)
    monkeypatch.setenv("TORCHFT_TRIGGER_FR_ON_ABORT", trigger)
    group = ProcessGroupNCCL(TIMEOUT)
    group._pg = Destroyed()
    group.abort()
    wait_until(lambda: bool(destroyed_by))
    assert destroyed_by[0] is not threading.current_thread()


def test_an_operation_of_an_aborted_group_is_an_error(watched: MagicMock) -> None:
    group, _ = accelerated()
    before = group.allreduce([torch.ones(1)], ReduceOp.SUM)
    assert before.is_success() and before.exception() is None
    group.abort()
    with pytest.raises(RuntimeError, match="aborted or has new peers"):
        before.wait()
    group._pg = Parent()
    with pytest.raises(RuntimeError, match="aborted or has new peers"):
        before.wait()
    assert not before.is_success() and "aborted or has new peers" in str(before.exception())
    assert not before.is_completed(), "the device may still write"
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()


@pytest.mark.parametrize("make", [ProcessGroupNCCL, ProcessGroupBabyNCCL])
def test_equal_slices_have_sizes(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them PyTorch calls ncclAlltoAll, and takes its "in progress" for an error."""
    group = make(timeout=TIMEOUT)
    parent = Parent()
    if isinstance(group, ProcessGroupBabyNCCL):
        monkeypatch.setattr(
            ProcessGroupBaby, "_run", lambda _, name, *args, opts: parent.alltoall_base(*args, opts)
        )
    else:
        group._pg = parent
    monkeypatch.setattr(group, "size", lambda: 2)

    def started(shape: tuple[int, ...], *sizes: list[int]) -> Any:
        group.alltoall_base(torch.ones(shape), torch.ones(shape), *sizes, AllToAllOptions())
        return parent.shape, *parent.sizes

    assert started((4, 3), [], []) == ((4, 3), [2, 2], [2, 2])
    assert started((4, 3), [1, 3], [3, 1]) == ((4, 3), [1, 3], [3, 1])
    assert started((0, 3), [], []) == ((0, 3), [0, 0], [0, 0])
    assert started((3, 4), [], []) == ((12,), [6, 6], [6, 6])
    assert started((3, 3), [], []) == ((3, 3), [], []), "PyTorch refuses it"


def test_a_deadline_of_the_old_peers_does_not_affect_the_new_ones(watched: MagicMock) -> None:
    group, old = accelerated()
    group.allreduce([torch.ones(1)], ReduceOp.SUM).wait()
    (deadline, _), _ = watched.call_args
    new = Parent()
    group._pg = new
    deadline()
    assert old.aborts == new.aborts == 0


def test_pytorchs_own_deadline_never_precedes_torchfts() -> None:
    group, parent = accelerated()
    with patch.object(type(parent), "set_timeout", create=True) as theirs:
        group.set_timeout(timedelta(seconds=5))
    assert not theirs.called
    assert group._timeout == timedelta(seconds=5)
    with pytest.raises(ValueError, match="timeout"):
        group.set_timeout(timedelta(0))


@pytest.mark.parametrize(
    "kind",
    [
        AllgatherOptions,
        AllreduceCoalescedOptions,
        AllreduceOptions,
        AllToAllOptions,
        BarrierOptions,
        BroadcastOptions,
        ReduceScatterOptions,
    ],
)
def test_all_options_are_copied(kind: Callable[[], Any]) -> None:
    group, _ = accelerated()
    given = kind()
    for name, value in (("rootRank", 3), ("reduceOp", ReduceOp.MAX), ("asyncOp", False), ("device_ids", [1])):
        if hasattr(given, name):
            setattr(given, name, value)
    copied = group._opts_hook(given)
    assert type(copied) is type(given) and copied is not given
    for name in dir(given):
        if not name.startswith("_") and name != "timeout":
            assert getattr(copied, name) == getattr(given, name)
    assert group._opts_hook(ReduceOp.SUM) is ReduceOp.SUM


# Options of PyTorch's backend


class Nccl:
    """PyTorch's backend, without a device."""

    made: ClassVar[list[Nccl]] = []

    def __init__(self, store: object, rank: int, world_size: int, opts: Any) -> None:
        self.opts = opts
        self.error_handling = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        self.monitoring = os.environ.get("TORCH_NCCL_ENABLE_MONITORING")
        self.connected: list[torch.device] = []
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)

    def abort(self) -> None: ...


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[Nccl]:
    real = getattr(dist, "ProcessGroupNCCL", None)
    if real is None:
        pytest.skip("this PyTorch has no NCCL")
    monkeypatch.setattr(Nccl, "Options", real.Options, raising=False)
    monkeypatch.setattr(Nccl, "made", [])
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for module in (process_group.nccl, groups):
        monkeypatch.setattr(module, "BaseProcessGroup", MagicMock())
    return Nccl


def test_nccl_connects_at_once_without_blocking(nccl: type[Nccl]) -> None:
    group = ProcessGroupNCCL(timedelta(seconds=7))
    group._global_ranks = [4, 9]
    group._create_pg(dist.HashStore(), 0, 2)
    (made,) = nccl.made
    assert made.opts.config.blocking == 0
    assert made.opts.global_ranks_in_group == [4, 9]
    assert made.opts._timeout >= timedelta(days=1), "PyTorch's own deadline ends the process"
    assert made.connected == [torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("there", "torchrun", "expected"),
    [
        (None, False, "2"),
        ("1", False, "1"),  # the user's value
        ("1", True, "2"),  # set by torchrun in all its workers
        ("3", True, "3"),
        ("0", True, "0"),
    ],
)
def test_only_our_backend_aborts_on_an_error_instead_of_ending_the_process(
    nccl: type[Nccl], monkeypatch: pytest.MonkeyPatch, there: Optional[str], torchrun: bool, expected: str
) -> None:
    if there is not None:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", there)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    ProcessGroupNCCL()._create_pg(dist.HashStore(), 0, 2)
    assert nccl.made[0].error_handling == expected
    assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == there, "groups made later are not torchft's"


@pytest.mark.parametrize(("there", "expected"), [(None, "0"), ("1", "1")])
def test_a_hung_abort_of_our_backend_does_not_end_the_process(
    nccl: type[Nccl], monkeypatch: pytest.MonkeyPatch, there: Optional[str], expected: str
) -> None:
    if there is not None:
        monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", there)
    ProcessGroupNCCL()._create_pg(dist.HashStore(), 0, 2)
    assert nccl.made[0].monitoring == expected
    assert os.environ.get("TORCH_NCCL_ENABLE_MONITORING") == there, "groups made later are not torchft's"


_IMPORT = """
import os, sys
import torch.distributed as dist
if "world" in sys.argv:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.get_backend = lambda: sys.argv[-1]
from torchft.process_group import ProcessGroupNCCL
ProcessGroupNCCL()
print(os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"])
"""


@pytest.mark.parametrize(
    ("there", "arguments", "expected", "warning"),
    [
        (None, [], "0", None),
        (
            "1",
            [],
            "1",
            "TORCH_NCCL_DUMP_ON_TIMEOUT=1: the monitor of PyTorch's older NCCL backend may end this",
        ),
        ("0", [], "0", None),
        (None, ["world", "nccl-legacy"], "0", "the world was made before torchft.process_group was imported"),
        (None, ["world", "gloo"], "0", None),
    ],
)
def test_a_world_that_is_made_after_the_import_dumps_nothing(
    monkeypatch: pytest.MonkeyPatch,
    there: Optional[str],
    arguments: list[str],
    expected: str,
    warning: Optional[str],
) -> None:
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    done = run_python(_IMPORT, *arguments, env={} if there is None else {"TORCH_NCCL_DUMP_ON_TIMEOUT": there})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [expected]
    assert (warning is None) == ("monitor" not in done.stderr), done.stderr
    assert warning is None or warning in done.stderr


def test_nccl_in_a_worker_too(nccl: type[Nccl], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group.ProcessGroupBabyNCCL, "_worker_timeout", timedelta(seconds=7))
    monkeypatch.setattr(process_group.ProcessGroupBabyNCCL, "_worker_global_ranks", [4, 9])
    process_group.ProcessGroupBabyNCCL._create_pg(dist.HashStore(), 0, 2)
    (made,) = nccl.made
    assert made.opts.config.blocking == 0
    assert made.opts.global_ranks_in_group == [4, 9]
    assert made.opts._timeout == timedelta(seconds=7), "PyTorch ends a worker past its deadline"
    assert made.connected == [torch.device("cuda", 1)]


def test_a_worker_reports_its_error_with_any_setting_of_its_trainer(
    nccl: type[Nccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the worker would end with the error, and its events would not show it."""
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    process_group.ProcessGroupBabyNCCL._create_pg(dist.HashStore(), 0, 2)
    assert nccl.made[0].error_handling == "2"


@pytest.mark.parametrize("isolated", [False, True])
def test_xccl_connects_at_once(isolated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Xccl(Nccl):
        made: ClassVar[list[Nccl]] = []
        Options = SimpleNamespace

    monkeypatch.setattr(dist, "ProcessGroupXCCL", Xccl, raising=False)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 1)
    base, store = MagicMock(), dist.HashStore()
    monkeypatch.setattr(groups if isolated else process_group.xccl, "BaseProcessGroup", base)
    if isolated:
        process_group.ProcessGroupBabyXCCL._create_pg(store, 0, 2)
    else:
        ProcessGroupXCCL(timedelta(seconds=7))._create_pg(store, 0, 2)
    (made,) = Xccl.made
    base.assert_called_once_with(store, 0, 2)
    group, device = base.return_value, torch.device("xpu", 1)
    group._set_default_backend.assert_called_once_with(base.BackendType.XCCL)
    group._register_backend.assert_called_once_with(device, base.BackendType.XCCL, made)
    assert made.opts._timeout >= timedelta(days=1), "PyTorch's own deadline ends the process"
    assert made.connected == [device]


@pytest.mark.skipif(torch.xpu.is_available(), reason="needs a host without an XPU")
def test_a_worker_for_xccl_asks_for_no_other_device(store: TCPStore) -> None:
    """A host with XPUs has no CUDA device."""
    group = process_group.ProcessGroupBabyXCCL(timedelta(seconds=60))
    try:
        with pytest.raises(Exception, match="XPU"):
            group.configure(meeting(store), "replica", 0, 1)
    finally:
        group.shutdown()
