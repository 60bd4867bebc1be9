"""Stores for tests: every adapter behind one rig, and short ways to say who does what.

``rig.run(test)`` opens the adapter's store, runs ``test(store)`` on it and closes it;
``rig.lose_…`` break a chat's numbering from outside, as a bad restore would.
``rig.date`` gives messages another age, where the store's clock stamps them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import apsw
import asyncpg

from holdfast.message import Acked, Draft, Message, Outcome, User
from holdfast.store.commands import CommandContext, CommandResult, CreateChat
from holdfast.store.memory import MemoryStore
from holdfast.store.plan import ChatSettings
from holdfast.store.postgres import PostgresStore, PostgresStoreSettings
from holdfast.store.sqlite import SqliteSettings, SqliteStore

AT = "2026-01-01T00:00:00.000Z"
ANN, BOB, CARL, EVE = (User("default", name) for name in ("ann", "bob", "carl", "eve"))
STRANGER = User("other", "ann")
PAGE = (100, 256 * 1024)

_numbers = count(1)


def act(actor: User = ANN, at: str = AT, **fields: Any) -> CommandContext:
    return CommandContext(actor, at, f"msg_{next(_numbers)}", **fields)


def operator(**fields: Any) -> CommandContext:
    return act(User("default", "op"), operator=True, **fields)


def draft(key: str, content: str = "hello", sender: User = ANN, chat_id: str = "chat_a") -> Draft:
    return Draft(sender, chat_id, key, content, "text/plain", f"msg_{next(_numbers)}", AT)


def acked(outcome: Outcome) -> Message:
    assert isinstance(outcome, Acked), repr(outcome)
    return outcome.message


async def create(
    store: Any, *members: str, chat_id: str = "chat_a", creator: User = ANN, name: str = "Team"
) -> CommandResult:
    changed = await store.change(CreateChat(act(creator), chat_id, "group", name, members))
    assert isinstance(changed, CommandResult)
    return changed


async def send(
    store: Any, key: str, content: str = "hello", sender: User = ANN, chat_id: str = "chat_a"
) -> Outcome:
    outcome: Outcome = (await store.append([draft(key, content, sender, chat_id)]))[0]
    return outcome


async def fill(store: Any, many: int, chat_id: str = "chat_a") -> None:
    """Bring a new chat's counter to ``many``."""
    for outcome in await store.append([draft(f"fill-{n}", chat_id=chat_id) for n in range(many)]):
        acked(outcome)


class MemoryRig:
    """The reference."""

    limits: ChatSettings | None = None

    def __init__(self) -> None:
        self.store: MemoryStore | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        self.store = self.store or MemoryStore(self.limits)
        yield self.store

    def run(self, test: Callable[[Any], Awaitable[None]]) -> None:
        asyncio.run(_run(self.open(), test))

    def lose_counter(self, chat_id: str) -> None:
        assert self.store is not None
        self.store._chats[chat_id].counter = None
        self.store._chats[chat_id].last_position = 0  # goes with it

    def set_counter(self, chat_id: str, counter: int) -> None:
        assert self.store is not None
        self.store._chats[chat_id].counter = counter

    def lose_message(self, chat_id: str, sequence: int) -> None:
        assert self.store is not None
        del self.store._chats[chat_id].messages[sequence]

    def date(self, chat_id: str, at: str, sequence: int | None = None) -> None:
        """A message keeps the time of its draft."""


class SqliteRig:
    """The embedded store, in a directory of the test's own."""

    limits: ChatSettings | None = None
    settings = SqliteSettings()

    def __init__(self, directory: Path) -> None:
        self.path = directory / "chats.db"

    def open(self) -> AbstractAsyncContextManager[Any]:
        return SqliteStore(self.path, self.settings, self.limits)

    def run(self, test: Callable[[Any], Awaitable[None]]) -> None:
        asyncio.run(_run(self.open(), test))

    def lose_counter(self, chat_id: str) -> None:
        self._damage("counters_are_never_deleted", "DELETE FROM counters WHERE chat = ?", chat_id)

    def set_counter(self, chat_id: str, counter: int) -> None:
        change = f"UPDATE counters SET sequence_counter = {counter} WHERE chat = ?"
        self._damage("counters_never_go_back", change, chat_id)

    def lose_message(self, chat_id: str, sequence: int) -> None:
        self._damage(
            None, f"DELETE FROM messages WHERE chat = ? AND sequence = {sequence}", chat_id
        )

    def date(self, chat_id: str, at: str, sequence: int | None = None) -> None:
        """A message keeps the time of its draft."""

    def _damage(self, trigger: str | None, statement: str, chat_id: str) -> None:
        connection = apsw.Connection(str(self.path))
        connection.set_busy_timeout(5_000)
        with connection:
            guard = connection.execute(
                "SELECT sql FROM sqlite_schema WHERE name = ?", (trigger,)
            ).get
            if guard:
                connection.execute(f"DROP TRIGGER {trigger}")
            chat = connection.execute("SELECT chat FROM chats WHERE chat_id = ?", (chat_id,)).get
            connection.execute(statement, (chat,))
            if guard:
                connection.execute(guard)
        connection.close()


class PostgresRig:
    """The store for many nodes, on the server of the test session."""

    limits: ChatSettings | None = None

    def __init__(self, url: str) -> None:
        self.url = url
        # On a busy machine a connection may take seconds.
        self.settings = PostgresStoreSettings(url, connect_timeout_seconds=20.0)
        self._is_empty = False

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        if not self._is_empty:
            await empty_chats(self.url)
            self._is_empty = True
        async with PostgresStore(self.settings, self.limits) as store:
            yield store

    def run(self, test: Callable[[Any], Awaitable[None]]) -> None:
        asyncio.run(_run(self.open(), test))

    def lose_counter(self, chat_id: str) -> None:
        change = "UPDATE holdfast_chats.chat SET counter = NULL, active_at = '-infinity'"
        self._damage(f"{change} WHERE chat_id = '{chat_id}'")

    def set_counter(self, chat_id: str, counter: int) -> None:
        change = f"UPDATE holdfast_chats.chat SET counter = {counter}"
        self._damage(f"{change} WHERE chat_id = '{chat_id}'")

    def lose_message(self, chat_id: str, sequence: int) -> None:
        self._damage(
            "DELETE FROM holdfast_chats.message AS m USING holdfast_chats.chat AS c"
            f" WHERE c.chat_id = '{chat_id}' AND m.chat = c.chat AND m.sequence = {sequence}"
        )

    def date(self, chat_id: str, at: str, sequence: int | None = None) -> None:
        one = "" if sequence is None else f" AND m.sequence = {sequence}"
        self._damage(
            f"UPDATE holdfast_chats.message AS m SET created_at = '{at}' FROM holdfast_chats.chat"
            f" AS c WHERE c.chat_id = '{chat_id}' AND m.chat = c.chat{one}"
        )

    def _damage(self, statement: str) -> None:
        """From another thread, because the test's loop is running."""
        thread = threading.Thread(target=asyncio.run, args=(without_triggers(self.url, statement),))
        thread.start()
        thread.join()


async def without_triggers(url: str, *statements: str) -> None:
    """Change the database as only damage can."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(
            ";".join(["SET session_replication_role = replica", "BEGIN", *statements, "COMMIT"])
        )
    finally:
        await connection.close()


async def empty_chats(url: str) -> None:
    """Delete everything but the schema; cheaper than a database for each test."""
    kept = "'cluster', 'shard', 'keys_forgotten', 'touched', 'schema_version'"
    await without_triggers(
        url,
        "DO $$ DECLARE t text; BEGIN IF to_regclass('holdfast_chats.schema_version') IS NOT NULL"
        " THEN FOR t IN SELECT tablename FROM pg_tables WHERE schemaname = 'holdfast_chats'"
        f" AND tablename NOT IN ({kept})"
        " LOOP EXECUTE format('DELETE FROM holdfast_chats.%I', t); END LOOP;"
        " UPDATE holdfast_chats.cluster SET epoch_base = 0,"
        " system = (SELECT system_identifier::text FROM pg_control_system());"
        " UPDATE holdfast_chats.keys_forgotten SET through = 0;"
        " UPDATE holdfast_chats.shard SET first_position = 0; END IF; END $$",
    )


Rig = MemoryRig | SqliteRig | PostgresRig
EMBEDDED = ("memory", "sqlite")
RIGS = (*EMBEDDED, "postgres")


def on_every_store(
    scenario: Callable[..., Awaitable[None]], limits: ChatSettings | None = None
) -> Callable[[Rig], None]:
    """A test that runs ``scenario(store, rig)`` on each store."""

    def test(rig: Rig) -> None:
        rig.limits = limits
        rig.run(lambda store: scenario(store, rig))

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


async def _run(
    opening: AbstractAsyncContextManager[Any], test: Callable[[Any], Awaitable[None]]
) -> None:
    async with opening as store:
        await test(store)
