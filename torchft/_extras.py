"""What torchft's wrappers ask of a Manager beyond its public methods: of the optimizer, DDP, process groups, works.

Scripts' tests give the wrappers stand-ins for a Manager, which need not have it. That is asked here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Optional

import torch


def refuse_replay(manager: Any, reason: str) -> None:
    """This step does something that cannot be done again."""
    _call(manager, "_refuse_replay", reason)


def register_gradients(manager: Any, gradients: Callable[[], Iterable[torch.Tensor]]) -> None:
    """What an optimizer will read: a replay must reach all of it."""
    _call(manager, "_register_gradients", gradients)


def adds_gradients(manager: Any) -> bool:
    """Whether gradients are added up over the groups, and not averaged: a data loader has weighted the losses."""
    return _call(manager, "_adds_gradients") is True


def steps_by_itself(manager: Any, local_steps: object) -> None:
    """Groups train on their own between two steps of the Manager."""
    _call(manager, "_attach_local_steps", local_steps)


def inner_step_ended(manager: Any) -> None:
    """Those of :func:`steps_by_itself` have done a step of their optimizer."""
    _call(manager, "_inner_step_ended")


def had_quorum(manager: Any) -> bool:
    """Whether the process group has had peers; a stand-in's always has."""
    return getattr(manager, "_quorum_id", None) != -1


def timeout(manager: Any) -> Optional[timedelta]:
    """The Manager's; None: of a stand-in, which has none."""
    value = getattr(manager, "_timeout", None)
    return value if isinstance(value, timedelta) else None


def share_buffer(manager: Any, buffer: torch.Tensor) -> None:
    """Lets an isolated group share the memory of a buffer with its worker, so that nothing is copied."""
    _call(getattr(manager, "_pg", None), "share_buffer", buffer)


def _call(of: Any, name: str, *arguments: Any) -> Any:
    method = getattr(of, name, None)
    return None if method is None else method(*arguments)
