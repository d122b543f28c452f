"""The Manager: the object that a training loop calls.

A step of a rank is ``start_quorum``, a forward and a backward pass with ``allreduce``, and ``should_commit``.
Errors of other groups are not raised in the training loop: the Manager keeps them, and does not commit the
step.

The file is long because it is one object: the methods for training loops, and the order of a step. Each part
is a separate object in ``_manager/``, whose ``__init__`` lists them. The base classes are there as well:
``Stepping`` begins steps, follows their quorums and answers questions about them; ``ManagerParts`` puts the
parts together; ``Stateful`` has the state from step to step.
"""

from __future__ import annotations

import logging
import socket
import sys
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any, Callable, Dict, Iterable, Optional, Sequence, TypeVar, Union

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from torchft._forked import Maker
from torchft._handoff import hand_off, prepare
from torchft._manager.checks.loader import Loader
from torchft._manager.edge import GroupServer, Transport, as_peers, as_server, device_of
from torchft._manager.heal.in_passing import StillHealing
from torchft._manager.heal.recovery import Recovery
from torchft._manager.heal.wait import HealWait
from torchft._manager.lifetime import began, earlier, ended, life_of
from torchft._manager.observe.log import _ManagerLogger
from torchft._manager.observe.own_time import ranged
from torchft._manager.quorum.group import join_group
from torchft._manager.quorum.plan import Plan, Planner, WorldSizeMode
from torchft._manager.quorum.rounds import JobFinished, Rounds
from torchft._manager.rank import Position
from torchft._manager.settings import (
    CONNECT_TIMEOUT_SEC_ENV,
    MANAGER_ADDR_KEY,
    MANAGER_PORT_ENV,
    QUORUM_RETRIES_ENV,
    QUORUM_TIMEOUT_SEC_ENV,
    REPLICA_ID_KEY,
    TIMEOUT_SEC_ENV,
    TORCH_FR_DUMP_TEMP_FILE_ENV,
    HealMode,
    check_limits,
    extract_trailing_digits,
    get_timeout,
    given,
    resolve,
)
from torchft._manager.signals import Signals, leave_on_from_env
from torchft._manager.snapshots.copies import Snapshots
from torchft._manager.step.collectives import check_reducible
from torchft._manager.step.errors import ExceptionWithTraceback
from torchft._manager.step.failures import FailureCallback, PeerFailed
from torchft._manager.step.replay import MOST_REPLAYS
from torchft._manager.step.step import Step, StepRequest
from torchft._manager.step.work import _ManagedFuture, _ManagedWork, _SimpleFuture
from torchft._manager.stepping import OwnExtras, Stepping
from torchft._torchft import ManagerClient, ManagerServer
from torchft.addresses import use_lighthouse
from torchft.checkpointing import CheckpointTransport, HTTPTransport
from torchft.futures import future_timeout
from torchft.work import AnyReduceOp, _DummyWork

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
    "JobFinished",
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

CommitHook = Callable[[int, bool, int], None]

# Not imported: the import of Triton takes longer than torchft's, and each restarted group would wait.
IS_TRITON_AVAILABLE = find_spec("triton") is not None


def _connect(address: str, timeout: timedelta) -> ManagerClient:
    """Opens a client to a manager server. The class is looked up here at each call: tests replace it."""
    return ManagerClient(address, connect_timeout=timeout)


class Manager(Stepping):
    """Takes one rank through its steps: quorum, healing, collectives, commit.

    Args:
        pg: the group whose ranks are the replica groups; rebuilt for each new quorum. A torchft process
            group, or a native one made with ``init_process_group(..., enable_reconfigure=True)`` (PyTorch >=
            2.14).
        load_state_dict: loads what a peer's ``state_dict`` gave; None: registered later.
        state_dict: gives all state that a group needs to catch up; None: registered later.
        min_replica_size: fewest groups that may commit a step, at least 1; the lighthouse has its own limit,
            ``--min_replicas``.
        use_async_quorum: connect and heal during the forward pass; a group that heals then sits out one step.
            False with LocalSGD, DiLoCo, and a GradScaler.
        timeout: for collectives, heals and commit votes: longer than the slowest step, and than a pause of a
            heal. If it is too short, steps are lost; it is also the wait for a peer that hangs.
        quorum_timeout: for waiting until there is a quorum: longer than the lighthouse's
            ``--join_timeout_ms``, and than a restart of the lighthouse.
        connect_timeout: for reaching the lighthouse and manager servers: longer than their start.
        rank: of this process in its group; default: RANK.
        world_size: ranks in the group; default: WORLD_SIZE.
        world_size_mode: whether the number of participants may change; FIXED_WITH_SPARES: further groups
            train along with zeros.
        store_addr: host of the group's TCPStore; default: MASTER_ADDR.
        store_port: its port; default: MASTER_PORT.
        lighthouse_addr: ``http://host:port``; default: TORCHFT_LIGHTHOUSE. Needed by rank 0.
        replica_id: name of this group; a UUID is appended, so that a restarted group is a new member.
        port: of the manager server; default: TORCHFT_MANAGER_PORT, else any free one.
        hostname: under which the manager server is announced; left at its default, ``torchft.addresses``
            decides.
        heartbeat_interval: between two heartbeats to the lighthouse; a small part of its
            ``--heartbeat_timeout_ms``.
        checkpoint_transport: how a healing group gets its state; default: HTTP.
        init_sync: at step 0, take the primary's weights in all groups.
        max_retries: number of consecutive steps that may fail before ``should_commit`` raises; None: no
            limit.
        quorum_retries: number of retries after an error of the lighthouse.
        enable_error_bus: end collectives as soon as the lighthouse reports the failure of a peer, without
            waiting for their timeout; None: as TORCHFT_FAILURE_BUS says (on).
        replay_failed_step: when a peer fails in mid-step, reduce this group's own gradients again with those
            that are left, and commit the same step: docs/replay.md. Costs a copy of all that is reduced. With
            a :class:`torchft.data.ElasticDataLoader` the step comes again with the failed group's units;
            otherwise all groups must have it. None: as TORCHFT_REPLAY_FAILED_STEP says (off).
        reproducible_reduction: with a :class:`torchft.data.ElasticDataLoader`, add gradients as integers:
            weights have the same bits however many groups there are, and whatever fails: docs/data.md. All
            groups must have it.
        compare_commits: number of commits over which one comparison of all weights and optimizer state among
            the groups is spread; their bits must be equal: docs/divergence.md. "auto": chosen by the size, so
            that a step pays little; 0: no comparison; None: as TORCHFT_COMPARE_COMMITS says ("auto"; 0 where
            the process group is not torchft's). The same in all groups.
        on_divergence: the reaction of a group whose bits differ from those of most groups: "report", "heal"
            (from another group) or "evict" (``should_commit`` raises); None: as TORCHFT_ON_DIVERGENCE says
            (report).
        heal: "at_once": a group that joins gets its state within one step, for which the others wait.
            "in_passing": it trains along with weight 0 while its state arrives in parts, so that they do not
            wait: docs/healing.md says what that covers. "auto": begins in passing if the state is large and
            two groups have it, and goes on so if that loses less time of all groups. All groups should have
            the same; None: as TORCHFT_HEAL says ("auto" with a :class:`torchft.data.ElasticDataLoader`, else
            "at_once").
        heal_along: True stands for ``heal="in_passing"``, False for "at_once"; None: as TORCHFT_HEAL_ALONG
            says.
        snapshots: number of steps between two copies of the state in shared memory, which outlive the
            process: if all groups fail, the next ones go on from the newest. "auto": as many as keep the cost
            below 1 % of the time; 0: none; None: as TORCHFT_SNAPSHOTS says (0; "auto" under ``torchft run``):
            docs/total_loss.md. The group needs a ``replica_id``.
        snapshot_copies: number of groups that keep each part of such a copy, where memory is short: at least
            2, and ``snapshots`` not 1, both the same in all groups. 0: each group keeps all, so that one host
            that is left is enough; None: as TORCHFT_SNAPSHOT_COPIES says (0).
        audit: with a :class:`torchft.data.ElasticDataLoader`, the part of the steps in which all groups
            compute one unit and compare its gradient before the commit, so that a group whose gradients are
            wrong is named and ends: docs/divergence.md. At most that part of the time; 0: none; None: as
            TORCHFT_AUDIT says (0). The same in all groups.

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
        reproducible_reduction: bool = False,
        compare_commits: Union[int, str, None] = None,
        on_divergence: Optional[str] = None,
        heal_along: Optional[bool] = None,
        heal: Optional[str] = None,
        snapshots: Union[int, str, None] = None,
        snapshot_copies: Optional[int] = None,
        audit: Optional[float] = None,
    ) -> None:
        prepare()
        self._maker = Maker("Manager")
        self._peers = as_peers(pg)  # raises for a bad process group before the environment is read
        settings = resolve(locals())
        check_limits(min_replica_size, max_retries)
        default_signals = leave_on_from_env()
        life = life_of(replica_id, settings)
        for other in earlier(life):
            other._make_way(checkpoint_transport)
        self._settings = settings
        self._group_rank = settings.group_rank
        self._quorum_timeout = settings.quorum_timeout
        self._min_replica_size = min_replica_size
        self._init_sync = init_sync
        self._max_retries = max_retries
        super().__init__(settings.timeout, load_state_dict, state_dict)

        if settings.lighthouse_addr:
            use_lighthouse(settings.lighthouse_addr)
        self._transport = Transport(
            checkpoint_transport or HTTPTransport(timeout=settings.timeout, num_chunks=0)
        )
        # A placeholder until the group's server is known.
        self._server = GroupServer(None, settings.group_rank)
        self._manager: Optional[ManagerServer] = None
        self._signals = Signals(default_signals)
        try:
            self._join_group(replica_id, hostname)
            self._make_parts(Planner(use_async_quorum, world_size_mode, min_replica_size), _connect)
            self._extras = OwnExtras(self)
            if self._server.native:
                began(self, life)
        except BaseException:
            self.shutdown(wait=False)
            raise

    def _join_group(self, replica_id: Optional[str], hostname: str) -> None:
        """Connects with the manager server of the group, which rank 0 starts."""
        settings = self._settings
        group = join_group(settings, replica_id, hostname, ManagerServer)
        self._store, self._replica_id, self._manager = group.store, group.replica_id, group.server
        client = _connect(group.manager_address, settings.connect_timeout)
        self._server = as_server(client, settings.group_rank)
        self._rounds = Rounds(self._server.ask)
        self._signals.report = self._server.request_drain
        self._peers.set_rank_info(self._replica_id, settings.group_rank, settings.group_world_size)

    # Quorum

    @ranged("start_quorum")
    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: Optional[timedelta] = None
    ) -> None:
        """Begins a step: requests its quorum. Every rank of the group calls it, before the forward pass.

        With ``use_async_quorum`` it returns at once while the quorum stands. Otherwise it waits for the new
        quorum, and reads the state if groups heal from this one; they heal, and all connect, in the
        background until the first allreduce. Without ``use_async_quorum``, and with LocalSGD, it returns when
        all that is done. With a :class:`torchft.data.ElasticDataLoader` it does nothing: the loader begins
        each step.

        If this rank has reduced in the step before, and not voted on it, that step is lost for all groups.

        Args:
            allow_heal: whether to fetch a peer's state when this group is behind.
            shrink_only: the quorum must have no new members.
            timeout: default: ``quorum_timeout``.

        Raises:
            RuntimeError, TimeoutError: when there is no quorum, if it waits for one.
        """
        if self._data.adds_gradients:
            # The loader checks for a drain between two steps, and its units belong to the step in progress.
            return
        if self._settings.reproducible_reduction or self._audits.on:
            self._data.check_step()
        timeout = self._quorum_timeout if timeout is None else given("timeout", timeout, self._quorum_timeout)
        request = StepRequest(allow_heal, shrink_only, timeout)
        if self._replay.ahead is not None:
            if self._replay.begins_at(self._position) and request.is_like(self._current.request):
                self._current.begins_anew()
                return
            # This group leaves a quorum in which the other groups count on it.
            self._current.collectives.abort()
        # an average has nothing to compute meanwhile
        at_once = not self._use_async_quorum or self._data.averages_weights
        self._begin_round(request, reads_state=not at_once and self._server.native)
        if at_once:
            self._settle()

    def _begin_with_copy(self, beyond: int, otherwise: Callable[[], object]) -> bool:
        """Begins with the newest copy in shared memory of a step after ``beyond``, unless a group has a later
        state. All ranks of the group call it, before their first step. Returns whether there is one.
        `otherwise`: called if it cannot be loaded after all.
        """
        self._snapshots.otherwise = otherwise
        return self._snapshots.on and self._snapshots.seek(max(self._step, beyond))

    def finish_serving(self) -> None:
        """Waits until no healing group reads this group's state any more. Call it before changing the
        state within a step.

        A step that ends with :meth:`should_commit` needs no such call. Streaming DiLoCo does, because its
        inner steps continue while a collective runs: before the next inner step, the healing groups must have
        received the state.
        """
        self._maker.check()
        self._recovery.end_in_step(self._current)

    # Collectives

    def register_layout(self, what: str, lines: Sequence[str]) -> None:
        """Announces the layout of the tensors that this group reduces, so that a difference is found before
        any tensor is sent.

        The parameters of torchft's DistributedDataParallel and OptimizerWrapper, LocalSGD and DiLoCo are
        announced by these. A group that does not fit into a running job gets a ValueError from
        ``start_quorum``, or from the call that waits for the quorum. The lighthouse compares what was
        registered before the first step, and refuses such a group before it is in a quorum. The groups of
        each new quorum compare as well, where the lighthouse does not; the other groups then lose that step.
        Only torchft's process groups carry layouts, and upstream announces none.

        Args:
            what: names the owner of the tensors.
            lines: a line for each tensor, in the order in which they are reduced.
        """
        self._data.check_layout(what)
        self._layout.add(what, lines)

    @ranged("allreduce")
    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: AnyReduceOp = ReduceOp.AVG
    ) -> dist._Work:
        """Reduces a tensor over the participating groups, in place.

        A peer's failure raises no error: the work completes, the tensor's content is then undefined, and the
        step is not committed. A group that heals, or is a spare, contributes zeros.

        Args:
            tensor: any shape; floating point for AVG. All groups pass the same shape and dtype, in the same
                order.
            should_quantize: 8-bit codes travel, a quarter of float32's bytes; see :mod:`torchft.collectives`
                for the error. float32, float16 and bfloat16 only.
            reduce_op: AVG divides the sum by :meth:`num_participants`. The sum has the tensor's dtype. With n
                groups its error is at most n/2 times the distance of 1 to the next number (2**-10 in float16,
                2**-7 in bfloat16) times the average magnitude, plus half the least number above 0 (2**-25 in
                float16). In float16 a sum beyond 65504 is Inf: scale the loss, or reduce bfloat16. If all
                groups of the quorum take part, with torchft's NCCL groups, NCCL averages: it adds up each
                tensor times 1/n, rounded to the tensor's dtype. The error is at most (n+1)/2 and n/2 times
                these numbers, none by 1/n if n is a power of 2, and no sum is Inf.

        Returns:
            Work whose future gives ``tensor``.

        Raises:
            ValueError: AVG of a tensor that is not floating point; a dtype or reduction that cannot be
                quantized; a floating point tensor in a step with ``reproducible_reduction``.
            RuntimeError: no step has begun; or the current stream is captured into a graph, whose replays
                would reduce nothing.
        """
        if self._round is None or not self._maker.here:
            self._check_begun("allreduce")
        self._current.sharing.reduced = True
        check_reducible(tensor, reduce_op, should_quantize)
        if self._settings.reproducible_reduction and self._current.undecided:
            self._data.check_sum(tensor)
        kept = None
        try:
            if not self._ready:
                self.wait_quorum()
            if self._data.has_loader and self._data.holds_units(self._current):
                self._again.keep(self._current, tensor, reduce_op, should_quantize)
            if self._replay.enabled:
                local_steps = self._layout.lines is not None
                kept = self._replay.keep(self._current, tensor, reduce_op, should_quantize, local_steps)
            work = self._reduce(tensor, reduce_op, should_quantize)
        except Exception as e:
            # What the quorum failed with is raised at each reduction. A peer's failure is told with the step.
            if e is not self._current.cause and not isinstance(e, PeerFailed):
                self._logger.exception(f"allreduce failed: {e}")
            self._errors.of_collective(e)
            work = None
        if work is None:
            if kept is not None:
                kept.settle()
            return _DummyWork(tensor)
        if kept is not None:
            work.on_end = kept.settle
        return work

    def _reduce(
        self, tensor: torch.Tensor, reduce_op: AnyReduceOp, should_quantize: bool
    ) -> Optional[_ManagedWork]:
        """Begins to reduce a tensor with the other groups; None after an error."""
        step = self._current
        if self._connection.apart:
            tensor.zero_()
            return None
        if self._own_time.running:
            self._own_time.reduces()
        if step.healing:
            self._in_passing.reduces()
        if self._failures.known:
            self._failures.check()
        if not step.collectives.usable:
            self._current.collectives.abort()  # the peers wait for the reduction that is skipped here
            return None
        if self._heal_wait.waiting is not None:
            self._heal_wait.wait()
        if step.participating_rank is None or step.healing:
            tensor.zero_()
        if self._data.has_loader:
            self._compare_batches(step, tensor.device)
        if self._replicas.announced:
            digests = self._replicas.message(step, self._step, tensor.device)
            if digests is not None:
                self._replicas.sent(self._reduce(digests, ReduceOp.SUM, False))
        if self._calls.step:
            self._calls.check(step.collectives, tensor, reduce_op, should_quantize)
        averages = reduce_op == ReduceOp.AVG and step.participants > 1 and not self._data.adds_gradients
        # A group that waits for its connection is in the quorum, but not among the members.
        in_backend = (
            averages
            and not should_quantize
            and step.plan is not None
            and step.plan.averages
            and len(self._connection.members) == step.participants
        )
        op = ReduceOp.SUM if reduce_op == ReduceOp.AVG and not in_backend else reduce_op
        reduction = self._peers.allreduce(tensor, op, should_quantize)
        work = _ManagedWork(step.collectives, reduction, tensor)
        step.collectives.add(work)
        if self._failures.known:
            self._failures.check()  # a failure reported since the first check has found no work to abort
        if averages and not in_backend:
            work.on_success = partial(tensor.div_, step.participants)
        return work

    def _compare_batches(self, step: Step, device: torch.device) -> None:
        words = self._data.words(step, device)
        if words is not None:
            self._data.sent(words, self._reduce(words, ReduceOp.SUM, False))

    def _compare_gradients(self, step: Step) -> None:
        table = self._audits.table(step, device_of(self._pg))
        if table is not None:
            self._audits.sent(step, table, self._reduce(table, ReduceOp.SUM, False))

    # For a data loader: see _manager/checks/loader.py

    def _attach_loader(self, loader: Loader) -> None:
        self._data.attach(loader, begun=self._round is not None)
        # A replay lacks the units of a failed group, so the step comes again.
        replays, self._replay.enabled = self._replay.enabled, False
        self._again.enabled = (
            replays
            and self._data.adds_gradients
            and not self._settings.reproducible_reduction
            and not self._planner.has_spares
        )
        if self._settings.heal is None and self._data.adds_gradients:
            self._in_passing.heal_by(HealMode.AUTO)

    def _begin_batch(self) -> Plan:
        """Begins a step if none has begun, and waits for its quorum. A heal continues in the background."""
        if self._round is None or not self._data.usable(self._current):
            self._begin_round(StepRequest(True, False, self._quorum_timeout), reads_state=self._server.native)
        self._maker.check()
        assert self._round is not None
        with self._refusal_named():
            plan = self._planner.plan(self._round.answer(), self._current.request.allow_heal)
        if not plan.in_background:
            self._settle()
        return plan

    def _weights_are_inconsistent(self) -> bool:
        return self._recovery.inconsistent

    def _sum_integers(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Sums tensors over the participating groups, in place, and waits on the host. Returns False if the
        step has failed.
        """
        works = [self.allreduce(tensor, reduce_op=ReduceOp.SUM) for tensor in tensors]
        self._end_collectives()
        return self._current.collectives.usable and all(work.wait() for work in works)

    def _pass_step(self) -> None:
        """Skips a step in which other groups heal, because this group has no more data. The others load the
        state that they fetched, and all groups meet in the next quorum.
        """
        self.wait_quorum()
        self._current.collectives.abort()  # a healing group does not know yet that there is nothing to reduce
        self._commit_failures += 1  # makes the next quorum get a new id, so that its members connect again
        if self._current.undecided:
            self._current.dropped()

    def _ends_together(self) -> bool:
        """Whether all groups of this quorum, which are up to date, are at the end of the data as well. The
        groups compare once per quorum, as in a first step, because some may have been restored at the end of
        the data and others not.
        """
        self.wait_quorum()
        step = self._current
        if not self._data.compares(step):
            return True
        try:
            self._compare_batches(step, device_of(self._pg))
            self._end_collectives()
            self._data.verify(step)
        except Exception as e:
            self._logger.exception(f"the training does not end: {e}")
            self._errors.lose(e)
        ends = self._server.vote(self._step, step.vote(1), self._timeout)
        step.decided(ends)
        if not ends:
            self._give_way()
        return ends

    def _give_way(self) -> None:
        """Makes this group, with another data position than the first, heal: it announces an earlier step."""
        step = self._data.step_to_announce(self._step)
        if step != self._step:
            self._position = Position(step, self._batches_committed, -1)

    # Errors, and failures of peers

    def subscribe_failures(self, callback: FailureCallback) -> None:
        """Calls ``callback(failure)`` for each failed member of a quorum that the lighthouse reports, on a
        separate thread; never with ``enable_error_bus`` off.
        """
        self._failures.subscribe(callback)

    def report_error(self, e: Exception) -> None:
        """Marks the step as failed: it will not be committed, and its collectives end in all groups.

        A loop that skips a batch, for example after an error of its own or a loss that is NaN, calls this.
        Otherwise the other groups wait for its gradients until the lighthouse finds that they wait in vain.
        """
        self._errors.of_loop(e)

    def _report_own_error(self, e: Exception) -> None:
        """As report_error, for an error while peers wait for this rank in collectives: aborts these."""
        self._errors.of_this_rank(e)

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: Optional[timedelta] = None
    ) -> torch.futures.Future[T]:
        """Returns a future that never fails: an error is reported, and the value is then ``default``.

        An error fails the step in which this method is called, or a replay of that step. In a later step it
        is only logged.

        Args:
            fut: the future to wrap.
            default: the value after an error or a timeout.
            timeout: default: the Manager's.
        """
        return self._errors.swallow(future_timeout(fut, given("timeout", timeout, self._timeout)), default)

    # Commit

    def register_commit_hook(self, hook: CommitHook) -> None:
        """Calls ``hook(step, committed, participants)`` on the training thread after each decision.

        ``step`` is the step that was decided on. A hook that raises is logged and does not change the
        decision, which the other groups already act on.
        """
        self._commit_hooks.append(hook)

    @ranged("should_commit")
    def should_commit(self, timeout: Optional[timedelta] = None) -> bool:
        """Ends a step: decides whether all ranks of the group may apply it. If this group heals, a peer's
        state is loaded here.

        Args:
            timeout: default: the Manager's.

        Returns:
            True: step the optimizer. False: do not; the next step begins with the same weights.

        Raises:
            ValueError: this group joined with other reductions than those of the other groups.
            RuntimeError: more than ``max_retries`` steps failed in a row, there is no quorum, or a rank of
                the group has failed; or the weights of this group are not those of most, and
                ``on_divergence="evict"``; or its gradients are not (``audit``).
            TimeoutError: not all ranks of the group voted in time.
        """
        timeout = self._timeout if timeout is None else given("timeout", timeout, self._timeout)
        committed = self._try_step(timeout)
        step, failures, why, kept = self._step, self._commit_failures, "", None
        if not committed:
            why = self._current.why_lost()
            self._give_way()
            heals = self._replicas.gives_way(self._current)
            if self._data.adds_gradients:
                vote = partial(self._server.vote, step, timeout=timeout)
                weights = step, self._committed_quorum_id
                kept = self._again.retain(self._current, weights, self._extras.check_gradients, vote)
            committed = self._reduce_again(timeout)
            if heals:  # only after the votes on a replay does this group announce an earlier step
                self._position = Position(step - 1, self._batches_committed, -1)
        if self._logger.commits.isEnabledFor(logging.INFO):  # mostly not, and each step asks
            self._logger.commit_event(committed)
        participants = self._current.participants
        if committed:
            self._rank_state.step += 1
            self._batches_committed += participants
            self._committed_quorum_id = self._quorum_id
            self._snapshots.member = self._current.participating_rank, participants
            self._commit_failures = 0
            self._uncommitted.steps = 0
            if self._data.has_loader:
                self._again.forget()
        elif isinstance(self._current.cause, StillHealing) or (
            self._in_passing.mode is not HealMode.AT_ONCE
            and self._current.healing
            and self._current.refused_by_rank
        ):
            # No new connections are needed: reductions have succeeded, or none has begun.
            self._commit_failures = 0
        else:
            self._commit_failures = failures + 1
            how = "is lost" if kept is None else f"comes again without the {kept} units of this group"
            self._logger.warn(f"step {step} {how}: {why}")
            self._lost(why)
        incident = self._errors.incident
        if incident is not None:
            incident.step_ended(committed, kept is not None)
            if committed:
                self._logger.failure_event(incident)
                self._errors.incident = None
        self._end_trace(step)
        if self._current.undecided and self._replay.ahead is None:
            self._current.dropped()  # the attempt of a replay that got no quorum
        self._current.forget_inputs()
        self._discard_unloaded_heal()
        for hook in self._commit_hooks:
            try:
                hook(step, committed, participants)
            except Exception as e:
                self._logger.exception(f"a commit hook failed: {e}")
        if self._current.error is not None:
            self._replicas.check_evicted(self._current)
            self._audits.check_ends()
        if self._calls.differs is not None:
            self.shutdown(wait=False)  # the other groups do not wait until this process has ended
            raise self._calls.differs
        if self._max_retries is not None and self._commit_failures > self._max_retries:
            raise RuntimeError(
                f"{self._commit_failures} steps in a row were not committed, exceeding "
                f"max_retries={self._max_retries}; the last one: {why}"
            )
        self._own_time.begins()
        return committed

    def _try_step(self, timeout: timedelta) -> bool:
        """Ends the collectives of an attempt at this step, and votes on it with the group's other ranks."""
        if not self._ready:
            self.wait_quorum()
        try:
            if self._heal_wait.waiting is not None:
                self._heal_wait.wait()
            if self._data.has_loader and self._data.compares_without_reduction(self._current):
                self._compare_batches(self._current, device_of(self._pg))
            if self._audits.on:
                self._compare_gradients(self._current)
        except Exception as e:
            self._errors.of_collective(e)
        self._end_collectives()
        if self._calls.step:
            self._calls.end(lost=self._current.error is not None)
        arrived = not self._recovery.busy or self._recovery.arrived()
        error = self._peers.error()
        if error is not None:
            self._errors.lose(error)
        step = self._current
        if step.healing and arrived:
            if self._in_passing.joining:
                reduced = step.error is None and step.collectives.usable
                self._in_passing.advance(reduced, self._optimizer_that_votes)
                step.failed(StillHealing(self._in_passing.how_far()))
            self._recovery.load(step)
        try:
            if self._data.has_loader:
                self._data.verify(step)
                if step.error is None:
                    self._again.verify(step)
                if self._audits.on:
                    self._audits.verify(step)
            self._check_gradients(step)
        except Exception as e:
            self._logger.exception(f"the step is not committed: {e}")
            self._errors.recurring(e, f"it failed a check: {e}")
        if self._replicas.announced:
            self._replicas.check(step, self._step)
        if step.participants < self._min_replica_size:
            self._logger.warn(f"{step.participants} groups take part, {self._min_replica_size} are needed")
        committed = self._server.vote(self._step, step.vote(self._min_replica_size), timeout)
        step.decided(committed)
        self._rank_state.computed = False
        if self._in_passing.mode is not HealMode.AT_ONCE:
            self._in_passing.decided(committed)
        if self._recovery.busy:
            self._recovery.end_serving(step)
        if committed and self._snapshots.on:
            self._snapshots.end()
        return committed  # from now on the weights may change

    def _check_gradients(self, step: Step) -> None:
        """Raises an error if gradients of this step were not reduced: other groups may wait for them."""
        if step.error is None:
            try:
                self._extras.check_gradients()
            except Exception:
                step.collectives.abort()
                raise

    @ranged("should_commit::current_stream::synchronize")
    def _end_collectives(self) -> None:
        # With a loader gradients are computed anew, and what is kept is in memory that no collective writes.
        if not self._current.collectives.end(self._timeout) and not self._data.adds_gradients:
            self._errors.refuse_replay("a collective that was aborted has not ended")

    # Replay of a failed step

    def register_replay_hook(self, hook: Callable[[], None]) -> None:
        """Registers ``hook()``, which is called on the training thread after the gradients of a step
        were reduced again.

        It does what the training loop does between the reduction and ``should_commit``: clipping, say, or
        copying what was reduced to where the optimizer reads it. Without a hook, a step whose results were
        changed or copied is lost when a peer fails, as without ``replay_failed_step``. If the hook raises an
        error, the step is lost.
        """
        self._replay.hooks.append(hook)

    def register_replicated(self, named: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        """Registers tensors that have the same bits in all groups, so that they are compared
        (``compare_commits``).

        Parameters and optimizer state of an :class:`~torchft.optim.OptimizerWrapper`, and the parameters of a
        model in torchft's DistributedDataParallel, are registered by these. A training loop without these two
        registers its tensors itself, in all groups and before the first step.

        Args:
            named: returns names and tensors, in the same order in all groups. It is called when a sweep
                begins; its tensors are read before each vote until it is called again.
        """
        self._replicas.state.add_parameters(named)

    def _reduce_again(self, timeout: timedelta) -> bool:
        """Replays the step that failed until it is committed or cannot be replayed. Returns whether it is
        committed. The ranks of a group vote before each replay, because either all of them replay or none.
        """
        step = self._current
        if not self._replay.enabled or (step.plan is not None and step.plan.heal and step.plan.max_step > 0):
            # All ranks of a group that heals return here. It reduces its zeros in its next step, in the
            # quorum in which the other groups replay. At step 0 its ranks may not all heal, so they vote.
            return False
        for replays in range(MOST_REPLAYS + 1):
            reason = self._replay.why_not(step.inputs, replays)
            try:
                if not self._server.vote(self._step, reason is None, timeout):
                    reason = reason or "another rank of the group cannot"
                    self._logger.warn(f"the step is not reduced again: {reason}")
                    return False
                why = step.why_lost()
                self._commit_failures += 1  # another attempt has a quorum with a new id, and connections
                self._end_trace()
                self._begin_round(step.request, replays=True)
                self.wait_quorum()
            except Exception as e:
                self._logger.exception(f"the step is not reduced again: {e}")
                return False
            step = self._current
            assert step.plan is not None
            reason = step.plan.why_recomputed
            if reason is not None:
                self._logger.warn(f"the step is not reduced again: {reason}")
                # The next step uses this quorum, because the other groups count on this one in it. The state
                # of a heal is loaded now: between two steps the group's position must be that of its weights.
                self._recovery.load_before(step)
                if step.error is None:
                    self._replay.ahead = self._position
                else:
                    step.collectives.abort()
                return False
            self._logger.info(f"reduced again with {step.plan.participants} groups, because {why}")
            self._reduce_inputs(step)
            if self._try_step(timeout):
                return True
        return False

    def _reduce_inputs(self, step: Step) -> None:
        """Reduces the inputs of the failed attempt in another attempt."""
        try:
            for kept in step.inputs.restore():
                self._reduce(kept.tensor, kept.reduce_op, kept.should_quantize)
        except Exception as e:
            self._errors.of_collective(e)
        self._end_collectives()
        step.inputs.settle()
        if step.error is not None:
            return
        try:
            for hook in self._replay.hooks:
                hook()  # copies the reduced tensors to where the optimizer reads them, for example
        except Exception as e:
            self._logger.exception(f"a replay hook failed: {e}")
            self._errors.recurring(e, f"a replay hook failed: {e}")

    # Other methods for the training loop

    def recovery_seconds(self) -> Dict[str, float]:
        """The seconds of this rank's last heal by phase: ``quorum`` (waiting for one), ``reconfigure``
        (connecting with the peers), ``transfer`` and ``load``. All are 0 if it never healed.
        """
        return dict(self._recovery.phases.seconds)

    def draining(self) -> bool:
        """Whether this group was asked to leave (``torchft drain``, or a signal of :meth:`leave_on`) and has
        ended its last step.

        All ranks of a group get the same answer between the same two steps; within a step it is False. A loop
        that ends when it is True, and calls ``shutdown`` before it shuts the process group down, costs the
        other groups nothing.

        The first call on the main thread also calls :meth:`leave_on` with the signals that TORCHFT_LEAVE_ON
        names, if it is set; ``torchft run`` sets it to SIGTERM by default.
        """
        self._signals.install_default()
        return self._is_draining()

    def leave_on(self, *signals: int) -> None:
        """Makes this group leave when any of its ranks gets one of these signals, as ``torchft drain`` does.

        All ranks hear of it with the next quorum, that of the next step or the one after, and are
        :meth:`draining` after that step. The handler only sets a flag, and calls the one that a script had
        set before. A process that has not ended after TORCHFT_GRACE_S (25 s), or gets the signal again 5 s
        after the first one or later, ends at once with status 128 plus the number of the signal.
        :meth:`shutdown` puts the handlers back, but not those of a group that leaves.

        Args:
            signals: for example ``signal.SIGTERM``.

        Raises:
            ValueError: there is no signal, one cannot be handled, or TORCHFT_GRACE_S is malformed.
            RuntimeError: this is not the main thread.
        """
        self._signals.install(signals)

    def shutdown(self, wait: bool = True, finished: bool = False) -> None:
        """Ends the manager server, the checkpoint server and the quorum thread. The process group is the
        caller's.

        A Manager without references ends by itself, and one whose group is made again in the same process, by
        the same thread, ends when that begins.

        A group that is :meth:`draining` stays until its peers have ended its last step as well.

        Args:
            wait: whether to wait until all of them have ended.
            finished: whether the training has ended on purpose, and is not to go on. When all groups of the
                last quorum pass True, the lighthouse forgets the step that the training had reached: the next
                training on the port of the lighthouse is another one. A group of the same TORCHFT_RUN_ID that
                comes back gets :class:`JobFinished` in its first step. A loop that is preempted, or stops for
                a restart, must not pass True.
        """
        self._maker.check()
        if "_poison" in self.__dict__:  # it is missing if the constructor has failed
            self._poison.passing()
        if wait and not finished and "_snapshots" in self.__dict__ and self._is_draining():
            self._last_copy()
        self._end(wait, finished)

    def _last_copy(self) -> None:
        """Copies the state of the last step into shared memory, before this group leaves on request."""
        if not self._recovery.inconsistent:
            self._snapshots.last(self._position)

    def _make_way(self, transport: Optional[CheckpointTransport[Any]]) -> None:
        """Ends this Manager, because another one of the same group and rank is made. `transport`: the one
        that the other Manager was given, which goes on to serve.
        """
        self._logger.warn(
            "this Manager was not shut down, and another one of its group is made in this process: it ends "
            "now. Otherwise both would be members of the job, and the new one would wait for this one"
        )
        self._end(wait=False, ends_transport=not self._transport.is_for(transport))

    def __del__(self) -> None:
        # The garbage collector may call this on any thread, also on one that this Manager would wait for.
        if self.__dict__.get("_rounds") is None or not self._maker.here or sys.is_finalizing():
            return
        hand_off(self._end_unreferenced, "torchft_end")

    def _end_unreferenced(self) -> None:
        self._background.enter_thread()
        self._logger.warn("this Manager was not shut down, and nothing refers to it any more: it ends now")
        self._end(wait=False)

    def _end(self, wait: bool, finished: bool = False, ends_transport: bool = True) -> None:
        ended(self)
        rounds, self._rounds = self._rounds, None
        with ExitStack() as parts:  # the parts end in reverse order, each even if another one raises an error
            parts.callback(self._signals.close, leaving=self._is_draining)
            # None if the constructor has failed.
            heal_wait: Optional[HealWait] = self.__dict__.get("_heal_wait")
            if heal_wait is not None:
                parts.callback(heal_wait.end)
            snapshots: Optional[Snapshots] = self.__dict__.get("_snapshots")
            if snapshots is not None:
                parts.callback(snapshots.close, finished)
            if wait:
                parts.callback(self._server.join)
            if rounds is not None:
                parts.callback(rounds.shutdown, wait=wait)
            parts.callback(self._server.close)  # ends the rounds, and the thread that waits for them
            if self._manager is not None:
                parts.callback(self._manager.shutdown)
                if finished:
                    parts.callback(self._manager._finish, self._step)
            if ends_transport:
                parts.callback(self._transport.shutdown, wait=wait)
            recovery: Optional[Recovery] = self.__dict__.get("_recovery")
            if recovery is not None:
                parts.callback(recovery.close)
            if wait:
                parts.callback(self._leave)

    def _leave(self) -> None:
        """Reports that this group leaves on request, so that the others do not wait for it."""
        if self._has_left or not self._is_draining():
            return
        self._has_left = True
        try:
            self._server.leave(self._timeout)
            self._logger.info("this group has left, as it was asked to")
        except Exception as e:
            self._logger.warn(f"the other groups may miss this one: {e}")
