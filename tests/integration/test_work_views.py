"""The ten queries of document 003 on the views `wh_outbox` and `wh_inbox`; in SQLite
all but one word for word.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import pytest
from work_rigs import ManualWorker, Opened, draft, embedded_work, postgres_work

from engines import Server
from holdfast.work.job import OnFailure, Policies, Reason

POISON = """
SELECT message_id, destination, event_type, attempts, error,
       scheduled_for, created_at
FROM wh_outbox
WHERE attempts >= 10  -- High retry count
  AND (status & 32768) = 32768  -- Failed flag set
  AND scheduled_for IS NOT NULL  -- Still scheduled for retry
ORDER BY attempts DESC, created_at ASC;
"""
RETRY_COUNTS = """
SELECT attempts, COUNT(*) as message_count
FROM wh_outbox
WHERE (status & 32768) = 32768  -- Failed messages
GROUP BY attempts
ORDER BY attempts;
"""
REASONS = """
SELECT failure_reason, COUNT(*) as count
FROM wh_outbox
WHERE (status & 32768) = 32768
GROUP BY failure_reason
ORDER BY count DESC;
"""
BACKLOG = """
SELECT COUNT(*) as scheduled_count,
       MIN(scheduled_for) as next_retry,
       MAX(scheduled_for) as latest_retry
FROM wh_outbox
WHERE scheduled_for IS NOT NULL
  AND scheduled_for > NOW();
"""
POISON_COUNT = """
SELECT COUNT(*) as poison_candidates
FROM wh_outbox
WHERE attempts >= 10
  AND (status & 32768) = 32768;
"""
STUCK = """
SELECT message_id, attempts, error, scheduled_for
FROM wh_outbox
WHERE message_id = '<stuck_message_id>';
"""
STUCK_REASON = "SELECT failure_reason FROM wh_outbox WHERE message_id = '<stuck_message_id>';"
STUCK_DATA = "SELECT event_data FROM wh_outbox WHERE message_id = '<stuck_message_id>';"
BLOCKING = """
SELECT message_id, created_at, attempts, scheduled_for
FROM wh_outbox
WHERE stream_id = '<blocked_stream_id>'
ORDER BY created_at ASC
LIMIT 1;
"""
BLOCKING_POISON = "SELECT attempts FROM wh_outbox WHERE message_id = '<blocking_message_id>';"
TEN = [
    POISON,
    RETRY_COUNTS,
    REASONS,
    BACKLOG,
    POISON_COUNT,
    STUCK,
    STUCK_REASON,
    STUCK_DATA,
    BLOCKING,
    BLOCKING_POISON,
]

Ask = Callable[..., Any]
THROTTLED_OFTEN = Policies().with_type("order", Reason.THROTTLED, base_seconds=1000.0, jitter=0.0)


async def scene(o: Opened, ask: Ask) -> None:
    """A throttled job with a held follower, one parked, one ready, one from outside."""
    # In a call of its own: rows of one transaction have one time, and the ninth query
    # orders by it.
    (stuck,) = await o.store.enqueue([draft("blocked", payload=b'{"n": 1}', destination="mail")])
    _follower, parked, _ready, inbox = await o.store.enqueue(
        [
            draft("blocked"),
            draft("parked"),
            draft("free"),
            draft("in", source="shop", source_id="1"),
        ]
    )
    manual = await ManualWorker.join(o.store, policies=THROTTLED_OFTEN)
    await manual.turn()
    await manual.turn(
        failed=[manual.failure(stuck, Reason.THROTTLED, error="slow down")], held=[stuck + 1]
    )
    for _ in range(9):
        await o.pass_time(4000)
        assert await manual.turn() == [stuck]
        await manual.turn(failed=[manual.failure(stuck, Reason.THROTTLED, error="slow down")])
    manual.policies = Policies().with_type("order", stream=OnFailure.PARK)
    await manual.turn(failed=[manual.failure(parked, error="look at me")])

    ids = {"stuck_message_id": stuck, "blocking_message_id": stuck, "blocked_stream_id": "blocked"}
    (poison,) = await ask(POISON)
    assert poison[:5] == (str(stuck), "mail", "order", 10, "slow down")
    assert await ask(RETRY_COUNTS) == [(1, 1), (10, 1)]
    assert sorted(await ask(REASONS)) == [
        (int(Reason.HANDLER_EXCEPTION), 1),
        (int(Reason.THROTTLED), 1),
    ]
    ((count, next_retry, latest_retry),) = await ask(BACKLOG)
    assert (count, next_retry) == (1, latest_retry)
    assert await ask(POISON_COUNT) == [(1,)]
    ((message_id, attempts, error, scheduled_for),) = await ask(STUCK, **ids)
    assert (message_id, attempts, error) == (str(stuck), 10, "slow down")
    assert scheduled_for is not None
    assert await ask(STUCK_REASON, **ids) == [(int(Reason.THROTTLED),)]
    assert await ask(STUCK_DATA, **ids) == [('{"n": 1}',)]
    ((blocking, _, attempts, _),) = await ask(BLOCKING, **ids)
    assert (blocking, attempts) == (str(stuck), 10)
    assert await ask(BLOCKING_POISON, **ids) == [(10,)]
    assert await ask("SELECT message_id, status FROM wh_inbox") == [(str(inbox), 1)]
    assert await ask(f"SELECT status FROM wh_outbox WHERE message_id = '{parked}'") == [(32769,)]


def filled(query: str, names: dict[str, Any]) -> str:
    return re.sub(r"<(\w+)>", lambda found: str(names[found.group(1)]), query)


@pytest.mark.covers("003 Failed 32768 as a bit of the status")
async def test_ten_queries_of_the_document_run_on_postgresql(postgres_server: Server) -> None:
    async with postgres_work(postgres_server.url) as o:
        connection = await asyncpg.connect(postgres_server.url)
        await connection.execute("SET search_path = holdfast_work")

        async def ask(query: str, **names: Any) -> list[tuple[Any, ...]]:
            return [tuple(row) for row in await connection.fetch(filled(query, names))]

        for query in TEN:
            await connection.fetch(query)  # word for word, placeholders included
        await scene(o, ask)
        await connection.close()


@pytest.mark.covers("003 scheduled retry backlog")
async def test_sqlite_runs_nine_of_ten_queries_and_the_backlog_with_a_literal_time(
    tmp_path: Path,
) -> None:
    """SQLite has no NOW()."""

    async with embedded_work(tmp_path / "work.db") as o:
        connection = apsw.Connection(str(tmp_path / "work.db"), flags=apsw.SQLITE_OPEN_READONLY)

        async def ask(query: str, **names: Any) -> list[tuple[Any, ...]]:
            return list(
                connection.execute(filled(query, names).replace("NOW()", str(o.store._clock.now())))
            )

        for query in TEN:
            if query is not BACKLOG:
                list(connection.execute(query))
        with pytest.raises(apsw.SQLError, match="no such function: NOW"):
            list(connection.execute(BACKLOG))
        await scene(o, ask)
        connection.close()


async def test_views_show_a_payload_that_is_no_text(
    postgres_server: Server,
) -> None:
    async with postgres_work(postgres_server.url) as o:
        await o.store.enqueue(
            [draft(payload=b"plain"), draft(payload=b"\xff\x00\x01"), draft(payload=b"")]
        )
        connection = await asyncpg.connect(postgres_server.url)
        rows = await connection.fetch(
            "SELECT event_data FROM holdfast_work.wh_outbox ORDER BY message_id::bigint"
        )
        await connection.close()
        assert [row["event_data"] for row in rows] == ["plain", "\\377\\000\x01", ""]
