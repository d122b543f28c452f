"""The transfers of state in a step: they begin once a quorum is known, and end before the weights change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Optional

from torchft._manager.joining import StillHealing

if TYPE_CHECKING:
    from torchft._manager.background import Background
    from torchft._manager.edge import Transport
    from torchft._manager.errors import Errors
    from torchft._manager.log import _ManagerLogger
    from torchft._manager.plan import Plan
    from torchft._manager.recovery import Recovery
    from torchft._manager.state import Place, Position
    from torchft._manager.step import Step


class Transfers:
    """Serves this group's state and takes over a peer's; what fails costs the step.

    Args:
        recovery: sends, fetches and loads.
        transport: by which.
        background: the stream on a device on which that runs.
        place: where the rank is; how long a device may take.
        errors: take what goes wrong.
        logger: of the Manager.
    """

    def __init__(
        self,
        recovery: Recovery,
        transport: Transport,
        background: Background,
        place: Place,
        *,
        errors: Errors,
        logger: _ManagerLogger,
    ) -> None:
        self._recovery = recovery
        self._transport = transport
        self._background = background
        self._place = place
        self._errors = errors
        self._logger = logger

    def run(self, plan: Plan, state: Callable[[], dict[str, Any]]) -> Optional[Position]:
        """Serves this group's state, or fetches a peer's. A failure costs this group the step, and nobody else.

        Args:
            plan: of this rank.
            state: reads the state.

        Returns:
            Which state was fetched; None: none.
        """
        if not (plan.recover_dst or plan.help_dst or plan.heal):
            return None
        with self._background.running():
            try:
                self._recovery.serve(plan, state)
                if plan.heal and not self._recovery.join(plan):
                    return self._recovery.fetch(plan)
            except Exception as e:
                self._logger.exception(f"healing failed: {e}")
                self._errors.keep(e)  # the peers still count on this group in their collectives
        return None

    def arrived(self) -> bool:
        """Waits until the device has sent what this group serves, and has what it fetched. False: not in time."""
        try:
            self._background.join(self._place.timeout, self._recovery.pending)
        except Exception as e:
            self._errors.of_collective(e)  # its abort ends them
            return False
        return True

    def advance(self, step: Step) -> Optional[Position]:
        """Puts in place what has come of a state that arrives in pieces, before the vote.

        Returns:
            Which state is there to load now; None: none. The step of a group whose state is not all here is lost.
        """
        if not self._recovery.joining:
            return None
        assert step.plan is not None
        position = self._recovery.advance(step.plan, step.error is None and step.collectives.usable)
        if position is None:
            step.failed(StillHealing(self._recovery.how_far()))
        return position

    def load(self, step: Step) -> bool:
        """Loads what a heal fetched, if there is something. False: nothing, or the user's function failed."""
        try:
            loaded = self._recovery.load()
            if loaded:
                step.loaded()
            return loaded
        except Exception as e:
            self._errors.keep(e)
            return False

    def load_before(self, step: Step) -> None:
        """Loads it before the step begins, so that this group takes part."""
        if not step.healing or not self.arrived() or not self.load(step):
            return
        if step.plan is not None and not step.plan.in_background:
            step.joined()

    def end_serving(self, step: Step) -> None:
        """Returns when nobody reads this group's state any more. A failure is the target's: this group has its state,
        and the decision on its step stands.
        """
        try:
            self._transport.disallow_checkpoint()
        except Exception as e:
            self._logger.exception(f"the groups that heal from this one do not have its state: {e}")
            step.collectives.abort()  # a transfer by the process group must not end with a state that has changed

    def end_in_step(self, step: Step) -> None:
        """As :meth:`end_serving`, while the step goes on."""
        plan = step.plan
        if plan is not None and (plan.recover_dst or plan.help_dst):
            step.collectives.wait()
            self.arrived()  # a transport of a process group has only queued them
            self.end_serving(step)
