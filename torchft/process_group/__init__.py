"""Process groups whose peers change from quorum to quorum.

- `base`: the interface, with the methods that give a group new peers; `reconfigure`: how the peers find each
  other
- `gloo`, `nccl`, `xccl`: groups in this process, which `wrapper` creates for each set of peers;
  `accelerator`: the common part of the last two
- `native`, `torchcomms`: groups that get new peers without being created anew: PyTorch's own, and torchcomms'
  communicators
- `isolated`: groups in a separate process, which can be killed
- `managed`: the Manager's group for user code; `device_mesh`: a DeviceMesh for HSDP
- `error_swallowing`: keeps errors instead of raising them; `fake`, `dummy`: for tests
- `checked`: ranks compare their next operation
"""

from __future__ import annotations

# torchft reads these names from this module at each use, so that replacing them here (in a test, say) takes
# effect: context_timeout, stream_timeout, _ErrorSwallowingWork, _WorkAcceleratorTimeout, _BabyWork.
from torchft.futures import context_timeout, stream_timeout
from torchft.process_group.accelerator import _WorkAcceleratorTimeout
from torchft.process_group.base import BaseProcessGroup, ProcessGroup
from torchft.process_group.device_mesh import ft_init_device_mesh
from torchft.process_group.dummy import ProcessGroupDummy
from torchft.process_group.error_swallowing import (
    ErrorSwallowingProcessGroupWrapper,
    _ErrorSwallowingWork,
)
from torchft.process_group.fake import FakeProcessGroupWrapper
from torchft.process_group.gloo import ProcessGroupGloo
from torchft.process_group.isolated import (
    ProcessGroupBaby,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupBabyXCCL,
    _BabyWork,
    _FutureMetadata,
    _OpMetadata,
    _PickleSafeOptions,
)
from torchft.process_group.managed import ManagedProcessGroup
from torchft.process_group.nccl import (
    TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR,
    TORCHFT_TRIGGER_FR_ON_ABORT,
    ProcessGroupNCCL,
    trigger_nccl_fr_trace_through_pipe,
)
from torchft.process_group.reconfigure import (
    ReconfigureOptions,
    create_store_client,
    is_native,
    native_error,
    reconfigure_with_store,
    supports_reconfigure,
)
from torchft.process_group.wrapper import ProcessGroupWrapper
from torchft.process_group.xccl import ProcessGroupXCCL
from torchft.work import _DummyWork

# Types of messages between an isolated group and its worker.
_QUEUE_CLOSE = "queue_close"
_FUTURE_RESULT = "fut_result"
_FUTURE_EXCEPTION = "fut_exception"

__all__ = [
    "TORCHFT_TRIGGER_FR_ON_ABORT",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR",
    "_FUTURE_EXCEPTION",
    "_FUTURE_RESULT",
    "_QUEUE_CLOSE",
    "BaseProcessGroup",
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupBaby",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "ProcessGroupXCCL",
    "ReconfigureOptions",
    "_BabyWork",
    "_DummyWork",
    "_ErrorSwallowingWork",
    "_FutureMetadata",
    "_OpMetadata",
    "_PickleSafeOptions",
    "_WorkAcceleratorTimeout",
    "context_timeout",
    "create_store_client",
    "ft_init_device_mesh",
    "is_native",
    "native_error",
    "reconfigure_with_store",
    "stream_timeout",
    "supports_reconfigure",
    "trigger_nccl_fr_trace_through_pipe",
]
