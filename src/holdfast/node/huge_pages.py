"""The heap of a started node in huge pages.

Between two tokens or messages other processes run, and the processor forgets where our
pages are. One entry for 2 MiB instead of 512 of 4 KiB spares a token 8 % of its
processor time (docs/internals/speed.md).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE_BYTES = 2 << 20
MADV_COLLAPSE = 25
"""Linux 6.1 and later; others refuse it, and nothing changes."""


def use_huge_pages() -> int:
    """Move what the heap has now; returns the bytes. It grows as it did before.

    Takes a few milliseconds, so only at startup. Nothing depends on it: where the
    kernel cannot, or was told never to, it returns 0.
    """
    if sys.platform != "linux":
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for first, end in _heap(Path("/proc/self/smaps").read_text()):
        first, end = -(-first // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES
        if first < end and madvise(first, end - first, MADV_COLLAPSE) == 0:
            moved += end - first
    return moved


def _heap(smaps: str) -> Iterator[tuple[int, int]]:
    """The anonymous regions that are mostly in use: not the stacks of threads, whose
    unused part would begin to take memory.
    """
    first = end = 0
    for line in smaps.splitlines():
        words = line.split()
        if words[0] == "Rss:" and int(words[1]) * 1024 * 2 > end - first:
            yield first, end
        elif "-" in words[0]:
            is_heap = words[1].startswith("rw") and words[5:] in ([], ["[heap]"])
            first, end = (int(at, 16) for at in words[0].split("-")) if is_heap else (0, 0)
