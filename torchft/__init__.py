"""torchft: a training job made of replica groups, each of which may fail, restart and heal while the others
train on.

The names below are resolved on first use, so that `import torchft` costs neither torch nor the native
library: `torchft_lighthouse` starts at once, and isolated worker processes stay small.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.3.0"

if TYPE_CHECKING:
    from torchft.data import DistributedSampler as DistributedSampler
    from torchft.ddp import DistributedDataParallel as DistributedDataParallel
    from torchft.manager import Manager as Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import ProcessGroupBabyNCCL as ProcessGroupBabyNCCL
    from torchft.process_group import ProcessGroupBabyXCCL as ProcessGroupBabyXCCL
    from torchft.process_group import ProcessGroupGloo as ProcessGroupGloo
    from torchft.process_group import ProcessGroupNCCL as ProcessGroupNCCL
    from torchft.process_group import ProcessGroupXCCL as ProcessGroupXCCL

    Optimizer = OptimizerWrapper

# exported name: (module, name there)
_EXPORTS = {
    "DistributedDataParallel": ("torchft.ddp", "DistributedDataParallel"),
    "DistributedSampler": ("torchft.data", "DistributedSampler"),
    "Manager": ("torchft.manager", "Manager"),
    "Optimizer": ("torchft.optim", "OptimizerWrapper"),
    "ProcessGroupBabyNCCL": ("torchft.process_group", "ProcessGroupBabyNCCL"),
    "ProcessGroupBabyXCCL": ("torchft.process_group", "ProcessGroupBabyXCCL"),
    "ProcessGroupGloo": ("torchft.process_group", "ProcessGroupGloo"),
    "ProcessGroupNCCL": ("torchft.process_group", "ProcessGroupNCCL"),
    "ProcessGroupXCCL": ("torchft.process_group", "ProcessGroupXCCL"),
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'torchft' has no attribute {name!r}")
    module, attribute = _EXPORTS[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
