"""Isolated groups: the real group, Gloo or NCCL, lives in a worker, a process that can be killed.

    parent     the group as the trainer sees it; `groups`: by backend; `call`, `work`: one operation, there and back
    channel    the trainer's end of one worker: operations in flight; `leader`: which of the threads that wait reads the
               answers; `completer`: futures; `devices`: what the two share; `wire`: the descriptors between them,
               `messages`: through a socket
    standby    gives out workers, one of which stands by; `server`: the process that forks them
    worker     runs the operations
    protocol   what travels between trainer and worker
    sharing    the seam to a kind of device; `host`, `cuda`: behind it

When an operation is *done*, that is when its `wait` returns and its future has a value:

- on a CPU it has finished, and the result is in the caller's tensor;
- on a device the stream that waits, or on which the future's callback runs, sees the result.

The trainer never blocks longer than the operation's timeout for a worker that hangs: when it does not answer, it is
killed, and whoever waits gets an error. A worker ends with its trainer, however that ends.
"""

from __future__ import annotations

from torchft.process_group.isolated.groups import ProcessGroupBabyGloo, ProcessGroupBabyNCCL, ProcessGroupBabyXCCL
from torchft.process_group.isolated.operation import _FutureMetadata, _OpMetadata
from torchft.process_group.isolated.parent import ProcessGroupBaby
from torchft.process_group.isolated.protocol import _PickleSafeOptions
from torchft.process_group.isolated.work import _BabyWork

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
