"""The decisions of a heal piece by piece: a group trains along with weight 0 while its state arrives. Pure.

The state of a group is its parameters, each with its state in the optimizer; a *piece* is a range of elements of one.
A source gives a piece between two steps of its optimizer, marked with the step that follows: all gradients of earlier
steps are in it, whichever group that is up to date gives it (sources.py). The target is in the quorum, so it has every
averaged gradient. It applies the gradient of a step once it knows that the step was committed: from the assigned source
as soon as that has voted, or else from the next quorum, and until then it keeps the gradient. So its *current* pieces
are those of one step, as the sources have them in that step:

    step          7                    8                    8 again              9
    quorum says                        7 is committed       the first attempt failed
    vote          keep gradient 7      apply 7, keep 8      drop 8
    source says                                             8 is committed
                                                            apply 8

The source may fail after this report, and the others may not have committed the step: then the next quorum has
another step than the pieces, and all of them are asked for again.

A piece whose mark is the step of the pieces in place is put in place with them. Any other one came too late, and is
asked for again: in halves if it took longer than a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Optional

# Elements of a piece that is not cut further.
LEAST = 1 << 10
# How often a heal may start over because a gradient was missed, before the state is transferred as a whole.
MAX_RESTARTS = 3
# Seconds that may pass without a piece that came in time, or was compared.
MAX_IDLE_SEC = 60.0


class Piece(NamedTuple):
    """A range of the elements of a parameter, and of those of its optimizer state."""

    parameter: int
    begin: int
    end: int


class Kind(Enum):
    """What a source is asked for."""

    PIECE = "piece"
    DIGEST = "digest"
    REST = "rest"  # of the state: all that belongs to no parameter


class Ask(NamedTuple):
    """The next request to a source."""

    kind: Kind
    number: int = -1  # of the piece


class Fate(Enum):
    """What came of the step before, as a quorum shows."""

    NONE = "nothing is to be done"
    APPLY = "it was committed: its gradient is applied"
    AGAIN = "it failed, and is tried again: its gradient is dropped"
    MISSED = "a step was committed whose gradient is not here: all pieces are asked for again"


class _State(Enum):
    MISSING = "missing"
    CURRENT = "as the source had it"
    VERIFIED = "compared with the source's after a step"


@dataclass
class Advance:
    """What a target does before it votes, in this order.

    Attributes:
        before: numbers of arrivals that are put in place first.
        apply: whether the kept gradient is applied to all parameters of :attr:`parameters` then.
        parameters: that have pieces in place before the gradient is applied.
    """

    before: list[int] = field(default_factory=list)
    apply: bool = False
    parameters: set[int] = field(default_factory=set)


def cut(sizes: Sequence[int], most: int) -> list[Piece]:
    """The pieces of parameters with so many elements, of at most ``most`` elements each."""
    return [
        Piece(number, begin, min(size, begin + most))
        for number, size in enumerate(sizes)
        for begin in range(0, max(size, 1), most)
    ]


class Heal:
    """One heal, as its target sees it.

    Args:
        pieces: of the whole state.
        least: elements of a piece that is not cut further.

    Attributes:
        pieces: as given, and those that came of cutting them.
        step: that runs, by the latest quorum; None before the first.
        abandoned: why the state is transferred as a whole; None: it is not.
    """

    def __init__(self, pieces: Sequence[Piece], least: int = LEAST) -> None:
        self.pieces = list(pieces)
        self._least = least
        self._most = max((piece.end - piece.begin for piece in pieces), default=0)  # elements of the next one
        self.step: Optional[int] = None
        self.abandoned: Optional[str] = None
        self._quorum_id = -1
        self._in_place: Optional[int] = None  # the step that the pieces in place are of
        self._states = [_State.MISSING] * len(pieces)
        self._marks = [-1] * len(pieces)
        self._kept: Optional[tuple[int, int]] = None  # step and quorum of the gradient that is kept
        self._kept_of: set[int] = set()  # parameters
        self._ahead: Optional[tuple[int, int]] = None  # step and quorum of the gradient that a source let it apply
        self._late: list[int] = []  # pieces that came after the gradient of their step was applied, since the last step
        self._fate = Fate.NONE
        self._restarts = 0
        self._idle_since: Optional[float] = None
        self._moved = False  # a piece was put in place or compared since the last step
        self._together = True  # all ranks of the group have compared all of their pieces

    # Quorums

    def quorum(self, step: int, quorum_id: int, committed_quorum_id: int, together: bool = True) -> Fate:
        """A quorum in which this group is behind.

        Args:
            step: that runs.
            quorum_id: of the quorum.
            committed_quorum_id: in which the step before was committed.
            together: whether the other ranks of the group have compared all of their pieces: a rank that has, and they
                have not, trains along with them.
        """
        before, self.step, self._quorum_id, self._together = self.step, step, quorum_id, together
        kept = self._kept
        ahead, self._ahead = self._ahead, None
        if before is None:
            return Fate.NONE
        if ahead is not None and (step, committed_quorum_id) == (ahead[0] + 1, ahead[1]):
            return Fate.NONE
        if self._fate is Fate.APPLY:  # the last attempt ended without a vote
            fate = Fate.APPLY if step == before else Fate.MISSED
        elif kept is not None and kept[0] == step - 1 and kept[1] == committed_quorum_id:
            fate = Fate.APPLY
        elif step == before and ahead is None:
            fate = Fate.AGAIN if kept is not None else Fate.NONE
        else:
            fate = Fate.MISSED
        self._fate = fate
        if fate is not Fate.APPLY:
            self._kept = None
        if fate is Fate.MISSED:
            self.miss()
            self._fate = fate
        return fate

    def miss(self) -> None:
        """A gradient that was committed cannot be applied: all pieces are asked for again."""
        self._fate = Fate.NONE
        self._in_place = None
        had = any(state is not _State.MISSING for state in self._states)
        self._states = [_State.MISSING] * len(self.pieces)
        self._restarts += had
        if self._restarts > MAX_RESTARTS:
            self.abandon(f"a committed step was missed {self._restarts} times")

    def committed(self) -> set[int]:
        """The assigned source has committed the step whose gradient was kept last, and nothing was since: it is applied
        now.

        Returns:
            the parameters that it is applied to: those with pieces in place.
        """
        assert self._kept is not None and self._in_place == self.step == self._kept[0]
        self._ahead, self._kept = self._kept, None
        self._in_place = self._ahead[0] + 1
        return self._begun()

    def _begun(self) -> set[int]:
        """The parameters that have pieces in place."""
        return {piece.parameter for piece, state in zip(self.pieces, self._states) if state is not _State.MISSING}

    @property
    def applies(self) -> bool:
        """Whether :meth:`advance` applies the kept gradient."""
        return self._fate is Fate.APPLY

    # The end of a step

    def advance(self, arrivals: Sequence[tuple[int, int]], now: float) -> Advance:
        """The actions for the pieces that have arrived, before the vote. Once for each quorum; before :meth:`keep` also
        more often.

        Args:
            arrivals: number and mark of each piece that has arrived and is of an earlier step than that which runs.
            now: in seconds, of any clock.
        """
        assert self.step is not None
        self._in_place = self.step
        todo = Advance(apply=self._fate is Fate.APPLY)
        slow: list[int] = []
        for index, (number, mark) in enumerate(arrivals):
            if todo.apply and mark == self.step - 1 and self.pieces[number].parameter in self._kept_of:
                todo.before.append(index)
            else:
                if mark < self.step - 1:
                    slow.append(number)
                continue
            self._states[number] = _State.CURRENT
            self._marks[number] = mark
        self._shorten(slow)
        todo.parameters = self._begun()
        self._fate = Fate.NONE
        self._kept = None
        if todo.before or self._moved or self.waits or self._idle_since is None:
            self._idle_since = now
        if not self._moved and not todo.before:
            self._shorten(self._late)
        self._late = []
        self._moved = False
        if now - self._idle_since > MAX_IDLE_SEC:
            self.abandon(f"in {now - self._idle_since:.0f} s nothing of the state arrived in the step that it is of")
        return todo

    def _shorten(self, slow: Sequence[int]) -> None:
        """These pieces took longer than a step."""
        if slow:
            longest = max(self.pieces[number].end - self.pieces[number].begin for number in slow)
            self._most = min(self._most, max(self._least, longest // 2))

    def early(self, mark: int) -> bool:
        """Whether what is of this step is taken only after the next :meth:`advance`."""
        return self._in_place is None or mark > self._in_place

    def place(self, number: int, mark: int) -> bool:
        """Whether a piece that is not :meth:`early` is put in place now, between two calls of :meth:`advance`.

        It is if it is of the same step as the other pieces, and the gradient that is applied next is kept for it.
        """
        if mark != self._in_place:
            # What was asked for shortly before a gradient is applied comes after it, whatever its size.
            self._late.append(number)
            if self._in_place is None or mark < self._in_place - 1:
                self._shorten([number])
            return False
        if self._kept is not None and self.pieces[number].parameter not in self._kept_of:
            return False
        self._states[number] = _State.CURRENT
        self._marks[number] = mark
        self._moved = True
        return True

    def keep(self, asked: set[int]) -> set[int]:
        """All of this attempt's reductions have succeeded.

        Args:
            asked: numbers of pieces whose answers have not been passed to :meth:`advance`.

        Returns:
            the parameters whose gradients are kept: with pieces in place, on their way, or asked for next.
        """
        assert self.step is not None
        self._kept = self.step, self._quorum_id
        numbers = [number for number, state in enumerate(self._states) if state is not _State.MISSING]
        ask = self.next(asked)
        following = [ask.number] if ask is not None and ask.kind is Kind.PIECE else []
        self._kept_of = {self.pieces[number].parameter for number in (*numbers, *asked, *following)}
        return self._kept_of

    # Requests

    def next(self, asked: set[int]) -> Optional[Ask]:
        """What to ask for next; None: nothing before the next step.

        Args:
            asked: numbers of pieces whose answers have not been passed to :meth:`advance`, or compared.
        """
        for number, state in enumerate(self._states):
            if state is _State.MISSING and number not in asked:
                self._cut(number)
                return Ask(Kind.PIECE, number)
        for number, state in enumerate(self._states):
            if state is _State.CURRENT and number not in asked and self._marks[number] < self._newest:
                return Ask(Kind.DIGEST, number)
        return Ask(Kind.REST) if self.ends else None

    @property
    def _newest(self) -> int:
        """The step of the pieces in place, or that of the quorum: digests are made of it or of later ones."""
        return max(-1 if step is None else step for step in (self.step, self._in_place))

    def _cut(self, number: int) -> None:
        """Leaves so much of a missing piece as is asked for at once."""
        parameter, begin, end = self.pieces[number]
        middle = begin + max(self._most, 1)
        if middle < end:
            self.pieces[number] = Piece(parameter, begin, middle)
            self.pieces.append(Piece(parameter, middle, end))
            self._states.append(_State.MISSING)
            self._marks.append(-1)

    def comparable(self, number: int, mark: int) -> bool:
        """Whether this group has the piece as the source had it when it made a digest."""
        return self._states[number] is not _State.MISSING and self._marks[number] < mark == self._in_place

    def compared(self, number: int, equal: bool, from_assigned: bool = True) -> None:
        """A digest was compared with that of the assigned source.

        Args:
            number: of the piece.
            equal: whether it is the same.
            from_assigned: whether the piece came from the same source: else it is asked for again, there.
        """
        if equal:
            self._states[number] = _State.VERIFIED
            self._moved = True
        elif not from_assigned:
            self._states[number] = _State.MISSING
        else:
            piece = self.pieces[number]
            self.abandon(
                f"elements {piece.begin} to {piece.end} of parameter {piece.parameter}, or of its optimizer state, "
                f"differ from the source's in step {self._in_place}"
            )

    def abandon(self, reason: str) -> None:
        """The state is transferred as a whole; the first reason counts."""
        self.abandoned = self.abandoned or reason

    # How far it is

    @property
    def missing(self) -> int:
        """Pieces that are not in place."""
        return self._states.count(_State.MISSING)

    @property
    def unverified(self) -> int:
        """Pieces that were not compared."""
        return len(self.pieces) - self._states.count(_State.VERIFIED)

    @property
    def ends(self) -> bool:
        """Whether only the rest of the state is missing, in all ranks of the group."""
        return self.unverified == 0 and self._together

    @property
    def waits(self) -> bool:
        """Whether only other ranks of the group miss pieces."""
        return self.unverified == 0 and not self._together

    def done(self, rest_mark: Optional[int]) -> bool:
        """Whether this group has the state of the step that runs, after :meth:`advance`.

        Args:
            rest_mark: the mark of the rest of the state; None: it is not here.
        """
        return self.abandoned is None and self.ends and rest_mark is not None and rest_mark == self.step
