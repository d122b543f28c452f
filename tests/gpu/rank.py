"""One rank of a process group on a device, as a process that is controlled by commands on stdin.

Times are from the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any, Callable

# PyTorch's TCPStore looks up the name of every peer in the DNS. A lost answer costs 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BarrierOptions,
    ReduceScatterOptions,
)

from tests.gpu import two_ranks
from tests.gpu.device import MB, busy
from tests.process.events import Commands, emit
from torchft import process_group
from torchft.collectives import allreduce_quantized
from torchft.process_group import create_store_client, reconfigure_with_store
from torchft.process_group.reconfigure import ReconfigureOptions

# Timeout of each operation. NCCL notices only by this timeout that a peer has ended.
TIMEOUT = timedelta(seconds=10)
CONNECT = timedelta(seconds=60)
COUNT = 4 * MB

KINDS: dict[str, Callable[[], Any]] = {
    "gloo": lambda: process_group.ProcessGroupGloo(timeout=TIMEOUT),
    "isolated gloo": lambda: process_group.ProcessGroupBabyGloo(timeout=TIMEOUT),
    "nccl": lambda: process_group.ProcessGroupNCCL(timeout=TIMEOUT),
    "isolated nccl": lambda: process_group.ProcessGroupBabyNCCL(timeout=TIMEOUT),
}


class Rank:
    def __init__(self, kind: str, device: int) -> None:
        self.device = torch.device("cuda", device)
        torch.cuda.set_device(self.device)
        self.nccl = "nccl" in kind
        self.group = KINDS[kind]()
        self.thread = threading.Thread()
        self.end: dict[str, Any] = {}

    def _full(self, value: float, *shape: int) -> torch.Tensor:
        return torch.full(shape, float(value), device=self.device)

    def connect(self, where: str, rank: int, n: int) -> dict[str, Any]:
        """Connects with new peers, and runs a first allreduce, to which each rank contributes rank + 1."""
        began = time.monotonic()
        reconfigure_with_store(self.group, where, rank, n, CONNECT)
        tensor = self._full(rank + 1.0, 4)
        self.group.allreduce([tensor], ReduceOp.SUM).wait()
        got = tensor.unique().tolist()
        return {"ms": 1000 * (time.monotonic() - began), "sum": got}

    def connect_standby(self, where: str, rank: int, n: int) -> dict[str, Any]:
        """Connects with new peers while the present ones reduce, and waits for the whole device in each step.
        The last rank is late.
        """
        store = create_store_client(where, CONNECT)
        store.set(f"handle/{rank}", self.group.get_reconfigure_handle())
        opts = ReconfigureOptions()
        opts.handles = [store.get(f"handle/{i}").decode() for i in range(n)]
        opts.uuid, opts.timeout = 1 + time.monotonic_ns() if rank == 0 else 0, CONNECT
        if rank == 0:
            store.set("uuid", str(opts.uuid))
        opts.uuid = int(store.get("uuid").decode())
        if rank == n - 1:
            time.sleep(0.5)
        attempt = self.group.connect_standby(opts)
        steps: list[float] = []
        while not attempt.ended and rank < n - 1:
            began = time.monotonic()
            tensor = self._full(1.0, COUNT)
            self.group.allreduce([tensor], ReduceOp.SUM).wait()
            del tensor
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            steps.append(1000 * (time.monotonic() - began))
        while not attempt.ended:
            time.sleep(0.001)
        began = time.monotonic()
        self.group.hand_over()
        tensor = self._full(rank + 1.0, 4)
        self.group.allreduce([tensor], ReduceOp.SUM).wait()
        got, took = tensor.unique().tolist(), 1000 * (time.monotonic() - began)
        return {"steps": len(steps), "longest_ms": max(steps, default=0.0), "ms": took, "sum": got}

    def collectives(self, rank: int) -> dict[str, Any]:
        """Runs every collective that this kind of group has between two ranks, each queued behind work on
        the same stream.
        """
        group, full, got = self.group, self._full, {}

        def late(value: float) -> torch.Tensor:
            tensor = full(float("nan"), 4)
            busy(0.02)
            return tensor.fill_(value)

        tensor = late(rank + 1)
        group.broadcast_one(tensor, 1).wait()
        got["broadcast"] = tensor.tolist()
        out = [full(0, 4) for _ in range(2)]
        group.allgather([out], [late(rank + 1)], AllgatherOptions()).wait()
        got["allgather"] = [t.unique().tolist() for t in out]
        tensor = late(rank + 1)
        group.allreduce([tensor], ReduceOp.MAX).wait()
        got["maximum"] = tensor.tolist()
        group.barrier(BarrierOptions()).wait()
        if not self.nccl:
            return got
        both = torch.cat([late(rank + 1), late(rank + 3)])
        out8, out4 = full(0, 8), full(0, 4)
        group.allgather_into_tensor_coalesced([out8], [late(rank + 1)], AllgatherOptions()).wait()
        got["allgather_into_tensor_coalesced"] = out8.tolist()
        group.reduce_scatter_tensor_coalesced([out4], [both], ReduceScatterOptions()).wait()
        got["reduce_scatter_tensor_coalesced"] = out4.tolist()
        group.reduce_scatter([out4], [[late(rank + 1), late(rank + 3)]], ReduceScatterOptions()).wait()
        got["reduce_scatter"] = out4.tolist()
        group.alltoall_base(out8, both, [], [], AllToAllOptions()).wait()
        got["alltoall_base"] = out8.tolist()
        if rank == 0:
            group.send([late(7)], 1, 0).wait()
        else:
            group.recv([out4], 0, 0).wait()
            got["recv"] = out4.tolist()
        return got

    def quantized(self, rank: int) -> dict[str, Any]:
        """Runs a quantized allreduce behind work on the same stream."""
        tensor = self._full(float("nan"), 5000)
        busy(0.02)
        tensor.fill_(rank + 1.0)
        allreduce_quantized([tensor], ReduceOp.SUM, self.group).wait()
        return {"sum": tensor.unique().tolist()}

    def heal(self, rank: int) -> dict[str, Any]:
        """Transfers a state of rank 0 to rank 1, by PGTransport over this group."""
        wants = self.device if self.nccl else torch.device("cpu")
        if rank == 0:
            two_ranks.send(self.group, wants, self.device, CONNECT, lambda: busy(0.2))
            return {}
        return two_ranks.receive(self.group, wants, self.device, CONNECT)

    def begin(self, busy_s: float = 0.0) -> dict[str, Any]:
        """Starts an allreduce on another thread, behind `busy_s` seconds of work on its stream. Replies when
        it is queued.
        """
        queued = threading.Event()

        def run() -> None:
            error: object = None
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    tensor = self._full(1.0, COUNT)
                    torch.cuda.current_stream().synchronize()
                    busy(busy_s)
                    work = self.group.allreduce([tensor], ReduceOp.SUM)
                    queued.set()
                    work.wait()
                    torch.cuda.current_stream().synchronize()
                error = self.group.errored()
            except Exception as e:
                error = e
            queued.set()
            self.end = {
                "at": time.monotonic(),
                "error": None if error is None else f"{type(error).__name__}: {error}",
            }

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        queued.wait()
        return {"at": time.monotonic()}

    def ended(self) -> dict[str, Any]:
        """Reports how and when the allreduce ended."""
        self.thread.join(60)
        return {"running": self.thread.is_alive(), **self.end}

    def abort(self) -> dict[str, Any]:
        began = time.monotonic()
        self.group.abort()
        return {"began": began, "ms": 1000 * (time.monotonic() - began)}

    def usable(self) -> dict[str, Any]:
        """Reports whether the device still computes for this process."""
        tensor = self._full(2.0, COUNT)
        return {"sum": tensor.mul_(2).sum().item() / COUNT}


def main() -> None:
    torch.set_num_threads(1)
    kind, device = sys.argv[1:]
    commands = Commands()
    rank = Rank(kind, int(device))
    emit("imported")
    while True:
        command = commands.next()
        do = command.pop("do")
        if do == "leave":
            rank.group.shutdown()
            return
        emit(do, **getattr(rank, do)(**command))


if __name__ == "__main__":
    main()
