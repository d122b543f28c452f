"""Transfers in the upstream format: one stream, or several that each carry a part of the state's leaves."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import torch.utils._pytree as pytree

from torchft.checkpointing._deadline import Deadline
from torchft.checkpointing._http_client import Answer, describe, fetch
from torchft.checkpointing._progress import Meter
from torchft.checkpointing._stream import Home, read_object
from torchft.checkpointing.transport import CheckpointError
from torchft.utils import current_device, use_device

logger: logging.Logger = logging.getLogger(__name__)

FULL = "full"
METADATA = "metadata"
_MAX_STREAMS = 16  # chunks fetched at the same time

# Names of the main part of the user's state. Upstream uses the first if its Manager's constructor got the functions of
# the state, and the second if set_state_dict_fns did (measured: 0.2.0 and a nightly of 2026-10-26). This package always
# uses the first.
MAIN_PARTS = ("default", "set_state_dict_fns")
_AFTER = "after "  # prefix of the keys that hold the padding after a main part


def with_main_parts(state: Any, num_chunks: int) -> Any:
    """Returns the state of a Manager with its main part under all names, so that targets of any version find it.

    A stream contains each storage once, so the leaves of a part must be in the same chunks under all its names. Padding
    achieves that. The target ignores the padding, like every name that it does not know.
    """
    user = state.get("user") if isinstance(state, dict) else None
    if not isinstance(user, dict):
        return state
    given = [key for key in MAIN_PARTS if key in user]
    if len(given) != 1:
        return state
    leaves = pytree.tree_structure(user[given[0]]).num_leaves
    parts = {}
    for key, part in user.items():
        if key not in given:
            parts[key] = part
            continue
        for name in sorted(MAIN_PARTS, key=lambda name: name != key):  # the source's own name first
            parts[name] = part
            parts[_AFTER + name] = [0] * (-leaves % max(1, num_chunks))
    return {**state, "user": parts}


def without_other_names(state: Any) -> Any:
    """Undoes :func:`with_main_parts`; any other state is returned unchanged."""
    user = state.get("user") if isinstance(state, dict) else None
    if not isinstance(user, dict):
        return state
    names = [key[len(_AFTER) :] for key in user if str(key).startswith(_AFTER)]
    if len(names) != len(MAIN_PARTS):
        return state
    dropped = {*names[1:], *(_AFTER + name for name in names)}
    return {**state, "user": {key: part for key, part in user.items() if key not in dropped}}


def receive_upstream(
    answer: Answer, metadata: str, step: int, key: str, num_chunks: int, deadline: Deadline, token: str, home: Home
) -> Any:
    """Reads the state that a source sends.

    Args:
        answer: the source's answer to the first request
        metadata, step, key, deadline, token: those of the first request, see `_http_client.ask`
        num_chunks: number of streams, if the key is not `full`
        home: chooses storages, see `_stream.read_object`

    Raises:
        CheckpointError, TimeoutError: see `CheckpointTransport.recv_checkpoint`
    """
    assert answer.body is not None
    what = describe(metadata, step, key)
    with closing(Meter(what, logger)) as meter:
        got = read_object(answer.body, what, answer.length, meter=meter, home=home)
        if key != FULL:
            got = _receive_chunks(got, metadata, step, num_chunks, deadline, token, meter, home)
        meter.done()
    return without_other_names(got)


def _receive_chunks(
    spec: object, metadata: str, step: int, n: int, deadline: Deadline, token: str, meter: Meter, home: Home
) -> Any:
    if not isinstance(spec, pytree.TreeSpec):
        raise CheckpointError(f"checkpoint of step {step} from {metadata}: its metadata is a {type(spec)}")
    threads = min(n, _MAX_STREAMS)
    with ThreadPoolExecutor(threads, "torchft-fetch", initializer=use_device, initargs=(current_device(),)) as pool:
        futures = [pool.submit(fetch, metadata, step, str(i), deadline, token, meter, home) for i in range(n)]
        chunks = [future.result() for future in futures]
    total = spec.num_leaves
    for i, chunk in enumerate(chunks):
        expected = len(range(i, total, n))
        if not isinstance(chunk, list) or len(chunk) != expected:
            got = len(chunk) if isinstance(chunk, list) else type(chunk)
            raise CheckpointError(
                f"checkpoint of step {step} from {metadata}: chunk {i} of {n} holds {got} values instead of "
                f"{expected}; num_chunks must be the same in every replica group"
            )
    leaves = [chunks[i % n][i // n] for i in range(total)]
    return pytree.tree_unflatten(leaves, spec)
