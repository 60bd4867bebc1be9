"""The client's shell: coroutines, files and sockets around the machine."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.client import Client, ClientSettings, ConnectionChanged, Message, SendRefused
from holdfast.errors import (
    BadSetting,
    Forbidden,
    InvalidContentType,
    InvalidMessage,
    KeyReused,
    MessageTooLarge,
    OutcomeUnknown,
    Unauthorized,
    Unavailable,
)
from holdfast.verify.scripted_server import CHAT, ScriptedServer

QUICK = ClientSettings(
    reconnect_initial_seconds=0.05, reconnect_cap_seconds=0.2, ack_interval_seconds=0.02
)


def jwt(expires_at: float) -> str:
    body = json.dumps({"exp": expires_at}).encode()
    return f"h.{base64.urlsafe_b64encode(body).decode().rstrip('=')}.s"


@asynccontextmanager
async def scripted() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer() as server, asyncio.timeout(60):
        yield server


async def test_a_send_returns_what_the_server_stored() -> None:
    async with scripted() as server:
        async with Client(server.url, "token") as client:
            sent = await client.send(CHAT, "hello", client_message_id="k")
        assert (sent.sequence, sent.client_message_id, sent.deduplicated) == (1, "k", False)
        assert server.messages[0]["content"] == "hello"


async def test_send_awaited_inside_the_event_loop_with_a_full_buffer_does_not_deadlock() -> None:
    async with scripted() as server:
        for n in range(30):
            await server.say(f"theirs {n}")
        settings = ClientSettings(buffer_messages_max=3, page_messages=3)
        async with Client(server.url, "token", settings=settings) as client:
            heard = []
            async for message in client.messages(CHAT):
                if message.sender_id == "bob":
                    heard.append(message.sequence)
                    await client.send(CHAT, f"echo {message.sequence}")
                if len(heard) == 30:
                    break
            assert heard == list(range(1, 31))


async def test_equal_sends_under_one_key_join_and_unequal_ones_are_refused() -> None:
    async with scripted() as server:
        server.script.silent = True
        async with Client(server.url, "token", settings=QUICK) as client:
            both = [
                asyncio.create_task(client.send(CHAT, "x", client_message_id="k")) for _ in range(2)
            ]
            await asyncio.sleep(0)
            with pytest.raises(KeyReused):
                await client.send(CHAT, "y", client_message_id="k")
            await server.until(lambda: bool(server.connections), "a connection")
            server.script.silent = False
            server.cut()
            first, second = await asyncio.gather(*both)
            assert first == second
        assert len(server.messages) == 1


async def test_cancelled_send_is_sent_all_the_same() -> None:
    async with scripted() as server:
        server.script.silent = True
        async with Client(server.url, "token", settings=QUICK) as client:
            sending = asyncio.create_task(client.send(CHAT, "x", client_message_id="k"))
            await server.until(lambda: bool(server.connections), "a connection")
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            server.script.silent = False
            server.cut()
            await server.until(lambda: "k" in server.keys, "the send")


async def test_a_post_returns_when_it_is_on_disk_and_survives_the_process(tmp_path: Path) -> None:
    async with scripted() as server:
        state = tmp_path / "client.db"
        async with Client("http://127.0.0.1:9", "token", state=state) as offline:
            key = await offline.post(CHAT, "written in a tunnel")
            assert [entry.client_message_id for entry in offline.unsent()] == [key]
            device = offline.device_id
        async with Client(server.url, "token", state=state) as client:
            await server.until(lambda: key in server.keys, "the send")
            assert client.device_id == device == server.here.device_id
            await server.until(lambda: not client.unsent(), "an empty outbox")


async def test_refusal_without_a_waiting_caller_is_an_event() -> None:
    async with scripted() as server:
        server.script.send_errors = [
            {"code": "FORBIDDEN", "message": "no", "retryable": False, "outcome": "rejected"}
        ]
        async with Client(server.url, "token") as client:
            key = await client.post(CHAT, "x")
            async for event in client.events():
                if isinstance(event, SendRefused):
                    assert event.client_message_id == key and isinstance(event.error, Forbidden)
                    break


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("", "x"), InvalidMessage),
        (("c", ""), InvalidMessage),
        (("c", "\ud800"), InvalidMessage),
        (("c", "x" * 4097), MessageTooLarge),
        (("c", "x", "text/html"), InvalidContentType),
        (("c", "x", "text/plain", "two words"), InvalidMessage),
    ],
)
async def test_invalid_message_is_refused_before_it_is_sent(
    arguments: tuple[str, ...], error: type[Exception]
) -> None:
    async with scripted() as server, Client(server.url, "token") as client:
        with pytest.raises(error):
            await client.send(*arguments)
        assert client.unsent() == []


async def test_a_full_outbox_takes_no_more() -> None:
    async with Client(
        "http://127.0.0.1:9", "t", settings=ClientSettings(outbox_messages_max=2)
    ) as client:
        await client.post("c", "1")
        await client.post("c", "2")
        with pytest.raises(Unavailable, match="2 messages wait"):
            await client.post("c", "3")


async def test_refused_token_stops_the_client_and_reaches_every_caller() -> None:
    async with scripted() as server:
        server.script.refuse_handshakes = [(401, {})]
        async with Client(server.url, "token") as client:
            with pytest.raises(Unauthorized):
                await client.send(CHAT, "x")
            with pytest.raises(Unauthorized):
                await client.connected()
            with pytest.raises(Unauthorized):
                async for _ in client.events():
                    pass
            with pytest.raises(Unauthorized):
                await client.send(CHAT, "y")
            assert len(client.unsent()) == 1, "what was accepted stays in the outbox"


@pytest.mark.parametrize(
    "body", [b"<h1>Not Found</h1>", b'{"error": {}}', b'{"error": "not found"}', b""]
)
async def test_client_retries_after_a_refusal_of_a_proxy(body: bytes) -> None:
    async with scripted() as server:
        server.script.refuse_handshakes = [(status, {}) for status in (400, 403, 404)]
        server.script.refusal_body = body
        async with Client(server.url, "token", settings=QUICK) as client:
            await client.send(CHAT, "x")
        assert len(server.handshakes) == 4


@pytest.mark.parametrize(
    "failure",
    [
        Unavailable("no tokens now"),
        OutcomeUnknown("?"),
        ConnectionResetError(),
        ValueError("not JSON"),
    ],
)
async def test_token_that_is_unavailable_for_now_is_asked_for_again(failure: Exception) -> None:
    async with scripted() as server:
        failures = [failure, failure]

        async def provide() -> str:
            if failures:
                raise failures.pop()
            return "token"

        async with Client(server.url, provide, settings=QUICK) as client:
            await client.connected()
            assert not failures


async def test_client_stops_when_its_provider_refuses_a_token_for_good() -> None:
    async with scripted() as server:

        async def provide() -> str:
            raise Unauthorized("this account is closed")

        async with Client(server.url, provide, settings=QUICK) as client:
            with pytest.raises(Unauthorized, match="this account is closed"):
                await client.connected()


async def test_token_provider_that_hangs_is_asked_again_and_does_not_block_leaving() -> None:
    async with scripted() as server:
        calls: list[int] = []

        async def provide() -> str:
            calls.append(len(calls))
            if len(calls) == 1:
                await asyncio.Event().wait()
            return "token"

        settings = ClientSettings(reconnect_initial_seconds=0.05, connect_timeout_seconds=0.2)
        async with Client(server.url, provide, settings=settings) as client:
            seen: list[str] = []
            async for event in client.events():
                if isinstance(event, ConnectionChanged):
                    seen.append(event.reason)
                    if event.state == "ready":
                        break
        assert any("no token" in reason for reason in seen)


async def test_renewal_that_hangs_does_not_block_leaving() -> None:
    async with scripted() as server:
        asked = asyncio.Event()

        async def provide() -> str:
            if server.connections:
                asked.set()
                await asyncio.Event().wait()
            return jwt(time.time() + 2.2)

        async with asyncio.timeout(8), Client(server.url, provide):
            await asked.wait()


async def test_state_file_of_another_user_is_refused(tmp_path: Path) -> None:
    async with scripted() as server:
        state = tmp_path / "client.db"
        async with Client("http://127.0.0.1:9", "token", state=state) as client:
            client._state.identify("user_id", "mallory")
            await client.post(CHAT, "mallory's words")
        async with Client(server.url, "token", state=state) as client:
            with pytest.raises(BadSetting, match="belongs to mallory"):
                await client.connected()
        assert server.messages == []


async def test_an_event_interrupted_by_an_error_comes_again_and_a_finished_one_does_not(
    tmp_path: Path,
) -> None:
    async with scripted() as server:
        state = tmp_path / "client.db"
        for n in range(3):
            await server.say(f"theirs {n}")

        async def take(count: int, fail: bool) -> list[int]:
            seen: list[int] = []
            try:
                async with Client(server.url, "token", state=state) as client:
                    async for message in client.messages(CHAT):
                        seen.append(message.sequence)
                        if len(seen) == count:
                            if fail:
                                raise RuntimeError("the application's own")
                            break
            except RuntimeError:
                pass
            return seen

        assert await take(2, fail=True) == [1, 2]
        assert await take(1, fail=False) == [2]
        assert await take(1, fail=False) == [3]


@pytest.mark.covers("000 state machine: connected, closing, disconnected, backoff, reconnecting")
async def test_the_application_sees_the_connection_come_and_go() -> None:
    async with scripted() as server:
        states = []
        async with Client(server.url, "token", settings=QUICK) as client:
            async for event in client.events():
                if isinstance(event, ConnectionChanged):
                    states.append(event.state)
                    if event.state == "ready" and states.count("ready") == 1:
                        server.cut()
                    elif event.state == "ready":
                        break
        assert "backoff" in states and states[-1] == "ready"


async def test_two_loops_over_the_events_are_refused() -> None:
    async with scripted() as server, Client(server.url, "token") as client:
        await client.connected()

        async def drain() -> None:
            async for _ in client.events():
                pass

        first = asyncio.create_task(drain())
        await server.until(lambda: server.here.live, "a resumed connection")
        with pytest.raises(RuntimeError, match="read by another loop; end it"):
            await asyncio.wait_for(drain(), 5)
        first.cancel()


def test_a_token_in_the_address_is_refused() -> None:
    with pytest.raises(BadSetting):
        Client("http://127.0.0.1:8080/?token=x", "token")
    with pytest.raises(BadSetting, match="should look like"):
        Client("127.0.0.1:8080", "token")


async def test_a_token_is_renewed_in_band_before_it_ends() -> None:
    async with scripted() as server:
        made: list[str] = []

        async def provide() -> str:
            made.append(jwt(time.time() + 2.2 + len(made) * 1000))
            return made[-1]

        async with Client(server.url, provide):
            await server.until(
                lambda: len(made) == 2 and server.here.token == made[1], "the new token"
            )
        assert len(server.connections) == 1


async def test_messages_are_typed_values() -> None:
    async with scripted() as server:
        await server.say("hello")
        async with Client(server.url, "token") as client:
            async for message in client.messages(CHAT):
                assert isinstance(message, Message) and message.content == "hello"
                break
