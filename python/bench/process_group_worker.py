"""One of the two ranks that python/bench/process_groups.py measures. It reads commands from stdin.

Groups: `plain` is PyTorch's Gloo group, `native` its reconfigurable one, `gloo` and `isolated` are those of
the torchft on PYTHONPATH; `isolated, shared buffer` is an isolated group whose tensors are shared first.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

# PyTorch's TCPStore looks up the name of every peer in the DNS. A lost answer costs 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, PrefixStore, ReduceOp, TCPStore

TIMEOUT = timedelta(seconds=60)
# Timeout of the operation that is aborted. It bounds the wait in groups whose abort does not end the
# operation.
ABORTED_TIMEOUT = timedelta(seconds=5)


class Rank:
    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.port = int(os.environ["PEERS_PORT"])
        if self.rank == 0:
            self.server = TCPStore("localhost", self.port, is_master=True, wait_for_workers=False)
        self.groups: dict[str, Any] = {}

    def store(self, prefix: str) -> PrefixStore:
        return PrefixStore(prefix, TCPStore("localhost", self.port, is_master=False, timeout=TIMEOUT))

    def make(self, kind: str) -> dict[str, Any]:
        if kind == "native":
            self.groups[kind] = self._pytorch(f"{kind}-home", enable_reconfigure=True)
        elif kind != "plain":
            from torchft import process_group

            name = "ProcessGroupBabyGloo" if kind.startswith("isolated") else "ProcessGroupGloo"
            self.groups[kind] = getattr(process_group, name)(timeout=TIMEOUT)
        return {}

    def _pytorch(self, prefix: str, **options: Any) -> dist.ProcessGroup:
        store = self.store(prefix)
        group = dist.ProcessGroup(store, self.rank, 2)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        backend = dist.ProcessGroupGloo(store, self.rank, 2, timeout=TIMEOUT, **options)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return group

    def connect(self, kind: str, meeting: str) -> dict[str, Any]:
        """Reconfigure with the same peers. The time includes the first small allreduce."""
        began = time.perf_counter()
        if kind == "plain":
            self.groups[kind] = self._pytorch(meeting)
        else:
            from torchft import process_group

            group, where = self.groups[kind], f"localhost:{self.port}/{meeting}"
            if hasattr(process_group, "reconfigure_with_store"):
                process_group.reconfigure_with_store(group, where, self.rank, 2, TIMEOUT)
            else:  # upstream's release 0.2.0
                group.configure(where, f"replica_{self.rank}", self.rank, 2)
        self._allreduce(kind, torch.ones(16))
        return {"ms": 1000 * (time.perf_counter() - began)}

    def _allreduce(self, kind: str, tensor: torch.Tensor) -> None:
        self.groups[kind].allreduce([tensor], AllreduceOptions()).wait()

    def repeat(self, kind: str, count: int, floats: int) -> dict[str, Any]:
        """Return the time of each of `count` allreduces, in milliseconds."""
        tensor = torch.zeros(floats)
        if kind == "isolated, shared buffer":
            assert self.groups[kind].share_buffer(tensor)
        self._allreduce(kind, tensor)
        ms = []
        for _ in range(count):
            began = time.perf_counter()
            self._allreduce(kind, tensor)
            ms.append(1000 * (time.perf_counter() - began))
        return {"ms": ms}

    def abort(self, kind: str) -> dict[str, Any]:
        """Return the time from rank 0's abort to the end of its wait for an allreduce that rank 1 does not
        join.
        """
        if self.rank != 0:
            return {"ms": 0.0}
        opts = AllreduceOptions()
        opts.reduceOp, opts.timeout = ReduceOp.SUM, ABORTED_TIMEOUT
        group = self.groups[kind]
        work = group.allreduce([torch.ones(16)], opts)
        ended: list[float] = []

        def wait() -> None:
            with contextlib.suppress(Exception):
                work.wait()
            ended.append(time.perf_counter())

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        time.sleep(0.2)
        began = time.perf_counter()
        if kind == "native":
            from torchft.process_group.native import abort_group

            abort_group(group)
        else:
            group.abort()
        waiter.join(ABORTED_TIMEOUT.total_seconds() + 5)
        return {"ms": 1000 * ((ended[0] if ended else time.perf_counter()) - began)}


def emit(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    rank = Rank()
    emit("imported")
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        emit(do, **getattr(rank, do)(**command))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # PyTorch's groups wait for operations in flight when they are destroyed.
    os._exit(0)
