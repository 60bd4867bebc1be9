"""One slow, silent or dripping receiver: it is called a few times at once, and no other
endpoint waits for it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from webhook_rig import SECRET, Receiver, Scene, entry, receiving, scene, until

from holdfast.message import LogEntry
from holdfast.webhooks.contract import Delivery, WebhookEndpoint
from holdfast.webhooks.delivery import WebhookSettings
from holdfast.webhooks.http_client import WebhookCaller
from holdfast.webhooks.sqlite import SqliteEndpoints
from holdfast.work.inspection import Query
from holdfast.work.worker import WorkerSettings

CHATS = 24
WORKER = WorkerSettings(
    concurrency=32, jobs_max=128, poll_max_seconds=0.02, balance_seconds=0.5, drain_seconds=0.1
)
MANY = replace(WORKER, concurrency=100, jobs_max=4096)
PATIENT = WebhookSettings(private_allowed=True, timeout_seconds=120, connect_timeout_seconds=120)

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def entries(tenant: str, chats: int, each: int, start: int) -> list[LogEntry]:
    """Messages of many chats in turn; a sequence is the position in the log."""
    return [entry(start + n, f"{tenant}{n % chats}", tenant) for n in range(chats * each)]


def by_chat(receiver: Receiver) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for sequence, (_, body) in zip(receiver.sequences(), receiver.calls, strict=True):
        chat = body.split(b'"chat_id":"')[1].split(b'"')[0].decode()
        found.setdefault(chat, []).append(sequence)
    return found


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


async def read_all_and_wait(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """It reads and never answers."""
    while await reader.read(4096):
        pass


async def never_read(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """It accepts and hangs."""
    await asyncio.Event().wait()


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """It answers a byte at a time and never comes to the end of a header."""
    await reader.read(1)
    writer.write(b"HTTP/1.1 200 OK\r\nx: ")
    while not writer.is_closing():
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.01)


@asynccontextmanager
async def misbehaving(talk: Talk) -> AsyncIterator[tuple[str, list[int]]]:
    """The URL of a server that misbehaves, and an element per open connection."""
    calls: list[int] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(1)
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            calls.pop()
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook", calls
    finally:
        server.close()


@pytest.mark.parametrize("talk", [read_all_and_wait, never_read, drip])
async def test_other_endpoint_gets_everything_while_a_receiver_never_answers(
    tmp_path: Path, talk: Talk
) -> None:
    """It is called as often at once as it may be, and not even all that waits for it
    fills the worker's memory.
    """

    async with (
        misbehaving(talk) as (url, calls),
        receiving() as neighbour,
        scene(tmp_path, settings=PATIENT, worker=WORKER) as stage,
    ):
        await stage.add(url, "bad", "ep_bad")
        await stage.add(neighbour.url, "good", "ep_good")
        stage.log.entries += entries("bad", 400, 1, start=1)
        await until(lambda: len(calls) == 4)
        stage.log.entries += entries("good", CHATS, 2, start=1000)
        await until(lambda: len(neighbour.calls) == 2 * CHATS)
        assert len(calls) == 4, "calls at once to the bad one, all of them still under way"
        assert not await stage.endpoints.deliveries("ep_bad")
        assert all(sequences == sorted(sequences) for sequences in by_chat(neighbour).values())


@pytest.mark.parametrize("tenants", [1, 120])
async def test_endpoints_get_everything_while_more_others_hang_than_runners_exist(
    tmp_path: Path, tenants: int
) -> None:
    """The paces are loaded from the log of deliveries; no call times out here."""

    async with misbehaving(read_all_and_wait) as (url, calls), receiving() as good:
        endpoints = await SqliteEndpoints.open(tmp_path / "webhooks.db")
        for n in range(121):
            name, seconds = (f"ep_{n}", 10.0) if n else ("ep_good", 0.01)
            where, tenant = url if n else good.url, f"t{n % tenants}"
            await endpoints.add(WebhookEndpoint(name, tenant, where, SECRET, "", "2026-01-01"))
            await endpoints.log(Delivery(name, "", "", 0, 1, "2026-01-01", 0, seconds))
        await endpoints.close()
        async with scene(tmp_path, settings=PATIENT, worker=MANY) as stage:
            stage.log.entries += [entry(n + 1, f"c{n}", f"t{n}") for n in range(tenants)]
            await until(lambda: len(calls) == (76 if tenants == 1 else 87))
            stage.log.entries += [entry(n, f"good{n % 4}", "t0") for n in range(201, 209)]
            await until(lambda: len(good.calls) == 9)
            assert len(calls) == (76 if tenants == 1 else 87)


async def test_slow_receiver_gets_each_message_once_and_in_order(
    tmp_path: Path,
) -> None:
    """The time to respond begins when a call is sent; all together take longer."""

    quick = WebhookSettings(private_allowed=True, timeout_seconds=1.0)
    async with receiving() as slow, scene(tmp_path, settings=quick, worker=WORKER) as stage:
        slow.seconds = 0.3
        await stage.add(slow.url, "slow", "ep_slow")
        stage.log.entries += entries("slow", 16, 2, start=1)
        await until(lambda: _done(stage, 32))
        log = await stage.endpoints.deliveries("ep_slow")
        assert [(each.status, each.attempt) for each in log] == [(204, 1)] * 32
        assert len(slow.calls) == 32
        assert by_chat(slow) == {f"slow{n}": [n + 1, n + 17] for n in range(16)}


async def _done(stage: Scene, deliveries: int) -> bool:
    return len(
        await stage.endpoints.deliveries("ep_slow")
    ) == deliveries and not await stage.jobs.find(Query())


async def test_response_counts_even_if_its_text_never_ends(tmp_path: Path) -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nthanks")
        await asyncio.Event().wait()

    async with misbehaving(endless) as (url, _):
        caller = WebhookCaller(timeout_seconds=30, connect_timeout_seconds=30, private_allowed=True)
        assert await caller.post(url, b"{}", {}, 100) == (200, b"thanks", "")
        await caller.close()


async def test_response_timeout_and_connect_timeout_are_distinguished() -> None:
    async with misbehaving(read_all_and_wait) as (url, _):
        caller = WebhookCaller(
            timeout_seconds=0.05, connect_timeout_seconds=30, private_allowed=True
        )
        for _ in range(2):
            with pytest.raises(OSError, match=r"no answer within 0\.05 s"):
                await caller.post(url, b"{}", {}, 100)
        await caller.close()
        caller = WebhookCaller(
            timeout_seconds=30, connect_timeout_seconds=0.05, private_allowed=True
        )
        with pytest.raises(OSError, match=r"no connection within 0\.05 s"):
            await caller.post(url.replace("http", "https"), b"{}", {}, 100)
        await caller.close()


async def test_silent_name_server_does_not_delay_other_endpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names are looked up in separate threads, one per name."""
    looked_up, answer = list[str](), threading.Event()

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        looked_up.append(host)
        if host != "good.example":
            answer.wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async with receiving() as receiver:
        caller = WebhookCaller(timeout_seconds=30, connect_timeout_seconds=30, private_allowed=True)
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        hosts = [f"bad{n % 10}.example" for n in range(40)]
        stuck = [
            asyncio.create_task(caller.post(f"http://{host}:9/", b"", {}, 1)) for host in hosts
        ]
        await until(lambda: len(looked_up) == 10)
        url = receiver.url.replace("127.0.0.1", "good.example")
        assert (await caller.post(url, b"{}", {}, 100))[0] == 204
        assert await asyncio.to_thread(lambda: "other threads go on")
        assert len(looked_up) == 11
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        answer.set()
        await caller.close()
