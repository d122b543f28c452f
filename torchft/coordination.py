"""The servers and clients that replica groups use to find each other and to agree on each change.

They can be used without the rest of torchft, to build another kind of fault tolerance on the same quorum.
"""

from __future__ import annotations

from torchft._torchft import (
    LighthouseClient,
    LighthouseServer,
    ManagerClient,
    ManagerServer,
    Quorum,
    QuorumMember,
)

__all__ = [
    "LighthouseClient",
    "LighthouseServer",
    "ManagerClient",
    "ManagerServer",
    "Quorum",
    "QuorumMember",
]
