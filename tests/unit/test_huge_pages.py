"""The heap in huge pages: which regions, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.node.huge_pages import _heap

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
REGION = "{first:x}-{end:x} {rights} 00000000 00:00 0 {name}\nSize: 4096 kB\nRss: {rss} kB\n"


def region(number: int, rss: int = 4096, rights: str = "rw-p", name: str = "") -> str:
    first = number << 22
    return REGION.format(first=first, end=first + (1 << 22), rss=rss, rights=rights, name=name)


def test_only_anonymous_memory_that_is_mostly_used_is_moved() -> None:
    regions = [
        region(1, name="[heap]"),
        region(2),
        region(3, rss=1000),  # the stack of a thread
        region(4, rights="r-xp", name="/lib/libpython3.so"),
        region(5, name="/dev/shm/x"),
        region(6, name="[stack]"),
        region(7, rights="---p"),
        region(8),
    ]
    found = [first >> 22 for first, end in _heap("".join(regions)) if end > first]
    assert found == [1, 2, 8]


@pytest.mark.skipif(
    not ENABLED.exists() or "[never]" in ENABLED.read_text(), reason="no huge pages here"
)
def test_heap_of_a_process_is_moved_and_keeps_what_it_holds() -> None:
    program = """
from holdfast.node.huge_pages import use_huge_pages
held = [str(number) * 10 for number in range(300_000)]
moved = use_huge_pages()
assert held == [str(number) * 10 for number in range(300_000)]
huge = sum(int(line.split()[1]) for line in open("/proc/self/smaps_rollup")
           if line.startswith("AnonHugePages:"))
assert huge * 1024 >= moved, (huge, moved)
print(moved)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) % (2 << 20) == 0
