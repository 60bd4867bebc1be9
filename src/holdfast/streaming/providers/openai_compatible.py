"""A provider that speaks OpenAI's chat completions over HTTP: OpenAI, vLLM, Ollama, …

The operator chose it, so its address may be private; its answers are bounded all the
same (``drivers.outbound_http``). It follows no redirect, which would carry the key and
the conversation elsewhere. It has no clock: ``routing`` leaves the block when the time
is over, and that closes the connection at once.

A failure says what happened without any text of the request, the key or the address:
clients see it.

The import takes a fifth of a server's startup time; ``open_routing`` imports it only if
such a provider is set.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress

import aiohttp
import msgspec

from holdfast.bounds import KIB
from holdfast.clock import Clock
from holdfast.drivers.outbound_http import BoundedConnector, ExcessiveAnswer, open_session
from holdfast.resilience import retry_after_seconds
from holdfast.streaming.provider_stream import (
    NOT_SSE,
    ProviderStream,
    error_inside,
    failure_of_status,
)
from holdfast.streaming.providers.contract import ProviderChunk, ProviderFailed, ProviderRequest
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
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._clock = clock
        self._headers = {
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            "User-Agent": "Holdfast",
            **({"Authorization": f"Bearer {key}"} if key else {}),
        }
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def stream(
        self, request: ProviderRequest
    ) -> AsyncIterator[AsyncIterator[Sequence[ProviderChunk]]]:
        answer = await self._post(_body(request))
        del request  # it may be megabytes, and the stream may take minutes
        stream = ProviderStream()
        try:
            await self._check(answer)
            async with aclosing(_chunks(answer.content, stream)) as chunks:
                yield chunks
            if stream.ended:
                await _wait_for_end(answer.content)
        finally:
            answer.close()  # it is reused if its end has come

    async def _post(self, body: bytes) -> aiohttp.ClientResponse:
        if self._session is None:
            # the pools bound how many streams there are
            connector = BoundedConnector(limit=0, keepalive_timeout=_IDLE_SECONDS)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)
            self._session = open_session(connector, timeout=timeout)
        try:
            # a body that is a file is sent in pieces
            return await self._session.post(
                self._url, data=io.BytesIO(body), headers=self._headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError) as error:
            raise _failure(error) from None

    async def _check(self, answer: aiohttp.ClientResponse) -> None:
        """ProviderFailed if the answer is not the stream that was asked for."""
        if answer.status != 200:
            retry_after = answer.headers.get("Retry-After", "")
            raise failure_of_status(
                answer.status,
                await _beginning(answer.content),
                retry_after_seconds(retry_after, self._clock.now()),
            )
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise _failed("upstream_garbage", "the provider compressed an answer unasked")
        if answer.content_type != "text/event-stream":
            error = error_inside(await _beginning(answer.content))
            raise ProviderFailed(error or NOT_SSE)


def _body(request: ProviderRequest) -> bytes:
    parts = [b'{"model":', msgspec.json.encode(request.model), _STREAMED]
    for name, value in request.fields.items():
        parts += [b",", msgspec.json.encode(name), b":", value]
    return b"".join([*parts, b"}"])


async def _chunks(
    content: aiohttp.StreamReader, stream: ProviderStream
) -> AsyncGenerator[Sequence[ProviderChunk], None]:
    while data := await _read(content):
        if chunks := stream.feed(data):
            yield chunks
        if stream.error is not None:
            raise ProviderFailed(stream.error)
        if stream.ended:
            return
    if not stream.finished:
        raise _failed("upstream_truncated", "the provider's stream ended without its end")


async def _read(content: aiohttp.StreamReader) -> bytes:
    """What has arrived; empty at the end."""
    try:
        return await content.readany()
    except (aiohttp.ClientError, OSError) as error:
        raise _failure(error) from None


async def _beginning(content: aiohttp.StreamReader) -> bytes:
    """What arrives in a moment, within bounds: enough for an error object."""
    text = bytearray()
    with suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(_ANSWER_SECONDS):
            while len(text) < ANSWER_BYTES_MAX and (
                piece := await content.read(ANSWER_BYTES_MAX - len(text))
            ):
                text += piece
    return bytes(text)


async def _wait_for_end(content: aiohttp.StreamReader) -> None:
    with suppress(TimeoutError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(_END_SECONDS):
            while await content.readany():
                pass


def _failure(error: Exception) -> ProviderFailed:
    match error:
        case ExcessiveAnswer() | aiohttp.ClientResponseError():
            return _failed("upstream_garbage", "the provider's answer is not valid HTTP")
        case aiohttp.ClientConnectorError():
            kind = type(error.os_error).__name__
            return _failed("upstream_unavailable", f"the provider cannot be reached ({kind})")
        case _:
            return _failed("upstream_lost", "the connection to the provider broke")


def _failed(code: FailureCode, message: str) -> ProviderFailed:
    return ProviderFailed(ReplyError(code, message))
