"""The steps of a Manager until the first reduction, and questions about them: a base class of it. And what
torchft's wrappers call on a Manager.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Optional

import torch

from torchft._agreement import AUDITS, COMPARES, CONNECTIONS, IN_PASSING, KEEPS, RESTORES, SNAPSHOTS
from torchft._extras import Extras
from torchft._manager.checks.device import claim_device
from torchft._manager.heal import hyperparameters
from torchft._manager.heal.in_passing import StillHealing
from torchft._manager.observe.hangs import PHASES
from torchft._manager.observe.own_time import ranged
from torchft._manager.parts import ManagerParts
from torchft._manager.quorum.plan import Plan
from torchft._manager.quorum.rounds import LateRound, Round
from torchft._manager.settings import HealMode
from torchft._manager.step.errors import ExceptionWithTraceback
from torchft._manager.step.step import Step, StepRequest, not_begun
from torchft._manager.step.uncommitted import NO_VOTE
from torchft._torchft import QuorumRequest, QuorumResult
from torchft.checkpointing.client.progress import watched_by
from torchft.process_group.reconfigure import options_of
from torchft.utils import weakly

if TYPE_CHECKING:
    from torchft._manager.checks.loader import LocalSteps
    from torchft._manager.step.errors import Errors
    from torchft._manager.step.sharing import SharedStep


class Stepping(ManagerParts):
    """The step in progress, or the last one: begins an attempt at a step, follows its quorum, and answers
    questions about it.
    """

    # Begins an attempt, and follows its quorum

    def _begin_round(self, request: StepRequest, replays: bool = False, reads_state: bool = False) -> None:
        """Begins an attempt at a step.

        Args:
            request: for its quorum.
            replays: whether it reduces the inputs of the attempt before again.
            reads_state: whether to wait for the answer, unless the quorum stands, and to read the state if
                groups heal from this one. Otherwise ``wait_quorum`` reads it.
        """
        if not self._maker.here:
            self._maker.check()
        rounds = self._rounds  # read once: another thread may shut the Manager down
        if rounds is None:
            raise RuntimeError("the Manager is shut down")
        if self._poison.stopped:
            self._poison.check()
        before = self._round
        first = before is None
        if before is not None and not self._ready:
            before.wait()  # its error is raised by `wait_quorum`, not here
        # if this round cannot begin, nothing must be reduced among the peers of the previous one
        self._round, self._ready = None, False
        keeps, ends = "", self._data.adds_gradients and self._data.at_end
        if self._data.has_loader:
            keeps = self._again.announces(self._current, self._step, self._committed_quorum_id)
        # before the request: once this group is in a quorum, the other groups would wait as well
        self._backlog.make_room(request.timeout)
        if self._current.undecided:
            if len(self._current.collectives) > 0 and not replays:
                # The quorum may stand: in the same connection, a collective of this attempt would meet a
                # later one of the peers' attempt.
                self._current.collectives.abort()
            self._current.dropped()
            self._end_trace()
            self._in_passing.decided(False)
            if not replays:
                self._lost(self._current.why_lost() if self._current.cause is not None else NO_VOTE)
        self._discard_unloaded_heal()
        if self._snapshots.on:
            if first:
                if not self._snapshots.sought:
                    self._snapshots.seek(self._step)
            elif not self._recovery.inconsistent:
                self._snapshots.begin(self._position)
        last = self._current
        aborted = last.collectives.aborted
        same = None if aborted or keeps or ends else self._same_request(request)
        self._sent = sent = same or self._quorum_request(request, aborted, ends, keeps)
        if self._calls.step:
            self._calls.end(lost=True)
        if self._heal_wait.waiting is not None:
            self._heal_wait.end()
        attempted = last if replays else None
        step = Step(request, self._new_collectives(), self._replay.copies, last.plan, attempted)
        last.collectives.retire()  # the next quorum may connect the process group with other peers
        self._current = self._errors.step = step
        standing = self._server.standing(sent)
        if ends:  # the groups meet: one that has lost the last step alone heals
            standing = None
        if before is not None and standing is not None and standing is self._quiet:
            self._follow_again(step)
            self._round, self._ready = before, True  # it has this result, too
            return
        self._own_time.skip()
        self._background.begin()
        follow = partial(self._follow, step)
        if standing is not None:
            self._round = Round(follow)
            self._round.end(standing)
            return
        if same is not None:  # it is needed after all
            self._sent = sent = self._quorum_request(request, aborted, ends, keeps)
        if first and self._peers.on_device:
            claim_device(self._store, self._replica_id, self._group_rank)
        begin = partial(rounds.begin, follow, sent, request.timeout)
        step.reads_state = reads_state
        restores = self._snapshots.found(self._position) is not None
        if first and self._data.adds_gradients:
            self._in_passing.prepare()  # its batch depends on the quorum
        elif first and self._in_passing.why_not() is None:
            # The first forward and backward pass takes longer than later ones: the others do not wait for it.
            begin = partial(LateRound, begin, self._in_passing.prepare)
            step.reads_state = False
        self._round = begin()
        if step.reads_state or restores:
            with suppress(Exception):  # `wait_quorum` raises the error of the round
                plan = self._planner.plan(self._round.answer(), request.allow_heal)
                restores = self._restores(plan)
                if step.reads_state and plan.serves and plan.in_background and not restores:
                    self._read_state(step)
        if restores:
            self.wait_quorum()  # it loads the copy, before anything is computed

    def _same_request(self, request: StepRequest) -> Optional[QuorumRequest]:
        """The last request, for this step; None if this rank may have something new to say."""
        sent = self._sent
        if (
            sent is None
            or self._quiet is None  # also the handle of a native group changes with its peers
            or self._in_passing.mode is not HealMode.AT_ONCE
            or self._trace is not None
            or self._commit_failures
            or sent.commit_failures
            or self._signals.wanted
            or self._layout.announces is not self._sent_layout
            or request.shrink_only is not sent.shrink_only
            or self._committed_quorum_id != sent.committed_quorum_id
            or self._data.averages_weights
        ):
            return None
        sent.step = self._step
        return sent

    def _quorum_request(self, request: StepRequest, aborted: bool, ends: bool, keeps: str) -> QuorumRequest:
        """The request of this rank for a quorum."""
        found = self._snapshots.found(self._position)
        at_step, committed_in = self._step, self._committed_quorum_id
        if found is not None:  # it is not loaded yet
            at_step, committed_in = found.step, found.quorum
        connections = self._connection.announcement(at_step, broken=self._commit_failures > 0 or aborted)
        layout = self._layout.for_lighthouse()
        self._sent_layout = self._layout.announces
        return QuorumRequest(
            group_rank=self._group_rank,
            step=at_step,
            checkpoint_metadata=self._transport.metadata(),
            shrink_only=request.shrink_only,
            # after an abort, too, the next quorum needs a new id, for which the groups connect again; at the
            # end of the data this group leaves the quorum that stands
            commit_failures=self._commit_failures
            or int(aborted or ends or self._connection.needs_new_quorum),
            init_sync=self._init_sync,
            reconfigure_handle=self._peers.handle(
                [
                    *self._layout.announces,
                    (AUDITS, self._audits.announces),
                    (COMPARES, self._replicas.announces(averages=self._data.own_weights)),
                    (CONNECTIONS, connections),
                    (IN_PASSING, self._in_passing.announces),
                    (KEEPS, keeps),
                    (RESTORES, "" if found is None else "1"),
                    (SNAPSHOTS, self._snapshots.announces),
                ],
            ),
            # The server refuses a number that differs from rank 0's.
            group_world_size=self._settings.group_world_size,
            committed_quorum_id=committed_in,
            # what it has kept it has computed from other weights than those of the copy
            replays_failed_steps=self._replay.enabled and found is None,
            asks_each_step=self._data.own_weights,
            cuts_by_speed=self._data.cuts_by_speed,
            layout=layout,
            drain=self._signals.drain_request(self._logger.info),
            traceparent="" if self._trace is None else self._trace.asks(self._step),
        )

    def _read_state(self, step: Step) -> None:
        """Calls the functions of the user's state, on the training thread and once in a step."""
        if step.served.done():
            return
        try:
            state, optimizers = self._manager_state_dict(), self._replicas.state.optimizers
            if optimizers:
                state = {**state, hyperparameters.KEY: hyperparameters.read(optimizers)}
            step.served.set_result(self._in_passing.fixed(state))
        except BaseException as e:
            step.served.set_exception(e)
            if not isinstance(e, Exception):  # Ctrl-C
                raise

    def _settle(self) -> None:
        """Waits until the quorum is known and followed. Loads a heal that precedes the step, unless the
        forward pass did: gradients of the old weights must not count, so this group adds zeros, and loads the
        state in the vote. With a loader the forward pass comes later.
        """
        self.wait_quorum()
        if not self._rank_state.computed or self._data.averages_weights or self._data.adds_gradients:
            self._recovery.load_before(self._current)

    def _follow_again(self, step: Step) -> None:
        """Follows the same quorum as the last step, which has the same plan and connection."""
        assert step.plan is not None
        step.follow(step.plan)
        step.peers = self._connection.members or step.plan.replica_ids
        step.connected()

    @ranged("_async_quorum")
    def _follow(self, step: Step, result: QuorumResult) -> None:
        """Follows a quorum, on any thread. Every wait in it has a deadline, so every wait for it ends."""
        if result is self._quiet:
            self._follow_again(step)
            return
        self._quiet = self._sent = None
        self._background.enter_thread()
        plan = self._planner.plan(result, step.request.allow_heal)
        step.follow(plan)
        self._snapshots.agreed = plan.snapshot_steps
        self._replicas.follow(plan)
        restores = self._restores(plan)
        self._recovery.follow(plan, restores)
        if plan.heal:
            # All ranks of the group vote on the step that it heals to, including a rank whose heal fails.
            self._snapshots.abandon()
            self._recovery.begin(plan, self._position, step.began)
            self._step = plan.max_step
        if plan.quorum_id != self._quorum_id or self._connection.may_change(plan):
            self._quorum_id = plan.quorum_id
            self._errors.phase_ended("quorum")
            made, new_here = self._connection.made, self._committed_quorum_id < 0 or self._snapshots.restored
            with self._recovery.phases.measure("reconfigure") if plan.heal else nullcontext():
                self._connection.follow(plan, new_here, self._reconfigure_pg)
            if self._connection.made > made:
                self._calls.begin(plan, new_here)
            self._errors.phase_ended("reconfigure")
        if self._connection.apart:
            step.failed(StillHealing("this group waits for its connection with the others, which train on"))
            with self._heal_wait.following(plan):  # it is ready at once
                self._in_passing.stop()  # the parts that have arrived are of an earlier step
            return
        step.peers = self._connection.members or plan.replica_ids
        step.connected()
        plan = self._connection.without_unconnected(plan)
        if plan.in_background and (step.reads_state or not plan.serves) and not restores:
            self._transfer(step, plan)
        else:
            step.deferred = plan
        if plan.quiet and self._connection.settled and not restores:
            self._quiet = result

    def _restores(self, plan: Plan) -> bool:
        """Whether this group loads the copy that it has announced: no group has a later state."""
        return plan.up_to_date and not plan.heal and self._snapshots.found(self._position) is not None

    def _restore(self, plan: Plan) -> bool:
        """Loads the copy that this group has announced, on the training thread. If it cannot be loaded, the
        step is lost, and the groups that would heal from this one are told; the next request announces what
        this group has then.
        """
        reports = count(1)  # of progress, from several hosts
        try:
            with (
                self._rank_state.doing("loads a copy of the state", waits=False),
                watched_by(lambda received, total: self._heal_wait.received(next(reports))),
            ):
                position = self._snapshots.load()
        except Exception as e:
            self._recovery.refuse_targets(plan, str(e))
            raise
        if position is not None:
            self._position = position
            self._recovery.restored()
            return True
        error = RuntimeError(f"no copy of step {plan.max_step}, which this group announced, can be loaded")
        self._errors.of_this_rank(error)
        self._recovery.refuse_targets(plan, str(error))
        return False

    def _transfer(self, step: Step, plan: Plan) -> None:
        """Serves this group's state, or fetches a peer's. On the training thread, or once that has read."""
        # A group that does not fit never heals.
        with nullcontext() if self._connection.unsupported else self._heal_wait.following(plan):
            if self._restores(plan) and not self._restore(plan):
                return
            if plan.serves and (not step.reads_state or threading.get_ident() == step.thread):
                self._read_state(step)
            # A replay's quorum, in which this group is behind, serves the next step too: it heals before.
            replays = step.kept is not None and len(step.kept) > 0
            read = partial(step.served.result, self._timeout.total_seconds())
            fetched = self._recovery.run(plan, read, at_once=replays)
        if fetched is not None:
            self._position = fetched

    def _reconfigure_pg(self, communicator_id: int, handles: list[str]) -> None:
        """Passes a new quorum's handles to the process group. Nothing else does."""
        self._peers.reconfigure(options_of(communicator_id, handles, self._timeout))

    def _lost(self, why: str) -> None:
        """A step that this group has computed is not committed."""
        said = self._uncommitted.lost(why, time.monotonic())
        if said is not None:
            self._logger.warn(said)

    def _discard_unloaded_heal(self) -> None:
        """Returns to the step of this group's own weights, so that it heals again."""
        if self._recovery.before is not None or self._recovery.pending is not None:
            self._position = self._recovery.discard() or self._position

    def _end_trace(self, step: Optional[int] = None) -> None:
        if self._trace is not None:
            ended = self._current
            quorum_id = -1 if ended.plan is None else ended.plan.quorum_id
            number = self._step if step is None else step
            self._trace.ended(number, quorum_id, ended.participants, ended.committed, ended.cause)

    # Questions of a training loop

    @ranged("wait_quorum")
    def wait_quorum(self) -> None:
        """Waits until this step's quorum is known, the process group is ready and a heal has arrived. The
        functions of the user's state run in it, unless they have run in start_quorum.

        Raises:
            RuntimeError: there is no quorum, or start_quorum was not called.
            ValueError: this group reduces other tensors than the groups of the job.
            TimeoutError: there was none in time.
        """
        begun = self._check_begun("wait_quorum")
        with self._refusal_named():
            begun.result()
            deferred, self._current.deferred = self._current.deferred, None
            if deferred is not None:
                self._transfer(self._current, deferred)
            self._ready = True

    @contextmanager
    def _refusal_named(self) -> Iterator[None]:
        """Makes the refusal of this group a ValueError with the tensors that differ."""
        try:
            yield
        except RuntimeError as e:
            refused = self._layout.explain(e, self._group_rank)
            if refused is None:
                raise
            raise refused from e

    def _check_begun(self, call: str) -> Round:
        """The round of the step. Refuses a call before the first step."""
        self._maker.check()
        if self._round is None:
            raise RuntimeError(not_begun(call))
        return self._round

    def errored(self) -> Optional[ExceptionWithTraceback]:
        """The first error of this step, None if there is none."""
        return self._current.error

    def participating_rank(self) -> Optional[int]:
        """This group's rank among the participants of the step, None if it does not participate. Waits for
        the quorum, if one was requested.
        """
        if self._round is not None:
            self.wait_quorum()
        return self._current.participating_rank

    def is_participating(self) -> bool:
        """Whether this group's gradients count in this step."""
        return self._current.participating_rank is not None and not self._current.healing

    def num_participants(self) -> int:
        """The number of groups in the step, 0 before the first. Waits for the quorum if one was requested."""
        if self._round is not None:
            self.wait_quorum()
        return self._current.participants

    def num_up_to_date(self) -> int:
        """Groups of this quorum that had the newest state when it formed; the others heal in it. Waits for
        the quorum.

        All groups of a quorum get the same number, so they can use it to decide together, for example to end
        the job.
        """
        self.wait_quorum()
        assert self._current.plan is not None
        return self._current.plan.num_up_to_date

    def _is_draining(self) -> bool:
        """Whether this group was asked to leave and has ended its last step."""
        step = self._current
        return not step.undecided and step.plan is not None and step.plan.draining

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surrounds what takes longer than a step, so that this group counts as stalled only after what is
        usual in that phase, while others wait for it: docs/failures.md.

        Without it, a compilation by PyTorch, ``torch.save``, torch.distributed.checkpoint and a model in
        evaluation mode between two steps are recognized, and anything else between two steps is a phase of
        its own.

        Args:
            name: ``evaluation``, ``checkpoint`` or ``compilation``.

        Raises:
            ValueError: there is no such phase.
        """
        if name not in PHASES:
            raise ValueError(f"phase({name!r}): allowed are {', '.join(PHASES)}")
        self._logger.phase(PHASES[name])
        try:
            with self._rank_state.doing(f"is in the phase {name!r}", waits=False, phase=PHASES[name]):
                yield
        finally:
            around = self._rank_state.activity(waits=False)
            self._logger.phase("" if around is None else around.phase)


class OwnExtras(Extras):
    """The methods beyond the public ones that torchft's wrappers call: optimizers, DDP, LocalSGD, loaders."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._gradient_checks: list[Callable[[], Optional[Callable[[], None]]]] = []

    def refuse_replay(self, reason: str) -> None:
        self._manager._errors.refuse_replay(reason)

    def register_gradients(self, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._manager._replay.gradients.append(gradients)

    def computes(self) -> None:
        self._manager._rank_state.computed = True

    def reduces_gradients(self) -> Callable[[], bool]:
        step = self._manager._current
        if not step.undecided:
            raise RuntimeError(not_begun("backward"))
        return partial(_awaits_commit, weakref.ref(self._manager._errors), step.sharing)

    def register_check(self, check: Callable[[], None]) -> None:
        self._gradient_checks.append(weakly(check))

    def check_gradients(self) -> None:
        """Calls the functions of :meth:`register_check`."""
        for known in self._gradient_checks:
            if (check := known()) is not None:
                check()

    def register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._manager._replicas.state.add_optimizer(optimizer)
        self._manager._layout.add_optimizer(optimizer)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        # With groups of upstream, which request a quorum for each optimizer, all groups do so.
        manager = self._manager
        step, begun = manager._current, manager._round
        shares = step.undecided and step.sharing.begins(optimizer)
        if shares and begun is not None:
            with suppress(Exception):  # `wait_quorum` raises it
                shares = manager._planner.plan(begun.answer(), step.request.allow_heal).without_upstream
        if not shares:
            manager.start_quorum()
        manager._current.sharing.begun.append(optimizer)

    def end(self, optimizer: torch.optim.Optimizer) -> bool:
        manager = self._manager
        step = manager._current
        if step.sharing.ended and step.sharing.ends(optimizer):
            if manager._in_passing.joining:
                manager._in_passing.steps_too(optimizer)
            return step.committed
        manager._optimizer_that_votes = optimizer
        try:
            committed: bool = manager.should_commit()
        finally:
            manager._optimizer_that_votes = None
        sharing = manager._current.sharing
        sharing.ended.append(optimizer)
        sharing.reduced = False
        return committed

    def register_parameters(self, named: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._manager._replicas.state.add_parameters(named)
        self._manager._layout.add_parameters(named())

    def check_sparse(self, names: list[str]) -> None:
        self._manager._peers.check_sparse(names)

    @property
    def adds_gradients(self) -> bool:
        return self._manager._data.adds_gradients

    def steps_by_itself(self, local_steps: LocalSteps) -> None:
        self._manager._data.attach_local_steps(local_steps)

    def inner_step_ended(self) -> None:
        self._manager._data.inner_step_ended()

    @property
    def has_peers(self) -> bool:
        return self._manager._quorum_id != -1 and not self._manager._connection.apart

    def share_buffer(self, buffer: torch.Tensor) -> None:
        self._manager._peers.share_buffer(buffer)

    def counted(self, name: str, number: int = 1) -> None:
        self._manager._logger.counted(name, number)


def _awaits_commit(errors: weakref.ref[Errors], sharing: SharedStep) -> bool:
    """Whether the Manager's step is the one of this object, which all attempts at it share, and is not
    committed. Models keep this, and must not keep the Manager.
    """
    known = errors()
    return known is not None and known.step.sharing is sharing and not known.step.committed
