"""A provider that speaks OpenAI's chat completions over HTTP: OpenAI, vLLM, Ollama, …

The operator chose it, so its address may be private; its answers are bounded all the
same (``drivers.streamed_http``). It follows no redirect, which would carry the key and
the conversation elsewhere. It has no clock: ``routing`` leaves the block when the time
is over, and that closes the connection at once.

A failure says what happened without any text of the request, the key or the address:
clients see it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress

import msgspec

from holdfast.bounds import KIB
from holdfast.clock import Clock
from holdfast.drivers.streamed_http import HttpAnswer, HttpFailure, HttpServer
from holdfast.resilience import retry_after_seconds
from holdfast.streaming.provider_stream import (
    NOT_SSE,
    ProviderStream,
    error_inside,
    failure_of_status,
)
from holdfast.streaming.providers.contract import (
    PouredChunks,
    ProviderChunk,
    ProviderFailed,
    ProviderRequest,
    TakeChunks,
)
from holdfast.streaming.reply import FailureCode, ReplyError

ANSWER_BYTES_MAX = 64 * KIB
"""How much is read of an answer that is not a stream: an error object."""
_ANSWER_SECONDS = 1.0
_IDLE_SECONDS = 3.0
"""How long an idle connection is reused. Servers close idle connections after 5 s or
more, and a POST on a closed one fails."""
_END_SECONDS = 0.05
"""How long to wait for the end of the body after ``[DONE]``: only then the connection
can serve another request, and the end usually arrives with it."""
_STREAMED = b',"stream":true,"stream_options":{"include_usage":true}'


class OpenAICompatibleProvider:
    """``pool`` as in the contract. ``key`` may be empty: then none is sent."""

    def __init__(self, name: str, pool: str, base_url: str, key: str, clock: Clock) -> None:
        self.name, self.pool = name, pool
        self._clock = clock
        headers = {
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            "User-Agent": "Holdfast",
            **({"Authorization": f"Bearer {key}"} if key else {}),
        }
        # the pools bound how many streams there are
        self._server = HttpServer(
            f"{base_url.rstrip('/')}/chat/completions", headers, _IDLE_SECONDS
        )

    async def close(self) -> None:
        self._server.close()

    def stream(self, request: ProviderRequest) -> _Stream:
        return _Stream(self, request)

    async def begin(self, request: ProviderRequest) -> HttpAnswer:
        """Send the request; its answer is a stream."""
        try:
            answer = await self._server.post(_body(request))
        except HttpFailure as failure:
            raise _failure(failure) from None
        del request  # it may be megabytes
        try:
            await self._check(answer)
        except BaseException:
            answer.close()
            raise
        return answer

    async def _check(self, answer: HttpAnswer) -> None:
        """ProviderFailed if the answer is not the stream that was asked for."""
        headers = answer.headers
        if answer.status != 200:
            retry_after = headers.get(b"retry-after", b"").decode("latin-1")
            raise failure_of_status(
                answer.status,
                await _beginning(answer),
                retry_after_seconds(retry_after, self._clock.now()),
            )
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise _failed("upstream_garbage", "the provider compressed an answer unasked")
        media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if media_type != b"text/event-stream":
            error = error_inside(await _beginning(answer))
            raise ProviderFailed(error or NOT_SSE)


def _body(request: ProviderRequest) -> bytes:
    parts = [b'{"model":', msgspec.json.encode(request.model), _STREAMED]
    for name, value in request.fields.items():
        parts += [b",", msgspec.json.encode(name), b":", value]
    return b"".join([*parts, b"}"])


class _Stream(AbstractAsyncContextManager[AsyncIterator[Sequence[ProviderChunk]]]):
    """See the contract. (No generator: those of contextlib take ten calls more.)"""

    __slots__ = ("_answer", "_chunks", "_provider", "_request")

    def __init__(self, provider: OpenAICompatibleProvider, request: ProviderRequest) -> None:
        self._provider = provider
        self._request: ProviderRequest | None = request

    async def __aenter__(self) -> _Chunks:
        request, self._request = self._request, None
        assert request is not None, "a stream is entered once"
        begun = self._provider.begin(request)
        del request
        self._answer = await begun
        self._chunks = _Chunks(self._answer)
        return self._chunks

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            if error is None and self._chunks.stream.ended:
                await _wait_for_end(self._answer)
        finally:
            self._answer.close()


class _Chunks(PouredChunks):
    """The chunks of an answer, as they arrive."""

    __slots__ = ("_answer", "stream")

    def __init__(self, answer: HttpAnswer) -> None:
        self._answer, self.stream = answer, ProviderStream()

    async def __anext__(self) -> Sequence[ProviderChunk]:
        stream = self.stream
        while not stream.ended:
            if stream.error is not None:
                raise ProviderFailed(stream.error)
            try:
                data = await self._answer.read()
            except HttpFailure as failure:
                raise _failure(failure) from None
            if data:
                if chunks := stream.feed(data):
                    return chunks
            elif stream.finished:
                break
            else:
                raise _truncated()
        raise StopAsyncIteration

    async def pour(self, take: TakeChunks) -> None:
        stream = self.stream

        def on_data(data: bytes) -> bool:
            if chunks := stream.feed(data):
                take(chunks)
            return stream.ended or stream.error is not None

        if not stream.ended and stream.error is None:
            try:
                await self._answer.pour(on_data)
            except HttpFailure as failure:
                raise _failure(failure) from None
        if stream.error is not None:
            raise ProviderFailed(stream.error)
        if not (stream.ended or stream.finished):
            raise _truncated()


async def _beginning(answer: HttpAnswer) -> bytes:
    """What arrives in a moment, within bounds: enough for an error object."""
    text = bytearray()
    with suppress(TimeoutError, HttpFailure):
        async with asyncio.timeout(_ANSWER_SECONDS):
            while len(text) < ANSWER_BYTES_MAX and (piece := await answer.read()):
                text += piece
    return bytes(text[:ANSWER_BYTES_MAX])


async def _wait_for_end(answer: HttpAnswer) -> None:
    if not answer.is_complete:
        with suppress(TimeoutError, HttpFailure):
            async with asyncio.timeout(_END_SECONDS):
                while await answer.read():
                    pass


def _failure(failure: HttpFailure) -> ProviderFailed:
    match failure.kind:
        case "invalid":
            return _failed("upstream_garbage", "the provider's answer is not valid HTTP")
        case "unreachable":
            return _failed("upstream_unavailable", f"the provider cannot be reached ({failure})")
        case "lost":
            return _failed("upstream_lost", "the connection to the provider broke")


def _truncated() -> ProviderFailed:
    return _failed("upstream_truncated", "the provider's stream ended without its end")


def _failed(code: FailureCode, message: str) -> ProviderFailed:
    return ProviderFailed(ReplyError(code, message))
