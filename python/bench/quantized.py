"""Bytes, time and error of an allreduce at full precision and as 8-bit codes.

Three ranks as processes, Gloo on loopback. The bytes sent are the kernel's count for all TCP connections of a
rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import START_TIMEOUT_S, Progress, Side, Spread, Workers, markdown_table, rotated, verdict
from processes import Job, free_port

WORKER = Path(__file__).resolve().parent / "quantized_worker.py"
RANKS = 3
FLOATS = 4_000_000
GOAL = 0.26
TIMEOUT_S = 120


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return a dict from ``package/kind``, such as ``torchft/fp8``, to the figures of an allreduce.

    The figures are ``sent`` (bytes), ``ms`` and ``error`` (relative, of the norm), each for the worst rank of
    a round. If the package refuses the kind, the only entry is ``refused``, with its error message.
    """
    samples: dict[str, dict[str, list[float]]] = {}
    refused: dict[str, str] = {}
    with Job() as job:
        progress(f"quantized: starting {2 * RANKS} processes")
        sides = {side.name: _start(job, side) for side in (ours, upstream)}
        kinds = [(side.name, kind) for side in (ours, upstream) for kind in ("full", "fp8", "int8")]
        for number in range(rounds + 1):  # the first round is a warm-up
            for name, kind in rotated(kinds, number):
                key = f"{name}/{kind}"
                if key in refused:
                    continue
                answers = sides[name].do(TIMEOUT_S, do="reduce", kind=kind, floats=FLOATS)
                if "refused" in answers[0]:
                    refused[key] = answers[0]["refused"]
                elif number:
                    for what in ("sent", "ms", "error"):
                        value = max(answer[what] for answer in answers)
                        samples.setdefault(key, {}).setdefault(what, []).append(value)
            progress(f"quantized, round {number}/{rounds}")
    measured = {key: {what: vars(Spread.of(v)) for what, v in mine.items()} for key, mine in samples.items()}
    return {**measured, **{key: {"refused": why} for key, why in refused.items()}}


def _start(job: Job, side: Side) -> Workers:
    env = {"PEERS_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    children = [
        job.python(f"{side.name}-{rank}", WORKER, path=side.path, env={**env, "RANK": str(rank)})
        for rank in range(RANKS)
    ]
    job.wait(lambda: all(c.of("connected") for c in children), START_TIMEOUT_S, f"{side.name} is connected")
    return Workers(job, children)


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for key, figures in result.items():
        name, _, kind = key.rpartition("/")
        if "refused" in figures:
            continue  # upstream quantizes on GPUs only; docs/internals/benchmarks.md says so
        sent, ms, error = (Spread(**figures[what]) for what in ("sent", "ms", "error"))
        share = sent.median / result[f"{ours}/full"]["sent"]["median"]
        goal = f" {verdict(share <= GOAL)}" if name == ours and kind != "full" else ""
        megabytes = f"{sent.median * 1e-6:.2f}"
        rows.append([name, kind, megabytes, f"{share:.3f}{goal}", ms.text(0), f"{error.median:.1e}"])
    share_of = f"share of full (goal <= {GOAL:g})"
    return markdown_table(
        ["package", "sent as", "a rank sends, MB", share_of, "ms", "relative error (norm)"], rows
    )
