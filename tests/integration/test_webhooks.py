"""Webhooks against a real HTTP receiver: signed, in order, retried, guarded, logged."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from webhook_rig import SECRET, Log, Receiver, Scene, entry, receiving, scene, until

from holdfast.clock import SystemClock
from holdfast.errors import InvalidMessage, NotFound, Unauthorized
from holdfast.eventlog.contract import Position
from holdfast.message import LogEntry
from holdfast.store.memory import MemoryStore
from holdfast.webhooks.address_guard import check_url, is_public
from holdfast.webhooks.contract import (
    DELIVERIES_KEPT_PER_ENDPOINT,
    JOB_TYPE,
    Delivery,
    WebhookEndpoint,
)
from holdfast.webhooks.delivery import DeliveryNotice, draft_of, with_webhooks
from holdfast.webhooks.http_client import WebhookCaller, public_socket
from holdfast.webhooks.reader import WebhookReader
from holdfast.webhooks.signature import new_secret, sign, verify
from holdfast.webhooks.sqlite import SqliteEndpoints
from holdfast.work.contract import ReaderMark
from holdfast.work.inspection import Query
from holdfast.work.job import JobDraft, Policies, Reason
from holdfast.work.sqlite.store import MemoryWork


async def _positioned(stage: Scene) -> bool:
    return await stage.jobs.reader_offset(WebhookReader.reader) is not None


@asynccontextmanager
async def served(tmp_path: Path, **policy: Any) -> AsyncIterator[tuple[Scene, Receiver]]:
    """A scene whose reader has begun, and a receiver."""
    async with (
        asyncio.timeout(120),
        receiving() as receiver,
        scene(tmp_path, **policy) as stage,
    ):
        await until(lambda: _positioned(stage))
        yield stage, receiver


async def test_messages_arrive_signed_and_in_order_and_are_logged(tmp_path: Path) -> None:
    async with served(tmp_path) as (stage, receiver):
        await stage.add(receiver.url)
        stage.log.entries += [entry(n) for n in range(1, 21)] + [entry(21, tenant="other")]
        await until(lambda: len(receiver.calls) == 20)
        assert receiver.sequences() == list(range(1, 21))
        sent, data = receiver.calls[0]
        verify(SECRET, sent, time.time(), data)
        event = msgspec.json.decode(data)
        assert (event["type"], event["data"]["content"], event["data"]["tenant"]) == (
            "message.created",
            "hi",
            "acme",
        )
        assert sent["webhook-id"] == "msg_1_ep_1"

        async def all_logged() -> bool:
            return len(await stage.endpoints.deliveries("ep_1")) == 20

        await until(all_logged)
        log = await stage.endpoints.deliveries("ep_1")
        assert (log[-1].status, log[-1].sequence, log[-1].attempt) == (204, 1, 1)
        assert await stage.jobs.reader_offset(WebhookReader.reader) == 21


async def test_failing_endpoint_is_retried_with_the_same_id_in_order(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as (stage, receiver):
        receiver.answer = lambda calls: web.Response(status=500 if calls <= 2 else 200, text="oh")
        await stage.add(receiver.url)
        stage.log.entries += [entry(n) for n in range(1, 6)]
        await until(lambda: len(receiver.calls) == 7)
        assert receiver.sequences() == [1, 1, 1, 2, 3, 4, 5]
        assert len({sent["webhook-id"] for sent, _ in receiver.calls[:3]}) == 1
        log = list(reversed(await stage.endpoints.deliveries("ep_1")))
        assert [(d.status, d.attempt) for d in log[:2]] == [(500, 1), (500, 2)]


async def test_message_redacted_or_removed_before_delivery_is_not_sent(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, strikes_max=1000) as (stage, receiver):
        let_through = asyncio.Event()
        receiver.answer = lambda _: web.Response(status=200 if let_through.is_set() else 500)
        await stage.add(receiver.url)
        stage.log.entries += [entry(n) for n in range(1, 5)]
        await until(lambda: bool(receiver.calls))
        waiting = await stage.jobs.find(Query())
        assert all(b'"hi"' not in job.payload for job in waiting), (
            "a job names its message, it does not carry it"
        )
        stage.log.now["c1", 2] = msgspec.structs.replace(stage.log.entries[1].what, content="")
        stage.log.now["c1", 3] = None
        let_through.set()
        await until(lambda: bool(receiver.calls) and receiver.sequences()[-1] == 4)
        received = {event["sequence"]: event["content"] for event in map(_data, receiver.calls)}
        assert received == {1: "hi", 2: "", 4: "hi"}


def _data(call: tuple[dict[str, str], bytes]) -> Any:
    return msgspec.json.decode(call[1])["data"]


def test_failure_of_the_chat_store_is_no_strike_of_the_endpoint() -> None:
    policies = with_webhooks(Policies())
    assert policies.lookup(JOB_TYPE, Reason.TRANSPORT_UNAVAILABLE).strike
    assert not policies.lookup(JOB_TYPE, Reason.TRANSPORT_UNAVAILABLE).feeds_breaker
    ours = policies.lookup(JOB_TYPE, Reason.DEPENDENCY_FAILURE)
    assert not ours.strike and not ours.feeds_breaker
    pauses = [ours.delay(attempt, random.Random(attempt)) for attempt in (1, 2, 100)]
    assert pauses == [pytest.approx(seconds, rel=0.1) for seconds in (1, 2, 30)]
    assert policies.lookup("Order", Reason.HANDLER_EXCEPTION) == Policies().lookup(
        "Order", Reason.HANDLER_EXCEPTION
    )


async def test_dead_endpoint_does_not_delay_others(tmp_path: Path) -> None:
    async with served(tmp_path, strikes_max=3) as (stage, receiver):
        await stage.add("http://127.0.0.1:9/hook", endpoint_id="ep_dead")
        await stage.add(receiver.url)
        stage.log.entries += [entry(n) for n in range(1, 11)]
        await until(lambda: len(receiver.calls) == 10)
        assert await stage.jobs.open_breakers() == []

        async def buried() -> bool:
            return bool(await stage.jobs.dead(Query()))

        await until(buried)
        dead = await stage.jobs.dead(Query())
        assert dead[0].reason is Reason.POISON_MESSAGE
        assert dead[0].destination == "ep_dead"


async def test_410_disables_the_endpoint_and_429_waits_for_retry_after(tmp_path: Path) -> None:
    async with served(tmp_path) as (stage, receiver):
        replies = [web.Response(status=429, headers={"retry-after": "1"}), web.Response(status=410)]
        receiver.answer = lambda calls: replies[min(calls, 2) - 1]
        await stage.add(receiver.url)
        started = time.monotonic()
        stage.log.entries.append(entry(1))

        async def disabled() -> bool:
            return bool((await stage.endpoints.get("ep_1")).disabled)

        await until(disabled)
        assert time.monotonic() - started >= 1
        assert "410" in (await stage.endpoints.get("ep_1")).disabled


async def test_test_delivery_has_its_own_event_type(tmp_path: Path) -> None:
    async with served(tmp_path) as (stage, receiver):
        await stage.add(receiver.url)
        await stage.jobs.enqueue([draft_of(DeliveryNotice("ep_1", "acme", "2026-01-01"))])
        await until(lambda: len(receiver.calls) == 1)
        assert msgspec.json.decode(receiver.calls[0][1])["type"] == "webhook.test"


async def test_job_of_an_unknown_endpoint_is_a_failure(tmp_path: Path) -> None:
    async with served(tmp_path) as (stage, receiver):
        await stage.add(receiver.url, endpoint_id="ep_gone")
        await stage.endpoints.remove("ep_gone")
        notices = [
            DeliveryNotice(endpoint, "acme", "2026-01-01")
            for endpoint in ("ep_gone", "ep_elsewhere")
        ]
        await stage.jobs.enqueue([draft_of(notice) for notice in notices])

        async def over() -> bool:
            return not await stage.jobs.find(Query())

        await until(over)
        (dead,) = await stage.jobs.dead(Query())
        assert (dead.destination, dead.reason) == ("ep_elsewhere", Reason.VALIDATION_FAILURE)
        assert not receiver.calls


async def test_redirect_of_a_delivery_is_a_failure(tmp_path: Path) -> None:
    async with served(tmp_path) as (stage, receiver):
        receiver.answer = lambda calls: (
            web.Response(status=302, headers={"location": "http://169.254.169.254/"})
            if calls == 1
            else web.Response()
        )
        await stage.add(receiver.url)
        stage.log.entries.append(entry(1))
        await until(lambda: len(receiver.calls) == 2)


async def test_reader_repeats_nothing_after_a_restart(tmp_path: Path) -> None:
    endpoints, jobs, log = (
        await SqliteEndpoints.open(tmp_path / "w.db"),
        MemoryWork(),
        Log([entry(1)]),
    )
    await endpoints.add(
        WebhookEndpoint("ep_1", "acme", "https://example.com", SECRET, "", "2026-01-01")
    )
    first = WebhookReader(log, endpoints, jobs, MemoryStore(), SystemClock())
    await jobs.enqueue([])
    assert await first.advance(Position((0,))) == Position((1,))
    second = WebhookReader(log, endpoints, jobs, MemoryStore(), SystemClock())
    task = asyncio.create_task(second.run())
    log.entries.append(entry(2))

    async def both() -> bool:
        return len(await jobs.find(Query())) == 2

    await until(both)
    task.cancel()
    streams = [e.stream for e in await jobs.find(Query())]
    assert streams == ["ep_1/c1", "ep_1/c1"]
    await endpoints.close()


async def test_chats_restored_without_their_jobs_skip_and_repeat_no_later_message(
    tmp_path: Path,
) -> None:
    """Jobs in PostgreSQL are in no backup: their position is past the restored log."""
    endpoints, jobs = await SqliteEndpoints.open(tmp_path / "w.db"), MemoryWork()
    await endpoints.add(
        WebhookEndpoint("ep_1", "acme", "https://example.com", SECRET, "", "2026-01-01")
    )
    log = Log([entry(n) for n in range(1, 4)])
    await jobs.enqueue([], [ReaderMark(WebhookReader.reader, 0, 6)])
    wanted: list[int] = []

    async def has_jobs() -> bool:
        found = [msgspec.json.decode(job.payload)["sequence"] for job in await jobs.find(Query())]
        assert found == wanted[: len(found)]
        return found == wanted

    async def restart(*sequences: int) -> None:
        """The server starts; then these are committed and become jobs."""
        log.waited_for.clear()
        reader = WebhookReader(log, endpoints, jobs, MemoryStore(), SystemClock())
        task = asyncio.create_task(reader.run())
        await asyncio.wait_for(log.waited_for.wait(), 60)
        log.entries.extend(entry(n) for n in sequences)
        wanted.extend(sequences)
        await until(has_jobs)
        task.cancel()

    await restart(4)
    await restart(5)
    await restart(*range(6, 12))
    await restart(12)
    del log.entries[8:]
    await restart(9, 10)
    assert await jobs.reader_offset(f"{WebhookReader.reader}.2") == 10
    await endpoints.close()


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "::1", "fe80::1",
     "fd00::1",
     "::ffff:127.0.0.1", "::ffff:10.0.0.1", "100.64.0.1", "224.0.0.1", "2002:7f00:1::",
     "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::1", "::127.0.0.1", "fec0::1", "192.0.0.8",
     "ff02::1", "::",
     "255.255.255.255", "240.0.0.1", "198.18.0.1"],
)  # fmt: skip
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "64:ff9b::101:101"]
)
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(address)


INSIDE = [
    "127.0.0.1", "①27.0.0.1", "127。0。0。1", "127｡0｡0｡1",
    "１２７.0.0.1", "１２７.0.0.１", "127.0.0.1.",
    "127.1", "0",
    "2130706433", "017700000001", "0177.0.0.1", "127.0.0.01", "0x7f000001", "0x7f.1",
    "0X7F.0.0.0x1", "127.0.0.0x1",
    "[::1]", "[::1%25lo]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "%31%32%37.0.0.1", "%EF%BC%9127.0.0.1",
]  # fmt: skip
"""Spellings of this machine that slip past a guard which only reads the URL."""


@asynccontextmanager
async def inside() -> AsyncIterator[tuple[int, list[str]]]:
    """A server that nobody may reach: its port, and who did."""
    reached: list[str] = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(str(writer.get_extra_info("peername")))
        writer.close()

    async with AsyncExitStack() as servers:
        server = await servers.enter_async_context(
            await asyncio.start_server(accept, "127.0.0.1", 0)
        )
        port = server.sockets[0].getsockname()[1]
        with suppress(OSError):  # a machine without IPv6
            await servers.enter_async_context(await asyncio.start_server(accept, "::1", port))
        yield port, reached


async def call(url: str) -> tuple[int, bytes, str]:
    caller = WebhookCaller(timeout_seconds=5, connect_timeout_seconds=5, private_allowed=False)
    try:
        return await caller.post(url, b"{}", {}, 100)
    finally:
        await caller.close()


@pytest.fixture
def names_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name server is asked: any spelling of an address, or this machine's name."""
    resolve = socket.getaddrinfo

    def numeric(host: str, port: int, *rest: Any, flags: int = 0, **more: Any) -> Any:
        known = "127.0.0.1" if host.lower().removesuffix(".") == "localhost" else host
        return resolve(known, port, *rest, flags=flags | socket.AI_NUMERICHOST, **more)

    monkeypatch.setattr(socket, "getaddrinfo", numeric)


@pytest.mark.parametrize("host", [*INSIDE, "localhost", "ⓛocalhost", "LOCALHOST."])
@pytest.mark.parametrize("scheme", ["https", "http"])
@pytest.mark.usefixtures("names_of_this_machine")
async def test_private_address_is_refused_at_connect(scheme: str, host: str) -> None:
    async with inside() as (port, reached):
        with pytest.raises(OSError):
            await call(f"{scheme}://{host}:{port}/")
        assert reached == []


@pytest.mark.parametrize("host", INSIDE)
def test_loopback_url_in_any_spelling_is_refused(host: str) -> None:
    with pytest.raises(InvalidMessage) as refused:
        check_url(f"https://{host}/", private_allowed=False)
    assert refused.value.details["field"] == "url"


@pytest.mark.parametrize(
    "host", ["169.254.169.254", "１６９.254.169.254", "①⑥⑨.254.169.254", "10.0.0.1", "[fd00::1]"]
)
def test_private_address_url_is_refused(host: str) -> None:
    with pytest.raises(InvalidMessage):
        check_url(f"https://{host}/", private_allowed=False)


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "10.0.0.1", "fd00::1", "fe80::1%eth0", "::ffff:10.0.0.1"]
)
def test_no_socket_is_opened_to_a_private_address(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with pytest.raises(OSError, match="not public"):
        public_socket((family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, 443)))


async def test_dns_rebinding_is_judged_by_the_connected_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DNS rebinding: what the name was when the URL was given does not count."""
    answers = iter([["127.0.0.2", "127.0.0.1"], ["127.0.0.1"], ["::1", "127.0.0.1"]])

    def resolve(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        assert host == "rebind.example"
        return [
            (
                socket.AF_INET6 if ":" in each else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (each, port),
            )
            for each in next(answers)
        ]

    async with inside() as (port, reached):
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        for _ in range(3):
            check_url(f"https://rebind.example:{port}/", private_allowed=False)
            with pytest.raises(OSError, match="not public") as refused:
                await call(f"https://rebind.example:{port}/")
            assert "127.0.0" not in str(refused.value), "an error is no way to look up names inside"
        assert reached == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_redirect_response_is_not_followed(status: int) -> None:
    async with inside() as (port, reached), receiving() as receiver:
        aside = {"location": f"http://127.0.0.1:{port}/"}
        receiver.answer = lambda _: web.Response(status=status, headers=aside)
        caller = WebhookCaller(timeout_seconds=5, connect_timeout_seconds=5, private_allowed=True)
        answered, _, _ = await caller.post(receiver.url, b"{}", {}, 100)
        await caller.close()
        assert (answered, reached, len(receiver.calls)) == (status, [], 1)


@pytest.mark.parametrize(
    "url",
    ["http://example.com/", "https://user:pw@example.com/", "https://user@example.com/",
     "https://:pw@example.com/",
     "https://example.com\\@127.0.0.1/", "https://example.com@127.0.0.1/", "ftp://example.com/",
     "//example.com/",
     "https:///x", "https://example.com:0/", "https://example.com:65536/",
     "https://example.com/#f", "nonsense",
     "https://example.com/" + "x" * 2000, "https://exa mple.com/", "https://example.com%2f/",
     "https://a..example/",
     "https://[fe80::1%25eth0]/", "https://[2606:4700:4700::1111%25eth0]/", "https://1.1.1/"],
)  # fmt: skip
def test_invalid_webhook_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidMessage):
        check_url(url, private_allowed=False)


@pytest.mark.parametrize(
    "url",
    ["https://example.com/", "https://hooks.example.com:8443/a/b?c=d", "https://example.com./",
     "https://1.1.1.1/",
     "https://bücher.example/", "https://xn--bcher-kva.example/", "https://a_b.example/",
     "https://4chan.example/",
     "https://[2606:4700:4700::1111]/", "HTTPS://Example.com/"],
)  # fmt: skip
def test_public_webhook_url_is_accepted(url: str) -> None:
    check_url(url, private_allowed=False)


@pytest.mark.parametrize("private_allowed", [False, True])
@pytest.mark.parametrize(
    ("host", "why"),
    [("a..example", "empty label"), (".example", "empty label"),
     ("a" * 64 + ".example", "64 characters"),
     (".".join(["abcdefgh"] * 29) + ".example", "at most 253"), ("-a.example", "letters, digits"),
     ("a-.example", "letters, digits"), ("xn--.example", "letters, digits"),
     ("xn--99zzz99.example", "cannot be"),
     ("xn--abc-.example", "letters, digits"), ("ex!ample.example", "letters, digits"),
     ("example..", "empty label")],
)  # fmt: skip
def test_url_with_an_impossible_host_is_refused(host: str, why: str, private_allowed: bool) -> None:
    with pytest.raises(InvalidMessage, match=why) as refused:
        check_url(f"https://{host}/", private_allowed=private_allowed)
    assert refused.value.details["field"] == "url"


@pytest.mark.parametrize("label", ["bü" + "x" * 70, "a\u0301" * 60, "\ud800"])
def test_url_with_a_host_that_has_no_ascii_form_is_refused(label: str) -> None:
    with pytest.raises(InvalidMessage):
        check_url(f"https://{label}.example/", private_allowed=True)


async def test_failure_before_sending_is_in_the_log_of_deliveries(tmp_path: Path) -> None:
    """An endpoint with a host that is refused today, and an unreadable message."""

    async with served(tmp_path) as (stage, receiver):
        await stage.add(f"https://{'a' * 64}.example/hook", endpoint_id="ep_bad")
        stage.log.failing = 2
        await stage.add(receiver.url)
        stage.log.entries.append(entry(1))
        await until(lambda: len(receiver.calls) == 1)

        async def buried() -> bool:
            return bool(await stage.jobs.dead(Query()))

        await until(buried)
        (dead,) = await stage.jobs.dead(Query())
        assert (dead.destination, dead.reason) == ("ep_bad", Reason.VALIDATION_FAILURE)
        tries = [
            *await stage.endpoints.deliveries("ep_bad"),
            *await stage.endpoints.deliveries("ep_1"),
        ]
        errors = [each.error for each in tries if each.status == 0]
        assert (
            sum(
                "not sent: InvalidMessage: the host of the URL cannot exist" in each
                for each in errors
            )
            == 1
        )
        assert (
            sum("not sent: Unavailable: the store is unavailable" in each for each in errors) == 2
        )


async def test_retry_after_may_be_a_date(tmp_path: Path) -> None:
    async with served(tmp_path) as (stage, receiver):
        at = formatdate(time.time() + 2, usegmt=True)  # whole seconds: between one and two from now
        receiver.answer = lambda calls: web.Response(
            status=503 if calls == 1 else 200, headers={"retry-after": at} if calls == 1 else {}
        )
        await stage.add(receiver.url)
        started = time.monotonic()
        stage.log.entries.append(entry(1))
        await until(lambda: len(receiver.calls) == 2)
        assert time.monotonic() - started >= 0.9


def test_signature_is_refused_if_anything_is_changed() -> None:
    sent = sign(SECRET, "msg_1", 1000.0, b"{}")
    verify(SECRET, sent, 1000.0, b"{}")
    for wrong in (
        (SECRET, sent, 1000.0, b"{ }"),
        (SECRET, {**sent, "webhook-id": "msg_2"}, 1000.0, b"{}"),
        (new_secret(bytes(32)), sent, 1000.0, b"{}"),
        (SECRET, sent, 1400.0, b"{}"),
        (SECRET, {}, 1000.0, b"{}"),
    ):
        with pytest.raises(Unauthorized):
            verify(*wrong)


def test_published_example_of_standard_webhooks_verifies() -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    sent = sign(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330.0, b'{"test": 2432232314}')
    assert sent["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


async def test_log_of_deliveries_is_bounded_and_removed_with_its_endpoint(tmp_path: Path) -> None:
    endpoints = await SqliteEndpoints.open(tmp_path / "w.db")
    await endpoints.add(
        WebhookEndpoint("ep_1", "acme", "https://example.com", SECRET, "", "2026-01-01")
    )
    for n in range(DELIVERIES_KEPT_PER_ENDPOINT + 5):
        await endpoints.log(Delivery("ep_1", "m", "c", n, 1, "2026", 200, 0.1))
    kept = await endpoints.deliveries("ep_1", 5000)
    assert len(kept) == DELIVERIES_KEPT_PER_ENDPOINT
    assert kept[0].sequence == DELIVERIES_KEPT_PER_ENDPOINT + 4
    await endpoints.remove("ep_1")
    assert await endpoints.deliveries("ep_1") == []
    with pytest.raises(NotFound):
        await endpoints.get("ep_1")
    with pytest.raises(NotFound):
        await endpoints.disable("ep_1", "?", "2026-01-01")
    await endpoints.close()


async def test_reader_without_endpoints_commits_no_batch_and_skips_older_messages(
    tmp_path: Path,
) -> None:
    endpoints, jobs, log = (
        await SqliteEndpoints.open(tmp_path / "w.db"),
        MemoryWork(),
        Log([entry(1), entry(2)]),
    )
    await jobs.enqueue([], [ReaderMark("webhooks", 0, 0)])
    reader = WebhookReader(log, endpoints, jobs, MemoryStore(), SystemClock())
    assert await reader.advance(await reader.begin()) == Position((2,))
    assert await jobs.reader_offset("webhooks") == 0, "nothing was made, so nothing was stored"
    await endpoints.add(
        WebhookEndpoint("ep_1", "acme", "https://example.com", SECRET, "", "2026-01-01")
    )
    log.entries.append(entry(3))
    assert await reader.advance(Position((2,))) == Position((3,))
    assert len(await jobs.find(Query())) == 1, "what comes after it was added"
    assert await jobs.reader_offset("webhooks") == 3
    await endpoints.close()


async def test_readers_of_two_nodes_make_each_job_once(tmp_path: Path) -> None:
    endpoints, jobs, log = await SqliteEndpoints.open(tmp_path / "w.db"), MemoryWork(), Log()
    await endpoints.add(
        WebhookEndpoint("ep_1", "acme", "https://example.com", SECRET, "", "2026-01-01")
    )
    readers = [WebhookReader(log, endpoints, jobs, MemoryStore(), SystemClock()) for _ in range(3)]
    for reader in readers:
        await reader.begin()
    tasks = [asyncio.create_task(reader.run()) for reader in readers]
    for number in range(1, 101):
        log.entries.append(entry(number))
        await asyncio.sleep(0.002 if number % 10 else 0.02)
    await until(lambda: _has_jobs(jobs, 100))
    assert not any(task.done() for task in tasks), "an overtaken reader reads on"
    for task in tasks:
        task.cancel()
    found = [msgspec.json.decode(job.payload)["sequence"] for job in await jobs.find(Query(), 200)]
    assert found == list(range(1, 101)), "in order, too"
    await endpoints.close()


async def test_reader_goes_on_where_the_one_ended_that_had_the_lease_before(
    tmp_path: Path,
) -> None:
    endpoints, jobs, log = await SqliteEndpoints.open(tmp_path / "w.db"), MemoryWork(), Log()
    await endpoints.add(
        WebhookEndpoint("ep_1", "acme", "https://example.com", SECRET, "", "2026-01-01")
    )
    holder, taken = "one", list[str]()

    class Reader(WebhookReader):
        def __init__(self, name: str) -> None:
            super().__init__(log, endpoints, jobs, MemoryStore(), SystemClock())
            self.is_held = lambda: holder == name
            self._here = name

        async def drafts(self, entries: Sequence[LogEntry], position: Position) -> list[JobDraft]:
            taken.append(self._here)
            return await super().drafts(entries, position)

    tasks = [asyncio.create_task(Reader(name).run()) for name in ("one", "two")]
    await until(lambda: log.waited_for.is_set())
    log.entries.append(entry(1))
    await until(lambda: _has_jobs(jobs, 1))
    holder = "two"
    log.entries.append(entry(2))
    await until(lambda: _has_jobs(jobs, 2))
    assert taken == ["one", "two"]
    for task in tasks:
        task.cancel()
    await endpoints.close()


async def _has_jobs(jobs: MemoryWork, count: int) -> bool:
    return len(await jobs.find(Query(), 200)) >= count


async def test_endpoint_gets_no_older_message_from_a_lagging_reader(
    tmp_path: Path,
) -> None:
    endpoints, jobs, log = (
        await SqliteEndpoints.open(tmp_path / "w.db"),
        MemoryWork(),
        Log([entry(1)]),
    )
    await jobs.enqueue([], [ReaderMark("webhooks", 0, 0)])
    reader = WebhookReader(log, endpoints, jobs, MemoryStore(), SystemClock())
    assert await reader.advance(await reader.begin()) == Position((1,))
    log.entries += [entry(2), entry(3)]
    await endpoints.add(
        WebhookEndpoint("ep_1", "acme", "https://example.com", SECRET, "", "2026-06-01")
    )
    assert await reader.advance(Position((1,))) == Position((3,))
    assert not await jobs.find(Query()), "both are from before it was added"
    log.entries.append(entry(4))
    assert await reader.advance(Position((3,))) == Position((4,))
    assert len(await jobs.find(Query())) == 1, "whatever the clock said, it came after"
    await endpoints.close()
