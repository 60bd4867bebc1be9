"""A service's outbox whose destination is the event log: jobs become messages of a real
server's chats, once each.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from credentials import admin_key_of
from work_rigs import Opened, embedded_work, postgres_work, until

from holdfast.errors import BadSetting
from holdfast.node.lifecycle import running
from holdfast.node.node import Node
from holdfast.settings import ServerSettings, Settings
from holdfast.work.chat_transport import ChatTransport, judged
from holdfast.work.handlers import Handlers
from holdfast.work.inspection import Query
from holdfast.work.job import JobDraft, Policies, Reason
from holdfast.work.worker import Worker, WorkerSettings

QUICK = WorkerSettings(concurrency=8, balance_seconds=0.3, poll_max_seconds=0.05, drain_seconds=5)
SOON = Policies().with_type("Shipped", base_seconds=0.01, cap_seconds=0.05)


class Front:
    """Stands before the server, and loses the answers of what is named in ``losing``
    after the server gave them.
    """

    def __init__(self, node: Node) -> None:
        self._node, self.losing = node, set[str]()
        self.lost, self.keys = 0, list[str]()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._pass)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.Response:
        names = ("authorization", "x-act-as", "idempotency-key", "content-type")
        headers = {name: request.headers[name] for name in names if name in request.headers}
        body = await request.read()
        async with httpx.AsyncClient() as client:
            answer = await client.post(
                f"{self._node.url}{request.raw_path}", content=body, headers=headers
            )
        self.keys.append(headers["idempotency-key"])
        if any(word.encode() in body for word in self.losing):
            self.losing = {word for word in self.losing if word.encode() not in body}
            self.lost += 1
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=answer.status_code, body=answer.content)


class Place:
    """A server with a chat, a tenant's key, and who may speak."""

    def __init__(self, node: Node, client: httpx.AsyncClient, key: str, chat: str) -> None:
        self.node, self.key, self.chat, self._client = node, key, chat, client

    @classmethod
    @asynccontextmanager
    async def opened(cls, state: Path) -> AsyncIterator[Place]:
        settings = Settings(server=ServerSettings(port=0, state_dir=str(state)))
        async with running(settings) as node, httpx.AsyncClient(base_url=node.url) as client:
            admin = {"Authorization": f"Bearer {admin_key_of(node)}"}
            body = {"kind": "tenant", "label": "shop", "tenant": "acme", "reason": "its outbox"}
            issued = await client.post("/admin/keys", json=body, headers=admin)
            key = issued.json()["secret"]
            client.headers.update({"Authorization": f"Bearer {key}", "X-Act-As": "shop"})
            made = await client.post("/v1/chats", json={"name": "orders"})
            yield cls(node, client, key, made.json()["chat"]["chat_id"])

    async def messages(self) -> list[dict[str, Any]]:
        answer = await self._client.get(f"/v1/chats/{self.chat}/messages")
        return [message for message in answer.json()["messages"] if message["sender_id"] == "shop"]

    async def said(self) -> list[str]:
        return [message["content"] for message in await self.messages()]


@pytest.fixture(params=["sqlite", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "postgres":
        server = request.getfixturevalue("postgres_server")
        return lambda: postgres_work(server.url)
    return lambda: embedded_work(tmp_path / "work.db")


def shipped(text: str, chat: str) -> JobDraft:
    return JobDraft("Shipped", text.encode(), chat, f"chat:{chat}")


async def test_jobs_become_messages_once_and_in_order_despite_lost_responses(
    opened: Any, tmp_path: Path
) -> None:
    async with opened() as o, Place.opened(tmp_path / "state") as place:
        front = Front(place.node)
        front.losing = {"parcel 2", "parcel 5"}
        texts = [f"parcel {n}" for n in range(8)]
        async with (
            front.listening() as url,
            ChatTransport(url, place.key, source="eu", act_as="shop") as chats,
        ):
            handlers = Handlers()
            handlers.carry("chat", chats)
            seqs = await o.store.enqueue([shipped(text, place.chat) for text in texts])
            async with Worker(o.store, handlers, settings=QUICK, policies=SOON).running():
                await until(lambda: _none_left(o))
        assert await place.said() == texts
        assert front.lost == 2 and len(front.keys) == 10, "two were sent again"
        assert set(front.keys) == {f"eu-{seq}" for seq in seqs}


async def test_transport_sends_its_content_type(tmp_path: Path) -> None:
    async with (
        embedded_work(tmp_path / "work.db") as o,
        Place.opened(tmp_path / "state") as place,
    ):
        marked_up = ChatTransport(
            place.node.url, place.key, source="eu", act_as="shop", content_type="text/markdown"
        )
        async with (
            ChatTransport(place.node.url, place.key, source="eu", act_as="shop") as plain,
            marked_up,
        ):
            handlers = Handlers()
            handlers.carry("chat", plain)
            handlers.carry("markdown", marked_up)
            drafts = [
                JobDraft("Shipped", b"*soon*", "s", f"{way}:{place.chat}")
                for way in ("chat", "markdown")
            ]
            await o.store.enqueue(drafts)
            async with Worker(o.store, handlers, settings=QUICK).running():
                await until(lambda: _none_left(o))
        assert [said["content_type"] for said in await place.messages()] == [
            "text/plain",
            "text/markdown",
        ]


async def _none_left(o: Opened) -> bool:
    return not await o.store.find(Query(), 1)


async def test_replayed_dead_letter_whose_message_was_stored_adds_nothing(
    opened: Any, tmp_path: Path
) -> None:
    async with opened() as o, Place.opened(tmp_path / "state") as place:
        front, policies = Front(place.node), SOON.with_type("Shipped", retry=False)
        front.losing = {"parcel"}
        async with (
            front.listening() as url,
            ChatTransport(url, place.key, source="eu", act_as="shop") as chats,
        ):
            handlers = Handlers()
            handlers.carry("chat", chats)
            await o.store.enqueue([shipped("parcel", place.chat)])
            async with Worker(o.store, handlers, settings=QUICK, policies=policies).running():
                await until(lambda: o.store.dead(Query()))
                assert await place.said() == ["parcel"], "its answer was lost, not the message"
                await o.store.replay(Query(), limit=10, by="eve", why="the network is back")
                await until(lambda: _none_left(o))
        assert len(front.keys) == 2 and await place.said() == ["parcel"]
        assert not await o.store.dead(Query())


async def test_refused_message_is_a_dead_letter_and_a_bad_credential_waits(
    opened: Any, tmp_path: Path
) -> None:
    async with opened() as o, Place.opened(tmp_path / "state") as place:
        drafts = [
            shipped("to nobody", "chat_unknown"),
            JobDraft("Shipped", b"\xff", None, f"chat:{place.chat}"),
            JobDraft("Stolen", b"revoked", None, f"stolen:{place.chat}"),
            JobDraft("Unavailable", b"nobody listens", None, f"unavailable:{place.chat}"),
            shipped("heard", place.chat),
        ]
        async with (
            ChatTransport(place.node.url, place.key, source="eu", act_as="shop") as chats,
            ChatTransport(place.node.url, "hf_tenant_stolen", source="eu", act_as="shop") as stolen,
            ChatTransport(
                "http://127.0.0.1:1", place.key, source="eu", act_as="shop"
            ) as unavailable,
        ):
            handlers = Handlers()
            for scheme, transport in {
                "chat": chats,
                "stolen": stolen,
                "unavailable": unavailable,
            }.items():
                handlers.carry(scheme, transport)
            seqs = await o.store.enqueue(drafts)
            async with Worker(o.store, handlers, settings=QUICK, policies=Policies()).running():
                await until(lambda: _tried(o, seqs[2:4]))
                await until(lambda: _dead(o, 2))
                await until(lambda: _said(place, ["heard"]))
        reasons = {entry.seq: entry.reason for entry in await o.store.dead(Query())}
        assert reasons == {
            seqs[0]: Reason.VALIDATION_FAILURE,
            seqs[1]: Reason.SERIALIZATION_ERROR,
        }
        left = {entry.seq: entry for entry in await o.store.find(Query())}
        assert (
            left[seqs[2]].reason is Reason.DEPENDENCY_FAILURE
            and "UNAUTHORIZED" in left[seqs[2]].error
        )
        assert left[seqs[3]].reason is Reason.TRANSPORT_UNAVAILABLE
        assert {entry.strikes for entry in left.values()} == {0}


async def _tried(o: Opened, seqs: list[int]) -> bool:
    return all(entry.attempt for entry in await o.store.find(Query(seqs=seqs)))


async def _dead(o: Opened, count: int) -> bool:
    return len(await o.store.dead(Query())) == count


async def _said(place: Place, texts: list[str]) -> bool:
    return await place.said() == texts


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (400, "INVALID_MESSAGE", Reason.VALIDATION_FAILURE),
        (401, "UNAUTHORIZED", Reason.DEPENDENCY_FAILURE),
        (403, "FORBIDDEN", Reason.DEPENDENCY_FAILURE),
        (403, "NOT_A_MEMBER", Reason.VALIDATION_FAILURE),
        (404, "NOT_FOUND", Reason.VALIDATION_FAILURE),
        (409, "IDEMPOTENCY_KEY_REUSED", Reason.VALIDATION_FAILURE),
        (413, "MESSAGE_TOO_LARGE", Reason.VALIDATION_FAILURE),
        (429, "RATE_LIMITED", Reason.THROTTLED),
        (500, "INTERNAL_ERROR", Reason.DEPENDENCY_FAILURE),
        (503, "CHAT_HALTED", Reason.DEPENDENCY_FAILURE),
    ],
)
def test_each_response_of_the_server_has_its_reason(status: int, code: str, reason: Reason) -> None:
    answer = f'{{"error": {{"code": "{code}", "message": "no", "retryable": false, "more": 1}}}}'
    failure = judged(status, answer.encode(), 7.0)
    assert failure is not None and failure.reason is reason and code in str(failure)
    assert failure.retry_after_seconds == (0.0 if reason is Reason.VALIDATION_FAILURE else 7.0)


def test_response_of_another_server_is_no_verdict_on_the_message() -> None:
    for status, text in (
        (404, b"<html>no such site"),
        (301, b""),
        (502, b"\xff"),
        (400, b'{"error": "no"}'),
    ):
        failure = judged(status, text, 0.0)
        assert failure is not None and failure.reason is Reason.DEPENDENCY_FAILURE
    assert judged(200, b"", 0.0) is None and judged(201, b"{}", 0.0) is None


def test_transport_with_invalid_arguments_is_refused() -> None:
    for url, credential, source, seconds in (
        ("chat.example.com", "key", "eu", 1.0),
        ("https://chat.example.com", "", "eu", 1.0),
        ("https://chat.example.com", "key", "", 1.0),
        ("https://chat.example.com", "key", "eu", 0.0),
    ):
        with pytest.raises(BadSetting):
            ChatTransport(url, credential, source=source, timeout_seconds=seconds)
