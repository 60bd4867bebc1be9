"""Responses: ``/v1/responses``, as events and as an object. (Pure.)

A reply is rendered from its first entry on, always: an event's ``sequence_number`` is
the number of events before it, so any node counts the same, and a reader that resumes
with ``starting_after`` is shown only the later ones.

A message opens with its first text, a function call with its first piece. Nothing
closes before the end of the reply, because providers may mix the pieces of several
calls. Then every open item closes in order, and the response ends.

A failure is ``response.failed`` followed by ``data: {"error": …}`` without a name.
Either alone is a silent end in some SDK.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.streaming import sse
from holdfast.streaming.dialects.chat import counts
from holdfast.streaming.dialects.openai_errors import error_body, reply_error
from holdfast.streaming.dialects.responses_request import ShownRequest
from holdfast.streaming.reply import (
    EntryId,
    ReplyBegin,
    ReplyDelta,
    ReplyDone,
    ReplyEntry,
    ReplyError,
    ReplyUsage,
)

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""finish_reason → why a response is incomplete."""
_encode = msgspec.json.encode
_shown = msgspec.json.Decoder(ShownRequest)


class _Content:
    """A part of a message that grows: text or a refusal."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind, self.index = kind, index
        self.pieces: list[str] = []
        self.logprobs: list[Any] = []

    def part(self, text: str | None = None) -> dict[str, Any]:
        text = "".join(self.pieces) if text is None else text
        if self.kind == "refusal":
            return {"type": "refusal", "refusal": text}
        logprobs = self.logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class _Message:
    def __init__(self, item_id: str, index: int) -> None:
        self.item_id, self.index = item_id, index
        self.contents: dict[str, _Content] = {}

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self.item_id, "type": "message", "role": "assistant", "status": status,
            "content": [content.part() for content in self.contents.values()],
        }  # fmt: skip


class _FunctionCall:
    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        self.item_id, self.index = item_id, index
        self.call_id, self.name = call_id, name
        self.pieces: list[str] = []

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self.item_id, "type": "function_call", "status": status, "call_id": self.call_id,
            "name": self.name, "arguments": "".join(self.pieces),
        }  # fmt: skip


class ResponseState:
    """A response as far as its entries go."""

    def __init__(self, reply_id: str) -> None:
        self.reply_id = reply_id
        self.items: list[_Message | _FunctionCall] = []
        self.begin: ReplyBegin | None = None
        self.usage: ReplyUsage | None = None
        self.finish_reason = ""
        self.end: ReplyDone | ReplyError | None = None
        self._message: _Message | None = None
        self._calls: dict[int, _FunctionCall] = {}
        self._request = ShownRequest()

    def on_begin(self, begin: ReplyBegin) -> None:
        self.begin = begin
        if begin.request:
            self._request = _shown.decode(begin.request)

    def message(self) -> tuple[_Message, bool]:
        """The message, and whether it is new."""
        if self._message is not None:
            return self._message, False
        self._message = made = _Message(f"msg_{self.reply_id}", len(self.items))
        self.items.append(made)
        return made, True

    def call(self, index: int, call_id: str, name: str) -> tuple[_FunctionCall, bool]:
        """The function call of a provider's index, and whether it is new."""
        if (there := self._calls.get(index)) is not None:
            there.name = there.name or name
            return there, False
        made = _FunctionCall(
            f"fc_{self.reply_id}_{index}", len(self.items), call_id or f"call_{index}", name
        )
        self._calls[index] = made
        self.items.append(made)
        return made, True

    @property
    def status(self) -> str:
        match self.end:
            case None:
                return "in_progress"
            case ReplyError(code="cancelled"):
                return "cancelled"
            case ReplyError():
                return "failed"
            case _ if self.finish_reason in _INCOMPLETE:
                return "incomplete"
            case _:
                return "completed"

    @property
    def item_status(self) -> str:
        return "completed" if self.status == "completed" else "incomplete"

    def response(self, *, status: str | None = None) -> dict[str, Any]:
        """The object that clients know as a Response; ``status`` where it is known
        better than from the entries."""
        begin, request, status = self.begin, self._request, status or self.status
        ended = self.end is not None
        error = self.end if isinstance(self.end, ReplyError) else None
        reason = _INCOMPLETE.get(self.finish_reason) if status == "incomplete" else None
        return {
            "id": self.reply_id,
            "object": "response",
            "created_at": int(begin.created_at) if begin else 0,
            "status": status,
            "background": request.background,
            "error": None if error is None else {"code": error.code, "message": error.message},
            "incomplete_details": None if reason is None else {"reason": reason},
            "instructions": None,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": begin.model if begin else "",
            "output": [
                item.item(self.item_status if ended else "in_progress") for item in self.items
            ],
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": request.store,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice,
            "tools": [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None if self.usage is None else _usage(self.usage),
            "user": request.user,
        }


def _usage(usage: ReplyUsage) -> dict[str, Any]:
    known = counts(usage)

    def detail(group: str, name: str) -> int:
        found = known.get(group)
        count = found.get(name) if isinstance(found, dict) else None
        return count if isinstance(count, int) and count > 0 else 0

    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": detail("prompt_tokens_details", "cached_tokens")},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": detail("completion_tokens_details", "reasoning_tokens")
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseEvents:
    """A reply as the events of a response, those after ``starting_after`` only."""

    def __init__(self, reply_id: str, starting_after: int = -1) -> None:
        self.state = ResponseState(reply_id)
        self.next_number = 0
        self._starting_after = starting_after
        self._out: list[bytes] = []

    def render(self, entries: Sequence[tuple[EntryId, ReplyEntry]]) -> bytes:
        for _, entry in entries:
            match entry:
                case ReplyDelta(chunk=chunk):
                    self._chunk(msgspec.json.decode(chunk))
                case ReplyBegin():
                    self.state.on_begin(entry)
                    self._response("created", "in_progress")
                    self._response("in_progress", "in_progress")
                case ReplyUsage():
                    self.state.usage = entry
                case ReplyDone():
                    self.state.end = entry
                    self._close_items()
                    self._response(self.state.status)
                case ReplyError():
                    self._fail(entry)
        return self._taken()

    @property
    def ended_too_early(self) -> bool:
        """Whether the response ended before the event that the reader has last."""
        return self.state.end is not None and self.next_number <= self._starting_after

    def queued(self, position: int, eta_seconds: float | None) -> bytes:
        return sse.queued_comment(position, eta_seconds)

    def fail(self, error: ReplyError) -> bytes:
        self._fail(error)
        return self._taken()

    def _taken(self) -> bytes:
        out, self._out = b"".join(self._out), []
        return out

    def _event(self, kind: str, /, **data: Any) -> None:
        number = self.next_number
        self.next_number += 1
        if number > self._starting_after:
            encoded = _encode({"type": kind, "sequence_number": number, **data})
            self._out.append(sse.event(encoded, kind))

    def _response(self, end: str, status: str | None = None) -> None:
        self._event(f"response.{end}", response=self.state.response(status=status))

    def _fail(self, error: ReplyError) -> None:
        self.state.end = error
        self._response("failed")
        self._out.append(sse.event(error_body(reply_error(error))))

    def _chunk(self, chunk: dict[str, Any]) -> None:
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return
        if isinstance(reason := choice.get("finish_reason"), str):
            self.state.finish_reason = reason
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            return
        if isinstance(text := delta.get("content"), str) and text:
            logprobs = choice.get("logprobs")
            found = logprobs.get("content") if isinstance(logprobs, dict) else None
            self._text("output_text", text, found if isinstance(found, list) else [])
        if isinstance(text := delta.get("refusal"), str) and text:
            self._text("refusal", text, [])
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                self._call(call)

    def _text(self, kind: str, text: str, logprobs: list[Any]) -> None:
        message, new = self.state.message()
        if new:
            item = message.item("in_progress")
            self._event("response.output_item.added", output_index=message.index, item=item)
        content = message.contents.get(kind)
        if content is None:
            content = message.contents[kind] = _Content(kind, len(message.contents))
            self._part("added", message, content, content.part(""))
        content.pieces.append(text)
        content.logprobs += logprobs
        more = {"logprobs": logprobs} if kind == "output_text" else {}
        self._event(
            f"response.{kind}.delta",
            item_id=message.item_id,
            output_index=message.index,
            content_index=content.index,
            delta=text,
            **more,
        )

    def _part(self, what: str, message: _Message, content: _Content, part: dict[str, Any]) -> None:
        self._event(
            f"response.content_part.{what}",
            item_id=message.item_id,
            output_index=message.index,
            content_index=content.index,
            part=part,
        )

    def _call(self, given: dict[str, Any]) -> None:
        function, index = given.get("function"), given.get("index", 0)
        function = function if isinstance(function, dict) else {}
        call, new = self.state.call(
            index if isinstance(index, int) else 0,
            _text_of(given.get("id")),
            _text_of(function.get("name")),
        )
        if new:
            item = call.item("in_progress")
            self._event("response.output_item.added", output_index=call.index, item=item)
        if piece := _text_of(function.get("arguments")):
            call.pieces.append(piece)
            self._event(
                "response.function_call_arguments.delta",
                item_id=call.item_id,
                output_index=call.index,
                delta=piece,
            )

    def _close_items(self) -> None:
        for item in self.state.items:
            if isinstance(item, _Message):
                for content in item.contents.values():
                    self._close_content(item, content)
            else:
                self._event(
                    "response.function_call_arguments.done",
                    item_id=item.item_id,
                    output_index=item.index,
                    name=item.name,
                    arguments="".join(item.pieces),
                )
            done = item.item(self.state.item_status)
            self._event("response.output_item.done", output_index=item.index, item=done)

    def _close_content(self, message: _Message, content: _Content) -> None:
        text = "".join(content.pieces)
        known = {"text": text, "logprobs": content.logprobs}
        self._event(
            f"response.{content.kind}.done",
            item_id=message.item_id,
            output_index=message.index,
            content_index=content.index,
            **({"refusal": text} if content.kind == "refusal" else known),
        )
        self._part("done", message, content, content.part())


def _text_of(value: object) -> str:
    return value if isinstance(value, str) else ""


class ResponseAnswer:
    """A reply as one Response, for a request that is not streamed and for a poll."""

    def __init__(self, reply_id: str) -> None:
        self._events = ResponseEvents(reply_id, starting_after=2**63)

    def add(self, entries: Sequence[tuple[EntryId, ReplyEntry]]) -> None:
        self._events.render(entries)

    def body(self, status: str | None = None) -> bytes:
        """``status``: where it is known better than from the entries (``queued``)."""
        return _encode(self._events.state.response(status=status))
