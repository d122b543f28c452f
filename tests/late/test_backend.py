"""The collective backend follows NCCL's rules: when it reports which error, the effect of an abort, the
result of each operation.
"""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, GatherOptions, ScatterOptions

from tests.late import load

load()
from tests.late.group import ProcessGroupLate, backend, together  # noqa: E402
from tests.unit.children import run_python  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def make() -> ProcessGroupLate:
    return ProcessGroupLate(timeout=timedelta(seconds=20))


def full(value: float, *size: int) -> torch.Tensor:
    return torch.full(size or (4,), float(value), device="late")


def native(pg: ProcessGroupLate) -> dist.Backend:
    """The backend itself, without torchft's additions."""
    return pg.parent._get_backend(torch.device("late"))


def test_work_is_returned_at_launch_and_its_future_is_complete(late):
    def rank(r: int, pg: ProcessGroupLate):
        late.hold(torch.accelerator.current_stream())
        try:
            x = full(r + 1)  # the collective is ordered behind this
            work = native(pg).allreduce([x], dist.AllreduceOptions())
            at_launch = work.get_future().done(), work.is_completed()
            work.wait()  # does not block the host
            y = x * 10
        finally:
            late.release(torch.accelerator.current_stream())
        return at_launch, y.tolist(), work.is_completed()

    assert together(rank, make=make) == [((True, False), [30.0] * 4, True)] * 2


def test_a_reader_that_does_not_wait_reads_old_values(late):
    has_read = threading.Event()

    def rank(r: int, pg: ProcessGroupLate):
        x = full(r + 1)
        if r == 1:  # the collective ends only after this
            assert has_read.wait(20)
        work = native(pg).allreduce([x], dist.AllreduceOptions())
        before = (x * 1).tolist()
        has_read.set()
        work.wait()
        return before, x.tolist()

    assert together(rank, make=make)[0] == ([1.0] * 4, [3.0] * 4)


def test_the_futures_value_is_ordered_for_its_reader(late):
    late.delays(1, 1000, 2000)

    def rank(r: int, pg: ProcessGroupLate):
        work = native(pg).allreduce([full(r + 1)], dist.AllreduceOptions())
        return work.get_future().then(lambda f: f.value()[0] * 2).wait().tolist()

    assert together(rank, make=make) == [[6.0] * 4] * 2


def test_async_op_false_gives_nothing_and_runs_on_the_current_stream(late):
    def rank(r: int, pg: ProcessGroupLate):
        opts = dist.AllreduceOptions()
        opts.asyncOp = False
        x = full(r + 1)
        return native(pg).allreduce([x], opts), x.tolist()

    assert together(rank, make=make) == [(None, [3.0] * 4)] * 2


@pytest.mark.parametrize("magnitude", [100.0, 1e-6, 60000.0], ids=["normal", "subnormal in float16", "large"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_average_is_within_the_bounds_that_allreduce_states(
    late, dtype: torch.dtype, magnitude: float, ranks: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    values = [((torch.rand(4096, generator=generator) - 0.2) * magnitude).to(dtype) for _ in range(ranks)]

    def rank(r: int, pg: ProcessGroupLate) -> torch.Tensor:
        opts = dist.AllreduceOptions()
        opts.reduceOp = dist.ReduceOp.AVG
        x = values[r].to("late")
        pg.allreduce([x], opts).wait()
        return x.cpu()

    first, *others = together(rank, ranks, make=make)
    assert all(torch.equal(first, other) for other in others)
    exact = torch.stack([value.double() for value in values])
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    bound = (ranks + 1) / 2 * info.eps * exact.abs().mean(0) + ranks / 2 * least
    error = (first.double() - exact.mean(0)).abs()
    assert (error <= bound).all()
    assert error.max() > 0, "the average is exact, so this does not test the bound"


def test_every_operation(late):
    def rank(r: int, pg: ProcessGroupLate):
        got = {}
        x = full(r + 1)
        pg.allreduce([x], dist.AllreduceOptions()).wait()
        got["allreduce"] = x.tolist()
        opts = dist.AllreduceOptions()
        opts.reduceOp = dist.ReduceOp.AVG
        x = full(r + 1)
        pg.allreduce([x], opts).wait()
        got["average"] = x.tolist()
        x, y = full(r), full(r + 5, 2)
        pg.allreduce_coalesced([x, y], dist.AllreduceCoalescedOptions()).wait()
        got["allreduce_coalesced"] = x.tolist(), y.tolist()
        x = full(r + 1)
        opts = dist.BroadcastOptions()
        opts.rootRank = 1
        pg.broadcast([x], opts).wait()
        got["broadcast"] = x.tolist()
        outs = [full(0), full(0)]
        pg.allgather([outs], [full(r + 1)], AllgatherOptions()).wait()
        got["allgather"] = [o.tolist() for o in outs]
        out = full(0, 4)
        pg.allgather_into_tensor_coalesced([out], [full(r + 1, 2)], AllgatherOptions()).wait()
        got["allgather_into_tensor_coalesced"] = out.tolist()
        out = full(0, 4)
        pg._allgather_base(out, full(r + 1, 2), AllgatherOptions()).wait()
        got["_allgather_base"] = out.tolist()
        out = full(0, 2)
        pg.reduce_scatter([out], [[full(r, 2), full(r + 10, 2)]], dist.ReduceScatterOptions()).wait()
        got["reduce_scatter"] = out.tolist()
        out = full(0, 1)
        pg.reduce_scatter_tensor_coalesced(
            [out], [torch.arange(2.0, device="late")], dist.ReduceScatterOptions()
        ).wait()
        got["reduce_scatter_tensor_coalesced"] = out.tolist()
        out = full(0, 1)
        pg._reduce_scatter_base(out, torch.arange(2.0, device="late"), dist.ReduceScatterOptions()).wait()
        got["_reduce_scatter_base"] = out.tolist()
        out = full(0, 3)
        sizes = [1, 2] if r == 0 else [2, 1]
        send = torch.arange(3.0, device="late") + 10 * r
        pg.alltoall_base(out, send, sizes, sizes, dist.AllToAllOptions()).wait()
        got["alltoall_base"] = out.tolist()
        outs = [full(0, 1), full(0, 1)]
        pg.alltoall(outs, [full(10 * r, 1), full(10 * r + 1, 1)], dist.AllToAllOptions()).wait()
        got["alltoall"] = [o.item() for o in outs]
        x = full(r + 1)
        pg.reduce([x], dist.ReduceOptions()).wait()
        got["reduce"] = x.tolist() if r == 0 else None
        outs = [full(0), full(0)]
        pg.gather([outs] if r == 0 else [], [full(r + 1)], GatherOptions()).wait()
        got["gather"] = [o.tolist() for o in outs]
        x = full(0)
        pg.scatter([x], [[full(7), full(8)]] if r == 0 else [], ScatterOptions()).wait()
        got["scatter"] = x.tolist()
        x = full(5 if r == 0 else 0)
        (pg.send([x], 1, 0) if r == 0 else pg.recv([x], 0, 0)).wait()
        got["send"] = x.tolist()
        pg.barrier(dist.BarrierOptions()).wait()
        return got

    first, second = together(rank, make=make)
    both = {
        "allreduce": [3.0] * 4,
        "average": [1.5] * 4,
        "allreduce_coalesced": ([1.0] * 4, [11.0] * 2),
        "broadcast": [2.0] * 4,
        "allgather": [[1.0] * 4, [2.0] * 4],
        "allgather_into_tensor_coalesced": [1.0, 1.0, 2.0, 2.0],
        "_allgather_base": [1.0, 1.0, 2.0, 2.0],
        "send": [5.0] * 4,
    }
    own = [
        {
            "reduce_scatter": [1.0, 1.0],
            "reduce_scatter_tensor_coalesced": [0.0],
            "_reduce_scatter_base": [0.0],
            "alltoall_base": [0.0, 10.0, 11.0],
            "alltoall": [0.0, 10.0],
            "reduce": [3.0] * 4,
            "gather": [[1.0] * 4, [2.0] * 4],
            "scatter": [7.0] * 4,
        },
        {
            "reduce_scatter": [21.0, 21.0],
            "reduce_scatter_tensor_coalesced": [2.0],
            "_reduce_scatter_base": [2.0],
            "alltoall_base": [1.0, 2.0, 12.0],
            "alltoall": [1.0, 11.0],
            "reduce": None,
            "gather": [[0.0] * 4, [0.0] * 4],
            "scatter": [8.0] * 4,
        },
    ]
    assert first == {**both, **own[0]}
    assert second == {**both, **own[1]}


def test_abort_ends_kernels_and_leaves_garbage_without_an_error(late):
    begun = threading.Barrier(2)

    def rank(r: int, pg: ProcessGroupLate):
        b, x = native(pg), full(r + 1)
        begun.wait()
        if r == 1:
            begun.wait()
            return None  # never joins, so rank 0's kernel hangs
        work = b.allreduce([x], dist.AllreduceOptions())
        time.sleep(0.05)
        hangs = not work.is_completed()
        b.abort()
        work.wait()  # reports no error
        got = x.tolist()
        with pytest.raises(RuntimeError, match="aborted"):
            b.allreduce([x], dist.AllreduceOptions())
        begun.wait()
        return hangs, got

    hangs, got = together(rank, make=make)[0]
    assert hangs
    assert len(set(got)) == 1 and got[0] not in (1.0, 3.0)


def test_a_failed_peer_is_reported_by_get_error_only_and_the_watchdog_aborts(late, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    left = threading.Event()

    def rank(r: int, pg: ProcessGroupLate):
        b = native(pg)
        b.allreduce([full(0)], dist.AllreduceOptions()).wait()
        torch.accelerator.current_stream().synchronize()
        if r == 1:
            b.abort()  # simulates the end of the process: its connections break
            left.set()
            return None
        left.wait()
        x = full(1)
        work = b.allreduce([x], dist.AllreduceOptions())
        assert work.get_future().done()
        deadline = time.monotonic() + 10
        while b.get_error().name == "SUCCESS":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        work.wait()
        torch.accelerator.current_stream().synchronize()  # the kernel was ended
        return x.tolist()

    assert together(rank, make=make)[0] != [3.0] * 4


@pytest.mark.slow
def test_by_default_the_watchdog_ends_the_process_of_a_rank_whose_peer_ended(job_server, monkeypatch):
    script = """
import threading, torch, torch.distributed as dist
from tests.late import load
load()
from tests.late.group import backend
store, left, made = dist.HashStore(), threading.Event(), {}

def rank(r):
    torch.accelerator.set_device_index(r)
    b = made[r] = backend(store, r, 2)
    x = torch.ones(4, device="late")
    b.allreduce([x], dist.AllreduceOptions()).wait()
    torch.accelerator.synchronize()
    if r == 1:
        b.abort()
        left.set()
        return
    left.wait()
    b.allreduce([x], dist.AllreduceOptions()).wait()
    torch.accelerator.synchronize()

threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
[t.start() for t in threads]
[t.join() for t in threads]
print("still here")
"""
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    done = run_python(script, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGABRT and "still here" not in done.stdout
    assert (
        "the watchdog takes the process down" in done.stderr and "connection closed by a peer" in done.stderr
    )


def test_an_abort_waits_for_the_lock_that_connecting_holds(late, monkeypatch):
    """The root never joins. A rank that connects waits for it until the store's timeout."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    b = backend(store, 1, 2)
    took = []

    def abort() -> None:
        time.sleep(0.05)
        began = time.monotonic()
        b.abort()
        took.append(time.monotonic() - began)

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(RuntimeError):
        b.eager_connect_single_device(torch.device("late", 0))
    thread.join()
    assert took[0] > 0.1


def test_operations_that_nccl_refuses(late):
    def rank(r: int, pg: ProcessGroupLate):
        b = native(pg)
        with pytest.raises(RuntimeError, match="contiguous"):
            b.allreduce([torch.ones(4, 4, device="late")[:, 1]], dist.AllreduceOptions())
        with pytest.raises(RuntimeError, match="No backend type"):
            b.allreduce([torch.ones(4)], dist.AllreduceOptions())
        with pytest.raises(RuntimeError, match="one tensor only"):
            b.allreduce([full(1), full(2)], dist.AllreduceOptions())
        opts = dist.AllreduceOptions()
        opts.reduceOp = dist.ReduceOp.BAND
        with pytest.raises(RuntimeError, match="BAND"):
            b.allreduce([full(1)], opts)

    together(rank, make=make)
