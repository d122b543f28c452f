"""What torchft's own wrappers (optimizers, DDP, LocalSGD, loaders) call beyond the public methods."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from torchft._extras import Extras
from torchft._manager.stepping import not_begun

if TYPE_CHECKING:
    from torchft._manager.checks.layout import Layout
    from torchft._manager.checks.loader import Data, LocalSteps
    from torchft._manager.checks.replicas import RegisteredState
    from torchft._manager.connection import Connection
    from torchft._manager.edge import Peers
    from torchft._manager.observe.log import _ManagerLogger
    from torchft._manager.rank import RankState
    from torchft._manager.step.errors import Errors
    from torchft._manager.step.replayer import Replayer
    from torchft._manager.step.sharing import SharedStep


@dataclass(eq=False)
class OwnExtras(Extras):
    """Implements :class:`Extras` by passing each call on to the part of the Manager that does it."""

    _rank_state: RankState
    _peers: Peers
    _connection: Connection
    _logger: _ManagerLogger
    _errors: Errors
    _data: Data
    _replayer: Replayer
    _replicated: RegisteredState
    _layout: Layout
    _begin: Callable[[torch.optim.Optimizer], None]
    _end: Callable[[torch.optim.Optimizer], bool]

    def __post_init__(self) -> None:
        self._gradient_checks: list[Callable[[], None]] = []

    def refuse_replay(self, reason: str) -> None:
        self._errors.refuse_replay(reason)

    def register_gradients(self, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._replayer.register_gradients(gradients)

    def computes(self) -> None:
        self._rank_state.computed = True

    def reduces_gradients(self) -> Callable[[], bool]:
        step = self._errors.step
        if not step.undecided:
            raise RuntimeError(not_begun("backward"))
        return partial(_awaits_commit, weakref.ref(self._errors), step.sharing)

    def register_check(self, check: Callable[[], None]) -> None:
        self._gradient_checks.append(check)

    def check_gradients(self) -> None:
        """Calls the functions of :meth:`register_check`."""
        for check in self._gradient_checks:
            check()

    def register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._replicated.add_optimizer(optimizer)
        self._layout.add_optimizer(optimizer)

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._begin(optimizer)

    def end(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._end(optimizer)

    def register_parameters(self, named: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._replicated.add_parameters(named)
        self._layout.add_parameters(named())

    def check_sparse(self, names: list[str]) -> None:
        self._peers.check_sparse(names)

    @property
    def adds_gradients(self) -> bool:
        return self._data.adds_gradients

    def steps_by_itself(self, local_steps: LocalSteps) -> None:
        self._data.attach_local_steps(local_steps)

    def inner_step_ended(self) -> None:
        self._data.inner_step_ended()

    @property
    def has_peers(self) -> bool:
        return self._rank_state.quorum_id != -1 and not self._connection.apart

    def share_buffer(self, buffer: torch.Tensor) -> None:
        self._peers.share_buffer(buffer)

    def counted(self, name: str, number: int = 1) -> None:
        self._logger.counted(name, number)


def _awaits_commit(errors: weakref.ref[Errors], sharing: SharedStep) -> bool:
    """Whether the Manager's step is the one of this object, which all attempts at it share, and is not
    committed. Models keep this, and must not keep the Manager.
    """
    known = errors()
    return known is not None and known.step.sharing is sharing and not known.step.committed
