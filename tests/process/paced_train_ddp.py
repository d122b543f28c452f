"""train_ddp.py with a pause before each step: a survivor leaves the processor to the group that starts again."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train_ddp

PAUSE_S = 0.03


class PacedManager(train_ddp.Manager):
    def start_quorum(self, *args: object, **kwargs: object) -> None:
        time.sleep(PAUSE_S)
        super().start_quorum(*args, **kwargs)  # type: ignore[arg-type]


if __name__ == "__main__":
    train_ddp.Manager = PacedManager  # type: ignore[misc]
    train_ddp.main()
