"""All groups of a job are killed at once, with their launcher and the lighthouse, and the job is started
again: `make train-total`.

Nothing is written to a disk. The state is in shared memory, which the keeper of this host keeps, the one
process that is not killed. Prints which steps were made again, and the time to the first commit. Ends with
status 1 if the job begins anew, or if anything else fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchft import _keeper
from torchft._lighthouse_http import HttpLighthouse
from torchft.launch import process_tree
from torchft.launch.job import status

TRAIN = Path(__file__).resolve().parents[2] / "train_ddp.py"


class Failed(Exception):
    """The demonstration cannot go on; the message has the reason."""


class Run:
    """A `torchft run` of the script."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.folder = folder
        self.began = time.monotonic()
        self._deadline = self.began + args.time_limit
        command = [sys.executable, "-m", "torchft.cli", "run", "--replicas", "2", "--min-replicas", "2"]
        command += ["--bind", "127.0.0.1:0", "--log-dir", str(folder)]
        self._output = folder.with_suffix(".txt")
        command += [str(TRAIN), "--steps", str(args.steps), "--device", args.device]
        self.process = process_tree.start(command, self._output)
        self.lighthouse = self.wait(self._address, "the lighthouse")

    def _address(self) -> str:
        found = re.search(r"^lighthouse: (\S+)$", self._output.read_text(), re.MULTILINE)
        return found[1] if found else ""

    def step(self) -> int:
        """The step of the quorum; 0 before the first."""
        shown = status(self.lighthouse)
        return int(shown["max_step"]) if shown.get("quorum_id") else 0

    def quorum(self) -> dict[str, Any]:
        """The event of the first quorum; empty before."""
        events = HttpLighthouse(self.lighthouse).get("/api/v1/history")["events"]
        return next(({"step": 0, **event} for event in events if event["kind"] == "quorum"), {})

    def wait(self, what: Callable[[], object], name: str) -> str:
        """Waits for a true value, and returns it as text."""
        while not (found := what()):
            if self.process.poll() is not None or time.monotonic() > self._deadline:
                raise Failed(f"{name} did not come; the logs are in {self.folder}")
            time.sleep(0.05)
        return str(found)


def main() -> int:
    args = parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    root = Path(tempfile.mkdtemp(prefix="torchft-total-", dir=memory))
    logs = Path(tempfile.mkdtemp(prefix="torchft-total-logs-"))
    os.environ[_keeper.ROOT_ENV] = str(root)
    runs: list[Run] = []
    try:
        show(args, root, logs, runs)
    except Failed as error:
        print(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; the logs are in {logs}")
        return 130
    finally:
        for run in runs:
            process_tree.kill_tree(run.process)
        if _keeper.running(root):
            os.kill(keeper(root), signal.SIGTERM)
        shutil.rmtree(root, ignore_errors=True)
    shutil.rmtree(logs)
    return 0


def show(args: argparse.Namespace, root: Path, logs: Path, runs: list[Run]) -> None:
    print(f"training on two groups, until step {args.kill_at}", flush=True)
    runs.append(first := Run(args, logs / "first"))
    first.wait(lambda: first.step() >= args.kill_at, f"step {args.kill_at}")
    reached = first.step()
    killed = process_tree.kill_tree(first.process)
    survivor = keeper(root)
    while process_tree.alive(killed):  # until the kernel has ended them
        time.sleep(0.01)
    if not process_tree.alive([survivor]):
        raise Failed(f"the keeper, process {survivor}, has ended; its log: {root / 'keeper.log'}")
    print(f"step {reached}: {len(killed)} processes got SIGKILL: launcher, lighthouse, agents and trainers.")
    print(f"Left is the keeper, process {survivor}, and in memory:", flush=True)
    subprocess.run([sys.executable, "-m", "torchft.cli", "snapshots", "--here"], check=True)
    print("starting it again", flush=True)
    runs.append(second := Run(args, logs / "second"))
    second.wait(second.quorum, "a quorum")
    found = int(second.quorum()["step"])
    second.wait(lambda: second.step() > found, "a commit")
    seconds = time.monotonic() - second.began
    if not found:
        raise Failed("the job began anew")
    again = max(reached - found, 0)
    print(f"It goes on from step {found}: {again} step{'' if again == 1 else 's'} made again.")
    print(
        f"The first commit came {seconds:.1f} s after the start of the launcher, most of which PyTorch takes."
    )


def keeper(root: Path) -> int:
    """The process id of the keeper."""
    return int((root / "keeper.lock").read_text().split()[1])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000, help="of the training, which does not end")
    parser.add_argument("--kill-at", type=int, default=300, help="step at which all is killed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--time-limit", type=float, default=180.0, help="seconds for each of the two runs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
