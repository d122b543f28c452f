"""Record upstream's results for random quorums, as test data of TestAsUpstream.

    PYTHONPATH=DIR_OF_UPSTREAM python record.py SEED CASES upstream_NAME.jsonl

One upstream lighthouse and a manager server per replica group run in this process; every rank of every
group asks for a quorum, and its result is written down. One line is one quorum.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torchft._torchft import LighthouseServer, ManagerClient, ManagerServer

NAMES = ["a", "b", "c", "a:1", "b2", "B", "z-9", "Z", "é", "10", "9", "_x"]
DEADLINE = timedelta(seconds=20)


def has_handles() -> bool:
    """release 0.2.0 has no reconfigure handles"""
    return "reconfigure_handle" in str(inspect.signature(ManagerClient._quorum))


def local(address: str) -> str:
    return "http://127.0.0.1:" + address.rsplit(":", 1)[1]


def record(rng: random.Random, pool: ThreadPoolExecutor, with_handles: bool) -> dict[str, object]:
    names = rng.sample(NAMES, rng.choice([1, 2, 2, 3, 3, 4, 5]))
    world_size = rng.choice([1, 1, 2, 3])
    init_sync = rng.random() < 0.7
    steps = rng.choice(
        [lambda: 0, lambda: 0, lambda: 5, lambda: rng.randint(0, 3), lambda: rng.choice([0, 7])]
    )
    lacking = rng.choice(names) if rng.random() < 0.3 else None
    members = [
        {
            "id": name,
            "step": steps(),
            "handles": [f"h{name}{r}" if with_handles and name != lacking else "" for r in range(world_size)],
        }
        for name in names
    ]

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=len(names),
        join_timeout_ms=10000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=20000,
    )
    servers = {
        name: ManagerServer(
            replica_id=name,
            lighthouse_addr=local(lighthouse.address()),
            hostname="127.0.0.1",
            bind="127.0.0.1:0",
            store_addr="store " + name,
            world_size=world_size,
            heartbeat_interval=timedelta(milliseconds=100),
            connect_timeout=DEADLINE,
            quorum_retries=0,
        )
        for name in names
    }
    owner = {server.address(): name for name, server in servers.items()}
    calls = []
    for member in members:
        for group_rank in range(world_size):
            request = dict(
                group_rank=group_rank,
                step=member["step"],
                checkpoint_metadata="",
                shrink_only=False,
                timeout=DEADLINE,
                commit_failures=0,
                init_sync=init_sync,
            )
            if with_handles:
                request["reconfigure_handle"] = member["handles"][group_rank]
            client = ManagerClient(servers[member["id"]].address(), DEADLINE)
            calls.append((member["id"], group_rank, client, pool.submit(client._quorum, **request)))

    results = []
    for name, group_rank, _client, call in calls:
        q = call.result()
        results.append(
            {
                "id": name,
                "group_rank": group_rank,
                "replica_rank": q.replica_rank,
                "replica_ids": list(q.replica_ids),
                "store": q.store_address,
                "max_step": q.max_step,
                "max_replica_rank": q.max_replica_rank,
                "max_world_size": q.max_world_size,
                "heal": q.heal,
                "source": q.recover_src_replica_rank,
                "source_owner": owner.get(q.recover_src_manager_address, ""),
                "destinations": list(q.recover_dst_replica_ranks),
                "handles": list(getattr(q, "reconfigure_handles", [])),
            }
        )
    for server in servers.values():
        server.shutdown()
    lighthouse.shutdown()
    return {"world_size": world_size, "init_sync": init_sync, "members": members, "results": results}


def main() -> None:
    seed, cases, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    rng = random.Random(seed)
    with ThreadPoolExecutor(64) as pool, open(path, "w", encoding="utf-8") as file:
        for _ in range(cases):
            case = record(rng, pool, has_handles())
            file.write(json.dumps(case, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
