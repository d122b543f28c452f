"""The state of a job that is copied into shared memory is that of its checkpoints, by names of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict

from torchft._job.parameters import root_of
from torchft._manager.snapshots.copies import State

if TYPE_CHECKING:
    from torchft.job import Job


def copy_in_memory(job: Job) -> None:
    """Makes the Manager copy, and begin with, the state of the job's checkpoints."""
    job.manager._snapshots.state = State(job._checkpoint, job._resume, lambda: _own(job))


def _own(job: Job) -> dict[str, Any]:
    """Returns what a rank has before it loads. An optimizer has no state yet, and gets none here: that would
    take a step of it.
    """
    others = {name: each.state_dict() for name, each in job._others.items()}
    own = {"model": get_model_state_dict(root_of(job._models)), "optimizer": {}, **others}
    return {"manager": {}, "data": {}, **(own if job._stage is None else {job._stage: own})}
