"""Decides the actions of a heal in pieces: the target trains along with weight 0 while its state arrives. Pure code.

The state of a group is its parameters, each with its optimizer state. A *piece* is a range of elements of one
parameter. A source reads a piece between two steps of its optimizer and marks it with the step that follows. The piece
contains the gradients of all earlier steps, so any up-to-date group can send it (sources.py).

The target is in the quorum, so it receives every averaged gradient. It applies the gradient of a step only when it
knows that the step was committed: from the assigned source as soon as the source has voted, or else from the next
quorum. Until then it keeps the gradient. So all *current* pieces belong to the same step, and equal those of the
sources in that step:

    step            7                  8                  8 again                   9
    quorum shows                       7 was committed    the first attempt failed
    before vote     keep gradient 7    apply 7, keep 8    drop 8, keep the new 8
    source reports                                        8 was committed
    target then                                           applies the new 8

The source may fail after this report, before the other groups have committed the step. If they do not commit it, the
step of the next quorum differs from that of the pieces, and all pieces are requested again.

A piece is put in place if its mark is the step of the pieces in place. A piece with a later mark waits for the next
:meth:`Heal.advance`. A piece that came too late is requested again, in halves if the request took longer than a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Optional

# Elements of the smallest pieces that result from cutting.
LEAST = 1 << 10
# How often a heal may start over because it missed a gradient. After that the state is transferred as a whole.
MAX_RESTARTS = 3
# The heal in pieces is abandoned after this many seconds in which no piece was put in place or compared.
MAX_IDLE_SEC = 60.0


class Piece(NamedTuple):
    """A range of elements of a parameter, with the same range of its optimizer state."""

    parameter: int
    begin: int
    end: int


class Kind(Enum):
    """The kind of data that a request asks for."""

    PIECE = "piece"
    DIGEST = "digest"
    REST = "rest"  # the part of the state that belongs to no parameter


class Ask(NamedTuple):
    """The next request to a source."""

    kind: Kind
    number: int = -1  # number of the piece; -1: the request is for no piece


class Fate(Enum):
    """The outcome of the previous step for this group, as a new quorum shows it."""

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
    """The actions of a target before it votes, in this order.

    Attributes:
        before: indices of the arrivals that are put in place first.
        apply: whether the kept gradient is then applied to all of :attr:`parameters`.
        parameters: the parameters with pieces in place, including those of :attr:`before`.
    """

    before: list[int] = field(default_factory=list)
    apply: bool = False
    parameters: set[int] = field(default_factory=set)


def cut(sizes: Sequence[int], most: int) -> list[Piece]:
    """Divides parameters of these sizes, in elements, into pieces of at most ``most`` elements."""
    return [
        Piece(number, begin, min(size, begin + most))
        for number, size in enumerate(sizes)
        for begin in range(0, max(size, 1), most)
    ]


class Heal:
    """One heal, as its target sees it.

    Args:
        pieces: the pieces of all parameters.
        least: elements of the smallest pieces that result from cutting.

    Attributes:
        pieces: the given pieces, and those that resulted from cutting them.
        step: the current step, by the latest quorum; None before the first quorum.
        abandoned: why the state is transferred as a whole; None while the heal continues in pieces.
    """

    def __init__(self, pieces: Sequence[Piece], least: int = LEAST) -> None:
        self.pieces = list(pieces)
        self._least = least
        # The most elements of the next requested piece.
        self._most = max((piece.end - piece.begin for piece in pieces), default=0)
        self.step: Optional[int] = None
        self.abandoned: Optional[str] = None
        self._quorum_id = -1
        self._in_place: Optional[int] = None  # the step of the pieces in place
        self._states = [_State.MISSING] * len(pieces)
        self._marks = [-1] * len(pieces)
        self._kept: Optional[tuple[int, int]] = None  # step and quorum of the kept gradient
        self._kept_of: set[int] = set()  # the parameters whose gradients are kept
        # Step and quorum of the gradient that was applied after the source's report, before a quorum confirmed it.
        self._ahead: Optional[tuple[int, int]] = None
        # Pieces that arrived in this step, after the gradient of the step that they are marked with was applied.
        self._late: list[int] = []
        self._fate = Fate.NONE
        self._restarts = 0
        self._idle_since: Optional[float] = None
        self._moved = False  # a piece was put in place or compared since the last step
        self._together = True  # all ranks of the group have compared all of their pieces

    # Quorums

    def quorum(self, step: int, quorum_id: int, committed_quorum_id: int, together: bool = True) -> Fate:
        """Takes over a quorum in which this group is behind.

        Args:
            step: the current step.
            quorum_id: the id of this quorum.
            committed_quorum_id: the id of the quorum in which the previous step was committed.
            together: whether all ranks of the group have compared all of their pieces. Until then a rank that has
                compared its own pieces trains along with the others.
        """
        before, self.step, self._quorum_id, self._together = self.step, step, quorum_id, together
        kept = self._kept
        ahead, self._ahead = self._ahead, None
        if before is None:
            return Fate.NONE
        if ahead is not None and (step, committed_quorum_id) == (ahead[0] + 1, ahead[1]):
            return Fate.NONE
        if self._fate is Fate.APPLY:  # not applied: the last attempt ended without a vote
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
        """Called when the gradient of a committed step cannot be applied: all pieces are requested again."""
        self._fate = Fate.NONE
        self._in_place = None
        had = any(state is not _State.MISSING for state in self._states)
        self._states = [_State.MISSING] * len(self.pieces)
        self._restarts += had
        if self._restarts > MAX_RESTARTS:
            self.abandon(f"a committed step was missed {self._restarts} times")

    def committed(self) -> set[int]:
        """Called when the assigned source has committed the current step, whose gradient is kept: it is applied now.

        Returns:
            the parameters that the gradient is applied to: those with pieces in place.
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
        """Returns the actions before the vote. Called at least once for each quorum; repeated calls must precede
        :meth:`keep`.

        Args:
            arrivals: number and mark of each arrived piece whose mark is earlier than the current step.
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
        """Halves the size of later requests, because these pieces arrived too late."""
        if slow:
            longest = max(self.pieces[number].end - self.pieces[number].begin for number in slow)
            self._most = min(self._most, max(self._least, longest // 2))

    def early(self, mark: int) -> bool:
        """Whether an answer with this mark has to wait for the next :meth:`advance`."""
        return self._in_place is None or mark > self._in_place

    def place(self, number: int, mark: int) -> bool:
        """Whether to put a piece that is not :meth:`early` in place now, between two calls of :meth:`advance`.

        The piece's mark must be the step of the pieces in place. If gradients are kept, that of the piece's parameter
        must be among them: otherwise the piece would lack it once the kept gradients are applied.
        """
        if mark != self._in_place:
            # A piece of any size arrives one step late if it was requested shortly before a gradient was applied. So a
            # smaller size is chosen here only for a piece that is more than one step late.
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
        """Keeps the gradient of this attempt, all of whose reductions have succeeded.

        Args:
            asked: numbers of pieces that are requested, or have arrived and are not processed yet.

        Returns:
            the parameters whose gradients are kept: those with pieces that are in place, in ``asked``, or requested
            next.
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
        """The next request; None if there is none before the next step.

        Args:
            asked: numbers of pieces with a request in progress, or with an answer that is not processed yet.
        """
        for number in self._all(_State.MISSING):
            if number not in asked:
                self._cut(number)
                return Ask(Kind.PIECE, number)
        newest = self._newest
        for number in self._all(_State.CURRENT):
            if number not in asked and self._marks[number] < newest:
                return Ask(Kind.DIGEST, number)
        return Ask(Kind.REST) if self.ends else None

    def _all(self, state: _State) -> Iterator[int]:
        """The numbers of the pieces in a state. Called for each request, so it must be fast for many pieces."""
        number = -1
        with suppress(ValueError):  # there is no further one
            while True:
                number = self._states.index(state, number + 1)
                yield number

    @property
    def _newest(self) -> int:
        """The later of the steps of the pieces in place and of the quorum. New digests are of it or a later step."""
        return max(-1 if step is None else step for step in (self.step, self._in_place))

    def _cut(self, number: int) -> None:
        """Shortens a missing piece to the size of one request; the remainder becomes another missing piece."""
        parameter, begin, end = self.pieces[number]
        middle = begin + max(self._most, 1)
        if middle < end:
            self.pieces[number] = Piece(parameter, begin, middle)
            self.pieces.append(Piece(parameter, middle, end))
            self._states.append(_State.MISSING)
            self._marks.append(-1)

    def comparable(self, number: int, mark: int) -> bool:
        """Whether a digest with this mark can be compared: it must be of the step of the pieces in place.

        The piece itself must have an earlier mark, so that the comparison covers at least one applied gradient.
        """
        return self._states[number] is not _State.MISSING and self._marks[number] < mark == self._in_place

    def compared(self, number: int, equal: bool, from_assigned: bool = True) -> None:
        """Called when the digest of a piece was compared with that of the assigned source.

        Args:
            number: number of the piece.
            equal: whether the digests are equal.
            from_assigned: whether the piece came from the assigned source. If not, a piece that differs is requested
                again; if so, the heal in pieces is abandoned.
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
        """Ends the heal in pieces: the state is transferred as a whole. Only the first reason is recorded."""
        self.abandoned = self.abandoned or reason

    # Progress

    @property
    def missing(self) -> int:
        """Number of pieces that are not in place."""
        return self._states.count(_State.MISSING)

    @property
    def unverified(self) -> int:
        """Number of pieces whose digest was not compared, or that are not in place."""
        return len(self.pieces) - self._states.count(_State.VERIFIED)

    @property
    def ends(self) -> bool:
        """Whether all ranks of the group lack only the rest of the state."""
        return self.unverified == 0 and self._together

    @property
    def waits(self) -> bool:
        """Whether this rank has compared all of its pieces, and waits for other ranks of the group."""
        return self.unverified == 0 and not self._together

    def done(self, rest_mark: Optional[int]) -> bool:
        """Whether this rank has the complete state of the current step, after :meth:`advance`.

        Args:
            rest_mark: the mark of the rest of the state; None if it has not arrived.
        """
        return self.abandoned is None and self.ends and rest_mark is not None and rest_mark == self.step
