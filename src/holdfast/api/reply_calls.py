"""From a call to a reply, and from a reply's entries to the pieces of an answer.

What all surfaces of replies share; what they differ in is a dialect.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from msgspec import Raw

from holdfast.access.principal import Principal
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call, StreamBounds
from holdfast.api.request import PieceWriter
from holdfast.api.streaming import FailurePiece, LastPiece, PiecesAtOnce, QuietPiece
from holdfast.errors import InvalidMessage
from holdfast.streaming import sse
from holdfast.streaming.admission import ReplyRequest
from holdfast.streaming.attached import AttachedReply
from holdfast.streaming.body_bytes import ReservedBytes
from holdfast.streaming.dialects.contract import DialectRequest, Renderer, WholeAnswer
from holdfast.streaming.dialects.request_body import split
from holdfast.streaming.reader import LiveCursor, Lost, Queued, ReaderEvent
from holdfast.streaming.reply import (
    EntryId,
    Owner,
    Payer,
    ReplyDelta,
    ReplyDone,
    ReplyEnd,
    ReplyEntry,
    ReplyError,
    ReplyFailed,
    Surface,
)
from holdfast.streaming.settings import ReplyTimes

ReadRequest = Callable[[Mapping[str, Raw]], DialectRequest]

INLINE_BYTES = 32 * 1024
"""Bodies up to this size are read on the loop; longer ones in a thread."""
HEAD_SECONDS = 2.0
"""How long status and headers wait for the first entry or the end."""
CUT_SECONDS = 4.0
"""Beyond the drain of replies: an answer that has not ended by then is cut."""
YIELD_ENTRIES = 64
"""A batch this large comes from a reader that catches up: others get their turn."""
_WAIT = re.compile(r"wait\s*=\s*\"?(\d{1,9})\"?")


def owner_of(principal: Principal) -> Owner:
    """Whose reply it is: a user's, or a key's that acts for nobody."""
    if principal.user_id:
        return Owner(principal.tenant, "user", principal.user_id)
    return Owner(principal.tenant, "key", principal.key_id)


def reserve_body(deps: ApiDeps, principal: Principal, size: int) -> ReservedBytes:
    return deps.body_bytes.reserve(owner_of(principal), size)


class StartedReply(NamedTuple):
    """A reply, and what was asked for."""

    reply: AttachedReply
    asked: DialectRequest


async def start_reply(
    deps: ApiDeps, call: Call, surface: Surface, read_request: ReadRequest
) -> StartedReply:
    """Begin the reply that the call's body asks for, or attach to the one that its
    Idempotency-Key began."""
    reservation = call.reservation
    assert reservation is not None, "endpoints that start replies reserve their bodies"
    try:
        wait_seconds = read_prefer(call.headers.get("Prefer", ""))
        if len(call.body) <= INLINE_BYTES:
            asked, body_hash = _read_body(call.body, read_request, surface)
        else:
            asked, body_hash = await asyncio.to_thread(_read_body, call.body, read_request, surface)
        request = ReplyRequest(
            reply_id=deps.ids.new("resp_" if surface == "responses" else "reply_"),
            owner=owner_of(call.principal),
            payer=_payer(call.principal, asked.user),
            kind="background" if asked.background else "native" if surface == "native" else "plain",
            surface=surface,
            model=asked.model,
            fields=asked.fields,
            streamed=asked.stream or asked.background or surface == "native",
            replicated=surface == "native" or asked.store or call.key is not None,
            shown=asked.shown,
            queue_seconds=wait_seconds,
            max_output_tokens=asked.max_output_tokens,
            key=call.key,
            body_hash=body_hash,
            reservation=reservation,
            is_allowed=partial(deps.tickets.is_allowed, call.principal),
        )
        return StartedReply(await deps.streaming.start(request), asked)
    except BaseException:
        reservation.free()
        raise


def _read_body(
    body: bytes, read_request: ReadRequest, surface: Surface
) -> tuple[DialectRequest, bytes]:
    """What is asked for, and its hash: the same body is another request elsewhere."""
    body_hash = hashlib.blake2b(body, digest_size=16, person=surface.encode()).digest()
    return read_request(split(body)), body_hash


def _payer(principal: Principal, named: str) -> Payer:
    if principal.user_id:
        return Payer(principal.tenant, principal.user_id)
    return Payer(principal.tenant, named or principal.key_id, is_key=not named)


def read_prefer(header: str) -> float | None:
    """The seconds that ``Prefer: wait=N`` (RFC 7240) allows in the queue; None: all.

    Other preferences are ignored, as the standard says.
    """
    for preference in header.split(","):
        token = preference.partition(";")[0].strip().lower()
        if token.partition("=")[0].rstrip() == "wait":
            found = _WAIT.fullmatch(token)
            if found is None:
                raise InvalidMessage("Prefer: wait=N takes whole seconds", field="Prefer")
            return float(found[1])
    return None


@cache
def _events_bounds(times: ReplyTimes) -> StreamBounds:
    return StreamBounds(
        first_piece_seconds=HEAD_SECONDS,
        unread_seconds_max=times.slow_reader_seconds,
        drain_seconds=times.drain_seconds + CUT_SECONDS,
        idle_piece=sse.HEARTBEAT,
        idle_seconds=times.heartbeat_seconds,
    )


def events_answer(deps: ApiDeps, reply: AttachedReply, pieces: AsyncIterator[bytes]) -> Answer:
    """The reply as server-sent events."""
    bounds = _events_bounds(deps.streaming.settings.times)
    headers = {**reply_headers(reply), "X-Accel-Buffering": "no"}
    return Answer(pieces, headers=headers, media_type=sse.MEDIA_TYPE, stream=bounds)


def whole_answer(deps: ApiDeps, reply: AttachedReply, answer: WholeAnswer) -> Answer:
    """The reply as one JSON body: nothing is sent before its end, but a client that
    leaves is noticed."""
    bounds = replace(
        _events_bounds(deps.streaming.settings.times), first_piece_seconds=math.inf, idle_piece=b""
    )
    return Answer(WholePiece(reply, answer), headers=reply_headers(reply), stream=bounds)


def reply_headers(reply: AttachedReply) -> dict[str, str]:
    return {"X-Reply-Id": reply.reply_id}


class ReplyPieces(AsyncIterator[bytes]):
    """The pieces of an answer, from the events of a reader.

    No generator: ``aclose`` also detaches a reader that never began.
    """

    __slots__ = ("_cursor", "_reply_id")  # one for each client that waits

    def __init__(self, reply: AttachedReply, after: EntryId | None = None) -> None:
        self._reply_id = reply.reply_id
        self._cursor = reply.entries(after)

    async def aclose(self) -> None:
        await self._cursor.aclose()

    def _failed(self, error: ReplyError) -> ReplyFailed:
        failed = ReplyFailed(error)
        failed.details["reply_id"] = self._reply_id
        return failed


class EventPieces(ReplyPieces, PiecesAtOnce):
    """Events for a client that has just asked: a reply that fails before its first
    token is an ordinary error response, if there is still time for one."""

    __slots__ = ("_defect", "_is_silent", "_renderer", "_writer")

    def __init__(
        self, reply: AttachedReply, renderer: Renderer, after: EntryId | None = None
    ) -> None:
        super().__init__(reply, after)
        self._renderer = renderer
        self._is_silent = True
        """Nothing has come yet but its begin."""
        self._writer: PieceWriter | None = None
        self._defect: Exception | None = None
        """Of rendering, for ``anext``."""

    def write_at_once(self, writer: PieceWriter) -> None:
        if isinstance(self._cursor, LiveCursor):
            self._writer = writer
            self._cursor.write_at_once(self._write_new)

    def _write_new(self) -> bool:
        """Whether everything new was written; the rest and the end are for ``anext``.

        Called by the producer, so it raises nothing.
        """
        cursor, writer = self._cursor, self._writer
        assert isinstance(cursor, LiveCursor) and writer is not None
        if (
            cursor.reply.end is not None
            or not writer.can_write()
            or (event := cursor.take()) is None
        ):
            return False
        try:
            if type(event) is list and not self._is_silent:  # a token, not the end
                piece = self._renderer.render(event)
            else:
                piece = self._piece(event)
            if piece:
                writer.write_piece(piece)
        except Exception as error:
            self._defect = error
            cursor.close()
        return len(event) < YIELD_ENTRIES and cursor.is_open

    async def aclose(self) -> None:
        self._writer = None
        await super().aclose()

    async def __anext__(self) -> bytes:
        while True:
            try:
                event = await anext(self._cursor)
            except StopAsyncIteration:
                raise self._defect or StopAsyncIteration from None
            piece = self._piece(event)
            if len(event) >= YIELD_ENTRIES:
                await asyncio.sleep(0)
            if piece:
                return piece

    def _piece(self, event: ReaderEvent) -> bytes:
        if isinstance(event, Queued):
            return QuietPiece(self._renderer.queued(*event))
        if isinstance(event, Lost):
            return self._failure(self._renderer.fail(event.error), event.error)
        rendered, last = self._renderer.render(event), event[-1][1]
        if self._is_silent:
            if not any(_says_something(entry) for _, entry in event):
                if isinstance(last, ReplyError):
                    return self._failure(rendered, last)
                return QuietPiece(rendered)
            self._is_silent = False
        return LastPiece(rendered) if isinstance(last, ReplyEnd) else rendered

    def _failure(self, rendered: bytes, error: ReplyError) -> bytes:
        return FailurePiece.of(rendered, self._failed(error)) if self._is_silent else rendered


def _says_something(entry: ReplyEntry) -> bool:
    return isinstance(entry, ReplyDelta | ReplyDone)


class ResumedPieces(EventPieces):
    """Events for a client that reads a reply again: its failure is an event too."""

    __slots__ = ()

    def _failure(self, rendered: bytes, error: ReplyError) -> bytes:
        return rendered


class WholePiece(ReplyPieces):
    """One piece at the end of the reply; ReplyFailed if it failed."""

    def __init__(self, reply: AttachedReply, answer: WholeAnswer) -> None:
        super().__init__(reply)
        self._answer: WholeAnswer | None = answer

    async def __anext__(self) -> bytes:
        answer, self._answer = self._answer, None
        if answer is None:
            raise StopAsyncIteration
        async for event in self._cursor:
            match event:
                case Queued():
                    continue
                case Lost(error):
                    raise self._failed(error)
                case entries:
                    answer.add(entries)
                    if isinstance(end := entries[-1][1], ReplyError):
                        raise self._failed(end)
                    if len(entries) >= YIELD_ENTRIES:
                        await asyncio.sleep(0)
        return answer.body()
