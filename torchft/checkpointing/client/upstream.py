"""Receives a state in the upstream format: one stream, or several that each carry some of the leaves."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Callable, Dict, Optional

import torch
import torch.utils._pytree as pytree

from torchft.checkpointing.client.places import device_like
from torchft.checkpointing.client.progress import TransferProgress
from torchft.checkpointing.client.request import Answer, Request
from torchft.checkpointing.client.target import TargetState
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
    the devices of the tensors, which stay in host memory; without it they are received on devices of this
    process. CheckpointError, TimeoutError: see `CheckpointTransport.recv_checkpoint`.
    """
    progress = TransferProgress(request.what, logger)
    devices: Dict[int, str] = {}  # the source's devices of storages, by the address of their memory here

    def home(storage: torch.UntypedStorage, device: str) -> torch.UntypedStorage:
        if device != "cpu" and target is None:
            return storage.to(device=device_like(request.what, device))
        if device != "cpu" and storage.nbytes():
            devices[storage.data_ptr()] = device
        return storage

    def read(part: Request, answer: Answer) -> Any:
        assert answer.body is not None
        return read_object(answer.body, part.what, answer.length, home, progress.expect, progress.count)

    def fetch(key: str) -> Any:
        part = replace(request, key=key)
        with part.ask() as answer:
            return read(part, answer)

    got = read(request, answer)
    if request.key != FULL:
        got = _receive_chunks(request, got, num_chunks, fetch)
    progress.done()
    got = without_other_names(got)
    if target is not None:
        at = {path: local_part(tensor).untyped_storage() for path, tensor in tensors_by_path(got).items()}
        target.devices = {path: devices[s.data_ptr()] for path, s in at.items() if s.data_ptr() in devices}
    return got


def _receive_chunks(request: Request, spec: object, n: int, fetch: Callable[[str], Any]) -> Any:
    what = f"checkpoint of step {request.step} from {request.metadata}"
    if not isinstance(spec, pytree.TreeSpec):
        raise CheckpointError(f"{what}: its metadata is a {type(spec)}")
    threads = min(n, _MAX_STREAMS)
    with ThreadPoolExecutor(
        threads, "torchft-fetch", initializer=use_device, initargs=(current_device(),)
    ) as pool:
        chunks = list(pool.map(fetch, [str(i) for i in range(n)]))
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
