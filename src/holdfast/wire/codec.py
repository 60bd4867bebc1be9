"""Bytes to frames and back, for both sides of the protocol. (Pure.)

Decoding goes straight into typed structs, so hostile JSON cannot grow into large
objects: deep nesting, lone surrogates, bad UTF-8 and wrong types all raise
``InvalidMessage``. The server decodes strictly. A client ignores unknown types and
fields, because a newer server may send more than it knows.

``encode_frame`` returns a whole WebSocket text frame. A server's frames are not masked,
so the same bytes serve every connection. An ``EncodedRun`` uses that: consecutive
messages of one chat, encoded once for all connections that get them. This makes fanout
cheap.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import lru_cache

import msgspec

from holdfast.errors import HoldfastError, InvalidMessage
from holdfast.message import Message
from holdfast.wire.frames import SERVER_PAYLOADS, AnyClientFrame, Error, Sendable

SIZES_REMEMBERED = 1_024
"""Frame sizes whose headers are cached; most frames have one of these."""

_client_frame: msgspec.json.Decoder[AnyClientFrame] = msgspec.json.Decoder(AnyClientFrame)
_encoder = msgspec.json.Encoder()
_openings: dict[type[Sendable], bytes] = {
    payload: b'{"type":"%b","payload":' % kind.encode() for kind, payload in SERVER_PAYLOADS.items()
}


LONE_SURROGATE = (
    "holds one half of a surrogate pair (such as \\ud83d alone): text must be valid Unicode; "
    "escape both halves, or send the character as UTF-8"
)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_FIRST_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_ESCAPE_BYTES = 6
_STOPPED_IN_ESCAPE = re.compile(r"(?:surrogate pair|hex escape) \(byte (\d+)\)$")


class _Label(msgspec.Struct):
    request_id: str | None = None


_label = msgspec.json.Decoder(_Label)
_BAD_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def decode_client_frame(data: bytes | memoryview) -> AnyClientFrame:
    """The frame in ``data``; InvalidMessage says what is wrong with it."""
    try:
        return _client_frame.decode(data)
    except RecursionError:
        raise InvalidMessage("the frame is nested too deeply") from None
    except UnicodeDecodeError:
        raise InvalidMessage("the frame is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        if has_lone_surrogate(error, bytes(data)):
            raise InvalidMessage(f"the frame {LONE_SURROGATE}") from None
        raise InvalidMessage(f"the frame is malformed: {error}") from None


def has_lone_surrogate(error: msgspec.DecodeError, data: bytes) -> bool:
    """Whether half a surrogate pair is why ``data`` could not be decoded.

    msgspec's own message does not say so. ``data`` may be megabytes, so only the bytes
    where it stopped are examined: those before the reported offset, or the end of the
    data if it was too short for another escape.
    """
    reason = str(error)
    if stopped := _STOPPED_IN_ESCAPE.search(reason):
        end = int(stopped[1])
        return _SURROGATE.fullmatch(data, max(end - _ESCAPE_BYTES, 0), end) is not None
    truncated = reason == "Input data was truncated"
    return truncated and _FIRST_HALF.search(data, max(len(data) - 2 * _ESCAPE_BYTES, 0)) is not None


def request_id_of(data: bytes | memoryview) -> str | None:
    """The request_id of a frame that could not be decoded, for its error."""
    try:
        return _label.decode(data).request_id
    except _BAD_JSON:
        return None


def encode_payload(payload: Sendable, request_id: str | None = None) -> bytes:
    """A server frame as JSON."""
    opening = _openings[type(payload)]
    if request_id is None:
        return opening + _encoder.encode(payload) + b"}"
    return b"".join(
        (opening, _encoder.encode(payload), b',"request_id":', _encoder.encode(request_id), b"}")
    )


def encode_frame(payload: Sendable, request_id: str | None = None) -> bytes:
    """A server frame as a whole WebSocket text frame."""
    if request_id is not None:
        data = encode_payload(payload, request_id)
        return text_header(len(data)) + data
    opening, body = _openings[type(payload)], _encoder.encode(payload)
    return b"".join((text_header(len(opening) + len(body) + 1), opening, body, b"}"))


@lru_cache(SIZES_REMEMBERED)
def text_header(size: int) -> bytes:
    """The header of an unmasked, final text frame (RFC 6455 section 5.2)."""
    if size < 126:
        return bytes((0x81, size))
    if size < 65536:
        return b"\x81\x7e" + size.to_bytes(2, "big")
    return b"\x81\x7f" + size.to_bytes(8, "big")


def pong_frame(body: bytes) -> bytes:
    """The answer to a ping: an unmasked control frame, of at most 125 bytes."""
    return bytes((0x8A, len(body))) + body


def error_payload(
    error: HoldfastError, *, of_send: bool = False, client_message_id: str | None = None
) -> Error:
    """The public form of an error; of a send, with its id and outcome."""
    error = error.public
    details = (
        error.details
        if client_message_id is None
        else {**error.details, "client_message_id": client_message_id}
    )
    return Error(
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        outcome=("unknown" if error.outcome == "unknown" else "rejected") if of_send else None,
        retry_after_seconds=error.retry_after_seconds,
        details=details or None,
    )


class ServerFrame(msgspec.Struct, frozen=True):
    """A decoded frame from a server; a reply has the ``request_id`` of its request."""

    payload: Sendable
    request_id: str | None = None


class _Envelope(msgspec.Struct, frozen=True):
    type: str
    request_id: str | None = None
    payload: msgspec.Raw = msgspec.Raw(b"{}")


_envelope = msgspec.json.Decoder(_Envelope)
_payloads = {kind: msgspec.json.Decoder(payload) for kind, payload in SERVER_PAYLOADS.items()}


def decode_server_frame(data: bytes | memoryview) -> ServerFrame | None:
    """The frame in ``data``; None for an unknown type; else raises InvalidMessage."""
    try:
        envelope = _envelope.decode(data)
        if (payload := _payloads.get(envelope.type)) is None:
            return None
        return ServerFrame(payload.decode(envelope.payload), envelope.request_id)
    except _BAD_JSON as error:
        raise InvalidMessage(f"the server's frame is malformed: {error}") from None


def encode_client_frame(frame: AnyClientFrame) -> bytes:
    """A client frame as JSON."""
    return _encoder.encode(frame)


class EncodedRun:
    """Messages ``first``..``last`` of a chat, in one epoch of it, as WebSocket frames
    that are ready to write.
    """

    __slots__ = ("chat_id", "count", "data", "epoch", "first", "last", "messages", "next", "size")

    def __init__(self, messages: Sequence[Message], epoch: int) -> None:
        self.messages = messages
        self.epoch = epoch
        self.chat_id = sys.intern(messages[0].chat_id)
        self.first = messages[0].sequence
        self.last = messages[-1].sequence
        self.next = self.last + 1
        self.count = len(messages)
        self.data = b"".join([encode_frame(message) for message in messages])
        self.size = len(self.data)

    def after(self, sequence: int) -> EncodedRun:
        """The rest of the run after ``sequence``; the client has its beginning."""
        return EncodedRun(self.messages[sequence - self.first + 1 :], self.epoch)
