"""Receives a state in the upstream format: one stream, or several that each carry some of the leaves."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any, Dict, Optional

import torch
import torch.utils._pytree as pytree

from torchft.checkpointing.client.places import device_like, moved_into
from torchft.checkpointing.client.progress import TransferProgress
from torchft.checkpointing.client.request import Answer, Request
from torchft.checkpointing.client.target import TargetState
from torchft.checkpointing.codec.encoding import Path
from torchft.checkpointing.codec.layout import local_part, tensors_by_path
from torchft.checkpointing.codec.requests import FULL
from torchft.checkpointing.codec.stream import read_object
from torchft.checkpointing.codec.upstream import without_other_names
from torchft.checkpointing.transport import CheckpointError
from torchft.utils import current_device, use_device

logger: logging.Logger = logging.getLogger(__name__)

_MAX_STREAMS = 16  # chunks fetched at the same time


def receive_upstream(request: Request, answer: Answer, num_chunks: int, target: Optional[TargetState]) -> Any:
    """Reads the state that a source sends, in `num_chunks` streams unless the key is `full`. `target` gets
    the devices of the tensors; without it they are received on devices of this process. CheckpointError,
    TimeoutError: see `CheckpointTransport.recv_checkpoint`.
    """
    with closing(TransferProgress(request.what, logger)) as progress:
        streams = _Streams(request.what, progress, in_host_memory=target is not None)
        got = streams.read(request, answer)
        if request.key != FULL:
            got = _receive_chunks(request, got, num_chunks, streams)
        progress.done()
    got = without_other_names(got)
    if target is None:
        return got
    if target.strict:
        return moved_into(target.own(), got, request.what)
    target.devices = streams.devices(got)
    return got


class _Streams:
    """Reads the streams of one state, on any threads; with `in_host_memory` all storages stay there."""

    def __init__(self, what: str, progress: TransferProgress, in_host_memory: bool) -> None:
        self._what = what
        self._progress = progress
        self._in_host_memory = in_host_memory
        # The source's devices of storages, by the address of their memory here.
        self._devices: Dict[int, str] = {}

    def read(self, request: Request, answer: Answer) -> Any:
        assert answer.body is not None
        return read_object(answer.body, request.what, answer.length, counter=self._progress, home=self._home)

    def fetch(self, request: Request) -> Any:
        with request.ask() as answer:
            return self.read(request, answer)

    def _home(self, storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
        if device == "cpu":
            return storage
        if not self._in_host_memory:
            return storage.to(device=device_like(self._what, device))
        if storage.nbytes():
            self._devices[storage.data_ptr()] = device
        return storage

    def devices(self, state: object) -> Dict[Path, str]:
        """The source's devices for the tensors of a received state that it has on devices."""
        if not self._devices:
            return {}
        at = {path: local_part(tensor).untyped_storage() for path, tensor in tensors_by_path(state).items()}
        return {path: self._devices[s.data_ptr()] for path, s in at.items() if s.data_ptr() in self._devices}


def _receive_chunks(request: Request, spec: object, n: int, streams: _Streams) -> Any:
    what = f"checkpoint of step {request.step} from {request.metadata}"
    if not isinstance(spec, pytree.TreeSpec):
        raise CheckpointError(f"{what}: its metadata is a {type(spec)}")
    threads = min(n, _MAX_STREAMS)
    with ThreadPoolExecutor(
        threads, "torchft-fetch", initializer=use_device, initargs=(current_device(),)
    ) as pool:
        chunks = list(pool.map(streams.fetch, [replace(request, key=str(i)) for i in range(n)]))
    total = spec.num_leaves
    for i, chunk in enumerate(chunks):
        expected = len(range(i, total, n))
        if not isinstance(chunk, list) or len(chunk) != expected:
            got = len(chunk) if isinstance(chunk, list) else type(chunk)
            raise CheckpointError(
                f"{what}: chunk {i} of {n} holds {got} values instead of {expected}; num_chunks must be the "
                "same in every replica group"
            )
    return pytree.tree_unflatten([chunks[i % n][i // n] for i in range(total)], spec)
