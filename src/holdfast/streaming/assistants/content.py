"""The text of a reply, as far as it has come. (Pure.)

A stored message has at most 64 KiB; a longer text is cut, with a mark at its end.
"""

from __future__ import annotations

import msgspec

from holdfast.bounds import KIB
from holdfast.streaming.reply import ReplyDelta, ReplyEntry

CONTENT_BYTES_MAX = 64 * KIB
CUT_MARK = " […]"


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


_chunk = msgspec.json.Decoder(_Chunk)


def text_of(entry: ReplyEntry) -> str:
    """The text that an entry adds; empty for any other entry or chunk."""
    if not isinstance(entry, ReplyDelta):
        return ""
    try:
        choices = _chunk.decode(entry.chunk).choices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return (choices[0].delta.content if choices else None) or ""


class ReplyContent:
    """Collects the content of the message."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, text: str) -> None:
        """Add the next text; beyond the bound it is dropped."""
        if text and self._size <= CONTENT_BYTES_MAX:
            self._parts.append(text.encode())
            self._size += len(self._parts[-1])

    def message(self) -> str:
        whole = b"".join(self._parts)
        if len(whole) <= CONTENT_BYTES_MAX:
            return whole.decode()
        mark = CUT_MARK.encode()
        return whole[: CONTENT_BYTES_MAX - len(mark)].decode(errors="ignore") + CUT_MARK
