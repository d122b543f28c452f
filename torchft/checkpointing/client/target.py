"""The state of the healing group: the tensors and devices for the received values."""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import Any, Callable, Dict, Mapping, Optional, Sequence

import torch
import torch.utils._pytree as pytree

from torchft.checkpointing.codec.encoding import Path, is_dtensor, with_flags
from torchft.checkpointing.codec.layout import local_part, same_memory, tensors_by_path
from torchft.checkpointing.memory.staging import Uploads

logger: logging.Logger = logging.getLogger(__name__)

CPU = torch.device("cpu")


class TargetState:
    """The state that a healing group already has.

    Args:
        read: returns the group's state, with the structure of the received one
        writable: whether its tensors may be written during the transfer, because nothing reads them and they
            are not needed if the transfer fails. Otherwise received tensors stay in host memory until
            `settle`.
        waited_for: whether the other groups wait for this transfer as long as data arrives. Its timeout is
            then one without any data, and not of the whole transfer.
        has: returns a storage by its name, if the group has all that the source names: these are not
            received. The KeyError that it raises for another name ends the transfer.
    """

    def __init__(
        self,
        read: Callable[[], object],
        writable: bool,
        waited_for: bool = False,
        has: Optional[Callable[[int, str], torch.UntypedStorage]] = None,
    ) -> None:
        self._read = read
        self.has = has
        self.writable = writable
        self.waited_for = waited_for
        # the source's devices of the tensors that were received in host memory
        self.devices: Dict[Path, str] = {}

    def own(self) -> Dict[Path, torch.Tensor]:
        """The local tensors by path; none, and so new ones, if the group's state cannot be read."""
        try:
            return tensors_by_path(self._read())
        except Exception as error:
            logger.warning(
                "this group's own state cannot be read, so the peer's is received in new memory: %r", error
            )
            return {}

    def settle(self, state: Any, timeout: float = math.inf) -> Any:
        """Copies a received state from host memory to the devices: into local tensors with the same shape and
        dtype, else into new ones. Call it on the training thread while nothing else reads the tensors. The
        devices have the state when it returns.

        Args:
            state: the received state
            timeout: seconds within which a device must take a part of it, of some MB

        Returns:
            the state with the tensors on their devices. Tensors that belong in host memory are unchanged.

        Raises:
            TimeoutError: a device did not; the tensors may be partly old and partly new
        """
        if not self.devices:
            return state
        own = self.own()
        buffers, uploads = BufferMap(own, self.devices), Uploads(timeout)

        def settled(at: Sequence[object], leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            path = tuple(str(key) for key in at)
            mine = own.get(path)
            if mine is None or mine.device == CPU or not _alike(mine, leaf):
                home = buffers.of(self.devices.get(path, "cpu"))
                return leaf if home == CPU else _moved(leaf, home, uploads)
            if not same_memory(mine, leaf):
                uploads.copy(local_part(mine), local_part(leaf))
            return mine

        with torch.no_grad():
            state = pytree.tree_map_with_path(settled, state)
            uploads.finish()
            return state


class BufferMap:
    """Chooses the device for a tensor that a group does not have yet.

    Device indices of the source have no meaning here. For a tensor on device D of the source, the chosen
    device is the one that holds most of this group's counterparts of the source's tensors on D. Only devices
    that the group's own tensors use are chosen.
    """

    def __init__(self, own: Mapping[Path, torch.Tensor], devices: Mapping[Path, str]) -> None:
        self._used = {tensor.device for tensor in own.values()}
        self._counts: Dict[str, Counter[torch.device]] = {}
        for path in own.keys() & devices.keys():
            self._counts.setdefault(devices[path], Counter())[own[path].device] += 1

    def of(self, device: str) -> torch.device:
        """The local device for a tensor on this device of the source; host memory if not known."""
        if device == "cpu":
            return CPU
        if device in self._counts:
            return self._counts[device].most_common(1)[0][0]
        alike = [used for used in self._used if used.type == device.partition(":")[0]]
        return alike[0] if len(alike) == 1 else CPU


def _alike(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether one tensor can be filled with the content of the other."""
    a, b = local_part(mine), local_part(theirs)
    return is_dtensor(mine) == is_dtensor(theirs) and a.shape == b.shape and a.dtype == b.dtype


def _moved(tensor: torch.Tensor, device: torch.device, uploads: Uploads) -> torch.Tensor:
    """Copies the tensor to new memory on a device."""
    flags = tensor.requires_grad + 2 * isinstance(tensor, torch.nn.Parameter)
    local = local_part(tensor)
    there = torch.empty_like(local, device=device)
    uploads.copy(there, local)
    if is_dtensor(tensor):
        from torch.distributed.tensor import DTensor

        there = DTensor(there, tensor._spec, requires_grad=False)  # type: ignore[attr-defined]
    return with_flags(there, flags)
