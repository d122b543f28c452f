"""The state of one step in the form in which it is sent."""

from __future__ import annotations

import json
import threading
from types import MappingProxyType
from typing import Dict, Mapping, Optional

import torch.utils._pytree as pytree

from torchft.checkpointing.codec.encoding import Encoded, decode
from torchft.checkpointing.codec.handshake import Name, StateRegion, pack_structure
from torchft.checkpointing.codec.requests import FULL, METADATA
from torchft.checkpointing.codec.stream import Pickled, pickle_object, storage_bytes
from torchft.checkpointing.codec.upstream import with_main_parts


class Checkpoint:
    """A state dict whose structure and plain values are encoded; its tensors are still the caller's.

    The streams for upstream peers are made when the first one is requested: for thousands of tensors that
    takes some tenths of a second, which the training thread should not wait for.

    Args:
        num_chunks: number of chunks in which upstream peers request it; 0: all in one stream
        names: names of storages that a target may have already, by address

    Raises:
        CheckpointError: the state refers to itself, or contains an object that cannot be pickled
    """

    def __init__(
        self, state_dict: object, num_chunks: int = 0, names: Mapping[int, Name] = MappingProxyType({})
    ) -> None:
        self.num_chunks = num_chunks
        self.encoded = Encoded(state_dict)
        storages = self.encoded.storages
        self.named = {i: names[ptr] for i, one in enumerate(storages) if (ptr := one.data_ptr()) in names}
        self.nbytes_on_devices = sum(storage.nbytes() for storage in storages if storage.device.type != "cpu")
        self._lock = threading.Lock()
        self._streams: Optional[Dict[str, Pickled]] = None

    def stream(self, key: str) -> Optional[Pickled]:
        """The answer to a request for this part; None if there is no such part."""
        with self._lock:
            if self._streams is None:
                self._streams = self._upstream_streams()
            return self._streams.get(key)

    def _upstream_streams(self) -> Dict[str, Pickled]:
        flats = [storage_bytes(storage) for storage in self.encoded.storages]
        state = decode(json.loads(self.encoded.structure), flats, "the state to send", trusted=True)
        state = with_main_parts(state, self.num_chunks)
        streams = {FULL: pickle_object(state)}
        if self.num_chunks > 0:
            leaves, spec = pytree.tree_flatten(state)
            streams[METADATA] = pickle_object(spec)
            for i in range(self.num_chunks):
                streams[str(i)] = pickle_object(leaves[i :: self.num_chunks])
        return streams

    def structure_frame(self, rest: bool = False) -> bytes:
        """Describes the storages that a target receives; with `rest` it has those that have names."""
        named = self.named if rest else {}
        regions = [
            StateRegion(0 if i in named else storage.nbytes(), str(storage.device), named.get(i))
            for i, storage in enumerate(self.encoded.storages)
        ]
        return pack_structure(regions, self.encoded.structure)
