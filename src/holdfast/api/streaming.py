"""Streamed answers: status and headers, the pieces, and what ends them.

An answer ends when its iterator ends. It is cut when the client disconnects, when its
deadline is over, when the node has drained long enough, or when the iterator fails
after status and headers have left. The client sees a cut as a body without its last
chunk.

One task pulls the pieces and sends them; deadline, drain and idle pieces share a timer,
and the server calls back when the client leaves. Pieces that come one by one are
written where they arise (``PiecesAtOnce``), without that task. An answer that waits
costs little memory: thousands may wait at once.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Any, Literal

from holdfast.api.endpoint import StreamBounds
from holdfast.api.request import (
    AsgiMessage,
    AsgiReceive,
    AsgiSend,
    PieceWriter,
    RawHeaders,
    Request,
)
from holdfast.errors import HoldfastError, InvalidMessage, Unavailable
from holdfast.telemetry import log

StreamEnd = Literal["complete", "client_gone", "deadline", "drained", "failed"]
ENDED_IDLE_SECONDS = 0.5
"""How often an idle piece is sent to a client that has ended its side."""
CLOSE_SECONDS = 1.0
"""How long an iterator that is cut may take to clean up."""


class QuietPiece(bytes):
    """A piece that does not start the answer: it leaves with the first one that does,
    or when the head has waited long enough."""


class LastPiece(bytes):
    """The piece that the answer ends with: both leave in one write."""


class FailurePiece(bytes):
    """The last piece of an answer that fails: these bytes if the head has left already,
    otherwise an ordinary error response."""

    error: HoldfastError

    @classmethod
    def of(cls, rendered: bytes, error: HoldfastError) -> FailurePiece:
        piece = cls(rendered)
        piece.error = error
        return piece


class PiecesAtOnce(AsyncIterator[bytes]):
    """Pieces that are written as they come: a piece then costs no turn of a task."""

    __slots__ = ()

    @abstractmethod
    def write_at_once(self, writer: PieceWriter) -> None:
        """Write while ``anext`` waits and the writer is writable; what is left,
        ``anext`` gives."""
        ...


def _cut_before_start(cause: StreamEnd) -> HoldfastError:
    """The ordinary error of an answer that was cut before anything of it was sent."""
    if cause == "client_gone":
        # Nobody reads this answer. It must be an error of the client's side, so that
        # metrics and alerts do not count a server error for a client that left.
        return InvalidMessage("the client disconnected before it was answered")
    text = "this node is stopping" if cause == "drained" else "no answer in time"
    return Unavailable(text, retry_after_seconds=1.0)


class StreamedAnswers:
    """The streamed answers of a node."""

    def __init__(self) -> None:
        self._running: set[StreamedBody] = set()
        """Bounded by the open HTTP connections: each answers one request at a time."""
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = asyncio.Event()

    def refuse_if_draining(self) -> None:
        """Unavailable if the node stops: a stream that begins now would be cut."""
        if self.draining.is_set():
            raise _cut_before_start("drained")

    async def begin(
        self,
        seconds_max: float,
        pieces: AsyncIterator[bytes],
        bounds: StreamBounds,
        request: Request,
    ) -> StreamedBody:
        """The answer, once it may be sent; raises what the iterator raised."""
        body = StreamedBody(seconds_max, pieces, bounds, request)
        self._running.add(body)
        self._empty.clear()
        if self.draining.is_set():
            body.drain()
        try:
            await body.begin()
        except BaseException:
            await self._close(body)
            raise
        return body

    async def wait(self, body: StreamedBody) -> StreamEnd:
        """Wait for the end of an answer that was started; returns what ended it."""
        try:
            return await body.end
        finally:
            await self._close(body)

    async def _close(self, body: StreamedBody) -> None:
        try:
            await body.close()
        finally:
            self._running.discard(body)
            if not self._running:
                self._empty.set()

    async def drain(self) -> None:
        """Let running answers end, each within its ``drain_seconds``."""
        self.draining.set()
        for body in self._running:
            body.drain()
        await self._empty.wait()


class StreamedBody:
    """One streamed answer: ``begin``, ``start``, wait for ``end``, ``close``.

    ``end``: what ended the answer, or cut it, whichever came first.
    """

    __slots__ = (
        "_ends_as", "_ends_at", "_head_at", "_head_sent", "_held", "_idle_seconds", "_loop",
        "_may_start", "_name", "_pieces", "_send", "_sending", "_sent_at", "_started", "_tasks",
        "_timer", "_writer", "bounds", "end",
    )  # fmt: skip

    def __init__(
        self,
        seconds_max: float,
        pieces: AsyncIterator[bytes],
        bounds: StreamBounds,
        request: Request,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._name = request.endpoint.name if request.endpoint else ""
        self._pieces, self.bounds, self._writer = pieces, bounds, request.piece_writer
        self._idle_seconds = bounds.idle_seconds
        self.end: asyncio.Future[StreamEnd] = loop.create_future()
        self._may_start: asyncio.Future[None] = loop.create_future()
        """Done when there is a reason to send the head, or to send none."""
        self._started = False
        """The head is due: what goes wrong from now on cuts the answer."""
        self._send: AsgiSend | None = None
        """Set when the head has been sent."""
        self._head_sent: asyncio.Future[None] | None = None
        """While a piece waits for that."""
        self._held: list[bytes] = []
        """Pieces that leave with the head."""
        self._sent_at, self._sending = math.inf, False
        now = loop.time()
        self._ends_at = now + seconds_max
        self._ends_as: StreamEnd = "deadline"
        self._head_at = now + bounds.first_piece_seconds
        """When the head is sent without a piece."""
        self._timer = loop.call_at(min(self._ends_at, self._head_at), self._on_time)
        pulls = loop.create_task(self._send_pieces())
        pulls.add_done_callback(self._on_pieces_ended)
        self._tasks = [pulls]
        if request.on_disconnect is not None:
            request.on_disconnect(self._on_disconnect)
        else:
            self._tasks.append(loop.create_task(self._watch(request.receive)))

    # --- before the head

    async def begin(self) -> None:
        """Wait for a reason to send the head, at most ``first_piece_seconds``.

        Raises what went wrong before there was one.
        """
        await self._may_start

    def _start_now(self) -> None:
        self._head_at = math.inf
        if not self._may_start.done():
            self._started = True
            self._may_start.set_result(None)

    # --- the answer

    def start(self, status: int, headers: RawHeaders, send: AsgiSend) -> None:
        """Send status and headers, then the pieces."""
        start = {
            "type": "http.response.start",
            "status": status,
            "headers": headers,
            # Our own key, not ASGI's: gateway/transport/responses.py reads it.
            "unread_seconds_max": self.bounds.unread_seconds_max,
        }
        if self._writer is not None and self._writer.write_head(start, b"".join(self._held)):
            self._held.clear()
            self._on_head_sent(send)
            return
        head = self._loop.create_task(self._send_head(start, send))
        head.add_done_callback(self._on_head_ended)
        self._tasks.append(head)

    async def _send_head(self, start: AsgiMessage, send: AsgiSend) -> None:
        await send(start)
        while True:
            held, self._held = b"".join(self._held), []
            await send({"type": "http.response.body", "body": held, "more_body": True})
            if not self._held:
                break
        self._on_head_sent(send)

    def _on_head_sent(self, send: AsgiSend) -> None:
        self._send, self._sent_at = send, self._loop.time()
        if self._head_sent is not None:
            self._head_sent.set_result(None)
        if isinstance(self._pieces, PiecesAtOnce) and self._writer is not None:
            self._pieces.write_at_once(self._writer)
        self._set_timer()

    async def _send_pieces(self) -> None:
        """Pull every piece; hold those before the head, send the others."""
        async for piece in self._pieces:
            if isinstance(piece, LastPiece):
                await self._send_last(piece)
                return
            if self._send is None:
                await self._hold(piece)
            elif self._writer is not None and self._writer.can_write():
                self._writer.write_piece(piece)
            else:
                await self._send_piece(self._send, piece)
        await self._send_last(b"")

    async def _send_last(self, piece: bytes) -> None:
        send = self._send or await self._wait_for_head()
        await send({"type": "http.response.body", "body": piece})
        self._finish("complete")  # before the server closes the connection behind it

    async def _hold(self, piece: bytes) -> None:
        if isinstance(piece, FailurePiece) and not self._started:
            raise piece.error
        self._held.append(piece)
        if not isinstance(piece, QuietPiece):
            await self._wait_for_head()

    async def _wait_for_head(self) -> AsgiSend:
        self._start_now()
        self._head_sent = self._loop.create_future()
        await self._head_sent
        self._head_sent = None
        assert self._send is not None
        return self._send

    async def _send_piece(self, send: AsgiSend, piece: bytes) -> None:
        self._sending = True
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._sending, self._sent_at = False, self._loop.time()

    # --- what ends it

    def _on_pieces_ended(self, pulls: asyncio.Task[None]) -> None:
        error = None if pulls.cancelled() else pulls.exception()
        if error is None:
            self._finish("complete")
        elif not self._may_start.done():
            self._may_start.set_exception(error)
        else:
            self._fail(error)

    def _on_head_ended(self, head: asyncio.Task[None]) -> None:
        self._tasks.remove(head)
        if not head.cancelled() and (error := head.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        log.error("api.stream_failed", endpoint=self._name, exc_info=error)
        self._finish("failed")

    def _finish(self, cause: StreamEnd) -> None:
        if not self.end.done():
            self.end.set_result(cause)
        if not self._may_start.done():
            self._may_start.set_exception(_cut_before_start(cause))

    async def _watch(self, receive: AsgiReceive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._on_disconnect(lost=True)

    def _on_disconnect(self, lost: bool) -> None:
        """The connection is lost, or the client has ended its side of it.

        A client that closed and one that will only read look the same until something
        is written to them, twice. So write; an answer that cannot yet counts as left.
        """
        if lost or not self.bounds.idle_piece:
            self._finish("client_gone")
        elif not self.end.done():
            self._idle_seconds = min(self._idle_seconds, ENDED_IDLE_SECONDS)
            self._start_now()
            self._set_timer()

    def drain(self) -> None:
        """The node stops: cut the answer unless it ends in its time."""
        at = self._loop.time() + self.bounds.drain_seconds
        if at < self._ends_at:
            self._ends_at, self._ends_as = at, "drained"
            self._set_timer()

    # --- the timer

    def _idle_at(self) -> float:
        """When an idle piece is due."""
        if not self.bounds.idle_piece or self._send is None:
            return math.inf
        written_at = self._writer.written_at if self._writer is not None else 0.0
        return max(self._sent_at, written_at) + self._idle_seconds

    def _set_timer(self) -> None:
        self._timer.cancel()
        at = min(self._ends_at, self._head_at, self._idle_at())
        self._timer = self._loop.call_at(at, self._on_time)

    def _on_time(self) -> None:
        """Cut the answer if its time is over, else start it or send an idle piece if
        that is due.

        That goes beside the next piece: a transport writes each message whole.
        """
        now = self._loop.time()
        if now >= self._ends_at:
            self._finish(self._ends_as)
            return
        if now >= self._head_at:
            self._start_now()
        if self._send is not None and now >= self._idle_at():
            self._sent_at = now
            if not self._sending:
                piece = self._send_piece(self._send, self.bounds.idle_piece)
                idle = self._loop.create_task(piece)
                idle.add_done_callback(self._tasks.remove)
                self._tasks.append(idle)
        self._set_timer()

    async def close(self) -> None:
        self._timer.cancel()
        for task in [*self._tasks]:
            await _cancel(task)
        if self._may_start.done() and not self._may_start.cancelled():
            self._may_start.exception()  # marks it as seen
        closing = getattr(self._pieces, "aclose", None)
        if closing is not None:
            is_cut = not self.end.done() or self.end.result() != "complete"
            try:
                if is_cut:
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await closing()
                else:
                    await closing()
            except Exception:
                log.exception("api.stream_failed", endpoint=self._name)


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel the task and wait until it ends, at most ``CLOSE_SECONDS``.

    An iterator that ignores its cancellation must not keep the node from stopping.
    """
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CLOSE_SECONDS)
    if task.done() and not task.cancelled():
        task.exception()  # marks it as seen; the cause of the cut is reported instead
