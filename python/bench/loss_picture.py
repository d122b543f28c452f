"""The picture in docs/data.md: how far 20 kills move the weights of a job.

    python python/bench/loss_picture.py docs/loss.png

Four groups train a small network on scikit-learn's digits, in float64 with SGD and momentum, on plain Gloo.
In the runs with kills, one of the groups 1 to 3 is killed with SIGKILL after every fixed number of group 0's
steps, once all groups participate again, and is restarted some steps later. Ours reads with an
ElasticDataLoader, upstream like its examples: a shard for each group, read from the beginning after a
restart. The picture shows the distance of group 0's weights from those of a run without kills after the same
number of samples, relative to their norm.
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import REPOSITORY, START_TIMEOUT_S, Side
from processes import Child, Job
from upstream import REQUIREMENTS, install

WORKER = Path(__file__).resolve().parent / "loss_worker.py"
GROUPS = 4
EPOCHS = 18
STEPS = 29 * EPOCHS  # steps, of 64 samples each while no group is missing
KILLS = 20
EVERY = STEPS // (KILLS + 2)
AWAY = 6  # steps of group 0 without the killed group
WAIT_S = 300
SMALLEST = 1e-17  # smallest difference that is drawn, because 0 has no logarithm


@dataclass(frozen=True)
class Run:
    """One run: samples and weights after each step of group 0, and the number of samples at each kill."""

    samples: list[int]
    weights: list[bytes]
    kills: list[int]


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw how far 20 kills move the weights of a job.")
    parser.add_argument("picture", type=Path, help="path of the PNG file")
    parser.add_argument("--upstream", choices=sorted(REQUIREMENTS), default="nightly")
    args = parser.parse_args()
    sides = [
        Side("torchft with ElasticDataLoader", REPOSITORY),
        Side("upstream", install(args.upstream)),
    ]
    runs = {}
    for elastic, side in zip((True, False), sides):
        runs[side.name] = measure(side, elastic, 0), measure(side, elastic, KILLS)
        print(f"{side.name}: {describe(*runs[side.name])}", flush=True)
    draw(runs, args.picture)
    print(f"drawn in {args.picture}")
    return 0


def measure(side: Side, elastic: bool, kills: int) -> Run:
    """Train to the end, with this many kills."""
    with Job() as job, tempfile.TemporaryDirectory() as folder:
        go = Path(folder) / "go"
        _, address = job.lighthouse(
            side.path, min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=1000
        )
        children = [_start(job, side, number) for number in range(GROUPS)]
        job.wait(
            lambda: all(child.of("imported") for child in children), START_TIMEOUT_S, "PyTorch is imported"
        )
        for child in children:
            _train(child, address, elastic, go)
        job.wait(lambda: all(child.of("manager") for child in children), START_TIMEOUT_S, "all are there")
        go.touch()
        first, *others = children
        killed_at: list[int] = []
        for kill in range(kills):
            victim, at = others[kill % len(others)], EVERY * (kill + 1)
            if not _reaches(job, first, at, together=True):
                break
            _tell(job, victim, do="kill")
            last = first.of("step")[-1]
            killed_at.append(last["samples"])
            _reaches(job, first, last["step"] + AWAY)
            _train(victim, address, elastic, go)
        job.wait(lambda: first.of("ended"), WAIT_S, "the end")
        for child in others:
            child.expected_to_live = False
        steps = first.of("step")
        weights = [base64.b64decode(step["weights"]) for step in steps]
        return Run([step["samples"] for step in steps], weights, killed_at)


def _start(job: Job, side: Side, number: int) -> Child:
    env = {"REPLICA_GROUP_ID": str(number), "NUM_REPLICA_GROUPS": str(GROUPS), "EPOCHS": str(EPOCHS)}
    return job.python(f"{side.name}-{number}", WORKER, path=side.path, env=env)


def _train(child: Child, address: str, elastic: bool, go: Path) -> None:
    child.send(do="start", lighthouse=address, elastic=elastic, go=str(go))


def _tell(job: Job, child: Child, **command: Any) -> None:
    before = len(child.of(command["do"]))
    child.send(**command)
    job.wait(lambda: len(child.of(command["do"])) > before, WAIT_S, f"{child.name}: {command['do']}")


def _reaches(job: Job, child: Child, step: int, together: bool = False) -> bool:
    """Return whether the job reaches a step, with all groups if requested, before its end."""

    def there() -> bool:
        last = child.of("step")[-1:]
        return bool(last) and last[0]["step"] >= step and (not together or last[0]["groups"] == GROUPS)

    job.wait(lambda: child.of("ended") or there(), WAIT_S, f"step {step}")
    return not child.of("ended")


def distances(calm: Run, killed: Run) -> dict[int, float]:
    """Return the distance of the weights of the two runs, relative to their norm, by the number of samples.

    If the run without kills has no step with the same number of samples, which happens with upstream, the
    step with the nearest number stands for it.
    """
    import numpy as np

    found = {}
    for at, weights in zip(killed.samples, killed.weights):
        nearest = min(range(len(calm.samples)), key=lambda i: abs(calm.samples[i] - at))
        one, other = np.frombuffer(weights), np.frombuffer(calm.weights[nearest])
        found[at] = float(np.linalg.norm(one - other) / np.linalg.norm(other))
    return found


def describe(calm: Run, killed: Run) -> str:
    return (
        f"{len(calm.samples)} steps without a failure, {len(killed.samples)} with {len(killed.kills)} kills; "
        f"the weights are at most {max(distances(calm, killed).values()):.1e} apart"
    )


def draw(runs: dict[str, tuple[Run, Run]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 2.8), sharex=True, sharey=True)
    for axes, (name, (calm, killed)) in zip(panels, runs.items()):
        apart = distances(calm, killed)
        axes.plot(
            list(apart), [max(each, SMALLEST) for each in apart.values()], color="#b0413e", linewidth=1.2
        )
        axes.text(
            0.98, 0.5, f"at most {max(apart.values()):.0e}", transform=axes.transAxes, ha="right", fontsize=9
        )
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("samples in the weights")
        axes.set_yscale("log")
        for at in killed.kills:
            axes.axvline(at, ymax=0.06, color="0.4", linewidth=1)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels[0].set_ylabel("distance of the weights,\nrelative")
    panels[0].set_ylim(SMALLEST / 100, 3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
