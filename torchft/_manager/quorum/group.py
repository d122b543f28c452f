"""How ranks find their manager server: rank 0 starts it and puts its address into the group's store."""

from __future__ import annotations

import logging
import socket
import uuid
from typing import Callable, NamedTuple, Optional

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from torchft._manager.settings import MANAGER_ADDR_KEY, REPLICA_ID_KEY, Settings
from torchft._torchft import ManagerServer
from torchft._waits import announced
from torchft.addresses import announced_host, announced_store_host, host_port, store_host

_logger = logging.getLogger("torchft.manager")
_SILENT_SEC = 2.0  # a wait for the store that takes longer is announced


class Group(NamedTuple):
    """A rank's view of its own group."""

    store: dist.Store
    replica_id: str
    manager_address: str
    server: Optional[ManagerServer]  # on rank 0 only


def join_group(
    settings: Settings,
    replica_id: Optional[str],
    hostname: str,
    start_server: Callable[..., ManagerServer],
) -> Group:
    """Starts the manager server on rank 0, and waits until its address is known. If `hostname` is this
    machine's own name, ``torchft.addresses`` chooses the address under which the server is announced.
    """
    # The lighthouse's address is checked before the store is opened, which may take long.
    lighthouse_addr = settings.require_lighthouse() if settings.group_rank == 0 else ""
    store = _open_store(settings)
    if settings.group_rank != 0:
        # In one request: when a group starts, all ranks query one store, and a round trip adds to it.
        address, full_id = (
            value.decode("utf-8") for value in store.multi_get([MANAGER_ADDR_KEY, REPLICA_ID_KEY])
        )
        return Group(store, full_id, address, None)
    full_id = f"{replica_id}:{uuid.uuid4()}" if replica_id else str(uuid.uuid4())
    server = start_server(
        replica_id=full_id,
        lighthouse_addr=lighthouse_addr,
        hostname=hostname if hostname != socket.gethostname() else announced_host(lighthouse_addr),
        bind=f"[::]:{settings.manager_port}",
        store_addr=announced_store_host(settings.store_addr, settings.store_port, lighthouse_addr),
        world_size=settings.group_world_size,
        heartbeat_interval=settings.heartbeat_interval,
        connect_timeout=settings.connect_timeout,
        quorum_retries=settings.quorum_retries,
    )
    try:
        address = server.address()
        store.set(MANAGER_ADDR_KEY, address)
        store.set(REPLICA_ID_KEY, full_id)
    except BaseException:
        server.shutdown()
        raise
    return Group(store, full_id, address, server)


def _open_store(settings: Settings) -> dist.Store:
    address = host_port(settings.store_addr, settings.store_port)
    waiting = (
        f"waiting for the store of this group at {address} (MASTER_ADDR, MASTER_PORT), which torchrun serves"
    )
    with announced(_SILENT_SEC, _logger.warning, waiting):
        store = TCPStore(
            host_name=store_host(settings.store_addr),
            port=settings.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=settings.timeout,
        )
    if settings.restart_count:
        # torchrun's agent keeps the store over a restart of the workers: their earlier keys are stale.
        return PrefixStore(f"torchft/restart_{settings.restart_count}", store)
    return store
