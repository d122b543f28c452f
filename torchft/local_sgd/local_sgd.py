"""LocalSGD: every group trains on its own, and the parameters are averaged at regular intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn, optim

from torchft._manager.checks.layout import describe
from torchft._manager.step.work import managed
from torchft.checkpointing.codec.layout import local_part
from torchft.local_sgd.inner_steps import InnerSteps, whole
from torchft.local_sgd.parameters import all_finite, extract_local_tensor, synchronized

if TYPE_CHECKING:
    from torchft.manager import Manager


class LocalSGD(InnerSteps):
    """Averages the parameters over the groups after every ``sync_every`` steps of the optimizer.

    The algorithm is that of S. Stich, "Local SGD Converges Fast and Communicates Little", 2018
    (arXiv:1805.09767). A synchronization is a step of the Manager. One that fails leaves each group with its
    own parameters, and the next averages those.

    While a synchronization runs, the averages need memory for one copy of the parameters on their device:
    until the vote, a group may have to continue with its own.

        with LocalSGD(manager, model, optimizer, sync_every=100):
            for batch in data:
                optimizer.zero_grad()
                loss(model(batch)).backward()
                optimizer.step()

    Args:
        manager: the Manager of this rank; its state functions carry model and optimizer.
        model: all of its floating point parameters are averaged; buffers are not.
        optimizer: its steps are counted.
        sync_every: steps between two synchronizations, at least 1.

    Raises:
        ValueError: an argument has a wrong type, ``sync_every`` is below 1, or the model has no parameters.
    """

    def __init__(
        self, manager: Manager, model: nn.Module, optimizer: optim.Optimizer, sync_every: int
    ) -> None:
        sync_every = whole("sync_every", sync_every)
        if sync_every < 1:
            raise ValueError(f"sync_every={sync_every}: allowed are 1 and more")
        super().__init__(manager, optimizer, "optimizer")
        self._sync_every = sync_every
        self._local_step = 0
        self._parameters = synchronized(model, "model")
        manager.register_layout("model", [f"{name} {describe(p)}" for name, p in self._parameters.items()])

    keeps_own_weights = True

    def synchronize(self) -> None:
        self.sync()

    def _after_step(self) -> None:
        self._local_step += 1
        if self._local_step >= self._sync_every:
            self.sync()

    def sync(self) -> None:
        """Averages the parameters now.

        Raises:
            RuntimeError, TimeoutError: raised by :meth:`Manager.start_quorum` or
                :meth:`Manager.should_commit`.
        """
        self._manager.start_quorum()
        averages = [extract_local_tensor(p) for p in self._parameters.values()]
        for work in [
            managed(self._manager, self._manager.allreduce(average), average) for average in averages
        ]:
            work.wait()
        # All groups reach this point together, so they start the next synchronization in the same step. The
        # result of the vote does not matter here.
        self._local_step = 0
        if not self._manager.should_commit():
            return
        if not all_finite(averages):
            self._count_nonfinite("the averaged parameters hold NaN or Inf")
        with torch.no_grad():
            for parameter, average in zip(self._parameters.values(), averages):
                local_part(parameter).copy_(average)
