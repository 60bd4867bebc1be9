"""Worker processes that are really killed, on both engines: the innocent go free soon,
the culprit is isolated.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import msgspec
import pytest
from work_rigs import ManualWorker, draft, embedded_work, postgres_work, until
from worker_process import Deed

from holdfast.work.contract import WorkStore
from holdfast.work.handlers import Context, Handlers
from holdfast.work.inspection import JobEntry, Query
from holdfast.work.job import JobDraft, Reason
from holdfast.work.sqlite import SqliteWork
from holdfast.work.worker import Worker

CHILD = Path(__file__).resolve().parents[1] / "support" / "worker_process.py"
SOURCE = Path(__file__).resolve().parents[2] / "src"


@dataclass
class Site:
    """An engine with jobs, and the worker processes that come and go. Its store is open
    only while none of them is.
    """

    url: str
    folder: Path
    opened: Callable[[], Coroutine[Any, Any, WorkStore]]
    ask: Callable[[str], Coroutine[Any, Any, Any]]
    """One value from the database; ``SCHEMA`` is replaced for each engine."""
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    async def enqueue(self, *deeds: Deed) -> list[int]:
        drafts = [JobDraft("Deed", msgspec.json.encode(deed), deed.stream) for deed in deeds]
        return await self._with(lambda store: store.enqueue(drafts))

    async def dead(self) -> list[JobEntry]:
        return list(await self._with(lambda store: store.dead(Query())))

    async def left(self) -> int:
        return int(await self.ask("SELECT count(*) FROM SCHEMA.job"))

    def start(self, name: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("ab") as out:
            command = [
                sys.executable,
                str(CHILD),
                self.url,
                str(self.folder / f"{name}.jsonl"),
                name,
                "1",
                "64",
            ]
            env = {**os.environ, "PYTHONPATH": str(SOURCE)}
            self.children.append(subprocess.Popen(command, stdout=out, stderr=out, env=env))
        return self.children[-1]

    async def in_flight(self, name: str) -> set[int]:
        running = await self.ask(f"SELECT running FROM SCHEMA.instance WHERE name = '{name}'")
        return set(json.loads(running)) if running is not None else set()

    def runs(self, name: str) -> list[str]:
        return (self.folder / f"{name}.jsonl").read_text().splitlines()

    async def _with(self, verb: Callable[[WorkStore], Any]) -> Any:
        store = await self.opened()
        try:
            return await verb(store)
        finally:
            await store.close()


@asynccontextmanager
async def site(engine: str, request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Site]:
    if engine == "sqlite":
        path = folder / "work.db"
        place = Site(
            f"sqlite:{path}",
            folder,
            lambda: SqliteWork.open(path),
            lambda sql: _ask_sqlite(path, sql),
        )
        try:
            yield place
        finally:
            _end(place)
        return
    from holdfast.work.postgres import PostgresWork

    url = request.getfixturevalue("postgres_server").url
    async with postgres_work(url):
        connection = await asyncpg.connect(url)
        place = Site(
            url, folder, lambda: PostgresWork.open(url), lambda sql: _ask_postgres(connection, sql)
        )
        try:
            yield place
        finally:
            _end(place)
            await connection.close()


def _end(place: Site) -> None:
    for child in place.children:
        if child.poll() is None:
            child.kill()
        child.wait()


async def _ask_sqlite(path: Path, sql: str) -> Any:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return connection.execute(sql.replace("SCHEMA.", "").replace("instance", "seat")).get
    finally:
        connection.close()


async def _ask_postgres(connection: Any, sql: str) -> Any:
    return await connection.fetchval(
        sql.replace("SCHEMA", "holdfast_work").replace("running", "to_json(running)::text")
    )


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_sixty_jobs_of_a_killed_worker_complete_in_eight_rounds(
    engine: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with site(engine, request, tmp_path) as place:
        gates = [tmp_path / f"gate{n}" for n in range(60)]
        seqs = await place.enqueue(
            *(Deed(f"s{n}", gate=str(gates[n]), transaction=False) for n in range(60))
        )
        victim = place.start("victim")
        await _in_flight(place, "victim", 60)
        victim.kill()
        victim.wait()
        place.start("heir")
        rounds, done = 0, set[int]()
        while len(done) < 60:
            running = await _in_flight(place, "heir", min(8, 60 - len(done)), apart_from=done)
            assert len(running) <= 8
            for seq in running:
                gates[seqs.index(seq)].touch()
            done |= running
            rounds += 1
        assert rounds == 8
        await until(lambda: _is_done(place))
        assert len(place.runs("heir")) == 60


async def test_job_that_kills_its_worker_is_isolated_and_all_others_complete(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In SQLite; test_work_torture does the same in PostgreSQL."""

    async with site("sqlite", request, tmp_path) as place:
        seqs = await place.enqueue(
            *(Deed(f"s{n % 25}", transaction=False, kill=n == 20) for n in range(60))
        )
        deaths, child = 0, place.start("worker")
        async with asyncio.timeout(60):
            while await place.left():
                if child.poll() is not None:
                    deaths += 1
                    child = place.start("worker")
                await asyncio.sleep(0.02)
        child.kill()
        child.wait()
        (dead,) = await place.dead()
        assert (dead.seq, dead.crashes, dead.reason) == (seqs[20], 3, Reason.POISON_MESSAGE)
        assert deaths == 3


async def test_new_job_does_not_start_beside_a_job_that_runs_alone() -> None:
    """Not even by the store, which starts new jobs when it hands them out."""

    async with embedded_work(None) as o:
        (suspect,) = await o.store.enqueue([draft(None)])
        for _ in range(2):
            manual = await ManualWorker.join(o.store)
            await manual.turn()
            await manual.turn(running=[suspect])
            await o.kill(manual.session)
        handlers, begun, gate = Handlers(), list[int](), asyncio.Event()

        @handlers.handle(dict, type="order", stream=lambda _: None)
        async def handle(ctx: Context, payload: dict[str, Any]) -> None:
            begun.append(ctx.job.seq)
            if ctx.job.seq == suspect:
                await gate.wait()

        worker: Any = Worker(o.store, handlers)
        async with worker.running():
            await until(lambda: begun)
            (other,) = await o.store.enqueue([draft(None)])
            await until(lambda: len(begun) > 1 or other in worker._worker_loop._streams._waiting)
            assert begun == [suspect]
            gate.set()
            await until(lambda: begun == [suspect, other])


async def _in_flight(
    place: Site, name: str, count: int, apart_from: Set[int] = frozenset()
) -> set[int]:
    """What this worker has in flight, once it is this number of new jobs."""
    running = set[int]()

    async def is_there() -> bool:
        nonlocal running
        running = await place.in_flight(name)
        return len(running) >= count and running.isdisjoint(apart_from)

    await until(is_there)
    return running


async def _is_done(place: Site) -> bool:
    return not await place.left()
