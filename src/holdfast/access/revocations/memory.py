"""Revocations in memory: the reference adapter, and for servers in tests."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.access.revocations.contract import (
    ENTRIES_MAX,
    Revocation,
    RevocationKey,
    full,
    merged,
    unknown,
)
from holdfast.clock import Clock


class MemoryRevocations:
    """See ``contract.Revocations``."""

    def __init__(self, clock: Clock, entries_max: int = ENTRIES_MAX) -> None:
        self.entries_max = entries_max
        self._clock = clock
        self._entries: dict[RevocationKey, Revocation] = {}
        self._last = 0
        self._version = 0

    async def add(self, entry: Revocation) -> Revocation:
        self._forget_ended()
        if (earlier := self._entries.get(entry.key)) is not None:
            stored = merged(earlier, entry)
        elif len(self._entries) >= self.entries_max:
            raise full(self.entries_max)
        else:
            self._last += 1
            stored = replace(entry, number=self._last)
        self._entries[entry.key] = stored
        self._version += 1
        return stored

    async def remove(self, number: int) -> Revocation:
        self._forget_ended()
        found = next((entry for entry in self._entries.values() if entry.number == number), None)
        if found is None:
            raise unknown(number)
        del self._entries[found.key]
        self._version += 1
        return found

    async def all(self) -> Sequence[Revocation]:
        self._forget_ended()
        return sorted(self._entries.values(), key=lambda entry: entry.number)

    async def version(self) -> int:
        return self._version

    def _forget_ended(self) -> None:
        now = self._clock.now()
        self._entries = {
            k: e for k, e in self._entries.items() if e.ends_at is None or e.ends_at > now
        }
