"""Decides when a replica group that has ended is restarted."""

from __future__ import annotations

# Consecutive incarnations without a step, after which a group is not restarted: its script cannot start, and
# its log has the reason.
FRUITLESS_LIVES = 3
_DELAYS_SEC = [1.0, 5.0]


def restart_delay(fruitless: int) -> float | None:
    """Returns the seconds until a group that ended with an error is restarted; None: it is not restarted.

    ``fruitless`` is the number of consecutive incarnations, including the last, that participated in no step.
    """
    if fruitless == 0:
        return 0.0  # the group was a healthy member, and the others wait for it
    if fruitless >= FRUITLESS_LIVES:
        return None
    return _DELAYS_SEC[fruitless - 1]
