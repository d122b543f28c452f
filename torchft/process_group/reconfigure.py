"""How the members of a new quorum connect: their handles, and the store of the rendezvous.

Every group has a handle, a JSON object that travels to the peers with the quorum:

    {"id": "…", "store": "host:port", "global_rank": 3, "spread": true, "group_rank": 0}

`id` names the group object, `store` is a TCPStore that this group hosts. `first`, if there is one, lists the
operations that this group has run, for which the peers connect at once (_first_operation.py). The Manager
adds what groups compare (_agreement.py); the text of a layout is in the store, under `layout/{digest}`.
Handles are in the order of the ranks, so a peer's rank is the index of its handle. All peers meet in one
store: that of handle 0, or, if every handle has the mark `spread`, that of handle `group_rank mod n`, so that
no replica group serves the rendezvous of all ranks.
"""

from __future__ import annotations

import functools
import json
import logging
import random
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Optional, Sequence

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from torchft._forked import threaded
from torchft.addresses import announced_host, host_port, loopback, store_host
from torchft.process_group import _attempt
from torchft.process_group._errors import named_timeout
from torchft.process_group.native import is_native as is_native
from torchft.process_group.native import native_error as native_error
from torchft.process_group.native import reconfigure_group

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ReconfigureOptions
else:
    try:
        from torch._C._distributed_c10d import ReconfigureOptions
    except ImportError:  # PyTorch < 2.14

        @dataclass
        class ReconfigureOptions:
            """Describes the new peers of a group.

            Attributes:
                uuid: identifies this reconfiguration; never used before.
                handles: handles of all peers, in the order of their ranks.
                timeout: timeout of the whole reconfiguration; None: the group's own.
                hints: hints for the backend.
            """

            uuid: int = 0
            handles: list[str] | set[str] = field(default_factory=list)
            timeout: Optional[timedelta] = None
            hints: dict[str, str] = field(default_factory=dict)


def options_of(uuid: int, handles: list[str], timeout: Optional[timedelta]) -> ReconfigureOptions:
    """The options of a reconfiguration; PyTorch's class takes no arguments."""
    opts = ReconfigureOptions()
    opts.uuid, opts.handles, opts.timeout = uuid, handles, timeout
    return opts


_logger: logging.Logger = logging.getLogger(__name__)

# Connecting with a store takes some milliseconds, unless the name server answers late. Connections that take
# longer than this are logged.
_SLOW_SEC = 1.0

# PyTorch's uuid is a signed 64 bit integer.
_MAX_UUID = 2**63 - 1


@dataclass(frozen=True)
class Handle:
    """Describes a group for its peers."""

    id: str
    store: str
    global_rank: Optional[int] = None
    spread: bool = False
    group_rank: Optional[int] = None
    first: Optional[str] = None

    def encode(self) -> str:
        return _encoded(self)

    @classmethod
    def decode(cls, text: str) -> Handle:
        """Raises ValueError unless `text` is a torchft handle, ours or upstream's."""
        try:
            fields = json.loads(text)
        except (TypeError, ValueError):
            fields = None
        if not isinstance(fields, dict):
            raise ValueError(f"reconfigure handle {text!r}: not a torchft handle, which is a JSON object")
        for name in ("id", "store"):
            if not isinstance(fields.get(name), str) or not fields[name]:
                raise ValueError(f"reconfigure handle {text!r}: {name!r} must be a non-empty string")
        for name in ("global_rank", "group_rank"):
            value = fields.get(name)
            if value is not None and type(value) is not int:
                raise ValueError(f"reconfigure handle {text!r}: {name!r} must be an integer or null")
        return cls(
            id=fields["id"],
            store=fields["store"],
            global_rank=fields.get("global_rank"),
            spread=fields.get("spread") is True,
            group_rank=fields.get("group_rank"),
            first=fields["first"] if isinstance(fields.get("first"), str) else None,
        )


@functools.lru_cache(maxsize=8)  # each step encodes the handle of its group again
def _encoded(handle: Handle) -> str:
    return json.dumps(
        {name: value for name, value in vars(handle).items() if name != "first" or value is not None}
    )


@dataclass(frozen=True)
class Rendezvous:
    """The rank of a group among its new peers, and the store in which they meet."""

    store: str
    rank: int
    world_size: int
    global_ranks: Optional[list[int]]

    def address(self, uuid: int) -> str:
        """The address of the store, with a prefix of the reconfiguration of this number."""
        return f"{self.store}/torchft/{uuid}"


def plan_rendezvous(handles: object, own_handle: str, group_rank: Optional[int]) -> Rendezvous:
    """Rank and store for the group whose handle is `own_handle`; ValueError unless the handles are an ordered
    sequence of distinct torchft handles with our own among them.
    """
    if not isinstance(handles, Sequence) or isinstance(handles, (str, bytes)):
        raise ValueError(
            f"reconfigure handles must be a list, whose order gives the ranks, got a {type(handles).__name__}"
        )
    peers = [Handle.decode(text) for text in handles]
    ids = [peer.id for peer in peers]
    if len(set(ids)) != len(ids):
        raise ValueError(f"reconfigure handles must be distinct, got {list(handles)!r}")
    own = Handle.decode(own_handle)
    if own.id not in ids:
        raise ValueError(
            f"this group's own handle {own_handle!r} is not among the reconfigure handles {list(handles)!r}"
        )

    global_ranks = [peer.global_rank for peer in peers if peer.global_rank is not None]
    return Rendezvous(
        store=peers[_host_of(peers, group_rank or 0)].store,
        rank=ids.index(own.id),
        world_size=len(peers),
        global_ranks=global_ranks if len(global_ranks) == len(peers) else None,
    )


def _host_of(peers: list[Handle], group_rank: int) -> int:
    """The index of the handle whose store all peers use, the same on every peer."""
    if not all(peer.spread for peer in peers):
        return 0
    # Groups with different group ranks are not connected by a quorum, but by hand: each would wait for the
    # others at a different store.
    if any(peer.group_rank not in (None, group_rank) for peer in peers):
        return 0
    return group_rank % len(peers)


def host_store(timeout: timedelta) -> tuple[TCPStore, str]:
    """Starts a TCPStore on a free port of this host. Returns it and the "host:port" to announce."""
    store = TCPStore(
        # Only this process connects to this address; the server listens on every address.
        host_name=loopback(),
        port=0,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
    )
    return threaded(store), host_port(announced_host(), store.port)


def meeting_store(store_addr: str, world_size: int, timeout: timedelta) -> Store:
    """The store in which the peers of a group meet; `store_addr` and `timeout` as in create_store_client. A
    group without peers opens no connection: PyTorch's stores ask the name server at each connection, and wait
    for seconds if its answer is lost.
    """
    if world_size > 1:
        return create_store_client(store_addr, timeout)
    _parse_store_address(store_addr)
    store: Store = HashStore()
    store.set_timeout(timeout)
    return store


def create_store_client(store_addr: str, timeout: timedelta) -> Store:
    """Connects to a TCPStore.

    Args:
        store_addr: "host:port/prefix"; the prefix may be missing or have several parts, an IPv6
            address stands in brackets.
        timeout: timeout of connecting, and of every operation that waits for a key.

    Raises:
        ValueError: `store_addr` is malformed.
    """
    host, port, prefix = _parse_store_address(store_addr)
    began = time.monotonic()
    store: Store = TCPStore(
        host_name=store_host(host),
        port=port,
        is_master=False,
        wait_for_workers=False,
        timeout=timeout,
    )
    if (took := time.monotonic() - began) > _SLOW_SEC:
        _logger.warning(
            "connecting to the store at %s took %.1f s: PyTorch asks the name server for the name of its "
            "address, and waits 5 s for a lost answer; RES_OPTIONS can shorten that "
            "(docs/troubleshooting.md)",
            store_addr,
            took,
        )
    _attempt.check()
    if prefix:
        store = PrefixStore(prefix, store)
    # A PrefixStore starts with the default timeout of five minutes; it does not take over that of the
    # underlying store.
    store.set_timeout(timeout)
    return store


def _parse_store_address(store_addr: str) -> tuple[str, int, str]:
    """Host, port and prefix."""
    address, _, prefix = store_addr.partition("/")
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"store address {store_addr!r} must be host:port or host:port/prefix, with a port from 1 to 65535"
        )
    return host, int(port), prefix


def supports_reconfigure(pg: object) -> bool:
    """Whether the Manager can give `pg` new peers."""
    try:
        return bool(getattr(pg, "supports_reconfigure", False))
    except RuntimeError:  # a native group without a backend, or with several
        return False


def reconfigure_with_store(
    pg: dist.ProcessGroup,
    store_addr: str,
    rank: int,
    world_size: int,
    timeout: timedelta = timedelta(seconds=60),
) -> None:
    """Connects `pg` with its peers over a store, without a Manager. Each peer calls this.

    Rank 0 publishes a number that names the reconfiguration under the key `uuid`, every rank its
    handle under `handle/{rank}`.

    Args:
        store_addr: "host:port/prefix"; the prefix must not have been used for this before.
        timeout: timeout of the whole call.

    Raises:
        ValueError: `pg` cannot be reconfigured, or the rank is not one of `world_size`.
    """
    if not supports_reconfigure(pg):
        raise ValueError(
            f"{type(pg).__name__} does not support reconfiguration; a native group needs PyTorch >= 2.14 and "
            "init_process_group(..., enable_reconfigure=True)"
        )
    check_rank(rank, world_size)
    store = create_store_client(store_addr, timeout=timeout)
    reconfigure_group(pg, exchange_handles(store, pg.get_reconfigure_handle(), rank, world_size, timeout))


def check_rank(rank: int, world_size: int) -> None:
    """Raises ValueError unless a group of this size has the rank."""
    if not 0 <= rank < world_size:
        raise ValueError(f"configure: rank {rank} must be between 0 and world_size - 1 = {world_size - 1}")


def exchange_handles(
    store: Store, handle: str, rank: int, world_size: int, timeout: timedelta
) -> ReconfigureOptions:
    """The options of a reconfiguration whose peers exchange handles over a store: each of them calls this.
    The store's keys must not have been used for this before; it has its own timeout.
    """
    store.set(f"handle/{rank}", handle)
    if rank == 0:
        store.set("uuid", str(random.randint(1, _MAX_UUID)))
    try:
        # One request for all keys: the time of a request for each would grow with the number of groups.
        *handles, uuid = store.multi_get([*(f"handle/{peer}" for peer in range(world_size)), "uuid"])
        return options_of(int(uuid), [handle.decode() for handle in handles], timeout)
    except RuntimeError as e:
        raise named_timeout(e) from e.__cause__
