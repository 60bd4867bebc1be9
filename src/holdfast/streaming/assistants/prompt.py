"""What the model is asked: instructions, and the chat up to the trigger. (Pure.)

At most the last 50 messages and 32 KiB of them, the trigger always; no events and no
redacted messages. In groups each text names its sender. Messages after the trigger are
left out: a job that runs again asks the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from holdfast.bounds import KIB
from holdfast.message import ChatKind, Message
from holdfast.streaming.settings import AssistantSettings

MESSAGES_MAX = 50
CONTEXT_BYTES_MAX = 32 * KIB

_encode = msgspec.json.Encoder().encode


class PromptMessage(msgspec.Struct, frozen=True):
    """A message as chat completions have it."""

    role: Literal["system", "user", "assistant"]
    content: str


def request_fields(
    assistant: AssistantSettings, messages: Sequence[Message], kind: ChatKind
) -> Mapping[str, bytes]:
    """The fields of the request; ``messages`` ascend, the last is the trigger."""
    return {"messages": _encode(prompt(assistant, messages, kind))}


def prompt(
    assistant: AssistantSettings, messages: Sequence[Message], kind: ChatKind
) -> list[PromptMessage]:
    asked: list[PromptMessage] = []
    room = CONTEXT_BYTES_MAX
    for message in reversed(messages[-MESSAGES_MAX:]):
        if message.kind != "text" or not message.content:
            continue
        shown = _shown(assistant, message, kind)
        room -= len(shown.content.encode())
        if room < 0 and asked:
            break
        asked.append(shown)
    if assistant.instructions:
        asked.append(PromptMessage("system", assistant.instructions))
    return asked[::-1]


def _shown(assistant: AssistantSettings, message: Message, kind: ChatKind) -> PromptMessage:
    if message.sender_id == assistant.user:
        return PromptMessage("assistant", message.content)
    named = kind == "group"
    return PromptMessage(
        "user", f"{message.sender_id}: {message.content}" if named else message.content
    )
