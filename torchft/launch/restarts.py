"""When a replica group that has ended is restarted."""

from __future__ import annotations

# In a row: such a script does not start at all, and its log says why.
FRUITLESS_LIVES = 3
_DELAYS_SEC = [1.0, 5.0]


def restart_delay(fruitless: int) -> float | None:
    """Seconds until a group that ended with an error is started again; None: not again.

    ``fruitless`` counts the last lives in a row in which it did not take part in a single step, this one included.
    """
    if fruitless == 0:
        return 0.0  # it was a healthy member: the others miss it
    if fruitless >= FRUITLESS_LIVES:
        return None
    return _DELAYS_SEC[fruitless - 1]
