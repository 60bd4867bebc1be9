"""Job types whose breaker is not closed: their due retries stay where they are, and
cost the other types nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncpg
import pytest
from work_rigs import (
    WORK_STORES,
    ManualWorker,
    Opener,
    draft,
    embedded_work,
    opener_of,
    postgres_work,
    steps_of,
)

from engines import Server
from holdfast.drivers.sqlite.database import SqliteSettings, open_and_migrate
from holdfast.work.contract import Claimed, ClaimRequest, Report
from holdfast.work.inspection import Query
from holdfast.work.postgres import store as postgres
from holdfast.work.sqlite import WORK, SqliteWork


@pytest.fixture(params=WORK_STORES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return opener_of(request, tmp_path)


async def test_due_jobs_of_paused_types_stay_except_their_probes(opened: Opener) -> None:
    async with opened() as o:
        drafts = [
            draft(None, kind, delay_seconds=1.0 + n / 10)
            for n in range(3)
            for kind in ("down", "mail", "ship")
        ]
        seqs = await o.store.enqueue(drafts)
        (later,) = await o.store.enqueue([draft(None, "mail", delay_seconds=500.0)])
        kinds = {seq: each.type for seq, each in zip(seqs, drafts, strict=True)}
        manual = await ManualWorker.join(o.store)
        await o.pass_time(10)

        async def call(jobs: int, **more: Any) -> Claimed:
            return await manual.session.process(Report(), ClaimRequest(jobs=jobs, **more))

        few = await call(3, paused_types=["down"])
        assert [job.seq for job in few.jobs] == [seq for seq in seqs[:5] if kinds[seq] != "down"][
            :3
        ]
        rest = await call(100, paused_types=["down"])
        assert {job.seq for job in [*few.jobs, *rest.jobs]} == {
            seq for seq in seqs if kinds[seq] != "down"
        }
        assert rest.next_due_seconds is not None
        assert rest.next_due_seconds > 400, (
            "that is the mail's: a due job of a paused type wakes no worker"
        )
        assert (await call(100, paused_types=["down", "mail"])).next_due_seconds is None
        probe = await call(100, paused_types=["down"], probing=["down"])
        assert [job.seq for job in probe.jobs] == seqs[:1]
        open_again = await call(100)
        assert [job.seq for job in open_again.jobs] == [seqs[3], seqs[6]]
        assert [entry.seq for entry in await o.store.find(Query(seqs=[later]))] == [later]


async def test_sqlite_claim_does_not_scan_due_jobs_of_a_paused_type() -> None:
    async with embedded_work(None) as o:
        manual = await ManualWorker.join(o.store)

        async def steps() -> int:
            return await steps_of(
                o.store,
                manual.session.process(Report(), ClaimRequest(jobs=100, paused_types=["down"])),
            )

        await o.store.enqueue([draft(None, "mail", delay_seconds=1000.0)])
        await steps()
        without = await steps()
        await o.store.enqueue([draft(None, "down", delay_seconds=0.001)] * 5000)
        await o.pass_time(1)
        await steps()  # reads past them, once
        assert await steps() < without + 100


async def test_postgres_claim_does_not_scan_due_jobs_of_a_paused_type(
    postgres_server: Server,
) -> None:
    async with postgres_work(postgres_server.url) as o:
        await o.store.enqueue([draft(None, "mail", delay_seconds=1000.0)])
        await o.store.enqueue([draft(None, "down", delay_seconds=0.001)] * 5000)
        await o.pass_time(1)
        manual = await ManualWorker.join(o.store)
        await manual.session.process(Report(), ClaimRequest(jobs=100, paused_types=["down"]))
        connection = manual.session._connection  # type: ignore[attr-defined]
        async with connection.transaction():
            await manual.session.process(Report(), ClaimRequest(jobs=100, paused_types=["down"]))
            fetched = await connection.fetchval(
                "SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_xact_user_tables "
                "WHERE schemaname = 'holdfast_work' AND relname = 'job'"
            )
        assert fetched < 50


async def test_database_of_the_previous_version_is_migrated_with_its_jobs(
    postgres_server: Server,
) -> None:
    connection = await asyncpg.connect(postgres_server.url)
    await connection.execute("DROP SCHEMA IF EXISTS holdfast_work CASCADE")
    await connection.execute(postgres.MIGRATIONS[0])
    await connection.execute(
        "CREATE OR REPLACE FUNCTION holdfast_work.tell(changed smallint[]) RETURNS void "
        "LANGUAGE plpgsql AS $$ BEGIN RAISE 'the old one'; END $$"
    )
    old = "(partition, state, due_at, type, payload) VALUES (0, 1, now(), 'order', '{}')"
    await connection.execute(f"INSERT INTO holdfast_work.job {old}")
    store = await postgres.PostgresWork.open(postgres_server.url)
    assert (
        await connection.fetchval("SELECT number FROM holdfast_work.version")
        == postgres.SCHEMA_VERSION
    )
    indexes = await connection.fetch(
        "SELECT indexname FROM pg_indexes WHERE schemaname = 'holdfast_work'"
    )
    assert "job_due_by_type" in {row["indexname"] for row in indexes}
    assert await store.retry([1], reset=True, by="ann", why="functions are replaced, too") == 1
    manual = await ManualWorker.join(store)
    assert await manual.turn() == [1]
    await manual.session.leave()
    await store.close()
    await connection.close()


async def test_file_of_the_previous_version_is_migrated_with_its_jobs(
    tmp_path: Path,
) -> None:
    old = open_and_migrate(tmp_path / "work.db", SqliteSettings(), WORK.migrations[:1])
    old.execute(
        "INSERT INTO job (type, payload, destination, state, created_at) VALUES ('order',"
        " x'7b7d', '', 0, 1)"
    )
    old.close()
    store = await SqliteWork.open(tmp_path / "work.db")
    manual = await ManualWorker.join(store)
    assert await manual.turn() == [1]
    async with store.transaction() as db:
        assert (
            db.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'job_due_by_type'").get == 1
        )
    await store.close()
