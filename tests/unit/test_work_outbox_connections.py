"""``enqueue`` refuses what is no connection of its kind before it sends anything."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from holdfast.errors import BadSetting
from holdfast.work.inspection import Query
from holdfast.work.job import JobDraft, Reason
from holdfast.work.outbox import enqueue, enqueue_sync


def _unopened(kind: type[Any]) -> Any:
    return kind.__new__(kind)


@pytest.mark.parametrize(
    "kind",
    [asyncpg.Pool, psycopg.Connection, AsyncEngine, sqlalchemy.Connection, sqlalchemy.Engine, dict],
)
def test_enqueue_names_what_it_takes_and_what_it_got(kind: type[Any]) -> None:
    with pytest.raises(BadSetting, match="takes a") as refused:
        asyncio.run(enqueue(_unopened(kind), JobDraft("J", b"{}")))
    assert kind.__name__ in str(refused.value) or kind is dict


@pytest.mark.parametrize(
    "kind", [psycopg.AsyncConnection, AsyncConnection, AsyncEngine, sqlalchemy.Engine, dict]
)
def test_enqueue_sync_names_what_it_takes_and_what_it_got(kind: type[Any]) -> None:
    with pytest.raises(BadSetting, match="takes a") as refused:
        enqueue_sync(_unopened(kind), JobDraft("J", b"{}"))
    assert kind.__name__ in str(refused.value) or kind is dict


@pytest.mark.parametrize(
    ("query", "text"),
    [
        (Query(), "all"),
        (Query(seqs=[3, 4]), "3 4"),
        (Query(type="J", reason=Reason.THROTTLED), "type=J reason=THROTTLED"),
    ],
)
def test_recorded_act_names_its_jobs_as_text(query: Query, text: str) -> None:
    assert str(query) == text
