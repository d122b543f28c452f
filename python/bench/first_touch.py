"""The rate of the first use of memory, which limits a heal that receives into new memory.

    python python/bench/first_touch.py            # 1 GB, 5 rounds
    python python/bench/first_touch.py --gb 4     # more than the machine has used lately

"As found" may include work of the host of a virtual machine, which takes back unused memory and supplies it
again when it is used. Before each of the other rows, as much memory is used and freed, so they show only the
kernel's work: a page fault for each page, and filling it with zeros.
"""

from __future__ import annotations

import argparse
import mmap
import time

from common import Spread, fetch_memory, markdown_table

PAGES = {"4 KB": "MADV_NOHUGEPAGE", "2 MB": "MADV_HUGEPAGE"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the first use of memory.")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    nbytes = int(args.gb * 1e9) >> 21 << 21
    found = [_touch(nbytes, "2 MB")]
    rows: dict[str, list[tuple[float, float]]] = {pages: [] for pages in PAGES}
    for _ in range(args.rounds):
        for pages, mine in rows.items():
            fetch_memory(nbytes + (64 << 20))
            mine.append(_touch(nbytes, pages))
    cells = [
        [name, *(Spread.of(gb_per_s[i] for gb_per_s in mine).text() for i in range(2))]
        for name, mine in {"2 MB, as found": found, **rows}.items()
    ]
    print(markdown_table(["pages", "first use, GB/s", "second use, GB/s"], cells))


def _touch(nbytes: int, pages: str) -> tuple[float, float]:
    """Return GB/s of the first and of the second write to memory, by one thread."""
    zeros = bytes(4 << 20)
    seconds = []
    with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(getattr(mmap, PAGES[pages]))
        for _ in range(2):
            begin = time.perf_counter()
            for start in range(0, nbytes, len(zeros)):
                end = min(nbytes, start + len(zeros))
                memory[start:end] = zeros[: end - start]
            seconds.append(time.perf_counter() - begin)
    return nbytes / seconds[0] / 1e9, nbytes / seconds[1] / 1e9


if __name__ == "__main__":
    main()
