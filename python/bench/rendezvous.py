"""The time to restart workers while nodes arrive and one is killed: torchrun's c10d rendezvous and the
lighthouse's.

    python python/bench/rendezvous.py

A node is a process with torchrun's handler and without workers, so a restart only costs the wait for the
round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from common import Child, Job
from processes import ours_path

from torchft.coordination import LighthouseServer

NODE = Path(__file__).with_name("rendezvous_node.py")
_DEADLINE_S = 200.0
# In PyTorch 2.15, nodes that join a later round of c10d wait 60 s for a shared store, and then end.
_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@contextmanager
def endpoint(backend: str) -> Iterator[str]:
    """The address of the rendezvous. Its server is in this process, so it survives the kill of a node."""
    if backend == "c10d":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield f"127.0.0.1:{store.port}"
        return
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


def in_one_round(nodes: list[Child], size: int) -> bool:
    """Whether exactly this many nodes are in one round."""
    last = [node.events[-1] for node in nodes if node.events]
    return sum(event["size"] == size for event in last) >= size


def measure(
    backend: str, count: int, every: float, conf: dict[str, object], after_kill: int
) -> dict[str, float]:
    with endpoint(backend) as where, Job() as job:
        nodes: list[Child] = []
        arrived = 0.0
        for i in range(count):
            time.sleep(every if i else 0.0)
            arguments = (backend, where, count, json.dumps(conf))
            nodes.append(job.python(f"node-{i}", NODE, *arguments, path=ours_path(), env=_ENV))
            arrived = time.time()
        job.wait(lambda: in_one_round(nodes, count), _DEADLINE_S, f"{count} nodes train")
        all_train = max(node.events[-1]["began"] for node in nodes) - arrived
        restarts = [event for node in nodes for event in node.events[1:]]
        stopped = sum(event["began"] - event["asked"] for event in restarts)
        nodes[count // 2].kill()
        killed = time.time()
        survivors = [node for node in nodes if node.expected_to_live]
        for node in survivors:
            node.send(failed=True)
        before = {node: len(node.events) for node in survivors}
        job.wait(
            lambda: in_one_round([node for node in survivors if len(node.events) > before[node]], after_kill),
            _DEADLINE_S,
            f"{after_kill} nodes train",
        )
        return {
            "restarts": len(restarts),
            "stopped": stopped,
            "all_train": all_train,
            "after_kill": time.time() - killed,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one arrival to the next one")
    parser.add_argument("--last-call", type=int, default=5, help="seconds; the default of both is 30")
    args = parser.parse_args()
    conf: dict[str, object] = {"last_call_timeout": args.last_call, "join_timeout": 180}
    half = 1 << ((args.nodes - 1).bit_length() - 1)
    print(f"{args.nodes} nodes, one each {args.every:g} s, last call {args.last_call} s")
    print(
        "| rendezvous | restarts of a node's workers | their waits, sum | all train after the last arrival | "
        "survivors train after a kill |"
    )
    print("|---|---|---|---|---|")
    for name, backend, sizes, after_kill in (
        ("c10d", "c10d", {}, args.nodes - 1),
        ("torchft, sizes=all", "torchft", {"sizes": "all"}, args.nodes - 1),
        ("torchft, sizes=powers_of_two", "torchft", {"sizes": "powers_of_two"}, half),
    ):
        m = measure(backend, args.nodes, args.every, {**conf, **sizes}, after_kill)
        print(
            f"| {name} | {m['restarts']} | {m['stopped']:.1f} s | {m['all_train']:.1f} s | "
            f"{m['after_kill']:.2f} s |"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
