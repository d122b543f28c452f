"""One replica group of the local_sgd benchmark, with the torchft on PYTHONPATH.

Bytes are counted by the kernel on this process's TCP connections, including the headers of collectives and
the control plane. Memory is the growth of the resident set during a synchronization. In the processes whose
memory is measured, local_sgd.py sets MALLOC_MMAP_THRESHOLD_, because memory that malloc keeps after a free
would not be counted when it is reused.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import socket
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "process"))
from events import Commands, emit

TIMEOUT = timedelta(seconds=120)
_BYTES_ACKED = 120  # offset in Linux's struct tcp_info, an unsigned 64 bit number


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    commands = Commands()
    emit("imported")
    while True:
        command = commands.next()
        emit("case", **run(args.group, **{k: v for k, v in command.items() if k != "do"}))


def run(
    group: int,
    lighthouse: str,
    name: str,
    fragments: int,
    layer: int,
    syncs: int,
    settings: dict[str, Any] | None,
) -> dict[str, Any]:
    """Run `syncs` rounds of each fragment. Settings None: LocalSGD."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(layer, layer, bias=False) for _ in range(4)])
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    pg = ProcessGroupGloo(timeout=TIMEOUT)

    def load(state: dict[str, torch.Tensor]) -> None:
        model.load_state_dict(state)

    manager = Manager(
        pg=pg,
        load_state_dict=load,
        state_dict=model.state_dict,
        min_replica_size=2,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"{name}_{group}",
        init_sync=False,
    )
    if settings is None:
        algorithm: Any = LocalSGD(manager, model, inner, sync_every=4)
    else:
        parts: list[nn.Module] = [model] if fragments == 1 else [nn.ModuleList([m]) for m in model]
        outer: list[torch.optim.Optimizer] = [
            torch.optim.SGD(p.parameters(), lr=0.7, momentum=0.9, nesterov=True) for p in parts
        ]
        algorithm = DiLoCo(manager, parts, inner, outer, **settings)
    with algorithm:
        # A warm-up: makes connections and the outer optimizer's state.
        train(model, inner, manager, 2 * fragments)
        fill_gradients(model)
        gc.collect()  # collected now, so that garbage of the previous case is not collected during this one
        sent, rest, began = Sent(), settle(), time.monotonic()
        blocked = train(model, inner, manager, (2 + syncs) * fragments, sent)
        took, peak = time.monotonic() - began, memory("VmHWM")
        sent.look_until_quiet()
    manager.shutdown()
    pg.shutdown()
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        # For one synchronization of the whole model, as a multiple of its size.
        "sent": sent.total / syncs / nbytes,
        "peak": (peak - rest) / nbytes,
        "ms": 1000 * blocked / syncs,
        "seconds": took,
    }


def train(
    model: nn.Module, inner: torch.optim.Optimizer, manager: Manager, until: int, sent: Sent | None = None
) -> float:
    """Runs inner steps up to a step of the Manager. Returns the seconds spent in `optimizer.step()`."""
    blocked = 0.0
    while manager.current_step() < until:
        fill_gradients(model)
        began = time.perf_counter()
        inner.step()
        blocked += time.perf_counter() - began
        if sent is not None:
            sent.look()
    return blocked


def fill_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.empty_like(p)
        p.grad.fill_(1e-3)


def settle() -> int:
    """Returns free memory to the system and resets the peak. Returns the resident bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(what: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(f"{what}:"))


class Sent:
    """Counts the bytes that peers acknowledge on this process's TCP connections from now on, including closed
    ones.
    """

    def __init__(self) -> None:
        self.total = 0
        self._known = acknowledged()

    def look(self) -> None:
        now = acknowledged()
        for connection, count in now.items():
            self.total += count - self._known.get(connection, 0)
        self._known = now

    def look_until_quiet(self) -> None:
        """Waits until the bytes that were sent last are acknowledged."""
        before = -1
        while self.total != before:
            before = self.total
            time.sleep(0.05)
            self.look()


def acknowledged() -> dict[str, int]:
    """Bytes that peers have acknowledged, by connection."""
    found = {}
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if not (name := os.readlink(fd)).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(fd.name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    if len(info) >= _BYTES_ACKED + 8:
                        found[name] = struct.unpack_from("<Q", info, _BYTES_ACKED)[0]
        except OSError:  # closed in the meantime
            continue
    return found


if __name__ == "__main__":
    main()
