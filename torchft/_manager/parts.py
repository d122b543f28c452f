"""The parts of a Manager, and how they are put together: a base class of it.

A part gets the parts below it as arguments, and knows nothing of the Manager.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Dict, List, Optional

import torch
import torch.distributed as dist

from torchft._forked import Maker
from torchft._manager.checks.audits import Audits
from torchft._manager.checks.calls import Calls
from torchft._manager.checks.layout import Layout
from torchft._manager.checks.loader import Data
from torchft._manager.checks.replicas import Replicas
from torchft._manager.connection import Connection
from torchft._manager.edge import GroupServer, Peers, Transport, device_of
from torchft._manager.heal import tracked
from torchft._manager.heal.in_passing import InPassing, why_never
from torchft._manager.heal.recovery import Recovery
from torchft._manager.heal.sources import Sources
from torchft._manager.heal.state import Stateful
from torchft._manager.heal.together import Agreement, GroupRanks, HealingRanks
from torchft._manager.heal.wait import HealWait
from torchft._manager.observe.log import _ManagerLogger
from torchft._manager.observe.own_time import OwnTime
from torchft._manager.observe.trace import step_trace
from torchft._manager.poison import Poison
from torchft._manager.quorum.plan import Planner
from torchft._manager.quorum.rounds import Round, Rounds
from torchft._manager.rank import kept_in
from torchft._manager.settings import HealMode, Settings
from torchft._manager.signals import Signals
from torchft._manager.snapshots.copies import Snapshots, State
from torchft._manager.step.again import Again
from torchft._manager.step.background import Background
from torchft._manager.step.collectives import Backlog, Collectives
from torchft._manager.step.errors import Errors, ExceptionWithTraceback
from torchft._manager.step.failures import Failures
from torchft._manager.step.replay import Replay
from torchft._manager.step.step import Step, StepRequest
from torchft._manager.step.uncommitted import Uncommitted
from torchft._torchft import ManagerClient, QuorumRequest, QuorumResult

if TYPE_CHECKING:
    from torchft.checkpointing import CheckpointTransport

CommitHook = Callable[[int, bool, int], None]


class ManagerParts(Stateful):
    """The parts of a Manager. Its constructor sets the first of these attributes."""

    _maker: Maker  # the process of this Manager
    _settings: Settings
    _group_rank: int
    _quorum_timeout: timedelta
    _min_replica_size: int
    _init_sync: bool
    _peers: Peers  # the process group
    _transport: Transport  # of heals
    _signals: Signals  # those on which the group drains
    _server: GroupServer  # of the group; before that is known, a placeholder
    _store: dist.Store  # of the group
    _replica_id: str  # with the UUID
    _rounds: Optional[Rounds] = None  # request quorums; None: the Manager is shut down
    _current: Step  # the step in progress, or the last one
    _round: Optional[Round] = None  # requests its quorum; None before the first
    _ready = False  # whether there is nothing to wait for before a reduction
    # The latest result that this rank has followed, if the same result needs nothing more.
    _quiet: Optional[QuorumResult] = None
    _sent: Optional[QuorumRequest] = None  # the latest request; None: the next one may differ from it
    _sent_layout: object = None  # what it announces
    _optimizer_that_votes: Optional[torch.optim.Optimizer] = None  # of an OptimizerWrapper
    _commit_failures = 0
    _has_left = False

    # Attributes that other projects read and set by name

    _pending_state_dict: Optional[Dict[str, Any]] = kept_in("_recovery.pending")
    _client: ManagerClient = kept_in("_server.client")
    _checkpoint_transport: CheckpointTransport[Dict[str, Any]] = kept_in("_transport.transport")
    _errored: Optional[ExceptionWithTraceback] = kept_in("_current.known_error")
    _healing: bool = kept_in("_current.healing")
    _participating_replica_rank: Optional[int] = kept_in("_current.participating_rank")
    _participating_replica_world_size: int = kept_in("_current.participants")
    _use_async_quorum: bool = kept_in("_planner.use_async_quorum")

    @property
    def _pg(self) -> dist.ProcessGroup:
        return self._peers.pg

    @_pg.setter
    def _pg(self, pg: dist.ProcessGroup) -> None:
        self._peers.pg, self._sent = pg, None
        self._peers.set_rank_info(self._replica_id, self._group_rank, self._settings.group_world_size)

    def _make_parts(self, planner: Planner, connect: Callable[[str, timedelta], ManagerClient]) -> None:
        """Makes the parts that a step needs, once the group is known. `connect`: opens a client to a manager
        server, within a timeout.
        """
        settings = self._settings
        self._commit_hooks: List[CommitHook] = []
        self._uncommitted = Uncommitted()
        self._logger = _ManagerLogger(
            self._rank_state, self._replica_id, self._group_rank, self._server.report
        )
        rank, log, peers = self._rank_state, self._logger, self._peers
        name, store, transport = self._replica_id, self._store, self._transport
        self._planner = planner
        self._background = Background()
        self._errors = errors = Errors(name, rank, self._server, log)
        self._backlog = Backlog(peers.at_once, log)
        self._replay = Replay(settings.replay_failed_step)
        self._again = Again(False, log)  # until there is a loader
        compares = peers.ours or not settings.compares_by_default
        self._replicas = Replicas(
            settings.compare_commits if compares else 0,
            settings.on_divergence,
            rank_state=rank,
            errors=errors,
            logger=log,
        )
        optimizers = self._replicas.state.optimizers
        self._audits = Audits(settings.audit, self._group_rank, optimizers, log)
        self._user_state.optimizers = optimizers
        self._layout = Layout(peers.announce_layout)
        self._data = Data(self._layout, planner, settings, self._init_sync)
        self._new_collectives = partial(
            Collectives, peers.abort, errors.of_collective, self._backlog, rank, logger=log
        )
        request = StepRequest(True, False, self._quorum_timeout)
        self._current = Step(request, self._new_collectives(), self._replay.copies, None)
        errors.step = self._current
        self._current.dropped()  # a placeholder: no step has begun
        reports = log.worked if log.reports else None
        device = device_of(self._pg) if peers.on_device else None
        self._own_time = OwnTime(reports, device)
        self._failures = failures = Failures(
            settings.enable_error_bus,
            rank_state=rank,
            peers=peers,
            errors=errors,
            background=self._background,
            logger=log,
        )
        self._calls = Calls(failures.check, rank, log)
        ranks = GroupRanks(store, name, self._group_rank, settings.group_world_size)
        self._heal_wait = HealWait(failures.check, rank, ranks, log)
        sources = Sources(connect, settings.connect_timeout, failures.check, rank, self._group_rank)
        self._in_passing = in_passing = InPassing(
            transport,
            optimizers,
            sources.locate,
            partial(why_never, transport, self._data),
            HealingRanks(ranks),
            settings.timeout.total_seconds(),
            log,
            self._min_replica_size,
        )
        in_passing.heal_by(settings.heal or HealMode.AT_ONCE)
        self._connection = Connection(
            peers,
            name,
            settings,
            self._layout,
            in_passing=in_passing,
            failures=failures,
            errors=errors,
            logger=log,
        )
        self._recovery = Recovery(
            transport=transport,
            user_state=self._user_state,
            optimizers=optimizers,
            in_passing=in_passing,
            sources=sources,
            most_sources=settings.heal_sources,
            planner=planner,
            wait=self._heal_wait,
            # another server's clients are mostly stand-ins for all ranks
            agreement=Agreement(ranks if self._server.native else ranks._replace(size=1)),
            background=self._background,
            rank_state=rank,
            data=self._data,
            errors=errors,
            logger=log,
        )
        self._snapshots = Snapshots(
            settings,
            store,
            name,
            State(self._manager_state_dict, self._load_manager_state_dict, self._manager_state_dict),
            partial(tracked.addresses, optimizers),
            self._data.why_no_copies,
            partial(setattr, self, "_sent", None),
            log,
        )
        failures.subscribe(self._recovery.peer_failed)
        failures.subscribe(self._connection.peer_failed)
        self._trace = step_trace(name, self._group_rank)
        self._poison = poison = Poison(rank, errors, log)
        self._server.listen(
            {
                "failed": failures.member_failed,
                "stalled": failures.stalled,
                "regressed": failures.regressed,
                "progress": failures.progress,
                "judged": poison.judged,
                "stopped": poison.stop,
            }
        )
