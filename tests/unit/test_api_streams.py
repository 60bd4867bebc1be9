"""Streamed answers, with a test endpoint in the table: what ends one, and what the
client, the endpoint, the log and the metrics see of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from api_rig import Rest, serving
from structlog.testing import capture_logs

from holdfast.api.address_limits import AddressLimits
from holdfast.api.app import RestApp
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call, Endpoint, StreamBounds
from holdfast.api.streaming import FailurePiece, QuietPiece
from holdfast.errors import Unavailable
from holdfast.telemetry.metrics import REGISTRY

STREAM = StreamBounds(first_piece_seconds=2.0, unread_seconds_max=7.0, drain_seconds=20.0)
DEADLINE_SECONDS = 60.0


@dataclass
class Script:
    """What the test endpoint does: pieces, errors to raise, seconds to sleep."""

    steps: list[bytes | Exception | float]
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[Call] = field(default_factory=list)

    async def stream_test(self, deps: ApiDeps, call: Call) -> Answer:
        self.calls.append(call)
        return Answer(self._pieces(), media_type="text/event-stream")

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            for step in self.steps:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, bytes):
                    yield step
                else:
                    await asyncio.sleep(step)
        finally:
            self.closed.set()


@dataclass
class Exchange:
    """One request, from the server's side of ASGI. ``room``: the client reads."""

    sent: list[Mapping[str, Any]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    has_body: bool = True

    def __post_init__(self) -> None:
        self.room.set()

    async def receive(self) -> dict[str, Any]:
        if self.has_body:
            self.has_body = False
            return {"type": "http.request", "body": b"{}", "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.room.wait()
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def is_whole(self) -> bool:
        return not self.sent[-1].get("more_body", False)


def app_with(rest: Rest, script: Script, **changed: Any) -> RestApp:
    options = {"scope": "chats:send", "deadline_seconds": DEADLINE_SECONDS, "stream": STREAM}
    endpoint = Endpoint(
        "POST", "/v1/test", script.stream_test, "A test", "user", **{**options, **changed}
    )
    address_limits = AddressLimits(rest.deps.settings, rest.deps.clock, rest.deps.proxies)
    return RestApp(rest.deps, address_limits, [endpoint])


def ask(rest: Rest, app: RestApp, exchange: Exchange, *headers: tuple[bytes, bytes]) -> Any:
    bearer = f"Bearer {rest.token('alice')}".encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/test",
        "query_string": b"",
        "client": ("192.0.2.1", 1),
        "headers": [(b"authorization", bearer), *headers],
    }
    return app(scope, exchange.receive, exchange.send)


def count(status: str) -> float:
    labels = {"endpoint": "stream_test", "status": status}
    return REGISTRY.get_sample_value("holdfast_api_requests_total", labels) or 0.0


async def test_stream_is_sent_piece_by_piece_without_a_length() -> None:
    async with serving() as rest:
        script, exchange = Script([b"one", 30.0, b"two"]), Exchange()
        await ask(rest, app_with(rest, script), exchange)
        assert (exchange.status, exchange.body, exchange.is_whole) == (200, b"onetwo", True)
        headers = dict(exchange.sent[0]["headers"])
        assert b"content-length" not in headers
        assert headers[b"content-type"] == b"text/event-stream"
        assert exchange.sent[0]["unread_seconds_max"] == STREAM.unread_seconds_max
        assert script.closed.is_set()


async def test_stream_is_counted_when_it_ends_and_has_no_duration() -> None:
    async with serving() as rest:
        before, exchange = count("200"), Exchange()
        with capture_logs() as lines:
            running = asyncio.create_task(
                ask(rest, app_with(rest, Script([b"one", 30.0, b"two"])), exchange)
            )
            await asyncio.sleep(10)
            assert exchange.body == b"one" and count("200") == before
            await running
        assert count("200") == before + 1
        seconds = {"endpoint": "stream_test"}
        assert not REGISTRY.get_sample_value("holdfast_api_request_seconds_count", seconds)
        assert [line["stream_end"] for line in lines if "stream_end" in line] == ["complete"]


async def test_error_before_the_first_piece_is_an_ordinary_error_response() -> None:
    async with serving() as rest:
        exchange = Exchange()
        script = Script([1.0, Unavailable("no model is free", retry_after_seconds=3.0)])
        await ask(rest, app_with(rest, script), exchange)
        assert exchange.status == 503 and b"no model is free" in exchange.body
        assert dict(exchange.sent[0]["headers"])[b"retry-after"] == b"3"


async def test_error_after_the_first_piece_cuts_the_connection_and_is_logged() -> None:
    async with serving() as rest:
        exchange = Exchange()
        script = Script([b"one", RuntimeError("broken")])
        with capture_logs() as lines, pytest.raises(ConnectionAbortedError, match="failed"):
            await ask(rest, app_with(rest, script), exchange)
        assert (exchange.status, exchange.body, exchange.is_whole) == (200, b"one", False)
        assert "api.stream_failed" in [line["event"] for line in lines]


async def test_head_does_not_wait_longer_than_its_time_for_the_first_piece() -> None:
    async with serving() as rest:
        exchange = Exchange()
        running = asyncio.create_task(ask(rest, app_with(rest, Script([9.0, b"one"])), exchange))
        await asyncio.sleep(1.9)
        assert not exchange.sent
        await asyncio.sleep(0.2)
        assert exchange.status == 200 and exchange.body == b""
        await running
        assert exchange.body == b"one" and exchange.is_whole


async def test_client_that_disconnects_ends_its_stream() -> None:
    async with serving() as rest:
        script, exchange = Script([b"one", 30.0, b"two"]), Exchange()
        with capture_logs() as lines:
            running = asyncio.create_task(ask(rest, app_with(rest, script), exchange))
            await asyncio.sleep(1)
            exchange.gone.set()
            await running
        assert script.closed.is_set() and exchange.body == b"one"
        assert [line["stream_end"] for line in lines if "stream_end" in line] == ["client_gone"]


async def test_client_that_disconnects_before_the_head_ends_its_stream() -> None:
    async with serving() as rest:
        script, exchange = Script([1.5, b"one"]), Exchange()
        running = asyncio.create_task(ask(rest, app_with(rest, script), exchange))
        await asyncio.sleep(1)
        exchange.gone.set()
        await running
        assert script.closed.is_set() and b"one" not in exchange.body


async def test_stream_past_its_deadline_is_cut() -> None:
    async with serving() as rest:
        script, exchange = Script([b"one", 3600.0]), Exchange()
        began = asyncio.get_running_loop().time()
        with pytest.raises(ConnectionAbortedError, match="deadline"):
            await ask(rest, app_with(rest, script), exchange)
        assert asyncio.get_running_loop().time() - began == pytest.approx(DEADLINE_SECONDS)
        assert script.closed.is_set() and not exchange.is_whole


async def test_deadline_before_the_head_is_an_ordinary_error_response() -> None:
    async with serving() as rest:
        exchange = Exchange()
        await ask(rest, app_with(rest, Script([3600.0]), deadline_seconds=1.0), exchange)
        assert exchange.status == 503


async def test_slow_reader_holds_back_its_own_endpoint() -> None:
    async with serving() as rest:
        script, exchange = Script([b"one", b"two", b"three"]), Exchange()
        exchange.room.clear()
        running = asyncio.create_task(ask(rest, app_with(rest, script), exchange))
        await asyncio.sleep(5)
        assert not script.closed.is_set(), "no piece was asked for beyond the first"
        exchange.room.set()
        await running
        assert exchange.body == b"onetwothree" and exchange.is_whole


async def test_reader_that_never_reads_is_cut_at_the_deadline() -> None:
    async with serving() as rest:
        script, exchange = Script([b"one", b"two"]), Exchange()
        exchange.room.clear()
        with pytest.raises(ConnectionAbortedError, match="deadline"):
            await ask(rest, app_with(rest, script), exchange)
        assert script.closed.is_set()


async def test_drain_lets_a_stream_end_and_refuses_a_new_one() -> None:
    async with serving() as rest:
        script, exchange, late = Script([b"one", 5.0, b"two"]), Exchange(), Exchange()
        app = app_with(rest, script)
        running = asyncio.create_task(ask(rest, app, exchange))
        await asyncio.sleep(1)
        draining = asyncio.create_task(app.drain())
        await asyncio.sleep(1)
        assert script.calls[0].draining.is_set() and not draining.done()
        await ask(rest, app, late)
        assert late.status == 503 and len(script.calls) == 1
        await asyncio.gather(running, draining)
        assert exchange.body == b"onetwo" and exchange.is_whole


async def test_drain_cuts_a_stream_that_does_not_end_in_its_time() -> None:
    async with serving() as rest:
        script, exchange = Script([b"one", 3600.0]), Exchange()
        app = app_with(rest, script)
        running = asyncio.create_task(ask(rest, app, exchange))
        await asyncio.sleep(1)
        began = asyncio.get_running_loop().time()
        await app.drain()
        assert asyncio.get_running_loop().time() - began == pytest.approx(STREAM.drain_seconds)
        with pytest.raises(ConnectionAbortedError, match="drained"):
            await running
        assert script.closed.is_set()


async def test_streaming_endpoint_gets_the_idempotency_key_itself() -> None:
    async with serving() as rest:
        script = Script([b"one"])
        app, key = app_with(rest, script, key="kept"), (b"idempotency-key", b"k1")
        for _ in range(2):
            await ask(rest, app, Exchange(), key)
        assert [call.key for call in script.calls] == ["k1", "k1"]
        assert script.calls[0].fingerprint == script.calls[1].fingerprint != ""


def test_streaming_endpoint_without_a_deadline_is_refused() -> None:
    with pytest.raises(ValueError, match="deadline_seconds"):
        Endpoint("GET", "/v1/test", Script([]).stream_test, "A test", "user", stream=STREAM)


class Stubborn(Script):
    """An endpoint whose iterator ignores cancellation until ``release``."""

    async def _pieces(self) -> AsyncIterator[bytes]:
        self.release = asyncio.Event()
        yield b"piece"
        while not self.release.is_set():
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                continue


async def test_drain_ends_although_an_iterator_ignores_its_cancellation() -> None:
    async with serving() as rest:
        script = Stubborn([])
        app = app_with(rest, script)
        running = asyncio.create_task(ask(rest, app, Exchange()))
        await asyncio.sleep(1)
        async with asyncio.timeout(STREAM.drain_seconds + 10):
            await app.drain()
        with pytest.raises(ConnectionAbortedError, match="drained"):
            await running
        script.release.set()


async def test_quiet_piece_does_not_start_the_answer() -> None:
    async with serving() as rest:
        script = Script([QuietPiece(b"wait "), 1.0, Unavailable("no model is free")])
        exchange = Exchange()
        await ask(rest, app_with(rest, script), exchange)
        assert exchange.status == 503 and b"wait" not in exchange.body


async def test_quiet_piece_leaves_with_the_head_or_with_the_first_piece() -> None:
    async with serving() as rest:
        early, late = Exchange(), Exchange()
        await ask(rest, app_with(rest, Script([QuietPiece(b"wait "), 1.0, b"one"])), early)
        assert early.body == b"wait one"
        steps: list[bytes | Exception | float] = [QuietPiece(b"a "), 5.0, QuietPiece(b"b "), 5.0]
        running = asyncio.create_task(ask(rest, app_with(rest, Script([*steps, b"one"])), late))
        await asyncio.sleep(2.1)
        assert late.status == 200 and late.body == b"a "
        await asyncio.sleep(4)
        assert late.body == b"a b "
        await running
        assert late.body == b"a b one" and late.is_whole


async def test_failure_is_an_error_response_before_the_head_and_a_piece_after_it() -> None:
    async with serving() as rest:
        failure = FailurePiece.of(b"failed", Unavailable("no model is free"))
        early, late = Exchange(), Exchange()
        await ask(rest, app_with(rest, Script([QuietPiece(b"wait"), 1.0, failure])), early)
        assert early.status == 503 and b"no model is free" in early.body
        await ask(rest, app_with(rest, Script([QuietPiece(b"wait "), 3.0, failure])), late)
        assert (late.status, late.body, late.is_whole) == (200, b"wait failed", True)


async def test_idle_stream_gets_an_idle_piece_each_time_it_was_quiet_for_so_long() -> None:
    bounds = StreamBounds(idle_piece=b".", idle_seconds=15.0)
    async with serving() as rest:
        exchange = Exchange()
        script = Script([b"one", 10.0, b"two", 31.0, b"three", 14.0])
        await ask(rest, app_with(rest, script, stream=bounds), exchange)
        assert exchange.body == b"onetwo..three"


async def test_piece_costs_no_task() -> None:
    tasks: list[int] = []

    class Counting(Script):
        async def _pieces(self) -> AsyncIterator[bytes]:
            for _ in range(50):
                tasks.append(id(asyncio.current_task()))
                yield b"piece"

    async with serving() as rest:
        await ask(rest, app_with(rest, Counting([])), Exchange())
    assert len(tasks) == 50 and len(set(tasks)) == 1


async def test_head_that_cannot_be_sent_ends_the_answer_as_failed() -> None:
    class Broken(Exchange):
        async def send(self, message: Any) -> None:
            raise ValueError("a header of the answer holds a line break")

    async with serving() as rest:
        with pytest.raises(ConnectionAbortedError, match="failed"):
            await ask(rest, app_with(rest, Script([b"one", 30.0])), Broken())
