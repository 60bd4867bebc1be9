"""Damaged counters are found in chats to which nobody sends."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from store_rigs import create, fill

from holdfast import telemetry
from holdfast.errors import Unavailable
from holdfast.ingest.counter_check import LOOK_SECONDS, SECTIONS_AT_ONCE, CounterCheck
from holdfast.message import PageToken
from holdfast.store.contract import COUNTERS_LOOKED_AT, DamagedPage
from holdfast.store.leases.memory import MemoryLeases
from holdfast.store.memory import MemoryStore
from holdfast.store.numbering import NO_COUNTER, TAKEN
from proof.virtual_loop import LoopClock


async def halted(store: MemoryStore) -> list[str]:
    return [chat.chat_id for chat in (await store.halted(10)).chats]


async def test_counter_of_an_idle_chat_is_found_within_a_minute() -> None:
    store, clock = MemoryStore(), LoopClock()
    for n in range(60):
        await create(store, chat_id=f"chat_{n}")
    await fill(store, 2, "chat_30")
    store._chats["chat_30"].counter = None
    check = asyncio.create_task(CounterCheck(store, MemoryLeases(clock), clock).run())
    await asyncio.sleep(2 * LOOK_SECONDS)
    assert await halted(store) == ["chat_30"]
    store._chats["chat_7"].counter = None
    await asyncio.sleep(2 * LOOK_SECONDS)
    assert sorted(await halted(store)) == ["chat_30", "chat_7"], "it looks again"
    check.cancel()
    await asyncio.gather(check, return_exceptions=True)


def counted() -> tuple[float, float]:
    names = ("durability_counter_corruption_total", "durability_duplicate_sequence_total")
    found = telemetry.samples(names)
    return found[names[0]][()], found[names[1]][()]


async def test_chats_that_a_killed_process_halted_are_counted_once_by_the_next() -> None:
    store, clock = MemoryStore(), LoopClock()
    for chat_id, why in (
        ("lost", NO_COUNTER),
        ("behind", TAKEN),
        ("mine", "an operator"),
        ("sound", None),
    ):
        await create(store, chat_id=chat_id)
        held = store._chats[chat_id]
        held.chat = replace(held.chat, halted=why)
    lost, behind = counted()
    check = CounterCheck(store, MemoryLeases(clock), clock)
    await check.look()
    await check.look()
    assert counted() == (lost + 1, behind + 1)


class ManyChats(MemoryStore):
    """Of each section of a long list the first chat is damaged; ``failing``: no answer."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[PageToken | None] = []
        self.damaged_ones: list[str] = []
        self.sections, self.failing = 2 * SECTIONS_AT_ONCE + 1, False

    async def damaged(self, after: PageToken | None = None) -> DamagedPage:
        if self.failing:
            raise Unavailable("the store is down")
        self.asked.append(after)
        number = int(after or 0) + 1
        more = PageToken(str(number)) if number < self.sections else None
        return DamagedPage([f"chat_{number}"], more)

    async def halt_damaged(self, chat_ids: object) -> None:
        if self.failing:
            raise Unavailable("the store is down")
        self.damaged_ones += chat_ids  # type: ignore[operator]


async def test_one_look_is_bounded_and_the_next_goes_on() -> None:
    store, clock = ManyChats(), LoopClock()
    check = CounterCheck(store, MemoryLeases(clock), clock)
    await check.look()
    assert len(store.asked) == SECTIONS_AT_ONCE
    store.failing = True
    with pytest.raises(Unavailable):
        await check.look()
    store.failing = False
    await check.look()
    await check.look()
    assert len(store.asked) == store.sections
    assert store.damaged_ones == [f"chat_{n + 1}" for n in range(store.sections)]
    await check.look()
    assert store.asked[store.sections] is None, "from the beginning"


def test_sections_cover_many_chats_within_a_minute() -> None:
    """As the head of the module says."""
    assert COUNTERS_LOOKED_AT * SECTIONS_AT_ONCE * (60 / LOOK_SECONDS) == 60_000
