"""Isolated groups: the actual group, Gloo or NCCL, runs in a worker, a process that can be killed.

    parent     the process group in the trainer; `groups`: one class per backend; `work`: the result of a call
    channel    the trainer's end of one worker: operations in flight, the reader, which alone ends them, and
               futures; `operation`: one in flight; `devices`: shared memory and events
    standby    hands out workers and keeps the next one ready; `server`: the process that forks them
    worker     runs the operations
    protocol   the messages between trainer, server and worker
    sharing    the interface to a device type; `host`, `cuda`: its implementations
    values     memory by which the trainer's stream follows the worker's; `driver`: the calls that write it,
               and wait

When an operation is *done*, that is when its `wait` returns and its future has a value:

- on a CPU it has finished, and the result is in the caller's tensor;
- on a device the stream that waits, or on which the future's callback runs, sees the result.

If a worker stalls, the trainer does not block longer than the operation's timeout: a worker that does not
answer in time is killed, all waits for it fail, and streams that wait for it continue. A worker ends with its
trainer, even if the trainer is killed.
"""

from __future__ import annotations

from torchft import _libraries

_libraries.load("torchft.process_group.isolated._native")  # first: here its error is clear

from torchft.process_group.isolated.groups import (  # noqa: E402
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupBabyXCCL,
)
from torchft.process_group.isolated.operation import _FutureMetadata, _OpMetadata  # noqa: E402
from torchft.process_group.isolated.parent import ProcessGroupBaby  # noqa: E402
from torchft.process_group.isolated.protocol import _PickleSafeOptions  # noqa: E402
from torchft.process_group.isolated.work import _BabyWork  # noqa: E402

__all__ = [
    "ProcessGroupBaby",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "_BabyWork",
    "_FutureMetadata",
    "_OpMetadata",
    "_PickleSafeOptions",
]
