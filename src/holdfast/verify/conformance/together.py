"""Frames that arrive in one piece, in each order.

A network may join separate writes: a reply and the pushes behind it arrive in one
segment. A client that handles a reply later than the frame behind it, for example in
the continuation of a promise, compares the push with an old cursor. Here the server
writes the frames in one piece, so that this happens every time and not one time in
three.
"""

from __future__ import annotations

from holdfast.verify.conformance.scenarios import require
from holdfast.verify.conformance.subject import Subject
from holdfast.verify.scripted_server import CHAT, ScriptedServer


async def resumed_then_messages(server: ScriptedServer, subject: Subject) -> None:
    """``resumed`` with a page, and the messages that follow it."""
    await server.until_live()
    server.cut()
    for n in range(3):
        await server.say(f"missed {n}")
    server.hold("resumed", "message")
    await server.until(
        lambda: len(server.connections) == 2 and server.holds("resumed"), "the resume"
    )
    for n in range(2):
        await server.say(f"pushed {n}")
    await server.release("resumed", "message")


async def empty_resumed_then_message(server: ScriptedServer, subject: Subject) -> None:
    """``resumed`` without chats, since none has moved, and the first message after.

    Before ``resumed`` nothing was sent on this connection, so nothing may be acked.
    """
    await server.say("before")
    await server.until(lambda: server.acked == (1, 1), "the ack of the first message")
    server.cut()
    server.hold("resumed", "message")
    await server.until(
        lambda: len(server.connections) == 2 and server.holds("resumed"), "the resume"
    )
    await server.push_frame("heartbeat", {"heads": {}})
    await server.until(lambda: server.here.asked("heartbeat_ack") > 0, "a heartbeat_ack")
    require(not server.here.asked("ack"), "an ack before the resume was answered")
    await server.say("after")
    await server.release("resumed", "message")


async def reset_then_messages(server: ScriptedServer, subject: Subject) -> None:
    """``resumed`` of a new epoch, and messages of that epoch."""
    for n in range(3):
        await server.say(f"old {n}")
    await server.until(lambda: server.acked == (1, 3), "the ack of three messages")
    server.cut()
    server.raise_epoch(["new 0"])
    server.hold("resumed", "message")
    await server.until(
        lambda: len(server.connections) == 2 and server.holds("resumed"), "the resume"
    )
    await server.say("new 1")
    await server.release("resumed", "message")


async def page_then_messages(server: ScriptedServer, subject: Subject) -> None:
    """The page that ends a pull, and the messages behind it."""
    await _skip_three(server)
    server.hold("sync_response", "message")
    await server.push_frame("resync", {"chats": [{"chat_id": CHAT, "head": 3}]})
    await server.until(lambda: server.holds("sync_response"), "a pull")
    for n in range(2):
        await server.say(f"pushed {n}")
    await server.release("sync_response", "message")


async def messages_then_page(server: ScriptedServer, subject: Subject) -> None:
    """Messages beyond the cursor, and behind them a page that has more."""
    server.script.page_limit = 2
    await _skip_three(server)
    server.hold("sync_response", "message")
    await server.push_frame("resync", {"chats": [{"chat_id": CHAT, "head": 3}]})
    await server.until(lambda: server.holds("sync_response"), "a pull")
    await server.say("pushed")
    await server.release("message", "sync_response")


async def ack_then_message(server: ScriptedServer, subject: Subject) -> None:
    """The answer to a send, and the message itself."""
    await _send(server, subject, "message_ack", "message")


async def message_then_ack(server: ScriptedServer, subject: Subject) -> None:
    """The message itself, and the answer to its send: an ack is no delivery."""
    await _send(server, subject, "message", "message_ack")


async def messages_then_resync(server: ScriptedServer, subject: Subject) -> None:
    """Messages, and behind them a resync, since others were left out."""
    await server.until_live()
    server.hold("message", "resync")
    for n in range(2):
        await server.say(f"pushed {n}")
    server.script.skip_pushes = 2
    for n in range(2):
        await server.say(f"skipped {n}")
    await server.push_frame("resync", {"chats": [{"chat_id": CHAT, "head": 4}]})
    await server.release("message", "resync")


async def messages_then_closing(server: ScriptedServer, subject: Subject) -> None:
    """Messages, and behind them the closing frame: what came before it counts."""
    await server.until_live()
    server.hold("message", "connection_closing")
    for n in range(3):
        await server.say(f"pushed {n}")
    await server.announce("rotation", 4004, close=False)
    await server.release("message", "connection_closing")
    first = server.here
    await server.until(
        lambda: len(subject.received) == 3, "the messages that came before the closing"
    )
    await first.socket.close(4004, "rotation")
    await server.until_live(connections=2)
    resume = next(frame for frame in server.here.frames if frame["type"] == "resume")
    shown = resume["payload"]["cursors"].get(CHAT, [0, 0])[1]
    require(
        shown == 3,
        f"came back with the cursor {shown}: the messages before the closing were pulled again",
    )


async def _skip_three(server: ScriptedServer) -> None:
    await server.until_live()
    server.script.skip_pushes = 3
    for n in range(3):
        await server.say(f"skipped {n}")


async def _send(server: ScriptedServer, subject: Subject, *order: str) -> None:
    await server.until_live()
    server.hold("message", "message_ack")
    subject.send("mine", "key-together")
    await server.until(lambda: server.holds("message", "message_ack"), "the send")
    await server.release(*order)
    await server.until(lambda: subject.outcomes.get("key-together") == "sent", "the outcome")
