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
    """Renders the events of one reply to one reader.

    It is given every entry from entry 0 on, in order, whatever the reader has already:
    ``responses`` numbers its events by all that came before. Only ``native`` may begin
    behind a later entry.
    """

    def render(self, entries: Sequence[tuple[EntryId, ReplyEntry]]) -> bytes:
        """The events of the next entries; may be empty.

        An end entry renders as the surface's end: the failure or the success.
        """
        ...

    def queued(self, position: int, eta_seconds: float | None) -> bytes:
        """Where the reply waits; changes nothing that is rendered later."""
        ...

    def fail(self, error: ReplyError) -> bytes:
        """The events of a failure that is in no log (``worker_lost``, ``gap``)."""
        ...


class WholeAnswer(Protocol):
    """The answer of a request that is not streamed, built as the entries come.

    Built in steps, because a long reply merged at once would block the loop.
    """

    def add(self, entries: Sequence[tuple[EntryId, ReplyEntry]]) -> None:
        """The next entries, from entry 0 on."""
        ...

    def body(self) -> bytes:
        """The JSON of what was added so far."""
        ...
