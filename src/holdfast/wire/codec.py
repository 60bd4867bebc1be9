"""Bytes to frames and back. (Pure.)

Decoding goes straight into typed structs, so a JSON bomb has nowhere to unfold: nesting too deep, lone
surrogates, bad UTF-8 and wrong types all end as ``InvalidMessage``.

``encode_frame`` returns a whole WebSocket text frame. A server's frames are not masked, so the same bytes
serve every connection; that is what makes fanout cheap.
"""

from __future__ import annotations

import msgspec

from holdfast.errors import HoldfastError, InvalidMessage
from holdfast.message import Message, Page
from holdfast.wire.frames import AnyClientFrame, Error, Sendable

_client_frame: msgspec.json.Decoder[AnyClientFrame] = msgspec.json.Decoder(AnyClientFrame)
_encoder = msgspec.json.Encoder()


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
        raise InvalidMessage(f"the frame is malformed: {error}") from None


def request_id_of(data: bytes | memoryview) -> str | None:
    """The request_id of a frame that could not be decoded, so that its error can name it."""
    try:
        return _label.decode(data).request_id
    except _BAD_JSON:
        return None


def encode_payload(payload: Sendable, request_id: str | None = None) -> bytes:
    """A server frame as JSON."""
    match payload:
        case Message():
            kind = "message"
        case Page():
            kind = "sync_response"
        case _:
            kind = payload.type
    frame: dict[str, object] = {"type": kind, "payload": payload}
    if request_id is not None:
        frame["request_id"] = request_id
    return _encoder.encode(frame)


def encode_frame(payload: Sendable, request_id: str | None = None) -> bytes:
    """A server frame as a whole WebSocket text frame."""
    data = encode_payload(payload, request_id)
    return text_header(len(data)) + data


def text_header(size: int) -> bytes:
    """The header of an unmasked, final text frame (RFC 6455 section 5.2)."""
    if size < 126:
        return bytes((0x81, size))
    if size < 65536:
        return b"\x81\x7e" + size.to_bytes(2, "big")
    return b"\x81\x7f" + size.to_bytes(8, "big")


def error_payload(error: HoldfastError, *, of_send: bool = False, client_message_id: str | None = None) -> Error:
    """What a client is told of an error; of a send, also which and whether it might have happened."""
    details = error.details if client_message_id is None else {**error.details, "client_message_id": client_message_id}
    return Error(
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        outcome=("unknown" if error.outcome == "unknown" else "rejected") if of_send else None,
        retry_after_seconds=error.retry_after_seconds,
        details=details or None,
    )
