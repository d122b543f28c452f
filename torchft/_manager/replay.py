"""Decides whether a failed step is replayed: reduced again with the remaining groups. Pure, and free of torch.

A rank decides three times. Can it (:func:`why_not`)? The ranks of a group vote on that: all replay, or none. What does
the next quorum say (:func:`why_anew`)? If nobody there has committed the step, all have the weights that the gradients
were made of. And was it committed this time? If not, it begins again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from torchft._manager.plan import Plan

# Each replay of one step takes another failure in it. So many in a row are a network that does not work: then the
# step is lost, and max_retries counts.
MOST_REPLAYS = 5


@dataclass(frozen=True)
class Attempt:
    """What a rank knows of an attempt at a step that its group did not commit."""

    replays: int  # attempts before this one, but the first
    kept: int  # allreduces whose inputs were kept
    refused: Optional[str] = None  # what this rank did that cannot be done again
    changed: Optional[str] = None  # what became of the results in the meantime


def why_not(attempt: Attempt) -> Optional[str]:
    """Why this rank cannot reduce the step again; None if it can."""
    if attempt.refused is not None:
        return attempt.refused
    if attempt.replays >= MOST_REPLAYS:
        return f"it was reduced again {attempt.replays} times"
    if not attempt.kept:
        return "nothing was reduced in it"
    return attempt.changed


def why_anew(plan: Plan) -> Optional[str]:
    """Why the gradients that were kept are of no use in a quorum; None if they are reduced again in it."""
    if plan.replay:
        return None
    if plan.heal:
        return f"others are ahead, at step {plan.max_step}, and this group takes over their state"
    if not plan.up_to_date:
        return f"others are ahead, at step {plan.max_step}"
    return "not all groups replay steps (replay_failed_step), or this is the first step of a job (init_sync)"


def peers_fault(error: BaseException) -> bool:
    """Whether an error of a collective can be due to its peers. Others come again with the same arguments."""
    return isinstance(error, (RuntimeError, OSError, EOFError)) and not isinstance(error, NotImplementedError)
