"""One rank of a process group, controlled by commands on stdin: create it, run collectives, abort it, leave.

Times are from the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Callable

# PyTorch's TCPStore looks up the name of every peer in the DNS. A lost answer costs 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from torchft import process_group
from torchft.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroupGloo,
    ProcessGroupWrapper,
    create_store_client,
    reconfigure_with_store,
)

# Longer than any test, so that no operation ends by its timeout.
TIMEOUT = timedelta(seconds=600)
CONNECT = timedelta(seconds=60)
STUCK_SEC = 0.2
# A command that takes longer is taken to hang: all stacks are printed. Shorter than the timeout of the test.
HANGS_SEC = 40
# Each operation waits for a different rank, so that the end of one does not complete another.
OPERATIONS: dict[str, Callable[[Any], dist.Work]] = {
    "allreduce": lambda group: group.allreduce([torch.ones(16)], ReduceOp.SUM),
    "large allreduce": lambda group: group.allreduce([torch.ones(1_000_000)], ReduceOp.SUM),
    "barrier": lambda group: group.barrier(dist.distributed_c10d.BarrierOptions()),
    "recv": lambda group: group.recv([torch.zeros(16)], 1, 5),
}


def emit(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def gloo() -> ProcessGroupGloo:
    return ProcessGroupGloo(timeout=TIMEOUT)


def isolated() -> Any:
    return process_group.ProcessGroupBabyGloo(timeout=TIMEOUT)


def native(where: str, rank: int, n: int) -> dist.ProcessGroup:
    """A process group as init_process_group(..., enable_reconfigure=True) creates it."""
    store = create_store_client(where, CONNECT)
    group = dist.ProcessGroup(store, rank, n)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    backend = dist.ProcessGroupGloo(store, rank, n, timeout=TIMEOUT, enable_reconfigure=True)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


class StubManager:
    """The part of a Manager that a ManagedProcessGroup needs."""

    def __init__(self, pg: Any) -> None:
        self._pg = pg

    def num_participants(self) -> int:
        return self._pg.size()

    def allreduce(self, tensor: torch.Tensor, reduce_op: Any) -> dist.Work:
        return self._pg.allreduce([tensor], reduce_op)


def make(kind: str, where: str, rank: int, n: int) -> Any:
    makers: dict[str, Callable[[], Any]] = {
        "gloo": gloo,
        "isolated": isolated,
        "native": lambda: ProcessGroupWrapper(pg=native(f"{where}/native", rank, n)),
        "managed": lambda: ManagedProcessGroup(StubManager(gloo())),  # type: ignore[arg-type]
        "error_swallowing": lambda: ErrorSwallowingProcessGroupWrapper(gloo()),
        "fake": lambda: FakeProcessGroupWrapper(gloo()),
        "wrapper": lambda: ProcessGroupWrapper(pg=gloo()),
    }
    return makers[kind]()


class Rank:
    def __init__(self) -> None:
        self.group: Any = None
        self.waiters: dict[str, threading.Thread] = {}
        self.ends: dict[str, dict[str, Any]] = {}

    def make(self, kind: str, where: str, rank: int, n: int) -> dict[str, Any]:
        self.group = make(kind, where, rank, n)
        return self.connect(where, rank, n)

    def connect(self, where: str, rank: int, n: int) -> dict[str, Any]:
        began = time.monotonic()
        reconfigure_with_store(self.group, f"{where}/{n}", rank, n, CONNECT)
        connected = time.monotonic()
        tensor = torch.ones(4)
        self.group.allreduce([tensor], ReduceOp.SUM).wait()
        return {"ms": 1000 * (connected - began), "sum": tensor[0].item()}

    def train(self) -> dict[str, Any]:
        """Starts a thread that runs allreduces until one fails."""
        self.progress = time.monotonic()
        group = self.group

        def loop() -> None:
            while True:
                OPERATIONS["large allreduce"](group).wait()
                if isinstance(group, ErrorSwallowingProcessGroupWrapper) and group.error() is not None:
                    raise group.error()  # type: ignore[misc]
                self.progress = time.monotonic()

        self.ends = {}
        self.waiters = {"train": self._waits("train", loop)}
        return {}

    def stuck(self) -> dict[str, Any]:
        """Waits until the allreduces make no progress, then starts one of each operation behind them."""
        while time.monotonic() - self.progress < STUCK_SEC:
            time.sleep(0.01)
        for name, operation in OPERATIONS.items():
            work = operation(self.group)
            self.waiters[name] = self._waits(name, work.wait)
        future = OPERATIONS["allreduce"](self.group).get_future()
        self.waiters["future"] = self._waits("future", future.wait)
        return {}

    def abort(self) -> dict[str, Any]:
        began = time.monotonic()
        self.group.abort()
        returned = time.monotonic()
        return {"began": began, "ms": 1000 * (returned - began)}

    def ended(self) -> dict[str, Any]:
        for waiter in self.waiters.values():
            waiter.join(20)
        running = [name for name, waiter in self.waiters.items() if waiter.is_alive()]
        return {"running": running, "ends": self.ends}

    def _waits(self, name: str, call: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            error = None
            try:
                call()
            except Exception as e:
                error = f"{type(e).__name__}: {e}"
            self.ends[name] = {"at": time.monotonic(), "error": error}

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def shutdown(self) -> dict[str, Any]:
        self.group.shutdown()
        self.group = None
        return {}

    def leave(self, drop: bool) -> dict[str, Any]:
        """Starts an operation and does not wait for it. The process ends after the answer."""
        global kept
        OPERATIONS["allreduce"](self.group)
        if not drop:
            kept = self.group  # keeps a reference, as torch.distributed does for the default group
        self.group = None
        return {}


kept: Any = None


def main() -> None:
    torch.set_num_threads(1)
    rank = Rank()
    emit("imported")
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        faulthandler.dump_traceback_later(HANGS_SEC)  # if a command hangs, or the exit after `leave`
        emit(do, **getattr(rank, do)(**command))
        if do == "leave":
            return
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
