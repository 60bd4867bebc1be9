"""The composition root: opens the engines of a node, one ``match`` for each choice.

Everything else sees the contracts. ``shared_state`` opens the small ones. Two libraries
that also run without a node choose their own engines: ``limits/composition`` and
``work/outbox``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from holdfast import telemetry
from holdfast.access.contract import CredentialStore
from holdfast.access.revocations.contract import Revocations
from holdfast.access.revocations.sqlite import ACCESS
from holdfast.clock import Clock, Ids
from holdfast.drivers.sqlite.file_copy import StateFile
from holdfast.errors import BadSetting, extra
from holdfast.eventlog.contract import EventLog, SharedLog
from holdfast.eventlog.sqlite import SqliteEventLog
from holdfast.fanout.bus.contract import Bus
from holdfast.fanout.dead_letters import DeadLetters
from holdfast.fanout.registry.contract import Registry
from holdfast.limits.rulestore.sqlite import LIMITS
from holdfast.limits.snapshot_file import identity
from holdfast.node.between_nodes import open_between_nodes
from holdfast.node.cluster_record import leave, record_of, replies_apart
from holdfast.node.database_connections import JOBS, database_connections
from holdfast.node.shared_state import open_shared_state
from holdfast.settings import DurabilitySettings, Settings
from holdfast.store.contract import ChatStore, Records
from holdfast.store.leases.contract import Leases
from holdfast.store.nodes.contract import Nodes
from holdfast.store.nodes.memory import MemoryNodes
from holdfast.store.sqlite import CHATS, SqliteStore
from holdfast.streaming.reply_log.contract import ReplyLog
from holdfast.streaming.reply_log.sqlite import REPLIES, RepliesFile, SqliteReplyLog, SqliteUsage
from holdfast.streaming.usage_store.contract import UsageStore
from holdfast.webhooks.contract import WebhookEndpoints
from holdfast.webhooks.silences import SharedSilences
from holdfast.webhooks.sqlite import WEBHOOKS
from holdfast.work.contract import WorkStore
from holdfast.work.sqlite import WORK, SqliteWork

if TYPE_CHECKING:
    from holdfast.store.postgres import PostgresStore

FILES: Sequence[StateFile] = (WORK, WEBHOOKS, LIMITS, REPLIES, ACCESS, CHATS)
"""The databases of a state directory, in the order in which a backup copies them."""


class Engines(NamedTuple):
    """What a node stores things in and reaches other nodes by."""

    chats: ChatStore
    records: Records
    log: EventLog
    shared_log: SharedLog | None
    """The same, if nodes share it: one of them forgets its old events."""
    registry: Registry
    bus: Bus
    leases: Leases
    nodes: Nodes
    database_connections: int
    """Of the cluster's PostgreSQL: how many this node may take; 0 without one."""
    dead_letters: DeadLetters
    silences: SharedSilences | None
    """Of alerts, if nodes share them."""
    credentials: CredentialStore
    revocations: Revocations
    jobs: WorkStore
    endpoints: WebhookEndpoints
    replies: ReplyLog
    usage: UsageStore


@asynccontextmanager
async def open_engines(settings: Settings, state: Path, clock: Clock) -> AsyncIterator[Engines]:
    """Open every engine; close them when the block ends, the last opened first.

    BadSetting, StateDirectory or StateCorrupted if one cannot be used; Unavailable if
    the PostgreSQL of a cluster does not answer. That of the jobs may be unavailable:
    its store connects when it answers.
    """
    async with AsyncExitStack() as stack:
        store, log = await _open_chats(settings, state, clock, stack)
        node_id = settings.server.node_id or identity(state, Ids(clock))
        nodes, connections = await _join(settings, node_id, store, stack)
        if "ingest" in settings.server.roles and not isinstance(store, SqliteStore):
            await store.prepare_sends()
        shared = await stack.enter_async_context(open_shared_state(settings, state, clock, store))
        jobs = await _open_jobs(settings.work.url, shared.server, state, clock)
        stack.push_async_callback(jobs.close)
        between = await stack.enter_async_context(
            open_between_nodes(settings.cluster, node_id, clock, store)
        )
        replies_file = await RepliesFile.open(state / REPLIES.name, clock)
        stack.push_async_callback(replies_file.close)
        replies = await _open_replies(settings, replies_file)
        stack.push_async_callback(replies.close)
        yield Engines(
            chats=store,
            records=store,
            log=log,
            shared_log=None if isinstance(log, SqliteEventLog) else log,
            registry=between.registry,
            bus=between.bus,
            leases=between.leases,
            nodes=nodes,
            database_connections=connections,
            dead_letters=shared.dead_letters,
            silences=shared.silences,
            credentials=shared.credentials,
            revocations=shared.revocations,
            jobs=jobs,
            endpoints=shared.endpoints,
            replies=replies,
            usage=SqliteUsage(replies_file),
        )


async def _join(
    settings: Settings,
    node_id: str,
    store: SqliteStore | PostgresStore,
    stack: AsyncExitStack,
) -> tuple[Nodes, int]:
    """The records of all nodes, this one's among them, and how many connections of the
    database it says that it may take.
    """
    nodes: Nodes = MemoryNodes()
    connections = 0
    if not isinstance(store, SqliteStore):
        nodes = shared = store.nodes()
        stack.callback(shared.close)
        connections = database_connections(settings, store.connections_max)
    await nodes.join(record_of(settings, node_id, connections))
    stack.push_async_callback(leave, nodes)
    if (apart := replies_apart(settings, await nodes.living())) is not None:
        telemetry.log.warning("node.replies_apart", reason=apart)
    return nodes, connections


def open_records(
    state: Path, clock: Clock, cluster: Settings | None = None
) -> AbstractAsyncContextManager[Records]:
    """The records of a stopped server, for a command that holds its state directory;
    of a whole cluster if its settings are given.

    Without them by default settings: nothing else loads the store.
    """
    if cluster is not None:
        return _postgres_chats(cluster)
    return _sqlite_chats(DurabilitySettings(), state, clock)


async def _open_chats(
    settings: Settings, state: Path, clock: Clock, stack: AsyncExitStack
) -> tuple[SqliteStore | PostgresStore, SqliteEventLog | SharedLog]:
    """The store and its log; the log of either is the store's own commits."""
    cluster, durability = settings.cluster, settings.durability
    if not cluster.postgres:
        embedded = await stack.enter_async_context(_sqlite_chats(durability, state, clock))
        return embedded, SqliteEventLog(embedded)
    shared = await stack.enter_async_context(_postgres_chats(settings))
    with extra("postgres"):
        from holdfast.eventlog.postgres import PostgresEventLog
    return shared, PostgresEventLog(shared)


def _postgres_chats(settings: Settings) -> PostgresStore:
    with extra("postgres"):
        from holdfast.store.postgres import PostgresStore, PostgresStoreSettings
    cluster = settings.cluster
    chosen = PostgresStoreSettings(cluster.postgres, lossless=cluster.failover == "lossless")
    return PostgresStore(chosen, settings.durability.chats)


def _sqlite_chats(settings: DurabilitySettings, state: Path, clock: Clock) -> SqliteStore:
    return SqliteStore(state / CHATS.name, settings.sqlite, settings.chats, clock)


async def _open_jobs(url: str, server: str, state: Path, clock: Clock) -> WorkStore:
    match urlsplit(url).scheme or "sqlite":
        case "sqlite":
            return await SqliteWork.open(state / WORK.name, clock)
        case "postgres" | "postgresql":
            with extra("postgres"):
                from holdfast.work.postgres import PostgresWork
            return await PostgresWork.open(url, server=server, at_once=False, connections_max=JOBS)
        case other:
            raise BadSetting(f"work.url: there is no engine {other!r}")


async def _open_replies(settings: Settings, file: RepliesFile) -> ReplyLog:
    """The log of replies; usage rows are in ``file`` whatever keeps the replies."""
    url = settings.streaming.replies_url or "sqlite:"
    match urlsplit(url).scheme.removesuffix("+sentinel"):
        case "sqlite":
            return SqliteReplyLog(file)
        case "redis" | "rediss" | "unix":
            with extra("redis"):
                from holdfast.streaming.reply_log.redis import RedisReplyLog
            return await RedisReplyLog.open(url)
        case other:
            raise BadSetting(f"streaming.replies_url: there is no engine {other!r}")
