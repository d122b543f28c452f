"""The throughput of training with torchft compared with plain PyTorch: DistributedDataParallel on Gloo, two
processes.

The batch is chosen so that a plain step takes about 100 ms on this machine. Plain PyTorch, ours and upstream
take turns, so the ratios compare steps that ran within seconds of each other.

Two settings determine how the gradients are reduced, and their defaults differ. `gradient_as_bucket_view`
saves a copy: True in ours, False in the others. `find_unused_parameters` keeps the buckets in the order of
the parameters: here a bucket of 16.5 MB is reduced while the rest of the backward pass runs, and one of 2.4
MB after it; without the setting the small one comes first and the large one last. Ours always has these
buckets, and upstream always sets it. So plain PyTorch runs with the settings of each package, and with its
own defaults.
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

GOAL = 0.97
TARGET_MS = 100.0
COMMAND_TIMEOUT_S = 180
PLAIN = "plain PyTorch"
DEFAULTS = "plain PyTorch, its defaults"


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress, steps: int = 20) -> dict[str, Any]:
    """Return, per `gradient_as_bucket_view` and side, step times in milliseconds and shares of plain
    throughput.
    """
    plain, defaults = Side(PLAIN, ours.path), Side(DEFAULTS, ours.path)  # these import no torchft
    with Job() as job:
        progress("throughput: starting 14 processes")
        jobs: dict[tuple[str, bool], Workers] = {}
        for views, side in [
            (False, defaults),
            *((views, side) for views in (True, False) for side in (plain, ours, upstream)),
        ]:
            settings = {"gradient_as_bucket_view": views}
            jobs[side.name, views] = workers = start_groups(job, side, 2, 1)
            if side in (plain, defaults):
                settings["find_unused_parameters"] = side is plain
                workers.do(START_TIMEOUT_S, do="peers")
            else:
                _, address = job.lighthouse(
                    side.path, min_replicas=2, join_timeout_ms=10000, heartbeat_timeout_ms=5000
                )
                workers.do(START_TIMEOUT_S, do="manager", lighthouse=address)
            model = workers.do(
                START_TIMEOUT_S, do="model", plain=side in (plain, defaults), settings=settings
            )[0]

        batch = _calibrate(jobs[DEFAULTS, False])
        progress(f"throughput: a batch of {batch} for a plain step of about {TARGET_MS:g} ms")
        for workers in jobs.values():
            _train(workers, 5, batch)

        samples: dict[tuple[str, bool], list[float]] = {key: [] for key in jobs}
        for number in range(rounds):
            for key in rotated(list(jobs), number):
                samples[key].append(_train(jobs[key], steps, batch))
            progress(
                f"throughput, round {number + 1}/{rounds}: "
                + ", ".join(
                    f"{name} {views} {values[-1]:.1f} ms" for (name, views), values in samples.items()
                )
            )

    def row(name: str, views: bool) -> dict[str, Any]:
        mine = samples[name, views]
        return {
            "ms": vars(Spread.of(mine)),
            "share_of_plain": vars(Spread.of(p / t for p, t in zip(samples[PLAIN, views], mine))),
            "share_of_defaults": vars(Spread.of(p / t for p, t in zip(samples[DEFAULTS, False], mine))),
        }

    return {
        "rounds": rounds,
        "steps_a_round": steps,
        "parameters": model["parameters"],
        "batch": batch,
        "defaults_ms": vars(Spread.of(samples[DEFAULTS, False])),
        "gradient_as_bucket_view": {
            str(views): {side.name: row(side.name, views) for side in (plain, ours, upstream)}
            for views in (True, False)
        },
    }


def _train(workers: Workers, steps: int, batch: int) -> float:
    """Train and return the median step in milliseconds."""
    answers = workers.do(COMMAND_TIMEOUT_S, do="train", count=steps, batch=batch)
    if any(answer["failed"] for answer in answers):
        raise RuntimeError(f"{[answer['failed'] for answer in answers]} of {steps} steps were not committed")
    return Spread.of(t for answer in answers for t in answer["step"]).median


def _calibrate(plain: Workers) -> int:
    """Return the batch size for which a plain step takes about TARGET_MS, interpolated between two sizes."""
    small, large = 16, 144
    _train(plain, 3, small)
    # The fastest of several runs, in turns, so that other load on the machine does not distort the
    # interpolation.
    pairs = [(_train(plain, 5, small), _train(plain, 5, large)) for _ in range(4)]
    at_small, at_large = (min(times) for times in zip(*pairs))
    if at_small >= TARGET_MS or at_large <= at_small:
        raise RuntimeError(
            f"a plain step takes {at_small:.0f} ms with a batch of {small} and {at_large:.0f} ms with one "
            f"of {large}: "
            "this machine is too slow or too busy for a step of 100 ms"
        )
    return round(small + (TARGET_MS - at_small) * (large - small) / (at_large - at_small))


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for views, sides in result["gradient_as_bucket_view"].items():
        for name in (PLAIN, ours, upstream):
            figures = {key: Spread(**spread) for key, spread in sides[name].items()}
            share = figures["share_of_plain"]
            goal = f" {verdict(share.median >= GOAL)}" if name == ours else ""
            same = "1" if name == PLAIN else share.text(3) + goal
            rows.append([name, views, figures["ms"].middle(1), same])
    head = ["package", "gradient_as_bucket_view", "step, ms"]
    return markdown_table([*head, f"share of plain (goal >= {GOAL})"], rows)
