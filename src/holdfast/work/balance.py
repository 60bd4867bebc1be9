"""Which worker should own which partition, and in which partition and lane a stream lies. (Pure.)

Rendezvous hashing: every worker computes the same answer from the list of the living, and when one comes or goes only
its own share moves.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from zlib import crc32

from holdfast.work.job import LANES, PARTITIONS


def place_of(stream: str) -> tuple[int, int]:
    """The (partition, lane) of a stream; the same in every process and release."""
    number = crc32(stream.encode())
    return number % PARTITIONS, number // PARTITIONS % LANES


def share_of(instance: int, alive: Iterable[int]) -> set[int]:
    """The partitions that belong to this instance while these are alive."""
    living = list(alive)
    return {p for p in range(PARTITIONS) if max(living, key=lambda other: _weight(p, other)) == instance}


def _weight(partition: int, instance: int) -> bytes:
    return blake2b(f"{partition}:{instance}".encode(), digest_size=8).digest()
