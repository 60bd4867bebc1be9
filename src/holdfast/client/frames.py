"""The client's side of the codec: server frames in, client frames out. (Pure.)

A frame of a type this client does not know is ``None``: a newer server may send more than we understand, and
what we must not miss is numbered.
"""

from __future__ import annotations

import msgspec

from holdfast.errors import InvalidMessage
from holdfast.message import Message, Page
from holdfast.wire.frames import (
    AnyClientFrame,
    Authenticated,
    ConnectionClosing,
    ConnectionEstablished,
    Error,
    Heartbeat,
    MessageAck,
    Presence,
    Receipt,
    Resumed,
    Resync,
    Sendable,
    Typing,
)


class _Envelope(msgspec.Struct, frozen=True):
    type: str
    request_id: str | None = None
    payload: msgspec.Raw = msgspec.Raw(b"{}")


class ServerFrame(msgspec.Struct, frozen=True):
    """One frame from the server; a reply carries the ``request_id`` of its request."""

    payload: Sendable
    request_id: str | None = None


_envelope = msgspec.json.Decoder(_Envelope)
_encoder = msgspec.json.Encoder()
_payloads: dict[str, msgspec.json.Decoder[Sendable]] = {
    "message": msgspec.json.Decoder(Message),
    "sync_response": msgspec.json.Decoder(Page),
    **{
        kind.type: msgspec.json.Decoder(kind)
        for kind in (
            ConnectionEstablished,
            Authenticated,
            MessageAck,
            Resumed,
            Resync,
            Heartbeat,
            Typing,
            Presence,
            Receipt,
            Error,
            ConnectionClosing,
        )
    },
}


def decode_server_frame(data: bytes) -> ServerFrame | None:
    """The frame in ``data``, or None for a type we do not know; InvalidMessage if it is no frame at all."""
    try:
        envelope = _envelope.decode(data)
        decoder = _payloads.get(envelope.type)
        return decoder and ServerFrame(decoder.decode(envelope.payload), envelope.request_id)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage(f"the server sent a malformed frame: {error}") from error


def encode_client_frame(frame: AnyClientFrame) -> bytes:
    """The JSON of a client frame."""
    return _encoder.encode(frame)
