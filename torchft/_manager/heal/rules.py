"""Decides the actions of a heal in passing: the target trains along with weight 0 while its state arrives.
Pure code.

The state of a group is its parameters, each with its optimizer state. Their elements are numbered through,
and arrive in this order. In each step the target asks the assigned source for the next *part*, as that has it
in this step:

    0                          here                     total
    |   as the source has it   |   missing                |

Once all is here, and a gradient was applied to it, the target compares it with digests of the source, part by
part. A rank that waits for other ranks of its group compares again meanwhile.

The target is in the quorum, so it receives every averaged gradient. It applies the gradient of a step only
when it knows that the step was committed: from the source as soon as that has voted, or else from the next
quorum. Until then it keeps the gradient. So what is here always belongs to the current step, and equals the
sources' in that step:

    step            7                  8                  8 again                   9
    quorum shows                       7 was committed    the first attempt failed
    then                               applies 7
    before vote     keep gradient 7    keep 8             drop 8, keep the new 8
    source reports                                        8 was committed
    target then                                           applies the new 8

The source may fail after this report, before the other groups have committed the step. If they do not commit
it, the step of the next quorum differs from that of what is here, and the heal starts over. A part that
arrives after the target has voted is of a past step: it is asked for again, in smaller parts.

Once everything is compared, the heal ends at once: within one step the target fetches the rest of the state.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Optional

# Elements of a part: the first, the fewest and the most. With Adam and float32, an element has 12 bytes.
FIRST, LEAST, MOST = 1 << 17, 1 << 10, 1 << 20
# So many times as many elements are compared by a request: a digest takes less time than a transfer.
COMPARED = 2
# Parts grow while their requests take less than this share of a step.
GROW_BELOW = 0.125
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


NOTHING = Ask(0, 0, 0, 0)


class Outcome(Enum):
    """The outcome of the previous step for this group, as a new quorum shows it."""

    NONE = "nothing is to be done"
    APPLY = "it was committed: its gradient is applied"
    MISSED = "a step was committed whose gradient is not here: the heal starts over"


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
        self._quorum_id = -1
        # Step and quorum of the gradient that is kept, or was applied before a quorum has confirmed its step.
        self._kept: Optional[tuple[int, int]] = None
        self._ahead = False  # whether it was applied
        self._restarts = 0
        self._idle_since: Optional[float] = None
        self._moved = False  # something has arrived, or was compared, since the last quorum
        self._together = True  # all ranks of the group have compared everything

    def quorum(
        self, step: int, quorum_id: int, committed_quorum_id: int, now: float, together: bool = True
    ) -> Outcome:
        """Takes over a quorum in which this group is behind.

        Args:
            step: the current step.
            quorum_id: the id of this quorum.
            committed_quorum_id: the id of the quorum in which the previous step was committed.
            now: in seconds, of any monotonic clock.
            together: whether all ranks of the group have compared everything. Until then a rank that has
                trains along with the others.

        Returns:
            The outcome of the previous step. With APPLY the caller applies the kept gradient, or calls
            :meth:`miss`.
        """
        before, self.step, self._quorum_id, self._together = self.step, step, quorum_id, together
        kept, ahead, self._kept, self._ahead = self._kept, self._ahead, None, False
        if self._moved or self.waits or self._idle_since is None:
            self._idle_since, self._moved = now, False
        elif now - self._idle_since > MAX_IDLE_SEC:
            self.abandon(f"in {now - self._idle_since:.0f} s nothing of the state has arrived in its step")
        if kept == (step - 1, committed_quorum_id):
            self._comparable = self.here == self.total
            return Outcome.NONE if ahead else Outcome.APPLY
        if before is None or (step == before and not ahead):
            return Outcome.NONE
        self.miss()
        return Outcome.MISSED

    def miss(self) -> None:
        """The gradient of a committed step cannot be applied: the heal starts over."""
        self._restarts += self.here > 0
        self.here = self.same = self._again = 0
        self._comparable = False
        self._kept = None
        if self._restarts > MAX_RESTARTS:
            self.abandon(f"a committed step was missed {self._restarts} times")

    def keep(self) -> None:
        """The gradient of this attempt is kept: all of its reductions have succeeded."""
        assert self.step is not None
        self._kept = self.step, self._quorum_id

    def committed(self) -> None:
        """The source has committed the current step, whose gradient is kept: it is applied now."""
        assert self._kept is not None and self._kept[0] == self.step
        self._ahead = True

    # Requests

    def next(self) -> Ask:
        """The next request."""
        if not self._comparable:
            return Ask(self.here, min(self.total, self.here + self._amount), 0, 0)
        same = self._again if self.complete else self.same
        return Ask(self.total, self.total, same, min(self.total, same + COMPARED * self._amount))

    def arrived(self, ask: Ask, share: float) -> None:
        """The answer to a request is here, in its step.

        Args:
            ask: the request.
            share: the duration of the request as a part of that of a step.
        """
        self._moved, self.here = True, ask.end
        if share < GROW_BELOW:
            self._amount = min(MOST, 2 * self._amount)

    def late(self) -> None:
        """An answer is not here at the end of its step."""
        self._amount = max(LEAST, self._amount // 2)

    def compared(self, ask: Ask, equal: bool) -> None:
        """The digest that came with an answer was compared."""
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
