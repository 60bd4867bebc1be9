"""A shard of PostgreSQL that hangs, seen by the sends and changes of all others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import asyncpg
from scripted_durability import ANNA, body
from store_rigs import PostgresRig, act, create

from holdfast.clock import Ids, SystemClock
from holdfast.ingest.durability import StoreDurability
from holdfast.ingest.intake import Intake
from holdfast.message import Acked, Watermark
from holdfast.resilience import BreakerState
from holdfast.store.commands import RenameChat

LOCK = "SELECT FROM holdfast_chats.shard WHERE shard = $1 FOR UPDATE"


@asynccontextmanager
async def locked(url: str, shard: int) -> AsyncIterator[None]:
    """Another session's transaction holds the shard."""
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            await connection.execute(LOCK, shard)
            yield
    finally:
        await connection.close()


async def test_locked_shard_stops_neither_sends_nor_changes_of_the_others(
    postgres_server: Any,
) -> None:
    rig = PostgresRig(postgres_server.url)
    rig.settings = replace(rig.settings, lock_timeout_seconds=60, statement_timeout_seconds=60)
    async with rig.open() as store:
        chats = {store.lane(chat_id): chat_id for chat_id in (f"chat_{n}" for n in range(200))}
        assert len(chats) == 16
        for chat_id in chats.values():
            await create(store, chat_id=chat_id, creator=ANNA)
        clock = SystemClock()
        plane = StoreDurability(store, clock)
        ids = Ids(clock, random.Random(1))
        intake = Intake(plane, clock, ids, grouping=store.grouping, lane=store.lane)
        running = asyncio.create_task(intake.run())

        def send(lane: int) -> asyncio.Future[Any]:
            answered = asyncio.get_running_loop().create_future()
            intake.submit(
                body("k", chats[lane]), ANNA, "1", clock.monotonic() + 60, answered.set_result
            )
            return answered

        def rename(lane: int) -> asyncio.Task[Any]:
            command = RenameChat(act(ANNA), chats[lane], "another name")
            return asyncio.create_task(plane.change(command, clock.monotonic() + 60))

        async with locked(rig.url, 0):
            held = [send(0), *(rename(0) for _ in range(8))]
            async with asyncio.timeout(20):
                answers = await asyncio.gather(*(send(lane) for lane in chats if lane))
                await asyncio.gather(*(rename(lane) for lane in chats if lane))
                assert await plane.mark([Watermark(ANNA, "phone", chats[1], 1, 1, 0)])
            assert not any(each.done() for each in held)
        assert {type(answer) for answer in [await held[0], *answers]} == {Acked}
        await asyncio.gather(*held)
        assert plane.breaker is BreakerState.CLOSED
        intake.stop()
        await running
