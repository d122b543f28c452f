"""The cost of a reproducible sum of gradients, compared with a plain sum.

    python python/bench/exact_sum.py              # 4 million elements, 8 rounds

Two ranks as processes, Gloo on loopback, one thread each. Plain: the gradient of a unit is added in float32,
and the sum reduced in one flat tensor. Exact: torchft.data.exact_sum. Bytes are counted by the kernel, on all
TCP connections of a rank.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from common import REPOSITORY, START_TIMEOUT_S, Spread, Workers, free_port, markdown_table, rotated
from processes import Job

RANKS = 2
TENSORS = (1, 160)
TIMEOUT_S = 120
FIGURES = {
    "add": "add a unit, ns an element",
    "read": "sum to gradients, ns an element",
    "reduce": "allreduce, ms",
    "sent": "a rank sends, MB",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a reproducible sum of gradients with a plain one.")
    parser.add_argument("--elements", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    if args.elements < max(TENSORS) or args.rounds < 1:
        parser.error(f"allowed are --elements from {max(TENSORS)} and --rounds from 1")
    kinds = [(tensors, kind) for tensors in TENSORS for kind in ("plain", "exact")]
    samples: dict[tuple[int, str], dict[str, list[float]]] = {
        each: {what: [] for what in FIGURES} for each in kinds
    }
    port = str(free_port())
    with Job() as job:
        children = [
            job.python(
                f"rank-{rank}",
                Path(__file__).resolve(),
                path=REPOSITORY,
                env={"PEERS_PORT": port, "WORLD_SIZE": str(RANKS), "RANK": str(rank)},
            )
            for rank in range(RANKS)
        ]
        job.wait(lambda: all(c.of("connected") for c in children), START_TIMEOUT_S, "the ranks are connected")
        workers = Workers(job, children)
        for number in range(args.rounds + 1):  # the first round is a warm-up
            for tensors, kind in rotated(kinds, number):
                answers = workers.do(TIMEOUT_S, do="step", kind=kind, tensors=tensors, elements=args.elements)
                if number:
                    for what, mine in samples[tensors, kind].items():
                        mine.append(max(answer[what] for answer in answers))
    rows = [
        [f"{args.elements:,} in {tensors}", kind, *(Spread.of(values).text(1) for values in mine.values())]
        for (tensors, kind), mine in samples.items()
    ]
    print(markdown_table(["elements in tensors", "sum", *FIGURES.values()], rows))


# Code of a rank


def serve() -> None:
    import torch
    from events import Commands, emit
    from quantized_worker import connect

    torch.set_num_threads(1)
    group = connect()
    emit("connected")
    commands = Commands()
    while True:
        command = commands.next()
        emit("step", **_step(group, command["kind"], command["tensors"], command["elements"]))


def _step(group: Any, kind: str, tensors: int, elements: int) -> dict[str, float]:
    """Run one step with a unit per rank and known scales."""
    import torch
    from quantized_worker import bytes_sent
    from quantized_worker import reduce as allreduce

    from torchft.data.exact_sum import ExactSum

    parameters = [torch.nn.Parameter(torch.zeros(elements // tensors)) for _ in range(tensors)]
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    total = ExactSum(((str(number), parameter) for number, parameter in enumerate(parameters)), max_units=64)
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    views = flat.split([parameter.numel() for parameter in parameters])

    def add() -> None:
        if kind == "exact":
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient
            total.add()
        else:
            for view, gradient in zip(views, gradients):
                view += gradient

    def read(units: int) -> bool:
        if kind == "exact":
            return total.read()
        for parameter, view in zip(parameters, views):
            parameter.grad = view.clone()
        return True

    total.begin()
    add()
    read(1)  # determines the scales
    flat.zero_()
    total.begin()
    allreduce(group, "full", torch.zeros(1))  # a barrier
    times = [time.perf_counter()]
    add()
    times.append(time.perf_counter())
    allreduce(group, "full", torch.zeros(1))
    before, began = bytes_sent(), time.perf_counter()
    for buffer in total.buffers if kind == "exact" else [flat]:
        allreduce(group, "full", buffer)
    reduced, sent = time.perf_counter() - began, bytes_sent() - before
    times.append(time.perf_counter())
    if not read(RANKS):
        raise RuntimeError("the scales do not fit")
    times.append(time.perf_counter())
    return {
        "add": (times[1] - times[0]) / elements * 1e9,
        "read": (times[3] - times[2]) / elements * 1e9,
        "reduce": reduced * 1e3,
        "sent": sent / 1e6,
    }


if __name__ == "__main__":
    sys.exit(serve() if "RANK" in os.environ else main())
