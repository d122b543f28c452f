"""Weights on a device are compared like those on the CPU, and the host reads the result a step later."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.integration.cluster import DEADLINE
from tests.integration.test_divergence import GROUPS, WITHIN, Flip, Training, names, run
from tests.integration.test_divergence import reported as reported
from tests.late import load
from tests.late.test_jobs import on_device
from torchft._manager.checks import divergence

load()
from tests.late.group import ProcessGroupLate  # noqa: E402


def test_a_flipped_bit_on_a_device_is_found_and_healed(late: ModuleType, reported: list[Any]) -> None:
    late.delays(7, 0, 500)
    training = Training(
        [Flip(7, 1, 0, 22)],
        steps=7 + WITHIN + 8,
        settings={"on_divergence": "heal"},
        device_of=on_device,
        make_pg=lambda group: ProcessGroupLate(timeout=DEADLINE),
    )
    run(training)
    assert len(set(training.ended.values())) == 1
    assert len({record.replica_id for record in reported}) == GROUPS
    assert {(*names(record), record.certain) for record in reported} == {("group_1", True)}
    assert all(record.step <= 7 + WITHIN + 1 for record in reported)


@pytest.mark.parametrize("share", [1.0, 0.0])
def test_weights_on_a_device_are_compared_by_default(
    late: ModuleType, reported: list[Any], monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """With a share of 0 no digest is cheap enough, and each rank digests fewer and fewer parts."""
    late.delays(7, 0, 500)
    monkeypatch.setattr(divergence, "SHARE", share)
    monkeypatch.setattr(divergence, "WINDOW", 4)
    monkeypatch.setattr(divergence, "MOST_SWEEPS", 2)
    monkeypatch.setattr(divergence, "LEAST_SWEEP", 20)
    training = Training(
        [Flip(7, 1, 0, 22)],
        steps=7 + 2 * 20 + divergence.EXCHANGE + 8,
        settings={"compare_commits": None},
        device_of=on_device,
        make_pg=lambda group: ProcessGroupLate(timeout=DEADLINE),
    )
    run(training)
    assert {names(record)[0] for record in reported} == {"group_1"}
