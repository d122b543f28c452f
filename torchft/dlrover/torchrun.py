"""The module that torchrun loads for ``--rdzv-backend torchft``, by the entry point ``torchrun.handlers``.

torchrun loads this module for every backend, with ``torch.distributed.elastic.rendezvous``. So it imports
nothing until a handler is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    from torchft.dlrover.rendezvous import LighthouseRendezvousHandler

    return LighthouseRendezvousHandler.from_parameters(parameters)


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    return create_handler
