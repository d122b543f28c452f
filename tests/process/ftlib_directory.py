"""A member of FTLib in a directory that is read-only, full, or becomes full: `ftlib_directory.py DIRECTORY`.

It reports the numbers of its views, and the reason why the first view ended.
"""

from __future__ import annotations

import queue
import sys
from datetime import timedelta
from pathlib import Path

from events import emit, keep_stdout_for_events

from torchft.ftlib.shared_storage import SharedStorage


class Listener:
    def __init__(self) -> None:
        self.failed: queue.Queue[str] = queue.Queue()

    def new_member_join(self) -> None:
        pass

    def member_failed(self, number: int, reason: str) -> None:
        self.failed.put(reason)


def main(directory: Path) -> None:
    try:
        member = SharedStorage(
            directory, name="a", expiry=timedelta(seconds=2), timeout=timedelta(seconds=60)
        )
    except ValueError as error:
        emit("refused", error=str(error))
        return
    listener = Listener()
    member.attach(listener)
    emit("view", number=member.get_member_list().number)
    fill(directory)
    emit("failed", reason=listener.failed.get(timeout=60))
    (directory / "filler").unlink()
    emit("view", number=member.get_member_list().number)
    member.close()


def fill(directory: Path) -> None:
    with (directory / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 4096)
        except OSError:  # the directory is full
            pass


if __name__ == "__main__":
    keep_stdout_for_events()
    main(Path(sys.argv[1]))
