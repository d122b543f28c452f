"""Adapters for clients, transports, process groups and works that may come from another project.

Such an object may have only upstream's methods. The rest of the Manager calls the adapters, which have the
others too: :func:`_attribute` takes what the object lacks from one class of defaults for each kind of object.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed as dist

from torchft import _torchft
from torchft._agreement import AVERAGES, CALLS, HEALS, VERSION, announce, bare
from torchft._manager.quorum.notices import FailureListener
from torchft._manager.quorum.plan import Plan
from torchft._manager.quorum.rounds import JobFinished
from torchft._manager.settings import Settings, global_rank
from torchft._torchft import QuorumRequest, QuorumResult, refusal
from torchft._version import __version__
from torchft.checkpointing import CheckpointTransport, HTTPTransport
from torchft.collectives import allreduce_quantized
from torchft.process_group._attempt import ConnectionAttempt
from torchft.process_group._errors import refuse_meta
from torchft.process_group.native import (
    abort_group,
    collectives_at_once,
    errors_of,
    reconfigure_group,
)
from torchft.process_group.reconfigure import ReconfigureOptions, is_native, supports_reconfigure
from torchft.process_group.wrapper import abortable
from torchft.work import AnyReduceOp

_logger = logging.getLogger("torchft.manager")

_DEFAULT_TIMEOUT = timedelta(seconds=60)


# Defaults


class _OfClient:
    def _leave(self, timeout: timedelta) -> None: ...

    def shutdown(self) -> None: ...


class _OfTransport:
    several_sources = takes_target = in_place = gives_parts = False

    def refuse_checkpoint(self, **what: Any) -> None: ...

    def abandon_receiving(self, reason: Exception) -> bool:
        return False


class _OfGroup:
    _reduces_sparse = True
    _averages = connects_standby = _reduces_each_dtype = False
    _device = "cpu"

    def set_rank_info(self, *rank: object) -> None: ...

    def announce_layout(self, digest: str, lines: str) -> None: ...

    def share_buffer(self, buffer: torch.Tensor) -> None: ...


def _attribute(given: Any, defaults: type, name: str) -> Any:
    """An attribute of an object; the default if it has none. A value of another type than the default's is
    that of a test double, and counts as missing.
    """
    if not hasattr(defaults, name):
        return getattr(given, name)
    default = getattr(defaults(), name)
    own = getattr(given, name, default)
    return own if callable(default) or type(own) is type(default) else default


# The manager server


class GroupServer:
    """The manager server of a rank's group, through any client.

    Args:
        client: has the methods of upstream's ``ManagerClient``.
        group_rank: the number of this rank in its group.

    Attributes:
        client: the client in use, which may be replaced.
        native: whether the client is torchft's own, and so its group a member of a job.
    """

    native = False

    def __init__(self, client: Any, group_rank: int) -> None:
        self.client = client
        self._group_rank = group_rank

    def standing(self, request: QuorumRequest) -> Optional[QuorumResult]:
        """The result of a quorum that stands: the last one, without a request. None: :meth:`ask` next."""
        return None

    def ask(self, request: QuorumRequest, timeout: timedelta) -> Callable[[], QuorumResult]:
        """Requests a quorum.

        Args:
            request: the request of this rank.
            timeout: of the whole wait; a standby asks again and again.

        Returns:
            The function that waits for the result: JobFinished if this group has nothing to train, SystemExit
            if it is a standby that is to leave.
        """
        return lambda: _whole(self.client._quorum(timeout=timeout, **request.as_upstream()))

    def vote(self, step: int, yes: bool, timeout: timedelta) -> bool:
        """Whether all ranks of the group vote yes."""
        return self.client.should_commit(self._group_rank, step, yes, timeout=timeout)

    def leave(self, timeout: timedelta) -> None:
        """Reports the end of this group's last step, and waits until no group needs it."""
        _attribute(self.client, _OfClient, "_leave")(timeout)

    def close(self) -> None:
        """Shuts the client down, which ends its pending calls."""
        _attribute(self.client, _OfClient, "shutdown")()

    def listen(self, about: Mapping[str, Callable[..., Any]]) -> None:
        """Starts to receive notices about members (:class:`FailureListener`). Upstream's client has none."""

    def join(self) -> None:
        """Blocks until no further notice is received; close the client first."""

    def request_drain(self) -> None:
        """Requests that this group leaves, before the next request for a quorum says so."""

    def suspect(self, quorum_id: int, others: list[str]) -> None:
        """Reports that a collective with these groups failed. With several, the failed one is not known."""

    def report(self, kind: str, **fields: Any) -> None:
        """Reports the fields of a request of RankRequest in the proto, for logs, dashboard or metrics."""


class _NativeServer(GroupServer):
    """The manager server through torchft's own client, which can do more than upstream's."""

    native = True
    _listener: FailureListener | None = None
    _last: Optional[QuorumResult] = None  # of the last quorum; None while another one is requested

    def standing(self, request: QuorumRequest) -> Optional[QuorumResult]:
        last = self._last
        if not self.client._stands_for(request, last) or last is None:
            return None
        last.max_step = request.step
        return last

    def ask(self, request: QuorumRequest, timeout: timedelta) -> Callable[[], QuorumResult]:
        last, self._last = self._last, None
        begun = self.client._begin_round(request, timeout)  # now, not when it is waited for

        def wait() -> QuorumResult:
            nonlocal begun
            while True:
                try:
                    result = self.client._end_round(begun)
                    if last is not None and _repeats(result, last):
                        last.max_step = result.max_step
                        result = last
                    self._last = result
                    return result
                except (TimeoutError, RuntimeError) as e:
                    why = refusal(e)
                    if why == "ended":
                        _logger.warning(f"this group trains nothing: {e}")  # a status of 0 says nothing
                        raise JobFinished(str(e)) from None
                    if why == "unneeded":
                        _logger.info("the script ends: %s", e)
                        # not StopIteration or alike: what follows the loop is for groups that have trained
                        raise SystemExit(0) from None
                    if why != "held":
                        raise
                begun = self.client._begin_round(request, timeout)

        return wait

    def vote(self, step: int, yes: bool, timeout: timedelta) -> bool:
        committed = super().vote(step, yes, timeout)
        # This rank lacks the step's gradients: if it continued, its weights would differ.
        if committed and not yes:
            raise RuntimeError(f"the manager server committed step {step}, which this rank voted against")
        return committed

    def listen(self, about: Mapping[str, Callable[..., Any]]) -> None:
        self._listener = FailureListener(self.client, self._group_rank, about)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.end()
        super().close()

    def join(self) -> None:
        if self._listener is not None:
            self._listener.join()

    def request_drain(self) -> None:
        self._send(drain=True)

    def suspect(self, quorum_id: int, others: list[str]) -> None:
        if others:
            self._send(
                suspected={"quorum_id": quorum_id, "replica_id": others[0] if len(others) == 1 else ""}
            )

    def report(self, kind: str, **fields: Any) -> None:
        self._send(**{kind: {"group_rank": self._group_rank, **fields}})

    def _send(self, **report: Any) -> None:
        try:
            self.client._report(**report)
        except RuntimeError as e:  # the client is shut down
            _logger.debug("not sent: %s", e)


def as_server(client: Any, group_rank: int) -> GroupServer:
    """The manager server behind a client.

    A subclass of torchft's client counts as upstream's: it may override upstream's methods, and only
    :class:`GroupServer` goes through them (torchft's own path bypasses ``_quorum``, for example). The rank
    then receives no notices of failures.
    """
    return (_NativeServer if type(client) is _torchft.ManagerClient else GroupServer)(client, group_rank)


def _repeats(result: QuorumResult, last: QuorumResult) -> bool:
    """Whether a result differs from the last one in the step only. One with a heal is followed each time, by
    the groups that take no part in it as well: they wait for it, in the step of that result (heal/wait.py).
    """
    heals = result.heal or result.recover_dst_replica_ranks or result.help_dst_replica_ranks
    behind = result.max_world_size < result.replica_world_size
    return not (heals or behind) and replace(last, max_step=result.max_step) == result


def _whole(result: Any) -> QuorumResult:
    """A quorum's result with all fields; those that another class, or a mock, lacks get their defaults."""
    if type(result) is QuorumResult:
        return result
    whole = QuorumResult()
    for name, default in vars(whole).items():
        own = getattr(result, name, default)
        if type(own) is (int if default is None else type(default)):
            setattr(whole, name, own)
    return whole


# The transport of a state


class Transport:
    """A checkpoint transport with all methods and attributes of :class:`CheckpointTransport` and
    HTTPTransport that a Manager uses.

    Args:
        transport: has at least the methods of upstream's ``CheckpointTransport``.

    Attributes:
        transport: the transport in use, which may be replaced.
    """

    def __init__(self, transport: CheckpointTransport[Any]) -> None:
        self._first: Any = transport
        self.transport: Any = transport

    @property
    def own(self) -> bool:
        """Whether it is torchft's default, which serves only what it was given. A subclass is not."""
        return type(self.transport) is HTTPTransport

    def __getattr__(self, name: str) -> Any:
        return _attribute(self.transport, _OfTransport, name)

    def is_for(self, transport: Any) -> bool:
        """Whether it adapts this transport."""
        return self.transport is transport

    def abandon_receiving(self, reason: Exception) -> bool:
        """Aborts the running transfer, if there is one. Returns False if the transport cannot abort."""
        return _attribute(self.transport, _OfTransport, "abandon_receiving")(reason) is not False

    def shutdown(self, wait: bool) -> None:
        """Shuts down the transport in use, and the first one, which only the Manager may refer to."""
        for transport in {id(one): one for one in (self.transport, self._first)}.values():
            transport.shutdown(wait=wait)


# The transport of tensors


class Peers:
    """A process group whose peers change with the quorum: torchft's, or another project's.

    Args:
        pg: the process group, which stays the same object. One of PyTorch is aborted and reconfigured by
            functions of torchft.

    Attributes:
        pg: the process group in use; assigning another one detects its abilities again.
        error: returns the error that the process group has noticed, or None.
        at_once: the number of threads that the process group has for collectives and keeps when its peers
            change, so that aborted collectives occupy them until their timeout; None: it gets new threads
            with new peers.
        on_device: whether it is of a class of torchft that communicates on a device.
        ours: whether it is a group of torchft, or of a class derived from one, which reduces tensors of each
            dtype.
    """

    def __init__(self, pg: Any) -> None:
        self.pg = pg

    @property
    def pg(self) -> Any:
        return self._pg

    @pg.setter
    def pg(self, pg: Any) -> None:
        self._pg = pg
        self._native = is_native(pg)
        self.at_once: Optional[int] = collectives_at_once(pg) if self._native else None
        self.error = errors_of(pg)
        self.on_device = _attribute(type(pg), _OfGroup, "_device") != "cpu"
        self.ours = _attribute(type(pg), _OfGroup, "_reduces_each_dtype")
        self._abortable = abortable(pg)  # an abort ends all waits for its collectives
        self._takes_stores = hasattr(pg, "configure")

    @property
    def connects_standby(self) -> bool:
        """Whether it can connect with other peers while it keeps the present ones."""
        return _attribute(self.pg, _OfGroup, "connects_standby")

    def set_rank_info(self, replica_id: str, group_rank: int, group_world_size: int) -> None:
        """Tells the process group which rank it belongs to, for its handle; native handles have none."""
        number = global_rank(replica_id, group_rank, group_world_size)
        _attribute(self.pg, _OfGroup, "set_rank_info")(replica_id, group_rank, group_world_size, number)

    def announce_layout(self, digest: str, lines: str) -> None:
        """Describes in the store of the handle what this rank reduces; a native handle names none."""
        _attribute(self.pg, _OfGroup, "announce_layout")(digest, lines)

    def share_buffer(self, buffer: torch.Tensor) -> None:
        """Lets an isolated group share the memory of a buffer with its worker, so that nothing is copied."""
        _attribute(self.pg, _OfGroup, "share_buffer")(buffer)

    def check_sparse(self, names: list[str]) -> None:
        """Raises a ValueError for parameters with sparse gradients, if the group takes no sparse tensors."""
        if names and not _attribute(self.pg, _OfGroup, "_reduces_sparse"):
            raise ValueError(
                f"{type(self.pg).__name__} reduces dense tensors only, and the gradients of "
                f"{', '.join(names)} are sparse: pass sparse=False to their layers, or use ProcessGroupGloo"
            )

    def handle(self, announces: Iterable[tuple[str, str]] = ()) -> str:
        """The reconfigure handle by which peers connect with this rank. `announces`: what the handle
        announces (_agreement.py), beside what depends on the process group.
        """
        own = (
            (AVERAGES, "1" if _attribute(self.pg, _OfGroup, "_averages") else ""),
            (CALLS, "1" if self.ours else ""),
            (HEALS, "1" if self.ours or self._native else ""),
            (VERSION, __version__),
        )
        return announce(self.pg.get_reconfigure_handle(), (*announces, *own), self._native)

    def reconfigure(self, opts: ReconfigureOptions) -> None:
        """Connects with the peers that the handles in ``opts`` name."""
        if self._native:
            opts.handles = [bare(handle) for handle in opts.handles]
        reconfigure_group(self.pg, opts)

    def connect_standby(self, opts: ReconfigureOptions) -> ConnectionAttempt[Any]:
        """Begins to connect with the peers that the handles in ``opts`` name, and keeps the present ones."""
        return self.pg.connect_standby(opts)

    def hand_over(self) -> None:
        """Replaces the present peers by those of :meth:`connect_standby`."""
        self.pg.hand_over()

    def abandon_standby(self, error: Exception, attempt: Optional[ConnectionAttempt[Any]] = None) -> None:
        """Ends the attempt of :meth:`connect_standby`: this one, or the latest."""
        self.pg.abandon_standby(error, attempt)

    def configure_by_store(self, plan: Plan, replica_id: str, settings: Settings) -> None:
        """Connects with peers as torchft 0.2.0 does, which has no handles: they meet in the primary's store.

        Raises:
            RuntimeError: this kind of process group needs handles, and a group of the quorum announced none.
            Exception: whatever the group's ``configure`` raises.
        """
        if not self._takes_stores:
            if replica_id in plan.without_handles:
                who = f"the lighthouse at {settings.lighthouse_addr} does not pass them on"
            else:
                who = f"missing are those of {plan.without_handles or plan.replica_ids}"
            raise RuntimeError(
                f"{type(self.pg).__name__} can only be rebuilt from reconfigure handles, and quorum "
                f"{plan.quorum_id} came without: {who} (torchft 0.2.0 has none)"
            )
        group_rank, group_world_size = settings.group_rank, settings.group_world_size
        self.pg.configure(
            f"{plan.store_address}/torchft/{plan.quorum_id}/{group_rank}",
            replica_id,
            plan.replica_rank,
            plan.replica_world_size,
            quorum_id=plan.quorum_id,
            group_rank=group_rank,
            group_world_size=group_world_size,
            global_ranks=[global_rank(i, group_rank, group_world_size) for i in plan.replica_ids],
        )

    def allreduce(self, tensor: torch.Tensor, op: AnyReduceOp, should_quantize: bool) -> dist._Work:
        """Begins to reduce a tensor in place; ``should_quantize``: in 8 bits. ValueError: no memory."""
        if tensor.is_meta:
            refuse_meta(lambda: type(self.pg).__name__, "allreduce", tensor)
        if should_quantize:
            return allreduce_quantized([tensor], op, self._abortable)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return self._abortable.allreduce([tensor], options)

    def abort(self) -> None:
        """Ends all collectives in flight. The process group must be reconfigured before its next use."""
        abort_group(self.pg)


def as_peers(pg: dist.ProcessGroup) -> Peers:
    """The peers that a process group connects with. ValueError: it cannot be rebuilt for other peers."""
    if not supports_reconfigure(pg):
        raise ValueError(
            f"pg={type(pg).__name__}: this process group does not support reconfiguration, so it cannot "
            "outlive the failure of a peer; use one of torchft.process_group, or make a native one with "
            "init_process_group(..., enable_reconfigure=True) (PyTorch >= 2.14)"
        )
    return Peers(pg)


# The works that collectives return


class WorkKind(NamedTuple):
    """The abilities of the works of a class."""

    drains: bool  # has ``drain`` and ``ended``: an abort ends a wait before the backend ends the operation
    foreign: bool  # of another project: its future may fail although its wait does not
    limited: bool  # its wait takes a timeout; that of a test double may not
    # A wait with a timeout may block the host until the device has finished, as with PyTorch's NCCL.
    polls: bool
    order: Optional[Callable[[Any, Optional[timedelta]], object]]  # makes the current stream wait for a work
    # the future of a work; None for a test double, whose operation counts as never finished
    future: Callable[[Any], Optional[torch.futures.Future[Any]]]


_PYTORCHS_ORDER = getattr(dist._Work, "block_current_stream", None)  # PyTorch 2.7 has none


def work_kind(work: dist._Work) -> WorkKind:
    """The abilities of a work, found once for each class: a process group has few classes."""
    return _kind_of(type(work), hasattr(work, "block_current_stream"))


@lru_cache(maxsize=64)
def _kind_of(kind: type, orders: bool) -> WorkKind:
    modules = [base.__module__ for base in kind.__mro__]
    ours = any(module.startswith("torchft.") for module in modules)  # its waits are inherited
    foreign = not ours and not modules[0].startswith("torch.")
    order: Optional[Callable[[Any, Optional[timedelta]], object]] = None
    if not orders:
        order = _wait
    elif _PYTORCHS_ORDER is None or getattr(kind, "block_current_stream", None) is not _PYTORCHS_ORDER:
        order = _order
    return WorkKind(
        drains=hasattr(kind, "drain"),
        foreign=foreign,
        limited=_takes_timeout(kind),
        polls=not ours,
        # PyTorch's block_current_stream needs CUDA, and for works of torchft `wait` does the same
        order=None if ours else order,
        future=_future_if_any if foreign else _future,
    )


def _takes_timeout(kind: Any) -> bool:
    try:
        inspect.signature(kind.wait).bind(None, None)
    except TypeError:
        return False
    except (AttributeError, ValueError):  # a mock, or a work of PyTorch
        return True
    return True


def _order(work: Any, timeout: Optional[timedelta]) -> object:
    return work.block_current_stream()


def _wait(work: Any, timeout: Optional[timedelta]) -> object:
    """For works of PyTorch 2.7 and test doubles, which have no ``block_current_stream``."""
    return work.wait() if timeout is None else work.wait(timeout)


def _future(work: Any) -> torch.futures.Future[Any]:
    return work.get_future()


def _future_if_any(work: Any) -> Optional[torch.futures.Future[Any]]:
    future: Any = work.get_future()
    return future if issubclass(type(future), torch._C.Future) else None


def timeout_of(manager: Any) -> timedelta:
    """The timeout of the Manager that began a work; of a test double without one, a Manager's default."""
    timeout = getattr(manager, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else _DEFAULT_TIMEOUT


# The device type of the tensors that a backend other than Gloo reduces.
_DEVICES = {"nccl": "cuda", "xccl": "xpu"}


def device_of(pg: Any) -> torch.device:
    """The device of a tensor that a process group can reduce, from its class or the name of its backend."""
    kind = _attribute(type(pg), _OfGroup, "_device")
    if kind != "cpu":
        return torch.device(kind)
    name = pg.name().lower()
    return torch.device(next((device for backend, device in _DEVICES.items() if backend in name), "cpu"))
