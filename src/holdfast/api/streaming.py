"""Streamed answers: status and headers, the pieces, and what ends them.

An answer ends when its iterator ends. It is cut when the client disconnects, when its
deadline is over, when the node has drained long enough, or when the iterator fails
after status and headers have left. The client sees a cut as a body without its last
chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Literal, TypeVar

from holdfast.api.endpoint import Call, Endpoint
from holdfast.api.request import AsgiReceive, AsgiSend, RawHeaders
from holdfast.errors import HoldfastError, InvalidMessage, Unavailable
from holdfast.telemetry import log

StreamEnd = Literal["complete", "client_gone", "deadline", "drained", "failed"]
CLOSE_SECONDS = 1.0
"""How long an iterator that is cut may take to clean up."""
T = TypeVar("T")


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
        self, endpoint: Endpoint, call: Call, pieces: AsyncIterator[bytes], receive: AsgiReceive
    ) -> StreamedBody:
        """The answer, once it may be sent; raises what the iterator raised."""
        body = StreamedBody(endpoint, call, pieces, receive)
        self._running.add(body)
        self._empty.clear()
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
        """Let running answers end, each within its endpoint's ``drain_seconds``."""
        self.draining.set()
        await self._empty.wait()


class StreamedBody:
    """One streamed answer."""

    def __init__(
        self, endpoint: Endpoint, call: Call, pieces: AsyncIterator[bytes], receive: AsgiReceive
    ) -> None:
        assert endpoint.stream is not None, "only such endpoints are streamed"
        self._endpoint, self._call = endpoint, call
        self.stream = endpoint.stream
        self._pieces = pieces
        self._next = self._start(self._pull())
        self._cut = self._start(self._wait_for_cut(receive))

    async def begin(self) -> None:
        """Wait for the first piece or the end, at most ``first_piece_seconds``.

        After that the answer starts without a piece.
        """
        await asyncio.wait(
            [self._next, self._cut],
            timeout=self.stream.first_piece_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._next.done():
            self._next.result()
        elif self._cut.done():
            raise _cut_before_start(self._cut.result())

    async def send(self, status: int, headers: RawHeaders, send: AsgiSend) -> StreamEnd:
        """Send status, headers and every piece; return what ended the answer."""
        sending = self._start(self._send(status, headers, send))
        await asyncio.wait([sending, self._cut], return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            await _cancel(sending)
            return self._cut.result()
        error = sending.exception()
        if error is None:
            return "complete"
        log.error("api.stream_failed", endpoint=self._endpoint.name, exc_info=error)
        return "failed"

    async def _send(self, status: int, headers: RawHeaders, send: AsgiSend) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": headers,
                # Our own key, not ASGI's: gateway/transport/responses.py reads it.
                "unread_seconds_max": self.stream.unread_seconds_max,
            }
        )
        if not self._next.done():
            await send({"type": "http.response.body", "body": b"", "more_body": True})
        while (piece := await self._next) is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._next = self._start(self._pull())
        await send({"type": "http.response.body", "body": b""})

    async def close(self) -> None:
        await _cancel(self._cut)
        await _cancel(self._next)
        closing = getattr(self._pieces, "aclose", None)
        if closing is not None:
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await closing()
            except Exception:
                log.exception("api.stream_failed", endpoint=self._endpoint.name)

    async def _pull(self) -> bytes | None:
        return await anext(self._pieces, None)

    async def _wait_for_cut(self, receive: AsgiReceive) -> StreamEnd:
        gone = self._start(_wait_for_disconnect(receive))
        late = self._start(self._wait_for_time_limit())
        try:
            await asyncio.wait([gone, late], return_when=asyncio.FIRST_COMPLETED)
            return "client_gone" if gone.done() else late.result()
        finally:
            await _cancel(gone)
            await _cancel(late)

    async def _wait_for_time_limit(self) -> StreamEnd:
        """Wait until the deadline is over or the node has drained long enough."""
        try:
            async with asyncio.timeout(self._call.seconds_left):
                await self._call.draining.wait()
                await asyncio.sleep(self.stream.drain_seconds)
        except TimeoutError:
            return "deadline"
        return "drained"

    def _start(self, run: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return asyncio.create_task(run, name=f"holdfast-stream-{self._endpoint.name}")


async def _wait_for_disconnect(receive: AsgiReceive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Task[Any]) -> None:
    """Cancel the task and wait until it ends, at most ``CLOSE_SECONDS``.

    An iterator that ignores its cancellation must not keep the node from stopping.
    """
    task.cancel()
    await asyncio.wait([task], timeout=CLOSE_SECONDS)
    if task.done() and not task.cancelled():
        task.exception()  # marks it as seen; the cause of the cut is reported instead
