"""Waits for groups that torchrun runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from replica_group import Group

START_S = 120


def wait_for(condition: Callable[[], object], what: str, *groups: Group, seconds: float = START_S) -> None:
    """Returns when the condition is true. Meanwhile it reads the groups' events.

    Raises:
        AssertionError: a group failed before, or ``seconds`` have passed.
    """
    deadline = time.monotonic() + seconds
    while True:
        for group in groups:
            group.follow()
        if condition():
            return
        logs = "\n".join(f"{group.log}:\n{group.log.read_text(errors='replace')[-3000:]}" for group in groups)
        assert not any(group.status for group in groups), f"a group failed before: {what}\n{logs}"
        assert time.monotonic() < deadline, f"{seconds:g} s passed before: {what}\n{logs}"
        time.sleep(0.05)
