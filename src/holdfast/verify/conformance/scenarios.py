"""What a client must survive: lost, repeated, late and refused frames.

A scenario is a coroutine over a scripted server and the client. At its end the same
must hold for all (``verify``). docs/guides/client-conformance.md describes them;
``holdfast conformance --list`` prints their docstrings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from holdfast.verify.conformance.subject import Subject
from holdfast.verify.scripted_server import CHAT, NOT_A_MEMBER, USER, ScriptedServer

Scenario = Callable[[ScriptedServer, Subject], Awaitable[None]]


def require(kept: bool, otherwise: str) -> None:
    """Raise AssertionError unless the client does what the protocol requires."""
    if not kept:
        raise AssertionError(otherwise)


async def verify(server: ScriptedServer, subject: Subject) -> None:
    """The subject has exactly the server's messages, in order, once, and acked them.

    Only messages of the newest epoch count: older ones belong to a void numbering.
    """
    want = [(message["sequence"], message["content"]) for message in server.messages]

    def have() -> list[tuple[int, str]]:
        newest = max((epoch for epoch, _, _ in subject.received), default=0)
        return [
            (sequence, content) for epoch, sequence, content in subject.received if epoch == newest
        ]

    try:
        await server.until(lambda: have() == want, "every message")
    except AssertionError:
        raise AssertionError(f"the client shows {subject.received}; the chat has {want}") from None
    await server.until(
        lambda: server.acked >= (server.epoch, len(want)) or not want, "the ack of everything"
    )
    require(have() == want, "something was shown again after the end")
    require(not server.violations, "; ".join(server.violations))


async def in_order(server: ScriptedServer, subject: Subject) -> None:
    """Messages from both sides arrive in order, once."""
    await server.until_live()
    for n in range(5):
        await server.say(f"theirs {n}")
        subject.send(f"mine {n}", f"key-{n}")
    await server.until(lambda: len(server.messages) == 10, "ten messages")
    await server.until(lambda: len(subject.outcomes) == 5, "five outcomes")
    mine = [message["content"] for message in server.messages if message["sender_id"] == USER]
    require(mine == [f"mine {n}" for n in range(5)], "a chat's sends must keep their order")


async def drop_before_store(server: ScriptedServer, subject: Subject) -> None:
    """The connection dies before a send is stored: it is sent again, under its key."""
    server.script.drop_before_store = 2
    for n in range(4):
        subject.send(f"mine {n}", f"key-{n}")
    await server.until(lambda: len(subject.outcomes) == 4, "four outcomes")
    mine = [message["content"] for message in server.messages]
    require(
        mine == [f"mine {n}" for n in range(4)], f"the chat has {mine}: sends must keep their order"
    )


async def drop_after_store(server: ScriptedServer, subject: Subject) -> None:
    """The ack is lost: the retry gets the same reply, and nothing is stored twice."""
    server.script.drop_after_store = 1
    subject.send("mine", "key-lost-ack")
    await server.until(lambda: subject.outcomes.get("key-lost-ack") == "sent", "the second ack")
    require(
        len(server.messages) == 1,
        "the retry came under another client_message_id, and was stored twice",
    )


async def duplicate_pushes(server: ScriptedServer, subject: Subject) -> None:
    """Every push comes twice and is shown once."""
    server.script.push_twice = True
    await server.until_live()
    for n in range(5):
        await server.say(f"theirs {n}")


async def gap(server: ScriptedServer, subject: Subject) -> None:
    """A push is missing: the client pulls it, and shows nothing out of order."""
    await server.until_live()
    await server.say("first")
    server.script.skip_pushes = 2
    for n in range(4):
        await server.say(f"theirs {n}")


async def heads(server: ScriptedServer, subject: Subject) -> None:
    """The last push is missing and nothing follows: the heartbeat's heads show it."""
    await server.until_live()
    server.script.skip_pushes = 1
    await server.say("unheard")
    await server.push_frame("heartbeat", {"heads": {CHAT: [server.epoch, 1]}})
    await server.until(
        lambda: any(f["type"] == "heartbeat_ack" for f in server.here.frames), "a heartbeat_ack"
    )


async def resync(server: ScriptedServer, subject: Subject) -> None:
    """The server says that it left messages out: the client pulls them, in pages."""
    server.script.page_limit = 3
    await server.until_live()
    server.script.skip_pushes = 8
    for n in range(8):
        await server.say(f"theirs {n}")
    await server.push_frame("resync", {"chats": [{"chat_id": CHAT, "head": 8}]})


async def slow_link(server: ScriptedServer, subject: Subject) -> None:
    """A page takes longer than a reply may: the client counts from the last bytes."""
    await server.until_live()
    server.script.heartbeat_ms, server.script.page_seconds = 1_000, 1.5
    server.cut()
    await server.until(
        lambda: len(server.connections) == 2 and server.here.live,
        "a connection with those heartbeats",
    )
    server.script.skip_pushes = 3
    for n in range(3):
        await server.say(f"theirs {n} " + "x" * 500)
    await server.push_frame("resync", {"chats": [{"chat_id": CHAT, "head": 3}]})
    await server.until(lambda: server.acked == (server.epoch, 3), "the ack of the page")
    require(len(server.connections) == 2, "nothing was wrong with the connection")


async def reset_of_one_device(server: ScriptedServer, subject: Subject) -> None:
    """The server lost messages: after ``reset`` in the same epoch, start at 0."""
    for n in range(5):
        await server.say(f"old {n}")
    await server.until(lambda: server.acked == (1, 5), "the ack of five messages")
    await server.lose(2)
    server.cut()
    await server.until_live(connections=2)
    await server.say("new 3")


async def reset(server: ScriptedServer, subject: Subject) -> None:
    """The chat was renumbered: the client drops its copy and starts at 0."""
    for n in range(3):
        await server.say(f"old {n}")
    await server.until(lambda: len(subject.received) == 3, "the old messages")
    await server.renumber(["new 0", "new 1"])


async def refusals(server: ScriptedServer, subject: Subject) -> None:
    """A retryable refusal is retried, in order; a final one is reported."""
    await server.until_live()
    server.script.send_errors = [
        {"code": "RATE_LIMITED", "message": "slow down", "retryable": True, "outcome": "rejected",
         "retry_after_seconds": 0.2},
        {"code": "SERVICE_UNAVAILABLE", "message": "who knows", "retryable": True,
         "outcome": "unknown"},
        {"code": "INVALID_MESSAGE", "message": "no", "retryable": False, "outcome": "rejected"},
    ]  # fmt: skip
    for n in range(3):
        subject.send(f"mine {n}", f"key-{n}")
    await server.until(lambda: len(subject.outcomes) == 3, "three outcomes")
    expected = {"key-0": "INVALID_MESSAGE", "key-1": "sent", "key-2": "sent"}
    require(subject.outcomes == expected, f"reported {subject.outcomes}, expected {expected}")
    mine = [message["content"] for message in server.messages]
    require(mine == ["mine 1", "mine 2"], f"the chat has {mine}")


async def refused_without_a_delay(server: ScriptedServer, subject: Subject) -> None:
    """Retryable refusals without a delay: the client waits as for a reconnect."""
    await server.until_live()
    busy = {
        "code": "SERVER_BUSY",
        "message": "a queue is full",
        "retryable": True,
        "outcome": "rejected",
    }
    server.script.send_errors = [busy] * 4
    server.script.pull_errors = [
        {"code": "SERVICE_UNAVAILABLE", "message": "later", "retryable": True}
    ] * 2
    server.script.skip_pushes = 1
    await server.say("unheard")
    await server.push_frame("resync", {"chats": [{"chat_id": CHAT, "head": 1}]})
    subject.send("mine", "key-busy")
    await asyncio.sleep(0.5)  # the absence of a flood is what is to be seen
    asked = len(server.here.frames)
    require(asked <= 100, f"{asked} frames in half a second")
    await server.until(lambda: subject.outcomes.get("key-busy") == "sent", "the send")


async def other_refusals(server: ScriptedServer, subject: Subject) -> None:
    """A final refusal ends a send, whatever its code; a pull is tried again later."""
    await server.until_live()
    defect = {"code": "INTERNAL_ERROR", "message": "a defect", "retryable": False}
    server.script.pull_errors = [defect]
    server.script.send_errors = [
        {**defect, "outcome": "unknown"},
        {
            "code": "SOMETHING_NEW",
            "message": "of a newer server",
            "retryable": False,
            "outcome": "rejected",
        },
    ]
    server.script.skip_pushes = 1
    await server.say("unheard")
    await server.push_frame("resync", {"chats": [{"chat_id": CHAT, "head": 1}]})
    for n in range(3):
        subject.send(f"mine {n}", f"key-{n}")
    await server.until(lambda: len(subject.outcomes) == 3, "three outcomes")
    sent = [key for key, outcome in subject.outcomes.items() if outcome == "sent"]
    require(sent == ["key-2"], f"reported {subject.outcomes}; only key-2 was not refused")
    require(len(server.connections) == 1, "a refusal is no reason to reconnect")


async def doubted_membership(server: ScriptedServer, subject: Subject) -> None:
    """NOT_A_MEMBER names a chat in ``details``: the client asks, and is a member."""
    await server.say("before")
    await server.until(lambda: server.acked == (1, 1), "the ack of the first message")
    asked = server.here.asked("sync_request")
    await server.push_frame("error", NOT_A_MEMBER)
    await server.until(lambda: server.here.asked("sync_request") > asked, "a pull")
    await server.say("after")
    await server.until(lambda: len(subject.received) == 2, "the second message")
    require(not subject.gone, "a pull was answered: the chat is not gone")


async def unknown_and_missing(server: ScriptedServer, subject: Subject) -> None:
    """Unknown frames and fields are ignored; optional fields may be missing or null."""
    await server.until_live()
    await server.push_frame("announcement", {"text": "of a newer server"})
    await server.push_frame("heartbeat", {"heads": {}, "mood": "fine"})
    await server.push_frame(
        "error", {"code": "SOMETHING_NEW", "message": "a warning", "retryable": True}
    )
    event = server.append_event({"event": "chat_renamed", "name": "lobby"})
    await server.push_frame("message", {**event, "importance": 7})
    await server.until(lambda: len(subject.received) == 1, "the event")
    require(len(server.connections) == 1, "what is not known is no reason to reconnect")


async def pushes_during_a_pull(server: ScriptedServer, subject: Subject) -> None:
    """Messages are pushed while a page is on its way: order and completeness stay."""
    server.script.page_limit = 2
    await server.until_live()
    server.script.skip_pushes = 4
    for n in range(4):
        await server.say(f"skipped {n}")
    server.hold("sync_response")
    await server.push_frame("resync", {"chats": [{"chat_id": CHAT, "head": 4}]})
    await server.until(lambda: server.holds("sync_response"), "a pull")
    for n in range(2):
        await server.say(f"pushed {n}")
    await server.release("sync_response")


async def killed_client(server: ScriptedServer, subject: Subject) -> None:
    """The client is killed: after its restart nothing is missing and nothing twice."""
    await server.say("before")
    await server.until(lambda: server.acked == (1, 1), "the ack of the first message")
    server.script.drop_after_store = 1
    subject.send("mine", "key-killed")
    await server.until(lambda: "key-killed" in server.keys, "the send")
    await subject.restart(hard=True)
    await server.say("after")
    await server.until(lambda: len(subject.received) >= 3, "three messages")


async def resume_refused_for_now(server: ScriptedServer, subject: Subject) -> None:
    """A resume is refused for now: it is repeated later, on the same connection."""
    await server.until_live()
    busy = {
        "code": "SERVER_BUSY",
        "message": "too many resumes",
        "retryable": True,
        "retry_after_seconds": 0.3,
    }
    server.script.resume_errors = [busy, busy]
    server.cut()
    await server.say("missed")
    await server.until(lambda: len(server.connections) > 1 and server.here.live, "the resume")
    require(len(server.connections) == 2, "a refused resume is no reason to reconnect")
    require(
        time.monotonic() - server.here.opened_at >= 0.55,
        "repeated it before its retry_after_seconds",
    )


async def resume_refused_for_good(server: ScriptedServer, subject: Subject) -> None:
    """A resume is refused for good: the client pulls each chat it knows."""
    await server.say("before")
    await server.until(lambda: len(subject.received) == 1, "the first message")
    server.script.resume_errors = [
        {"code": "INTERNAL_ERROR", "message": "a defect", "retryable": False}
    ]
    server.cut()
    await server.say("missed")
    await server.until(lambda: len(subject.received) == 2, "the missed message")
    require(len(server.connections) == 2, "a refused resume is no reason to reconnect")


async def refused_ack(server: ScriptedServer, subject: Subject) -> None:
    """An ack is refused, without a request_id: it is sent again, later."""
    await server.until_live()
    server.script.ack_errors = [
        {
            "code": "RATE_LIMITED",
            "message": "slow down",
            "retryable": True,
            "retry_after_seconds": 0.2,
        }
    ]
    await server.say("once")
    await server.until(lambda: not server.script.ack_errors, "the first ack")


async def removed(server: ScriptedServer, subject: Subject) -> None:
    """The user is removed while connected: the client asks and reports it."""
    await server.say("before")
    await server.until(lambda: server.acked == (1, 1), "the ack of the first message")
    server.is_member = False
    await server.say("bob removed alice")
    await server.until(lambda: subject.gone, "the client to report that the chat is gone")
    shown = [content for _, _, content in subject.received]
    require(shown == ["before", "bob removed alice"], f"showed {shown}")
