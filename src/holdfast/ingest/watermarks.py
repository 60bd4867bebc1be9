"""How far devices have received and read: merged in memory, written each second, and
the source of receipts.

A watermark only rises, so a lost one is replaced by the device's next. Memory is
bounded: with ``max_waiting`` different watermarks waiting, further ones are dropped and
counted; those already waiting still merge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast import telemetry
from holdfast.bounds import positive
from holdfast.clock import wait_at_most
from holdfast.ingest.contract import Durability
from holdfast.message import User, Watermark

_Key = tuple[User, str, str]
"""User, device, chat."""


@dataclass(frozen=True, slots=True)
class WatermarkSettings:
    """How watermarks are collected and written."""

    flush_interval_seconds: float = 1
    """Delivered and read marks are merged in memory and written at this interval."""
    max_waiting: int = 100_000
    """Different marks waiting to be written. Further ones are dropped and counted; the
    device's next one replaces them.
    """
    max_per_write: int = 1000
    """Marks per commit."""

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


class Watermarks:
    """``on_moved`` gets the watermarks that moved at each flush, stored or not."""

    def __init__(
        self,
        durability: Durability,
        on_moved: Callable[[Sequence[Watermark]], None],
        settings: WatermarkSettings | None = None,
    ) -> None:
        self._durability = durability
        self._on_moved = on_moved
        self._settings = settings or WatermarkSettings()
        self._waiting: dict[_Key, Watermark] = {}
        self._stopping = asyncio.Event()

    def delivered(
        self, user: User, device_id: str, chat_id: str, epoch: int, sequence: int
    ) -> None:
        """The device has stored the chat up to ``sequence``."""
        self._merge(Watermark(user, device_id, chat_id, epoch, sequence, 0))

    def read(self, user: User, device_id: str, chat_id: str, epoch: int, sequence: int) -> None:
        """The user has read the chat up to ``sequence`` on this device."""
        self._merge(Watermark(user, device_id, chat_id, epoch, 0, sequence))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def stop(self) -> None:
        """Make ``run`` flush once more and end."""
        self._stopping.set()

    async def run(self) -> None:
        """Flush each second. A defect costs one flush, not the later ones."""
        while not self._stopping.is_set():
            await wait_at_most(self._stopping, self._settings.flush_interval_seconds)
            try:
                await self.flush()
            except Exception as error:
                telemetry.defect("watermarks", error)

    async def flush(self) -> None:
        """Write the waiting watermarks, then report them: a client that reads the store
        after a receipt finds there what it said.

        A watermark that could not be written is reported all the same, and waits again
        unless a newer one came meanwhile.
        """
        batch = list(self._waiting.values())
        self._waiting = {}
        await self._write(batch)
        if batch:
            self._on_moved(batch)

    async def _write(self, batch: Sequence[Watermark]) -> None:
        size = self._settings.max_per_write
        for start in range(0, len(batch), size):
            part = batch[start : start + size]
            if not await self._durability.mark(part):
                for watermark in batch[start:]:
                    self._merge(watermark)
                return

    def _merge(self, new: Watermark) -> None:
        key = (new.user, new.device_id, new.chat_id)
        old = self._waiting.get(key)
        if old is None:
            if len(self._waiting) >= self._settings.max_waiting:
                telemetry.watermarks("dropped", 1)
                return
            self._waiting[key] = new
        else:
            self._waiting[key] = merged(old, new)


def merged(old: Watermark, new: Watermark) -> Watermark:
    """The maxima if the epochs are equal, otherwise the one of the newer epoch."""
    if new.epoch != old.epoch:
        return new if new.epoch > old.epoch else old
    return Watermark(
        new.user,
        new.device_id,
        new.chat_id,
        new.epoch,
        max(old.delivered, new.delivered),
        max(old.read, new.read),
    )
