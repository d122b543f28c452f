"""The state of one step as a source offers it: by reference, or copied."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ContextManager, Dict, Iterator, List, Optional

import torch
import torch.utils._pytree as pytree

from torchft.checkpointing._stream import Pickled, pickle_object, storage_bytes, tensor_memory

FULL = "full"
METADATA = "metadata"
# Bytes. One call sends so much without the GIL, and its deadline holds for so much; device memory is staged by it.
_SEND_BLOCK = 32 << 20


class _After:
    """Copies made under it, by any thread, come after the work that was queued on a device when it was made."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type in ("cuda", "xpu"):
            self._backend = getattr(torch, device.type)
            event = self._backend.Event()
            event.record(self._backend.current_stream(device))
            self._stream = self._backend.Stream(device)
            self._stream.wait_event(event)

    def context(self) -> ContextManager[Any]:
        return nullcontext() if self._stream is None else self._backend.stream(self._stream)


class Block:
    """One storage of the state; after `copy` it is ours and the source's tensor may change."""

    def __init__(self, storage: torch.UntypedStorage, after: _After) -> None:
        self.nbytes = storage.nbytes()
        self.copied = threading.Event()
        self._flat = storage_bytes(storage)
        self._after = after

    def copy(self) -> None:
        mine = torch.empty(self.nbytes, dtype=torch.uint8)
        with self._after.context():
            mine.copy_(self._flat)  # torch releases the GIL here
        self._flat = mine
        self.copied.set()

    def read(self) -> Iterator[memoryview]:
        """The bytes, in pieces; each is valid until the next is asked for."""
        flat = self._flat
        for start in range(0, self.nbytes, _SEND_BLOCK):
            piece = flat[start : start + _SEND_BLOCK]
            if piece.device.type != "cpu":
                with self._after.context():
                    piece = piece.cpu()
            yield tensor_memory(piece)


@dataclass
class Stream:
    """What one request is answered with."""

    prefix: bytes
    blocks: List[Block]
    nbytes: int


class Checkpoint:
    """A state dict, ready to be sent: structure and plain values are pickled at once, tensors are read later.

    Args:
        state_dict: the state
        num_chunks: how many chunks the peers ask for; 0: the whole in one
    """

    def __init__(self, state_dict: object, num_chunks: int) -> None:
        self._blocks: Dict[int, Block] = {}
        self._after: Dict[torch.device, _After] = {}
        self._streams: Dict[str, Stream] = {FULL: self._stream(state_dict)}
        if num_chunks > 0:
            leaves, spec = pytree.tree_flatten(state_dict)
            self._streams[METADATA] = self._stream(spec)
            for i in range(num_chunks):
                self._streams[str(i)] = self._stream(leaves[i::num_chunks])
        self.num_chunks = num_chunks
        self.nbytes = sum(block.nbytes for block in self._blocks.values())
        self.error: Optional[Exception] = None  # why a copy failed
        self._copier: Optional[threading.Thread] = None
        self._cancelled = False
        self.is_copy = False

    def _stream(self, obj: object) -> Stream:
        pickled: Pickled = pickle_object(obj)
        return Stream(pickled.prefix, [self._block(storage) for storage in pickled.storages], pickled.nbytes)

    def _block(self, storage: torch.UntypedStorage) -> Block:
        """The block of this storage; one, however many streams and tensors it is in."""
        block = self._blocks.get(storage._cdata)
        if block is None:
            after = self._after.get(storage.device)
            if after is None:
                after = self._after[storage.device] = _After(storage.device)
            block = self._blocks[storage._cdata] = Block(storage, after)
        return block

    def get(self, key: str) -> Optional[Stream]:
        """The stream under this name, None if there is none."""
        return self._streams.get(key)

    def copy(self, inline_block: int, inline_total: int) -> None:
        """Starts to copy the tensors; the caller may go on, and must not change them before `join`.

        The small ones are copied before this returns, because those are what a forward pass changes (the statistics of
        a batch norm); the large ones wait for the optimizer. Sending may begin before the last is copied.

        Args:
            inline_block: bytes of the largest tensor that counts as small
            inline_total: bytes of all small ones together; the rest counts as large
        """
        self.is_copy = True
        rest = []
        try:
            for block in self._blocks.values():
                if block.nbytes <= min(inline_block, inline_total):
                    inline_total -= block.nbytes
                    block.copy()
                else:
                    rest.append(block)
        except Exception as error:
            self._fail(error)
            return
        if rest:
            self._copier = threading.Thread(target=self._copy_rest, args=(rest,), daemon=True, name="torchft-snapshot")
            self._copier.start()

    def _copy_rest(self, rest: List[Block]) -> None:
        try:
            for block in rest:
                if self._cancelled:
                    raise ConnectionAbortedError("the transport was shut down")
                block.copy()
        except Exception as error:
            self._fail(error)

    def cancel(self) -> None:
        """Ends a copy that is under way, after the tensor that it is at. The checkpoint is of no use afterwards."""
        self._cancelled = True

    def _fail(self, error: Exception) -> None:
        self.error = error
        for block in self._blocks.values():
            block.copied.set()

    def join(self, timeout: float) -> bool:
        """Waits until the tensors are copied; False if they are not, after `timeout` seconds."""
        if self._copier is not None:
            self._copier.join(timeout)
            return not self._copier.is_alive()
        return True

    def read(self, stream: Stream, timeout: float) -> Iterator[memoryview]:
        """The bytes of a stream.

        Args:
            stream: one of this checkpoint's
            timeout: limit for the wait for each copy, in seconds
        """
        yield memoryview(stream.prefix)
        for block in stream.blocks:
            if self.is_copy:
                if not block.copied.wait(timeout):
                    raise TimeoutError(f"a tensor was not copied within {timeout} s")
                if self.error is not None:
                    raise self.error
            yield from block.read()
