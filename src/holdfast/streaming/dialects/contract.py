"""What a dialect is: requests into ``DialectRequest``, entries into bytes. (Pure.)

A dialect knows one API (chat completions, responses, native replies): it reads the
request body, and it renders entries as SSE events or as one JSON answer. What it
renders is a function of the entries alone, never of how long they waited or in which
batches they came, so every node renders a reply the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from holdfast.streaming.reply import EntryId, ReplyEntry, ReplyError


class DialectRequest(NamedTuple):
    """What a request asks for.

    ``fields``: the request as chat completions have it, raw JSON by field, without
    ``model``, ``stream`` and ``stream_options``. ``user``: whom the queue counts, if
    the body names somebody. ``shown``: JSON that rendering needs later; stored with the
    reply, so it never has messages.
    """

    model: str
    stream: bool
    fields: Mapping[str, bytes]
    user: str = ""
    max_output_tokens: int | None = None
    shown: str = ""
    store: bool = False
    background: bool = False


class Renderer(Protocol):
    """Renders one reply to one reader."""

    media_type: str

    def render(self, entries: Sequence[tuple[EntryId, ReplyEntry]]) -> bytes:
        """The events of the next entries, in order; may be empty.

        An end entry renders as the surface's end: the failure or the success.
        """
        ...

    def fail(self, error: ReplyError) -> bytes:
        """The events of a failure that is in no log (``worker_lost``, ``gap``)."""
        ...

    def whole(self, entries: Sequence[tuple[EntryId, ReplyEntry]]) -> bytes:
        """The answer of a request that is not streamed, from all entries."""
        ...
