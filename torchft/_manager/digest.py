"""Digests of tensors, 64 bits each, computed on the tensor's device without copying it and without blocking the host.

The bytes of a tensor are words of 32 bits, in the order in which they lie in memory. A chunk of 2**15 words has the sum
of ``word[i] * weight[i]`` modulo 2**64, and a tensor of several the sum of ``chunk[c] * weight[c]``. Weights are odd
numbers of 64 bits, pseudo-random and the same in every process.

What it finds:

- *A change within one word, so each single flipped bit, always.* The word changes by a d with 0 < abs(d) < 2**32, so
  the chunk by ``d * weight`` modulo 2**64. An odd number has an inverse modulo 2**64: the product is 0 only if d is.
  For the same reason the change of one chunk changes the sum of the chunks.
- *Changes of several words*, but for one in 2**32. The largest power of 2 that divides all their differences is at most
  2**31: the weighted sum of these is 0 modulo 2**64 for at most one in 2**32 of the possible weights.
- Nobody who wants two tensors to have one digest is hindered: this finds faults of hardware, not attacks.

Length, dtype, shape and strides are not in it: compare what is laid out alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Optional

import torch

from torchft.checkpointing._places import local_part

_WORD = 4  # bytes
# Words: as many elements as PyTorch computes on the thread that calls. Its other threads may be busy with the model, or
# their processors with another process: to wait for them took 20 ms on a machine with twice as many processes as cores.
_CHUNK = 1 << 15
# Chunks that a device takes at once: 32 MiB, whose products take 64 MiB for a moment.
_AT_ONCE = 256


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order in which they lie in memory, without a copy.

    Of a DTensor those of this rank's shard. A tensor whose elements do not lie side by side is copied.
    """
    tensor = local_part(tensor)
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
    elif torch.ops.aten.is_non_overlapping_and_dense(tensor):
        flat = tensor.as_strided((tensor.numel(),), (1,))
    else:
        flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8)


def digest(tensor: torch.Tensor, begin: int = 0, end: Optional[int] = None) -> torch.Tensor:
    """The digest of a tensor, or of its bytes from ``begin`` to ``end``, as an int64 without dimensions.

    It lies on the tensor's device, queued on the current stream; every device comes to the same number.

    Args:
        tensor: of any dtype and shape; of a DTensor this rank's shard.
        begin, end: in the bytes of :func:`memory_of`; default: all of them.
    """
    return digest_bytes(memory_of(tensor)[begin:end])


def digest_bytes(memory: torch.Tensor) -> torch.Tensor:
    """The digest of bytes of :func:`memory_of`."""
    words = _words(memory)
    if words.is_cpu:
        wide = torch.empty(min(_CHUNK, words.numel()), dtype=torch.int64)
        if words.numel() <= _CHUNK:
            return _on_cpu(words, wide)
        chunks = [_on_cpu(chunk, wide) for chunk in words.split(_CHUNK)]
    else:
        chunks = [sums for part in words.split(_AT_ONCE * _CHUNK) for sums in _on_device(part)]
    return _sum(chunks, words.device)


def combine(digests: Sequence[torch.Tensor], device: Optional[torch.device] = None) -> torch.Tensor:
    """One digest of several and their order; of one, itself. The change of one always changes it.

    Args:
        digests: of :func:`digest`.
        device: where it is to lie, the CPU by default: the host waits for devices then.
    """
    device = device or torch.device("cpu")
    moved = [word.to(device, non_blocking=device.type != "cpu") for word in digests]
    return moved[0] if len(moved) == 1 else _sum(moved, device)


def digest_all(tensors: Iterable[torch.Tensor]) -> int:
    """One number for several tensors and their order. It waits for their devices."""
    return int(combine([digest(tensor) for tensor in tensors]).item())


def _words(memory: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits, the last one filled up with zeros. Copied only where they are not aligned."""
    if rest := memory.numel() % _WORD:
        memory = torch.cat([memory, memory.new_zeros(_WORD - rest)])
    elif memory.storage_offset() % _WORD:
        memory = memory.clone()
    return memory.view(torch.int32)


def _on_cpu(chunk: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """The sum of a chunk; ``wide`` has room for it."""
    size = chunk.numel()
    return torch.dot(wide[:size].copy_(chunk), _weights(chunk.device)[:size])


def _on_device(words: torch.Tensor) -> list[torch.Tensor]:
    """The sums of whole chunks in one tensor, by few kernels, and that of the rest."""
    weights = _weights(words.device)
    whole = words.numel() // _CHUNK * _CHUNK
    sums = []
    if whole:
        sums.append((words[:whole].view(-1, _CHUNK) * weights).sum(1))
    if whole < words.numel():
        rest = words[whole:]
        sums.append((rest * weights[: rest.numel()]).sum().view(1))
    return sums


def _sum(chunks: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The weighted sum of chunks, of any number each."""
    if not chunks:
        return torch.zeros((), dtype=torch.int64, device=device)
    sums = torch.cat([chunk.view(-1) for chunk in chunks])
    if sums.numel() == 1:
        return sums[0]
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, part in enumerate(sums.split(_CHUNK)):  # of more than 4 GiB there are several
        total += (part * _weights(device)[: part.numel()]).sum() * (2 * number + 1)
    return total


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """Of the words of a chunk, and of chunks."""
    odd = bytearray(random.Random(20).randbytes(8 * _CHUNK))
    return (torch.frombuffer(odd, dtype=torch.int64) | 1).to(device)
