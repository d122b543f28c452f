"""The picture in docs/data.md: the loss over the samples of a job, without a failure and with 20 kills.

    python python/bench/loss_picture.py docs/loss.png

Four groups train a small network on scikit-learn's digits, in float64 with SGD and momentum, on plain Gloo.
In the runs with kills, one of the groups 1 to 3 is killed with SIGKILL after every fixed number of group 0's
steps, once all groups participate again, and is restarted some steps later. Ours reads with an
ElasticDataLoader, upstream like its examples: a shard for each group, read from the beginning after a
restart. The picture shows the loss of group 0's weights on all images over the number of samples trained on,
and below it the difference between the two runs.
"""

from __future__ import annotations

import argparse
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
    """One run: samples and loss after each step of group 0, and the number of samples at each kill."""

    samples: list[int]
    losses: list[float]
    kills: list[int]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Draw the loss of a job without a failure, and with 20 kills."
    )
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
        return Run([step["samples"] for step in steps], [step["loss"] for step in steps], killed_at)


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


def differences(calm: Run, killed: Run) -> dict[int, float]:
    """Return the relative differences between the losses of the two runs, by the number of samples before
    each.

    If the run without kills has no step with the same number of samples, which happens with upstream, its
    loss is interpolated between the two nearest steps.
    """
    import numpy as np

    both = {at: loss for at, loss in zip(killed.samples, killed.losses) if at <= calm.samples[-1]}
    there = np.interp(list(both), calm.samples, calm.losses)
    return {at: float(abs(ours - other) / other) for (at, ours), other in zip(both.items(), there)}


def describe(calm: Run, killed: Run) -> str:
    apart = sorted(differences(calm, killed).values())
    return (
        f"{len(calm.losses)} steps without a failure and {len(killed.losses)} with {len(killed.kills)} "
        "kills; "
        f"losses differ by {apart[len(apart) // 2]:.1e} in the median and up to {apart[-1]:.1e}"
    )


def draw(runs: dict[str, tuple[Run, Run]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, apart) = pyplot.subplots(
        2, 2, figsize=(9, 5.4), sharex=True, sharey="row", gridspec_kw={"height_ratios": [3, 2]}
    )
    for upper, lower, (name, (calm, killed)) in zip(losses, apart, runs.items()):
        upper.plot(calm.samples, calm.losses, color="#f2a65a", linewidth=5, label="no failure")
        upper.plot(
            killed.samples, killed.losses, color="#1f3d5c", linewidth=1.2, label=f"{len(killed.kills)} kills"
        )
        upper.set_title(name, fontsize=10)
        between = differences(calm, killed)
        drawn = [max(each, SMALLEST) for each in between.values()]
        lower.plot(list(between), drawn, color="#b0413e", linewidth=1.2)
        lower.text(
            0.98,
            0.5,
            f"at most {max(between.values()):.0e}",
            transform=lower.transAxes,
            ha="right",
            fontsize=9,
        )
        lower.set_xlabel("samples in the weights")
        for axes in (upper, lower):
            axes.set_yscale("log")
            for at in killed.kills:
                axes.axvline(at, ymax=0.04, color="0.4", linewidth=1)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        upper.plot([], [], "|", color="0.4", label="a kill")
        upper.legend(fontsize=8)
    losses[0].set_ylabel("loss over all images")
    apart[0].set_ylabel("difference of the two,\nrelative")
    apart[0].set_ylim(SMALLEST / 100, 3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
