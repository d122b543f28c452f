"""The source of a heal in passing: gives parts of its state to groups that train along (in_passing.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch

from torchft._manager.heal.rules import COMPARED, MOST, Ask
from torchft._manager.heal.tracked import Parameters, Unsupported
from torchft.checkpointing.codec.layout import local_part
from torchft.checkpointing.codec.requests import StatePart

if TYPE_CHECKING:
    from torch.optim import Optimizer


class PartServer:
    """The parameters of a source. `optimizers`: their parameters, with optimizer state, are given in parts.
    More may be added to this sequence.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._known: Optional[tuple[Parameters, str]] = None  # with their layout

    def parameters(self) -> tuple[Parameters, str]:
        """The parameters and their layout, which must equal the target's. Called on the training thread.
        Unsupported: they cannot be healed in passing.
        """
        try:
            if self._known is not None and self._known[0].given == list(self._optimizers):
                self._known[0].check_groups()
                return self._known
        except Unsupported:
            pass  # a parameter group was added
        parameters = Parameters(self._optimizers)
        parameters.check()
        self._known = parameters, parameters.layout()
        return self._known

    def addresses(self) -> set[int]:
        """The addresses of the parameters and their optimizer state, which change only when a step ends."""
        found: set[int] = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    values = parameter, *optimizer.state.get(parameter, {}).values()
                    tensors = [local_part(value) for value in values if isinstance(value, torch.Tensor)]
                    found.update(one.data_ptr() for one in tensors if one.layout == torch.strided)
        return found

    def names(self) -> dict[int, tuple[int, str]]:
        """The names of the storages of the parameters and their optimizer state, by address."""
        try:
            return self.parameters()[0].storages()
        except Unsupported:
            return {}


class StepParts:
    """The state of one step, in parts; see :class:`torchft.checkpointing.source.publisher.Parts`.

    Args:
        parameters: the parameters.
        layout: their layout.
        whole: offers the state as a whole.
    """

    def __init__(self, parameters: Parameters, layout: str, whole: Callable[[], None]) -> None:
        self._parameters = parameters
        self._layout = layout
        self._whole = whole
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
                value: dict[str, Any] = {
                    "layout": self._layout,
                    "hyperparameters": parameters.hyperparameters(),
                    "states": states,
                    "digest": parameters.digest(ask.same_from, ask.same_to),
                }
        except Unsupported as e:
            raise ValueError(str(e)) from e
        return StatePart(value, memory)
