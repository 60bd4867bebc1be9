"""What is kept of a job's failures: every reason, in order, also when it dies; and the
record of operators' acts.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import pytest
from work_rigs import WORK_STORES, ManualWorker, Opened, Opener, draft, opener_of

from engines import Server
from holdfast.work.inspection import Query
from holdfast.work.job import Failure, InvalidArgument, Policies, Reason, State
from holdfast.work.postgres import PostgresWork
from holdfast.work.postgres.store import MIGRATIONS
from holdfast.work.sqlite import SqliteWork
from holdfast.work.sqlite.verbs import MIGRATIONS as SQLITE_MIGRATIONS

TIMEOUT, RAISED, POISON, DIED = (
    Reason.TIMEOUT_EXCEEDED,
    Reason.HANDLER_EXCEPTION,
    Reason.POISON_MESSAGE,
    Reason.UNKNOWN,
)


@pytest.fixture(params=WORK_STORES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return opener_of(request, tmp_path)


async def fail(o: Opened, manual: ManualWorker, seq: int, reason: Reason) -> None:
    await manual.turn(failed=[manual.failure(seq, reason)])
    await o.pass_time(100 * 86400.0)
    await manual.turn()


async def test_dead_letter_keeps_every_reason_in_order(
    opened: Opener,
) -> None:
    async with opened() as o:
        (seq,) = await o.store.enqueue([draft()])
        manual = await ManualWorker.join(
            o.store, policies=Policies.preset("uniform").with_type("order", strikes_max=5)
        )
        await manual.turn()
        for reason in (TIMEOUT, TIMEOUT, Reason.THROTTLED, RAISED):
            await fail(o, manual, seq, reason)
        (waiting,) = await o.store.find(Query(seqs=[seq]))
        assert list(waiting.reasons) == [TIMEOUT, Reason.THROTTLED, RAISED]
        await manual.turn(failed=[manual.failure(seq, TIMEOUT)])
        (dead,) = await o.store.dead(Query())
        assert dead.reason is POISON
        assert list(dead.reasons) == [TIMEOUT, Reason.THROTTLED, RAISED, TIMEOUT, POISON]


@pytest.mark.covers("003 2: manual, FailureReason = PoisonMessage")
async def test_crashed_and_buried_jobs_keep_their_reasons_too(
    opened: Opener,
) -> None:
    async with opened() as o:
        killer, buried, named = await o.store.enqueue([draft("a"), draft("b"), draft("c")])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await fail(o, manual, killer, TIMEOUT)
        await fail(o, manual, buried, RAISED)
        await o.store.bury([buried], by="ann", why="hopeless")
        given = Failure(
            Reason.DEPENDENCY_FAILURE, "Disabled", "its endpoint was disabled for too long"
        )
        await o.store.bury([named], by="ann", why="too old", failure=given)
        for _ in range(3):
            await manual.turn(running=[killer])
            await o.kill(manual.session)
            manual = await ManualWorker.join(o.store)
            await manual.turn()
        dead = {entry.seq: list(entry.reasons) for entry in await o.store.dead(Query())}
        assert dead == {
            killer: [TIMEOUT, DIED, POISON],
            buried: [RAISED],
            named: [Reason.DEPENDENCY_FAILURE],
        }


async def test_too_many_reasons_keep_the_first_and_the_last(opened: Opener) -> None:
    async with opened() as o:
        (seq,) = await o.store.enqueue([draft()])
        manual = await ManualWorker.join(
            o.store,
            policies=Policies.preset("uniform").with_type("order", strikes_max=1000, factor=1.0),
        )
        await manual.turn()
        for reason in itertools.islice(itertools.cycle([TIMEOUT, RAISED]), 70):
            await fail(o, manual, seq, reason)
        await fail(o, manual, seq, Reason.THROTTLED)
        (entry,) = await o.store.find(Query())
        assert list(entry.reasons) == [TIMEOUT, RAISED] * 31 + [TIMEOUT, Reason.THROTTLED]


async def test_record_of_acts_is_read_page_by_page(opened: Opener) -> None:
    async with opened() as o:
        seqs = await o.store.enqueue([draft(None) for _ in range(5)])
        for seq in seqs:
            await o.store.park([seq], by="ann", why=str(seq))
        first = await o.store.acts(2)
        second = await o.store.acts(2, before=first[-1].number)
        assert [act.why for act in [*first, *second]] == [str(seq) for seq in reversed(seqs[1:])]
        assert await o.store.acts(2, before=1) == []


@pytest.mark.parametrize("wrong", [2**70, 0, -1, "12", True, None])
async def test_invalid_sequence_is_refused_and_changes_nothing(opened: Opener, wrong: Any) -> None:
    async with opened() as o:
        (seq,) = await o.store.enqueue([draft()])
        who = {"by": "ann", "why": "a mistake"}
        acts = [o.store.park, o.store.bury, partial(o.store.retry, reset=False)]
        for act in (*acts, lambda seqs, **who: o.store.release("s", ids=seqs, **who)):
            with pytest.raises(InvalidArgument):
                await act([seq, wrong], **who)
        with pytest.raises(InvalidArgument):
            await o.store.enqueue([draft(), wrong])
        (entry,) = await o.store.find(Query())
        assert entry.state is State.READY and await o.store.acts() == []


async def test_migrated_file_keeps_dead_letters_and_their_reason(
    tmp_path: Path,
) -> None:
    path = tmp_path / "work.db"
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE schema_version (version INTEGER NOT NULL) STRICT")
    for version, script in enumerate(SQLITE_MIGRATIONS[:3], 1):
        connection.execute(script)
        connection.execute("INSERT INTO schema_version VALUES (?)", (version,))
    connection.execute(
        "INSERT INTO dead VALUES (1, 't', x'7b7d', NULL, '', 0, 3, 3, 0, 1, 0, 1.0, NULL, NULL,"
        " NULL, 4, 'E', 'e', '', '', 5.0)"
    )
    connection.close()

    store = await SqliteWork.open(path)
    try:
        (dead,) = await store.dead(Query())
        assert (dead.dead_at, list(dead.reasons), dead.attempt) == (5.0, [TIMEOUT], 3)
    finally:
        await store.close()


async def test_migrated_schema_keeps_dead_letters_and_their_reason(
    postgres_server: Server,
) -> None:
    connection = await asyncpg.connect(postgres_server.url)
    await connection.execute("DROP SCHEMA IF EXISTS holdfast_work CASCADE")
    for script in MIGRATIONS[:4]:
        await connection.execute(script)
    await connection.execute(
        "INSERT INTO holdfast_work.dead (xid, seq, created_at, origin, attempt, strikes,"
        " crashes, stages, partition, state, type, destination, payload, reason, dead_at)"
        " VALUES ('1', 1, now(), 0, 3, 3, 0, 1, 0, 0, 't', '', '', 4, '2026-01-01')"
    )
    store = await PostgresWork.open(postgres_server.url)
    try:
        (dead,) = await store.dead(Query())
        assert (list(dead.reasons), dead.attempt) == ([TIMEOUT], 3)
        at = await connection.fetchval(
            "SELECT dead_at = '2026-01-01'::timestamptz FROM holdfast_work.dead"
        )
        assert at is True
    finally:
        await store.close()
        await connection.close()
