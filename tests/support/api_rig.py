"""The REST surface in this process: the real application over the real intake and the
memory store, no socket.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from credentials import SECRET, key_ring
from limits_rig import Log
from reply_rig import ReplyRig

from holdfast.access.contract import ApiKey
from holdfast.access.keys import new_key
from holdfast.access.principal import USER_SCOPES, KeyScope, UserScope
from holdfast.access.proofs import CursorProofs
from holdfast.access.revocations.in_force import RevocationsInForce
from holdfast.access.revocations.memory import MemoryRevocations
from holdfast.access.tokens import Tokens, TokenSettings, shared_secret
from holdfast.api.address_limits import AddressLimits
from holdfast.api.app import RestApp
from holdfast.api.deps import (
    ApiDeps,
    ApiSettings,
    Backup,
    ClusterStatus,
    NodeStatus,
    PresenceView,
    Readiness,
    RegistryView,
)
from holdfast.api.responses import STATUS
from holdfast.clock import Clock, Ids, ManualClock
from holdfast.drivers.sqlite.file_copy import CopiedFile
from holdfast.errors import Unavailable
from holdfast.eventlog.contract import Position
from holdfast.eventlog.memory import MemoryEventLog
from holdfast.fanout.dead_letters import RecentDeadLetters
from holdfast.history.history import ChatHistory, HistorySettings
from holdfast.ingest.durability import StoreDurability
from holdfast.ingest.erasure import Eraser
from holdfast.ingest.intake import Intake
from holdfast.limits.admin import RuleAdmin
from holdfast.limits.composition import LimitsParts, LimitsSettings, open_limits
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.feed import RuleFeed
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rules import Rule, RuleSet
from holdfast.message import User
from holdfast.node.alerts import AlertDeps, NodeAlerts
from holdfast.node.status import wrong_first
from holdfast.store.contract import HaltedChats
from holdfast.store.leases.memory import MemoryLeases
from holdfast.store.memory import MemoryStore
from holdfast.streaming.body_bytes import BodyBytes
from holdfast.streaming.usage_store.memory import MemoryUsage
from holdfast.telemetry.notices import AlertSettings
from holdfast.webhooks.alert_sinks import AlertSinks
from holdfast.webhooks.parking import ParkedStatus
from holdfast.webhooks.parts import WebhookParts, WorkParts
from holdfast.webhooks.sqlite import SqliteEndpoints
from holdfast.wire.frames import Presence
from holdfast.work.sqlite.store import MemoryWork

AT = "2026-01-01T00:00:00.000Z"


@dataclass
class Rest:
    """A client with every kind of credential at hand."""

    client: httpx.AsyncClient
    deps: ApiDeps
    store: MemoryStore
    clock: ManualClock
    online: dict[User, str]
    ready: dict[str, str]

    def token(
        self,
        user_id: str,
        tenant: str = "acme",
        ttl_seconds: float = 3600,
        scopes: Collection[UserScope] = USER_SCOPES,
        chats: Collection[str] | None = None,
    ) -> str:
        return self.deps.tokens.mint(User(tenant, user_id), ttl_seconds, scopes, chats)

    def tenant_key(self, tenant: str = "acme", scopes: Sequence[KeyScope] | None = None) -> str:
        return self._in_force(*new_key("tenant", "backend", AT, tenant=tenant, scopes=scopes))

    def admin_key(self, *scopes: KeyScope) -> str:
        return self._in_force(*new_key("admin", "operator", AT, scopes=scopes or None))

    def _in_force(self, key: ApiKey, secret: str) -> str:
        """As if the store had had the key when the server started."""
        ring = self.deps.keys
        ring._put_in_force({**ring._keys, key.digest: key})
        return secret

    async def ask(
        self, method: str, path: str, who: str | None = None, json: object = None, **headers: str
    ) -> httpx.Response:
        """Ask as the bearer of ``who``; ``headers`` with underscores for hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if who is not None:
            named["Authorization"] = f"Bearer {who}"
        if json is None:
            return await self.client.request(method, path, headers=named)
        return await self.client.request(method, path, headers=named, json=json)

    async def chat(
        self, owner: str = "alice", members: Sequence[str] = (), tenant: str = "acme"
    ) -> str:
        """A new group; its id."""
        body = {"name": "Team", "members": list(members)}
        answer = await self.ask("POST", "/v1/chats", self.token(owner, tenant), body)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["chat"]["chat_id"])

    async def send(
        self, chat_id: str, content: str, key: str, who: str | None = None
    ) -> httpx.Response:
        return await self.ask(
            "POST",
            f"/v1/chats/{chat_id}/messages",
            who or self.token("alice"),
            {"content": content},
            Idempotency_Key=key,
        )


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """The status and code of an error, whose body must have one of the shapes; too many
    requests are a problem besides.
    """
    body = answer.json()
    if "param" in body["error"]:
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
        by_status = {status: code for code, status in reversed(STATUS.items())}
        return answer.status_code, by_status[answer.status_code]
    if answer.status_code != 429 and "detail" in body:
        assert answer.headers["content-type"] == "application/problem+json"
        assert body["status"] == answer.status_code and body["detail"] == body["error"]["message"]
        return answer.status_code, body["error"]["code"]
    if answer.status_code == 429:
        assert body.pop("status") == 429 and body.pop("detail") == body["error"]["message"]
        assert body.pop("type").endswith("#quota-exceeded") and body.pop("title")
        policies = body.pop("violated-policies", [])
        assert policies or "rule" not in body["error"].get("details", {}), (
            "the rule is named in both"
        )
        assert answer.headers["content-type"] == "application/problem+json"
        assert int(answer.headers["retry-after"]) >= 1
    else:
        assert answer.headers["content-type"] == "application/json"
    assert set(body) == {"error"} and {"code", "message", "retryable"} <= set(body["error"]), body
    return answer.status_code, body["error"]["code"]


class Unopened:
    """A file that cannot be opened: each of its verbs raises Unavailable."""

    def __getattr__(self, verb: str) -> Any:
        async def unavailable(*given: Any, **named: Any) -> None:
            raise Unavailable(f"{verb}: this test has no folder")

        return unavailable


def limits_by(clock: Clock, rules: Sequence[Rule] = ()) -> LimitsParts:
    """Limits by these rules, which nobody can change."""
    limiter, unopened = (
        Limiter(MemoryCounters(clock), clock, rules=RuleSet.of(rules)),
        Unopened(),
    )
    return LimitsParts(
        limiter,
        RuleAdmin(unopened, clock, "none"),
        RuleFeed(Log(), [], limiter.use, clock),
        EntryPoints(limiter),
    )


@asynccontextmanager
async def beside(
    folder: Path | None, clock: Clock, rules: Sequence[Rule]
) -> AsyncIterator[tuple[LimitsParts, WorkParts]]:
    """Limits and work. Without a folder no rule and no webhook can be made."""
    if folder is None:
        yield (
            limits_by(clock, rules),
            WorkParts(MemoryWork(), WebhookParts(Unopened()), lambda: True),
        )
        return
    async with AsyncExitStack() as stack:
        limits = await stack.enter_async_context(
            open_limits(LimitsSettings(), folder, starts_with=rules, clock=clock)
        )
        endpoints = await SqliteEndpoints.open(folder / "webhooks.db")
        stack.push_async_callback(endpoints.close)
        yield limits, WorkParts(MemoryWork(), WebhookParts(endpoints), lambda: True)


class SharedMemoryLog(MemoryEventLog):
    """A log whose epochs can be raised."""

    base = 0

    async def forget_events(self, before: str, behind: Position, limit: int) -> int:
        return 0

    async def raise_epochs(self, reason: str) -> int:
        self.base += 1
        return self.base


@asynccontextmanager
async def serving(
    settings: ApiSettings | None = None,
    store: MemoryStore | None = None,
    reads: HistorySettings | None = None,
    folder: Path | None = None,
    rules: Sequence[Rule] = (),
    replies: ReplyRig | None = None,
    **changed: Any,
) -> AsyncIterator[Rest]:
    """A server for one test; ``changed`` replaces fields of its Deps."""
    clock = ManualClock(1_700_000_000)
    ids = Ids(clock, random.Random(7))
    store = store or MemoryStore()
    durability = StoreDurability(store, clock)
    revocations = RevocationsInForce(MemoryRevocations(clock), clock)
    await revocations.refresh()
    intake = Intake(durability, clock, ids, is_muted=revocations.is_muted)
    online: dict[User, str] = {}
    ready = {"store": "up"}

    async def presence(users: Sequence[User]) -> PresenceView:
        return PresenceView(
            [Presence(u.user_id, "online", online[u]) for u in users if u in online]
        )

    async def status() -> NodeStatus:
        return NodeStatus(
            **wrong_first([], HaltedChats(0, []), {}, None),
            unknown=["dead_letters_of_jobs"],
            version="1",
            node_id="here",
            started_at=AT,
            ready=True,
            dependencies=ready,
            trouble={},
            connections=0,
            users=0,
            nodes=None,
            sends_waiting=0,
            hot_chats={},
            hot_messages_per_minute=100,
            fanout_lag=0,
            dead_letters=[],
            issuers={},
            limits={},
            webhooks=ParkedStatus(),
            replies={},
            settings={},
        )

    def readiness() -> Readiness:
        return Readiness(all(state == "up" for state in ready.values()), ready)

    async def no_rollback(user: User, chat_id: str, epoch: int) -> None:
        raise AssertionError("REST has no cursors with an epoch")

    async def cluster() -> ClusterStatus:
        memory = RegistryView("memory", "up", "")
        return ClusterStatus("here", [], [], {}, None, memory, [], ["no node is known"])

    async def backup() -> Backup:
        return Backup("backups/one", 1, AT, [CopiedFile("chats.db", 1, "00", 1, {"chats": 1})])

    replies = replies or ReplyRig()
    async with beside(folder, clock, rules) as (limits, work), replies.running():
        deps = ApiDeps(
            durability=durability,
            sends=intake,
            history=ChatHistory(store, no_rollback, CursorProofs(b"test"), clock, reads),
            chats=store,
            shared_log=SharedMemoryLog(),
            records=store,
            eraser=Eraser(
                store, store, durability, MemoryLeases(clock), clock, revocations.condense
            ),
            limits=limits,
            work=work,
            streaming=replies.parts,
            body_bytes=BodyBytes(replies.settings.queue_failover),
            usage=MemoryUsage(),
            alerts=NodeAlerts(
                AlertSettings(),
                AlertDeps(
                    "here",
                    "http://holdfast.test",
                    folder or Path("/nowhere"),
                    AlertSinks(AlertSettings(), clock),
                    clock,
                ),
            ),
            tokens=Tokens(TokenSettings(), shared_secret(SECRET), clock, revocations.check, ids),
            keys=key_ring(),
            revocations=revocations,
            disconnect=lambda user, device_id: int(user in online),
            dead_letters=RecentDeadLetters(),
            compare_chats=lambda chat_ids: None,
            presence=presence,
            status=status,
            cluster=cluster,
            readiness=readiness,
            backup=backup,
            backup_step=lambda: None,
            clock=clock,
            ids=ids,
            node_id="here",
            settings=settings or ApiSettings(),
        )
        deps = replace(deps, **changed)
        running = asyncio.create_task(intake.run())
        transport = httpx.ASGITransport(
            RestApp(deps, AddressLimits(deps.settings, deps.clock, deps.proxies))
        )
        async with httpx.AsyncClient(
            transport=transport, base_url="http://holdfast.test"
        ) as client:
            try:
                yield Rest(client, deps, store, clock, online, ready)
            finally:
                intake.stop()
                await running
