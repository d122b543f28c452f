"""Checks of settings that several parts have."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from torchft._checks import check_positive, switch

NAME = "TORCHFT_TEST_SWITCH"


@pytest.mark.parametrize(
    ("text", "default", "expected"),
    [
        (None, False, False),
        (None, True, True),
        ("", True, True),
        ("0", True, False),
        ("False", True, False),
        ("1", False, True),
        (" true", False, True),
    ],
)
def test_a_switch(text: str | None, default: bool, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if text is not None:
        monkeypatch.setenv(NAME, text)
    assert switch(NAME, default) is expected


@pytest.mark.parametrize("given", [True, False])
def test_the_callers_choice_counts_before_the_environment(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, "yes")
    assert switch(NAME, given=given) is given


def test_any_other_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "yes")
    with pytest.raises(ValueError, match=rf"{NAME}='yes': allowed are 0 \(off\) and 1 \(on\)"):
        switch(NAME)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (timedelta(0), "timeout=0s: must be longer than 0s"),
        (timedelta(seconds=-1), "timeout=-1s: must be longer than 0s"),
        (5, "timeout=5: must be a datetime.timedelta"),
    ],
)
def test_a_duration_is_longer_than_zero(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_positive("timeout", value)
    check_positive("timeout", timedelta(microseconds=1))
