"""The measurements of python/bench/gpu.py, one subject per process. Prints the figures as a JSON object.

It measures the first torchft on the path, ours or upstream's, with names that both have.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# Last on the path, because this directory contains our torchft, too.
sys.path.append(str(Path(__file__).resolve().parents[2]))

TIMEOUT = timedelta(seconds=60)
HEAL_BYTES = 1 << 30
QUANTIZED_SHAPE = 8192, 8192
# The driver returns the memory of a process some time after its end.
RETURNED_S = 2.0
STEP_BUCKETS, BUCKET_BYTES = 20, 5_000_000
LARGE_BYTES = 25_000_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("subject", choices=["group", "killed", "heal", "quantization"])
    parser.add_argument("--group", default="", help="a class of torchft; empty: PyTorch's own")
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two quorums")
    args = parser.parse_args()
    subjects: dict[str, Callable[[], dict[str, Any]]] = {
        "group": lambda: group_figures(args.group, args.settings, args.rounds, args.pause),
        "killed": killed,
        "heal": heal,
        "quantization": quantization,
    }
    figures = subjects[args.subject]()
    if args.subject != "killed":
        import torchft

        figures["torchft"] = str(Path(torchft.__file__).parent)
    print(json.dumps(figures), flush=True)
    # A stream that waits for a killed process would block a normal exit.
    os._exit(0)


class PyTorch:
    """PyTorch's own NCCL group, created for each set of peers."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def connect(self, store_addr: str) -> None:
        import torch
        import torch.distributed as dist

        address, _, prefix = store_addr.partition("/")
        host, _, port = address.partition(":")
        store = dist.PrefixStore(
            prefix, dist.TCPStore(host, int(port), is_master=False, timeout=self._timeout)
        )
        opts = dist.ProcessGroupNCCL.Options()
        opts._timeout = self._timeout
        pg = dist.ProcessGroup(store, 0, 1)
        pg._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        self._backend = dist.ProcessGroupNCCL(store, 0, 1, opts)
        device = torch.device("cuda", torch.cuda.current_device())
        self._backend.eager_connect_single_device(device)
        pg._register_backend(device, dist.ProcessGroup.BackendType.NCCL, self._backend)
        self._pg = pg

    def allreduce(self, tensors: list[Any], op: Any) -> Any:
        return self._pg.allreduce(tensors, op)

    def abort(self) -> None:
        self._backend.abort()

    def shutdown(self) -> None:
        self._backend.abort()


def group_figures(name: str, settings: dict[str, Any], rounds: int, pause: float) -> dict[str, Any]:
    import torch
    from torch.distributed import ReduceOp, TCPStore

    from tests.gpu.device import DEVICE, settled_mb
    from torchft import process_group

    torch.cuda.set_device(DEVICE)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    small = torch.ones(16, device=DEVICE)
    large = torch.ones(LARGE_BYTES // 4, device=DEVICE)
    buckets = [torch.ones(BUCKET_BYTES // 4, device=DEVICE) for _ in range(STEP_BUCKETS)]
    time.sleep(RETURNED_S)
    before = settled_mb()
    group: Any = getattr(process_group, name)(timeout=TIMEOUT, **settings) if name else PyTorch(TIMEOUT)
    number = 0

    def reconfigure() -> None:
        nonlocal number
        number += 1
        where = f"localhost:{store.port}/{number}"
        if name:
            process_group.reconfigure_with_store(group, where, 0, 1, TIMEOUT)
        else:
            group.connect(where)
        finish(small)

    def finish(tensor: torch.Tensor) -> None:
        group.allreduce([tensor], ReduceOp.SUM).wait()
        torch.cuda.synchronize()

    def step() -> None:
        for work in [group.allreduce([bucket], ReduceOp.SUM) for bucket in buckets]:
            work.wait()

    reconfigure()
    # Wait until the standby worker has started, too: its memory counts.
    time.sleep(4 * pause)
    device_mb = settled_mb() - before

    issued = []
    for _ in range(500):
        began = time.perf_counter()
        work = group.allreduce([small], ReduceOp.SUM)
        issued.append(time.perf_counter() - began)
        work.wait()
        torch.cuda.synchronize()
    done = times(lambda: finish(small), 500)
    large_done = times(lambda: finish(large), 50)
    host, whole = [], []
    for _ in range(50):
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - began)
    reconfigured, aborted = [], []
    for _ in range(rounds):
        # In a job, there are steps between two quorums, in which the next worker can start.
        time.sleep(pause)
        reconfigured += times(reconfigure, 1)
        aborted += times(group.abort, 1)
    return {
        "issue_us": 1e6 * statistics.median(issued),
        "done_us": 1e6 * statistics.median(done),
        "large_ms": 1e3 * statistics.median(large_done),
        "step_host_ms": 1e3 * statistics.median(host),
        "step_ms": 1e3 * statistics.median(whole),
        "reconfigure_ms": 1e3 * statistics.median(reconfigured),
        "abort_ms": 1e3 * statistics.median(aborted),
        "device_mb": device_mb,
    }


def times(call: Callable[[], object], count: int) -> list[float]:
    """Return the seconds that each of `count` calls took."""
    result = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        result.append(time.perf_counter() - began)
    return result


def killed() -> dict[str, Any]:
    """Return after how many seconds a stream continues that waits for a value which a killed process would
    have written later. None: not within 20 s.
    """
    import torch

    from tests.gpu.device import DEVICE
    from tests.gpu.test_sharing import Pair

    pair = Pair()
    tensor = torch.ones(16, device=DEVICE)
    mark, _ = pair.start([tensor], seconds=60.0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        if not pair.end.follow(mark):
            return {"error": "the driver refuses waits for values"}
    time.sleep(0.5)
    if stream.query():
        return {"error": "the stream did not wait at all"}
    began = time.monotonic()
    pair.kill()
    while time.monotonic() - began < 20:
        if stream.query():
            return {"released_s": time.monotonic() - began}
        time.sleep(0.01)
    return {"released_s": None}


def heal() -> dict[str, Any]:
    """Return the rate of a transfer of a state from the device to the same device, with source and target in
    one process.
    """
    import torch

    from tests.gpu.device import DEVICE
    from torchft.checkpointing.http_transport import HTTPTransport

    class InUpstreamFormat(HTTPTransport[Any]):
        def __init__(self, timeout: timedelta, num_chunks: int) -> None:
            super().__init__(timeout, num_chunks)
            self._native.start = lambda: False

    state = {f"t{i}": torch.ones(HEAL_BYTES // 64, dtype=torch.uint8, device=DEVICE) for i in range(64)}
    torch.cuda.synchronize()
    own = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def gb_s(kind: type[HTTPTransport[Any]], settings: dict[str, Any]) -> float:
        source: Any = kind(TIMEOUT, 0)
        target: Any = HTTPTransport(TIMEOUT, 0)
        seconds = []
        for step in range(4):
            source.send_checkpoint([1], step, state, TIMEOUT)

            def receive(step: int = step) -> None:
                got = target.recv_checkpoint(0, source.metadata(), step, TIMEOUT, **settings)
                # Some transports leave the state on the host: copy it to the device, where it is needed.
                for name, tensor in got.items():
                    if tensor is not own[name]:
                        own[name].copy_(tensor)
                torch.cuda.synchronize()

            seconds += times(receive, 1)
            source.disallow_checkpoint()
        source.shutdown()
        target.shutdown()
        return HEAL_BYTES / 1e9 / statistics.median(seconds[1:])  # the first transfer allocates memory

    if not hasattr(HTTPTransport, "gives_parts"):  # upstream's
        return {"heal_gb_s": gb_s(HTTPTransport, {})}
    from torchft.checkpointing.client.target import TargetState

    in_place = {"target": TargetState(lambda: own, writable=True)}
    return {
        "in_place_gb_s": gb_s(HTTPTransport, in_place),
        "heal_gb_s": gb_s(HTTPTransport, {}),
        "format_gb_s": gb_s(InUpstreamFormat, {}),
    }


def quantization() -> dict[str, Any]:
    """Return the rate of the kernels of quantized collectives, in GB of float32 per second, for a matrix:
    upstream computes each row of a tensor in one program, and needs 700 times as long for the same floats in
    a single row.
    """
    import torch

    from tests.gpu.device import DEVICE
    from torchft import quantization

    tensor = torch.randn(QUANTIZED_SHAPE, device=DEVICE)
    ranks = 2
    buffer = quantization.fused_quantize_into_fp8([tensor], ranks)
    calls: dict[str, Callable[[], object]] = {
        "quantize": lambda: quantization.fused_quantize_into_fp8([tensor], ranks),
        "reduce": lambda: quantization.fused_reduce_fp8([tensor], buffer, ranks, 0),
        "dequantize": lambda: quantization.fused_dequantize_from_fp8([tensor], buffer, ranks),
    }
    figures: dict[str, Any] = {}
    for name, call in calls.items():

        def finished(call: Callable[[], object] = call) -> None:
            call()
            torch.cuda.synchronize()

        times(finished, 3)
        figures[f"{name}_gb_s"] = tensor.nbytes / 1e9 / statistics.median(times(finished, 20))
    return figures


if __name__ == "__main__":
    main()
