"""What a scripted provider answers: its settings, and the chunks of an answer. (Pure.)

``scripted`` has the pace and the faults.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Raw, Struct

from holdfast.streaming.providers.contract import ProviderChunk, ProviderRequest
from holdfast.streaming.reply import ReplyUsage

INPUT_CHARACTERS_MAX = 2000
"""How much of the user's text an answer repeats."""
PARTS_MAX = 32
"""How many parts of the user's message are read."""
BYTES_PER_TOKEN = 4
"""What a prompt's length is divided by: there is no tokenizer here."""
_encode = msgspec.json.encode
_decode = msgspec.json.decode

Fault = Literal[
    "none",
    "refuse",
    "rate_limit",
    "overload",
    "no_headers",
    "html",
    "truncate",
    "reset",
    "stall",
    "error",
]


@dataclass(frozen=True, slots=True)
class ScriptSettings:
    """What a scripted provider answers."""

    text: str = "You wrote: {input}"
    """The answer; ``{input}`` stands for the user's last message."""
    tokens: int = 0
    """The length of the answer: the text is cut or repeated. 0: the text once."""
    tokens_per_second: float = 50
    """0: as fast as they are read."""
    first_token_seconds: float = 0
    """How long the first token takes."""
    tool_arguments: str = ""
    """JSON: call the first function of the request's ``tools`` with it, if the last
    message is not a tool's result. Empty: always answer with text.
    """
    usage: bool = True
    """Whether it reports token counts."""
    finish_reason: str = "stop"
    """Why an answer of full length ends."""
    fault: Fault = "none"
    """What goes wrong."""
    fault_after_tokens: int = 0
    """When a stream that has begun fails; 0: before its first token."""
    fault_count: int = 0
    """How many requests fail, from the first one on; 0: all."""
    retry_after_seconds: float = 1
    """What ``rate_limit`` and ``overload`` ask for."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"{name} must not be negative")


class ScriptedAnswer(NamedTuple):
    """The deltas of an answer, as JSON; each is a token."""

    deltas: Sequence[bytes]
    finish_reason: str
    prompt_tokens: int = 0


_Most = Annotated[int, Meta(ge=0)]


class _Function(Struct):
    name: str


class _Tool(Struct):
    function: _Function


class _Part(Struct):
    text: str = ""


class _Message(Struct):
    role: str = ""
    content: Raw = Raw(b"null")

    @property
    def text(self) -> str:
        """Its text, also from a list of parts; only the first of them are read."""
        if bytes(memoryview(self.content)[:1]) != b"[":
            return _decode(self.content, type=str | None) or ""
        parts = _decode(self.content, type=list[Raw])[:PARTS_MAX]
        return " ".join(filter(None, (_decode(part, type=_Part).text for part in parts)))


def compose(script: ScriptSettings, request: ProviderRequest) -> ScriptedAnswer:
    """The answer to a request; msgspec.DecodeError if the request cannot be read."""
    prompt_tokens = len(request.fields.get("messages", b"")) // BYTES_PER_TOKEN
    return _compose(script, request.fields)._replace(prompt_tokens=prompt_tokens)


def _compose(script: ScriptSettings, fields: Mapping[str, bytes]) -> ScriptedAnswer:
    messages = _decode(fields.get("messages", b"[]"), type=list[Raw])
    if script.tool_arguments and _last_role(messages) != "tool":
        tools = _decode(fields.get("tools", b"[]"), type=list[_Tool] | None)
        if tools:
            return _tool_call(tools[0].function.name, script.tool_arguments)
    text = script.text.replace("{input}", _last_user_text(messages)[:INPUT_CHARACTERS_MAX])
    words = re.findall(r"\s*\S+", text)
    count, finish_reason = script.tokens or len(words), script.finish_reason
    for name in ("max_completion_tokens", "max_tokens"):
        most = _decode(fields.get(name, b"null"), type=_Most | None)
        if most is not None and most < count:
            count, finish_reason = most, "length"
    deltas = [b'{"content":%s}' % _encode(word) for word in words]
    return ScriptedAnswer(list(islice(cycle(deltas), count)), finish_reason)


def _last_role(messages: Sequence[Raw]) -> str:
    return _decode(messages[-1], type=_Message).role if messages else ""


def _last_user_text(messages: Sequence[Raw]) -> str:
    read = (_decode(message, type=_Message) for message in reversed(messages))
    return next((message.text for message in read if message.role == "user"), "")


def _tool_call(name: str, arguments: str) -> ScriptedAnswer:
    begin = {
        "index": 0,
        "id": "call_0",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }
    rest = {"index": 0, "function": {"arguments": arguments}}
    return ScriptedAnswer([_encode({"tool_calls": [c]}) for c in (begin, rest)], "tool_calls")


class ChunkShape:
    """Chunks in OpenAI's form."""

    def __init__(self, request: ProviderRequest, created: int) -> None:
        head = {
            "id": f"chatcmpl-{request.reply_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
        }
        self._head = _encode(head)[:-1]

    def chunk(self, delta: bytes, finish_reason: str | None = None) -> bytes:
        return b'%s,"choices":[{"index":0,"delta":%s,"finish_reason":%s}]}' % (
            self._head,
            delta,
            _encode(finish_reason),
        )

    def usage(self, prompt_tokens: int, completion_tokens: int) -> ProviderChunk:
        counts = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        chunk = b'%s,"choices":[],"usage":%s}' % (self._head, _encode(counts))
        return ProviderChunk(b"", usage=ReplyUsage(prompt_tokens, completion_tokens, chunk=chunk))
