"""A rank of a replica group that kills or stops itself at a named phase of its next step, on command.

Its model is small, and its gradients depend on the step and the group only, so that the parent can compute
the weights from the participants of each step.

Commands: {"do": "join", "lighthouse": ADDRESS} makes the Manager and trains; {"do": "strike", "phase": NAME,
"signal": NUMBER} sends itself the signal when it next reaches the phase, with "step" that of this step;
{"do": "work", "slower": FACTOR} computes longer from now on; {"do": "finish", "step": N} ends after step N.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import logging
import os
import signal
import threading
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from chaos_leaks import Leaks, left_over, threads
from events import Commands, emit
from torch.distributed import PrefixStore, TCPStore

BUCKETS = 3
SNAPSHOTS = 4  # steps between two copies of the state in memory
# Bytes per second of a source whose state arrives in parts, over about ten steps.
ALONG_RATE = 20_000_000
SIZE = 64
RATE = 0.125
TIMEOUT = timedelta(seconds=30)
# After a stop a Gloo operation may hang until its timeout, and its group and port remain until then.
ENDS_S = 2 * TIMEOUT.total_seconds() + 5


def gradient(step: int, group: int, bucket: int) -> torch.Tensor:
    """Small integers, whose sum over groups is exact in any order."""
    generator = torch.Generator().manual_seed(1_000_000 * bucket + 100 * step + group)
    return torch.randint(-8, 9, (SIZE,), generator=generator).float()


class FailurePhases(logging.Handler):
    """Reports the phases of the time after a failure, as the Manager records them."""

    def emit(self, record: logging.LogRecord) -> None:
        fields = vars(record)
        emit("failure", **{name: value for name, value in fields.items() if name.endswith("_seconds")})


class Divergences(logging.Handler):
    """Reports differences of weights, which must not occur here."""

    def emit(self, record: logging.LogRecord) -> None:
        emit("differs", what=record.getMessage())


class Worker:
    def __init__(self, args: argparse.Namespace) -> None:
        self.group, self.kind, self.compute_s = args.group, args.kind, args.compute_s
        self.heal, self.compare_commits = args.heal, args.compare_commits
        self.snapshots = args.snapshots
        if args.kind == "isolated" and self.compare_commits is None:
            # The first comparison allocates permanent shared memory, so it must precede the reference of
            # chaos_leaks.
            self.compare_commits = 4
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.commands = Commands()
        torch.set_num_threads(1)
        self.device = torch.device("cpu")
        if args.kind == "late":
            from tests.late import load

            load().delays(args.group, 0, 1000)
            self.device = torch.device("late:0")
        # Groups start with different weights, so that a group that is not healed is detected.
        self.weights = [torch.full((SIZE,), float(args.group), device=self.device) for _ in range(BUCKETS)]
        # Its size makes a heal take a moment. It never changes, and differs between groups until they heal.
        self.ballast = (
            torch.arange(args.state_mb * 250_000, dtype=torch.float32, device=self.device) + args.group
        )
        # The ballast gets no gradients, so it never changes.
        self.optimizer = torch.optim.SGD([*self.weights, self.ballast], lr=RATE)
        # PyTorch's own groups keep pending operations until they time out.
        self.leaks = Leaks(threads if args.kind == "native" else left_over)
        self.armed: dict[str, Any] | None = None
        self.slower = 1.0
        self.last_step: int | None = None
        emit("imported", pid=os.getpid())

    def process_group(self) -> dist.ProcessGroup:
        if self.kind == "native":
            shared = TCPStore(
                "localhost", int(os.environ["SHARED_STORE"]), is_master=False, wait_for_workers=False
            )
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"rank{self.rank}", shared),
                rank=self.group,
                world_size=64,
                timeout=TIMEOUT,
                enable_reconfigure=True,
            )
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        if self.kind == "late":
            from tests.late.group import ProcessGroupLate

            return ProcessGroupLate(timeout=TIMEOUT)
        from torchft.process_group import ProcessGroupBabyGloo, ProcessGroupGloo

        return (
            ProcessGroupBabyGloo(timeout=TIMEOUT)
            if self.kind == "isolated"
            else ProcessGroupGloo(timeout=TIMEOUT)
        )

    def join(self, lighthouse: str) -> None:
        from torchft import Manager, Optimizer
        from torchft.checkpointing import HTTPTransport

        worker = self

        class Transport(HTTPTransport):
            """Reports when this group heals, and when it serves its state in parts."""

            def send_checkpoint(self, *args: Any, **kwargs: Any) -> None:
                worker.strike_soon("heals another")
                super().send_checkpoint(*args, **kwargs)

            def recv_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
                worker.strike("heals")
                return super().recv_checkpoint(*args, **kwargs)

            parts = 0

            def recv_part(self, *, key: str, **kwargs: Any) -> Any:
                part = super().recv_part(key=key, **kwargs)
                self.parts += part.memory.numel() > 0
                if self.parts == 2:
                    worker.strike("heals")
                return part

            def offer_parts(self, *args: Any) -> None:
                super().offer_parts(*args)
                worker.strike_soon("heals another")

        self.pg = self.process_group()
        self.manager = Manager(
            pg=self.pg,
            load_state_dict=self.load,
            state_dict=self.save,
            min_replica_size=1,
            lighthouse_addr=lighthouse,
            replica_id=f"chaos_{self.group}",
            timeout=TIMEOUT,
            quorum_timeout=timedelta(seconds=90),
            connect_timeout=TIMEOUT,
            checkpoint_transport=Transport(
                timeout=TIMEOUT, num_chunks=0, bandwidth_limit=0 if self.heal == "at_once" else ALONG_RATE
            ),
            heal=self.heal,
            compare_commits=self.compare_commits,
            snapshots=self.snapshots,
        )
        # Registers the parameters to compare and to heal.
        self.registered = Optimizer(self.manager, self.optimizer)

    def save(self) -> dict[str, Any]:
        return {"weights": self.weights, "ballast": self.ballast}

    def load(self, state: dict[str, Any]) -> None:
        for mine, theirs in zip(self.weights, state["weights"], strict=True):
            mine.copy_(theirs)
        self.ballast.copy_(state["ballast"])

    def strike_soon(self, phase: str) -> None:
        if self.armed is not None:
            threading.Timer(0.002, self.strike, [phase]).start()

    def strike(self, phase: str) -> None:
        armed = self.armed
        if armed is None or armed["phase"] != phase:
            return
        if armed.get("step", self.manager.current_step()) != self.manager.current_step():
            return
        self.armed = None
        emit("striking", phase=phase, at=time.monotonic(), step=self.manager.current_step())
        os.kill(os.getpid(), armed["signal"])

    def hear(self) -> None:
        while (command := self.commands.poll()) is not None:
            if command["do"] == "finish":
                self.last_step = command["step"]
            elif command["do"] == "work":
                self.slower = command["slower"]
            else:
                self.armed = command
                emit("armed")

    def train(self) -> None:
        manager = self.manager
        while self.last_step is None or manager.current_step() < self.last_step:
            self.hear()
            if manager.draining():
                return self.shut_down()
            self.strike("before the quorum")
            began = time.monotonic()
            manager.start_quorum()
            self.strike("in the quorum")
            time.sleep(self.compute_s * self.slower)
            manager.wait_quorum()
            step, contributes = manager.current_step(), manager.is_participating()
            plan = manager._current.plan
            assert plan is not None
            groups = sorted(int(i.split(":")[0].removeprefix("chaos_")) for i in plan.replica_ids)
            # Reported before the first collective, because from then on a failed group may be part of the
            # sum.
            emit("begin", step=step, quorum=plan.quorum_id, contributes=contributes)
            gradients, works = [], []
            for bucket in range(BUCKETS):
                gradients.append(gradient(step, self.group, bucket).to(self.device))
                works.append(manager.allreduce(gradients[-1]))
                self.strike(f"in bucket {bucket}")
            while works:  # works must not outlive their step
                works.pop(0).wait()
            for weight, mean in zip(self.weights, gradients, strict=True):
                weight.grad = mean
            self.strike("before the vote")
            committed = manager.should_commit()
            self.strike("after the vote")
            if committed:
                self.optimizer.step()
            emit(
                "step",
                began=began,
                at=time.monotonic(),
                step=step,
                committed=committed,
                quorum=plan.quorum_id,
                groups=groups,
                participants=manager.num_participants(),
                batches=manager.batches_committed(),
                weights=base64.b64encode(
                    b"".join(weight.cpu().numpy().tobytes() for weight in self.weights)
                ).decode(),
                error=None if manager.errored() is None else str(manager.errored())[:200],
            )
            # the first copy starts a thread that stays
            if committed and (not self.snapshots or manager._snapshots.copied >= 0):
                self.leaks.step(plan.quorum_id, len(groups))
        grown = self.leaks.grown(ENDS_S)
        digest = hashlib.sha256(self.ballast.cpu().numpy()).hexdigest()
        emit("finished", ballast=digest, grown=grown, compared=self.leaks.compared)
        self.shut_down(finished=True)
        gc.collect()  # an exception keeps its frames alive, and with them the error
        # PyTorch's groups are destroyed on separate threads. And its store looks for a killed peer until its
        # own timeout of some seconds, on a thread that a step has abandoned. A thread that closes the sockets
        # of Gloo's groups ends soon after them.
        deadline = time.monotonic() + ENDS_S
        while (
            (self.kind != "native" and listens()) or {"torchft_connect", "torchft_quiet"} & left_over().keys()
        ) and time.monotonic() < deadline:
            time.sleep(0.01)
        emit("ended", kind=self.kind, listens=listens(), left=dict(left_over()), holders=holders())

    def shut_down(self, finished: bool = False) -> None:
        self.manager.shutdown(finished=finished)
        if self.kind == "native":
            dist.destroy_process_group()
        else:
            self.pg.shutdown()


def listens() -> list[int]:
    """Returns the TCP ports on which this process listens."""
    sockets = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of this listing itself
            sockets.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    ports = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                ports.append(int(local.rpartition(":")[2], 16))
    return sorted(ports)


def holders() -> dict[str, int]:
    """Counts what may keep a port open: threads, such as those of a group of Gloo, and errors with their
    frames.
    """
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended
            names.append(path.read_text().strip())
    errors = [
        type(o).__name__ for o in gc.get_objects() if issubclass(type(o), BaseException) and o.__traceback__
    ]
    return dict(Counter([*names, *errors]))


def end_with_parent() -> None:
    """Makes the kernel end this process with its parent; it would otherwise survive a killed torchrun agent
    (Linux).
    """
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def raise_here(*_: object) -> None:
    raise ValueError("an exception of the script")


def hang_here(*_: object) -> None:
    threading.Event().wait()  # for ever; only the training thread


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    faulthandler.register(signal.SIGUSR1)  # shows where a process hangs
    signal.signal(signal.SIGUSR2, hang_here)
    signal.signal(signal.SIGRTMIN, raise_here)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    for name in ("torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(name).setLevel(logging.WARNING)  # one log line per step would hide the others
    logging.getLogger("torchft_divergences").addHandler(Divergences())
    failures = logging.getLogger("torchft_failures")
    failures.addHandler(FailurePhases())
    failures.propagate = False
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--kind", choices=["gloo", "isolated", "native", "late"], default="gloo")
    parser.add_argument("--compute_s", type=float, default=0.03)
    parser.add_argument("--state_mb", type=int, default=4)
    parser.add_argument("--heal", default="at_once")
    parser.add_argument("--compare_commits", type=int)
    parser.add_argument("--snapshots", type=int, default=SNAPSHOTS)
    worker = Worker(parser.parse_args())
    while (command := worker.commands.next())["do"] != "join":
        worker.armed = command
    worker.join(command["lighthouse"])
    emit("joined")
    worker.train()
