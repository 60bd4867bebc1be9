"""Watermarks: merged, flushed each second, repeated after a failure, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from scripted_durability import ANNA, BELA, CHAT, create_chat

from holdfast.ingest.durability import StoreDurability
from holdfast.ingest.watermarks import Watermarks, WatermarkSettings, merged
from holdfast.message import Draft, Watermark
from holdfast.store.memory import MemoryStore
from proof.virtual_loop import LoopClock


class Plane:
    """Takes marks, or refuses them."""

    def __init__(self) -> None:
        self.works = True
        self.calls: list[list[Watermark]] = []

    async def mark(self, watermarks: Sequence[Watermark]) -> bool:
        self.calls.append(list(watermarks))
        return self.works


def bench(settings: WatermarkSettings | None = None) -> tuple[Plane, list[Watermark], Watermarks]:
    plane, moved_marks = Plane(), list[Watermark]()
    marks: Any = plane
    return plane, moved_marks, Watermarks(marks, moved_marks.extend, settings)


async def test_a_second_of_acks_is_one_write() -> None:
    plane, moved_marks, marks = bench()
    task = asyncio.create_task(marks.run())
    for n in range(1, 50):
        marks.delivered(ANNA, "phone", CHAT, 1, n)
    marks.read(ANNA, "phone", CHAT, 1, 20)
    marks.delivered(BELA, "phone", CHAT, 1, 7)
    await asyncio.sleep(0.9)
    assert plane.calls == []
    await asyncio.sleep(0.2)
    expected = [Watermark(ANNA, "phone", CHAT, 1, 49, 20), Watermark(BELA, "phone", CHAT, 1, 7, 0)]
    assert plane.calls == [expected]
    assert moved_marks == expected
    await asyncio.sleep(5)
    assert len(plane.calls) == 1, "nothing moved, nothing is written"
    marks.stop()
    await task


async def test_a_defect_costs_one_flush_and_not_the_ones_after_it() -> None:
    plane = Plane()
    moved_marks: list[int] = []

    def on_moved(moved: Sequence[Watermark]) -> None:
        if moved[0].delivered == 5:
            raise ZeroDivisionError
        moved_marks.extend(mark.delivered for mark in moved)

    marks = Watermarks(plane, on_moved)  # type: ignore[arg-type]
    task = asyncio.create_task(marks.run())
    for n in (5, 6):
        marks.delivered(ANNA, "phone", CHAT, 1, n)
        await asyncio.sleep(1.1)
    assert moved_marks == [6]
    marks.stop()
    await task


async def test_who_reads_the_store_behind_a_receipt_finds_what_it_said() -> None:
    plane = Plane()
    stored: list[list[Watermark]] = []
    marks = Watermarks(plane, lambda moved: stored.extend(plane.calls))  # type: ignore[arg-type]
    marks.delivered(ANNA, "phone", CHAT, 1, 5)
    await marks.flush()
    assert stored == [[Watermark(ANNA, "phone", CHAT, 1, 5, 0)]]


async def test_stopping_flushes_what_is_left() -> None:
    plane, _moved_marks, marks = bench()
    task = asyncio.create_task(marks.run())
    await asyncio.sleep(0)
    marks.delivered(ANNA, "phone", CHAT, 1, 5)
    marks.stop()
    await task
    assert [m.delivered for call in plane.calls for m in call] == [5]


async def test_what_could_not_be_written_is_written_with_the_next_flush() -> None:
    plane, _moved_marks, marks = bench(WatermarkSettings(max_per_write=1))
    marks.delivered(ANNA, "phone", CHAT, 1, 5)
    marks.delivered(BELA, "phone", CHAT, 1, 6)
    plane.works = False
    await marks.flush()
    assert len(plane.calls) == 1, "after a failure the rest is not tried"
    marks.delivered(ANNA, "phone", CHAT, 1, 9)
    plane.works = True
    await marks.flush()
    assert [m.delivered for call in plane.calls[1:] for m in call] == [9, 6]
    assert marks.waiting == 0


async def test_above_the_bound_new_ones_are_dropped_and_old_ones_still_merge() -> None:
    plane, _moved_marks, marks = bench(WatermarkSettings(max_waiting=1))
    marks.delivered(ANNA, "phone", CHAT, 1, 5)
    marks.delivered(BELA, "phone", CHAT, 1, 6)
    marks.delivered(ANNA, "phone", CHAT, 1, 8)
    await marks.flush()
    assert plane.calls == [[Watermark(ANNA, "phone", CHAT, 1, 8, 0)]]


async def test_they_end_in_the_store() -> None:
    store = MemoryStore()
    await create_chat(store, ANNA, BELA)
    await store.append(
        [Draft(ANNA, CHAT, "k", "hi", "text/plain", "msg_1", "2027-01-15T08:00:00.000Z")]
    )
    epoch = (await store.heads([CHAT]))[CHAT].epoch
    marks = Watermarks(StoreDurability(store, LoopClock()), lambda _: None)
    marks.delivered(BELA, "phone", CHAT, epoch, 1)
    await marks.flush()
    assert list(await store.watermarks(CHAT)) == [Watermark(BELA, "phone", CHAT, epoch, 1, 0)]


marks_of_one = st.builds(
    lambda epoch, delivered, read: Watermark(ANNA, "phone", CHAT, epoch, delivered, read),
    st.integers(1, 2),
    st.integers(0, 5),
    st.integers(0, 5),
)


@given(marks_of_one, marks_of_one, marks_of_one)
def test_merging_does_not_depend_on_order_or_repetition(
    a: Watermark, b: Watermark, c: Watermark
) -> None:
    assert merged(merged(a, b), c) == merged(a, merged(b, c))
    assert merged(a, b) == merged(b, a)
    assert merged(a, a) == a
