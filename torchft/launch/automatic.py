"""`torchft run --scale auto`: the number of this machine's groups follows the speed of the job."""

from __future__ import annotations

from collections.abc import Sequence

from torchft._lighthouse_http import HttpLighthouse
from torchft.launch.job import LocalJob
from torchft.scaling.loop import Follower, record
from torchft.scaling.places import Scaler, ScalerError
from torchft.scaling.policy import Policy


class ThisHost(Scaler):
    """The groups of a job on this machine."""

    def __init__(self, job: LocalJob) -> None:
        self._job = job

    def current(self) -> int:
        return self._job.wanted

    def set(self, groups: int) -> None:
        try:
            self._job.scale(groups)
        except ValueError as e:
            raise ScalerError(str(e)) from None


def follower(job: LocalJob, numbers: Sequence[int], lighthouse: str) -> Follower:
    """Makes what looks at a job, and lets `torchft scale auto` begin anew after a number set by hand.

    Args:
        job: the job.
        numbers: the allowed numbers of groups, ascending.
        lighthouse: its address.
    """
    policy, http = Policy(numbers), HttpLighthouse(lighthouse)

    def tell(reason: str) -> None:
        job.decision = reason
        record(http, reason)

    job.follow_again = policy.begin
    return Follower(ThisHost(job), policy, tell, current_sec=0.0)
