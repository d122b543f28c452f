"""torchrun that ends with the status of its rank: `python -m torchft.launch.agent`, with its arguments.

What starts it again, such as a Job of Kubernetes, decides by that status; torchrun's own is 1.

For a group on one host it has a rendezvous of its own: torchrun's c10d makes a single node wait, too, for up
to 0.3 s, by chance, and for 0.15 s in which it looks at its own stack for its log. A restart by fork takes
half a second in all.
"""

from __future__ import annotations

import signal
import sys
import traceback
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as ranks
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from torchft._forked import threaded
from torchft._manager.settings import STOPPED_STATUS
from torchft.addresses import loopback

BACKEND = "torchft-host"


class HostRendezvous(StaticTCPRendezvous):
    """The rendezvous of one node, with a new store in each round: it has no key of an earlier round, and
    workers use it, so that there is no port that another process may take meanwhile.

    Args:
        parameters: of torchrun.

    Raises:
        ValueError: the group has several nodes.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        if parameters.max_nodes != 1:
            raise ValueError(
                f"--nnodes {parameters.min_nodes}:{parameters.max_nodes} is not allowed with --rdzv-backend "
                f"{BACKEND}, which is for one host; allowed: --rdzv-backend c10d or torchft"
            )
        super().__init__(loopback(), 0, rank=0, world_size=1, run_id=parameters.run_id, timeout=0)

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        store = threaded(dist.TCPStore(self.master_addr, 0, is_master=True, wait_for_workers=False))
        self._store = store  # it lives as long as the workers of its round
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self.master_addr, store.port))


def _restart_no_stopped_rank() -> None:
    """Lets torchrun end in place of a restart if a rank has ended with STOPPED_STATUS: so would the next."""
    monitor = LocalElasticAgent._monitor_workers

    def look(self: LocalElasticAgent, worker_group: WorkerGroup) -> RunResult:
        result = monitor(self, worker_group)
        if any(failure.exitcode == STOPPED_STATUS for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result

    LocalElasticAgent._monitor_workers = look


def main() -> None:
    """Runs torchrun's main. SystemExit: a rank has failed; its code is that of the first one, or
    STOPPED_STATUS if one of them ended with that, and as a shell has it for a signal.
    """
    rendezvous_handler_registry.register(BACKEND, HostRendezvous)
    try:
        run.main()
    except ChildFailedError as e:
        _end_as(e)


def _end_as(e: ChildFailedError) -> NoReturn:
    traceback.print_exc()  # as torchrun
    first = e.get_first_failure()[1].exitcode
    stops = any(failure.exitcode == STOPPED_STATUS for failure in e.failures.values())
    sys.exit(STOPPED_STATUS if stops else first if first > 0 else 128 - first)


if __name__ == "__main__":
    # With this signal torchrun ends the other ranks when one has failed. No step of theirs can be committed
    # any more, and at SIGTERM they would drain: one after another, each when its neighbour's connection ends.
    # A SIGTERM or SIGINT of torchrun itself is passed on as it is.
    ranks._get_default_signal = lambda: signal.SIGKILL
    _restart_no_stopped_rank()
    main()
