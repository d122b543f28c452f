"""Receives a state in the upstream format: one stream, or several that each carry a part of the state's leaves."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Dict

import torch
import torch.utils._pytree as pytree

from torchft.checkpointing.client.deadline import Deadline
from torchft.checkpointing.client.progress import Meter
from torchft.checkpointing.client.request import Answer, describe, fetch
from torchft.checkpointing.client.transfer import _same_kind
from torchft.checkpointing.codec.encoding import Path
from torchft.checkpointing.codec.layout import local_part, tensors_by_path
from torchft.checkpointing.codec.requests import FULL
from torchft.checkpointing.codec.stream import Home, read_object
from torchft.checkpointing.codec.upstream import without_other_names
from torchft.checkpointing.transport import CheckpointError
from torchft.utils import current_device, use_device

logger: logging.Logger = logging.getLogger(__name__)

_MAX_STREAMS = 16  # chunks fetched at the same time


def receive_upstream(
    answer: Answer, metadata: str, step: int, key: str, num_chunks: int, deadline: Deadline, token: str, home: Home
) -> Any:
    """Reads the state that a source sends.

    Args:
        answer: the source's answer to the first request
        metadata, step, key, deadline, token: those of the first request, see `request.ask`
        num_chunks: number of streams, if the key is not `full`
        home: chooses storages, see `stream.read_object`

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


class UpstreamHomes:
    """Chooses the devices for the storages of a state in the upstream format.

    Args:
        what: names the transfer in errors
        in_host_memory: whether all of them stay in host memory
    """

    def __init__(self, what: str, in_host_memory: bool) -> None:
        self._what = what
        self._in_host_memory = in_host_memory
        self._devices: Dict[int, str] = {}  # by the address of their memory

    def of(self, storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
        if device == "cpu":
            return storage
        if self._in_host_memory:
            if storage.nbytes():
                self._devices[storage.data_ptr()] = device
            return storage
        return storage.to(device=_same_kind(self._what, device))

    def devices(self, state: object) -> Dict[Path, str]:
        """The source's devices for the tensors of a received state that it has on devices."""
        if not self._devices:
            return {}
        at = {path: local_part(tensor).untyped_storage() for path, tensor in tensors_by_path(state).items()}
        return {path: self._devices[s.data_ptr()] for path, s in at.items() if s.data_ptr() in self._devices}
