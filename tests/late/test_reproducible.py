"""reproducible_reduction on the test device: groups end with the bits of one process on the CPU."""

from __future__ import annotations

from types import ModuleType

import torch

from tests.integration.cluster import DEADLINE
from tests.integration.test_reproducible import Ranks, growing, one_process
from tests.late import load
from tests.late.test_jobs import on_device

load()
from tests.late.group import ProcessGroupLate  # noqa: E402


def test_groups_on_a_device_end_with_the_bits_of_one_process(late: ModuleType) -> None:
    late.delays(7, 0, 500)
    ranks = Ranks(
        1, fails=(0, 3), device_of=on_device, make_pg=lambda group: ProcessGroupLate(timeout=DEADLINE)
    )
    ended, expected = ranks.run(), one_process(growing)
    assert all(torch.equal(weights, expected) for weights in ended)
    assert "planned" in ranks.lost
    assert {0, 2} <= set(ranks.repeated[0])
