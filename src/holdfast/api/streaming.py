"""Streamed answers: status and headers, the pieces, and what ends them.

An answer ends when its iterator ends. It is cut when the client disconnects, when its
deadline is over, when the node has drained long enough, or when the iterator fails
after status and headers have left. The client sees a cut as a body without its last
chunk.

One task pulls the pieces and sends them, another waits for the disconnect; deadline,
drain and idle pieces are timers. So a piece costs two awaits and no task.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Literal, TypeVar

from holdfast.api.endpoint import Call, Endpoint, StreamBounds
from holdfast.api.request import AsgiReceive, AsgiSend, RawHeaders
from holdfast.errors import HoldfastError, InvalidMessage, Unavailable
from holdfast.telemetry import log

StreamEnd = Literal["complete", "client_gone", "deadline", "drained", "failed"]
CLOSE_SECONDS = 1.0
"""How long an iterator that is cut may take to clean up."""
T = TypeVar("T")


class QuietPiece(bytes):
    """A piece that does not start the answer: it leaves with the first one that does,
    or when the head has waited long enough."""


class FailurePiece(bytes):
    """The last piece of an answer that fails: these bytes if the head has left already,
    otherwise an ordinary error response."""

    error: HoldfastError

    @classmethod
    def of(cls, rendered: bytes, error: HoldfastError) -> FailurePiece:
        piece = cls(rendered)
        piece.error = error
        return piece


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
        endpoint: Endpoint,
        call: Call,
        pieces: AsyncIterator[bytes],
        bounds: StreamBounds,
        receive: AsgiReceive,
    ) -> StreamedBody:
        """The answer, once it may be sent; raises what the iterator raised."""
        body = StreamedBody(endpoint.name, call.seconds_left, pieces, bounds, receive)
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

    async def send(
        self, body: StreamedBody, status: int, headers: RawHeaders, send: AsgiSend
    ) -> StreamEnd:
        """Send the answer; returns what ended it."""
        try:
            return await body.send(status, headers, send)
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
    """One streamed answer."""

    def __init__(
        self,
        name: str,
        seconds_max: float,
        pieces: AsyncIterator[bytes],
        bounds: StreamBounds,
        receive: AsgiReceive,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._name, self._pieces, self.bounds = name, pieces, bounds
        self._cut: asyncio.Future[StreamEnd] = loop.create_future()
        self._may_start: asyncio.Future[None] = loop.create_future()
        """Done when there is a reason to send the head."""
        self._head_sent: asyncio.Future[AsgiSend] = loop.create_future()
        self._started = False
        """The answer begins: what goes wrong from now on cuts it."""
        self._held: list[bytes] = []
        """Pieces that leave with the head."""
        self._sent_at = 0.0
        self._sending = False
        self._tasks = [self._start(self._send_pieces()), self._start(self._watch(receive))]
        self._timers = {"deadline": loop.call_later(seconds_max, self._end, "deadline")}

    # --- before the head

    async def begin(self) -> None:
        """Wait for a reason to send the head, at most ``first_piece_seconds``."""
        seconds = self.bounds.first_piece_seconds
        awaited: list[asyncio.Future[Any]] = [self._may_start, self._cut]
        await asyncio.wait(
            awaited,
            timeout=None if math.isinf(seconds) else seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._may_start.done():
            self._may_start.result()
        elif self._cut.done():
            raise _cut_before_start(self._cut.result())
        self._started = True

    # --- the answer

    async def send(self, status: int, headers: RawHeaders, send: AsgiSend) -> StreamEnd:
        """Send status, headers and every piece; return what ended the answer."""
        head = self._start(self._send_head(status, headers, send))
        self._tasks.append(head)
        for sending in (head, self._tasks[0]):
            awaited: list[asyncio.Future[Any]] = [sending, self._cut]
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                return self._cut.result()
            if (error := sending.exception()) is not None:
                log.error("api.stream_failed", endpoint=self._name, exc_info=error)
                return "failed"
        return "complete"

    async def _send_head(self, status: int, headers: RawHeaders, send: AsgiSend) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": headers,
                # Our own key, not ASGI's: gateway/transport/responses.py reads it.
                "unread_seconds_max": self.bounds.unread_seconds_max,
            }
        )
        while True:
            held, self._held = b"".join(self._held), []
            await send({"type": "http.response.body", "body": held, "more_body": True})
            if not self._held:
                break
        self._sent_at = self._loop.time()
        self._head_sent.set_result(send)
        if self.bounds.idle_piece:
            self._set_idle_timer()

    async def _send_pieces(self) -> None:
        """Pull every piece; hold those before the head, send the others."""
        try:
            async for piece in self._pieces:
                if self._head_sent.done():
                    await self._send_piece(self._head_sent.result(), piece)
                else:
                    await self._hold(piece)
        except Exception as error:
            if self._started:
                raise
            self._may_start.set_exception(error)
            return
        if not self._head_sent.done():
            self._start_now()
        send = await self._head_sent
        await send({"type": "http.response.body", "body": b""})

    async def _hold(self, piece: bytes) -> None:
        if isinstance(piece, FailurePiece) and not self._started:
            raise piece.error
        self._held.append(piece)
        if not isinstance(piece, QuietPiece):
            self._start_now()
            await self._head_sent

    def _start_now(self) -> None:
        if not self._may_start.done():
            self._may_start.set_result(None)

    async def _send_piece(self, send: AsgiSend, piece: bytes) -> None:
        self._sending = True
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._sending = False
        self._sent_at = self._loop.time()

    # --- idle pieces

    def _set_idle_timer(self) -> None:
        due = self._sent_at + self.bounds.idle_seconds
        self._timers["idle"] = self._loop.call_at(due, self._on_idle)

    def _on_idle(self) -> None:
        """Send an idle piece if nothing was sent for so long.

        It is sent beside the next piece: a transport writes each message whole.
        """
        now = self._loop.time()
        if now - self._sent_at >= self.bounds.idle_seconds:
            self._sent_at = now
            if not self._sending:
                idle = self._send_piece(self._head_sent.result(), self.bounds.idle_piece)
                self._tasks[2:] = [self._start(idle)]
        self._set_idle_timer()

    # --- what ends it

    def drain(self) -> None:
        """The node stops: cut the answer unless it ends in its time."""
        seconds = self.bounds.drain_seconds
        self._timers["drain"] = self._loop.call_later(seconds, self._end, "drained")

    def _end(self, cause: StreamEnd) -> None:
        if not self._cut.done():
            self._cut.set_result(cause)

    async def _watch(self, receive: AsgiReceive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end("client_gone")

    async def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            await _cancel(task)
        if self._may_start.done():
            self._may_start.exception()  # marks it as seen
        closing = getattr(self._pieces, "aclose", None)
        if closing is not None:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await closing()
            except Exception:
                log.exception("api.stream_failed", endpoint=self._name)

    def _start(self, run: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.create_task(run, name=f"holdfast-stream-{self._name}")


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel the task and wait until it ends, at most ``CLOSE_SECONDS``.

    An iterator that ignores its cancellation must not keep the node from stopping.
    """
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CLOSE_SECONDS)
    if task.done() and not task.cancelled():
        task.exception()  # marks it as seen; the cause of the cut is reported instead
