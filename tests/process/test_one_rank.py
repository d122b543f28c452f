"""The statements of docs/internals/design.md on a rank that is replaced alone, shown by one_rank.py."""

from __future__ import annotations

import pytest
from documents import ROOT
from torch.distributed.fsdp import FSDPModule

from tests.unit.children import run_python


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rank_keeps_its_shard_while_the_other_is_replaced() -> None:
    done = run_python((ROOT / "python/examples/one_rank.py").read_text(), timeout=220)
    if not hasattr(FSDPModule, "reset_iter_state"):
        assert done.returncode == 1 and "no step follows an error" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "rank 0 killed: weights as without it: True",
        "rank 1 killed: weights as without it: True",
        "elements of a shard that one step changes: 96 of 96",
        # False would be news: see what docs/internals/design.md asks of PyTorch.
        "the groups of a mesh wait for the ranks that have theirs: True",
    ]
