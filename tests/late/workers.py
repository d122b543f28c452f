"""Isolated groups whose worker's device is slow or hangs, or whose worker wrongly does not wait."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup, Store

from tests.late import isolated
from tests.late.one_rank import OneRank
from torchft.process_group.isolated.sharing import Notify, Sharing


class ProcessGroupBabySlow(isolated.ProcessGroupBabyLate):
    delays_us: ClassVar[tuple[int, int]] = (10_000, 20_000)


class ProcessGroupBabyHanging(isolated.ProcessGroupBabyLate):
    delays_us: ClassVar[tuple[int, int]] = (30_000_000, 30_000_000)


class ProcessGroupBabyFailing(isolated.ProcessGroupBabyLate):
    """Its backend fails in the second operation and handles that itself: operations in flight end with
    garbage.
    """

    @classmethod
    def _create_pg(cls, store: Store, rank: int, world_size: int) -> ProcessGroup:
        return Failing()


class ProcessGroupBabyStuck(isolated.ProcessGroupBabyLate):
    """Like the above, but operations in flight do not end."""

    @classmethod
    def _create_pg(cls, store: Store, rank: int, world_size: int) -> ProcessGroup:
        return Stuck()


class ProcessGroupBabyFull(isolated.ProcessGroupBabyLate):
    """The worker's device has no memory left for a connection with others."""

    @classmethod
    def _create_pg(cls, store: Store, rank: int, world_size: int) -> ProcessGroup:
        isolated._late.fill(torch.accelerator.current_device_index(), world_size > 1)
        return super()._create_pg(store, rank, world_size)


class ProcessGroupBabyCounting(isolated.ProcessGroupBabyLate):
    """Its operations fill tensors with the sum of 2 ** n for each device n on which the worker has a
    context.
    """

    @classmethod
    def _create_pg(cls, store: Store, rank: int, world_size: int) -> ProcessGroup:
        return Counting()


class Counting(OneRank):
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            tensor.fill_(sum(2**index for index in isolated._late.contexts()) / 2)  # the operation doubles it
        return super().allreduce(tensors, opts)


class Failing(OneRank):
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 1:
            return super().allreduce(tensors, opts)
        self.hang()
        work = super().allreduce(tensors, opts)
        threading.Timer(0.1, self.fail).start()
        return work


class Stuck(Failing):
    def fail(self) -> None:
        self.error = "COMM_ERROR"


class ProcessGroupBabyHasty(isolated.ProcessGroupBabyLate):
    """A wrong worker that does not wait for work queued by the trainer. A test shows that this is
    detected.
    """

    _sharing: ClassVar[dict[str, str]] = {"late": __name__}


class ProcessGroupBabyRefused(isolated.ProcessGroupBabyLate):
    """The driver lets the trainer's stream wait for a value, but not the worker's write one."""

    @classmethod
    def _create_pg(cls, store: Store, rank: int, world_size: int) -> ProcessGroup:
        isolated.sharing.driver.driver_of = lambda device: None
        return super()._create_pg(store, rank, world_size)


def trainer(notify: Notify) -> Sharing:
    return isolated.trainer(notify)


def worker() -> Sharing:
    end = isolated.worker()
    end._marks.event = lambda mark, device: None  # type: ignore[attr-defined]
    return end


def prepare(device: torch.device) -> None:
    isolated.prepare(device)
