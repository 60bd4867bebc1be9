"""Reads a provider's stream: bytes of SSE in, ``ProviderChunk`` out. (Pure.)

The bytes may be cut anywhere. Lines end with LF, CRLF or CR; a BOM at the beginning,
``event:``, ``id:`` and ``retry:`` mean nothing here. A comment is a sign of life. An
event without its blank line at the end of the bytes is dropped, as SSE demands.

What counts in an event:

- ``[DONE]`` ends the stream. What comes behind it is not read. Without any chunk of
  choice 0 before it there is no answer: ``upstream_truncated``.
- ``error`` is a failure inside a stream that had begun: ``upstream_error``.
- Only choice 0 was asked for. A chunk with more choices is cut down to it; a chunk with
  others alone, or without ``choices``, is a sign of life.
- ``usage`` may come before the finish, with it or behind it, or with every chunk. What
  is no usage is taken out of its chunk: clients see what is counted.
- Everything else passes on as it came, known or not. Repeated role chunks are no
  tokens.

What is no SSE, no JSON object, no UTF-8, or longer than ``EVENT_BYTES_MAX`` is
``upstream_garbage``, and so are ``BARE_BYTES_MAX`` bytes without a chunk. A failure is
kept in ``error``, not raised: chunks before it, in the same bytes, still count.

A chunk is judged here and nowhere else (``_check``): all of it is decoded once, so
nothing that reads it later fails on a number out of range or on its nesting.

Most chunks of a stream differ from the one before in their text alone. So the bytes
around the text of a chunk are kept (``_Frame``): of an event within the same bytes only
the text is decoded, because everything else was judged with the chunk before.

``failure_of_status`` judges answers that begin no stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from holdfast.bounds import MIB
from holdfast.streaming.providers.contract import ProviderChunk, ProviderFailed
from holdfast.streaming.reply import ReplyError, ReplyUsage

EVENT_BYTES_MAX = MIB
"""The data of one event."""
BARE_BYTES_MAX = 2 * EVENT_BYTES_MAX
"""What may come between two chunks. A provider that sends nothing but comments, as fast
as they are read, would take the node's processor from everybody."""
NESTING_MAX = 256
"""Objects and lists inside each other. Python reads a thousand levels, less those of
its own calls, which are more for a reader than here."""
SHALLOW_BYTES = 2 * NESTING_MAX
"""A level takes two bytes, so most chunks are too short to be deep."""
TOKENS_MAX = 10**9
"""More than any reply uses: a larger count is none. Sums stay far from 64 bits."""
NOT_SSE = ReplyError("upstream_garbage", "the provider's answer is not SSE")
NO_ANSWER = ReplyError("upstream_truncated", "the provider's stream ended without an answer")
_NO_ROOM = (429, 503, 529)
_OPERATORS_FAULT = (401, 402, 403, 404, 407, 408)
"""Answers about this server's key, bill, model name or speed. The client cannot help
it, and another provider may answer.
"""
_BOM = b"\xef\xbb\xbf"
_ONE_EVENT = b"data: {"
_IGNORED = (b"event", b"id", b"retry")
_ALIVE = ProviderChunk(b"")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TEXT = re.compile(rb'"content": ?"((?:[^"\\]|\\.)*)"')
UNUSED_FRAMES_MAX = 3
"""Frames that fit no later chunk, one after the other: then no more are made, because a
provider may put something new into each chunk."""

_Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]


class _Usage(Struct, gc=False):
    prompt_tokens: _Tokens
    completion_tokens: _Tokens
    total_tokens: _Tokens | None = None


class _Choice(Struct, gc=False):
    index: int = 0
    delta: dict[str, Any] | None = None
    finish_reason: Any = None


class _Chunk(Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_all = msgspec.json.Decoder().decode
_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_choices = msgspec.json.Decoder(list[Raw]).decode


_Frame = tuple[bytes, bytes]
"""The bytes of an event before and behind its text, with the quotes of that."""
_NO_FRAME: _Frame = (b"", b"")


class ProviderStream:
    """One stream. Feed it until ``ended`` or ``error``."""

    def __init__(self) -> None:
        self.ended = False
        """``[DONE]`` has come."""
        self.finished = False
        """A finish_reason has come."""
        self.error: ReplyError | None = None
        self._has_answer = False
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._bare_bytes = 0
        """Since the last chunk that carries something."""
        self._after_cr = False
        self._at_start = True
        self._frame = _NO_FRAME
        self._unused_frames = 0

    def feed(self, data: bytes) -> Sequence[ProviderChunk]:
        """The chunks that are complete now, in order."""
        if self._after_cr and data:
            self._after_cr = False
            data = data.removeprefix(b"\n")
        chunks: list[ProviderChunk] = []
        if not data or self.ended or self.error:
            return chunks
        before, behind = self._frame
        if (  # the chunk before with another text, as nearly every token is
            before
            and data.startswith(before)
            and data.endswith(behind)
            and len(data) <= EVENT_BYTES_MAX
            and not (self._line or self._data)
        ):
            try:
                text = _decode_text(data[len(before) - 1 : 1 - len(behind)])
            except _UNREADABLE:
                text = ""  # judged below
            if text:
                self._unused_frames = self._bare_bytes = 0
                text_bytes = len(text) if text.isascii() else _text_bytes(text)
                return [ProviderChunk(data[6:-2], True, False, None, text_bytes)]
        if (  # one whole event on one line, as nearly every token is: half the work
            data.startswith(_ONE_EVENT)
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n\n")
            and b"\r" not in data
            and len(data) <= EVENT_BYTES_MAX
            and not (self._line or self._data)
        ):
            self._at_start = False
            chunk = self._read_event(data[len(_ONE_EVENT) - 1 : -2])
            chunks.append(chunk)
            if chunk.data:
                self._bare_bytes = 0
                if chunk.content and self._unused_frames < UNUSED_FRAMES_MAX:
                    self._frame = _frame_of(data)
                    self._unused_frames += 1
            elif self.error is None:
                self._count_bare(data, chunks)
            return chunks
        return self._feed_lines(data, chunks)

    def _feed_lines(self, data: bytes, chunks: list[ProviderChunk]) -> Sequence[ProviderChunk]:
        self._after_cr = data.endswith(b"\r")
        lines = data.splitlines()
        rest = b"" if data.endswith((b"\n", b"\r")) else lines.pop()
        if lines and self._line:
            lines[0] = bytes(self._line) + lines[0]
            self._line.clear()
        for line in lines:
            self._read_line(line, chunks)
            if self.ended or self.error:
                return chunks
        self._line += rest
        self._bound(len(self._line))
        self._count_bare(data, chunks)
        return chunks

    def _count_bare(self, data: bytes, chunks: Sequence[ProviderChunk]) -> None:
        for chunk in chunks:
            if chunk.data:
                self._bare_bytes = 0
                return
        self._bare_bytes += len(data)
        if self._bare_bytes > BARE_BYTES_MAX:
            self._fail(f"the provider sent {BARE_BYTES_MAX} bytes without a chunk")

    def _read_line(self, line: bytes, chunks: list[ProviderChunk]) -> None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        if not line:
            if self._data:
                # JSON takes a space where it takes a newline, and a chunk stays a line
                data = b" ".join(self._data)
                self._data.clear()
                self._data_bytes = 0
                chunks.append(self._read_event(data))
            return
        field, _, value = line.partition(b":")
        if field == b"data":
            value = value.removeprefix(b" ")
            self._data.append(value)
            self._data_bytes += len(value)
            self._bound(max(self._data_bytes, len(line)))
        elif not field:
            chunks.append(_ALIVE)
        elif field not in _IGNORED:
            self.error = NOT_SSE

    def _bound(self, length: int) -> None:
        if length > EVENT_BYTES_MAX:
            self._fail(f"an event of the provider is longer than {EVENT_BYTES_MAX} bytes")

    def _fail(self, message: str) -> None:
        self.error = ReplyError("upstream_garbage", message)

    def _read_event(self, data: bytes) -> ProviderChunk:
        """The chunk of one event; a sign of life if it has none or is the end."""
        try:
            chunk = _decode(data)
            if len(data) > SHALLOW_BYTES:
                _check(data)
            else:
                _decode_all(data)
        except _UNREADABLE:
            if data == b"[DONE]":
                self.ended = self._has_answer
                self.error = None if self._has_answer else NO_ANSWER
                return _ALIVE
            if not data.strip():
                return _ALIVE
            self._fail("the provider sent an event that is no chunk")
            return _ALIVE
        if chunk.error:
            self.error = _error_inside(data)
            return _ALIVE
        return self._chunk(chunk, data)

    def _chunk(self, chunk: _Chunk, data: bytes) -> ProviderChunk:
        choices = chunk.choices
        usage = None
        if chunk.usage is not None and (usage := _usage(chunk.usage)) is None:
            data = _without_usage(data)
        if not choices:
            if usage is not None:
                return ProviderChunk(b"", usage=msgspec.structs.replace(usage, chunk=data))
            return _ALIVE if choices is None else ProviderChunk(data)
        first = choices[0]
        if len(choices) > 1 or first.index != 0:
            for place, first in enumerate(choices):
                if first.index == 0:
                    data = _with_choice(data, place)
                    break
            else:
                return ProviderChunk(b"", usage=usage)
        self._has_answer = True
        has_content, text_bytes = False, 0
        if first.delta:
            for name, value in first.delta.items():
                if value and name != "role":
                    has_content = True
                    text_bytes += _text_bytes(value)
        finish = bool(first.finish_reason)
        self.finished = self.finished or finish
        return ProviderChunk(data, has_content, finish, usage, text_bytes)


def _frame_of(event: bytes) -> _Frame:
    """The frame of an event with a chunk that says something; none if what it says is
    more than the text of choice 0.
    """
    if (found := _TEXT.search(event)) is None:
        return _NO_FRAME
    before, behind = event[: found.start(1)], event[found.end(1) :]
    # It is the text of the chunk if that changes with it.
    longer = b"%b?%b" % (event[len(_ONE_EVENT) - 1 : found.end(1)], behind)
    chunk = _decode(longer)
    [choice, *others] = chunk.choices or [_Choice()]
    said = {name: value for name, value in (choice.delta or {}).items() if value and name != "role"}
    is_text_alone = said == {"content": _decode_text(b'"%b"' % found[1]) + "?"}
    if others or choice.finish_reason or chunk.usage is not None:
        return _NO_FRAME
    return (before, behind) if is_text_alone else _NO_FRAME


def _check(data: bytes) -> None:
    """Raises one of ``_UNREADABLE`` if not everybody can read this JSON."""
    whole = _decode_all(data)
    if len(data) > SHALLOW_BYTES and data.count(b"{") + data.count(b"[") > NESTING_MAX:
        level = [whole]
        for _ in range(NESTING_MAX):
            level = [inner for outer in level for inner in _inside(outer)]
        if level:
            raise RecursionError("nested too deep")


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _text_bytes(value: Any) -> int:
    """Of a text, or of the functions that are called."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
    if not isinstance(value, list):
        return 0
    functions = [call.get("function") for call in value if isinstance(call, dict)]
    named = [each for each in functions if isinstance(each, dict)]
    return sum(len(text) for each in named for text in each.values() if isinstance(text, str))


def _usage(given: Any) -> ReplyUsage | None:
    """The counts of a provider; None if they are none."""
    try:
        counts = msgspec.convert(given, _Usage)
    except msgspec.ValidationError:
        return None
    return ReplyUsage(counts.prompt_tokens, counts.completion_tokens)


def _without_usage(data: bytes) -> bytes:
    fields = _decode_fields(data)
    del fields["usage"]
    return msgspec.json.encode(fields)


def _with_choice(data: bytes, place: int) -> bytes:
    """The chunk with only one of its choices."""
    fields = _decode_fields(data)
    choice = _decode_choices(fields["choices"])[place]
    return msgspec.json.encode({**fields, "choices": [choice]})


def failure_of_status(
    status: int, answer: bytes = b"", retry_after_seconds: float | None = None
) -> ProviderFailed:
    """What an answer without a stream means."""
    if status in _NO_ROOM:
        return ProviderFailed(
            ReplyError("upstream_unavailable", f"the provider has no room ({status})", 503),
            capacity=True,
            retry_after_seconds=retry_after_seconds,
        )
    if status >= 500 or status in _OPERATORS_FAULT:
        return ProviderFailed(
            ReplyError("upstream_unavailable", f"the provider answered with status {status}")
        )
    if status >= 400:
        message = f"the provider refused the request ({status})"
        error = ReplyError("upstream_refused", message, status, error_object(answer))
        return ProviderFailed(error, final=True)
    return ProviderFailed(
        ReplyError("upstream_garbage", f"the provider answered with status {status}, not a stream")
    )


def error_inside(answer: bytes) -> ReplyError | None:
    """The failure in an answer that says 200 but is only an error object."""
    try:
        chunk = _decode(answer)
    except _UNREADABLE:
        return None
    return _error_inside(answer) if chunk.error else None


def _error_inside(data: bytes) -> ReplyError:
    message = "the provider reported an error inside its stream"
    return ReplyError("upstream_error", message, body=error_object(data))


def error_object(data: bytes) -> bytes:
    """The error object in a provider's answer, as it came: the value of ``error``, else
    the whole answer; empty if neither is a JSON object. Some only send a text.
    """
    try:
        _check(data)
        fields = _decode_fields(data)
    except _UNREADABLE:
        return b""
    inner = bytes(fields.get("error", Raw()))
    if inner.startswith(b'"'):
        return b'{"message":' + inner + b"}"
    return inner if inner.startswith(b"{") else data.strip()
