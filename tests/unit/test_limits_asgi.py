"""Any ASGI application behind limits: its headers, answers and holds."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from limits_rig import Shared

from holdfast.limits.asgi import RateLimitMiddleware, _Message, _Receive, _Scope, _Send
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.http import rate_limit_headers
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rules import Check, Rule, RuleSet
from holdfast.message import User
from proof import virtual_loop

SLOTS = Rule("acme", "/slots", "concurrency", 2, 3600.0)


class Served:
    """Requests to a guarded application, each with its answer."""

    def __init__(self, *rules: Rule, subject: str = "ann") -> None:
        self.limiter = Limiter(Shared(), virtual_loop.LoopClock(), rules=RuleSet.of(rules))
        self.checks = [Check(rule.tenant, rule.resource, subject) for rule in rules]
        self.app = RateLimitMiddleware(self._app, self.limiter, lambda _: self.checks)
        self.going_on = asyncio.Event()
        self.going_on.set()
        self.broken = False

    async def _app(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        await self.going_on.wait()
        if self.broken:
            raise ZeroDivisionError
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await receive()
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def get(self) -> tuple[int, dict[str, str], Any]:
        sent: list[_Message] = []

        async def send(message: _Message) -> None:
            sent.append(message)

        async def receive() -> _Message:
            raise AssertionError("nobody reads the body")

        await self.app({"type": "http"}, receive, send)
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], headers, msgspec.json.decode(sent[1]["body"])


class Handshake:
    """A WebSocket to a guarded application, until its client hangs up."""

    def __init__(self, served: Served, *extensions: str) -> None:
        self.sent: list[_Message] = []
        self._events: asyncio.Queue[_Message] = asyncio.Queue()
        self._events.put_nowait({"type": "websocket.connect"})
        scope = {"type": "websocket", "extensions": {name: {} for name in extensions}}
        self._running = asyncio.create_task(served.app(scope, self._events.get, self._send))

    async def _send(self, message: _Message) -> None:
        self.sent.append(message)

    async def answered(self) -> _Message:
        await asyncio.sleep(0.1)
        return self.sent[0]

    async def hang_up(self) -> None:
        self._events.put_nowait({"type": "websocket.disconnect"})
        await self._running


async def test_websocket_is_checked_at_its_handshake_and_holds_until_it_ends() -> None:
    served = Served(SLOTS)
    two = [Handshake(served) for _ in range(2)]
    accepted = [await each.answered() for each in two]
    assert [message["type"] for message in accepted] == ["websocket.accept"] * 2
    assert b"ratelimit-policy" in dict(accepted[0]["headers"])
    plain, answering = Handshake(served), Handshake(served, "websocket.http.response")
    assert await plain.answered() == {"type": "websocket.close", "code": 1013}
    refused = await answering.answered()
    assert (refused["type"], refused["status"]) == ("websocket.http.response.start", 429)
    assert {b"retry-after", b"ratelimit"} <= dict(refused["headers"]).keys()
    assert msgspec.json.decode(answering.sent[1]["body"])["violated-policies"] == ["acme//slots"]
    await two[0].hang_up()
    assert (await Handshake(served).answered())["type"] == "websocket.accept"


async def test_hold_of_a_long_request_is_renewed_until_it_ends() -> None:
    served = Served(msgspec.structs.replace(SLOTS, window_seconds=10.0))
    served.going_on.clear()
    two = [asyncio.create_task(served.get()) for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(9)
        assert (await served.get())[0] == 429, "both places are still taken"
    served.going_on.set()
    await asyncio.gather(*two)
    assert [(await served.get())[0] for _ in range(3)] == [200] * 3
    await asyncio.sleep(0.1)
    assert len(asyncio.all_tasks()) == 1, "nobody goes on renewing"


async def test_refusal_stands_if_its_rule_goes_into_shadow_meanwhile() -> None:
    once = Rule("acme", "/once", "fixed_window", 1, 3600.0)
    served = Served(once)
    await served.get()
    asking = asyncio.create_task(served.get())
    await asyncio.sleep(0)
    served.limiter.use(RuleSet.of([msgspec.structs.replace(once, mode="shadow", version=2)]))
    status, headers, body = await asking
    assert (status, body["violated-policies"]) == (429, ["acme//once"])
    assert int(headers["retry-after"]) >= 1


async def test_finished_request_releases_its_hold() -> None:
    served = Served(SLOTS)
    assert [(await served.get())[0] for _ in range(5)] == [200] * 5
    served.going_on.clear()
    two = [asyncio.create_task(served.get()) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert (await served.get())[0] == 429, "both places are taken"
    two[0].cancel()
    await asyncio.sleep(0.1)
    served.broken = True
    served.going_on.set()
    assert isinstance((await asyncio.gather(*two, return_exceptions=True))[1], ZeroDivisionError)
    served.broken = False
    assert [(await served.get())[0] for _ in range(5)] == [200] * 5, "however it ended"


async def test_refused_request_releases_its_shadow_hold() -> None:
    shadow = msgspec.structs.replace(SLOTS, mode="shadow")
    served = Served(shadow, Rule("acme", "/once", "fixed_window", 1, 3600.0))
    assert [(await served.get())[0] for _ in range(4)] == [200] + [429] * 3
    held = await served.limiter.check("acme", "/slots", "ann")
    assert (held.remaining, held.exceeded) == (1, False)


@pytest.mark.parametrize("subject", ["", "x" * 2000])
async def test_check_that_no_rule_can_answer_is_a_client_error(subject: str) -> None:
    served = Served(Rule("acme", "/x", "fixed_window", 10, 3600.0), subject=subject)
    status, headers, body = await served.get()
    assert (status, headers["content-type"]) == (400, "application/problem+json")
    assert body["status"] == 400 and "subject" in body["detail"]


async def test_shadow_rule_is_not_visible_to_clients() -> None:
    enforced = Rule("acme", "/x", "fixed_window", 1, 3600.0)
    served = Served(enforced, Rule("acme", "/y", "fixed_window", 1, 3600.0, mode="shadow"))
    for expected in (200, 429):
        status, headers, body = await served.get()
        assert status == expected
        assert "/x" in headers["ratelimit"] and "/x" in headers["ratelimit-policy"]
        assert "/y" not in headers["ratelimit"] and "/y" not in headers["ratelimit-policy"]
    assert body["violated-policies"] == ["acme//x"]


async def test_shadow_rule_is_not_visible_at_entry_points() -> None:
    rules = [
        Rule("*", "rest:user", "fixed_window", 9, 3600.0, mode="shadow"),
        Rule("*", "rest:tenant", "fixed_window", 5, 3600.0),
    ]
    points = EntryPoints(Limiter(Shared(), virtual_loop.LoopClock(), rules=RuleSet.of(rules)))
    headers = rate_limit_headers(await points.decide("rest", User("acme", "ann")), legacy=True)
    assert "rest:user" not in str(headers) and ("X-RateLimit-Limit", "5") in headers
