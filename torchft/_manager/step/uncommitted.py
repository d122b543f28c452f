"""When a rank says that the job computes, and commits nothing. Pure code: the time is an argument."""

from __future__ import annotations

from typing import Optional

STEPS = 20  # fewer are common: a group that starts, a failure of several groups, a loss scale that is found
EVERY_S = 60.0
NO_VOTE = (
    "the loop began the next step without should_commit (step of torchft.optim.OptimizerWrapper calls it)"
)


class Uncommitted:
    """The steps in a row that a rank has lost.

    A Manager without ``max_retries`` goes on for ever. So the user has to read it in the log.

    Attributes:
        steps: their number; a commit sets it to 0.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._since = 0.0
        self._said: Optional[float] = None

    def lost(self, why: str, now: float) -> Optional[str]:
        """A step was not committed.

        Args:
            why: the cause.
            now: in seconds, from any origin.

        Returns:
            What the rank says; None if the row is short, or if it was said less than a minute ago.
        """
        if self.steps == 0:
            self._since = now
        self.steps += 1
        if self.steps < STEPS or (self._said is not None and now - self._said < EVERY_S):
            return None
        self._said = now
        return (
            f"NOTHING IS COMMITTED: {self.steps} steps in a row were computed and lost, in "
            f"{now - self._since:.0f} s; the last one: {why}"
        )
