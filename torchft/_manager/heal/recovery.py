"""Healing: sends this group's state to groups that are behind, and receives a peer's state when this group is
behind.

Transfers begin once a quorum is known, and end before the weights change. A state is *fetched* on the quorum
thread while the model runs. It is read at the source, and *loaded*, on the training thread, the only one that
calls the user's functions. Until it is loaded it can be *discarded*; the group then reports the step of its
own weights. After an error the group does not commit the step.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence

import torch

from torchft._manager.heal import hyperparameters
from torchft._manager.heal.in_passing import Fetch, StillHealing
from torchft._manager.heal.state import UserState
from torchft._manager.observe.own_time import ranged
from torchft._manager.observe.phases import Phases, tensor_bytes
from torchft._manager.quorum.plan import HealSource, Plan
from torchft._manager.rank import Position
from torchft._manager.settings import HealMode
from torchft._manager.step.failures import PeerFailed
from torchft.checkpointing.client.progress import watched_by
from torchft.checkpointing.client.target import TargetState
from torchft.checkpointing.transport import Unsendable, bounded

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchft._manager.checks.loader import Data
    from torchft._manager.edge import Transport
    from torchft._manager.heal.in_passing import InPassing
    from torchft._manager.heal.sources import Sources
    from torchft._manager.heal.together import Agreement
    from torchft._manager.heal.wait import HealWait
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.quorum.plan import Planner
    from torchft._manager.rank import RankState
    from torchft._manager.step.background import Background
    from torchft._manager.step.errors import Errors
    from torchft._manager.step.step import Step
    from torchft._torchft import MemberFailure

# The pause between two attempts to abort a transfer, which may not have begun when its source fails.
_ABANDON_AGAIN_SEC = 0.05
# The most attempts when this Manager is shut down.
_MOST_ABANDONS = 20

_SHUT_DOWN = "the Manager is shut down"


@dataclass(eq=False, kw_only=True)
class Recovery:
    """Serves state, fetches and loads it, for one rank.

    Attributes:
        busy: whether a transfer may be in progress, or a peer may read this group's state.
        pending: the state that was fetched and is not loaded yet.
        before: the position of the group's own weights, while a heal has begun and nothing was loaded.
        phases: the seconds of each phase of the current or last heal.
    """

    transport: Transport
    user_state: UserState
    optimizers: Sequence[Optimizer]  # their hyperparameters travel with the state; more may be added
    in_passing: InPassing
    sources: Sources
    most_sources: int  # for one heal; with more than 1 this group is also an additional source for others
    planner: Planner  # says whether the model runs while a state is fetched
    wait: HealWait  # lets the other groups wait for this one
    agreement: Agreement  # lets the ranks of this group load their states together
    background: Background  # the CUDA stream of the transfers
    rank_state: RankState
    data: Data
    errors: Errors
    logger: _ManagerLogger

    def __post_init__(self) -> None:
        self.busy = True
        self.pending: Optional[dict[str, Any]] = None
        self.before: Optional[Position] = None
        # After a failed load some weights may have changed, and after a failed transfer in place some or all
        # of them. Until a load succeeds the weights belong to no step: they must not be trained on or served.
        self._inconsistent = False
        self._additional = self.most_sources - 1 if self.transport.several_sources else 0
        self.phases = Phases()
        self._hyperparameters: hyperparameters.Groups = []  # at the begin of the step
        self._source: Optional[tuple[int, str]] = None  # quorum_id and replica_id, during the transfer
        self._closed = False
        self._target = TargetState(self._own, writable=False)  # of the current heal
        if self.transport.in_place and self.planner.use_async_quorum:
            warnings.warn(
                "the checkpoint transport has a state_dict, so it writes to this group's tensors while the "
                "forward pass runs: pass use_async_quorum=False, or leave state_dict out "
                "(docs/internals/heals.md)",
                stacklevel=5,
            )

    @property
    def inconsistent(self) -> bool:
        """Whether this group's weights are of no step: a heal has changed some of them, and has not ended."""
        return self._inconsistent or self.in_passing.wrote

    def follow(self, plan: Plan, restores: bool) -> None:
        """Takes a quorum into account, before the group acts on it, or loads a copy of its state.
        RuntimeError: the weights are of no step, and there is no group to heal from.
        """
        self.in_passing.follow(plan)
        if self.inconsistent and not (plan.heal or restores):
            raise RuntimeError(
                f"a heal of this group did not get to its end, so its weights are of no step, and quorum "
                f"{plan.quorum_id} has no group to heal from; start it again from a checkpoint"
            )

    def begin(self, plan: Plan, before: Position, asked: float) -> None:
        """Begins a heal. `before`: the position of the group's own weights; `asked`: the time.monotonic() of
        the request for its quorum.
        """
        self.before = before
        self.agreement.begin(plan.quorum_id, plan.max_step)
        self._hyperparameters = hyperparameters.read(self.optimizers)
        self.phases = Phases(quorum=time.monotonic() - asked)

    def run(self, plan: Plan, read: Callable[[], dict[str, Any]], at_once: bool) -> Optional[Position]:
        """Serves this group's state or fetches a peer's, and returns that one's position. An error makes this
        group, and no other, lose the step.

        Args:
            read: returns the state that the training thread has read, or raises its error.
            at_once: whether a heal needs the whole state before the next step.
        """
        if not (plan.serves or plan.heal):
            return None
        self.busy = True
        with self.background.running():
            try:
                self._serve(plan, read)
                if plan.heal:
                    with self.rank_state.doing("fetches the state of a peer"):
                        return self._heal(plan, at_once)
            except Exception as e:
                self.logger.exception(f"healing failed: {e}")
                self._refuse()
                self._failed(plan, e)
        return None

    def _failed(self, plan: Optional[Plan], error: Exception) -> None:
        """Only keeps an error, since the peers count on this group in their collectives. But if this group
        was to heal before weights are averaged, its zeros must not be in the average: then all groups lose
        the step.
        """
        if plan is not None and plan.heal and not plan.in_background and self.data.averages_weights:
            self.errors.of_this_rank(error)
        else:
            self.errors.keep(error)

    # The source

    def _serve(self, plan: Plan, read: Callable[[], dict[str, Any]]) -> None:
        """Offers the state of a step to the targets that this group is a source or additional source of."""
        read = partial(self.in_passing.read, read)
        if self.in_passing.offer(plan, partial(self._offer_whole, plan, read)):
            return
        if plan.recover_dst:
            self.logger.info(f"serving step {plan.max_step} to replica ranks {plan.recover_dst}")
            try:
                self._offer(plan, read)
            except Unsendable as e:  # the targets have been informed; this group trains on
                self.logger.exception(f"replica ranks {plan.recover_dst} cannot heal from this group: {e}")
        elif plan.help_dst and self._additional > 0:
            try:
                self.transport.help_checkpoint(plan.max_step, read())
            except Exception as e:  # the target still has its assigned source
                self.logger.exception(
                    f"no help for replica ranks {plan.help_dst} at step {plan.max_step}: {e}"
                )

    @ranged("_checkpoint_transport::send_checkpoint")
    def _offer(self, plan: Plan, read: Callable[[], dict[str, Any]]) -> None:
        try:
            state = read()
        except Exception as e:
            self._refuse_targets(plan, f"its state_dict function failed: {e!r}")
            raise Unsendable(f"the state_dict function failed: {e!r}") from e
        self.transport.send_checkpoint(state_dict=state, **self._where(plan))

    def _offer_whole(self, plan: Plan, read: Callable[[], dict[str, Any]]) -> None:
        """Does so on another thread, for a target that does not heal in passing after all."""
        try:
            self._offer(plan, read)
        except Exception as e:
            self.logger.exception(f"replica ranks {plan.recover_dst} cannot heal from this group: {e}")
            self._refuse_targets(plan, repr(e))

    def _refuse_targets(self, plan: Plan, reason: str) -> None:
        self.transport.refuse_checkpoint(reason=reason, **self._where(plan))

    def _where(self, plan: Plan) -> dict[str, Any]:
        """The arguments of the transport that say which targets a state is for."""
        return {"dst_ranks": plan.recover_dst, "step": plan.max_step, "timeout": self.rank_state.timeout}

    def refuse_targets(self, plan: Plan, reason: str) -> None:
        """Tells the targets of this group that it has no state for them."""
        self.busy = True
        if not plan.recover_dst:
            return
        try:
            self.in_passing.refuse(plan, reason)
            self._refuse_targets(plan, reason)
        except Exception as e:
            self.logger.warn(f"the groups that heal from this one may wait until their timeout: {e}")

    def end_serving(self, step: Step) -> None:
        """Waits until no peer reads this group's state any more. An error concerns the target only: this
        group's state is complete, and the decision on its step stands.
        """
        try:
            self.transport.disallow_checkpoint()
            self.busy = not self.transport.own  # upstream ends each step of a transport so
        except Exception as e:
            self.logger.exception(f"the groups that heal from this one do not have its state: {e}")
            # A transfer by the process group must not continue while the state changes.
            step.collectives.abort()

    def end_in_step(self, step: Step) -> None:
        """Does the same as :meth:`end_serving`, but during the step."""
        if step.plan is not None and step.plan.serves:
            step.collectives.wait()
            self.arrived()  # a transport may only have queued the sends
            self.end_serving(step)

    # The target

    def _heal(self, plan: Plan, at_once: bool) -> Optional[Position]:
        """Fetches the state of ``plan.max_step`` from this rank's counterpart in the assigned group; None: it
        trains along while the state arrives.
        """
        if at_once:
            self.in_passing.stop()
        fetch = Fetch.ALL if at_once else self.in_passing.join(plan, self._loses_nothing(plan))
        if fetch is Fetch.NOTHING:
            return None
        try:
            position = self._fetch(plan, self.in_passing.has if fetch is Fetch.REST else None)
        except Exception as e:
            self.in_passing.failed(plan, e)
            raise
        if fetch is Fetch.REST:
            self.phases.seconds["transfer"] = time.monotonic() - self.in_passing.began
        return position

    @ranged("_checkpoint_transport::recv_checkpoint")
    def _fetch(
        self, plan: Plan, has: Optional[Callable[[int, str], torch.UntypedStorage]] = None
    ) -> Position:
        assert plan.source is not None
        source: HealSource = plan.source
        self.logger.info(f"healing to step {plan.max_step} from {source.manager_address}")
        with self.phases.measure("transfer"), bounded(f"healing from {source.manager_address}"):
            metadata = self.sources.locate_assigned(source.manager_address)
            additional = plan.additional_sources[: self._additional]
            asked = [partial(self.sources.locate, address) for address in additional]
            several: dict[str, Any] = {"additional_sources": asked} if asked else {}
            self._target = target = TargetState(self._own, self._may_write(plan), self.wait.waited_for, has)
            if self.transport.takes_target:
                several["target"] = target
            self._source = plan.quorum_id, source.replica_id
            try:
                if self._closed:
                    raise RuntimeError(_SHUT_DOWN)
                self.sources.check_peers()  # failures reported after this line reach peer_failed
                in_place = self.transport.in_place or (self.transport.takes_target and target.writable)
                self._inconsistent = self._inconsistent or in_place
                with watched_by(self._progressed):
                    state = self.transport.recv_checkpoint(
                        src_rank=source.replica_rank,
                        metadata=metadata,
                        step=plan.max_step,
                        timeout=self.rank_state.timeout,
                        **several,
                    )
            finally:
                self._source = None
        served = state["torchft"]
        if served["step"] != plan.max_step:
            raise RuntimeError(
                f"{source.manager_address} served the state of step {served['step']} instead of "
                f"{plan.max_step}"
            )
        self.phases.received = tensor_bytes(state)
        self.pending = state
        return Position(served["step"], served["batches_committed"], plan.committed_quorum_id)

    def _progressed(self, received: int, total: int) -> None:
        self.wait.received(received)
        self.logger.heal_progress(received, total)

    def _may_write(self, plan: Plan) -> bool:
        """Whether the state may be received directly into this group's own tensors: no thread reads them
        during the transfer, as the training thread waits for the quorum unless heals run in the background,
        and nothing is lost if the transfer fails half-way.
        """
        return not self.planner.use_async_quorum and not plan.replay and self._loses_nothing(plan)

    def _loses_nothing(self, plan: Plan) -> bool:
        """Whether this group's own weights are not needed any more: another group has the state of the source
        too, or this group has trained no step.
        """
        new = self.before is not None and self.before.step == 0 and plan.max_step > 0
        return new or plan.num_up_to_date > 1

    def _own(self) -> dict[str, Any]:
        """This group's own state, structured as a served one. The training thread calls this, or waits."""
        return {"user": {key: read() for key, read in self.user_state.read_fns.items()}}

    def peer_failed(self, failure: MemberFailure) -> None:
        """Ends a transfer from a failed group: the others wait until this group asks for a quorum."""
        self.in_passing.peer_failed(failure)
        while self._source == (failure.quorum_id, failure.replica_id):
            if not self.transport.abandon_receiving(PeerFailed(failure)):
                return
            time.sleep(_ABANDON_AGAIN_SEC)

    def close(self) -> None:
        """Ends a transfer in progress, and all heals in passing, on any thread: otherwise a shutdown would
        wait for a state as long as data arrives.
        """
        self._closed = True
        self.in_passing.close()
        for _ in range(_MOST_ABANDONS):
            if self._source is None or not self.transport.abandon_receiving(RuntimeError(_SHUT_DOWN)):
                return
            time.sleep(_ABANDON_AGAIN_SEC)

    def arrived(self) -> bool:
        """Waits until the device has sent the served state and received the fetched one. False: timeout."""
        try:
            self.background.join(self.rank_state.timeout, self.pending)
        except Exception as e:
            self.errors.of_collective(e)  # aborts the process group, which ends the transfers
            self._refuse()
            return False
        return True

    def _refuse(self) -> None:
        """Tells the other ranks that this one receives no state in this step: they load none either."""
        try:
            self.agreement.refuse()
        except Exception as e:
            self.logger.warn(f"the other ranks of the group may wait for this one until their timeout: {e}")

    def load_before(self, step: Step) -> None:
        """Loads the state before the step begins, so that this group participates in the step."""
        if not step.healing or self.in_passing.joining or not self.arrived() or not self.load(step):
            return
        if step.plan is not None and not step.plan.in_background:
            step.joined()

    def load(self, step: Step) -> bool:
        """Loads the fetched state, on the training thread. False if a rank of the group has none, or the
        user's function failed; the weights are then of no step.
        """
        state, self.pending = self.pending, None
        if state is None:
            self._refuse()
            return False
        try:
            if not self._all_received():
                # Groups that heal in passing keep their connections: another rank may still wait for its own.
                error = RuntimeError if self.in_passing.mode is HealMode.AT_ONCE else StillHealing
                raise error("another rank of this group has not received its state")
            self._load(state)
            step.loaded()
            return True
        except StillHealing as e:
            step.failed(e)
        except Exception as e:
            self._failed(step.plan, e)
        return False

    def _load(self, state: dict[str, Any]) -> None:
        try:
            with self.phases.measure("load"):
                state = self._target.settle(state, self.rank_state.timeout.total_seconds())
                # a script may set the learning rate of a step in it, when it knows the step
                own = hyperparameters.changed(self._hyperparameters, hyperparameters.read(self.optimizers))
                self.user_state.load(state["user"])
                self._set_hyperparameters(state, own)
        except BaseException as e:  # also Ctrl-C, after which a notebook may go on
            self._inconsistent = True
            self.in_passing.stop()  # the weights that were compared may have been changed
            self.logger.exception(f"the state of a peer could not be loaded: {e}")
            raise
        before, self.before = self.before, None
        self.restored()
        self.logger.recovery_event(before.step if before else 0, self.phases)

    def restored(self) -> None:
        """The whole state of this rank was loaded, that of a peer or a copy: its weights are of one step."""
        self._inconsistent = False
        self.in_passing.healed()

    def _all_received(self) -> bool:
        """Whether all ranks of this group have received their states; waits while they make progress."""
        if not self.agreement.needed:
            return True
        try:
            self.wait.wait()
        except Exception as e:  # the other ranks may have theirs nevertheless
            self.logger.info(f"a heal of this quorum has not ended: {e}")
        return self.agreement.reached(self.rank_state.timeout)

    def _set_hyperparameters(self, state: dict[str, Any], own: hyperparameters.Groups) -> None:
        given = state.get(hyperparameters.KEY)  # upstream's sources have none
        if given is None:
            return
        try:
            hyperparameters.write(self.optimizers, given)
            hyperparameters.write(self.optimizers, own)
        except ValueError as e:
            self.logger.warn(f"the hyperparameters are those that load_state_dict has set: {e}")

    def discard(self) -> Optional[Position]:
        """Drops a heal that was not loaded. Returns the position of the group's own weights, to report it in
        the next quorum; None if there was no heal.
        """
        before, self.before, self.pending = self.before, None, None
        if before is not None:
            self._refuse()
        return before
