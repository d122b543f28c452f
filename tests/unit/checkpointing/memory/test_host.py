from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from tests.unit.resident import needs_proc, resident
from torchft.checkpointing.memory import host
from torchft.checkpointing.memory.host import HostMemory, huge_pages

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def in_huge_pages() -> int:
    """Bytes of this process in huge pages."""
    smaps = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in smaps if line.startswith("AnonHugePages:"))


@pytest.mark.parametrize("advice", [None, getattr(mmap, "MADV_HUGEPAGE", None)])
@pytest.mark.parametrize("size", [1000, (1 << 17) + 1, 65 << 20])
def test_taken_memory_is_zero(monkeypatch: pytest.MonkeyPatch, advice: int | None, size: int) -> None:
    monkeypatch.setattr(host, "huge_pages", lambda: advice)
    used = [torch.ones(size, dtype=torch.uint8) for _ in range(4)]
    del used  # the allocator mostly returns this memory next
    taker = HostMemory()
    for _ in range(4):
        assert not taker.take(size).any()


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="here are no huge pages"
)
@pytest.mark.parametrize("sizes", [[65 << 20], [1 << 20] * 70, [1000, (5 << 20) + 1, 200_001] * 12])
def test_received_tensors_are_in_huge_pages(monkeypatch: pytest.MonkeyPatch, sizes: list[int]) -> None:
    """This holds for large tensors and for consecutive ones smaller than a page of 2 MB."""
    # also where this host's balloon makes them slow
    monkeypatch.setattr(host, "huge_pages", lambda: mmap.MADV_HUGEPAGE)
    before, taker = in_huge_pages(), HostMemory()
    taken = [taker.take(size) for size in sizes]
    for i, flat in enumerate(taken):
        flat.fill_(i)
    assert in_huge_pages() - before > 0.8 * sum(sizes)
    for i, (flat, size) in enumerate(zip(taken, sizes)):
        assert flat.untyped_storage().nbytes() == size and bool((flat == i).all())


@pytest.mark.parametrize(
    ("features", "used"),
    [
        ([], True),  # no virtual machine, or one without a balloon
        (["0" * 64], True),
        (["01100" + "0" * 59], True),
        (["01100" + "1" + "0" * 58], False),  # as read on a host that reports free pages
        (["0" * 64, "000001"], False),
        ([""], True),
    ],
)
def test_huge_pages_are_not_used_where_the_host_takes_back_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: list[str], used: bool
) -> None:
    monkeypatch.setattr(host, "_BALLOONS", f"{tmp_path}/*/features")
    for number, text in enumerate(features):
        (tmp_path / f"virtio{number}").mkdir()
        (tmp_path / f"virtio{number}" / "features").write_text(text + "\n")
    assert huge_pages.__wrapped__() == (mmap.MADV_HUGEPAGE if used else mmap.MADV_NOHUGEPAGE)


@needs_proc
def test_memory_that_is_prepared_is_used_already() -> None:
    memory, size, slack = HostMemory(), 8 << 20, 2 << 20
    before = resident()
    memory.prepare([size, size, 64])
    assert resident() - before > 2 * size - slack
    prepared = memory.take(size), memory.take(size)
    assert prepared[0].data_ptr() != prepared[1].data_ptr() and not any(one.any() for one in prepared)
    assert resident() - before < 2 * size + slack
    further = memory.take(size).fill_(1)
    assert resident() - before > 3 * size - slack
    assert not any(one.any() for one in prepared) and further.all()


@pytest.mark.parametrize("huge", [None, mmap.MADV_HUGEPAGE])
def test_no_memory(monkeypatch: pytest.MonkeyPatch, huge: int | None) -> None:
    monkeypatch.setattr(host, "huge_pages", lambda: huge)
    for nbytes in (1 << 62, 1 << 100):
        with pytest.raises((RuntimeError, MemoryError)):
            HostMemory().take(nbytes)
