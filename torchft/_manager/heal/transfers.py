"""The transfers of state in a step: they begin once a quorum is known, and end before the weights change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

from torchft._manager.heal.in_passing import StillHealing

if TYPE_CHECKING:
    from torchft._manager.checks.loader import Data
    from torchft._manager.edge import Transport
    from torchft._manager.heal.recovery import Recovery
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.quorum.plan import Plan
    from torchft._manager.rank import Position, RankState
    from torchft._manager.step.background import Background
    from torchft._manager.step.errors import Errors
    from torchft._manager.step.step import Step


class Transfers:
    """Serves this group's state and fetches a peer's. After an error the group does not commit the step.

    Args:
        recovery: sends, fetches and loads.
        transport: the transport that ``recovery`` uses.
        background: the CUDA stream of the transfers.
        rank_state: has the rank's step, and the timeout of a device.
        data: whether a step averages weights.
        errors: takes the errors of transfers.

    Attributes:
        busy: whether a transfer may be in progress, or a peer may read this group's state.
    """

    busy = True

    def __init__(
        self,
        recovery: Recovery,
        transport: Transport,
        background: Background,
        rank_state: RankState,
        *,
        data: Data,
        errors: Errors,
        logger: _ManagerLogger,
    ) -> None:
        self._data = data
        self._recovery = recovery
        self._transport = transport
        self._background = background
        self._rank_state = rank_state
        self._errors = errors
        self._logger = logger

    def run(self, plan: Plan, state: Callable[[], dict[str, Any]], at_once: bool) -> Optional[Position]:
        """Serves this group's state or fetches a peer's. An error makes this group, and no other, lose the
        step.

        Args:
            state: returns the state that the training thread has read, or raises its error.
            at_once: whether a heal needs the whole state before the next step.

        Returns:
            The position of the fetched state; None if there is none.
        """
        if not (plan.serves or plan.heal):
            return None
        self.busy = True
        with self._background.running():
            try:
                self._recovery.serve(plan, state)
                if plan.heal:
                    with self._rank_state.doing("fetches the state of a peer"):
                        return self._recovery.heal(plan, at_once)
            except Exception as e:
                self._logger.exception(f"healing failed: {e}")
                self._recovery.refuse()
                self._failed(plan, e)
        return None

    def refuse(self, plan: Plan, reason: str) -> None:
        """Tells the targets that this group has no state for them."""
        self.busy = True
        try:
            self._recovery.refuse_targets(plan, reason)
        except Exception as e:
            self._logger.warn(f"the groups that heal from this one may wait until their timeout: {e}")

    def arrived(self) -> bool:
        """Waits until the device has sent the served state and received the fetched one. False: timeout."""
        try:
            self._background.join(self._rank_state.timeout, self._recovery.pending)
        except Exception as e:
            self._errors.of_collective(e)  # aborts the process group, which ends the transfers
            self._recovery.refuse()
            return False
        return True

    def load(self, step: Step) -> bool:
        """Loads the fetched state. False if a rank of the group has none, or the user's function failed."""
        try:
            loaded = self._recovery.load()
            if loaded:
                step.loaded()
            return loaded
        except StillHealing as e:
            step.failed(e)
            return False
        except Exception as e:
            self._failed(step.plan, e)
            return False

    def _failed(self, plan: Optional[Plan], error: Exception) -> None:
        """Only keeps an error, since the peers count on this group in their collectives. But if this group
        was to heal before weights are averaged, its zeros must not be in the average: then all groups lose
        the step.
        """
        if plan is not None and plan.heal and not plan.in_background and self._data.averages_weights:
            self._errors.of_this_rank(error)
        else:
            self._errors.keep(error)

    def load_before(self, step: Step) -> None:
        """Loads the state before the step begins, so that this group participates in the step."""
        if not step.healing or self._recovery.joining or not self.arrived() or not self.load(step):
            return
        if step.plan is not None and not step.plan.in_background:
            step.joined()

    def end_serving(self, step: Step) -> None:
        """Waits until no peer reads this group's state any more. An error concerns the target only: this
        group's state is complete, and the decision on its step stands.
        """
        try:
            self._transport.disallow_checkpoint()
            self.busy = not self._transport.own  # upstream ends each step of a transport so
        except Exception as e:
            self._logger.exception(f"the groups that heal from this one do not have its state: {e}")
            # A transfer by the process group must not continue while the state changes.
            step.collectives.abort()

    def end_in_step(self, step: Step) -> None:
        """Does the same as :meth:`end_serving`, but during the step."""
        plan = step.plan
        if plan is not None and plan.serves:
            step.collectives.wait()
            self.arrived()  # a transport may only have queued the sends
            self.end_serving(step)
