"""Replies of assistants that grow before they are messages.

A client may ignore ``reply_delta`` and ``reply_state``. One that shows growing text,
and whose driver reports it, must show the right text and end it with the message.
"""

from __future__ import annotations

from typing import Any

from holdfast.verify.conformance.scenarios import require
from holdfast.verify.conformance.subject import Subject
from holdfast.verify.scripted_server import CHAT, ScriptedServer

REPLY = {"chat_id": CHAT, "reply_id": "reply_1"}


async def growing_reply(server: ScriptedServer, subject: Subject) -> None:
    """A reply grows and becomes a message; its last frame comes behind the message."""
    await server.until_live()
    await server.push_frame("reply_state", _state("", 0, 1))
    await server.push_frame("reply_delta", _delta("hel", 1, 3))
    await server.push_frame("reply_delta", _delta("lo", 3, 4))
    await _after(server, subject, "a message meanwhile")
    _require_text(subject, "hello")
    await server.say("hello", sender="bot", key="reply_1")
    await server.until(lambda: len(subject.received) == 2, "the reply's message")
    shown = len(subject.replies)
    await server.push_frame("reply_state", _state("hello", 0, 4, "done"))
    await _after(server, subject, "a later message")
    require(len(subject.replies) == shown, "showed the growing text again behind its message")


async def reply_missed_in_part(server: ScriptedServer, subject: Subject) -> None:
    """A delta that does not continue the text is ignored; a state replaces it."""
    await server.until_live()
    await server.push_frame("reply_state", _state("one ", 0, 2))
    await server.push_frame("reply_delta", _delta("three", 3, 4))
    await _after(server, subject, "a message meanwhile")
    _require_text(subject, "one ")
    await server.push_frame("reply_state", _state("two three", 2, 4))
    await server.push_frame("reply_delta", _delta(" four", 4, 5))
    await _after(server, subject, "another message")
    _require_text(subject, "two three four")
    await server.say("one two three four", sender="bot", key="reply_1")


async def reply_begun_again(server: ScriptedServer, subject: Subject) -> None:
    """A reply begins again in a higher epoch and fails: no message, no text is left."""
    await server.until_live()
    await server.push_frame("reply_state", _state("lost", 0, 2))
    await server.push_frame("reply_state", _state("", 0, 1, epoch=2))
    await server.push_frame("reply_delta", _delta(" late", 2, 3))
    await server.push_frame("reply_delta", _delta("again", 1, 2, epoch=2))
    await _after(server, subject, "a message meanwhile")
    _require_text(subject, "again")
    await server.push_frame("reply_state", _state("again", 0, 2, "failed", epoch=2))
    await _after(server, subject, "another message")
    failed = not subject.replies or subject.replies[-1][2] == "failed"
    require(failed, "still shows the text of a reply that has failed")


async def reply_cut_off(server: ScriptedServer, subject: Subject) -> None:
    """The connection breaks while a reply grows: its message comes with the resume."""
    await server.until_live()
    await server.push_frame("reply_state", _state("hel", 0, 3))
    await _after(server, subject, "a message meanwhile")
    server.cut()
    await server.say("hello", sender="bot", key="reply_1")
    await server.until_live(connections=2)
    await server.push_frame("reply_state", _state("hello", 0, 4, "done"))


def _state(
    text: str, first: int, to: int, state: str = "running", epoch: int = 1
) -> dict[str, Any]:
    return {**_delta(text, first, to, epoch), "sender_id": "bot", "state": state}


def _delta(text: str, first: int, to: int, epoch: int = 1) -> dict[str, Any]:
    return {**REPLY, "epoch": epoch, "from": first, "to": to, "text": text}


async def _after(server: ScriptedServer, subject: Subject, content: str) -> None:
    """Frames are handled in order: what came before a shown message is handled."""
    await server.say(content)
    await server.until(lambda: any(shown == content for _, _, shown in subject.received), content)


def _require_text(subject: Subject, text: str) -> None:
    if subject.replies:
        shown = subject.replies[-1][1]
        require(shown == text, f"shows {shown!r} of the growing reply, not {text!r}")
