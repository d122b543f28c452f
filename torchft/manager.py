"""The Manager: what a training loop talks to.

A step of a rank is ``start_quorum`` (who takes part?), a forward and a backward pass with ``allreduce``, and
``should_commit`` (did everybody finish?). Errors of other groups never raise into the model: they are kept, and the
step is not committed. What to do about a quorum is decided in ``_manager/plan.py``; this file carries it out.

It is long because it is one object: all that a training loop can say, over state that other projects read and replace
here by name.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ReduceOp, TCPStore

from torchft._manager.errors import ExceptionWithTraceback
from torchft._manager.failures import FailureListener, PeerFailed
from torchft._manager.incident import Incident
from torchft._manager.inputs import Inputs, Kept
from torchft._manager.layout import LayoutDiffers, check_layouts, digest, read_layout
from torchft._manager.log import _ManagerLogger
from torchft._manager.peers import check_process_group, configure_by_store
from torchft._manager.plan import Plan, WorldSizeMode, make_plan
from torchft._manager.recovery import Position, Recovery
from torchft._manager.replay import MOST_REPLAYS, Attempt, peers_fault, why_anew, why_not
from torchft._manager.rounds import Round, Rounds, make_rounds
from torchft._manager.settings import (
    CONNECT_TIMEOUT_SEC_ENV,
    MANAGER_ADDR_KEY,
    MANAGER_PORT_ENV,
    QUORUM_RETRIES_ENV,
    QUORUM_TIMEOUT_SEC_ENV,
    REPLAY_FAILED_STEP_ENV,
    REPLICA_ID_KEY,
    TIMEOUT_SEC_ENV,
    TORCH_FR_DUMP_TEMP_FILE_ENV,
    check_limits,
    check_positive,
    extract_trailing_digits,
    failure_bus_from_env,
    get_timeout,
    global_rank,
    heal_sources_from_env,
    resolve,
    switch_from_env,
)
from torchft._manager.state import DEFAULT_KEY, UserState
from torchft._manager.work import _ManagedFuture, _ManagedWork, _SimpleFuture
from torchft._torchft import ManagerClient, ManagerServer, MemberFailure, QuorumResult
from torchft.addresses import announced_host, announced_store_host
from torchft.checkpointing import CheckpointTransport, HTTPTransport
from torchft.collectives import allreduce_quantized, check_quantizable
from torchft.futures import future_timeout
from torchft.process_group.native import abort_group, native_error, reconfigure_group
from torchft.process_group.reconfigure import ReconfigureOptions
from torchft.utils import get_stream_context
from torchft.work import _DummyWork

__all__ = [
    "CONNECT_TIMEOUT_SEC_ENV",
    "IS_TRITON_AVAILABLE",
    "MANAGER_ADDR_KEY",
    "MANAGER_PORT_ENV",
    "QUORUM_RETRIES_ENV",
    "QUORUM_TIMEOUT_SEC_ENV",
    "REPLICA_ID_KEY",
    "TIMEOUT_SEC_ENV",
    "TORCH_FR_DUMP_TEMP_FILE_ENV",
    "ExceptionWithTraceback",
    "Manager",
    "WorldSizeMode",
    "_ManagedFuture",
    "_ManagedWork",
    "_ManagerLogger",
    "_SimpleFuture",
    "extract_trailing_digits",
    "get_timeout",
]

T = TypeVar("T")

# How long an aborted collective may take to end. Gloo's take some 10 ms.
_ABORT_TIMEOUT = timedelta(seconds=1)
# Between two aborts of a group that connects.
_ABORT_AGAIN_SEC = 0.05

CommitHook = Callable[[int, bool, int], None]
FailureCallback = Callable[[MemberFailure], None]

IS_TRITON_AVAILABLE = True
try:
    import triton  # noqa: F401
except ImportError:
    IS_TRITON_AVAILABLE = False


class Manager:
    """Takes one rank through its steps: quorum, healing, collectives, commit.

    Args:
        pg: the group whose ranks are the replica groups; rebuilt for each new quorum. A torchft process group, or a
            native one made with ``init_process_group(..., enable_reconfigure=True)`` (PyTorch >= 2.14).
        load_state_dict: loads what a peer's ``state_dict`` gave; None: registered later.
        state_dict: gives all state that a group needs to catch up; None: registered later.
        min_replica_size: fewest groups that may commit a step, at least 1.
        use_async_quorum: ask for the quorum during the forward pass; a group that heals then sits out one step.
        timeout: for collectives, healing and commit votes.
        quorum_timeout: for waiting until there is a quorum.
        connect_timeout: for reaching the lighthouse and manager servers.
        rank: of this process in its group; default: RANK.
        world_size: ranks in the group; default: WORLD_SIZE.
        world_size_mode: whether the number of participants may change.
        store_addr: host of the group's TCPStore; default: MASTER_ADDR.
        store_port: its port; default: MASTER_PORT.
        lighthouse_addr: ``http://host:port``; default: TORCHFT_LIGHTHOUSE. Needed by rank 0.
        replica_id: name of this group; a UUID is appended, so that a restarted group is a new member.
        port: of the manager server; default: TORCHFT_MANAGER_PORT, else any free one.
        hostname: under which the manager server is announced; left at its default, ``torchft.addresses`` decides.
        heartbeat_interval: between two heartbeats to the lighthouse.
        checkpoint_transport: how a healing group gets its state; default: HTTP.
        init_sync: at step 0, take the primary's weights in all groups.
        max_retries: steps in a row that may fail before ``should_commit`` raises; None: any number.
        quorum_retries: how often an error of the lighthouse is tried again.
        enable_error_bus: end collectives as soon as the lighthouse tells that a peer of them died, without waiting for
            their timeout; None: as TORCHFT_FAILURE_BUS says (on).
        replay_failed_step: when a peer dies in mid-step, reduce this group's own gradients again with those that are
            left, and commit the same step: docs/replay.md. Costs a copy of all that is reduced. All groups must have
            it; None: as TORCHFT_REPLAY_FAILED_STEP says (off).

    Raises:
        ValueError: a setting is missing or out of range.
        RuntimeError: the lighthouse or the manager server cannot be reached within ``connect_timeout``.

    The environment wins over the timeouts given here: TORCHFT_TIMEOUT_SEC, TORCHFT_QUORUM_TIMEOUT_SEC,
    TORCHFT_CONNECT_TIMEOUT_SEC, TORCHFT_QUORUM_RETRIES.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        load_state_dict: Optional[Callable[[T], None]],
        state_dict: Optional[Callable[[], T]],
        min_replica_size: int,
        use_async_quorum: bool = True,
        timeout: timedelta = timedelta(seconds=60),
        quorum_timeout: timedelta = timedelta(seconds=60),
        connect_timeout: timedelta = timedelta(seconds=60),
        rank: Optional[int] = None,
        world_size: Optional[int] = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: Optional[str] = None,
        store_port: Optional[int] = None,
        lighthouse_addr: Optional[str] = None,
        replica_id: Optional[str] = None,
        port: Optional[int] = None,
        hostname: str = socket.gethostname(),
        heartbeat_interval: timedelta = timedelta(milliseconds=100),
        checkpoint_transport: Optional[CheckpointTransport[Dict[str, T]]] = None,
        init_sync: bool = True,
        max_retries: Optional[int] = None,
        quorum_retries: int = 0,
        enable_error_bus: Optional[bool] = None,
        replay_failed_step: Optional[bool] = None,
    ) -> None:
        settings = resolve(
            rank=rank,
            world_size=world_size,
            store_addr=store_addr,
            store_port=store_port,
            lighthouse_addr=lighthouse_addr,
            port=port,
            timeout=timeout,
            quorum_timeout=quorum_timeout,
            connect_timeout=connect_timeout,
            heartbeat_interval=heartbeat_interval,
            quorum_retries=quorum_retries,
        )
        check_limits(min_replica_size, max_retries)
        check_process_group(pg)
        self._settings = settings
        self._group_rank = settings.group_rank
        self._group_world_size = settings.group_world_size
        self._timeout = settings.timeout
        self._quorum_timeout = settings.quorum_timeout
        self._connect_timeout = settings.connect_timeout
        self._min_replica_size = min_replica_size
        self._use_async_quorum = use_async_quorum
        self._world_size_mode = world_size_mode
        self._init_sync = init_sync
        self._max_retries = max_retries
        self._enable_error_bus = failure_bus_from_env() if enable_error_bus is None else enable_error_bus
        if replay_failed_step is None:
            replay_failed_step = switch_from_env(REPLAY_FAILED_STEP_ENV, default=False)

        self._step = 0
        self._batches_committed = 0
        self._commit_failures = 0
        self._committed_quorum_id = -1  # the quorum that made the weights: none since this process began
        self._commit_hooks: List[CommitHook] = []
        self._layout: Optional[List[str]] = None  # what is reduced, a line for each tensor

        self._inputs = Inputs() if replay_failed_step else None  # of this step's allreduces
        self._replay_hooks: List[Callable[[], None]] = []
        self._gradients: List[Callable[[], Iterable[torch.Tensor]]] = []
        self._request: tuple[bool, bool, timedelta] = (True, False, self._quorum_timeout)  # of the last quorum
        # The state for which the quorum of the next step is known already: a replay asked for it, and was none.
        self._ahead: Optional[Position] = None

        self._user_state = UserState(self._timeout.total_seconds())
        self._load_state_dict_fns = self._user_state.load_fns
        self._user_state_dicts = self._user_state.read_fns
        self._state_dict_lock = self._user_state.lock
        if load_state_dict is not None and state_dict is not None:
            self.set_state_dict_fns(load_state_dict, state_dict)
        elif load_state_dict is not None or state_dict is not None:
            raise ValueError("load_state_dict and state_dict belong together: pass both, or None for both")

        # Of the current quorum. Written by the thread that finishes the round, read by others once it is over.
        self._quorum_id = -1
        self._participating_replica_rank: Optional[int] = None
        self._participating_replica_world_size = 0
        self._healing = False
        self._plan: Optional[Plan] = None
        self._plan_of: tuple[Optional[QuorumResult], bool] = (None, True)
        self._asked = 0.0  # when, by time.monotonic()
        self._rounds: Optional[Rounds] = None
        self._round: Optional[Round] = None

        self._errored: Optional[ExceptionWithTraceback] = None
        # A failed heal spoils this group's step, but its peers still count on it in their collectives.
        self._collectives_usable = True
        self._aborted = False
        # Of each quorum that is followed, or may be yet, the first member that died, by what the lighthouse told. The
        # lock: its thread ends the collectives of one step, and never of the next.
        self._failures: Dict[int, MemberFailure] = {}
        self._failure_lock = threading.Lock()
        self._incident: Optional[Incident] = None  # a failure after which nothing was committed yet
        self._connecting = False  # the process group gets the peers of a new quorum
        self._failure_callbacks: List[FailureCallback] = []
        self._failure_listener: Optional[FailureListener] = None
        self._works: List[_ManagedWork] = []

        self._original_fr_dump_temp_file = os.environ.get(TORCH_FR_DUMP_TEMP_FILE_ENV)
        accelerated = torch.accelerator.is_available()
        self._device_index: Optional[int] = torch.accelerator.current_device_index() if accelerated else None
        self._recovery_stream: Optional[torch.Stream] = torch.Stream() if accelerated else None

        self._pg = pg
        self._manager: Optional[ManagerServer] = None
        self._checkpoint_transport: CheckpointTransport[Any] = checkpoint_transport or HTTPTransport(
            timeout=self._timeout, num_chunks=0
        )
        self._recovery = Recovery(
            transport=self._checkpoint_transport,
            user_state=self._user_state,
            group_rank=self._group_rank,
            connect=lambda address, timeout: ManagerClient(address, connect_timeout=timeout),
            timeout=self._timeout,
            connect_timeout=self._connect_timeout,
            sources=heal_sources_from_env(),
            in_background=use_async_quorum,
            logger=lambda: self._logger,
        )
        try:
            self._join_group(replica_id, hostname)
        except BaseException:
            self.shutdown(wait=False)
            raise
        self._logger = _ManagerLogger(manager=self, replica_id=self._replica_id, group_rank=self._group_rank)

    def _join_group(self, replica_id: Optional[str], hostname: str) -> None:
        """Rank 0 starts the manager server and tells the others where it is; then every rank connects to it."""
        settings = self._settings
        store: dist.Store = TCPStore(
            host_name=settings.store_addr,
            port=settings.store_port,
            is_master=False,
            wait_for_workers=False,
            timeout=settings.timeout,
        )
        if settings.restart_count:
            # torchrun's agent keeps the store when it restarts the workers: what the last ones wrote is stale.
            store = PrefixStore(f"torchft/restart_{settings.restart_count}", store)
        self._store = store
        if self._group_rank == 0:
            replays = {"replays_failed_steps": True} if self._inputs is not None else {}
            lighthouse_addr = settings.require_lighthouse()
            full_id = f"{replica_id}:{uuid.uuid4()}" if replica_id else str(uuid.uuid4())
            self._manager = ManagerServer(
                replica_id=full_id,
                lighthouse_addr=lighthouse_addr,
                hostname=hostname if hostname != socket.gethostname() else announced_host(lighthouse_addr),
                bind=f"[::]:{settings.manager_port}",
                store_addr=announced_store_host(settings.store_addr, settings.store_port, lighthouse_addr),
                world_size=self._group_world_size,
                heartbeat_interval=settings.heartbeat_interval,
                connect_timeout=settings.connect_timeout,
                quorum_retries=settings.quorum_retries,
                **replays,
            )
            store.set(MANAGER_ADDR_KEY, self._manager.address())
            store.set(REPLICA_ID_KEY, full_id)
        address = store.get(MANAGER_ADDR_KEY).decode("utf-8")
        self._replica_id = store.get(REPLICA_ID_KEY).decode("utf-8")
        self._client = ManagerClient(address, connect_timeout=settings.connect_timeout)
        self._client._group_world_size = self._group_world_size  # refused if rank 0 has another one
        self._rounds = make_rounds(self._client)
        self._failure_listener = FailureListener(
            self._client, self._group_rank, self._peer_failed, self._peer_stalled, self._progress
        )
        set_rank_info = getattr(self._pg, "set_rank_info", None)
        if set_rank_info is not None:  # a native group has no such method
            set_rank_info(
                self._replica_id,
                self._group_rank,
                self._group_world_size,
                global_rank(self._replica_id, self._group_rank, self._group_world_size),
            )

    # State that heals others

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]
    ) -> None:
        """Adds a part to the state that a healing group gets.

        Raises:
            ValueError: the key is taken.
        """
        self._user_state.register(key, load_state_dict, state_dict)

    def register_layout(self, what: str, lines: Sequence[str]) -> None:
        """Says what this group is going to reduce, so that groups which differ are found out before they do.

        They are compared in each new quorum. A group that does not fit into a running job gets a ValueError from
        ``start_quorum`` (or what waits for the quorum); the others lose that step. Only torchft's process groups carry
        it, and the published package announces nothing.

        Args:
            what: whose tensors they are.
            lines: a line for each tensor, in the order in which they are reduced.
        """
        self._layout = [*(self._layout or ()), *(f"{what}: {line}" for line in lines)]
        announce = getattr(self._pg, "announce_layout", None)
        if announce is not None:  # a native group has none
            announce(digest(self._layout), "\n".join(self._layout))

    def set_state_dict_fns(self, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]) -> None:
        """Sets the main part of the state, in place of what the constructor got."""
        self._load_state_dict_fns[DEFAULT_KEY] = load_state_dict
        self._user_state_dicts[DEFAULT_KEY] = state_dict

    def allow_state_dict_read(self) -> None:
        """Undoes :meth:`disallow_state_dict_read`."""
        self._user_state.allow_read()

    def disallow_state_dict_read(self) -> None:
        """Keeps healing groups from reading the state while the caller changes it."""
        self._user_state.disallow_read()

    def load_state_dict(self, state_dict: Dict[str, int]) -> None:
        """Sets step and batches_committed, as :meth:`state_dict` gave them."""
        self._position = Position(state_dict["step"], state_dict["batches_committed"], committed_quorum_id=-1)

    def state_dict(self) -> Dict[str, int]:
        """What a checkpoint must keep of the Manager."""
        return {"step": self._step, "batches_committed": self._batches_committed}

    def _manager_state_dict(self) -> Dict[str, Any]:
        return {"user": self._user_state.read(), "torchft": self.state_dict()}

    @property
    def _pending_state_dict(self) -> Optional[Dict[str, Any]]:
        return self._recovery.pending

    @property
    def _position(self) -> Position:
        return Position(self._step, self._batches_committed, self._committed_quorum_id)

    @_position.setter
    def _position(self, position: Position) -> None:
        self._step, self._batches_committed, self._committed_quorum_id = position

    # Quorum

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: Optional[timedelta] = None
    ) -> None:
        """Begins a step: asks who takes part in it. Every rank of the group calls it, before the forward pass.

        With ``use_async_quorum`` it returns at once, and the first allreduce waits for the quorum; else it returns when
        there is one and this group has healed.

        Args:
            allow_heal: whether to fetch a peer's state when this group is behind.
            shrink_only: let no new group in.
            timeout: default: ``quorum_timeout``.

        Raises:
            RuntimeError, TimeoutError: with a synchronous quorum, when there is none.
        """
        timeout = _given("timeout", timeout, self._quorum_timeout)
        if self._inputs is not None:
            self._inputs.begin()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead == self._position and self._request[:2] == (allow_heal, shrink_only):
                return  # should_commit asked for this step's quorum, and waited for it
            self._abort_collectives()  # the others count on this group in the quorum that it leaves
        self._begin_round(allow_heal, shrink_only, timeout)
        if not self._use_async_quorum:
            self.wait_quorum()
            self._heal_before_step()

    def _begin_round(self, allow_heal: bool, shrink_only: bool, timeout: timedelta) -> None:
        if self._rounds is None:
            raise RuntimeError("the Manager is shut down")
        if self._round is not None:
            self._round.wait()  # its error went to whoever asked for that quorum
        self._request = allow_heal, shrink_only, timeout
        self._discard_unloaded_heal()
        with self._failure_lock:
            self._errored = None
            self._collectives_usable = True
            self._aborted = False
            self._healing = False
            self._works = []
        self._asked = time.monotonic()
        self._client._committed_quorum_id = self._committed_quorum_id
        self._round = self._rounds.begin(
            partial(self._follow, allow_heal),
            group_rank=self._group_rank,
            step=self._step,
            checkpoint_metadata=self._checkpoint_transport.metadata(),
            shrink_only=shrink_only,
            timeout=timeout,
            init_sync=self._init_sync,
            commit_failures=self._commit_failures,
            reconfigure_handle=self._pg.get_reconfigure_handle(),
        )

    def _heal_before_step(self) -> None:
        if self._healing and self._apply_pending_state_dict() and not self._use_async_quorum:
            self._healing = False  # healed before the step began: this group takes part in it

    def wait_quorum(self) -> None:
        """Waits until this step's quorum is known, the process group is ready and a heal has arrived.

        Raises:
            RuntimeError: there is no quorum, or start_quorum was not called.
            TimeoutError: there was none in time.
        """
        if self._round is None:
            raise RuntimeError("start_quorum must be called before anything that needs the quorum")
        self._round.result()

    def _follow(self, allow_heal: bool, result: QuorumResult) -> None:
        """Does what a quorum asks for, on some thread. Every wait in it has a deadline: whoever waits for it ends."""
        plan = self._plan_for(result, allow_heal)
        self._participating_replica_rank = plan.participating_rank
        self._participating_replica_world_size = plan.divisor
        self._healing = plan.heal
        self._recovery.check(plan)
        if self._device_index is not None:
            torch.accelerator.set_device_index(self._device_index)
        if plan.heal:
            # All ranks of the group vote on the step that it heals to, also one whose heal fails.
            self._recovery.begin(self._position, self._asked)
            self._step = plan.max_step
        if plan.quorum_id != self._quorum_id:
            self._incident_phase("quorum")
            with self._recovery.phases.measure("reconfigure") if plan.heal else nullcontext():
                self._follow_quorum(plan)
            self._incident_phase("reconfigure")
        if plan.recover_dst or plan.help_dst or plan.heal:
            with get_stream_context(self._recovery_stream):
                self._recover(plan)

    def _plan_for(self, result: QuorumResult, allow_heal: bool) -> Plan:
        # Rounds give the very same result again while nothing changes.
        if self._plan is None or self._plan_of[0] is not result or self._plan_of[1] != allow_heal:
            self._plan = make_plan(
                result,
                use_async_quorum=self._use_async_quorum,
                allow_heal=allow_heal,
                world_size_mode=self._world_size_mode,
                min_replica_size=self._min_replica_size,
            )
            self._plan_of = (result, allow_heal)
        return self._plan

    def _follow_quorum(self, plan: Plan) -> None:
        """Rebuilds the process group for a new quorum. A failure costs the step, and the next quorum has a new id."""
        with self._failure_lock:
            self._quorum_id = plan.quorum_id
            self._connecting = True
            self._failures = {q: failure for q, failure in self._failures.items() if q >= plan.quorum_id}
        self._logger.quorum_event()
        self._logger.info(
            f"quorum {plan.quorum_id}: replica rank {plan.replica_rank} of {plan.replica_world_size}, "
            f"{plan.participants} up to date at step {plan.max_step}"
        )
        if self._original_fr_dump_temp_file is not None:
            # PyTorch's flight recorder appends the rank: each quorum's dump gets a file of its own
            os.environ[TORCH_FR_DUMP_TEMP_FILE_ENV] = f"{self._original_fr_dump_temp_file}_quorum{plan.quorum_id}_"
        try:
            self._check_peers()
            check_layouts(plan, self._layout, new_here=self._committed_quorum_id < 0, read=read_layout)
            if plan.handles:
                self._reconfigure_pg(plan.quorum_id, plan.handles)
            else:
                configure_by_store(self._pg, plan, self._replica_id, self._settings)
        except LayoutDiffers as e:
            if e.ours_to_mend:
                raise
            self.report_error(e)  # the others go; the next quorum is without them
        except Exception as e:
            self._logger.exception(f"the process group could not be made for quorum {plan.quorum_id}: {e}")
            self._step_failed(e)
        finally:
            self._connecting = False

    def _reconfigure_pg(self, communicator_id: int, handles: list[str]) -> None:
        """The one place where a new quorum's handles reach the process group."""
        opts = ReconfigureOptions()
        opts.uuid = communicator_id
        opts.handles = handles
        opts.timeout = self._timeout
        reconfigure_group(self._pg, opts)

    # Healing

    def _recover(self, plan: Plan) -> None:
        """Serves this group's state, or fetches a peer's. A failure costs this group the step, and nobody else."""
        try:
            self._recovery.serve(plan, self._manager_state_dict)
            if plan.heal:
                self._position = self._recovery.fetch(plan)
        except Exception as e:
            self._logger.exception(f"healing failed: {e}")
            self._keep_error(e)  # the peers still count on this group in their collectives

    def finish_serving(self) -> None:
        """Returns when no group that heals reads this one's state any more: before a change of it in mid-step.

        A step that ends with :meth:`should_commit` needs no such call. Streaming DiLoCo does: inner steps go on while a
        collective runs. Those of a step end only after the groups that heal have what they need.
        """
        if self._plan is not None and (self._plan.recover_dst or self._plan.help_dst):
            for work in self._works:
                work.wait()
            self._checkpoint_transport.disallow_checkpoint()

    def _apply_pending_state_dict(self) -> bool:
        """Loads what a heal fetched. False if there is nothing, or the user's function failed."""
        try:
            return self._recovery.load()
        except Exception as e:
            self._keep_error(e)
            return False

    def _discard_unloaded_heal(self) -> None:
        """Goes back to the step whose weights this group really has, so that it is healed again."""
        before = self._recovery.discard()
        if before is not None:
            self._position = before

    # Collectives

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: ReduceOp = ReduceOp.AVG
    ) -> dist._Work:
        """Reduces a tensor over the participating groups, in place.

        It never raises for a peer's failure: the work then ends with the tensor as it is, and the step is not
        committed. A group that heals, or is a spare, contributes zeros.

        Args:
            tensor: any shape; floating point for AVG. All groups pass the same shape and dtype, in the same order.
            should_quantize: 8-bit codes travel, a quarter of float32's bytes; see :mod:`torchft.collectives` for the
                error. float32, float16 and bfloat16 only.
            reduce_op: AVG divides the sum by :meth:`num_participants`.

        Returns:
            Work whose future gives ``tensor``.

        Raises:
            ValueError: AVG of a tensor that is not floating point, or a dtype or reduction that cannot be quantized.
        """
        if should_quantize:
            check_quantizable(tensor, reduce_op)
        if reduce_op == ReduceOp.AVG and not tensor.dtype.is_floating_point:
            raise ValueError(f"reduce_op=AVG needs a floating point tensor, this one is {tensor.dtype}; use SUM")
        kept = None
        try:
            self.wait_quorum()
            if self._inputs is not None:
                kept = self._keep(self._inputs, tensor, reduce_op, should_quantize)
            work = self._reduce(tensor, reduce_op, should_quantize)
        except Exception as e:
            self._logger.exception(f"allreduce failed: {e}")
            self._report_collective_error(e)
            work = None
        if work is None:
            if kept is not None:
                kept.settle()
            return _DummyWork(tensor)
        if kept is not None:
            work.on_end(kept.settle)
        return work

    def _reduce(self, tensor: torch.Tensor, reduce_op: ReduceOp, should_quantize: bool) -> Optional[_ManagedWork]:
        """Begins to reduce a tensor with the others; None after an error."""
        self._check_peers()
        if not self._collectives_usable:
            self._abort_collectives()  # the peers wait for what is skipped here
            return None
        if not self.is_participating():
            tensor.zero_()
        op = ReduceOp.SUM if reduce_op == ReduceOp.AVG else reduce_op
        if should_quantize:
            reduction = allreduce_quantized([tensor], op, self._pg)
        else:
            reduction = self._pg.allreduce([tensor], _allreduce_options(op))
        work = _ManagedWork(self, reduction, tensor)
        self._works.append(work)
        self._check_peers()  # what was told since the first look found no work to end
        if reduce_op == ReduceOp.AVG and self._participating_replica_world_size > 1:
            work.on_success(partial(tensor.div_, self._participating_replica_world_size))
        return work

    def report_error(self, e: Exception) -> None:
        """Marks the step as failed: later collectives of it are skipped, and it will not be committed."""
        self._refuse_replay(f"the training loop reported an error: {e}")
        self._step_failed(e)

    def _step_failed(self, e: Exception) -> None:
        self._collectives_usable = False
        self._keep_error(e)

    def _report_collective_error(self, e: Exception) -> None:
        """As report_error, for a collective that failed: no peer shall wait for what is left of this quorum.

        Only the neighbours of a dead group see its connection break. Their abort lets the others see it too.
        """
        if not peers_fault(e):
            self._refuse_replay(f"a collective cannot be done: {e!r}")
        elif not self._aborted and not isinstance(e, PeerFailed) and self._failure_listener and self._plan:
            others = [i for i in self._plan.replica_ids if i != self._replica_id]
            self._failure_listener.suspect(self._quorum_id, others)
        self._step_failed(e)
        self._abort_collectives()
        self._incident_phase("abort")

    def _abort_collectives(self) -> None:
        """Aborts the process group, once a step. The next quorum has a new id, as this step is not committed."""
        if self._aborted:
            return
        self._aborted = True
        try:
            abort_group(self._pg)
        except Exception as e:
            self._logger.exception(f"the process group could not be aborted: {e}")

    # Failures of peers

    def subscribe_failures(self, callback: FailureCallback) -> None:
        """Calls ``callback(failure)`` for each member of a quorum that the lighthouse tells is dead, on a thread of its
        own. With ``enable_error_bus`` off it tells of none.
        """
        self._failure_callbacks.append(callback)

    def _peer_failed(self, failure: MemberFailure) -> None:
        """Ends what waits for a peer that died. A step whose collectives have all ended is none the worse for it."""
        if not self._enable_error_bus:
            return
        with self._failure_lock:
            if failure.quorum_id >= self._quorum_id:  # one that is to come is looked at when it is followed
                self._failures.setdefault(failure.quorum_id, failure)
            mine = failure.quorum_id == self._quorum_id
            if mine and not self._connecting and any(not work.ended() for work in self._works):
                error = PeerFailed(failure)
                self._logger.warn(str(error))
                self._report_collective_error(error)
        # An abort that comes before the group has begun to connect finds nothing to end.
        while self._connecting and failure.quorum_id == self._quorum_id:
            abort_group(self._pg)
            time.sleep(_ABORT_AGAIN_SEC)
        for callback in self._failure_callbacks:
            callback(failure)

    def _peer_stalled(self, failure: MemberFailure) -> None:
        self._logger.warn(f"{failure.replica_id} of quorum {failure.quorum_id} is stalled: {failure.reason}")

    def _progress(self) -> tuple[bool, str]:
        """Whether this rank waits for other groups, and what it does; asked only when a step takes very long."""
        running = [i for i, work in enumerate(self._works) if not work.ended()]
        if self._connecting:
            return True, "connects with its peers"
        if running:
            return True, f"waits for its peers in collective {running[0]} of this step"
        if self._healing and self._pending_state_dict is None:
            return True, "fetches the state of a peer"
        return False, f"computes, after {len(self._works)} collectives of this step"

    def _check_peers(self) -> None:
        """Raises if a member of the present quorum is known to be dead."""
        failure = self._failures.get(self._quorum_id)
        if failure is not None:
            raise PeerFailed(failure)

    def _keep_error(self, e: Exception) -> None:
        if self._errored is None:  # what came first is the cause
            self._errored = ExceptionWithTraceback(e)
        if self._incident is None:
            self._incident = Incident(str(e), self._step, self._quorum_id)
        self._logger.error_event(e)

    def _incident_phase(self, name: str) -> None:
        incident = self._incident  # read once: the training thread ends it
        if incident is not None:
            incident.ended(name)

    def errored(self) -> Optional[ExceptionWithTraceback]:
        """The first error of this step, None if there is none."""
        return self._errored

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: Optional[timedelta] = None
    ) -> torch.futures.Future[T]:
        """A future that never fails: an error is reported and ``default`` takes the value's place.

        Args:
            fut: the future to wrap.
            default: the value after an error or a timeout.
            timeout: default: the Manager's.
        """

        def value_or_default(done: torch.futures.Future[T]) -> T:
            try:
                return done.value()
            except Exception as e:
                self._logger.exception(f"a future failed: {e}")
                self.report_error(e)
                return default

        return future_timeout(fut, _given("timeout", timeout, self._timeout)).then(value_or_default)

    # Commit

    def register_commit_hook(self, hook: CommitHook) -> None:
        """Calls ``hook(step, committed, participants)`` on the training thread after each decision.

        ``step`` is the step that was decided on. A hook that raises is logged and does not change the decision, which
        the other groups already act on.
        """
        self._commit_hooks.append(hook)

    def should_commit(self, timeout: Optional[timedelta] = None) -> bool:
        """Ends a step: whether all ranks of the group may apply it. A peer's state is loaded here if this group heals.

        Args:
            timeout: default: the Manager's.

        Returns:
            True: step the optimizer. False: do not; the next step begins with the same weights.

        Raises:
            RuntimeError: more than ``max_retries`` steps failed in a row, there is no quorum, or a rank of the group is
                gone.
            TimeoutError: not all ranks of the group voted in time.
        """
        timeout = _given("timeout", timeout, self._timeout)
        committed = self._try_step(timeout)
        step, why, failures = self._step, self._why_lost(), self._commit_failures
        if not committed and self._inputs is not None:
            committed = self._replay(self._inputs, timeout)
        self._logger.commit_event(committed)
        participants = self._participating_replica_world_size
        if committed:
            self._step += 1
            self._batches_committed += participants
            self._committed_quorum_id = self._quorum_id
            self._commit_failures = 0
            if self._incident is not None:
                self._incident.ended("next step")
                self._logger.failure_event(self._incident)
                self._incident = None
        else:
            self._commit_failures = failures + 1
            if self._incident is not None:
                self._incident.steps_lost += 1
                self._incident.ended("give up the step")
            self._logger.warn(f"step {step} is lost: {why}")
        if self._inputs is not None:
            self._inputs.begin()
        self._discard_unloaded_heal()
        self._run_commit_hooks(step, committed, participants)
        if self._max_retries is not None and self._commit_failures > self._max_retries:
            raise RuntimeError(
                f"{self._commit_failures} steps in a row were not committed, max_retries={self._max_retries} allows "
                f"{self._max_retries}; the last one: {why}"
            )
        return committed

    def _try_step(self, timeout: timedelta) -> bool:
        """Ends the collectives of an attempt at this step, and votes on it with the other ranks of the group."""
        self.wait_quorum()
        self._end_collectives()
        if self._recovery_stream is not None:
            self._recovery_stream.synchronize()
        error = _pg_error(self._pg)
        if error is not None:
            self._step_failed(error)
        if self._healing:
            self._apply_pending_state_dict()
        enough = self._enough()
        if not enough:
            self._logger.warn(
                f"{self._participating_replica_world_size} groups take part, {self._min_replica_size} are needed"
            )
        committed = self._client.should_commit(
            self._group_rank, self._step, enough and self._errored is None, timeout=timeout
        )
        # From here on the weights may change.
        self._checkpoint_transport.disallow_checkpoint()
        return committed

    def _enough(self) -> bool:
        return self._participating_replica_world_size >= self._min_replica_size

    def _end_collectives(self) -> None:
        """Waits for the collectives that nobody waited for; most have ended long ago.

        After a failure those in flight are aborted, and their real end is waited for: they must not write into memory
        that the next step uses.
        """
        for work in self._works:
            work.wait()
        if self._aborted:
            for work in self._works:
                if not work.drain(_ABORT_TIMEOUT):
                    self._refuse_replay("a collective that was aborted has not ended")
        self._works = []

    def _why_lost(self) -> str:
        if self._errored is not None:
            return str(self._errored.original_exception)
        return "another rank of the group voted against it" if self._enough() else "too few groups took part"

    def _run_commit_hooks(self, step: int, committed: bool, participants: int) -> None:
        for hook in self._commit_hooks:
            try:
                hook(step, committed, participants)
            except Exception as e:
                self._logger.exception(f"a commit hook failed: {e}")

    # Replay of a step that failed

    def register_replay_hook(self, hook: Callable[[], None]) -> None:
        """Calls ``hook()`` on the training thread when the gradients of a step have been reduced again.

        It does what the training loop does between the reduction and ``should_commit``: clipping, say, or copying what
        was reduced to where the optimizer reads it. Without a hook a step whose results were changed or copied is lost
        with a peer, as it is without ``replay_failed_step``. An error of the hook costs the step.
        """
        self._replay_hooks.append(hook)

    def _register_gradients(self, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
        """What an optimizer will read: a replay must reach all of it."""
        self._gradients.append(gradients)

    def _refuse_replay(self, reason: str) -> None:
        """This step does something that cannot be done again."""
        if self._inputs is not None:
            self._inputs.refuse(reason)

    def _keep(self, inputs: Inputs, tensor: torch.Tensor, reduce_op: ReduceOp, should_quantize: bool) -> Optional[Kept]:
        assert self._plan is not None  # the quorum was waited for
        reason = why_anew(self._plan)
        if reason is not None:
            inputs.refuse(reason)
        if self._layout is not None:
            inputs.refuse("with LocalSGD and DiLoCo, who has committed asks for a quorum only after its local steps")
        return inputs.keep(tensor, reduce_op, should_quantize)

    def _replay(self, inputs: Inputs, timeout: timedelta) -> bool:
        """Reduces a step that was not committed again, with the groups that are left; whether it is committed then.

        All ranks of the group replay, or none: so they vote on it.
        """
        for replays in range(MOST_REPLAYS + 1):
            reason = why_not(
                Attempt(replays=replays, kept=len(inputs), refused=inputs.refused, changed=self._why_changed(inputs))
            )
            try:
                if not self._client.should_commit(self._group_rank, self._step, reason is None, timeout=timeout):
                    self._logger.warn(f"the step is not reduced again: {reason or 'another rank of the group cannot'}")
                    return False
                self._commit_failures += 1  # the next quorum gets a new id, and new connections
                why = self._why_lost()
                self._begin_round(*self._request)
                self.wait_quorum()
            except Exception as e:
                self._logger.exception(f"the step is not reduced again: {e}")
                return False
            assert self._plan is not None
            reason = why_anew(self._plan)
            if reason is not None:
                self._logger.warn(f"the step is not reduced again: {reason}")
                self._leave_quorum_to_next_step()
                return False
            self._logger.info(f"reduced again with {self._plan.participants} groups, because {why}")
            self._reduce_again(inputs)
            if self._try_step(timeout):
                return True
        return False

    def _why_changed(self, inputs: Inputs) -> Optional[str]:
        if self._replay_hooks:
            return inputs.twice()
        gradients = [gradient for read in self._gradients for gradient in read()]
        return inputs.changed() or inputs.twice() or inputs.elsewhere(gradients)

    def _reduce_again(self, inputs: Inputs) -> None:
        try:
            for kept in inputs.restore():
                self._reduce(kept.tensor, kept.reduce_op, kept.should_quantize)
        except Exception as e:
            self._report_collective_error(e)
        self._end_collectives()
        inputs.settle()
        if self._errored is not None:
            return
        try:
            for hook in self._replay_hooks:
                hook()
        except Exception as e:
            self._logger.exception(f"a replay hook failed: {e}")
            self.report_error(e)

    def _leave_quorum_to_next_step(self) -> None:
        """The quorum of a replay that is none becomes that of the next step: the others count on this group in it.

        The state of a heal is loaded now. Between two steps the weights are those of the step.
        """
        if self._recovery_stream is not None:
            self._recovery_stream.synchronize()
        self._heal_before_step()
        if self._errored is None:
            self._ahead = self._position
        else:
            self._abort_collectives()

    # What the training loop may ask

    def current_step(self) -> int:
        """Steps committed so far; the number of the step that runs now."""
        return self._step

    def batches_committed(self) -> int:
        """Batches committed so far, over all groups."""
        return self._batches_committed

    def participating_rank(self) -> Optional[int]:
        """This group's rank among those that take part in the step, None if it does not. Waits for the quorum."""
        self.wait_quorum()
        return self._participating_replica_rank

    def num_participants(self) -> int:
        """Groups that take part in the step. Waits for the quorum."""
        self.wait_quorum()
        return self._participating_replica_world_size

    def recovery_seconds(self) -> Dict[str, float]:
        """Where the seconds of this rank's last heal went: ``quorum`` (waiting for one), ``reconfigure`` (the process
        group got its peers), ``transfer`` and ``load``. All are 0 if it never healed.
        """
        return dict(self._recovery.phases.seconds)

    def num_up_to_date(self) -> int:
        """Groups of this quorum that had the newest state when it formed; the others heal in it. Waits for the quorum.

        All groups of a quorum get the same number: one by which they can decide to leave together.
        """
        self.wait_quorum()
        assert self._plan is not None
        return self._plan.num_up_to_date

    def is_participating(self) -> bool:
        """Whether this group's gradients count in this step."""
        return self._participating_replica_rank is not None and not self._healing

    def shutdown(self, wait: bool = True) -> None:
        """Ends the manager server, the checkpoint server and the quorum thread. The process group is the caller's.

        Args:
            wait: until all of it has ended.
        """
        self._checkpoint_transport.shutdown(wait=wait)
        if self._manager is not None:
            self._manager.shutdown()
        # There is none if the constructor failed, and stand-ins have no shutdown.
        close_client = getattr(getattr(self, "_client", None), "shutdown", None)
        if close_client is not None:
            close_client()  # ends the rounds, and the thread that waits for them
        if self._rounds is not None:
            self._rounds.shutdown(wait=wait)
            self._rounds = None
        if self._failure_listener is not None and wait:
            self._failure_listener.join()


def _allreduce_options(op: ReduceOp) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def _given(name: str, value: Optional[timedelta], default: timedelta) -> timedelta:
    """The duration that a caller gave, checked, or the default."""
    if value is None:
        return default
    check_positive(name, value)
    return value


def _pg_error(pg: dist.ProcessGroup) -> Optional[Exception]:
    """What went wrong in a process group since it was made, if it noticed."""
    errored = getattr(pg, "errored", None)
    return errored() if errored is not None else native_error(pg)
