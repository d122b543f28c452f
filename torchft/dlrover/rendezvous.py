"""torchrun's rendezvous through the lighthouse, whose decisions are in ``go/rendezvous``.

Nodes send JSON over HTTP with the job's token: nothing from the network is unpickled.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Optional

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from torchft._forked import Maker, threaded
from torchft._lighthouse_http import HttpLighthouse, Unanswered, address_of
from torchft._security import ROUND_ENV
from torchft.addresses import announced_host, host_port, loopback

logger: logging.Logger = logging.getLogger(__name__)

BACKEND = "torchft"
# The lighthouse answers a request within 2.5 s; a busy one takes longer.
_ANSWER_SEC = 15.0
_RETRY_SEC = 0.2
# How long a round's nodes wait for each other at rank 0's store: one may have ended since the release.
_MEET_SEC = 15.0
# Timeout of torchrun's agents at that store; c10d has the same.
_STORE_SEC = 60.0


@dataclass(frozen=True)
class RendezvousRound:
    """A round of a rendezvous, for one node of it.

    Attributes:
        number: number of the round, which increases by one with each round of the group.
        rank: rank of this node.
        size: number of nodes.
        store: ``host:port`` of rank 0's store.
    """

    number: int
    rank: int
    size: int
    store: str


class TorchRendezvousService:
    """A node in the rendezvous of its group. It reports to the lighthouse from its construction until
    ``close``.

    Until its first :meth:`set_state` the lighthouse counts it as starting.

    Args:
        endpoint: ``host:port`` of the lighthouse, or its address; those of a cluster are separated by commas.
        run_id: ``JOB/GROUP``, or ``GROUP`` alone, which is then the job's name too.
        store: ``host:port`` of the store that this node offers, should it become rank 0.
        min_nodes: least number of nodes of a round.
        max_nodes: largest number of nodes.
        sizes: allowed numbers of nodes in this range: ``"all"``, ``"powers_of_two"``, or a list such as
            ``"1/2/4"``.
        last_call_timeout: seconds to wait for further nodes once a round could be released.
        connect_timeout: seconds to wait for the lighthouse's first answer.

    Raises:
        ValueError: a setting is not allowed.
        RendezvousConnectionError: no lighthouse answers.
        RendezvousError: the lighthouse refuses this node: the token is wrong, or other nodes use the run id
            with other settings.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        *,
        store: str,
        min_nodes: int,
        max_nodes: int,
        sizes: str = "all",
        last_call_timeout: float = 30.0,
        connect_timeout: float = 60.0,
    ) -> None:
        job, _, group = run_id.partition("/")
        self._maker = Maker(type(self).__name__)
        self._address = address_of(endpoint)
        self._lighthouse = HttpLighthouse(self._address, job, timeout=_ANSWER_SEC, polls=True)
        self._claim = {
            "group": group,
            "node": uuid.uuid4().hex,
            "store": store,
            "min": min_nodes,
            "max": max_nodes,
            "sizes": sizes,
            "last_call_ms": round(last_call_timeout * 1000),
        }
        self._changed = threading.Condition()
        self._ask = 0
        self._view: dict[str, Any] = {}
        self._reason = ""
        self._trouble: Unanswered | None = None
        self._ended = threading.Event()
        self._connect(connect_timeout)
        self._thread = threading.Thread(target=self._attend, name="torchft-rendezvous", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether no further round follows, because a node of the group has finished its work."""
        return bool(self._view.get("closed"))

    @property
    def waiting(self) -> int:
        """The number of waiting nodes for which this node should end its round; the last known value while
        the lighthouse does not answer.
        """
        view = self._view
        return int(view.get("waiting", 0)) if view.get("ask") == self._ask else 0

    @property
    def reason(self) -> str:
        """Why there is no round yet."""
        trouble = self._trouble  # read once: the thread clears it
        return str(trouble) if trouble is not None else self._reason

    def set_state(self) -> None:
        """Requests the next round. That ends the round in which this node is.

        Raises:
            RendezvousError: the lighthouse refuses this node.
        """
        self._maker.check()
        with self._changed:
            self._ask += 1
        try:
            self._request(self._view)  # no wait: the thread receives later answers, in order
        except Unanswered as error:
            self._note(error)  # the thread retries
            if error.refused:
                raise _refused(error) from None
        else:
            self._trouble = None

    def get_state(self, timeout: float = 0.0) -> Optional[RendezvousRound]:
        """Returns the round requested by ``set_state``; None if it is not released within ``timeout``
        seconds.

        Raises:
            RendezvousClosedError: no further round follows.
            RendezvousError: the lighthouse refuses this node.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                self._changed.wait_for(self._decided, max(0.0, deadline - time.monotonic()))
                view, trouble = self._view, self._trouble
            if self.closed:
                raise RendezvousClosedError(
                    f"the rendezvous at {self._address} is closed: a node has ended its work"
                )
            if trouble is not None and trouble.refused:
                raise _refused(trouble)
            if not self._decided():
                return None
            if view["store"]:
                return RendezvousRound(view["round"], view["rank"], view["size"], view["store"])
            self.set_state()  # the round ended before this node learned of it

    def close(self, finished: bool = True) -> None:
        """Leaves the group. ``finished`` closes the rendezvous: no round follows. May be called twice."""
        self._maker.check()
        if self._ended.is_set():
            return
        self._ended.set()
        try:
            self._lighthouse.post("/rendezvous", {**self._claim, "leave": True, "close": finished}, 2.0)
        except Unanswered as error:
            logger.warning("the rendezvous is left without a word: %s", error)
        self._thread.join(1.0)  # ends: the lighthouse answers the pending request when the node leaves

    def set_closed(self) -> None:
        """Closes the rendezvous for all nodes."""
        self._maker.check()
        try:
            self._request(self._view, close=True)
        except Unanswered as error:
            raise _refused(error) from None

    def _decided(self) -> bool:
        view, trouble = self._view, self._trouble  # read once: the thread replaces them
        if self.closed or (trouble is not None and trouble.refused):
            return True
        return view.get("ask") == self._ask > 0 and view["round"] > 0

    def _connect(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                # A request with an outdated view is answered at once.
                self._take(self._request({"closed": True}, timeout=min(timeout, _ANSWER_SEC)))
                return
            except Unanswered as error:
                if error.refused:
                    raise _refused(error) from None
                if time.monotonic() + _RETRY_SEC > deadline:
                    raise RendezvousConnectionError(
                        f"rendezvous: connecting timed out after connect_timeout={timeout:g} s: {error}"
                    ) from None
            time.sleep(_RETRY_SEC)

    def _attend(self) -> None:
        while not self._ended.is_set():
            try:
                answer = self._request(self._view)
            except Unanswered as error:
                self._note(error)
                self._ended.wait(_RETRY_SEC)
            else:
                self._take(answer)

    def _request(self, seen: dict[str, Any], close: bool = False, timeout: Optional[float] = None) -> Any:
        claim = {**self._claim, "ask": self._ask, "seen": seen, "close": close}
        answer = self._lighthouse.post("/rendezvous", claim, timeout)
        if not isinstance(answer, dict) or not isinstance(answer.get("view"), dict):
            raise Unanswered(f"{self._address} answered {str(answer)[:80]!r}: is it a lighthouse?", 404)
        return answer

    def _take(self, answer: Any) -> None:
        view = answer["view"]
        with self._changed:
            if not self._ended.is_set():
                self._view, self._reason = view, answer["reason"]
            self._trouble = None
            self._changed.notify_all()

    def _note(self, error: Unanswered) -> None:
        with self._changed:
            if self._trouble is None and not self._ended.is_set():
                logger.warning("rendezvous: %s", error)
            self._trouble = error
            self._changed.notify_all()


def _refused(error: Unanswered) -> Exception:
    return (
        ValueError(f"rendezvous: {error}") if error.code == 400 else RendezvousError(f"rendezvous: {error}")
    )


class DlroverRendezvousBackend(RendezvousBackend):
    """The rendezvous of a group as a ``RendezvousBackend`` of PyTorch: the state is the round as JSON, the
    token its number.

    It is for code that calls a backend directly. PyTorch's dynamic handler unpickles the state of a backend
    and cannot use this one; torchrun uses :class:`LighthouseRendezvousHandler`.
    """

    def __init__(self, service: TorchRendezvousService) -> None:
        self._service = service

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> Optional[tuple[bytes, int]]:
        """Returns the round of this node and its number; None until it is released."""
        released = self._service.get_state()
        return None if released is None else (json.dumps(released.__dict__).encode(), released.number)

    def set_state(self, state: bytes, token: Optional[Any] = None) -> Optional[tuple[bytes, int, bool]]:
        """Requests the round after the one with this token; None: the first one.

        Args:
            state: ignored, because the lighthouse decides on the members of a round.
            token: token of the round known to this node.

        Returns:
            the known round, its token, and whether a new round was requested; None if no round is known.
        """
        known = self.get_state()
        fits = token == (known[1] if known else None)
        if fits:
            self._service.set_state()
        return None if known is None else (*known, fits)


class LighthouseRendezvousHandler(RendezvousHandler):
    """``torchrun --rdzv-backend torchft``: see docs/dlrover.md.

    Args:
        service: this node at the lighthouse.
        run_id: torchrun's run id.
        store: the store that ``service`` offers.
        host: host name under which others reach this node.
        join_timeout: seconds to wait for a round.
    """

    def __init__(
        self,
        service: TorchRendezvousService,
        run_id: str,
        store: dist.TCPStore,
        host: str,
        join_timeout: float = 600.0,
    ) -> None:
        self._service = service
        self._run_id = run_id
        self._own_store = store
        self._host = host
        self._join_timeout = join_timeout
        self._workers_store: Optional[dist.TCPStore] = None
        self._in_round = False

    @classmethod
    def from_parameters(cls, parameters: RendezvousParameters) -> LighthouseRendezvousHandler:
        """Makes the handler for torchrun; ``--rdzv-conf`` takes join_timeout, and settings of the service.

        Raises:
            ValueError: a setting is not known or not allowed.
        """
        # Settings of torchrun.
        conf = {k: v for k, v in parameters.config.items() if k not in ("timeout", "rank")}
        numbers = {}
        for name, default in (
            ("last_call_timeout", 30.0),
            ("connect_timeout", 60.0),
            ("join_timeout", 600.0),
        ):
            text = conf.pop(name, default)
            try:
                numbers[name] = float(text)
            except ValueError:
                raise ValueError(f"--rdzv-conf {name}={text!r} is not allowed; allowed: seconds") from None
            if not 0 <= numbers[name] <= 86400:
                raise ValueError(f"--rdzv-conf {name}={text!r} is not allowed; allowed: 0 to 86400 seconds")
        sizes = str(conf.pop("sizes", "all"))
        if conf:
            raise ValueError(
                f"--rdzv-conf {', '.join(sorted(conf))}: not known to {BACKEND}; allowed: connect_timeout, "
                "join_timeout, last_call_timeout, sizes"
            )
        host = parameters.local_addr or announced_host(address_of(parameters.endpoint))
        store = _serve_store()
        service = TorchRendezvousService(
            parameters.endpoint,
            parameters.run_id,
            store=host_port(host, store.port),
            min_nodes=parameters.min_nodes,
            max_nodes=parameters.max_nodes,
            sizes=sizes,
            last_call_timeout=numbers["last_call_timeout"],
            connect_timeout=numbers["connect_timeout"],
        )
        return cls(service, parameters.run_id, store, host, numbers["join_timeout"])

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the store that rank 0's agent makes for them, a new one in each round."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the next round with this node.

        Raises:
            RendezvousClosedError: the group has ended its work.
            RendezvousTimeoutError: there was no round within join_timeout.
            RendezvousError: the lighthouse refuses this node.
        """
        deadline = time.monotonic() + self._join_timeout
        self._in_round = False
        missed = ""
        while True:
            self._service.set_state()
            released = self._service.get_state(deadline - time.monotonic())
            if released is None or (missed and time.monotonic() > deadline):
                why = "; ".join(filter(None, (self._service.reason, missed)))
                raise RendezvousTimeoutError(
                    f"rendezvous {self._run_id!r} timed out after join_timeout={self._join_timeout:g} s: "
                    f"{why}"
                )
            try:
                info = self._meet(released)
                self._in_round = True
                os.environ[ROUND_ENV] = str(released.number)
                return info
            except (RuntimeError, OSError) as error:
                missed = f"the nodes of round {released.number} did not meet at {released.store}: {error}"
                logger.warning("rendezvous: %s; asking again", missed)

    def _meet(self, released: RendezvousRound) -> RendezvousInfo:
        """Waits until all nodes of a round are connected to its store: one may have ended since."""
        store: dist.Store = self._own_store
        if released.rank:
            host, _, port = released.store.rpartition(":")
            meet = timedelta(seconds=_MEET_SEC)
            store = dist.TCPStore(
                host.strip("[]"), int(port), is_master=False, timeout=meet, wait_for_workers=False
            )
        store.set_timeout(timedelta(seconds=_STORE_SEC))
        store = dist.PrefixStore(f"torchft/rendezvous/{self._run_id}/{released.number}", store)
        store.set(f"here/{released.rank}", "")
        store.wait([f"here/{rank}" for rank in range(released.size)], timedelta(seconds=_MEET_SEC))
        port_of_workers = None
        if self.use_agent_store and released.rank == 0:
            # not the store of the previous round, which still has its keys
            self._workers_store = _serve_store()
            port_of_workers = self._workers_store.port
        workers = RendezvousStoreInfo.build(released.rank, store, self._host, port_of_workers)
        return RendezvousInfo(store, released.rank, released.size, workers)

    def is_closed(self) -> bool:
        return self._service.closed

    def set_closed(self) -> None:
        self._service.set_closed()

    def num_nodes_waiting(self) -> int:
        """The number of nodes for which this node's workers should restart. Does not wait for the network."""
        return self._service.waiting

    def get_run_id(self) -> str:
        """The id without a slash, because torchrun names a log directory after it."""
        return self._run_id.replace("/", "_")

    def shutdown(self) -> bool:
        """Leaves the group. If this node is in a round, this reports the work as finished; otherwise the
        others continue. torchrun calls it after each error, including errors of ``next_rendezvous``, but not
        after a signal.
        """
        self._service.close(finished=self._in_round)
        return True


def _serve_store() -> dist.TCPStore:
    # The address is only for this process's own connection; other nodes may use any name of this host.
    return threaded(dist.TCPStore(loopback(), 0, is_master=True, wait_for_workers=False, multi_tenant=False))
