"""Texts that the Manager adds to the reconfigure handle of its process group, and reads in the handles of peers.

A handle of torchft is a JSON object, and gets another field. A native handle is text made by PyTorch: the texts are
appended to it, and removed before PyTorch gets the handle of a peer.
"""

from __future__ import annotations

import contextlib
import json

_PREFIX = "torchft_"

AVERAGES = _PREFIX + "averages"  # the process group of this rank averages on its device (Plan.averages)
COMPARES = _PREFIX + "compares"  # how this group compares its weights with those of other groups (replicas.py)
CALLS = _PREFIX + "calls"  # this rank lists its calls in the first step with new peers (calls.py)
HEALS = _PREFIX + "heals"  # this rank waits for groups that heal, as long as they make progress (heal_wait.py)
CONNECTIONS = _PREFIX + "connections"  # the connections of this rank (handover.py)
LAYOUT = _PREFIX + "layout"  # native handles only; others have a field of their own (layout.py)


def announce(handle: str, key: str, text: str) -> str:
    """Adds a text to a handle of torchft; any other kind stays as it is.

    Args:
        handle: the handle.
        key: one of this module's.
        text: in characters that a URL may contain; empty: nothing is added.
    """
    if text and handle.startswith("{") and handle.endswith("}"):
        return f'{handle[:-1]}, "{key}": "{text}"}}'
    return handle


def announce_native(handle: str, key: str, text: str) -> str:
    """Does the same for a native handle made by PyTorch."""
    return f"{handle} {key}={text}" if text else handle


def announced(handle: str, key: str) -> str:
    """Returns the text that was added to a handle, of either kind; empty if there is none."""
    if not handle.startswith("{"):
        return handle.partition(f" {key}=")[2].partition(" ")[0]
    with contextlib.suppress(ValueError):
        text = json.loads(handle).get(key)
        return text if isinstance(text, str) else ""
    return ""


def bare(handle: str) -> str:
    """Returns a native handle without the added texts."""
    return handle.partition(f" {_PREFIX}")[0]
