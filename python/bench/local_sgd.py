"""Bytes sent, memory and time of a synchronization of LocalSGD and DiLoCo, compared with upstream.

Two groups as processes on Gloo over loopback, a model of four equal layers. Both sides run the same script, a
process for each group, and take turns.
"""

from __future__ import annotations

from typing import Any

from common import START_TIMEOUT_S, Progress, Side, Spread, Workers, markdown_table, rotated
from processes import HERE, Job

LAYER = 2048  # 16.8 MB per layer
CASE_TIMEOUT_S = 120
# name: fragments, settings of DiLoCo (None: LocalSGD), whether upstream supports it on a CPU
CASES: dict[str, tuple[int, dict[str, Any] | None, bool]] = {
    "LocalSGD": (1, None, True),
    "DiLoCo": (1, {"sync_every": 4}, True),
    "DiLoCo, in buckets": (1, {"sync_every": 4, "use_bucketization": True}, True),
    "4 fragments": (4, {"sync_every": 4}, True),
    "4 fragments, delay 1": (4, {"sync_every": 8, "fragment_sync_delay": 1}, True),
    "the same, alpha 0.5": (
        4,
        {"sync_every": 8, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
        True,
    ),
    "4 fragments, quantized": (4, {"sync_every": 4, "should_quantize": True}, False),
}


def measure(ours: Side, upstream: Side, rounds: int, progress: Progress) -> dict[str, Any]:
    """Return, for each case and side: bytes sent, memory beyond the state (both in models), ms in inner
    steps.
    """
    samples: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in CASES}
    with Job() as job:
        lighthouses = {
            side.name: job.lighthouse(
                side.path, min_replicas=2, join_timeout_ms=10_000, heartbeat_timeout_ms=5000
            )[1]
            for side in (ours, upstream)
        }
        script = HERE.parents[1] / "python" / "bench" / "local_sgd_worker.py"

        def start(side: Side, env: dict[str, str]) -> Workers:
            path, name = side.path, side.name
            return Workers(
                job, [job.python(f"{name}-{g}", script, f"--group={g}", path=path, env=env) for g in (0, 1)]
            )

        sides = {side.name: start(side, {}) for side in (ours, upstream)}
        # These processes return freed memory to the system at once. That costs time, so only their memory is
        # measured.
        exact = {
            side.name: start(side, {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}) for side in (ours, upstream)
        }
        children = [child for of in (sides, exact) for workers in of.values() for child in workers.children]
        job.wait(
            lambda: all(c.of("imported") for c in children), START_TIMEOUT_S, "all have imported torchft"
        )
        for number in range(rounds):
            for name, (fragments, settings, upstream_can) in CASES.items():
                for side in rotated((ours, upstream), number):
                    if side is upstream and not upstream_can:
                        continue
                    for workers, figures in ((sides, ("sent", "ms")), (exact, ("peak",))):
                        ends = _run(
                            job,
                            workers[side.name],
                            lighthouse=lighthouses[side.name],
                            name=f"{side.name}_{name}_{number}_{figures[0]}".replace(" ", "_"),
                            fragments=fragments,
                            layer=LAYER,
                            syncs=3,
                            settings=settings,
                        )
                        kept = samples[name].setdefault(side.name, {})
                        for figure in figures:
                            kept.setdefault(figure, []).extend(end[figure] for end in ends)
            progress(f"local_sgd, round {number + 1}/{rounds}")
    return {
        "rounds": rounds,
        "model_mb": 4 * LAYER * LAYER * 4 / 1e6,
        "cases": {
            name: {side: {f: vars(Spread.of(v)) for f, v in kept.items()} for side, kept in of.items()}
            for name, of in samples.items()
        },
    }


def _run(job: Job, workers: Workers, **command: Any) -> list[dict[str, Any]]:
    before = [len(child.of("case")) for child in workers.children]
    for child in workers.children:
        child.send(do="case", **command)
    job.wait(
        lambda: all(len(c.of("case")) > n for c, n in zip(workers.children, before)),
        CASE_TIMEOUT_S,
        command["name"],
    )
    return [child.of("case")[-1] for child in workers.children]


def tables(result: dict[str, Any], ours: str, upstream: str) -> str:
    """Return the result as Markdown."""
    rows = []
    for name in CASES:  # in this order: a name may refer to the one before
        sides, row = result["cases"][name], [name]
        for figure in ("peak", "ms"):  # both send the same: the page says how much
            for side in (ours, upstream):
                if side not in sides:
                    row.append("needs a GPU")
                elif figure == "ms":
                    row.append(Spread(**sides[side][figure]).text(0))
                else:  # equal in each round
                    row.append(f"{sides[side][figure]['median']:.2f}")
        rows.append(row)
    head = ["case", f"memory, models: {ours}", upstream, f"ms: {ours}", upstream]
    return markdown_table(head, rows)
