"""The digest of a tensor changes with each flipped bit, on any device and with any memory layout."""

from __future__ import annotations

import random
from typing import Any, Callable

import pytest
import torch
from torch.utils._pytree import tree_map_only

from torchft._torchft import _load
from torchft.checkpointing.codec import digest as digests
from torchft.checkpointing.codec.digest import _CHUNK, _by_operations, combine, digest, memory_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool]


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype) if dtype is torch.bool else (torch.randn(shape) * 9).to(dtype)


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flips a bit of a tensor's memory, counted from its beginning."""
    memory_of(tensor)[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = filled(dtype, 7, 3)
    before = digest(tensor).item()
    for bit in range(8 * tensor.numel() * tensor.element_size()):
        flip(tensor, bit)
        assert digest(tensor).item() != before, f"bit {bit}"
        flip(tensor, bit)
    assert digest(tensor).item() == before


def test_each_bit_of_the_last_and_the_first_word_of_each_chunk_counts() -> None:
    tensor = torch.randn(2 * _CHUNK + 5)
    before = digest(tensor).item()
    for word in (0, _CHUNK - 1, _CHUNK, 2 * _CHUNK - 1, 2 * _CHUNK, 2 * _CHUNK + 4):
        for bit in range(32):
            flip(tensor, 32 * word + bit)
            assert digest(tensor).item() != before
            flip(tensor, 32 * word + bit)


def test_pairs_of_flipped_bits_change_the_digest() -> None:
    """Pairs of sign bits are the critical case: in 64-bit words, any two flips of the highest bit cancel each
    other.
    """
    tensor = torch.randn(1000)
    before = digest(tensor).item()
    choose = random.Random(0)
    for _ in range(2000):
        one, other = choose.sample(range(1000), 2)
        bit = choose.choice((31, 31, choose.randrange(32)))
        flip(tensor, 32 * one + bit)
        flip(tensor, 32 * other + bit)
        assert digest(tensor).item() != before
        flip(tensor, 32 * one + bit)
        flip(tensor, 32 * other + bit)


def test_swapped_words_and_swapped_chunks_change_the_digest() -> None:
    tensor = torch.randn(2 * _CHUNK)
    swapped = tensor.clone()
    swapped[[3, 4]] = tensor[[4, 3]]
    assert digest(swapped).item() != digest(tensor).item()
    assert digest(torch.cat([tensor[_CHUNK:], tensor[:_CHUNK]])).item() != digest(tensor).item()


@pytest.mark.parametrize("words", [0, 1, 5, _CHUNK - 1, _CHUNK, _CHUNK + 1, 3 * _CHUNK + 7])
@pytest.mark.parametrize("more", [0, 1, 2, 3], ids="{} bytes more".format)
@pytest.mark.parametrize("offset", [0, 1], ids="offset {}".format)
def test_devices_compute_the_same_digest(words: int, more: int, offset: int) -> None:
    tensor = torch.randint(0, 256, (offset + 4 * words + more,), dtype=torch.uint8)[offset:]
    assert _by_operations(memory_of(tensor)).item() == digest(tensor).item()


def test_devices_compute_the_same_digest_of_more_chunks_than_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are over 4 GiB with chunks of the usual size."""
    monkeypatch.setattr(digests, "_CHUNK", 4)
    digests._weights.cache_clear()
    try:
        for words in range(80):
            tensor = torch.randn(words)
            assert _by_operations(memory_of(tensor)).item() == digest(tensor).item(), words
        one, other = torch.randn(60), torch.randn(4)
        assert digest(torch.cat([one, other])).item() != digest(torch.cat([other, one])).item()
    finally:
        digests._weights.cache_clear()


class Wrapper(torch.Tensor):
    """A tensor that holds another one, as those of quantized weights do."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # type: ignore[attr-defined]
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, arguments: Any, settings: Any = None) -> Any:
        bare = tree_map_only(Wrapper, lambda one: one.held, arguments)
        return tree_map_only(torch.Tensor, Wrapper, operation(*bare, **(settings or {})))


def test_a_tensor_without_memory_is_not_read() -> None:
    """It says that it is on the CPU, at the address 0."""
    tensor = torch.randn(4)
    wrapped = Wrapper(tensor)
    assert wrapped.is_cpu and wrapped.data_ptr() == 0
    made = digest(wrapped)
    assert isinstance(made, Wrapper) and made.held.item() == digest(tensor).item()


def test_bytes_with_gaps_are_no_memory() -> None:
    with pytest.raises(RuntimeError):
        digests.digest_bytes(torch.zeros(8, dtype=torch.uint8)[::2])


def test_digests_of_host_memory_are_there_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert digest(torch.arange(1000, dtype=torch.int32, device="cpu")).item() == KNOWN


@pytest.mark.parametrize(("length", "words"), [(-1, 4), (4, 0)])
def test_sizes_that_are_not_allowed_are_refused(length: int, words: int) -> None:
    with pytest.raises(ValueError, match="a length of 0 or more, and 1 word or more"):
        _load().digest(0, length, 0, words)


@pytest.mark.parametrize(
    "laid_out",
    [
        lambda: torch.randn(6, 5).t(),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(6, 10)[:, ::2],
        lambda: torch.randn(9).to(torch.bfloat16)[1:],  # not aligned to words
        lambda: torch.tensor(3.0),
        lambda: torch.empty(0, 4),
        lambda: torch.nn.Parameter(torch.randn(3)),
        lambda: torch.randn(4, dtype=torch.complex64),
    ],
)
def test_any_layout_is_digested_and_the_tensor_is_unchanged(laid_out: Callable[[], torch.Tensor]) -> None:
    tensor = laid_out()
    before = tensor.detach().clone()
    first = digest(tensor)
    assert first.shape == () and first.dtype is torch.int64
    assert digest(tensor).item() == first.item()
    assert torch.equal(tensor, before)


def test_memory_without_gaps_is_not_copied() -> None:
    for tensor in (torch.randn(6, 5), torch.randn(6, 5).t(), torch.randn(2, 3, 4, 5).permute(0, 2, 3, 1)):
        assert memory_of(tensor).untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_the_digest_of_a_part_is_that_of_its_bytes() -> None:
    tensor = torch.randn(1000)
    assert digest(tensor, 400, 804).item() == digest(tensor[100:201]).item()
    assert digest(tensor, 3996).item() == digest(tensor[999:]).item()


def test_the_order_of_several_tensors_counts() -> None:
    one, other = digest(torch.randn(3)), digest(torch.randn(3))
    assert combine([one, other]).item() != combine([other, one]).item()
    assert combine([one, other]).item() == combine([one.clone(), other.clone()]).item()


def test_digests_are_the_same_in_every_process_and_version() -> None:
    """Groups on other hosts, with another Python or PyTorch, must compute the same numbers."""
    assert digest(torch.arange(1000, dtype=torch.int32)).item() == KNOWN


KNOWN = -5486938082567246546
