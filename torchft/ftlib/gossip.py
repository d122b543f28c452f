"""Consensus without a server: the members find each other by gossip (hashicorp/memberlist, in the Go core).

The consensus is passive: a thread waits for the core's reports about this member's view. ``go/gossip/agree``
decides on the views, and explains why at most one is live.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Optional

from torchft._security import security
from torchft._torchft import _GoServer, _micros
from torchft.addresses import announced_host, host_port
from torchft.ftlib.consensus import Consensus, Listener
from torchft.ftlib.views import Identity, Member, View, checked_name
from torchft.process_group.reconfigure import host_store

_logger = logging.getLogger(__name__)

_LONGEST_WAIT = timedelta(hours=1)


class Gossip(Consensus):
    """
    Args:
        seeds: "host:port" of members, as a list or separated by commas: this process joins the job of the
            first one that it reaches. Without seeds it founds the job. The first view of a job contains more
            than half of the seeds, so that all processes can have the same list of seeds, which may include
            themselves.
        name: name of this member, unique in the job; default: a random one. A process that starts under the
            name of a failed member replaces it.
        port: port for TCP and UDP; 0: any.
        min_members: the smallest list of members.
        timeout: timeout of waiting for a list of members.
        connect_timeout: timeout of reaching a seed.

    Raises:
        ValueError: a setting is not allowed.
        RuntimeError: no seed is reached in time, or the port is in use.
    """

    def __init__(
        self,
        seeds: str | Iterable[str] = (),
        name: Optional[str] = None,
        port: int = 0,
        min_members: int = 1,
        timeout: timedelta = timedelta(seconds=60),
        connect_timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self.identity = Identity(checked_name(name), time.time_ns())
        listed = seeds.split(",") if isinstance(seeds, str) else seeds
        named = [seed for seed in (str(each).strip() for each in listed) if seed]
        # This host's address on the route to a seed.
        host = announced_host(f"http://{named[0]}" if named else None)
        self._timeout = timeout
        self._listener: Optional[Listener] = None
        self._closed = threading.Event()
        self._store, _ = host_store(timeout)
        self._node = _Node(
            self.identity,
            {
                "store_address": host_port(host, self._store.port),
                "host": host,
                "port": port,
                "seeds": named,
                "min_members": min_members,
            },
            connect_timeout,
        )
        self._thread = threading.Thread(target=self._watch, name="torchft_ftlib_gossip", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """ "host:port", under which other processes can use this one as a seed."""
        return self._node.address()

    def attach(self, listener: Listener) -> None:
        self._listener = listener

    def get_member_list(self) -> View:
        self.identity, view = self._node.view(self.identity.name, self._timeout)
        return view

    def close(self) -> None:
        self._closed.set()
        self._node.shutdown()  # ends the thread
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while True:
            try:
                number, ended, joining = self._node.news(_LONGEST_WAIT)
            except TimeoutError:
                continue
            except Exception as e:
                if not self._closed.is_set():
                    _logger.warning("nothing more is heard of the other members: %s", e)
                return
            if self._listener is None:
                continue
            if ended:
                self._listener.member_failed(number, ended)
            elif joining:
                self._listener.new_member_join()


class _Node(_GoServer):
    """A node of ``go/gossip``."""

    __slots__ = ()

    def __init__(self, identity: Identity, config: dict[str, object], connect_timeout: timedelta) -> None:
        text = json.dumps({**identity._asdict(), **config})
        super().__init__("pyapi_GossipStart", text, _micros("connect_timeout", connect_timeout), security())

    def view(self, name: str, timeout: timedelta) -> tuple[Identity, View]:
        """Returns a view and this member's incarnation in it: the time, or more if that was taken."""
        answer = json.loads(
            self._go.run(self._go.pyapi_GossipViewStart, self._handle, _micros("timeout", timeout))
        )
        members = (Member(Identity(m["name"], m["incarnation"]), m["address"]) for m in answer["members"])
        return Identity(name, answer["incarnation"]), View(answer["number"], tuple(members))

    def news(self, timeout: timedelta) -> tuple[int, str, list[str]]:
        """Waits for a report: the view's number, why it has ended (else empty), and joining processes."""
        answer = json.loads(
            self._go.run(self._go.pyapi_GossipNewsStart, self._handle, _micros("timeout", timeout))
        )
        return answer["view"], answer["ended"], answer["joining"] or []
