"""Destruction of groups while their operations still run."""

from __future__ import annotations

import threading

from tests.unit.children import run_python
from tests.unit.process_group.gloo_peers import DEADLINE_S
from tests.unit.process_group.peers import Peers, runs_with
from torchft import _handoff
from torchft.process_group._gloo import reaper

# In a separate process: if the destruction kept the GIL, no timeout could fire here.
_SCRIPT = """
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
from torch.distributed import ReduceOp, TCPStore
from torchft.process_group import ProcessGroupGloo
from torchft.process_group._gloo import reaper

store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
with ThreadPoolExecutor(2) as pool:
    for round in range(5):
        groups = [ProcessGroupGloo(timedelta(seconds=60)) for _ in range(2)]
        where = f"localhost:{store.port}/{round}"
        list(pool.map(lambda rank: groups[rank].configure(where, "replica", rank, 2), range(2)))
        group, called = groups[0], threading.Event()
        # The callback runs on the group's own thread, needs the GIL, and destroys the group.
        group.allreduce([torch.ones(1)], ReduceOp.SUM).get_future().add_done_callback(
            lambda _: (group.shutdown(), called.set())
        )
        groups[1].abort()
        assert called.wait(20)
        assert reaper.drain(20)
print("done")
"""


def test_destroying_a_group_leaves_the_gil_to_its_threads() -> None:
    done = run_python(_SCRIPT)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr


@runs_with("fresh", alone=True)
def test_the_garbage_collector_may_destroy_a_group_while_a_thread_starts(fresh: Peers) -> None:
    """It does so on any thread, also on one that starts while another one waits for that, and holds a
    lock.
    """
    fresh.connect()

    def collect() -> None:
        with threading._active_limbo_lock, _handoff._starter_lock:  # type: ignore[attr-defined]
            fresh.groups.clear()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert reaper.drain(DEADLINE_S)


def test_a_slow_destruction_causes_no_delay() -> None:
    exiting, end = threading.Event(), threading.Event()

    class Slow:
        def __del__(self) -> None:
            exiting.set()
            end.wait(30)

    reaper.reap([Slow()])
    assert exiting.wait(DEADLINE_S)
    assert not reaper.drain(0.01)
    end.set()
    assert reaper.drain(DEADLINE_S)
