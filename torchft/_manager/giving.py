"""The source of a heal in pieces: sends its state to groups that train along meanwhile. See heal_along.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchft._manager.along import Kind
from torchft._manager.tracked import Parameters, Unfit
from torchft.checkpointing._encoding import Encoded, storage_bytes
from torchft.checkpointing._places import local_part
from torchft.checkpointing.transport import Unsendable

if TYPE_CHECKING:
    from torch.optim import Optimizer

# The most bytes of the state that belong to no parameter: they are sent in one answer.
_REST = 64 << 20

ReadState = Callable[[], dict[str, Any]]


class Giver:
    """The state that a source sends in one step, in pieces or as a whole."""

    def __init__(self, optimizers: Sequence[Optimizer], read: ReadState, whole: Callable[[], None]) -> None:
        self._parameters = Parameters(optimizers)
        self._read = read
        self._whole = whole

    def whole(self) -> None:
        """Offers the state as a whole. Called like :meth:`give`, or on the training thread when a step begins."""
        with self._parameters.beside.running():
            self._whole()

    def give(self, kind: str, argument: str) -> tuple[Any, list[torch.Tensor]]:
        """Called on threads of the HTTP server, one at a time, until the training thread changes the weights."""
        try:
            with self._parameters.beside.running():
                return self._give(kind, argument)
        except (Unfit, Unsendable) as e:
            raise ValueError(str(e)) from e

    def _give(self, kind: str, argument: str) -> tuple[Any, list[torch.Tensor]]:
        if kind == Kind.REST.value:
            return self._rest()
        number, begin, end = (int(part) for part in argument.split("-"))
        parameters = self._parameters.all
        # The sizes of all would take longer than the copy of a small piece. Training waits for both to end.
        if not (0 <= number < len(parameters) and 0 <= begin <= end <= local_part(parameters[number]).numel()):
            raise ValueError(f"there are no elements {begin} to {end} of parameter {number}")
        if kind == Kind.PIECE.value:
            return self._parameters.read(number, begin, end)
        if kind == Kind.DIGEST.value:
            return self._parameters.digest(number, begin, end), []
        raise ValueError(f"unknown kind {kind!r}")

    def _rest(self) -> tuple[Any, list[torch.Tensor]]:
        encoded = Encoded(self._read())
        tracked = self._parameters.storages()
        regions: list[Any] = []
        others: list[torch.UntypedStorage] = []
        for storage in encoded.storages:
            known = tracked.get(storage.data_ptr())
            if known is not None:
                regions.append(list(known))
                continue
            if storage.device.type != "cpu" and storage.device != self._parameters.device:
                raise Unfit(
                    f"a tensor of the state is on {storage.device}, and the parameters on {self._parameters.device}"
                )
            regions.append(storage.nbytes() if storage.device.type == "cpu" else {"on device": storage.nbytes()})
            if storage.nbytes():
                others.append(storage)
        size = sum(storage.nbytes() for storage in others)
        if size > _REST:
            raise Unfit(f"{size} bytes of the state belong to no parameter of an OptimizerWrapper, more than {_REST}")
        memory = [storage_bytes(storage).to("cpu", copy=True) for storage in others]
        return {"structure": json.loads(encoded.structure), "regions": regions}, memory


def head(optimizers: Sequence[Optimizer]) -> Any:
    """Returns what a target needs for each step: the layout of the parameters, which must equal its own, and the
    hyperparameters; or the reason why this group cannot send its state in pieces.
    """
    parameters = Parameters(optimizers)
    try:
        parameters.check()
        return {"layout": parameters.layout(), "hyperparameters": parameters.hyperparameters()}
    except Unfit as e:
        return {"unfit": str(e)}
