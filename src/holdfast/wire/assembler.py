"""Assembles fragments to whole messages, by RFC 6455 and our bounds. (Pure.)

A message is text of at most ``bytes_max`` in at most ``fragments_max`` fragments.
Control frames may come between the fragments; ``control`` checks them. A broken rule
ends the connection, because it is unknown where the next message begins.
"""

from __future__ import annotations

from holdfast.errors import InvalidMessage

CONTINUATION = 0x0
TEXT = 0x1
BINARY = 0x2
CLOSE = 0x8
PING = 0x9
PONG = 0xA

_RESERVED = "a reserved bit is set, and no extension was agreed on"
_CONTROL_BYTES_MAX = 125
_CLOSE_CODES = frozenset({*range(1000, 1004), *range(1007, 1015), *range(3000, 5000)})
"""The codes that a peer may send; 1005 and similar ones are for local use only."""


class BrokenProtocol(InvalidMessage):
    """The peer breaks the protocol; close with ``CloseReason.PROTOCOL_ERROR``."""


class Assembler:
    """Collects the fragments of one connection. Do not feed it after it has raised."""

    __slots__ = ("_bytes_max", "_fragments", "_fragments_max", "_size")

    def __init__(self, bytes_max: int, fragments_max: int) -> None:
        self._bytes_max = bytes_max
        self._fragments_max = fragments_max
        self._fragments: list[bytes] | None = None
        self._size = 0

    def feed(self, opcode: int, final: bool, reserved: bool, payload: bytes) -> bytes | None:
        """Take one frame; returns the message it completes, if any."""
        if (
            opcode == TEXT
            and final
            and not reserved
            and self._fragments is None
            and len(payload) <= self._bytes_max
        ):
            return _text(payload)  # the usual case: a whole message in one frame
        if reserved:
            raise BrokenProtocol(_RESERVED)
        self._check_place(opcode)
        self._size += len(payload)
        if self._size > self._bytes_max:
            raise BrokenProtocol(
                f"a message is larger than {self._bytes_max} bytes", limit=self._bytes_max
            )
        return self._gather(final, payload)

    def _check_place(self, opcode: int) -> None:
        """Raise unless a data frame of this kind may come now."""
        if opcode == BINARY:
            raise BrokenProtocol("binary messages are not part of the protocol")
        if opcode not in (TEXT, CONTINUATION):
            raise BrokenProtocol(f"unknown frame opcode {opcode}")
        if opcode == CONTINUATION and self._fragments is None:
            raise BrokenProtocol("a continuation without a beginning")
        if opcode == TEXT and self._fragments is not None:
            raise BrokenProtocol("a new message before the last one ended")

    def _gather(self, final: bool, payload: bytes) -> bytes | None:
        fragments = self._fragments = self._fragments or []
        fragments.append(payload)
        if len(fragments) > self._fragments_max:
            raise BrokenProtocol(
                f"a message has more than {self._fragments_max} fragments",
                limit=self._fragments_max,
            )
        if not final:
            return None
        self._fragments = None
        self._size = 0
        return _text(b"".join(fragments))


def _text(payload: bytes) -> bytes:
    if not payload.isascii():
        try:
            payload.decode()
        except UnicodeDecodeError:
            raise BrokenProtocol("a text message is not valid UTF-8") from None
    return payload


def control(opcode: int, final: bool, reserved: bool, payload: bytes) -> bytes:
    """Check a ping, pong or close; returns its payload, which the reply repeats."""
    if reserved:
        raise BrokenProtocol(_RESERVED)
    if not final:
        raise BrokenProtocol("a control frame is fragmented")
    if len(payload) > _CONTROL_BYTES_MAX:
        raise BrokenProtocol(f"a control frame is larger than {_CONTROL_BYTES_MAX} bytes")
    if opcode not in (CLOSE, PING, PONG):
        raise BrokenProtocol(f"unknown frame opcode {opcode}")
    if opcode == CLOSE and payload:
        if len(payload) < 2 or int.from_bytes(payload[:2], "big") not in _CLOSE_CODES:
            raise BrokenProtocol("a close frame carries a code that must not be sent")
        _text(payload[2:])
    return payload
