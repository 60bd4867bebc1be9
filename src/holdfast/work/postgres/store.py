"""The job store in one PostgreSQL database; see ``contract.WorkStore``.

An operator's act on jobs locks the owners of their streams first, and notifies them in
the same transaction.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from holdfast import telemetry
from holdfast.clock import SystemClock
from holdfast.drivers.postgres import end_at_once, pool, refuse_shared_sessions
from holdfast.drivers.postgres_schema import VERSIONS_AHEAD_MAX
from holdfast.drivers.statements import functions, migrations
from holdfast.errors import BadSetting, NotFound, StateCorrupted
from holdfast.work.contract import ACTS_KEPT_MAX, ReaderMark, overtaken, reader_row
from holdfast.work.inspection import (
    BlockedStream,
    Group,
    JobAct,
    JobEntry,
    OpenBreaker,
    Query,
    Stats,
    WaitingJobs,
    counted_reasons,
)
from holdfast.work.job import Failure, JobDraft, Reason, check_seq, check_seqs, reason_of
from holdfast.work.outbox import ENQUEUE, arguments
from holdfast.work.postgres.encoding import block_of
from holdfast.work.postgres.errors import reaching, translated
from holdfast.work.postgres.session import (
    SQL,
    Pools,
    PostgresSession,
    WorkerSessionSettings,
)

SERVER_VERSION_MIN = 130000
MIGRATIONS = migrations("holdfast.work.postgres")
FUNCTIONS = functions("holdfast.work.postgres")
SCHEMA_VERSION = len(MIGRATIONS)
_MIGRATION_LOCK = 1214869100


class PostgresWork:
    """A job store in one PostgreSQL database, in the schema ``holdfast_work``."""

    shared = True

    def __init__(
        self,
        url: str,
        pools: Pools,
        session_settings: WorkerSessionSettings,
        server: str,
        connect_seconds_max: float,
        acts_kept_max: int,
    ) -> None:
        self._url = url
        self._pools = pools
        self._session_settings = session_settings
        self._server = server
        self._connect_seconds_max, self._acts_kept_max = connect_seconds_max, acts_kept_max
        self._clock, self._rng = SystemClock(), random.Random()
        self._preparing = asyncio.Lock()
        self._prepared = asyncio.Event()

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        session_settings: WorkerSessionSettings | None = None,
        connections_max: int = 8,
        server: str = "",
        at_once: bool = True,
        connect_seconds_max: float = 10.0,
        acts_kept_max: int = ACTS_KEPT_MAX,
    ) -> PostgresWork:
        """Connect and bring the schema up to date.

        Raises Unavailable, BadSetting or StateCorrupted. With ``at_once=False`` the
        first verb that succeeds does this, so that the store can be opened while the
        database is unavailable.

        At most ``connections_max`` handlers have a transaction at the same time; as
        many connections again serve calls. A Holdfast server passes its name as
        ``server``: its jobs refer to its own state, so no other server may share them.
        """
        chosen = session_settings or WorkerSessionSettings()
        # A stopped process must not hold the locks of a transaction beyond its lease.
        idle = {"idle_in_transaction_session_timeout": str(int(chosen.dead_after_seconds * 1000))}
        options = {
            "min_size": 0,
            "max_size": connections_max,
            "command_timeout": 60,
            "timeout": connect_seconds_max,
        }
        pools = Pools(*[await pool(url, settings=idle, **options) for _ in range(2)])
        store = cls(url, pools, chosen, server, connect_seconds_max, acts_kept_max)
        if not at_once:
            return store
        try:
            async with store._connection():
                return store
        except BaseException:
            await store.close()
            raise

    async def enqueue(
        self, drafts: Sequence[JobDraft], marks: Sequence[ReaderMark] = ()
    ) -> list[int]:
        values = arguments(drafts, self._rng)
        with translated():
            if not marks:
                async with self._connection() as connection:
                    seqs = list(await connection.fetchval(ENQUEUE, *values) or [])
            else:
                async with self._connection() as connection, connection.transaction():
                    rows = [(mark.row, mark.offset, mark.replaces) for mark in marks]
                    if await connection.fetchval(SQL["mark"], *zip(*rows, strict=True)) < len(rows):
                        raise overtaken()
                    seqs = list(await connection.fetchval(ENQUEUE, *values) or [])
        if 0 in seqs:
            telemetry.work_known_already()
        return seqs

    async def reader_offset(self, reader: str, shard: int = 0) -> int | None:
        rows = await self._fetch("position", reader_row(reader, shard))
        return rows[0]["position"] if rows else None

    async def join(self, name: str) -> PostgresSession:
        with translated():
            await self._prepare()
            session = (self._url, self._pools, self._session_settings, self._clock, self._rng)
            return await PostgresSession.join(name, *session)

    async def find(self, query: Query, limit: int = 100) -> Sequence[JobEntry]:
        return [
            JobEntry.stored(row.items())
            for row in await self._fetch("find", *_conditions(query), limit)
        ]

    async def dead(self, query: Query, limit: int = 100) -> Sequence[JobEntry]:
        return [
            JobEntry.stored(row.items())
            for row in await self._fetch("dead", *_conditions(query), limit)
        ]

    async def retry(self, seqs: Sequence[int], *, reset: bool, by: str, why: str) -> int:
        seqs = check_seqs(seqs)
        async with self._act("retry", seqs, by, why) as act:
            await act.fetch("lock_owners", seqs, None)
            return await act.apply(
                await act.fetch("retry", list(seqs), reset), "no such job waits for a retry"
            )

    async def park(self, seqs: Sequence[int], *, by: str, why: str) -> int:
        seqs = check_seqs(seqs)
        async with self._act("park", seqs, by, why) as act:
            await act.fetch("lock_owners", seqs, None)
            return await act.apply(
                await act.fetch("park", list(seqs), by, why), "no such job, or it is parked already"
            )

    async def release(
        self,
        stream: str,
        *,
        ids: Sequence[int] = (),
        type: str = "",
        through: int = 0,
        by: str,
        why: str,
    ) -> int:
        ids, through = check_seqs(ids), check_seq(through) if through else 0
        async with self._act("release", [stream, *ids, *([type] if type else [])], by, why) as act:
            await act.fetch("lock_owners", [], stream)
            types = [type] if type else []
            rows = await act.fetch("release", stream, list(ids), types, through, by, why)
            return await act.apply(rows, f"the stream {stream!r} is not blocked")

    async def bury(
        self, seqs: Sequence[int], *, by: str, why: str, failure: Failure | None = None
    ) -> int:
        seqs = check_seqs(seqs)
        async with self._act("dead", seqs, by, why) as act:
            await act.fetch("lock_owners", seqs, None)
            rows = await act.fetch("partitions_of", list(seqs))
            await act.connection.execute(SQL["bury"], list(seqs))
            if failure is not None:
                words = (failure.reason, failure.error_type, failure.error)
                await act.connection.execute(SQL["name_reason"], list(seqs), *words)
            return await act.apply(rows, "no such job")

    async def replay(self, query: Query, *, limit: int, by: str, why: str) -> int:
        async with self._act("replay", [query], by, why) as act:
            rows = sorted(
                await act.fetch("exhume", *_conditions(query), limit),
                key=lambda row: cast(int, row["seq"]),
            )
            drafts = [
                JobDraft(r["type"], r["payload"], r["stream"], r["destination"]) for r in rows
            ]
            if drafts:
                new = await act.connection.fetchval(ENQUEUE, *arguments(drafts, self._rng))
                columns = (
                    [r["origin"] or r["seq"] for r in rows],
                    *([r[c] for r in rows] for c in _KEPT_BY_REPLAY),
                )
                await act.connection.execute(SQL["remember"], new, *columns)
            return await act.apply(rows, "no such dead letter")

    async def discard(self, query: Query, *, limit: int, by: str, why: str) -> int:
        async with self._act("discard", [query], by, why) as act:
            return await act.apply(
                await act.fetch("exhume", *_conditions(query), limit), "no such dead letter"
            )

    async def waiting(self, destinations: Sequence[str]) -> Mapping[str, WaitingJobs]:
        rows = await self._fetch("waiting", list(destinations))
        return {row["name"]: WaitingJobs(row["jobs"], row["oldest_at"]) for row in rows}

    async def oldest(self, destination: str, *, before: float, limit: int) -> Sequence[int]:
        return [row["seq"] for row in await self._fetch("oldest", destination, before, limit)]

    async def streams(self, limit: int = 100) -> Sequence[BlockedStream]:
        return [
            BlockedStream(
                block_of(row),
                row["waiting"],
                row["head_type"] or "",
                row["head_attempt"] or 0,
                reason_of(row["head_reason"]),
                row["head_error"] or "",
                row["head_due_at"],
                row["since_at"],
            )
            for row in await self._fetch("streams", limit)
        ]

    async def stats(self, parked: Collection[str] = ()) -> Stats:
        groups = [Group._make(row) for row in await self._fetch("groups", list(parked))]
        (total,) = await self._fetch("totals")
        dead = await self.dead_counts()
        return Stats.counted(groups, dead, total["blocked"], total["now"])

    async def dead_counts(self) -> Mapping[Reason | None, int]:
        return counted_reasons(tuple(row) for row in await self._fetch("dead_counts"))

    async def open_breakers(self) -> Sequence[OpenBreaker]:
        rows = await self._fetch("open_breakers")
        return [OpenBreaker(row["type"], row["open_until"], row["by"]) for row in rows]

    async def acts(self, limit: int = 100, before: int | None = None) -> Sequence[JobAct]:
        return [JobAct(**row) for row in await self._fetch("acts", limit, before)]

    async def close(self) -> None:
        await self._pools.close()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        await self._prepare()
        async with self._pools.calls.acquire() as connection:
            try:
                yield connection
            except asyncio.CancelledError:
                end_at_once(connection)  # returning it to the pool would wait for it
                raise

    async def _prepare(self) -> None:
        """Bring the schema up to date, once, and claim it for this server."""
        if self._prepared.is_set():
            return
        async with self._preparing:
            if self._prepared.is_set():
                return
            with reaching():
                connection = await self._pools.calls.acquire()
            try:
                with translated():
                    await refuse_shared_sessions(
                        connection, self._url, timeout=self._connect_seconds_max
                    )
                await migrate(connection)
                await _claim(connection, self._server)
            finally:
                await self._pools.calls.release(connection)
            self._prepared.set()

    async def _fetch(self, name: str, *values: Any) -> list[Any]:
        with translated():
            async with self._connection() as connection:
                return list(await connection.fetch(SQL[name], *values))

    @asynccontextmanager
    async def _act(
        self, verb: str, targets: Sequence[object], by: str, why: str
    ) -> AsyncIterator[_Act]:
        with translated():
            async with self._connection() as connection, connection.transaction():
                target = " ".join(map(str, targets))[:1000]
                yield _Act(connection, (verb, target, by, why), self._acts_kept_max)


_KEPT_BY_REPLAY = ("stages", "source", "source_id")


class _Act:
    """An operator's act in its transaction: change, record, and the owners' notice."""

    def __init__(self, connection: Any, act: tuple[str, str, str, str], kept_max: int) -> None:
        self.connection = connection
        self._verb, self._target, self._by, self._why = act
        self._kept_max = kept_max

    async def fetch(self, name: str, *values: Any) -> list[Any]:
        return list(await self.connection.fetch(SQL[name], *values))

    async def apply(self, rows: Sequence[Any], nothing: str) -> int:
        """Record the act on these rows and notify their owners; NotFound if none."""
        if not rows:
            raise NotFound(nothing)
        record = (self._verb, self._target, len(rows), self._by, self._why)
        await self.connection.execute(SQL["record"], *record, self._kept_max)
        partitions = [row["partition"] for row in rows if "partition" in row]
        await self.connection.execute(SQL["tell"], partitions)
        return len(rows)


async def migrate(connection: Any) -> None:
    """Bring the schema to SCHEMA_VERSION; refuses one that is too new.

    In one transaction, and by one process at a time.
    """
    number = connection.get_server_version()
    if number.major * 10000 < SERVER_VERSION_MIN:
        raise BadSetting(f"PostgreSQL {number.major} is too old: work needs 13 or newer")
    with translated():
        async with connection.transaction():
            await _migrate(connection)


async def _claim(connection: Any, server: str) -> None:
    """Claim the schema for this server; BadSetting if it belongs to another one."""
    if not server:
        return
    with translated():
        await connection.execute(SQL["claim"], server)
        keeper = await connection.fetchval(SQL["server"])
    if keeper != server:
        raise BadSetting(
            f"the jobs in this database belong to another Holdfast server ({keeper}; this one is"
            f" {server}): set work.url to a database of its own, or, if that server is gone for"
            " good, drop the schema holdfast_work"
        )


async def _migrate(connection: Any) -> None:
    await connection.execute(SQL["lock_schema"], _MIGRATION_LOCK)
    known = await connection.fetchval(SQL["is_there"])
    version = await connection.fetchval(SQL["version"]) if known else 0
    if version is None or version > SCHEMA_VERSION + VERSIONS_AHEAD_MAX:
        raise StateCorrupted(
            f"the schema holdfast_work has version {version}; this program knows up to"
            f" {SCHEMA_VERSION}: upgrade it"
        )
    if version < SCHEMA_VERSION:
        for script in (*MIGRATIONS[version:], *FUNCTIONS):
            await connection.execute(script)


def _conditions(query: Query) -> tuple[Any, ...]:
    reason = int(query.reason) if query.reason is not None else None
    state = int(query.state) if query.state is not None else None
    return list(query.seqs), query.type, query.stream, reason, state, query.fingerprint
