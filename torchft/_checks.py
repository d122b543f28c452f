"""Checks of arguments and environment variables for several parts, with one text each. Needs no PyTorch."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Optional

_VALUES = {"": None, "0": False, "false": False, "1": True, "true": True}


def switch(name: str, default: bool = False, given: Optional[bool] = None) -> bool:
    """Whether a feature is on: as the caller set it, else as an environment variable says, else the default.

    Args:
        name: the variable: 0 or false, 1 or true, in any case; empty is like not set.
        default: for a variable that is not set.
        given: the caller's choice; None: there is none.

    Raises:
        ValueError: the variable has another value.
    """
    if given is not None:
        return given
    text = os.environ.get(name, "")
    try:
        value = _VALUES[text.strip().lower()]
    except KeyError:
        raise ValueError(f"{name}={text!r}: allowed are 0 (off) and 1 (on)") from None
    return default if value is None else value


def check_positive(name: str, value: timedelta) -> None:
    """Raises ValueError unless the duration is longer than zero."""
    if not isinstance(value, timedelta):
        raise ValueError(f"{name}={value!r}: must be a datetime.timedelta")
    if value <= timedelta(0):
        raise ValueError(f"{name}={value.total_seconds():g}s: must be longer than 0s")
