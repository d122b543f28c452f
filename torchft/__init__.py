"""torchft: a training job made of replica groups, each of which may fail, restart and heal while the others
continue.

The names below are resolved on first use, so that `import torchft` loads neither torch nor the native
library. So `torchft_lighthouse` starts at once, and isolated worker processes stay small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchft import _beside
from torchft._lazy import resolver
from torchft._version import __version__ as __version__

if TYPE_CHECKING:
    from torchft.data import DistributedSampler as DistributedSampler
    from torchft.ddp import DistributedDataParallel as DistributedDataParallel
    from torchft.job import Job as Job
    from torchft.manager import Manager as Manager
    from torchft.optim import OptimizerWrapper
    from torchft.process_group import ProcessGroupBabyNCCL as ProcessGroupBabyNCCL
    from torchft.process_group import ProcessGroupBabyXCCL as ProcessGroupBabyXCCL
    from torchft.process_group import ProcessGroupGloo as ProcessGroupGloo
    from torchft.process_group import ProcessGroupNCCL as ProcessGroupNCCL
    from torchft.process_group import ProcessGroupXCCL as ProcessGroupXCCL

    Optimizer = OptimizerWrapper

_beside.warn(__path__[0], __version__)

# exported name: "module.name" below this package
_EXPORTS = {
    "DistributedDataParallel": "ddp.DistributedDataParallel",
    "DistributedSampler": "data.DistributedSampler",
    "Job": "job.Job",
    "Manager": "manager.Manager",
    "Optimizer": "optim.OptimizerWrapper",
    "ProcessGroupBabyNCCL": "process_group.ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL": "process_group.ProcessGroupBabyXCCL",
    "ProcessGroupGloo": "process_group.ProcessGroupGloo",
    "ProcessGroupNCCL": "process_group.ProcessGroupNCCL",
    "ProcessGroupXCCL": "process_group.ProcessGroupXCCL",
}

__all__ = sorted(_EXPORTS)

__getattr__ = resolver(__name__, _EXPORTS)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
