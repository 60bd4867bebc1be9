"""Producers on a real PostgreSQL: they wait for producers of the same streams only, not
for long, and in one order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg
import pytest
from work_rigs import ManualWorker, draft, postgres_work, until

from engines import Server
from holdfast.errors import Unavailable
from holdfast.work.contract import Child
from holdfast.work.inspection import Query
from holdfast.work.job import State, partition_and_lane
from holdfast.work.outbox import enqueue

HELD = "held"
LANE = partition_and_lane(HELD)[1]
NEIGHBOURS = [name for n in range(40_000) if partition_and_lane(name := f"n{n}")[1] == LANE][:20]
"""Streams of the same lane as the held one."""


@asynccontextmanager
async def connections(server: Server, count: int) -> AsyncIterator[Sequence[Any]]:
    async with AsyncExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(await asyncpg.connect(server.url))
            stack.callback(opened[-1].terminate)
        yield opened


@asynccontextmanager
async def held(server: Server, *streams: str) -> AsyncIterator[Any]:
    """An open transaction that has enqueued one job of each of these streams."""
    async with connections(server, 1) as (connection,):
        transaction = connection.transaction()
        await transaction.start()
        await enqueue(connection, *map(draft, streams))
        yield transaction


@pytest.mark.parametrize("per_call", [1, 5])
async def test_producers_of_other_streams_continue_while_a_transaction_is_open(
    postgres_server: Server, per_call: int
) -> None:
    async with postgres_work(postgres_server.url) as o, held(postgres_server, HELD):
        async with asyncio.timeout(4), connections(postgres_server, 4) as producers:

            async def produce(number: int, connection: Any) -> None:
                for start in range(number, len(NEIGHBOURS), 4):
                    streams = [NEIGHBOURS[(start + n) % len(NEIGHBOURS)] for n in range(per_call)]
                    await enqueue(connection, *map(draft, streams))

            await asyncio.gather(*(produce(n, each) for n, each in enumerate(producers)))
        assert len(await o.store.find(Query(), 1000)) == len(NEIGHBOURS) * per_call


async def test_producer_waits_five_seconds_in_all_and_a_big_call_one_second(
    postgres_server: Server,
) -> None:
    """In all, however many locks it waits for; the error says what to do."""

    loop = asyncio.get_running_loop()
    async with (
        postgres_work(postgres_server.url) as o,
        held(postgres_server, HELD),
        held(postgres_server, "second") as second,
        held(postgres_server, "third") as third,
        connections(postgres_server, 1) as (looker,),
    ):
        first, last = await _by_hash(looker, ["second", "third"])

        async def refused(*streams: str) -> tuple[float, str]:
            began = loop.time()
            with pytest.raises(Unavailable) as refusal:
                await o.store.enqueue([draft(stream) for stream in streams])
            return loop.time() - began, str(refusal.value)

        async def release_the_first() -> None:
            await asyncio.sleep(2)
            await {"second": second, "third": third}[first].rollback()

        many = [f"m{n}" for n in range(64)] + [HELD]
        one, two, big, _ = await asyncio.gather(
            refused(HELD), refused(first, last), refused(*many), release_the_first()
        )
        assert 4.5 < one[0] < 6.5 and "is still open" in one[1]
        assert 4.5 < two[0] < 6.5, "not five more for the second lock"
        assert 0.9 < big[0] < 2.5 and "split the call" in big[1]
        assert await o.store.find(Query()) == [], "nothing is stored"
        await o.store.enqueue([draft(stream) for stream in many[:64]])


async def test_small_and_big_enqueues_and_children_neither_deadlock_nor_reorder(
    postgres_server: Server,
) -> None:
    """A stream locked by its lane and one locked by itself exclude each other."""

    async with (
        postgres_work(postgres_server.url) as o,
        connections(postgres_server, 9) as (looker, *producers),
    ):
        deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        before, going_on = await looker.fetchval(deadlocks), True
        streams = [f"s{n}" for n in range(70)]

        async def produce(number: int, connection: Any) -> None:
            rng = random.Random(number)
            while going_on:
                chosen = rng.sample(streams, rng.choice([1, 2, 5, 20, 65, 70]))
                async with connection.transaction():
                    await enqueue(connection, *map(draft, chosen))
                    await asyncio.sleep(rng.choice([0, 0, 0.002, 0.01]))

        producing = asyncio.gather(*(produce(n, each) for n, each in enumerate(producers)))
        manual, last, rng, turns = (
            await ManualWorker.join(o.store),
            dict[str, int](),
            random.Random(9),
            0,
        )
        ended = list[int]()
        end = asyncio.get_running_loop().time() + 3
        while asyncio.get_running_loop().time() < end:
            children = [
                Child(seq, draft(stream)) for seq in ended for stream in rng.sample(streams, 2)
            ]
            claimed = await manual.call(2000, completed=ended, children=children)
            for job in claimed.jobs:
                assert job.stream is not None and last.get(job.stream, 0) < job.seq, (
                    "an earlier one came later"
                )
                last[job.stream] = job.seq
            ended = [
                *claimed.busy,
                *(job.seq for job in rng.sample(claimed.jobs, min(40, len(claimed.jobs)))),
            ]
            turns += 1
        going_on = False
        await producing
        await looker.execute("SELECT pg_stat_clear_snapshot()")
        assert await looker.fetchval(deadlocks) == before
        assert turns > 20 and len(last) == len(streams)


async def test_as_many_transactions_as_there_are_connections_may_hold_64_streams_each(
    postgres_server: Server,
) -> None:
    """The lock table has room for them, by PostgreSQL's defaults."""

    async with (
        postgres_work(postgres_server.url) as o,
        connections(postgres_server, 85) as producers,
    ):
        for number, connection in enumerate(producers):
            await connection.execute("BEGIN")
            await enqueue(connection, *(draft(f"c{number}-{n}") for n in range(64)))
        for connection in producers:
            await connection.execute("COMMIT")
        assert (await o.store.stats()).by_state[State.READY] == 85 * 64


async def test_only_children_of_a_locked_stream_are_reported_again(
    postgres_server: Server,
) -> None:
    async with postgres_work(postgres_server.url) as o:
        parents = await o.store.enqueue([draft(None) for _ in range(200)])
        manual = await ManualWorker.join(o.store)
        await manual.turn(200)
        async with held(postgres_server, HELD):
            streams = [HELD, *NEIGHBOURS, *(f"other{n}" for n in range(179))]
            children = [
                Child(seq, draft(stream)) for seq, stream in zip(parents, streams, strict=True)
            ]
            claimed = await manual.call(0, completed=parents, children=children)
            assert claimed.busy == [parents[0]]
        stored = {entry.stream for entry in await o.store.find(Query(), 1000) if entry.stream}
        assert stored == set(streams[1:])


async def test_streams_are_locked_from_the_lowest_whatever_the_order_of_the_jobs(
    postgres_server: Server,
) -> None:
    """In the order of their jobs two producers would wait for each other."""

    async with (
        postgres_work(postgres_server.url) as o,
        connections(postgres_server, 1) as (looker,),
    ):
        few = await _by_hash(looker, [f"s{number}" for number in range(20)])
        many = sorted(
            (f"s{number}" for number in range(80)),
            key=lambda stream: partition_and_lane(stream)[1],
        )
        waiting = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        locked = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND mode ="
            f" 'ExclusiveLock' AND pid IN ({waiting})"
        )
        for streams in (few, many):
            async with held(postgres_server, streams[0]) as transaction:
                calling = asyncio.create_task(
                    o.store.enqueue([draft(stream) for stream in reversed(streams)])
                )
                await until(lambda: looker.fetchval(waiting))
                assert await looker.fetchval(locked) == 0, (
                    "who waits for the lowest holds no higher one"
                )
                await transaction.rollback()
            assert len(await calling) == len(streams)


async def test_aborted_one_of_two_interleaved_enqueues_can_be_repeated(
    postgres_server: Server,
) -> None:
    async with (
        postgres_work(postgres_server.url) as o,
        connections(postgres_server, 2) as producers,
    ):

        async def twice(connection: Any, first: str, then: str, met: asyncio.Barrier) -> bool:
            async with connection.transaction():
                await enqueue(connection, draft(first))
                await met.wait()
                await enqueue(connection, draft(then))
            return True

        met = asyncio.Barrier(2)
        both = (twice(producers[0], "a", "b", met), twice(producers[1], "b", "a", met))
        outcomes = await asyncio.gather(*both, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {bool, asyncpg.DeadlockDetectedError}
        await twice(producers[0], "a", "b", asyncio.Barrier(1))
        assert len(await o.store.find(Query())) == 4


async def test_producer_waiting_for_many_locked_streams_gets_an_error_saying_so(
    postgres_server: Server,
) -> None:
    """Not that somebody has stored jobs of the same stream. The wait is cut short: it
    is 5 s otherwise.
    """

    async with (
        postgres_work(postgres_server.url),
        connections(postgres_server, 2) as (many, one),
    ):
        async with many.transaction():
            await enqueue(many, *(draft(f"many-{n}") for n in range(65)))
            soon = "clock_timestamp() + interval '50 milliseconds'"
            with pytest.raises(
                asyncpg.LockNotAvailableError, match="more than 64 streams is still open"
            ):
                await one.execute(
                    f"SELECT holdfast_work.wait_for_lock(1214869099, $1, true, {soon})",
                    partition_and_lane("many-0")[1],
                )
        async with held(postgres_server, "held"):
            with pytest.raises(asyncpg.LockNotAvailableError, match="jobs of one of these streams"):
                await one.execute(
                    "SELECT holdfast_work.wait_for_lock(1214869101, hashtext('held'), false,"
                    f" {soon})"
                )


async def _by_hash(connection: Any, streams: list[str]) -> list[str]:
    """In the order in which they are locked."""
    rows = await connection.fetch(
        "SELECT s FROM unnest($1::text[]) AS u(s) ORDER BY hashtext(s)", streams
    )
    return [row["s"] for row in rows]
