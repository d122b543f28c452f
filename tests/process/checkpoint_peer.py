"""A process with a checkpoint transport of the torchft on its path, which serves and fetches by commands on
stdin.

Commands and answers are JSON, one per line.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# last, because torchft itself must come from PYTHONPATH
sys.path.append(str(ROOT / "tests" / "unit" / "checkpointing"))

from checkpoint_states import assert_same, training_state  # noqa: E402
from events import emit  # noqa: E402

import torchft  # noqa: E402
from torchft.checkpointing import HTTPTransport  # noqa: E402

TIMEOUT = timedelta(seconds=30)


def mixed_state() -> dict[str, Any]:
    """A state that both packages can read from each other."""
    state = training_state()
    # PyTorch's restricted unpickler refuses these if upstream wrote them
    del state["user"]["values"]["default"], state["user"]["values"]["deque"]
    return state


def answer(transports: dict[int, Any], command: dict[str, Any]) -> dict[str, Any]:
    num_chunks = command["num_chunks"]
    if num_chunks not in transports:
        transports[num_chunks] = HTTPTransport(timeout=TIMEOUT, num_chunks=num_chunks)
    transport = transports[num_chunks]
    if command["do"] == "serve":
        transport.send_checkpoint([1], command["step"], mixed_state(), TIMEOUT)
        return {"metadata": transport.metadata()}
    try:
        got = transport.recv_checkpoint(0, command["metadata"], command["step"], TIMEOUT)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    for name in got["user"].keys() - mixed_state()["user"].keys():
        del got["user"][name]  # the main part under its second name, or padding: see codec/upstream.py
    assert_same(got, mixed_state())
    return {"received": True}


def main() -> None:
    transports: dict[int, Any] = {}
    emit("imported", torchft=str(Path(torchft.__file__).parent))
    for line in sys.stdin:
        emit("answer", answer=answer(transports, json.loads(line)))
    for transport in transports.values():
        transport.shutdown()


if __name__ == "__main__":
    main()
