"""One of the ranks that python/bench/quantized.py measures. It reads commands from stdin."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "process"))

import torch
from events import Commands, emit
from torch.distributed import AllreduceOptions, ReduceOp, TCPStore
from torch.distributed import ProcessGroup as BaseProcessGroup

TIMEOUT = timedelta(seconds=60)
# Offset in Linux's struct tcp_info: bytes of data sent, including retransmissions.
_BYTES_SENT_AT = 200


def bytes_sent() -> int:
    """Return the bytes sent on all TCP connections of this process so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT_AT + 8)
            total += struct.unpack_from("Q", info, _BYTES_SENT_AT)[0]
        except (OSError, struct.error):
            continue  # closed in the meantime, or no TCP connection
    return total


def connect() -> Any:
    from torchft import process_group

    rank, ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "PEERS_PORT"))
    # Kept alive, because rank 0 hosts the store.
    globals()["store"] = TCPStore(
        "localhost", port, is_master=rank == 0, wait_for_workers=False, timeout=TIMEOUT
    )
    group = process_group.ProcessGroupGloo(timeout=TIMEOUT)
    process_group.reconfigure_with_store(group, f"localhost:{port}/bench", rank, ranks, TIMEOUT)
    return group


def reduce(group: BaseProcessGroup, kind: str, tensor: torch.Tensor) -> None:
    if kind == "full":
        options = AllreduceOptions()
        options.reduceOp = ReduceOp.SUM
        group.allreduce([tensor], options).wait()
        return
    os.environ["TORCHFT_QUANTIZATION_FORMAT"] = kind
    from torchft.collectives import allreduce_quantized

    allreduce_quantized([tensor], ReduceOp.SUM, group).wait()


def main() -> None:
    torch.set_num_threads(1)
    group = connect()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    emit("connected")
    commands = Commands()
    while True:
        command = commands.next()
        numbers = [
            torch.randn(command["floats"], generator=torch.Generator().manual_seed(r)) for r in range(ranks)
        ]
        exact, tensor = torch.stack(numbers).double().sum(0), numbers[rank].clone()
        try:
            reduce(group, "full", torch.zeros(1))  # a barrier
            before, began = bytes_sent(), time.perf_counter()
            reduce(group, command["kind"], tensor)
            seconds, sent = time.perf_counter() - began, bytes_sent() - before
        except Exception as e:
            emit(command["do"], refused=f"{type(e).__name__}: {e}".splitlines()[0][:200])
            continue
        error = ((tensor.double() - exact).norm() / exact.norm()).item()
        emit(command["do"], ms=1000 * seconds, sent=sent, error=error)


if __name__ == "__main__":
    main()
