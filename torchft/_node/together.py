"""Nodes of a job meet at the lighthouse, measure the connections between them in two rounds, and compare
themselves.

They meet by torchrun's rendezvous (go/rendezvous), as a group of a job of their own. The node of rank 0
decides what is measured and what that means, so that all have the same verdict.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousParameters

from torchft._node.figures import Say
from torchft._node.verdict import NodeVerdict, Pair, Report, fastest_with_slowest, judge, neighbors
from torchft.addresses import host_port
from torchft.checkpointing.client.deadline import Deadline
from torchft.dlrover.rendezvous import BACKEND, LighthouseRendezvousHandler
from torchft.process_group.gloo import ProcessGroupGloo
from torchft.process_group.nccl import ProcessGroupNCCL

MOST_NODES = 4096  # of go/rendezvous
# How long the first node that asks waits for the others, unless all are there: nodes need different times to
# measure themselves.
_LAST_CALL_SEC = 25.0
_CONNECT_SEC = 10.0
# For meeting and all that comes after it.
NEEDED_SEC = 60.0
# For all that is left to do once the nodes have met.
_AFTER_MEETING_SEC = 45.0
_PAIR_SEC = 8.0
# How long rank 0 waits for what a node reports that has nothing more to do.
_ANSWER_SEC = 5.0
# Bytes that a pair reduces: by Gloo, and by NCCL.
_BYTES, _DEVICE_BYTES = 32 << 20, 256 << 20
_REPETITIONS = 7
# address of a store, prefix in it, rank among the two, seconds -> rates in GB/s; empty: nothing arrived
Exchange = Callable[[str, str, int, float], list[float]]


class NotCompared(Exception):
    """The nodes did not meet, or lost each other; the message says why."""


def exchange(address: str, prefix: str, rank: int, seconds: float) -> list[float]:
    """Reduces a tensor between two nodes as groups of a job do, by NCCL where there are CUDA devices, else by
    Gloo. Returns the rates in GB/s; those until an error, if there is one.
    """
    deadline = Deadline(seconds)
    cuda = torch.cuda.is_available()
    pg = (ProcessGroupNCCL if cuda else ProcessGroupGloo)(timedelta(seconds=seconds))
    size = _DEVICE_BYTES if cuda else _BYTES
    rates: list[float] = []
    try:
        pg.configure(f"{address}/{prefix}", f"node{rank}", rank, 2)
        tensor = torch.zeros(size // 4, device="cuda" if cuda else "cpu")
        for _ in range(_REPETITIONS + 1):
            began = time.perf_counter()
            pg.allreduce([tensor], ReduceOp.SUM).wait(timedelta(seconds=max(0.001, deadline.left)))
            if cuda:
                torch.cuda.synchronize()
            rates.append(size / (time.perf_counter() - began) / 1e9)
    except (RuntimeError, OSError):  # of the connection, or a timeout
        pg.abort()
    finally:
        pg.shutdown()
    return rates[1:] or rates  # the first one also makes buffers


def compare(
    report: Report,
    lighthouse: str,
    job: str,
    nodes: int,
    seconds: float,
    say: Say,
    exchange: Exchange = exchange,
) -> tuple[NodeVerdict, int]:
    """Meets the other nodes of a job. Returns what the comparison says, and the number of this node in it.

    Args:
        report: of this node.
        lighthouse: its address, or those of a cluster.
        job: of the nodes.
        nodes: how many there are: with all of them the comparison begins, else some time after the first.
        seconds: until this returns.
        exchange: measures a connection.

    Raises:
        NotCompared: the nodes did not meet, or lost each other.
        ValueError: an address is malformed.
    """
    deadline = Deadline(seconds)
    say(f"waiting for the other nodes, at most {deadline.left - _AFTER_MEETING_SEC:.0f} s")
    try:
        handler = LighthouseRendezvousHandler.from_parameters(
            RendezvousParameters(
                BACKEND,
                lighthouse,
                f"{job}.nodes",
                1,
                nodes,
                last_call_timeout=_LAST_CALL_SEC,
                join_timeout=max(1.0, deadline.left - _AFTER_MEETING_SEC),
                connect_timeout=_CONNECT_SEC,
            )
        )
    except RendezvousError as error:
        raise NotCompared(str(error)) from None
    try:
        met = handler.next_rendezvous()
        served = met.bootstrap_store_info
        assert served is not None  # this handler's rounds have one
        address = host_port(served.master_addr, served.master_port)
        talk = _Talk(met.store, met.rank, met.world_size, address, deadline, say, exchange)
        return talk.held(report)
    except (RendezvousError, dist.DistError, OSError, ValueError, KeyError) as error:
        raise NotCompared(str(error)) from None
    finally:
        handler.shutdown()


@dataclass
class _Talk:
    """What the nodes of a round tell each other, by the store of rank 0."""

    _store: dist.Store
    _rank: int
    _size: int
    _address: str
    _deadline: Deadline
    _say: Say
    _exchange: Exchange

    def held(self, report: Report) -> tuple[NodeVerdict, int]:
        self._tell("report", asdict(report))
        told = self._told("report", range(self._size), _ANSWER_SEC) if self._rank == 0 else ()
        reports = {rank: Report(**fields) for rank, fields in told}
        nodes = list(reports)  # of rank 0: it alone knows them
        measured: dict[Pair, list[float]] = {}
        measured |= self._round(1, lambda: neighbors(nodes))
        measured |= self._round(2, lambda: fastest_with_slowest(nodes, measured))
        if self._deadline.left <= 0:  # a rate that is missing for lack of time says nothing
            raise NotCompared("the connections were not measured in time")
        verdict = self._from_first("verdict", lambda: asdict(judge(reports, measured)))
        self._tell("read", True)
        if self._rank == 0:  # it has the store
            list(self._told("read", nodes, _ANSWER_SEC))
        return NodeVerdict.from_json(verdict), self._rank

    def _round(self, number: int, choose: Callable[[], list[Pair]]) -> dict[Pair, list[float]]:
        """Measures the pairs that rank 0 chooses. Returns the rates of all of them in rank 0, else none."""
        plan: list[Pair] = [(a, b) for a, b in self._from_first(f"plan {number}", choose)]
        mine = [pair for pair in plan if self._rank in pair]
        self._tell(f"rates {number}", [(pair, self._rates(number, pair)) for pair in mine])
        if self._rank:
            return {}
        measured: dict[Pair, list[float]] = {pair: [] for pair in plan}
        busy = sorted({rank for pair in plan for rank in pair})
        # A node is in two pairs at most.
        for _, told in self._told(f"rates {number}", busy, 2 * _PAIR_SEC + _ANSWER_SEC):
            measured.update({(a, b): rates for (a, b), rates in told if rates})
        return measured

    def _rates(self, number: int, pair: Pair) -> list[float]:
        place = pair.index(self._rank)
        other = pair[1 - place]
        prefix = f"nodes/{number}/{pair[0]}-{pair[1]}"
        self._tell(f"ready {prefix}", True)
        try:  # it may measure another connection first
            self._wait(f"ready {prefix}/{other}", min(self._deadline.left, _PAIR_SEC + _ANSWER_SEC))
        except dist.DistStoreError:
            return []
        self._say(f"measuring the connection with node {other}")
        return self._exchange(self._address, prefix, place, max(0.1, min(self._deadline.left, _PAIR_SEC)))

    def _tell(self, what: str, value: Any) -> None:
        self._store.set(f"{what}/{self._rank}", json.dumps(value))

    def _told(self, what: str, ranks: Iterable[int], seconds: float) -> Iterable[tuple[int, Any]]:
        """What each node told; a node that does not within this time is left out."""
        until = Deadline(seconds)
        for rank in ranks:
            with suppress(dist.DistStoreError):
                yield rank, self._wait(f"{what}/{rank}", min(until.left, self._deadline.left))

    def _from_first(self, what: str, make: Callable[[], Any]) -> Any:
        """What rank 0 decides."""
        if self._rank == 0:
            self._store.set(what, json.dumps(make()))
        return self._wait(what, self._deadline.left)

    def _wait(self, key: str, seconds: float) -> Any:
        self._store.wait([key], timedelta(seconds=max(0.01, seconds)))
        return json.loads(self._store.get(key))
