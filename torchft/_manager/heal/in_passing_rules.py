"""Decides the actions of a heal in passing: the target trains along with weight 0 while its state arrives.
Pure code.

The state of a group is its parameters, each with its optimizer state. Their elements are numbered through,
and arrive in this order. In each step the target asks the assigned source for the next *part*, as that has it
in this step:

    0                          here                     total
    |   as the source has it   |   missing                |

Once all is here, and a gradient was applied to it, the target compares it with digests of the source, part by
part. A rank that waits for other ranks of its group compares again meanwhile.

The target is in the quorum, so it receives every averaged gradient. Before it votes it asks the source
whether that has committed the step. If so, it applies the gradient to what is here, which then is of the next
step. A part that arrives after the target has voted is of a past step: it is asked for again, in smaller
parts.

The next quorum must confirm that: its step is the next one, and was committed in the quorum of the gradient.
Otherwise what is here is of no step, and the heal starts over. This happens if the source does not answer, or
fails between its answer and the commits of the other groups:

    step            7            8            8 again      9
    source reports  committed    not          committed
    target then     applies 7    drops 8      applies 8
    quorum shows                 7 is right   8 failed     8 is right

Once everything is compared, the heal ends at once: within one step the target fetches the rest of the state.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

# Elements of a part: the first, the fewest and the most. With Adam and float32, an element has 12 bytes.
FIRST, LEAST, MOST = 1 << 17, 1 << 10, 1 << 20
# So many times as many elements are compared by a request: a digest takes less time than a transfer.
COMPARED = 2
# Parts grow while their requests take less than this share of a step.
GROW_BELOW = 0.125
# The most seconds that a vote waits for the answer in progress: for one, and after many late ones in a row.
PATIENCE, LONGEST = 0.01, 2.0
# How often a heal may start over because it missed a gradient. After that the state is transferred at once.
MAX_RESTARTS = 3
# The heal in passing is abandoned after this many seconds in which nothing has arrived or was compared.
MAX_IDLE_SEC = 60.0


class Ask(NamedTuple):
    """A request to the source: the elements to send, and those to send a digest of. Both may be empty."""

    begin: int
    end: int
    same_from: int
    same_to: int

    @property
    def empty(self) -> bool:
        return self.begin == self.end and self.same_from == self.same_to

    @property
    def key(self) -> str:
        return f"part.{self.begin}.{self.end}.{self.same_from}.{self.same_to}"

    @classmethod
    def parse(cls, key: str) -> Ask:
        """Raises ValueError unless the key is that of a request."""
        kind, *numbers = key.split(".")
        if kind != "part" or len(numbers) != 4 or not all(one.isascii() and one.isdigit() for one in numbers):
            raise ValueError(f"{key[:200]!r} is no part of a state")
        return cls(*map(int, numbers))


class Heal:
    """One heal, as its target sees it.

    Args:
        total: number of elements of all parameters.

    Attributes:
        here: number of elements that are here.
        same: number of elements that were compared, after at least one gradient was applied to all.
        step: the current step, by the latest quorum; None before the first quorum.
        abandoned: why the state is transferred at once; None while the heal continues in passing.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.here = self.same = 0
        self.step: Optional[int] = None
        self.abandoned: Optional[str] = None
        self._comparable = False  # whether all is here, and a gradient was applied since
        self._again = 0  # elements that were compared again, by a rank that waits
        self._amount = FIRST
        self._late = 0  # answers in a row that were late
        self._quorum_id = -1
        # Step and quorum of the gradient that was applied; a quorum has yet to confirm that it was committed.
        self._applied: Optional[tuple[int, int]] = None
        self._restarts = 0
        self._idle_since: Optional[float] = None
        self._moved = False  # something has arrived, or was compared, since the last quorum
        self._together = True  # all ranks of the group have compared everything

    def quorum(
        self, step: int, quorum_id: int, committed_quorum_id: int, now: float, together: bool = True
    ) -> bool:
        """Takes over a quorum in which this group is behind.

        Args:
            committed_quorum_id: the id of the quorum in which the previous step was committed.
            now: in seconds, of any monotonic clock.
            together: whether all ranks of the group have compared everything. Until then a rank that has
                trains along with the others.

        Returns:
            False if what was here is not of the current step: the heal starts over.
        """
        before, self.step, self._quorum_id, self._together = self.step, step, quorum_id, together
        applied, self._applied = self._applied, None
        if self._moved or self.waits or self._idle_since is None:
            self._idle_since, self._moved = now, False
        elif now - self._idle_since > MAX_IDLE_SEC:
            self.abandon(f"in {now - self._idle_since:.0f} s nothing of the state has arrived in its step")
        if applied == (step - 1, committed_quorum_id):
            self._comparable = self.here == self.total
        elif before is not None and (step != before or applied is not None):
            return self._start_over()
        return True

    def _start_over(self) -> bool:
        lost = self.here > 0
        self._restarts += lost
        self.here = self.same = self._again = 0
        self._comparable = False
        if self._restarts > MAX_RESTARTS:
            self.abandon(f"a committed step was missed {self._restarts} times")
        return not lost

    def applied(self) -> None:
        """The gradient of the current step, which the source has committed, is applied to what is here."""
        assert self.step is not None
        self._applied = self.step, self._quorum_id

    # Requests

    def next(self) -> Ask:
        """The next request."""
        if not self._comparable:
            return Ask(self.here, min(self.total, self.here + self._amount), 0, 0)
        same = self._again if self.complete else self.same
        return Ask(self.total, self.total, same, min(self.total, same + COMPARED * self._amount))

    def arrived(self, ask: Ask, share: float) -> None:
        """The answer to a request is here, in its step. `share`: its duration as a part of that of a step."""
        self._moved, self._late, self.here = True, 0, ask.end
        if share < GROW_BELOW:
            self._amount = min(MOST, 2 * self._amount)

    def late(self) -> None:
        """An answer is not here at the end of its step."""
        self._amount, self._late = max(LEAST, self._amount // 2), self._late + 1

    @property
    def patience(self) -> float:
        """The seconds that a vote waits for the answer in progress. They double while answers are late: else
        a group whose steps are shorter than a request would receive nothing.
        """
        return min(LONGEST, PATIENCE * 2 ** min(self._late, 10))

    def compared(self, ask: Ask, equal: bool) -> None:
        """The digest that came with an answer was compared."""
        self._late = 0
        if equal and self.complete:
            self._again = ask.same_to % self.total
        elif equal:
            self._moved, self.same = True, ask.same_to
        else:
            self.abandon(
                f"the weights or the optimizer state differ from the source's in step {self.step}, in the "
                f"elements {ask.same_from} to {ask.same_to} of all parameters"
            )

    def abandon(self, reason: str) -> None:
        """Ends the heal in passing: the state is transferred at once. Only the first reason is recorded."""
        self.abandoned = self.abandoned or reason

    @property
    def complete(self) -> bool:
        """Whether this rank has compared everything."""
        return self.same == self.total

    @property
    def ends(self) -> bool:
        """Whether all ranks of the group lack only the rest of the state."""
        return self.complete and self._together

    @property
    def waits(self) -> bool:
        """Whether this rank has compared everything, and waits for other ranks of the group."""
        return self.complete and not self._together
