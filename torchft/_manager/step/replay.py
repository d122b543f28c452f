"""Decides whether a failed step is replayed: reduced again with the remaining groups. Pure, and free of
torch.

There are three decisions. First, each rank decides whether it can replay (:func:`why_not`), and the ranks of
a group vote: all of them replay, or none. Second, the next quorum decides (:func:`why_recomputed`): only if
none of its groups has committed the step do all have the weights from which their gradients were computed.
Third, the group votes on the replayed step; if it is not committed, the decisions begin again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from torchft._manager.quorum.plan import Plan

# Each replay of a step is due to another failure. After so many in a row the network is taken to be broken:
# the step is lost, and counts for max_retries.
MOST_REPLAYS = 5


@dataclass(frozen=True)
class Attempt:
    """An attempt at a step that the group of this rank did not commit."""

    replays: int  # earlier replays of the step
    kept: int  # the number of allreduces whose inputs were kept
    refused: Optional[str] = None  # an action of this rank in the step that rules out a replay
    changed: Optional[str] = None  # how the results were changed after their reduction


def why_not(attempt: Attempt) -> Optional[str]:
    """Why this rank cannot reduce the step again; None if it can."""
    if attempt.refused is not None:
        return attempt.refused
    if attempt.replays >= MOST_REPLAYS:
        return f"it was reduced again {attempt.replays} times"
    if not attempt.kept:
        return "nothing was reduced in it"
    return attempt.changed


def why_recomputed(plan: Plan) -> Optional[str]:
    """Why the kept gradients cannot be used in a quorum; None if they are reduced again in it."""
    if plan.replay:
        return None
    if plan.heal:
        return f"others are ahead, at step {plan.max_step}, and this group takes over their state"
    if not plan.up_to_date:
        return f"others are ahead, at step {plan.max_step}"
    return "not all groups replay steps (replay_failed_step), or this is the first step of a job (init_sync)"


def peers_fault(error: BaseException) -> bool:
    """Whether an error of a collective can be due to its peers; others would recur."""
    return isinstance(error, (RuntimeError, OSError, EOFError)) and not isinstance(error, NotImplementedError)
