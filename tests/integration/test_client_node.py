"""The Python client against the server it is made for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines import free_port
from holdfast.access.principal import USER_SCOPES
from holdfast.access.secrets import read_secrets
from holdfast.access.tokens import Tokens, TokenSettings, shared_secret
from holdfast.cli.rest import RestClient
from holdfast.client import (
    ChatGone,
    ChatJoined,
    ChatReset,
    Client,
    ClientEvent,
    ClientSettings,
    Message,
    Receipt,
)
from holdfast.clock import SystemClock
from holdfast.errors import MessageTooLarge, NotAMember, NotFound, Unauthorized
from holdfast.message import User
from holdfast.node.lifecycle import running
from holdfast.node.node import Node
from holdfast.settings import ServerSettings, Settings, load
from proof.proxy import NetworkConditions, Proxy

QUICK = ClientSettings(reconnect_initial_seconds=0.05, reconnect_cap_seconds=0.5)


class World:
    """A running node and the people on it."""

    def __init__(self, node: Node) -> None:
        self.url = node.url
        self._secrets = read_secrets(node.settings.server.state_path)

    def token(self, user: str) -> str:
        tokens = Tokens(
            TokenSettings(), shared_secret(self._secrets.jwt_secret.encode()), SystemClock()
        )
        return tokens.mint(User("default", user), 3600, USER_SCOPES)

    def client(
        self, user: str, state: Path | None = None, settings: ClientSettings = QUICK
    ) -> Client:
        return Client(self.url, self.token(user), state=state, settings=settings)

    async def ask(
        self, user: str | None, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Any:
        rest = RestClient(self.url, self._secrets.admin_key if user is None else self.token(user))
        return await asyncio.to_thread(rest.ask, method, path, body)

    async def chat(self, *members: str) -> str:
        body = {"name": "lobby", "members": list(members[1:])}
        return str((await self.ask(members[0], "POST", "/v1/chats", body))["chat"]["chat_id"])


@asynccontextmanager
async def served(
    tmp_path: Path, changes: Mapping[str, float] | None = None
) -> AsyncIterator[World]:
    """A node with rare heartbeats, so that no test passes only because one came."""
    server = {
        "server.port": 0,
        "server.state_dir": str(tmp_path / "state"),
        "server.log_level": "error",
    }
    rare = {"gateway.timeouts.heartbeat_interval_seconds": 600}
    settings = load(None, {}, {**server, **rare, **(changes or {})})
    async with asyncio.timeout(100), running(settings) as node:
        yield World(node)


async def next_of(client: Client, kind: type[ClientEvent], count: int = 1) -> list[Any]:
    found: list[Any] = []
    async for event in client.events():
        if isinstance(event, kind):
            found.append(event)
            if len(found) == count:
                break
    return found


async def test_two_people_talk_in_one_order(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        chat_id = await world.chat("alice", "bob")
        async with world.client("alice") as alice, world.client("bob") as bob:
            await asyncio.gather(alice.connected(), bob.connected())
            sends = [client.send(chat_id, f"{n}") for n in range(8) for client in (alice, bob)]
            sent = await asyncio.gather(*sends)
            assert sorted(one.sequence for one in sent) == list(range(1, 17))
            heard_by_alice, heard_by_bob = await asyncio.gather(
                next_of(alice, Message, 16), next_of(bob, Message, 16)
            )
            assert heard_by_alice == heard_by_bob
            assert [message.sequence for message in heard_by_alice] == list(range(1, 17))


async def test_device_that_was_offline_gets_exactly_what_it_missed(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        chat_id = await world.chat("alice", "bob")
        state = tmp_path / "bob.db"
        async with world.client("alice") as alice:
            await alice.send(chat_id, "one")
            async with world.client("bob", state) as bob:
                assert [m.content for m in await next_of(bob, Message)] == ["one"]
            for n in range(15):
                await alice.send(chat_id, f"missed {n}")
            async with world.client("bob", state) as bob:
                assert [m.content for m in await next_of(bob, Message, 15)] == [
                    f"missed {n}" for n in range(15)
                ]


async def test_chat_that_is_not_followed_is_not_reported_as_delivered(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as world:
        lobby, den = await world.chat("alice", "bob"), await world.chat("alice", "bob")
        bob = Client(world.url, world.token("bob"), settings=QUICK, follow={lobby})
        async with world.client("alice") as alice, bob:
            await bob.connected()
            await alice.send(den, "nobody reads this")
            await alice.send(lobby, "bob reads this")
            # asking for a second ends the first
            reading = asyncio.create_task(next_of(bob, Message, 2))
            async for event in alice.events():
                if isinstance(event, Receipt) and event.user_id == "bob":
                    assert event.chat_id == lobby
                    break
            reading.cancel()
            status = {
                c: await world.ask("alice", "GET", f"/v1/chats/{c}/messages/1/status")
                for c in (lobby, den)
            }
            assert "bob" in status[lobby]["delivered"] and "bob" not in status[den]["delivered"]


async def test_recovered_chat_is_read_again_from_its_beginning(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        chat_id = await world.chat("alice")
        async with world.client("alice") as alice:
            await alice.send(chat_id, "one")
            await next_of(alice, Message)
            await world.ask(None, "POST", f"/admin/chats/{chat_id}/recover", {"reason": "a drill"})
            await alice.send(chat_id, "two")
            [reset] = await next_of(alice, ChatReset)
            assert reset == ChatReset(chat_id, 2)
            assert [m.content for m in await next_of(alice, Message, 2)] == ["one", "two"]


async def test_connected_client_gets_joined_and_gone_chats(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        chat_id = await world.chat("alice")
        async with world.client("bob") as bob:
            await bob.connected()
            await world.ask("alice", "POST", f"/v1/chats/{chat_id}/members", {"user_id": "bob"})
            assert await next_of(bob, ChatJoined) == [ChatJoined(chat_id)]
            [added] = await next_of(bob, Message)
            assert added.kind == "event"
            assert (await bob.send(chat_id, "hello")).sequence == 2
            await world.ask("alice", "DELETE", f"/v1/chats/{chat_id}/members/bob")
            with pytest.raises(NotAMember, match="ask an owner or admin"):
                await bob.send(chat_id, "still here?")
            assert await next_of(bob, ChatGone) == [ChatGone(chat_id)]


async def test_removed_reader_gets_chat_gone_without_a_request(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        chat_id = await world.chat("alice", "bob")
        async with world.client("bob") as bob:
            assert await next_of(bob, ChatJoined) == [ChatJoined(chat_id)]
            await world.ask("alice", "DELETE", f"/v1/chats/{chat_id}/members/bob")
            assert await next_of(bob, ChatGone) == [ChatGone(chat_id)]


async def test_member_removed_while_offline_gets_chat_gone(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        chat_id = await world.chat("alice", "bob")
        state = tmp_path / "bob.db"
        async with world.client("alice") as alice, world.client("bob", state) as bob:
            await alice.send(chat_id, "one")
            await next_of(bob, Message)
        await world.ask("alice", "DELETE", f"/v1/chats/{chat_id}/members/bob")
        async with world.client("bob", state) as bob:
            assert await next_of(bob, ChatGone) == [ChatGone(chat_id)]


async def test_more_sends_than_the_rate_allows_all_arrive_in_order(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        chat_id = await world.chat("alice")
        async with world.client("alice") as alice:
            sent = await asyncio.gather(*(alice.send(chat_id, f"{n}") for n in range(35)))
        assert [one.sequence for one in sent] == list(range(1, 36))


async def test_the_server_s_limit_of_a_message_is_the_client_s(tmp_path: Path) -> None:
    async with served(tmp_path) as world:
        chat_id = await world.chat("alice")
        async with world.client("alice", settings=replace(QUICK, content_bytes_max=10)) as alice:
            with pytest.raises(MessageTooLarge):
                await alice.send(chat_id, "x" * 11)
            await alice.connected()
            await alice.send(chat_id, "x" * 4096)
            with pytest.raises(MessageTooLarge):
                await alice.send(chat_id, "x" * 4097)


async def test_client_stops_after_a_handshake_refused_for_good_by_the_server(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as world:
        async with Client(world.url, "no token at all", settings=QUICK) as client:
            with pytest.raises(Unauthorized):
                await client.connected()
        async with Client(f"{world.url}/elsewhere", world.token("alice"), settings=QUICK) as client:
            with pytest.raises(NotFound):
                await client.connected()


async def test_client_that_only_sends_stays_connected_and_can_read_later(tmp_path: Path) -> None:
    """It takes no events, so it acks nothing; a server closes such clients."""

    changes = {
        "gateway.timeouts.heartbeat_interval_seconds": 0.1,
        "gateway.timeouts.stale_acks_seconds": 0.2,
        "gateway.backpressure.inbound.rate_limit_burst": 100,
    }
    async with served(tmp_path, changes) as world:
        chat_id = await world.chat("alice", "bob")
        async with Proxy("127.0.0.1", int(world.url.rpartition(":")[2])) as proxy:
            settings = replace(QUICK, buffer_messages_max=5)
            async with Client(
                f"http://127.0.0.1:{proxy.port}", world.token("alice"), settings=settings
            ) as alice:
                for n in range(30):
                    await alice.send(chat_id, f"{n}")
                    await asyncio.sleep(0.05)
                assert proxy.accepted == 1
                assert [m.content for m in await next_of(alice, Message, 30)] == [
                    f"{n}" for n in range(30)
                ]


async def test_slow_link_delivers_everything_on_one_connection(tmp_path: Path) -> None:
    """The deadlines of both sides are far shorter than a page takes: what counts is
    whether bytes come.

    And they are longer than a busy machine lets this process wait: no byte moves
    meanwhile.
    """

    changes = {
        "gateway.timeouts.heartbeat_interval_seconds": 1.0,
        "gateway.timeouts.heartbeat_timeout_seconds": 1.5,
        "gateway.backpressure.inbound.rate_limit_burst": 100,
    }
    async with served(tmp_path, changes) as world:
        chat_id = await world.chat("alice", "bob")
        async with world.client("alice") as alice:
            for n in range(60):
                await alice.send(chat_id, f"{n:04}" * 1000)
        slow = NetworkConditions(bytes_per_second=50_000, slice_bytes=1024)
        settings = replace(QUICK, reply_timeout_seconds=1.5, silence_grace_seconds=0.5)
        async with Proxy("127.0.0.1", int(world.url.rpartition(":")[2]), slow) as proxy:
            async with Client(
                f"http://127.0.0.1:{proxy.port}", world.token("bob"), settings=settings
            ) as bob:
                texts = [m.content[:4] for m in await next_of(bob, Message, 60)]
                await bob.send(chat_id, "all of it")
            assert texts == [f"{n:04}" for n in range(60)]
            assert proxy.accepted == 1


async def test_clients_of_a_drained_server_connect_to_the_next_one(
    tmp_path: Path,
) -> None:
    state = str(tmp_path / "state")
    settings = Settings(server=ServerSettings(port=free_port(), state_dir=state, log_level="error"))
    async with asyncio.timeout(100):
        async with running(settings) as node:
            world = World(node)
            chat_id = await world.chat("alice")
            alice = await world.client("alice").__aenter__()
            await alice.send(chat_id, "before")
        try:
            waiting = asyncio.create_task(alice.send(chat_id, "between"))
            async with running(settings):
                assert (await waiting).sequence == 2
                assert [m.content for m in await next_of(alice, Message, 2)] == [
                    "before",
                    "between",
                ]
        finally:
            await alice.__aexit__(None, None, None)
