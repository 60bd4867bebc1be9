"""Leases on a real PostgreSQL: who sleeps is woken, who is unsure starts nothing, who
is gone is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from work_rigs import ManualWorker, draft, postgres_work, until

from engines import Server
from holdfast.clock import SystemClock
from holdfast.errors import NotFound
from holdfast.work.contract import ClaimRequest, Report
from holdfast.work.job import PARTITIONS, JobDraft
from holdfast.work.outbox import enqueue


async def test_only_a_sleeping_worker_is_notified(postgres_server: Server) -> None:
    async with postgres_work(postgres_server.url) as o:
        heard: list[str] = []
        connection = await asyncpg.connect(postgres_server.url)
        await connection.add_listener("holdfast_work", lambda *words: heard.append(words[-1]))
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await o.store.enqueue([draft()])
        await connection.fetchval("SELECT 1")
        assert heard == [], "it said that it is awake"
        assert (
            await manual.session.process(Report(), ClaimRequest(jobs=10, wake_on_enqueue=True))
        ).jobs
        await o.store.enqueue([draft()])
        await connection.fetchval("SELECT 1")
        assert heard == [], "it found something, so it did not fall asleep"
        await manual.turn()
        assert not (
            await manual.session.process(Report(), ClaimRequest(jobs=10, wake_on_enqueue=True))
        ).jobs
        await o.store.enqueue([draft()])
        await connection.fetchval("SELECT 1")
        assert heard == [str(manual.session.instance)]
        await connection.close()


async def test_sleeping_worker_wakes_at_the_commit(postgres_server: Server) -> None:
    async with postgres_work(postgres_server.url) as o:
        manual = await ManualWorker.join(o.store)
        assert await manual.session.wait(20), (
            "it listens now, and looks for what came before it did"
        )
        await manual.session.process(Report(), ClaimRequest(jobs=10, wake_on_enqueue=True))
        assert not await manual.session.wait(0.01)
        waiting = asyncio.create_task(manual.session.wait(20))
        await o.store.enqueue([draft()])
        assert await waiting, "by the commit, long before the time was over"


async def test_session_without_confirmed_heartbeats_starts_nothing(postgres_server: Server) -> None:
    async with postgres_work(postgres_server.url) as o:
        manual = await ManualWorker.join(o.store)
        session: Any = manual.session
        assert session.may_start
        await session.stop_heartbeat()
        async with asyncio.timeout(10):
            while session.may_start:  # noqa: ASYNC110 - time must pass
                await asyncio.sleep(0.05)
        await manual.turn()
        assert session.may_start, "a call that succeeded is as good as a beat"


async def test_given_up_partition_is_free_and_keeps_its_jobs(postgres_server: Server) -> None:
    async with postgres_work(postgres_server.url) as o:
        first, second = (
            await ManualWorker.join(o.store, "first"),
            await ManualWorker.join(o.store, "second"),
        )
        (seq,) = await o.store.enqueue([draft()])
        await first.session.release_partitions(range(PARTITIONS))
        assert await first.turn() == []
        fences = await second.session.take(range(PARTITIONS))
        assert len(fences) == PARTITIONS
        await second.rewind()
        assert await second.turn() == [seq]


async def test_inbox_forgets_an_id_after_seven_days(postgres_server: Server) -> None:
    async with postgres_work(postgres_server.url) as o:
        shop = JobDraft("Order", b"{}", source="shop", source_id="1")
        assert (await o.store.enqueue([shop]))[0] > 0
        manual = await ManualWorker.join(o.store)
        await o.pass_time(6 * 86400)
        await manual.session.owners()
        assert await o.store.enqueue([shop]) == [0]
        many = [JobDraft("Order", b"{}", source="shop", source_id=str(n)) for n in range(2, 2502)]
        await o.store.enqueue(many)
        await o.pass_time(8 * 86400)
        await manual.session.owners()
        assert (await o.store.enqueue([shop]))[0] > 0
        assert 0 not in await o.store.enqueue(many), "more than one batch is forgotten at once"


async def test_children_of_a_locked_stream_wait_without_blocking_the_worker(
    postgres_server: Server,
) -> None:
    from holdfast.work.contract import Child

    async with postgres_work(postgres_server.url) as o:
        (parent,) = await o.store.enqueue([draft("a")])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        connection = await asyncpg.connect(postgres_server.url)
        transaction = connection.transaction()
        await transaction.start()
        await enqueue(connection, draft("busy"))
        child = Child(parent, draft("busy", "mail"))
        claimed = await manual.call(completed=[parent], children=[child])
        assert claimed.busy == [parent], "both are reported again"
        await transaction.commit()
        claimed = await manual.call(completed=[parent], children=[child])
        assert claimed.busy == []
        assert [job.type for job in claimed.jobs] == ["order", "mail"]
        await connection.close()


async def test_session_with_short_waits_is_woken_by_new_jobs(
    postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = asyncpg.Connection.add_listener

    async def slowly(connection: Any, *arguments: Any) -> None:
        await asyncio.sleep(0.05)
        await listen(connection, *arguments)

    async with postgres_work(postgres_server.url) as o:
        manual = await ManualWorker.join(o.store)
        monkeypatch.setattr(asyncpg.Connection, "add_listener", slowly)
        for _ in range(50):
            if await manual.session.wait(0.01):
                break
        await manual.session.process(Report(), ClaimRequest(jobs=10, wake_on_enqueue=True))
        waiting = asyncio.create_task(manual.session.wait(10))
        await o.store.enqueue([draft()])
        assert await waiting, "woken, not timed out"


async def test_late_transaction_with_more_jobs_than_room_is_read_in_pieces(
    postgres_server: Server,
) -> None:
    async with postgres_work(postgres_server.url) as o:
        connection = await asyncpg.connect(postgres_server.url)
        transaction = connection.transaction()
        await transaction.start()
        late = await enqueue(connection, *(draft(None) for _ in range(900)))
        await o.store.enqueue([draft(None)])
        manual = await ManualWorker.join(o.store)
        assert len(await manual.turn(10)) == 1
        for _ in range(3):
            assert await manual.turn(10) == []
        await transaction.commit()
        claimed = await manual.call(10)
        assert claimed.notice and not claimed.jobs, "too many at once: rewind"
        await manual.rewind()
        got = set[int]()
        for _ in range(95):
            got.update(await manual.turn(10))
        assert set(late) <= got
        await connection.close()


async def test_enqueue_while_a_worker_falls_asleep_is_found_by_a_soon_poll(
    postgres_server: Server,
) -> None:
    """It looked whether anybody sleeps before the worker had said so, and commits after
    the worker has looked.
    """

    async with postgres_work(postgres_server.url) as o:
        manual, request = (
            await ManualWorker.join(o.store),
            ClaimRequest(jobs=10, wake_on_enqueue=True),
        )
        await manual.turn()
        connection = await asyncpg.connect(postgres_server.url)
        transaction = connection.transaction()
        await transaction.start()
        (seq,) = await enqueue(connection, draft())
        looks = [
            (await manual.session.process(Report(), request)).next_due_seconds for _ in range(4)
        ]
        assert looks == [
            0.002,
            0.004,
            0.008,
            0.016,
        ], "a long one is polled more and more rarely"
        await transaction.commit()
        await connection.close()
        assert await manual.turn() == [seq]
        looks = [
            (await manual.session.process(Report(), request)).next_due_seconds for _ in range(3)
        ]
        assert looks[-1] is None, "nobody is left who would not wake it"


async def test_backlog_of_a_given_up_partition_is_not_claimed(
    postgres_server: Server,
) -> None:
    async with postgres_work(postgres_server.url) as o:
        seqs = await o.store.enqueue([draft("deep") for _ in range(4)])
        first, second = (
            await ManualWorker.join(o.store, "first"),
            await ManualWorker.join(o.store, "second"),
        )
        await first.turn()
        await first.turn(held=seqs[2:])
        await first.turn(completed=seqs[:2])
        kept = (first.jobs[seqs[0]].partition + 1) % PARTITIONS
        await first.session.release_partitions(
            [partition for partition in range(PARTITIONS) if partition != kept]
        )
        assert await first.turn(backlogs={"deep": seqs[1]}) == []
        await second.session.take(range(PARTITIONS))
        await second.rewind()
        assert await second.turn() == seqs[2:]


async def test_rewind_waits_for_a_call_whose_response_was_lost(
    postgres_server: Server,
) -> None:
    """It may mark jobs as held after they were read as ready: then newer ones of the
    stream would pass them.
    """

    async with postgres_work(postgres_server.url) as o:
        seqs = await o.store.enqueue([draft() for _ in range(3)])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        session: Any = manual.session
        lost, session_again = session._connection, await asyncpg.connect(postgres_server.url)
        watcher = await asyncpg.connect(postgres_server.url)
        async with lost.transaction():
            await manual.session.process(Report(held=seqs[1:]), ClaimRequest())
            session._connection = session_again
            reading = asyncio.ensure_future(manual.rewind())
            waits = (
                "SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'"
            )
            await until(lambda: watcher.fetchval(waits, session_again.get_server_pid()))
            assert not reading.done()
        await reading
        assert list(manual.rewound.backlogs) == ["s"]
        await lost.close()
        await watcher.close()


async def test_claim_does_not_read_held_jobs(postgres_server: Server) -> None:
    """A hundred thousand blocked jobs must cost nothing: the claim reads ready ones by
    an index of their own.
    """

    async with postgres_work(postgres_server.url) as o:
        seqs = await o.store.enqueue([draft("blocked") for _ in range(2000)])
        manual = await ManualWorker.join(o.store)
        await manual.turn(2000)
        await manual.turn(failed=[manual.failure(seqs[0])], held=seqs[1:])
        session: Any = manual.session
        await session._connection.execute("VACUUM ANALYZE holdfast_work.job")
        (ready,) = await o.store.enqueue([draft("other")])

        async def rows_read() -> int:
            await session._connection.execute("SELECT pg_stat_force_next_flush()")
            sql = (
                "SELECT idx_tup_fetch FROM pg_stat_user_tables WHERE relid ="
                " 'holdfast_work.job'::regclass"
            )
            return int(await session._connection.fetchval(sql))

        before = await rows_read()
        await manual.rewind()
        assert await manual.turn() == [ready]
        for _ in range(3):
            assert await manual.turn() == []
        assert await rows_read() - before < 50


async def test_claim_and_run_write_nothing_and_a_held_job_is_marked_once(
    postgres_server: Server,
) -> None:
    """A row that is never updated has the version its INSERT made: see ``ctid``."""

    async with postgres_work(postgres_server.url) as o:
        head, held, free = await o.store.enqueue([draft("a"), draft("a"), draft("b")])
        connection = await asyncpg.connect(postgres_server.url)

        async def versions() -> dict[int, str]:
            rows = await connection.fetch(
                "SELECT seq, ctid::text AS version FROM holdfast_work.job"
            )
            return {row["seq"]: row["version"] for row in rows}

        inserted = await versions()
        manual = await ManualWorker.join(o.store)
        assert await manual.turn(starting=3) == [head, held, free]
        await manual.turn(running=[head, free])
        await manual.rewind()
        await manual.turn(running=[head, free])
        assert await versions() == inserted
        await manual.turn(failed=[manual.failure(head)], held=[held])
        marked = await versions()
        assert marked[held] != inserted[held] and marked[free] == inserted[free]
        await manual.turn(held=[held])
        assert (await versions())[held] == marked[held], "and once only"
        await connection.close()


async def test_transaction_may_enqueue_for_more_streams_than_the_server_has_locks(
    postgres_server: Server,
) -> None:
    async with postgres_work(postgres_server.url) as o:
        seqs = await o.store.enqueue([draft(f"s{number}") for number in range(20_000)])
        assert len(set(seqs)) == 20_000


async def test_sequences_are_drawn_one_by_one_after_the_transaction_id(
    postgres_server: Server,
) -> None:
    """What the sweep's theory rests upon: see work/postgres/sweep.py."""

    async with postgres_work(postgres_server.url):
        connection = await asyncpg.connect(postgres_server.url)
        cached = (
            "SELECT cache_size FROM pg_sequences WHERE schemaname = 'holdfast_work' AND"
            " sequencename = 'job_seq'"
        )
        assert await connection.fetchval(cached) == 1
        columns = await connection.fetch(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'holdfast_work.job'::regclass"
            " AND attnum > 0 ORDER BY attnum"
        )
        names = [row["attname"] for row in columns]
        assert names.index("xid") < names.index("seq"), (
            "defaults are computed in the order of the columns"
        )
        await connection.close()


async def test_retry_is_due_by_the_clock_of_the_database(
    postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with postgres_work(postgres_server.url) as o:
        (seq,) = await o.store.enqueue([draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        monkeypatch.setattr(SystemClock, "now", staticmethod(lambda: 0.0))
        await manual.turn(failed=[manual.failure(seq)])
        connection = await asyncpg.connect(postgres_server.url)
        left = (
            "SELECT extract(epoch FROM due_at - clock_timestamp())::float8 FROM holdfast_work.job"
        )
        assert 50 < await connection.fetchval(left) <= 60
        await connection.close()


async def test_partition_of_a_live_owner_is_not_taken(postgres_server: Server) -> None:
    async with postgres_work(postgres_server.url) as o:
        owner = await ManualWorker.join(o.store, "owner")
        (seq,) = await o.store.enqueue([draft()])
        other = await o.store.join("other")
        await other.owners()
        assert await other.take(range(PARTITIONS)) == {}
        assert await owner.turn() == [seq]
        await owner.session.release_partitions([owner.jobs[seq].partition])
        assert list(await other.take(range(PARTITIONS))) == [owner.jobs[seq].partition], (
            "with its consent it is"
        )


@pytest.mark.parametrize("verb", ["retry", "park", "bury", "release"])
async def test_operator_and_worker_at_the_same_job_do_not_deadlock(
    postgres_server: Server, verb: str
) -> None:
    """Both lock the worker's row first: the act waits until the call has ended, and
    finds what it left.
    """

    async with postgres_work(postgres_server.url) as o:
        head, _ = await o.store.enqueue([draft("s"), draft("s")])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(head)])
        acts: dict[str, Callable[[], Awaitable[int]]] = {
            "retry": lambda: o.store.retry([head], reset=False, by="ann", why="now"),
            "park": lambda: o.store.park([head], by="ann", why="later"),
            "bury": lambda: o.store.bury([head], by="ann", why="never"),
            "release": lambda: o.store.release("s", through=99, by="ann", why="go on"),
        }
        connection = manual.session._connection  # type: ignore[attr-defined]
        watcher = await asyncpg.connect(postgres_server.url)
        async with connection.transaction():
            # holds the worker's row until the transaction ends
            await manual.session.process(Report(), ClaimRequest())
            acting = asyncio.ensure_future(acts[verb]())
            await until(
                lambda: watcher.fetchval("SELECT count(*) > 0 FROM pg_locks WHERE NOT granted")
            )
            await manual.session.process(Report(completed=[head]), ClaimRequest())
        with pytest.raises(NotFound):
            await acting
        assert await o.store.streams() == []
        await watcher.close()
