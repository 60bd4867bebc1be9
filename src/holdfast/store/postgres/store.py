"""The verbs of the contract: each is a CALL that commits, or a read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import asyncpg
from msgspec.json import encode

from holdfast import telemetry
from holdfast.bounds import KIB
from holdfast.errors import InternalError, InvalidMessage
from holdfast.message import (
    Ban,
    Chat,
    Cursor,
    Draft,
    Member,
    Mute,
    Outcome,
    Page,
    PageToken,
    User,
    Watermark,
)
from holdfast.store.commands import Command, CommandContext, CommandResult
from holdfast.store.contract import (
    MEMBERSHIPS_MAX,
    ActivePage,
    AuditPage,
    ChatPage,
    DamagedPage,
    Grouping,
    HaltedChats,
    Inspection,
    TextPage,
    shard_of,
)
from holdfast.store.plan import ChatSettings, check_same, check_text, still_running
from holdfast.store.postgres import log_reads, reads
from holdfast.store.postgres.append import NO_COUNTER, arguments, settle, sorted_group
from holdfast.store.postgres.change import audit_json, change
from holdfast.store.postgres.connections import Connections
from holdfast.store.postgres.errors import is_refused
from holdfast.store.postgres.leases import PostgresLeases
from holdfast.store.postgres.log_reads import LogEnds, LogSlice
from holdfast.store.postgres.nodes import PostgresNodes
from holdfast.store.postgres.notifications import CommitNotifications
from holdfast.store.postgres.server import ChatsServer, PostgresStoreSettings, ServerConnection

T = TypeVar("T")

HEADS_AT_ONCE = 1_000
"""``heads`` of more chats is split, so that no connection is taken for long."""


class PostgresStore:
    """See ``ChatStore`` and ``Records`` of ``holdfast.store.contract``.

    ``async with`` checks the server and brings the schema up to date; an OperatorError
    says why it cannot be used. Any number of nodes may use one database.
    """

    def __init__(self, settings: PostgresStoreSettings, limits: ChatSettings | None = None) -> None:
        self._server = ChatsServer(settings)
        self._connections = Connections(self._server)
        self._notifications = CommitNotifications(self._server)
        self.poll_seconds = settings.poll_seconds
        self.connections_max = settings.connections_max
        self._limits = limits or ChatSettings()
        self.grouping = Grouping(
            "shard",
            sends_max=512,
            bytes_max=512 * KIB,
            at_once=settings.groups_at_once,
            reads_at_once=settings.reads_at_once,
        )

    async def check_connection(self, raw: Any) -> None:
        """Unavailable unless this connection, of another part of the node, is to the
        server that the chats are on.
        """
        await self._server.check_connection(raw)

    async def __aenter__(self) -> Self:
        self._connections.adopt(await self._server.prepare())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._connections.close()
        await self._notifications.close()

    def leases(self, holder: str) -> PostgresLeases:
        """Leases in the same database; close them before the store."""
        return PostgresLeases(self._server, holder)

    def nodes(self) -> PostgresNodes:
        """Node records in the same database; close them before the store."""
        return PostgresNodes(self._server)

    def lane(self, chat_id: str) -> int:
        return shard_of(chat_id, self._server.shards)

    def append(self, group: Sequence[Draft]) -> Awaitable[list[Outcome]]:
        return self._connections.append(partial(self._append, drafts=group))

    async def prepare_sends(self) -> None:
        """Open the connections of sends and make their plans, by a group of none: 25 ms
        of processor time each, which the first sends of a node would wait for.
        Unavailable if the server does not answer.
        """
        await self._connections.open_groups(_append_nothing)

    async def change(self, command: Command) -> CommandResult:
        work = partial(self._change, command=command)
        return await self._connections.change(work, self.lane(command.chat_id))

    async def mark(self, watermarks: Sequence[Watermark]) -> None:
        columns = (
            [w.user.tenant for w in watermarks],
            [w.user.user_id for w in watermarks],
            [w.device_id for w in watermarks],
            [w.chat_id for w in watermarks],
            [w.epoch for w in watermarks],
            [w.delivered for w in watermarks],
            [w.read for w in watermarks],
        )
        await self._call("mark", *columns, self._limits.devices_per_member_max)

    async def record(
        self, act: CommandContext, action: str, target: str, details: str = ""
    ) -> None:
        check_text("reason", act.reason + details)
        note = encode(audit_json(act, action, target, details)).decode()
        await self._call("record", note)

    async def begin(self, act: CommandContext, node: str, seconds: float) -> str | None:
        key = (*act.actor, act.key or "", act.fingerprint, act.at)
        row = await self._call("begin", *key, node, seconds)
        if row["is_taken"]:
            return None
        check_same(act, row["fingerprint"])
        if row["is_running"]:
            raise still_running()
        return str(row["answer"])

    async def keep(self, act: CommandContext, answer: str | None) -> None:
        check_text("answer", answer or "")
        await self._call("keep", *act.actor, act.key or "", answer)

    async def forget_answers(self, before: str, limit: int) -> int:
        return int((await self._call("forget_answers", before, limit))["forgotten"])

    async def forget_answers_of(self, user: User) -> None:
        await self._call("forget_answers_of", *user)

    async def forget_send_keys(self, before: str, limit: int) -> int:
        moment = datetime.fromisoformat(before)
        return int((await self._call("forget_send_keys", moment, limit))["forgotten"])

    async def forget_log_events(self, before: str, behind: Sequence[int], limit: int) -> int:
        """Forget events of the log that are older than a moment and that all readers
        have read: ``behind`` has their least positions, by shard. Returns how many;
        repeat until 0. A position before them is lost then.
        """
        values = (datetime.fromisoformat(before), behind, limit)
        return int((await self._call("forget_log_events", *values))["forgotten"])

    async def forget_devices(self, user: User) -> None:
        await self._call("forget_devices", *user)

    async def touch(self) -> None:
        await self._call("touch")

    async def texts_of(self, user: User, after: PageToken | None = None) -> TextPage:
        return await self._read(reads.texts_of, user, after, self._server.shards)

    async def active_since(self, at: str, after: PageToken | None = None) -> ActivePage:
        return await self._read(reads.active_since, at, after)

    async def damaged(self, after: PageToken | None = None) -> DamagedPage:
        return await self._read(reads.damaged, after)

    async def halt_damaged(self, chat_ids: Sequence[str]) -> None:
        row = await self._call("halt_damaged", list(chat_ids))
        for chat_id in row["lost"]:
            telemetry.counter_corruption(chat_id)
        for chat_id in row["taken"]:
            telemetry.duplicate_sequence(chat_id)

    async def read_after(
        self, chat_id: str, after: int, limit: int, bytes_max: int, reader: User | None = None
    ) -> Page:
        return await self._read(reads.read_after, chat_id, after, (limit, bytes_max), reader)

    async def read_before(
        self, chat_id: str, before: int, limit: int, bytes_max: int, reader: User | None = None
    ) -> Page:
        return await self._read(reads.read_before, chat_id, before, (limit, bytes_max), reader)

    async def heads(self, chat_ids: Iterable[str]) -> Mapping[str, Cursor]:
        wanted = list(chat_ids)
        found: dict[str, Cursor] = {}
        for start in range(0, len(wanted), HEADS_AT_ONCE):
            found.update(await self._read(reads.heads, wanted[start : start + HEADS_AT_ONCE]))
        return found

    async def memberships(
        self, users: Sequence[User], chats_max: int = MEMBERSHIPS_MAX
    ) -> Mapping[User, Mapping[str, Cursor]]:
        return await self._read(reads.memberships, users, chats_max)

    async def memberships_in(
        self, asked: Sequence[tuple[User, str]]
    ) -> Mapping[tuple[User, str], Cursor]:
        return await self._read(reads.memberships_in, asked)

    async def chats_of(
        self,
        user: User,
        limit: int,
        after: PageToken | None = None,
        only: Collection[str] | None = None,
    ) -> ChatPage:
        return await self._read(reads.chats_of, user, limit, after, only)

    async def chat(self, chat_id: str, reader: User | None = None) -> Chat:
        return await self._read(reads.chat, chat_id, reader)

    async def members(self, chat_id: str) -> Sequence[Member]:
        return await self._read(reads.members, chat_id)

    async def bans(self, chat_id: str) -> Sequence[Ban]:
        return await self._read(reads.bans, chat_id)

    async def mutes(self, chat_id: str) -> Sequence[Mute]:
        return await self._read(reads.mutes, chat_id)

    async def watermarks(self, chat_id: str) -> Sequence[Watermark]:
        return await self._read(reads.watermarks, chat_id)

    async def inspect(self, chat_id: str) -> Inspection:
        return await self._read(reads.inspect, chat_id)

    async def halted(self, limit: int) -> HaltedChats:
        return await self._read(reads.halted, limit)

    async def audit(self, after: PageToken | None, limit: int) -> AuditPage:
        return await self._read(reads.audit, after, limit)

    def on_grown(self, listener: Callable[[], None]) -> None:
        self._notifications.on_grown(listener)

    async def log_ends(self) -> LogEnds:
        return await self._read(log_reads.log_ends)

    async def read_log(self, after: Sequence[int], limit: int) -> LogSlice | None:
        page = await self._read(log_reads.log_after, after, limit)
        if page is not None:
            self._server.seen.on_read(page.base, page.reached)
        return page

    async def log_lag(self, after: Sequence[int]) -> int:
        return await self._read(log_reads.log_lag, after)

    async def raise_all_epochs(self, base: int) -> None:
        await self._write(partial(self._server.raise_all_epochs, base=base))
        self._notifications.announce()

    async def raise_epochs(self, reason: str) -> int:
        base = await self._write(partial(self._server.raise_epochs, reason=reason))
        self._notifications.announce()
        return base

    async def _change(self, connection: ServerConnection, command: Command) -> CommandResult:
        changed = await change(connection, command, self.lane(command.chat_id), self._limits)
        self._notifications.announce()
        return changed

    async def _append(self, connection: ServerConnection, drafts: Sequence[Draft]) -> list[Outcome]:
        """One commit for the group; another one for sends whose key came twice in it
        with different contents.
        """
        group = sorted_group(drafts)
        if group.asked:
            try:
                values = arguments(group)
                row = await connection.call("append", *values, self._server.settings.lossless)
            except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                if not _is_of_one_send(error):
                    raise
                return await self._append_one_by_one(connection, drafts, error)
            self._notifications.announce(len(group.asked))
            for chat_id, code in settle(group, row):
                lost = code == NO_COUNTER
                (telemetry.counter_corruption if lost else telemetry.duplicate_sequence)(chat_id)
        if group.later:
            again = await self._append(connection, [drafts[place] for place in group.later])
            for place, outcome in zip(group.later, again, strict=True):
                group.outcomes[place] = outcome
        return group.outcomes  # type: ignore[return-value]  # each is known by now

    async def _append_one_by_one(
        self, connection: ServerConnection, drafts: Sequence[Draft], error: Exception
    ) -> list[Outcome]:
        """A send that cannot be stored fails alone."""
        if len(drafts) > 1:
            return [(await self._append(connection, [draft]))[0] for draft in drafts]
        if is_refused(error):
            return [InvalidMessage("a field of this message cannot be stored")]
        telemetry.log.error("store.send_failed", chat_id=drafts[0].chat_id, error=str(error))
        return [InternalError(f"the message could not be stored: {error}")]

    async def _call(self, name: str, *values: Any) -> Any:
        return await self._write(lambda connection: connection.call(name, *values))

    def _write(self, work: Callable[[ServerConnection], Coroutine[Any, Any, T]]) -> Awaitable[T]:
        return self._connections.change(work)

    async def _read(self, read: Callable[..., Coroutine[Any, Any, T]], *values: Any) -> T:
        return await self._connections.read(lambda connection: read(connection, *values))


async def _append_nothing(connection: ServerConnection) -> None:
    await connection.call("append", *arguments(sorted_group(())), False)


def _is_of_one_send(error: Exception) -> bool:
    """Whether the rest of a group can be stored without one of its sends."""
    return is_refused(error) or isinstance(error, asyncpg.IntegrityConstraintViolationError)
