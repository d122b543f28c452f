"""When a replica group that has ended is restarted."""

from __future__ import annotations

# Consecutive ones: such a script never starts, and its log says why.
FRUITLESS_LIVES = 3
_DELAYS_SEC = [1.0, 5.0]


def restart_delay(fruitless: int) -> float | None:
    """Returns the seconds until a group that ended with an error is restarted; None: it is not restarted.

    ``fruitless`` is the number of consecutive incarnations, including the last, that participated in no step.
    """
    if fruitless == 0:
        return 0.0  # it was a healthy member, and the others wait for it
    if fruitless >= FRUITLESS_LIVES:
        return None
    return _DELAYS_SEC[fruitless - 1]
