"""Throughput of training with torchft beside plain PyTorch: DistributedDataParallel on Gloo, two processes.

The batch is chosen so that a plain step takes about 100 ms on this machine. Plain PyTorch, ours and published take
turns, so the ratios compare steps that ran within seconds of each other.
"""

from __future__ import annotations

from typing import Any

from common import START_TIMEOUT_S, Progress, Side, Spread, Workers, markdown_table, rotated, start_groups, verdict
from processes import Job

GOAL = 0.97
TARGET_MS = 100.0
COMMAND_TIMEOUT_S = 180


def measure(ours: Side, published: Side, rounds: int, progress: Progress, steps: int = 20) -> dict[str, Any]:
    """Return the step times in milliseconds and each side's throughput as a share of plain PyTorch's."""
    plain = Side("plain", ours.path)  # imports no torchft
    with Job() as job:
        progress("throughput: starting 6 processes")
        jobs: dict[str, Workers] = {}
        for side in (plain, ours, published):
            jobs[side.name] = workers = start_groups(job, side, 2, 1)
            if side is plain:
                workers.do(START_TIMEOUT_S, do="peers")
            else:
                _, address = job.lighthouse(side.path, min_replicas=2, join_timeout_ms=10000, heartbeat_timeout_ms=5000)
                workers.do(START_TIMEOUT_S, do="manager", lighthouse=address)
            parameters = workers.do(START_TIMEOUT_S, do="model", plain=side is plain)[0]["parameters"]

        batch = _calibrate(jobs["plain"])
        progress(f"throughput: a batch of {batch} for a plain step of about {TARGET_MS:g} ms")
        for workers in jobs.values():
            _train(workers, 5, batch)

        samples: dict[str, list[float]] = {name: [] for name in jobs}
        for number in range(rounds):
            for name in rotated(list(jobs), number):
                samples[name].append(_train(jobs[name], steps, batch))
            progress(
                f"throughput, round {number + 1}/{rounds}: "
                + ", ".join(f"{name} {values[-1]:.1f} ms" for name, values in samples.items())
            )
    return {
        "rounds": rounds,
        "steps_a_round": steps,
        "parameters": parameters,
        "batch": batch,
        "ms": {name: vars(Spread.of(values)) for name, values in samples.items()},
        "share_of_plain": {
            side.name: vars(Spread.of(p / t for p, t in zip(samples["plain"], samples[side.name])))
            for side in (ours, published)
        },
    }


def _train(workers: Workers, steps: int, batch: int) -> float:
    """Train and return the median step in milliseconds."""
    answers = workers.do(COMMAND_TIMEOUT_S, do="train", count=steps, batch=batch)
    if any(answer["failed"] for answer in answers):
        raise RuntimeError(f"{[answer['failed'] for answer in answers]} of {steps} steps were not committed")
    return Spread.of(t for answer in answers for t in answer["step"]).median


def _calibrate(plain: Workers) -> int:
    """Return the batch for which a plain step takes about TARGET_MS: two sizes give the line it lies on."""
    small, large = 16, 144
    _train(plain, 3, small)
    # The quickest of several, in turns: what else the machine did at that moment is not part of the line.
    pairs = [(_train(plain, 5, small), _train(plain, 5, large)) for _ in range(4)]
    at_small, at_large = (min(times) for times in zip(*pairs))
    if at_small >= TARGET_MS or at_large <= at_small:
        raise RuntimeError(
            f"a plain step takes {at_small:.0f} ms with a batch of {small} and {at_large:.0f} ms with one of {large}: "
            "this machine is too slow or too busy for a step of 100 ms"
        )
    return round(small + (TARGET_MS - at_small) * (large - small) / (at_large - at_small))


def tables(result: dict[str, Any], ours: str, published: str) -> str:
    """Return the result as Markdown."""
    rows = [["plain PyTorch", Spread(**result["ms"]["plain"]).text(1), "1"]]
    for name in (ours, published):
        share = Spread(**result["share_of_plain"][name])
        goal = f" (goal >= {GOAL}: {verdict(share.median >= GOAL)})" if name == ours else ""
        rows.append([name, Spread(**result["ms"][name]).text(1), share.text(3) + goal])
    return markdown_table(["package", "step, ms", "throughput as a share of plain"], rows)
