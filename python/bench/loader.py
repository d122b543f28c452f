"""The cost of an ElasticDataLoader without changes of membership, and of waiting for the quorum before the
step.

Throughput: two replica groups train with torchft on Gloo, with two loader processes each. One job reads its
batches with an ElasticDataLoader, the other with PyTorch's DataLoader and DistributedSampler; they take
turns. Two more jobs do so with a stream of 16 shards, which the DataLoader's workers divide. Order: a step
requests its quorum at its beginning, and waits for it in the first allreduce (upstream) or at once, like the
loader. Both orders run in the same processes, in turns.
"""

from __future__ import annotations

from typing import Any

from common import (
    START_TIMEOUT_S,
    Progress,
    Side,
    Spread,
    Workers,
    markdown_table,
    rotated,
    start_groups,
    verdict,
)
from processes import Job

GOAL_THROUGHPUT = 0.98
GOAL_ORDER = 1.01
BATCH = 64  # samples per group
COMMAND_TIMEOUT_S = 120
COMPUTE_MS = {"0": 200, "100": 10}  # milliseconds of computation, and the number of such steps in a round
ELASTIC, PLAIN = "ElasticDataLoader", "DataLoader"
STREAM, PLAIN_STREAM = "ElasticDataLoader, stream", "DataLoader, stream"


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress, steps: int = 20) -> dict[str, Any]:
    """Return step times in milliseconds, and ratios within each round. Upstream has neither feature."""
    with Job() as job:
        progress("loader: starting 10 processes, and 16 that read")
        kinds = (ELASTIC, PLAIN, STREAM, PLAIN_STREAM)
        jobs = {kind: _job(job, ours) for kind in (*kinds, "order")}
        for kind in kinds:
            elastic, stream = kind in (ELASTIC, STREAM), kind in (STREAM, PLAIN_STREAM)
            jobs[kind].do(START_TIMEOUT_S, do="data", elastic=elastic, batch=BATCH, stream=stream)
            jobs[kind].do(START_TIMEOUT_S, do="model", plain=False, settings={})
            _train(jobs[kind], 5)
        for compute in COMPUTE_MS:
            _ordered(jobs["order"], 5, compute, True)

        read: dict[str, list[float]] = {kind: [] for kind in kinds}
        order: dict[str, dict[bool, list[float]]] = {compute: {True: [], False: []} for compute in COMPUTE_MS}
        for number in range(rounds):
            for kind in rotated(list(read), number):
                read[kind].append(_train(jobs[kind], steps))
            for compute, count in COMPUTE_MS.items():
                for first in rotated([True, False], number):
                    order[compute][first].append(_ordered(jobs["order"], count, compute, first))
            progress(
                f"loader, round {number + 1}/{rounds}: "
                + ", ".join(f"{kind} {values[-1]:.1f} ms" for kind, values in read.items())
                + "".join(
                    f", {c} ms: {order[c][True][-1]:.2f} for {order[c][False][-1]:.2f} ms" for c in order
                )
            )
    return {
        "rounds": rounds,
        "steps_a_round": steps,
        "throughput": {
            "ms": {kind: vars(Spread.of(values)) for kind, values in read.items()},
            "ratio": vars(Spread.of(p / e for p, e in zip(read[PLAIN], read[ELASTIC]))),
            "stream_ratio": vars(Spread.of(p / e for p, e in zip(read[PLAIN_STREAM], read[STREAM]))),
        },
        "order": {
            compute: {
                "first_ms": vars(Spread.of(both[True])),
                "later_ms": vars(Spread.of(both[False])),
                "ratio": vars(Spread.of(a / b for a, b in zip(both[True], both[False]))),
            }
            for compute, both in order.items()
        },
    }


def _job(job: Job, side: Side) -> Workers:
    workers = start_groups(job, side, 2, 1)
    _, address = job.lighthouse(side.path, min_replicas=2, join_timeout_ms=10000, heartbeat_timeout_ms=5000)
    workers.do(START_TIMEOUT_S, do="manager", lighthouse=address)
    return workers


def _train(workers: Workers, steps: int) -> float:
    return _median(workers.do(COMMAND_TIMEOUT_S, do="train_data", count=steps), steps)


def _ordered(workers: Workers, steps: int, compute: str, first: bool) -> float:
    answers = workers.do(
        COMMAND_TIMEOUT_S, do="ordered_steps", count=steps, compute_ms=float(compute), asked_first=first
    )
    return _median(answers, steps)


def _median(answers: list[Any], steps: int) -> float:
    if any(answer["failed"] for answer in answers):
        raise RuntimeError(f"{[answer['failed'] for answer in answers]} of {steps} steps were not committed")
    return Spread.of(t for answer in answers for t in answer["step"]).median


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    read, ratio = result["throughput"]["ms"], Spread(**result["throughput"]["ratio"])
    rows = [
        [
            "with DataLoader; with ElasticDataLoader",
            Spread(**read[PLAIN]).middle(1),
            Spread(**read[ELASTIC]).middle(1),
            f"{ratio.text(3)} of the throughput",
            f">= {GOAL_THROUGHPUT}: {verdict(ratio.median >= GOAL_THROUGHPUT)}",
        ],
    ]
    if "stream_ratio" in result["throughput"]:  # not in results of before
        ratio = Spread(**result["throughput"]["stream_ratio"])
        rows.append(
            [
                "of a stream, with DataLoader; with ElasticDataLoader",
                Spread(**read[PLAIN_STREAM]).middle(1),
                Spread(**read[STREAM]).middle(1),
                f"{ratio.text(3)} of the throughput",
                f">= {GOAL_THROUGHPUT}: {verdict(ratio.median >= GOAL_THROUGHPUT)}",
            ]
        )
    for compute, figures in result["order"].items():
        ratio = Spread(**figures["ratio"])
        rows.append(
            [
                f"of {compute} ms, the quorum awaited in the allreduce; before the first unit",
                Spread(**figures["later_ms"]).middle(),
                Spread(**figures["first_ms"]).middle(),
                f"{ratio.text(3)} of the time",
                f"<= {GOAL_ORDER}: {verdict(ratio.median <= GOAL_ORDER)}",
            ]
        )
    return markdown_table(["a step", "the first, ms", "the second, ms", "ratio", "goal"], rows)
