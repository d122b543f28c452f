"""Process groups whose peers change from quorum to quorum.

- `base`: the interface, and how new peers are given to a group; `reconfigure`: how they find each other
- `gloo`, `nccl`, `xccl`: groups in this process, built by `wrapper` anew for each set of peers
- `managed`: Manager's group for user code; `error_swallowing`, `fake`, `dummy`: see there
"""

from __future__ import annotations

# Re-exported because they are read from here at call time: a test that replaces them here is heard.
from torchft.futures import context_timeout, stream_timeout
from torchft.process_group.base import ProcessGroup
from torchft.process_group.dummy import ProcessGroupDummy
from torchft.process_group.error_swallowing import (
    _ErrorSwallowingWork,
    ErrorSwallowingProcessGroupWrapper,
)
from torchft.process_group.fake import FakeProcessGroupWrapper
from torchft.process_group.gloo import ProcessGroupGloo
from torchft.process_group.managed import ManagedProcessGroup
from torchft.process_group.reconfigure import (
    create_store_client,
    is_native,
    native_error,
    reconfigure_with_store,
    ReconfigureOptions,
    supports_reconfigure,
)
from torchft.process_group.wrapper import ProcessGroupWrapper
from torchft.work import _DummyWork

__all__ = [
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupWrapper",
    "ReconfigureOptions",
    "_DummyWork",
    "_ErrorSwallowingWork",
    "context_timeout",
    "create_store_client",
    "is_native",
    "native_error",
    "reconfigure_with_store",
    "stream_timeout",
    "supports_reconfigure",
]
