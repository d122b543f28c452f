"""The number of groups that `torchft run --scale auto` finds on this machine, and the speed with all of them.

    python python/bench/scale.py --replicas 2:8

The script is train_ddp.py with a global batch of 512 images; each group has one thread. After the search all
groups of the range train for a while, by `torchft scale`. The search takes about a minute for each number
that it tries, and all of it some five to ten minutes, on a machine that has nothing else to do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import verdict
from processes import clean_environment, ours_path

from torchft._lighthouse_http import HttpLighthouse
from torchft.cli.arguments import replicas
from torchft.launch import control, process_tree
from torchft.scaling.loop import seen
from torchft.scaling.policy import SETTLE_SEC

SCRIPT = ["train_ddp.py", "--steps", "100000000", "--batch-size", "512"]
MEASURE_S = 40.0
START_S = 300.0  # for all groups to train, and then for MEASURE_S
DECIDED = r"^(\d+) groups? stay:"


class Run:
    """A `torchft run --scale auto` in a folder of its own."""

    def __init__(self, folder: Path, replicas: str) -> None:
        self._output, root = folder / "output", ours_path()
        command = [sys.executable, "-m", "torchft.cli", "run", "--replicas", replicas, "--scale", "auto"]
        self._process = process_tree.start(
            [*command, "--log-dir", str(folder), str(root / SCRIPT[0]), *SCRIPT[1:]],
            self._output,
            {**clean_environment(root), "TORCHFT_SNAPSHOTS": "0"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def shows(self, pattern: str, within: float) -> str:
        """Waits for a line of its output. Returns the first group of the pattern."""
        until = time.monotonic() + within
        while not (found := re.search(pattern, self._output.read_text(), re.MULTILINE)):
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{pattern!r} was not shown:\n{self._output.read_text()[-3000:]}")
            time.sleep(0.5)
        return found[1]

    def end(self) -> None:
        if self._process.poll() is None:
            os.kill(self.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
        process_tree.kill_tree(self._process)


def rate(lighthouse: HttpLighthouse, groups: int) -> float:
    """Steps per second over MEASURE_S in which this many groups train in one quorum that has settled."""
    until, quorum, began, first = time.monotonic() + START_S, -1, 0.0, 0
    while (now := time.monotonic()) < until:
        shown = seen(lighthouse.get("/status"), groups)
        if shown.groups != groups or shown.quorum != quorum or now < began:
            if shown.quorum != quorum:
                began = now + SETTLE_SEC
            quorum, first = (shown.quorum if shown.groups == groups else -1), shown.step
        elif now > began + MEASURE_S:
            return (shown.step - first) / (now - began)
        time.sleep(0.2)
    raise SystemExit(f"{groups} groups did not train for {MEASURE_S:g} s within {START_S:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=replicas, default=(2, 8), metavar="MIN:MAX", help="of the search")
    parser.add_argument("--minutes", type=float, default=20.0, help="for the search, at most")
    args = parser.parse_args()
    least, most = args.replicas
    with tempfile.TemporaryDirectory(prefix="torchft-scale-") as folder:
        run = Run(Path(folder), f"{least}:{most}")
        try:
            lighthouse = HttpLighthouse(run.shows(r"^lighthouses?: (\S+)", 60.0))
            began = time.monotonic()
            found = int(run.shows(DECIDED, 60 * args.minutes))
            print(f"found {found} of {least} to {most} groups in {time.monotonic() - began:.0f} s:")
            for event in lighthouse.get("/api/v1/history")["events"]:
                if event["kind"] == "scaled":
                    print(event["reason"], flush=True)
            best = rate(lighthouse, found)
            print(f"{found} groups: {best:.3g} steps/s", flush=True)
            control.scale(most, run.pid)
            all_ = rate(lighthouse, most)
            print(f"{most} groups: {all_:.3g} steps/s, {all_ / best:.2f} times as many", verdict(all_ < best))
        finally:
            run.end()


if __name__ == "__main__":
    main()
