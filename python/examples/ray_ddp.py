"""Replica groups on Ray: each is a set of actors in its own placement group, with its own store.

    pip install '.[train,ray]'
    python python/examples/ray_ddp.py --kill-at 50

Ray starts processes and reports when one has ended; torchft keeps the training consistent. When an actor
fails, its whole group is replaced in the same placement group: the ranks of a group work on each step
together, so none can continue without the others. Meanwhile the other groups continue, and the new group
heals from them. The lighthouse is an actor, too.

With --kill-at the driver kills an actor's process once, as a demonstration. If ranks have different weights
at the end, the exit status is 1. --address selects a running cluster; without it, one is started on this
machine.
"""

# Ray's decorator turns these into other classes, and type checkers may run where Ray is not installed.
# pyrefly: ignore-errors[missing-import, missing-attribute]

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

ROOT = Path(__file__).resolve().parents[2]
POLL_SEC = 0.2


@ray.remote(num_cpus=0)
class Lighthouse:
    """The lighthouse, which outlives the groups. If it fails, they wait for another one at the same address
    until a timeout.
    """

    def __init__(self) -> None:
        from torchft.coordination import LighthouseServer

        self._server = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=2000, heartbeat_timeout_ms=1000
        )

    def address(self) -> str:
        return self._server.address()


@ray.remote(num_cpus=0)
class Journal:
    """Collects the messages of the ranks for the driver."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []

    def write(self, **event: Any) -> None:
        self._events.append(event)

    def read(self, since: int) -> list[dict[str, Any]]:
        return self._events[since:]


# Ray must not restart single ranks, because a group is replaced as a whole.
@ray.remote(num_cpus=1, max_restarts=0)
class Rank:
    """One rank of a replica group."""

    def where(self) -> tuple[str, int, int]:
        """Returns the address of its host, a free port there, and its process id."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1], os.getpid()

    def train(self, env: dict[str, str], steps: int, journal: Any) -> str:
        """Trains to the end. Returns a digest of the weights."""
        os.environ.update(env)
        return train(steps, journal)


class Group:
    """The actors of one replica group, and their replacements."""

    def __init__(self, number: int, args: argparse.Namespace, lighthouse: str, journal: Any) -> None:
        self.number = number
        self.lives = 0
        self.pids: list[int] = []
        self._args = args
        self._lighthouse = lighthouse
        self._journal = journal
        self._ranks: list[Any] = []
        self._ends: list[Any] = []
        self._place = placement_group([{"CPU": 1}] * args.ranks, strategy="PACK")
        ray.get(self._place.ready(), timeout=args.time_limit)

    def start(self) -> None:
        """Starts all ranks. They meet at a store of this incarnation, hosted by the first of them."""
        self.lives += 1
        in_place = PlacementGroupSchedulingStrategy(self._place)
        self._ranks = [Rank.options(scheduling_strategy=in_place).remote() for _ in range(self._args.ranks)]
        places = ray.get([rank.where.remote() for rank in self._ranks], timeout=self._args.time_limit)
        self.pids = [pid for _, _, pid in places]
        env = {
            "REPLICA_GROUP_ID": str(self.number),
            "NUM_REPLICA_GROUPS": str(self._args.groups),
            "TORCHFT_LIGHTHOUSE": self._lighthouse,
            "MASTER_ADDR": places[0][0],
            "MASTER_PORT": str(places[0][1]),
            "WORLD_SIZE": str(self._args.ranks),
        }
        self._ends = [
            rank.train.remote({**env, "RANK": str(i)}, self._args.steps, self._journal)
            for i, rank in enumerate(self._ranks)
        ]

    def digests(self) -> list[str] | None:
        """The digests of all ranks at the end; None while a rank still trains.

        Raises:
            RayError: a rank has ended, or raised an error.
        """
        done, running = ray.wait(self._ends, num_returns=len(self._ends), timeout=0)
        ends = ray.get(done)  # a failed rank is detected at once, even if the other ranks wait for it
        return None if running else ends

    def end(self) -> None:
        """Ends the remaining actors of an incarnation."""
        for rank in self._ranks:
            ray.kill(rank)

    def close(self) -> None:
        self.end()
        remove_placement_group(self._place)


def train(steps: int, journal: Any) -> str:
    """Trains one rank in the style of upstream's examples, with a shard of the data for each rank."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torchdata.stateful_dataloader import StatefulDataLoader

    from python.examples.parts import (
        Batches,
        at_the_end,
        average_in_group,
        int_from_env,
        load_images,
        sha256_of,
    )
    from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
    from train_ddp import small_cnn

    group, groups = int_from_env("REPLICA_GROUP_ID"), int_from_env("NUM_REPLICA_GROUPS")
    rank, ranks = int_from_env("RANK"), int_from_env("WORLD_SIZE")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, _ = load_images("digits", None)
    sampler = DistributedSampler(images, group, groups, group_rank=rank, num_replicas=ranks)
    batches = Batches(StatefulDataLoader(images, 32, sampler=sampler), sampler)
    net = small_cnn(1)
    adam = torch.optim.Adam(net.parameters())

    def load_state(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        adam.load_state_dict(state["adam"])

    dist.init_process_group("gloo")
    pg = ProcessGroupGloo()
    manager = Manager(
        pg,
        load_state,
        lambda: {"net": net.state_dict(), "adam": adam.state_dict()},
        min_replica_size=1,
        replica_id=f"ray_{group}",
        timeout=timedelta(seconds=30),
    )
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, adam)
    while True:
        optimizer.zero_grad()
        if at_the_end(manager, steps, overtime=1_000_000, groups=groups):
            break
        pixels, labels, _ = next(batches)
        F.cross_entropy(model(pixels), labels).backward()
        average_in_group(net)
        healing, participants, step = (
            not manager.is_participating(),
            manager.num_participants(),
            manager.current_step(),
        )
        optimizer.step()
        if manager.current_step() > step:
            journal.write.remote(
                group=group,
                rank=rank,
                step=manager.current_step(),
                participants=participants,
                healing=healing,
            )
    dist.barrier()
    manager.shutdown(finished=True)
    pg.shutdown()
    dist.destroy_process_group()
    return sha256_of(net)


def main() -> int:
    args = parse_args()
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    cpus = None if args.address else args.groups * args.ranks
    ray.init(
        address=args.address,
        num_cpus=cpus,
        include_dashboard=None if args.address else False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    try:
        return run(args)
    finally:
        ray.shutdown()


def run(args: argparse.Namespace) -> int:
    """Starts the groups, replaces groups of which an actor has failed, and compares the weights at the
    end.
    """
    lighthouse = Lighthouse.remote()
    journal = Journal.remote()
    address = ray.get(lighthouse.address.remote())
    groups = [Group(number, args, address, journal) for number in range(args.groups)]
    for group in groups:
        group.start()
    ends: dict[int, list[str]] = {}
    events: list[dict[str, Any]] = []
    killed = False
    deadline = time.monotonic() + args.time_limit
    while len(ends) < len(groups):
        time.sleep(POLL_SEC)
        events += ray.get(journal.read.remote(len(events)))
        reached = {
            number: [e["step"] for e in events if e["group"] == number] for number in range(args.groups)
        }
        if (
            args.kill_at is not None
            and not killed
            and all(s and s[-1] >= args.kill_at for s in reached.values())
        ):
            killed = True
            print(
                f"step {args.kill_at}: killing process {groups[-1].pids[-1]} of group {args.groups - 1}",
                flush=True,
            )
            os.kill(groups[-1].pids[-1], signal.SIGKILL)
        for group in groups:
            try:
                digests = group.digests()
            except ray.exceptions.RayError as e:
                if group.lives > args.max_restarts:
                    print(f"group {group.number} failed {group.lives} times, the last time: {e}")
                    return 1
                print(
                    f"an actor of group {group.number} failed ({type(e).__name__}): replacing all of it",
                    flush=True,
                )
                group.end()
                group.start()
                continue
            if digests is not None:
                ends[group.number] = digests
        if time.monotonic() > deadline:
            print(f"not done after {args.time_limit:g} s")
            return 1
    return report(args, groups, events + ray.get(journal.read.remote(len(events))), ends)


def report(
    args: argparse.Namespace, groups: list[Group], events: list[dict[str, Any]], ends: dict[int, list[str]]
) -> int:
    for group in groups:
        mine = [e for e in events if e["group"] == group.number and e["rank"] == 0]
        heals = [e["step"] for e in mine if e["healing"] and e["step"] > 1]
        print(f"group {group.number}: {group.lives} lives, {len(mine)} steps, healed at steps {heals}")
        for rank, digest in enumerate(ends[group.number]):
            print(f"group {group.number} rank {rank}  {digest}")
        group.close()
    if len({digest for digests in ends.values() for digest in digests}) > 1:
        print("the weights differ")
        return 1
    if args.kill_at is not None and groups[-1].lives == 1:
        print(f"the run was over before the kill at step {args.kill_at}: raise --steps")
        return 1
    print("equal")
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--address", help="address of a running Ray cluster, such as auto; default: a new one on this machine"
    )
    parser.add_argument("--groups", type=int, default=2, help="replica groups")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a group; each takes a CPU")
    parser.add_argument("--steps", type=int, default=500, help="committed steps until the end")
    parser.add_argument("--kill-at", type=int, help="step after which an actor of the last group is killed")
    parser.add_argument("--max-restarts", type=int, default=3, help="of a group")
    parser.add_argument("--time-limit", type=float, default=600, help="seconds")
    args = parser.parse_args()
    for name in ("groups", "ranks", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.kill_at is not None and not 0 < args.kill_at < args.steps:
        parser.error(f"--kill-at must lie between 0 and --steps ({args.steps}), got {args.kill_at}")
    if args.kill_at is not None and args.groups < 2:
        parser.error("--kill-at needs --groups of at least 2: someone has to survive")
    if args.kill_at is not None and args.address:
        parser.error("--kill-at kills a process of this machine: without --address only")
    return args


if __name__ == "__main__":
    sys.exit(main())
