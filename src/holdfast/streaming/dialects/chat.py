"""Chat completions: ``POST /v1/chat/completions``. (Pure.)

The provider's chunks go to the client as the bytes that came, unknown fields included.
SDKs take the chunk with ``finish_reason`` as the end and ignore a missing ``[DONE]``,
so the producer makes that chunk, the usage and the end visible together.

An answer that is not streamed merges the chunks: strings are joined, lists of objects
with an ``index`` are merged by it, other lists are appended, objects are merged, and of
anything else the last value stays. Only ``id``, ``type``, ``role`` and ``name`` are not
joined to a repeat of themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from holdfast.streaming import sse
from holdfast.streaming.dialects.contract import DialectRequest
from holdfast.streaming.dialects.openai_errors import error_body, reply_error
from holdfast.streaming.dialects.request_body import (
    invalid,
    read,
    read_model,
    read_output_tokens,
    read_user,
)
from holdfast.streaming.reply import (
    EntryId,
    ReplyDelta,
    ReplyDone,
    ReplyEntry,
    ReplyError,
    ReplyUsage,
)

_OURS = frozenset({"model", "stream", "stream_options"})
"""What goes to the provider from us, not from the request."""
_WITH_USAGE = '{"include_usage":true}'
_REPEATED = frozenset({"id", "type", "role", "name"})


class _Tool(msgspec.Struct):
    type: str


def read_request(fields: Mapping[str, Raw]) -> DialectRequest:
    """InvalidMessage names the field that is wrong."""
    messages = read(fields, "messages", list[Raw], "a list of messages")
    if not messages:
        raise invalid("messages", "must have at least one message")
    if any(memoryview(each)[0] != ord("{") for each in messages):
        raise invalid("messages", "must be a list of messages, each an object")
    if (number := read(fields, "n", int, "a whole number")) not in (None, 1):
        raise invalid("n", f"must be 1, not {number}: ask once for each answer")
    read(fields, "tools", list[_Tool], "a list of tools, each with its type")
    stream = read(fields, "stream", bool, "true or false")
    options = read(fields, "stream_options", dict[str, Any], "an object") or {}
    return DialectRequest(
        model=read_model(fields),
        stream=bool(stream),
        fields={name: bytes(raw) for name, raw in fields.items() if name not in _OURS},
        user=read_user(fields),
        max_output_tokens=read_output_tokens(fields, "max_completion_tokens", "max_tokens"),
        shown=_WITH_USAGE if options.get("include_usage") is True else "",
    )


class ChatEvents:
    """A reply as chunks. ``shown`` is that of the request."""

    __slots__ = ("_last", "_with_usage")  # one for each client that waits

    def __init__(self, shown: str) -> None:
        self._with_usage = shown == _WITH_USAGE
        self._last = b""

    def render(self, entries: Sequence[tuple[EntryId, ReplyEntry]]) -> bytes:
        events = []
        for _, entry in entries:
            if isinstance(entry, ReplyDelta):
                self._last = entry.chunk
                events.append(b"data: %b\n\n" % entry.chunk)
            else:
                events.append(self._event(entry))
        return b"".join(events)

    def queued(self, position: int, eta_seconds: float | None) -> bytes:
        return sse.queued_comment(position, eta_seconds)

    def fail(self, error: ReplyError) -> bytes:
        return sse.event(error_body(reply_error(error)))

    def _event(self, entry: ReplyEntry) -> bytes:
        match entry:
            case ReplyUsage() if self._with_usage:
                return self._usage(entry)
            case ReplyError():
                return self.fail(entry)
            case ReplyDone():
                return sse.DONE
            case _:
                return b""

    def _usage(self, usage: ReplyUsage) -> bytes:
        """The provider's own chunk; one of ours if nobody but us has counted.

        Counts without a chunk that are not estimated were inside a delta.
        """
        if usage.chunk:
            return sse.event(usage.chunk)
        if not usage.estimated:
            return b""
        last = msgspec.json.decode(self._last) if self._last else {}
        chunk = {name: last.get(name) for name in ("id", "object", "created", "model")}
        return sse.event(msgspec.json.encode({**chunk, "choices": [], "usage": counts(usage)}))


def counts(usage: ReplyUsage) -> dict[str, Any]:
    """Usage as chat completions have it; the provider's own object if there is one."""
    if usage.chunk:
        own = msgspec.json.decode(usage.chunk).get("usage")
        if isinstance(own, dict):
            return own
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **({"estimated": True} if usage.estimated else {}),
    }


class ChatAnswer:
    """A reply as one ``chat.completion``."""

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: ReplyUsage | None = None

    def add(self, entries: Sequence[tuple[EntryId, ReplyEntry]]) -> None:
        for _, entry in entries:
            if isinstance(entry, ReplyDelta):
                self._merge(msgspec.json.decode(entry.chunk))
            elif isinstance(entry, ReplyUsage):
                self._usage = entry

    def _merge(self, chunk: dict[str, Any]) -> None:
        choices = chunk.pop("choices", None)
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict) or not isinstance(choice.get("index", 0), int):
                continue
            delta = choice.pop("delta", None)
            index = choice.pop("index", 0)
            merged = self._choices.setdefault(index, {"index": index, "message": {}})
            logprobs = choice.pop("logprobs", None)
            if isinstance(delta, dict):
                _merge(merged["message"], delta)
            if isinstance(logprobs, dict):
                _merge(merged.setdefault("logprobs", {}), logprobs)
            choice.pop("message", None)  # ours is made of the deltas
            merged.update({name: value for name, value in choice.items() if value is not None})
        self._top.update({name: value for name, value in chunk.items() if value is not None})

    def body(self) -> bytes:
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            message = choice["message"] = {
                "role": "assistant", "content": None, "refusal": None, **choice["message"]
            }  # fmt: skip
            calls = message.get("tool_calls")
            for call in calls.plain() if isinstance(calls, _MergedList) else ():
                if isinstance(call, dict):
                    call.pop("index", None)
            choice.setdefault("logprobs", None)
            choice.setdefault("finish_reason", None)
        answer = {**self._top, "object": "chat.completion", "choices": choices}
        if self._usage is not None and (self._usage.chunk or "usage" not in answer):
            answer["usage"] = counts(self._usage)
        return msgspec.json.encode(answer, enc_hook=_plain)


class _Joined:
    """A string that grows: joined once, because += copies it for each token."""

    __slots__ = ("pieces",)

    def __init__(self, first: str) -> None:
        self.pieces = [first]

    def plain(self) -> str:
        return "".join(self.pieces)


class _MergedList:
    """A list that grows: its objects with an ``index`` are merged by it."""

    __slots__ = ("_by_index", "_items")

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._by_index: dict[int, dict[str, Any]] = {}

    def add(self, more: Sequence[Any]) -> None:
        for item in more:
            index = item.get("index") if isinstance(item, dict) else None
            if not isinstance(index, int):
                self._items.append(item)
                continue
            if (merged := self._by_index.get(index)) is None:
                merged = self._by_index[index] = {}
                self._items.append(merged)
            _merge(merged, item)

    def plain(self) -> list[Any]:
        return self._items


def _plain(grown: _Joined | _MergedList) -> str | list[Any]:
    return grown.plain()


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        there = into.get(name)
        if value is None:
            into.setdefault(name, None)
        elif isinstance(value, str):
            if not isinstance(there, _Joined):
                into[name] = _Joined(value)
            elif name not in _REPEATED or there.pieces != [value]:
                there.pieces.append(value)
        elif isinstance(value, dict) and (there is None or isinstance(there, dict)):
            if there is None:
                there = into[name] = {}
            _merge(there, value)
        elif isinstance(value, list) and (there is None or isinstance(there, _MergedList)):
            if there is None:
                there = into[name] = _MergedList()
            there.add(value)
        else:
            into[name] = value
