"""The names of torchft.ftlib and torchft.dlrover are pinned, and resolved on first use."""

from __future__ import annotations

from importlib import import_module

import pytest

NAMES = {
    "torchft.ftlib": [
        "Consensus",
        "ConsensusStatus",
        "FTAllReduceStatus",
        "FTLib",
        "Framework",
        "Identity",
        "Member",
        "RankAssignScheme",
        "RebuildFailed",
        "View",
        "allreduce_hook",
    ],
    "torchft.dlrover": [
        "DataShardService",
        "DistributedOptimizer",
        "DlroverRendezvousBackend",
        "ElasticDataset",
        "LighthouseRendezvousHandler",
        "TorchRendezvousService",
    ],
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    found = import_module(module)
    assert found.__all__ == NAMES[module]
    assert [getattr(found, name).__name__ for name in NAMES[module]] == NAMES[module]
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'Nope'"):
        _ = found.Nope
