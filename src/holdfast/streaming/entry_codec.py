"""Entries as a log stores them, and back: lossless for any bytes. (Pure.)

A provider's chunks differ in a few bytes: some 200 bytes of JSON around a token. So a
log stores most chunks as what differs from another one, its *template*: a common
prefix, the bytes in between, a common suffix. A chunk that shares less than half with
each of the last templates is stored whole and becomes a template itself. The first
chunk is one.

The first byte of a stored entry is its kind:

    w  a chunk, whole
    d  template n, prefix, suffix (LEB128 each), then the bytes in between
    s  any other entry, as msgpack
    e  an end, as msgpack: Lua and SQL see by it that a log has its end

A stored entry names its template by number. So whoever reads from the middle of a log
knows which entry to fetch first: ``Decoder.missing``. Templates are always entries
that are stored whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from holdfast.streaming.reply import (
    EntryId,
    ReplyBegin,
    ReplyDelta,
    ReplyEnd,
    ReplyEntry,
    ReplyUsage,
)

TEMPLATES_MAX = 4
"""Chunks that the next one is compared with, the last used first."""
TEMPLATES_KEPT = 8
"""Templates that a decoder keeps; it asks again for another."""
END: Final = b"e"

_to_bytes = msgspec.msgpack.Encoder().encode
_others: msgspec.msgpack.Decoder[ReplyEntry] = msgspec.msgpack.Decoder(ReplyEntry)


class UnreadableEntry(ValueError):
    """These bytes are no entry, or their template is not known."""


class _Usual(NamedTuple):
    """What the last chunk shared with its template; most often the next one does too.

    ``header``: the stored bytes before what differs.
    """

    template_n: int
    prefix: bytes
    suffix: bytes
    header: bytes
    template_bytes: int

    def difference(self, chunk: bytes) -> bytes | None:
        shared = len(self.prefix) + len(self.suffix)
        if (
            2 * shared >= len(chunk) >= shared
            and chunk.startswith(self.prefix)
            and chunk.endswith(self.suffix)
            and 2 * shared >= self.template_bytes
        ):
            return self.header + chunk[len(self.prefix) : len(chunk) - len(self.suffix)]
        return None


class Encoder(NamedTuple):
    """What encoding the next entries of an epoch needs to know of those before.

    It is a value: encoding gives the bytes and the encoder for what follows them. Keep
    that once the log has the entries; then a repeated call encodes to the same bytes.
    """

    templates: tuple[tuple[int, bytes], ...] = ()
    """Entries that are stored whole, the last used first."""
    usual: _Usual | None = None

    def encode(self, first: int, entries: Sequence[ReplyEntry]) -> tuple[list[bytes], Encoder]:
        """Entries from ``first`` on. They name only templates before themselves."""
        encoder = self._before(first)
        stored = []
        for n, entry in enumerate(entries, first):
            if isinstance(entry, ReplyDelta):
                bytes_ = encoder.usual and encoder.usual.difference(entry.chunk)
                if not bytes_:
                    bytes_, encoder = encoder._encode_chunk(n, entry.chunk)
            else:
                bytes_ = encode_entry(entry)
            stored.append(bytes_)
        return stored, encoder

    def _before(self, first: int) -> Encoder:
        """Without the templates from ``first`` on: the log lost them, or never had
        them.
        """
        if all(n < first for n, _ in self.templates):
            return self
        usual = self.usual if self.usual and self.usual.template_n < first else None
        return Encoder(tuple(each for each in self.templates if each[0] < first), usual)

    def _encode_chunk(self, n: int, chunk: bytes) -> tuple[bytes, Encoder]:
        for template_n, template in self.templates:
            prefix, suffix = _shared(chunk, template)
            if 2 * (prefix + suffix) >= max(len(chunk), len(template)):
                end = len(template) - suffix
                header = b"d" + _leb(template_n) + _leb(prefix) + _leb(suffix)
                usual = _Usual(template_n, template[:prefix], template[end:], header, len(template))
                others = (each for each in self.templates if each[0] != template_n)
                encoder = Encoder(((template_n, template), *others), usual)
                return header + chunk[prefix : len(chunk) - suffix], encoder
        return b"w" + chunk, Encoder(((n, chunk), *self.templates[: TEMPLATES_MAX - 1]), self.usual)


def encode_entry(entry: ReplyBegin | ReplyUsage | ReplyEnd) -> bytes:
    """An entry that needs no template."""
    return (END if isinstance(entry, ReplyEnd) else b"s") + _to_bytes(entry)


class Decoder:
    """Decodes the entries of a log, from any entry on."""

    __slots__ = ("_epoch", "_templates")

    def __init__(self) -> None:
        self._epoch = -1
        self._templates: dict[int, bytes] = {}

    def missing(self, entry_id: EntryId, stored: bytes) -> int | None:
        """The entry of the same epoch to decode before this one; None: go on."""
        if stored[:1] != b"d":
            return None
        template_n = _number(stored, 1)[0]
        has_it = entry_id.epoch == self._epoch and template_n in self._templates
        return None if has_it else template_n

    def decode(self, entry_id: EntryId, stored: bytes) -> ReplyEntry:
        """UnreadableEntry if it is malformed or its template is missing."""
        if entry_id.epoch != self._epoch:
            self._epoch = entry_id.epoch
            self._templates.clear()
        match stored[:1]:
            case b"d":
                return ReplyDelta(self._restore(stored))
            case b"w":
                chunk = stored[1:]
                self._keep(entry_id.n, chunk)
                return ReplyDelta(chunk)
            case b"s" | b"e":
                try:
                    return _others.decode(stored[1:])
                except msgspec.MsgspecError as error:
                    raise UnreadableEntry(str(error)) from error
        raise UnreadableEntry("no such kind of entry")

    def _restore(self, stored: bytes) -> bytes:
        template_n, at = _number(stored, 1)
        prefix, at = _number(stored, at)
        suffix, at = _number(stored, at)
        template = self._templates.get(template_n)
        if template is None or prefix + suffix > len(template):
            raise UnreadableEntry(f"entry {template_n} is no template of it")
        return template[:prefix] + stored[at:] + template[len(template) - suffix :]

    def _keep(self, n: int, chunk: bytes) -> None:
        self._templates[n] = chunk
        if len(self._templates) > TEMPLATES_KEPT:
            del self._templates[next(iter(self._templates))]


def _shared(chunk: bytes, template: bytes) -> tuple[int, int]:
    """The lengths of the common prefix and of the common suffix of the rest.

    The highest bit in which two numbers differ tells where their bytes first differ:
    that is one pass in C, where a loop over bytes would take ten times as long.
    """
    most = min(len(chunk), len(template))
    differing = int.from_bytes(chunk[:most], "big") ^ int.from_bytes(template[:most], "big")
    prefix = most - (differing.bit_length() + 7 >> 3)
    most -= prefix
    if not most:
        return prefix, 0
    differing = int.from_bytes(chunk[-most:], "little") ^ int.from_bytes(template[-most:], "little")
    return prefix, most - (differing.bit_length() + 7 >> 3)


def _encode_leb(number: int) -> bytes:
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)


_SMALL: Final = [_encode_leb(number) for number in range(4096)]


def _leb(number: int) -> bytes:
    return _SMALL[number] if number < 4096 else _encode_leb(number)


def _number(stored: bytes, at: int) -> tuple[int, int]:
    """The LEB128 number at this place, and the place behind it."""
    number = shift = 0
    while at < len(stored) and shift < 64:
        byte = stored[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
    raise UnreadableEntry("a number has no end")
