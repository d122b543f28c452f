"""The state of one step in the form in which it is sent."""

from __future__ import annotations

from typing import Dict, Iterator, Optional

import torch
import torch.utils._pytree as pytree

from torchft.checkpointing._stream import Pickled, pickle_object

FULL = "full"
METADATA = "metadata"


class Checkpoint:
    """A state dict whose structure and plain values are pickled; its tensors are still the caller's.

    Args:
        state_dict: the state
        num_chunks: how many chunks the peers ask for; 0: the whole in one
    """

    def __init__(self, state_dict: object, num_chunks: int) -> None:
        self.num_chunks = num_chunks
        self._streams: Dict[str, Pickled] = {FULL: pickle_object(state_dict)}
        if num_chunks > 0:
            leaves, spec = pytree.tree_flatten(state_dict)
            self._streams[METADATA] = pickle_object(spec)
            for i in range(num_chunks):
                self._streams[str(i)] = pickle_object(leaves[i::num_chunks])
        self.nbytes = sum(storage.nbytes() for storage in self.storages())

    def stream(self, key: str) -> Optional[Pickled]:
        """What a request for this part is answered with; None: there is no such part."""
        return self._streams.get(key)

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """Each storage of the state once, in the order in which they are sent."""
        seen = set()
        for stream in self._streams.values():
            for storage in stream.storages:
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    yield storage
