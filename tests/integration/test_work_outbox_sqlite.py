"""The outbox on SQLite: data and jobs in one file, one transaction, one writer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import apsw
import pytest
from work_rigs import ManualWorker, draft, embedded_work

from holdfast.errors import BadSetting
from holdfast.work.contract import TransactionEnded
from holdfast.work.inspection import Query
from holdfast.work.job import JobDraft
from holdfast.work.outbox import enqueue, received


@pytest.fixture(params=["memory", "sqlite"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return lambda: embedded_work(tmp_path / "app.db" if request.param == "sqlite" else None)


async def test_job_is_stored_with_the_callers_data_or_not_at_all(opened: Any) -> None:
    async with opened() as o:
        store: Any = o.store
        manual = await ManualWorker.join(store)
        async with store.transaction() as db:
            db.execute("CREATE TABLE orders (name TEXT)")
            db.execute("INSERT INTO orders VALUES ('kept')")
            (seq,) = await enqueue(db, draft("a"))
        assert await manual.turn() == [seq]
        with pytest.raises(RuntimeError, match="sold out"):
            async with store.transaction() as db:
                db.execute("INSERT INTO orders VALUES ('lost')")
                await enqueue(db, draft("a"))
                raise RuntimeError("sold out")
        assert await manual.turn() == []
        async with store.transaction() as db:
            assert list(db.execute("SELECT name FROM orders")) == [("kept",)]
        assert [job.seq for job in await store.find(Query())] == [seq]


async def test_message_from_outside_is_stored_once(opened: Any) -> None:
    async with opened() as o:
        store: Any = o.store
        async with store.transaction() as db:
            assert await received(db, "shop", "1", JobDraft("Order", b"{}"))
        async with store.transaction() as db:
            assert not await received(db, "shop", "1", JobDraft("Order", b"{}"))
        assert len(await store.find(Query())) == 1


async def test_waiting_worker_is_woken_by_the_commit(opened: Any) -> None:
    async with opened() as o:
        store: Any = o.store
        manual = await ManualWorker.join(store)
        await manual.turn()
        waiting = asyncio.create_task(manual.session.wait(30))
        async with store.transaction() as db:
            await enqueue(db, draft())
        assert await waiting


async def test_store_call_inside_its_own_transaction_is_refused_without_deadlock(
    opened: Any,
) -> None:
    async with opened() as o:
        store: Any = o.store
        with pytest.raises(BadSetting, match="use its connection"):
            async with store.transaction():
                await store.enqueue([draft()])
        others = asyncio.create_task(store.enqueue([draft()]))
        async with store.transaction() as db:
            await enqueue(db, draft())
        await others
        assert len(await store.find(Query())) == 2


async def test_producer_that_closes_the_lent_connection_affects_only_itself(tmp_path: Path) -> None:
    async with embedded_work(tmp_path / "app.db") as o:
        store: Any = o.store
        with pytest.raises(apsw.ConnectionClosedError):
            async with store.transaction() as db:
                db.close()
                await enqueue(db, draft())
        assert await store.enqueue([draft()]) == [1]
        with pytest.raises(TransactionEnded):
            async with store.transaction() as db:
                db.close()
        assert await store.enqueue([draft()]) == [2]
        assert len(await store.find(Query())) == 2


@pytest.mark.parametrize("ending", ["ROLLBACK", "COMMIT", "ROLLBACK; BEGIN", "COMMIT; BEGIN"])
async def test_producer_that_ends_the_lent_transaction_gets_an_error(
    opened: Any, ending: str
) -> None:
    async with opened() as o:
        store: Any = o.store
        with pytest.raises(TransactionEnded, match="leave that to the block"):
            async with store.transaction() as db:
                await enqueue(db, draft())
                db.execute(ending)
        kept = 1 if "COMMIT" in ending else 0
        assert len(await store.find(Query())) == kept
        await store.enqueue([draft()])
        assert len(await store.find(Query())) == kept + 1
