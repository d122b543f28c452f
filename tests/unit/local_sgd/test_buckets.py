"""Tensors are packed into buckets as in upstream, so that a job can contain groups of torchft and of
upstream.
"""

from __future__ import annotations

import pytest
import torch

from torchft.local_sgd.buckets import USE_BUCKETIZATION_ENV, allocate, bucket_bytes


def sizes(numels: list[int], cap: int | None, dtype: torch.dtype = torch.float32) -> list[int]:
    return [piece.numel() for piece in allocate([torch.empty(n, dtype=dtype) for n in numels], cap).pieces]


@pytest.mark.parametrize(
    ("numels", "cap_mb", "pieces"),
    [  # as measured with upstream
        ([131072, 131072, 1, 262144, 262145, 3], 1, [262144, 262144, 262144, 5]),
        ([2621440, 2621440, 2621440, 2621440, 1], 1024, [10485761]),
        ([3, 4], 1024, [7]),
    ],
)
def test_tensors_are_concatenated_and_cut_at_the_cap(
    numels: list[int], cap_mb: int, pieces: list[int]
) -> None:
    assert sizes(numels, cap_mb << 20) == pieces


def test_a_cap_is_in_bytes() -> None:
    assert sizes([10], 16) == [4, 4, 2]
    assert sizes([10], 16, torch.bfloat16) == [8, 2]
    assert sizes([3], 1) == [1, 1, 1]  # never less than one value


def test_without_a_cap_each_tensor_is_sent_by_itself() -> None:
    assert sizes([10, 3], None) == [10, 3]


def test_views_share_the_memory_of_the_buckets() -> None:
    like = [torch.empty(2, 3), torch.empty(4, dtype=torch.float64), torch.empty(()), torch.empty(0, 5)]
    buffers = allocate(like, cap=16)
    assert [(v.shape, v.dtype) for v in buffers.views] == [(t.shape, t.dtype) for t in like]
    for n, view in enumerate(buffers.views):
        view.fill_(n)
    sent = {
        dtype: torch.cat([p for p in buffers.pieces if p.dtype == dtype])
        for dtype in (like[0].dtype, like[1].dtype)
    }
    assert sent[torch.float32].tolist() == [0.0] * 6 + [2.0]
    assert sent[torch.float64].tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("use", "variable", "cap_mb", "expected"),
    [
        (False, None, None, None),
        (False, None, 3, None),
        (True, None, None, 1 << 30),
        (True, "False", 3, 3 << 20),
        (False, "True", 3, 3 << 20),
        (False, "1", 3, 3 << 20),
        (False, "0", None, None),
        (False, "False", None, None),
        (False, "", None, None),
    ],
)
def test_settings(
    use: bool, variable: str | None, cap_mb: int | None, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv(USE_BUCKETIZATION_ENV, variable)
    assert bucket_bytes(use, cap_mb) == expected
