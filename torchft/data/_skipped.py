"""The units that all groups leave out, because their samples ended two of them (``on_poison="skip"``)."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import TYPE_CHECKING

from torchft.data.position import DataPlan, DataPosition

if TYPE_CHECKING:
    from torchft._manager.observe.log import _ManagerLogger

WRITTEN = "torchft_skipped_units.jsonl"  # in the working directory


class SkippedUnits:
    """The units of a plan that the quorum of a step names.

    Attributes:
        enabled: whether this job leaves out units at all.
        names: of the units that are left out.
    """

    def __init__(self, enabled: bool, plan: DataPlan, logger: _ManagerLogger) -> None:
        self.enabled = enabled
        self.names: frozenset[str] = frozenset()
        self._plan = plan
        self._logger = logger
        self._records = False

    def name(self, position: DataPosition, unit: int) -> str:
        """The name of a unit of a batch, by which groups report that it ends them; empty if it is not to be
        left out.
        """
        return f"{position.epoch}.{position.batch}.{unit}" if self.enabled else ""

    def begin(
        self, names: Collection[str], position: DataPosition, kept: Collection[int], records: bool
    ) -> None:
        """Begins a step with the names of its quorum. Units of which a group keeps the gradients count.
        ``records``: whether this rank writes down what is left out.
        """
        counted = {self.name(position, unit) for unit in kept}
        self.names = frozenset(names) - counted if self.enabled else frozenset()
        self._records = records

    def of(self, position: DataPosition) -> frozenset[int]:
        """The numbers of the units of a batch that are left out."""
        if not self.names:
            return frozenset()
        units = range(self._plan.num_units(position))
        return frozenset(unit for unit in units if self.name(position, unit) in self.names)

    def committed(self, step: int, position: DataPosition) -> None:
        """Writes down which samples are not in a step."""
        for unit in sorted(self.of(position)) if self._records else ():
            indices = list(self._plan.indices(position, unit))
            self._logger.warn(f"step {step} is committed without a unit that ends groups: {indices}")
            at = {"step": step, "epoch": position.epoch, "batch": position.batch}
            try:
                with open(WRITTEN, "a") as file:
                    file.write(json.dumps({**at, "unit": unit, "indices": indices}) + "\n")
            except OSError as e:
                self._logger.warn(f"{WRITTEN} cannot be written: {e}")
