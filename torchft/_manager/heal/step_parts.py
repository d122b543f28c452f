"""The source of a heal in passing: gives parts of its state to groups that train along (in_passing.py)."""

from __future__ import annotations

from collections.abc import Callable

from torchft._manager.heal.in_passing_rules import COMPARED, MOST, Ask
from torchft._manager.heal.tracked import Parameters, Unsupported
from torchft.checkpointing.codec.requests import StatePart


class StepParts:
    """The state of one step, in parts; see :class:`torchft.checkpointing.source.publisher.Parts`.

    Args:
        parameters: the parameters. Their layout must equal the target's.
        whole: offers the state as a whole.
    """

    def __init__(self, parameters: Parameters, whole: Callable[[], None]) -> None:
        self._parameters = parameters
        self._whole = whole
        self._layout = parameters.layout  # on the training thread
        parameters.side_stream.mark()

    def whole(self) -> None:
        with self._parameters.side_stream.running():
            self._whole()

    def part(self, key: str) -> StatePart:
        ask, parameters = Ask.parse(key), self._parameters
        for begin, end in ((ask.begin, ask.end), (ask.same_from, ask.same_to)):
            if not (0 <= begin <= end <= parameters.total and end - begin <= COMPARED * MOST):
                raise ValueError(f"there is no part of the elements {begin} to {end}")
        try:
            with parameters.side_stream.running():
                states, memory = parameters.read(ask.begin, ask.end)
                digest = parameters.digest(ask.same_from, ask.same_to)
        except Unsupported as e:
            raise ValueError(str(e)) from e
        return StatePart({"layout": self._layout, "states": states, "digest": digest}, memory)
