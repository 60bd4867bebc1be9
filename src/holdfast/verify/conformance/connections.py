"""What a client must survive: connections that close, break, hang or are refused."""

from __future__ import annotations

import asyncio
import time

from holdfast.verify.conformance.scenarios import require
from holdfast.verify.conformance.subject import Subject
from holdfast.verify.scripted_server import CHAT, ScriptedServer


async def rotation(server: ScriptedServer, subject: Subject) -> None:
    """A planned close: the client reconnects by itself and misses nothing."""
    await server.say("before")
    await server.until(lambda: len(subject.received) == 1, "the first message")
    await server.announce("rotation", 4004)
    await server.say("between")
    await server.until(lambda: len(server.connections) == 2, "a second connection")
    resumed = (
        next(frame for frame in server.here.frames if frame["type"] == "resume")
        if server.here.frames
        else None
    )
    honest = resumed is None or resumed["payload"]["cursors"].get(CHAT, [1, 1])[0] == server.epoch
    require(honest, "the resume showed a cursor of an epoch that the server never had")


async def shutdown_with_delay(server: ScriptedServer, subject: Subject) -> None:
    """The server names a delay: the client waits that long."""
    await server.until_live()
    left = time.monotonic()
    await server.announce("server_shutdown", 4000, delay_ms=700)
    await server.until(lambda: len(server.connections) == 2, "a second connection")
    waited = server.here.opened_at - left
    require(0.65 <= waited <= 3.0, f"waited {waited:.2f} s instead of 0.7 s")


async def slow_closing(server: ScriptedServer, subject: Subject) -> None:
    """Warned as slow, then closed with 4002: the client reconnects, misses nothing."""
    await server.until_live()
    await server.push_frame(
        "error",
        {"code": "SLOW_CONSUMER", "message": "slow", "retryable": True, "grace_period_seconds": 5},
    )
    server.script.skip_pushes = 5
    for n in range(5):
        await server.say(f"theirs {n}")
    await server.announce("slow_consumer", 4002)
    await server.until(lambda: len(server.connections) == 2, "a second connection")


async def announced_and_not_closed(server: ScriptedServer, subject: Subject) -> None:
    """The server announces its closing and hangs: the client leaves by itself."""
    await server.until_live()
    await server.announce("server_shutdown", 4000, close=False)
    server.script.silent = True
    await server.until(lambda: server.here.closed_at is not None, "the client to leave")
    server.script.silent = False
    await server.say("after")


async def token_expiry(server: ScriptedServer, subject: Subject) -> None:
    """Closed because the token expired: the client reconnects with another one."""
    await server.until_live()
    await server.announce("token_expired", 4008)
    await server.until(lambda: len(server.connections) == 2, "a second connection")
    require(
        server.connections[0].token != server.connections[1].token,
        "came back with the token that had expired",
    )
    devices = {connection.device_id for connection in server.connections}
    require(
        len(devices) == 1 and "" not in devices,
        f"a device keeps its id over connections; seen: {devices}",
    )


async def token_refused_at_connect(server: ScriptedServer, subject: Subject) -> None:
    """401 at the handshake: the client gets a new token; a second 401 stops it."""
    await server.until_live()
    server.script.refuse_handshakes = [(401, {})]
    server.cut()
    await server.say("missed")
    await server.until_live(connections=2)
    require(
        server.connections[0].token != server.connections[1].token,
        "came back with the token that was refused",
    )
    await server.until(lambda: server.acked == (1, 1), "the ack of the missed message")
    server.script.refuse_handshakes = [(401, {}), (401, {}), (401, {})]
    server.cut()
    await server.until(
        lambda: subject.stopped is not None, "the client to stop: two tokens were refused"
    )


async def bad_handshakes(server: ScriptedServer, subject: Subject) -> None:
    """500, 503 and 429 at the handshake: the client retries, after Retry-After."""
    await server.until_live()
    server.script.refuse_handshakes = [(500, {}), (503, {}), (429, {"Retry-After": "1"})]
    server.cut()
    await server.say("missed")
    await server.until(lambda: len(server.connections) == 2, "a second connection")
    refused, accepted = server.handshakes[-2:]
    require(
        accepted - refused >= 0.95, f"came back {accepted - refused:.2f} s after Retry-After: 1"
    )


async def unanswered_handshake(server: ScriptedServer, subject: Subject) -> None:
    """A handshake is never answered: the client gives up in time and tries another."""
    await server.until_live()
    server.script.hang_handshakes = 1
    server.cut()
    await server.say("missed")
    await server.until_live(connections=2)
    require(len(server.handshakes) >= 3, "the hanging handshake was answered after all")


async def blackhole(server: ScriptedServer, subject: Subject) -> None:
    """The server accepts and then is silent: the client tries another connection."""
    await server.until_live()
    server.script.silent = True
    subject.send("into the dark", "key-dark")
    silent = len(server.connections)
    await server.until(
        lambda: server.connections[silent - 1].closed_at is not None, "the client to give up"
    )
    server.script.silent = False
    if server.here.closed_at is None and not server.here.live:
        server.cut()
    await server.until(lambda: subject.outcomes.get("key-dark") == "sent", "the send")


async def replaced(server: ScriptedServer, subject: Subject) -> None:
    """4500 and above: the client stops, says why, and does not reconnect."""
    await server.until_live()
    await server.announce("duplicate_connection", 4500)
    await server.until(lambda: subject.stopped is not None, "the client to stop")
    count = len(server.handshakes)
    await asyncio.sleep(0.5)  # the absence of a reconnect is what is to be seen
    require(len(server.handshakes) == count, "came back after a close code that says not to")


async def codes_to_return_from(server: ScriptedServer, subject: Subject) -> None:
    """Below 4500 the client reconnects after every close, announced or not."""
    for number, code in enumerate((1001, 1011, 4001, 4003, 4005, 4006, 4007, 4499)):
        await server.until_live(connections=number + 1)
        await server.say(f"before {code}")
        await server.here.socket.close(code, "")
    await server.until(lambda: server.here.live, "the last return")
    require(subject.stopped is None, f"stopped: {subject.stopped}")


async def codes_to_stop_at(server: ScriptedServer, subject: Subject) -> None:
    """From 4500 on it never does, also for unknown codes; a restart tries again."""
    for number, code in enumerate((4500, 4501, 4502, 4999)):
        await server.until_live(connections=number + 1)
        await server.here.socket.close(code, "")
        await server.until(lambda: subject.stopped is not None, f"the client to stop at {code}")
        await subject.restart(hard=False)
