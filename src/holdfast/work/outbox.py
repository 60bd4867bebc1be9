"""Outbox and inbox: store a job in the same transaction as your own data.

A worker sees the job after the commit, and only then; a rollback removes it too.

Outbox. ``enqueue`` takes your connection (asyncpg, psycopg, or SQLAlchemy over either)
inside your transaction; ``enqueue_sync`` takes a synchronous psycopg or SQLAlchemy
connection. With SQLite the connection is the store's own, lent by
``SqliteWork.transaction``, and your data is in the same file.

Enqueue all jobs of a transaction in one call, as late as possible. From the call to the
commit their streams are locked, so that a later job of a stream cannot commit before an
earlier one. Producers of other streams do not wait, unless a transaction stores jobs of
more than 64 streams. work/postgres/functions/locks.sql says what may be refused.

Inbox. ``received`` stores a message from outside under its source and its id there, and
recognises a repetition for seven days. The handler's effects happen exactly once inside
``ctx.transaction()``, otherwise at least once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from inspect import iscoroutinefunction
from typing import Any

from holdfast.clock import SystemClock
from holdfast.errors import BadSetting, InvalidMessage
from holdfast.work.job import PARTITIONS, JobDraft, check_draft, partition_and_lane
from holdfast.work.sqlite.verbs import enqueue as enqueue_embedded

_TYPES = (
    "smallint[]",
    "integer[]",
    "text[]",
    "text[]",
    "text[]",
    "bytea[]",
    "float8[]",
    "text[]",
    "text[]",
)
ENQUEUE = (
    f"SELECT holdfast_work.enqueue({', '.join(f'${n}::{t}' for n, t in enumerate(_TYPES, 1))})"
)
_PSYCOPG = f"SELECT holdfast_work.enqueue({', '.join(f'%s::{t}' for t in _TYPES)})"
_SQLALCHEMY = (
    "SELECT"
    f" holdfast_work.enqueue({', '.join(f'CAST(:p{n} AS {t})' for n, t in enumerate(_TYPES))})"
)
_RANDOM = random.Random()
_ASYNC = "enqueue (enqueue_sync is for synchronous connections) takes a"
_SYNC = "enqueue_sync (enqueue is for asynchronous connections) takes a"


async def enqueue(connection: Any, *drafts: JobDraft) -> list[int]:
    """Store jobs in the connection's transaction and return their sequences.

    The sequence is 0 for a job that the inbox has seen before.
    """
    if not drafts:
        return []
    values = arguments(drafts, _RANDOM)
    match type(connection).__module__.partition(".")[0]:
        case "asyncpg":
            _require(
                hasattr(connection, "is_in_transaction"),
                connection,
                "enqueue takes an asyncpg connection",
            )
            return list(await connection.fetchval(ENQUEUE, *values))
        case "psycopg":
            _require(
                iscoroutinefunction(connection.execute),
                connection,
                f"{_ASYNC} psycopg.AsyncConnection",
            )
            async with connection.cursor(**_plain_rows()) as cursor:
                await cursor.execute(_PSYCOPG, values)
                return list((await cursor.fetchone())[0])
        case "sqlalchemy":
            message = f"{_ASYNC} AsyncConnection or AsyncSession"
            _require(iscoroutinefunction(getattr(connection, "execute", None)), connection, message)
            result = await connection.execute(*_sqlalchemy(values))
            return list(result.scalar_one())
        case "apsw":
            return enqueue_embedded(connection, drafts, SystemClock.now())
        case other:
            raise BadSetting(
                "enqueue takes a connection of asyncpg, psycopg, SQLAlchemy or apsw, not of"
                f" {other!r}"
            )


def enqueue_sync(connection: Any, *drafts: JobDraft) -> list[int]:
    """``enqueue`` for a synchronous connection or session of psycopg or SQLAlchemy."""
    if not drafts:
        return []
    values = arguments(drafts, _RANDOM)
    match type(connection).__module__.partition(".")[0]:
        case "psycopg":
            _require(
                not iscoroutinefunction(connection.execute),
                connection,
                f"{_SYNC} psycopg.Connection",
            )
            with connection.cursor(**_plain_rows()) as cursor:
                return list(cursor.execute(_PSYCOPG, values).fetchone()[0])
        case "sqlalchemy":
            execute = getattr(connection, "execute", None)
            sync = execute is not None and not iscoroutinefunction(execute)
            _require(sync, connection, f"{_SYNC} Connection or Session")
            return list(connection.execute(*_sqlalchemy(values)).scalar_one())
        case other:
            raise BadSetting(
                f"enqueue_sync takes a connection of psycopg or SQLAlchemy, not of {other!r}"
            )


async def received(connection: Any, source: str, source_id: str, draft: JobDraft) -> bool:
    """Store a message from outside in the connection's transaction; False if known."""
    if not source or not source_id:
        raise InvalidMessage(
            "a message from outside needs a source and its id there", field="source"
        )
    (seq,) = await enqueue(connection, replace(draft, source=source, source_id=source_id))
    return seq != 0


def arguments(drafts: Sequence[JobDraft], rng: random.Random) -> tuple[list[Any] | None, ...]:
    """The arrays of the SQL function ``enqueue``."""
    for draft in drafts:
        check_draft(draft)
    positions = [
        partition_and_lane(d.stream) if d.stream is not None else (rng.randrange(PARTITIONS), None)
        for d in drafts
    ]
    from_outside = any(d.source for d in drafts)
    return (
        [partition for partition, _ in positions],
        [lane for _, lane in positions],
        [d.stream for d in drafts],
        [d.type for d in drafts],
        [d.destination for d in drafts],
        [d.payload for d in drafts],
        [d.delay_seconds for d in drafts],
        [d.source or None for d in drafts] if from_outside else None,
        [d.source_id or None for d in drafts] if from_outside else None,
    )


def _require(fit: bool, connection: Any, message: str) -> None:
    """Refuse early what has no transaction of the caller: a pool, or an engine."""
    if not fit:
        kind = type(connection)
        raise BadSetting(
            f"{message}, in whose transaction the jobs are stored, not a"
            f" {kind.__module__}.{kind.__qualname__}"
        )


def _plain_rows() -> dict[str, Any]:
    """Cursor options for tuple rows, whatever row factory the connection has."""
    from psycopg.rows import tuple_row  # only when the caller uses it

    return {"row_factory": tuple_row}


def _sqlalchemy(values: Sequence[list[Any] | None]) -> tuple[Any, dict[str, Any]]:
    from sqlalchemy import text  # only when the caller uses it

    return text(_SQLALCHEMY), {f"p{n}": value for n, value in enumerate(values)}
