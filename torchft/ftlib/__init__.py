"""FTLib's interface, implemented with torchft: averages over members that may join and fail at any time.

``api``: :class:`FTLib`, the interface for a training loop ``consensus``: the abstract class of a consensus,
and the statuses that it and an average return ``framework``: the abstract class of a communication library,
and its implementation with torchft's process groups ``lighthouse``: consensus by the lighthouse; active
``shared_storage``: consensus by a directory that all members see; passive ``gossip``: consensus among the
members, without a server; passive ``flag``, ``views``, ``storage_rules``: the decisions; pure, without torch

Names are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchft._lazy import resolver

if TYPE_CHECKING:
    from torchft.ftlib.api import FTLib as FTLib
    from torchft.ftlib.api import RebuildFailed as RebuildFailed
    from torchft.ftlib.api import allreduce_hook as allreduce_hook
    from torchft.ftlib.consensus import Consensus as Consensus
    from torchft.ftlib.consensus import ConsensusStatus as ConsensusStatus
    from torchft.ftlib.consensus import FTAllReduceStatus as FTAllReduceStatus
    from torchft.ftlib.framework import Framework as Framework
    from torchft.ftlib.views import Identity as Identity
    from torchft.ftlib.views import Member as Member
    from torchft.ftlib.views import RankAssignScheme as RankAssignScheme
    from torchft.ftlib.views import View as View

_EXPORTS = {
    "Consensus": "consensus.Consensus",
    "ConsensusStatus": "consensus.ConsensusStatus",
    "FTAllReduceStatus": "consensus.FTAllReduceStatus",
    "FTLib": "api.FTLib",
    "Framework": "framework.Framework",
    "Identity": "views.Identity",
    "Member": "views.Member",
    "RankAssignScheme": "views.RankAssignScheme",
    "RebuildFailed": "api.RebuildFailed",
    "View": "views.View",
    "allreduce_hook": "api.allreduce_hook",
}

__all__ = list(_EXPORTS)

__getattr__ = resolver(__name__, _EXPORTS)
