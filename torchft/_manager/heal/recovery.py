"""Healing: sends this group's state to groups that are behind, and receives a peer's state when this group is
behind.

A state is *fetched* on the quorum thread while the model runs. It is read at the source, and *loaded*, on the
training thread, the only one that calls the user's functions. Until it is loaded it can be *discarded*; the
group then reports the step of its own weights.
"""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Optional, Sequence, TypeVar

import torch

from torchft._manager.heal import hyperparameters
from torchft._manager.heal.in_passing import Fetch, StillHealing
from torchft._manager.heal.state import UserState
from torchft._manager.observe.phases import Phases, tensor_bytes
from torchft._manager.observe.ranges import ranged
from torchft._manager.quorum.plan import HealSource, Plan
from torchft._manager.rank import Position
from torchft._manager.step.failures import PeerFailed
from torchft.checkpointing.client.progress import watched_by
from torchft.checkpointing.client.target import TargetState
from torchft.checkpointing.transport import Unsendable, bounded

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchft._manager.edge import Transport
    from torchft._manager.heal.in_passing import InPassing
    from torchft._manager.heal.together import Agreement
    from torchft._manager.heal.wait import HealWait
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._torchft import ManagerClient, MemberFailure

T = TypeVar("T")

# The timeout for reaching an additional source. One that takes longer would hardly shorten the transfer.
_LOCATE_TIMEOUT = timedelta(seconds=3)
# The timeout of the first attempt to reach a source; it doubles with each attempt. Between two attempts the
# quorum thread learns of a failure of the source.
_FIRST_TRY = timedelta(seconds=0.5)
# The pause between two attempts to abort a transfer, which may not have begun when its source fails.
_ABANDON_AGAIN_SEC = 0.05


class Recovery:
    """Serves state and fetches it, for one rank.

    Args:
        transport: moves the bytes.
        user_state: reads and loads the user's part.
        optimizers: their hyperparameters travel with the state. More may be added to this sequence.
        group_rank: which rank of a source serves this one.
        connect: opens a client to a manager server, within a timeout.
        check_peers: raises if a member of the quorum is known to have failed.
        timeout: of the request for the state's address, and of the transfer.
        connect_timeout: of connecting to the source's manager server.
        sources: the number of groups that this one fetches a state from; with more than 1 it is also an
            additional source for others.
        in_background: whether the model runs while a state is fetched.
        wait: lets the other groups wait for this one.
        agreement: lets the ranks of this group load their states together.
        logger: of the Manager.

    Attributes:
        in_background: the argument of that name.
        pending: the state that was fetched and is not loaded yet.
        before: the position of the group's own weights, while a heal has begun and nothing was loaded.
        phases: the seconds of each phase of the current or last heal.
        in_passing: heals in passing, None if that is off.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        user_state: UserState,
        optimizers: Sequence[Optimizer],
        group_rank: int,
        connect: Callable[[str, timedelta], ManagerClient],
        check_peers: Callable[[], None],
        timeout: timedelta,
        connect_timeout: timedelta,
        sources: int,
        in_background: bool,
        wait: HealWait,
        agreement: Agreement,
        logger: _ManagerLogger,
    ) -> None:
        self._transport = transport
        self._user_state = user_state
        self._optimizers = optimizers
        self._group_rank = group_rank
        self._connect = connect
        self._check_peers = check_peers
        self._timeout = timeout
        self._connect_timeout = connect_timeout
        self._sources = sources
        self._wait = wait
        self._agreement = agreement
        self._logger = logger
        self.pending: Optional[dict[str, Any]] = None
        self.phases = Phases()
        self.in_passing: Optional[InPassing] = None
        self.before: Optional[Position] = None
        self._hyperparameters: hyperparameters.Groups = []  # at the begin of the step
        self._source: Optional[tuple[int, str]] = None  # quorum_id and replica_id, during the transfer
        self._target = TargetState(self._own, writable=False)  # of the current heal
        self.in_background = in_background
        if transport.in_place and in_background:
            warnings.warn(
                "the checkpoint transport has a state_dict, so it writes to this group's tensors while the "
                "forward pass runs: pass use_async_quorum=False, or leave state_dict out "
                "(docs/internals/heals.md)",
                stacklevel=4,
            )
        # After a failed load some weights may have changed, and after a failed transfer in place some or all
        # of them. Until a load succeeds the weights belong to no step: they must not be trained on or served.
        self._inconsistent = False

    @property
    def _additional(self) -> int:
        return self._sources - 1 if self._transport.several_sources else 0

    @property
    def inconsistent(self) -> bool:
        """Whether this group's weights are of no step: a heal has changed some of them, and has not ended."""
        return self._inconsistent or (self.in_passing is not None and self.in_passing.wrote)

    @property
    def joining(self) -> bool:
        """Whether this group trains along while its state arrives in parts."""
        return self.in_passing is not None and self.in_passing.joining

    def follow(self, plan: Plan, restores: bool) -> None:
        """Takes a quorum into account, before the group acts on it.

        Args:
            restores: whether it loads a copy of its state.

        Raises:
            RuntimeError: the weights are of no step, and there is no group to heal from.
        """
        if self.in_passing is not None:
            self.in_passing.follow(plan)
        if self.inconsistent and not (plan.heal or restores):
            raise RuntimeError(
                f"a heal of this group did not get to its end, so its weights are of no step, and quorum "
                f"{plan.quorum_id} has no group to heal from; start it again from a checkpoint"
            )

    def begin(self, plan: Plan, before: Position, asked: float) -> None:
        """Begins a heal.

        Args:
            before: the position of the group's own weights, which :meth:`discard` returns if nothing is
                loaded.
            asked: the time.monotonic() of the quorum request whose result names this group as a target.
        """
        self.before = before
        self._agreement.begin(plan.quorum_id, plan.max_step)
        self._hyperparameters = hyperparameters.read(self._optimizers)
        self.phases = Phases(quorum=time.monotonic() - asked)

    def serve(self, plan: Plan, read: Callable[[], dict[str, Any]]) -> None:
        """Offers the state of a step to the targets that this group is a source or additional source of.

        Args:
            read: returns the state, on any thread until the step ends.

        Raises:
            Exception: the transport failed.
        """
        if self.in_passing is not None:
            read = partial(self.in_passing.read, read)
            if self.in_passing.offer(plan, partial(self._offer_whole, plan, read)):
                return
        self._offer(plan, read)

    def _offer_whole(self, plan: Plan, read: Callable[[], dict[str, Any]]) -> None:
        try:
            self._offer(plan, read)
        except Exception as e:
            self._logger.exception(f"replica ranks {plan.recover_dst} cannot heal from this group: {e}")
            self._transport.refuse_checkpoint(reason=repr(e), **self._where(plan))

    def _offer(self, plan: Plan, read: Callable[[], dict[str, Any]]) -> None:
        if plan.recover_dst:
            self._logger.info(f"serving step {plan.max_step} to replica ranks {plan.recover_dst}")
            try:
                self._serve(plan, read)
            except (
                Unsendable
            ) as e:  # the targets have been informed; this group keeps its state, and trains on
                self._logger.exception(f"replica ranks {plan.recover_dst} cannot heal from this group: {e}")
        elif plan.help_dst and self._additional > 0:
            try:
                self._transport.help_checkpoint(plan.max_step, read())
            except Exception as e:  # the target still has its assigned source
                self._logger.exception(
                    f"no help for replica ranks {plan.help_dst} at step {plan.max_step}: {e}"
                )

    def _where(self, plan: Plan) -> dict[str, Any]:
        """The arguments of the transport that say which targets a state is for."""
        return {"dst_ranks": plan.recover_dst, "step": plan.max_step, "timeout": self._timeout}

    @ranged("_checkpoint_transport::send_checkpoint")
    def _serve(self, plan: Plan, read: Callable[[], dict[str, Any]]) -> None:
        where = self._where(plan)
        try:
            state = read()
        except Exception as e:
            self._transport.refuse_checkpoint(reason=f"its state_dict function failed: {e!r}", **where)
            raise Unsendable(f"the state_dict function failed: {e!r}") from e
        self._transport.send_checkpoint(state_dict=state, **where)

    def refuse_targets(self, plan: Plan, reason: str) -> None:
        """Tells the targets of this group that it has no state for them."""
        if plan.recover_dst:
            if self.in_passing is not None:
                self.in_passing.refuse(plan, reason)
            self._transport.refuse_checkpoint(reason=reason, **self._where(plan))

    def heal(self, plan: Plan, at_once: bool) -> Optional[Position]:
        """Fetches the state of ``plan.max_step`` from this rank's counterpart in the assigned group, or
        trains along while it arrives.

        Args:
            at_once: whether the state is needed before the next step.

        Returns:
            the group's position after the state is loaded; None: this group trains along.

        Raises:
            RuntimeError: the source cannot be reached, or serves another step than the requested one.
            PeerFailed: the source cannot be reached, and a member of the quorum has failed.
            CheckpointTimeout: it took longer than the timeout; if the other groups wait for this one, nothing
                arrived for that time.
        """
        if self.in_passing is None:
            return self._fetch(plan)
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
        self._logger.info(f"healing to step {plan.max_step} from {source.manager_address}")
        with self.phases.measure("transfer"), bounded(f"healing from {source.manager_address}"):
            metadata = self._ask_source(self._reach(source.manager_address))
            asked = [partial(self.locate, address) for address in plan.additional_sources[: self._additional]]
            several: dict[str, Any] = {"additional_sources": asked} if asked else {}
            self._target = target = TargetState(self._own, self._may_write(plan), self._wait.waited_for, has)
            if self._transport.takes_target:
                several["target"] = target
            self._source = plan.quorum_id, source.replica_id
            try:
                self._check_peers()  # failures reported after this line reach peer_failed
                in_place = self._transport.in_place or (self._transport.takes_target and target.writable)
                self._inconsistent = self._inconsistent or in_place
                with watched_by(self._progressed):
                    state = self._transport.recv_checkpoint(
                        src_rank=source.replica_rank,
                        metadata=metadata,
                        step=plan.max_step,
                        timeout=self._timeout,
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
        self._wait.received(received)
        self._logger.heal_progress(received, total)

    def _may_write(self, plan: Plan) -> bool:
        """Whether the state may be received directly into this group's own tensors.

        It may if two things hold. No thread reads the tensors during the transfer: the training thread waits
        for the quorum, unless heals run in the background. And nothing is lost if the transfer fails
        half-way.
        """
        return not self.in_background and not plan.replay and self._loses_nothing(plan)

    def _loses_nothing(self, plan: Plan) -> bool:
        """Whether this group's own weights are not needed any more: another group has the state of the source
        too, or this group has trained no step.
        """
        new = self.before is not None and self.before.step == 0 and plan.max_step > 0
        return new or plan.num_up_to_date > 1

    def _own(self) -> dict[str, Any]:
        """This group's own state, structured as a served one. The training thread calls this, or waits."""
        return {"user": {key: read() for key, read in self._user_state.read_fns.items()}}

    def _reach(self, manager_address: str) -> ManagerClient:
        """Connects with the source's manager server."""
        return self._retried(
            lambda timeout: self._connect(manager_address, timeout),
            self._connect_timeout,
            again_after=RuntimeError,
        )

    def _ask_source(self, client: ManagerClient) -> str:
        return self._retried(
            lambda timeout: self._ask(client, timeout), self._timeout, again_after=TimeoutError
        )

    def _retried(self, call: Callable[[timedelta], T], timeout: timedelta, again_after: type[Exception]) -> T:
        """Retries with a timeout that doubles, as the others wait: a failed source costs only a part."""
        end = time.monotonic() + timeout.total_seconds()
        attempt = _FIRST_TRY
        while True:
            left = timedelta(seconds=end - time.monotonic())
            try:
                return call(min(attempt, left))
            except again_after as e:
                if left <= attempt:
                    raise
                if time.monotonic() >= end:  # the attempt took longer than its timeout
                    raise TimeoutError(
                        f"the source was not reached: timed out after {timeout.total_seconds():g} s: {e}"
                    ) from e
                self._check_peers()
                attempt *= 2

    def peer_failed(self, failure: MemberFailure) -> None:
        """Ends a transfer from a failed group: the others wait until this group asks for a quorum."""
        if self.in_passing is not None:
            self.in_passing.peer_failed(failure.quorum_id, failure.replica_id)
        while self._source == (failure.quorum_id, failure.replica_id):
            if not self._transport.abandon_receiving(PeerFailed(failure)):
                return
            time.sleep(_ABANDON_AGAIN_SEC)

    def locate(self, manager_address: str) -> str:
        """Where this rank's counterpart in a group offers its state; one attempt, of at most 3 s."""
        return self._ask(self._connect(manager_address, _LOCATE_TIMEOUT), _LOCATE_TIMEOUT)

    def _ask(self, client: ManagerClient, timeout: timedelta) -> str:
        """Requests the address of a state. The client closes its connection when it is garbage collected."""
        return client._checkpoint_metadata(self._group_rank, timeout=timeout)

    def refuse(self) -> None:
        """Tells the other ranks that this one receives no state in this step: they load none either."""
        try:
            self._agreement.refuse()
        except Exception as e:
            self._logger.warn(f"the other ranks of the group may wait for this one until their timeout: {e}")

    def load(self) -> bool:
        """Loads the fetched state, on the training thread. False if there is none.

        Raises:
            StillHealing: another rank of this group has not received its state, and groups heal in passing.
            RuntimeError: another rank of this group has not received its state, and groups heal at once.
            Exception: the user's function failed; the weights are then of no step.
        """
        state, before = self.pending, self.before
        if state is None:
            self.refuse()
            return False
        self.pending = None
        if not self._all_received():
            # Groups that heal in passing keep their connections: another rank may still wait for its own.
            error = RuntimeError if self.in_passing is None else StillHealing
            raise error("another rank of this group has not received its state")
        try:
            with self.phases.measure("load"):
                state = self._target.settle(state, self._timeout.total_seconds())
                # a script may set the learning rate of a step in it, when it knows the step
                own = hyperparameters.changed(self._hyperparameters, hyperparameters.read(self._optimizers))
                self._user_state.load(state["user"])
                self._set_hyperparameters(state, own)
        except BaseException as e:  # also Ctrl-C, after which a notebook may go on
            self._inconsistent = True
            if self.in_passing is not None:
                self.in_passing.stop()  # the weights that were compared may have been changed
            self._logger.exception(f"the state of a peer could not be loaded: {e}")
            raise
        self.before = None
        self.restored()
        self._logger.recovery_event(before.step if before else 0, self.phases)
        return True

    def restored(self) -> None:
        """The whole state of this rank was loaded, that of a peer or a copy: its weights are of one step."""
        self._inconsistent = False
        if self.in_passing is not None:
            self.in_passing.healed()

    def _all_received(self) -> bool:
        """Whether all ranks of this group have received their states; waits while they make progress."""
        if not self._agreement.needed:
            return True
        try:
            self._wait.wait()
        except Exception as e:  # the other ranks may have theirs nevertheless
            self._logger.info(f"a heal of this quorum has not ended: {e}")
        return self._agreement.reached(self._timeout)

    def _set_hyperparameters(self, state: dict[str, Any], own: hyperparameters.Groups) -> None:
        given = state.get(hyperparameters.KEY)  # upstream's sources have none
        if given is None:
            return
        try:
            hyperparameters.write(self._optimizers, given)
            hyperparameters.write(self._optimizers, own)
        except ValueError as e:
            self._logger.warn(f"the hyperparameters are those that load_state_dict has set: {e}")

    def discard(self) -> Optional[Position]:
        """Drops a heal that was not loaded.

        Returns:
            the position of the group's own weights, to report it in the next quorum; None if there was no
            heal.
        """
        before, self.before, self.pending = self.before, None, None
        if before is not None:
            self.refuse()
        return before
