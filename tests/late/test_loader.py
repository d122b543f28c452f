"""The loader on the test device: groups that fail and join end with the weights of one process on the CPU."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.integration.cluster import DEADLINE
from tests.integration.test_loader import Training, check, ends_of_a_failure_and_a_join, wrapped_by_torchft
from tests.integration.test_reproducible import check_bits
from tests.late import load
from tests.late.test_jobs import on_device
from torchft.process_group import ProcessGroup

load()
from tests.late.group import ProcessGroupLate  # noqa: E402


def make_pg(group: int) -> ProcessGroup:
    return ProcessGroupLate(timeout=DEADLINE)


# Slow without a worker: the test below has none either.
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_group_fails_and_another_one_joins(late: ModuleType, workers: int) -> None:
    late.delays(7, 0, 500)
    loader = {"pin_memory": True, "num_workers": workers}
    training = Training(start_with=3, device_of=on_device, wrap=wrapped_by_torchft, loader=loader)
    ended = ends_of_a_failure_and_a_join(training, make_pg)
    check(training, ended)
    assert sum(weights is not None for weights in ended) == 3


@pytest.mark.slow  # the test below
def test_a_failure_and_a_join_end_with_the_bits_of_one_process(late: ModuleType) -> None:
    late.delays(7, 0, 500)
    training = Training(start_with=3, device_of=on_device, settings={"reproducible_reduction": True})
    check_bits(training, ends_of_a_failure_and_a_join(training, make_pg))
