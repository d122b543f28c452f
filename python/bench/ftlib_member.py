"""A member for ftlib.py, which requests a new view whenever its present view becomes invalid."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

_LONGEST_S = 3600.0


def emit(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, "at": time.time(), **fields}), flush=True)


class Listener:
    """Wakes the member when it is notified."""

    def __init__(self) -> None:
        self.notified = threading.Event()

    def new_member_join(self) -> None:
        if not self.notified.is_set():
            emit("joins")
        self.notified.set()

    def member_failed(self, view: int, reason: str) -> None:
        self.notified.set()


def main(consensus: str, name: str, where: str) -> None:
    made: Any
    if consensus == "gossip":
        from torchft.ftlib.gossip import Gossip

        made = Gossip(seeds=where, name=name)
        emit("made", address=made.address)
    else:
        from torchft.ftlib.shared_storage import SharedStorage

        made = SharedStorage(where, name=name)
    listener = Listener()
    made.attach(listener)
    while True:
        listener.notified.clear()
        view = made.get_member_list()
        emit("view", number=view.number, names=sorted(identity.name for identity in view.identities))
        listener.notified.wait(_LONGEST_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
