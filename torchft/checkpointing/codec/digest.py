"""Digests of tensors, 64 bits each, computed on the tensor's device without copying it and without blocking
the host.

The bytes of a tensor are read as 32-bit words, in the order of memory. The digest of a chunk of 2**15 words
is the sum of ``word[i] * weight[i]`` modulo 2**64. The digest of a tensor of several chunks is the sum of
``chunk[c] * weight[c]`` over the chunks' digests. The weights are odd 64-bit numbers, pseudo-random and the
same in every process.

What it finds:

- *Each change within one word*, in particular each single flipped bit. If the word changes by d with 0 <
  abs(d) < 2**32, the chunk's digest changes by ``d * weight`` modulo 2**64. That product is 0 only if d is 0,
  because an odd number has an inverse modulo 2**64. For the same reason the change of one chunk changes the
  digest of the tensor.
- *Changes of several words*, except with a probability of at most 2**-32. The largest power of 2 that divides
  all their differences is at most 2**31, so the weighted sum of the differences is 0 modulo 2**64 for at most
  one in 2**32 of the possible weights.
- No attack: it is easy to construct two tensors with the same digest. Digests are meant for faults of
  hardware.

Length, dtype, shape and strides do not enter the digest, so compare only tensors with the same layout.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Optional

import torch

from torchft._torchft import _load
from torchft.checkpointing.codec.layout import local_part

_WORD = 4  # bytes
_CHUNK = 1 << 15  # words
# Chunks that a device takes at once: 32 MiB, whose products take 64 MiB for a moment.
_AT_ONCE = 256


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order in which they lie in memory, without a copy.

    For a DTensor these are the bytes of this rank's shard. A tensor with gaps between its elements is copied.
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
    """The digest of a tensor, or of its bytes from ``begin`` to ``end``, as an int64 tensor without
    dimensions.

    It is computed on the tensor's device, on the current stream; every device computes the same number.

    Args:
        tensor: a tensor of any dtype and shape; for a DTensor, this rank's shard is used.
        begin, end: offsets into the bytes of :func:`memory_of`; default: all of them.
    """
    return digest_bytes(memory_of(tensor)[begin:end])


def digest_bytes(memory: torch.Tensor) -> torch.Tensor:
    """The digest of bytes of :func:`memory_of`."""
    # Wrapper subclasses, and tensors without data, have no memory that C could read.
    if memory.is_cpu and type(memory) is torch.Tensor and memory.is_contiguous():
        # More than twice as fast as operations of PyTorch, which multiply only numbers of the same size.
        weights = _weights(memory.device)
        word = _load().digest(memory.data_ptr(), memory.nbytes, weights.data_ptr(), _CHUNK)
        return torch.tensor(word, dtype=torch.int64, device="cpu")
    return _by_operations(memory)


def _by_operations(memory: torch.Tensor) -> torch.Tensor:
    """The same digest by operations of PyTorch, on any device."""
    words = _words(memory)
    chunks = [sums for part in words.split(_AT_ONCE * _CHUNK) for sums in _on_device(part)]
    return _sum(chunks, words.device)


def combine(digests: Sequence[torch.Tensor], device: Optional[torch.device] = None) -> torch.Tensor:
    """One digest of several digests and their order. The change of a single one always changes it.

    Args:
        digests: results of :func:`digest`, at least one. A single one is returned as it is.
        device: the device of the result; by default the CPU, in which case the host waits for the digests.
    """
    device = device or torch.device("cpu")
    moved = [word.to(device, non_blocking=device.type != "cpu") for word in digests]
    return moved[0] if len(moved) == 1 else _sum(moved, device)


def _words(memory: torch.Tensor) -> torch.Tensor:
    """The 32-bit words of some bytes, the last one padded with zeros. Copies if padded or not aligned."""
    if rest := memory.numel() % _WORD:
        memory = torch.cat([memory, memory.new_zeros(_WORD - rest)])
    elif memory.storage_offset() % _WORD:
        memory = memory.clone()
    return memory.view(torch.int32)


def _on_device(words: torch.Tensor) -> list[torch.Tensor]:
    """The digests of all whole chunks as one tensor, by few kernels, and that of the remaining words."""
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
    """The weighted sum of the chunks' digests; each tensor of the list holds any number of them."""
    if not chunks:
        return torch.zeros((), dtype=torch.int64, device=device)
    sums = torch.cat([chunk.view(-1) for chunk in chunks])
    if sums.numel() == 1:
        return sums[0]
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, part in enumerate(sums.split(_CHUNK)):  # several only above 4 GiB
        total += (part * _weights(device)[: part.numel()]).sum() * (2 * number + 1)
    return total


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> torch.Tensor:
    """The weights of the words of a chunk; the chunks of a tensor have the same weights."""
    odd = bytearray(random.Random(20).randbytes(8 * _CHUNK))
    return (torch.frombuffer(odd, dtype=torch.int64) | 1).to(device)
