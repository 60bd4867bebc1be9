"""A provider over HTTP against servers that behave well, oddly and badly: each ends in
the right chunks or in one failure, never in a hang, and no byte of it is unbounded.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from log_capture import logging_to
from tls import certificate, issued_certificate
from upstream import (
    DONE,
    HEAD,
    UNBOUNDED_HEAD,
    After,
    Answer,
    Received,
    Upstream,
    chunk,
    chunked,
    completion,
    event,
    in_turn,
    raw,
    status,
    stream_of,
    usage,
)

from holdfast.bounds import MIB
from holdfast.clock import SystemClock
from holdfast.streaming.pool.contract import DEFAULT_POOL
from holdfast.streaming.providers.contract import ProviderChunk, ProviderFailed, ProviderRequest
from holdfast.streaming.providers.openai_compatible import OpenAICompatibleProvider
from holdfast.streaming.providers.routing import Routing, open_routing
from holdfast.streaming.reply import ReplyUsage
from holdfast.streaming.settings import (
    ModelSettings,
    ProviderSettings,
    QueueFailoverSettings,
    ReplyClocks,
    StreamingSettings,
)

KEY = "sk-very-secret"
TOKEN, FINISH, END = event(chunk("a")), event(chunk(finish="stop")), event(DONE)
WHOLE = TOKEN + FINISH + END


class SharedLease:
    """A lease of the only pool there is."""

    pool = DEFAULT_POOL

    async def move(self, pool: str) -> None:
        raise AssertionError(f"moved to {pool}")


@asynccontextmanager
async def provider_of(server: Upstream, key: str = KEY) -> AsyncIterator[OpenAICompatibleProvider]:
    provider = OpenAICompatibleProvider("p", DEFAULT_POOL, server.base_url, key, SystemClock())
    try:
        yield provider
    finally:
        await provider.close()


def route_to(provider: OpenAICompatibleProvider) -> Routing:
    """To this provider only, once."""
    models = [ModelSettings("m", ("p:x",))]
    failover, clock = QueueFailoverSettings(max_retries=0), SystemClock()
    return Routing([provider], models, ReplyClocks(), failover, clock, random.Random(1))


async def ask(
    provider: OpenAICompatibleProvider, fields: dict[str, bytes] | None = None
) -> list[ProviderChunk]:
    request = ProviderRequest("gpt-x", fields or {"messages": b"[]"}, "r1")
    async with asyncio.timeout(10), provider.stream(request) as chunks:
        return [chunk async for batch in chunks for chunk in batch]


async def answered(answer: Answer) -> list[ProviderChunk]:
    async with Upstream(answer) as server, provider_of(server) as provider:
        return await ask(provider)


async def failed(answer: Answer) -> ProviderFailed:
    with pytest.raises(ProviderFailed) as caught:
        await answered(answer)
    failure = caught.value
    assert KEY not in f"{failure} {failure.error}"
    assert "127.0.0.1" not in f"{failure} {failure.error}"
    return failure


def data_of(chunks: list[ProviderChunk]) -> list[bytes]:
    return [chunk.data for chunk in chunks if chunk.data]


def endless(head: bytes, again: bytes) -> Answer:
    """``again`` without end, as fast as it is read."""

    async def answer(_request: Received, writer: asyncio.StreamWriter) -> After:
        writer.write(head)
        while True:
            writer.write(again * max(1, 0x10000 // len(again)))
            await writer.drain()

    return answer


# What is sent


async def test_request_is_the_clients_fields_with_model_stream_and_usage() -> None:
    fields = {"messages": b'[ {"role":"user"} ]', "temperature": b"0.50", "x_new": b"[1]"}
    async with Upstream(completion("a")) as server, provider_of(server) as provider:
        await ask(provider, fields)
        (request,) = server.requests
    assert b'"messages":[ {"role":"user"} ],"temperature":0.50,"x_new":[1]}' in request.body
    assert request.fields["model"] == "gpt-x"
    assert request.fields["stream"] is True
    assert request.fields["stream_options"] == {"include_usage": True}
    assert request.head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"Accept-Encoding: identity" in request.head


@pytest.mark.parametrize("key", [KEY, ""])
async def test_key_is_sent_if_there_is_one(key: str) -> None:
    async with Upstream(completion("a")) as server, provider_of(server, key) as provider:
        await ask(provider)
        head = server.requests[0].head
    assert (f"Authorization: Bearer {KEY}".encode() in head) == bool(key)
    assert (b"Authorization" in head) == bool(key)


@pytest.mark.filterwarnings("error")
async def test_request_of_4_mib_arrives_whole() -> None:
    text = b'"' + b"a" * (4 * MIB) + b'"'
    async with Upstream(completion("a")) as server, provider_of(server) as provider:
        await ask(provider, {"messages": text})
        assert server.requests[0].body.endswith(text + b"}")


async def test_log_of_a_failure_has_neither_key_nor_request() -> None:
    output = io.StringIO()
    bad = status(401, b'{"error":{"message":"Incorrect API key: sk-very-secret"}}')
    async with Upstream(bad) as server, provider_of(server) as provider:
        route = route_to(provider)
        fields = {"messages": b'[{"content":"a private matter"}]'}
        with logging_to(output), pytest.raises(ProviderFailed):
            await route.stream(ProviderRequest("m", fields, "r1"), SharedLease()).pour(print)
        trouble = route.status()[0].trouble
    assert "streaming.provider_failed" in output.getvalue()
    assert "401" in trouble
    for secret in (KEY, "private"):
        assert secret not in output.getvalue() + trouble


# Streams that are odd and right


@pytest.mark.parametrize("end", [b"\r\n", b"\r"], ids=["crlf", "cr"])
async def test_provider_with_other_line_ends_is_read(end: bytes) -> None:
    chunks = await answered(stream_of(WHOLE.replace(b"\n", end)))
    assert data_of(chunks) == [TOKEN[6:-2], FINISH[6:-2]]


async def test_provider_with_a_byte_order_mark_is_read() -> None:
    assert len(data_of(await answered(stream_of(b"\xef\xbb\xbf" + WHOLE)))) == 2


async def test_provider_with_comments_is_read() -> None:
    answer = stream_of(b": ping\n\n", TOKEN, b":\n", FINISH, b": bye\n\n", END)
    assert len(data_of(await answered(answer))) == 2


async def test_provider_with_id_and_retry_lines_is_read() -> None:
    answer = stream_of(b"id: 1\nretry: 10\nevent: message\n" + TOKEN, b"id: 2\n" + FINISH, END)
    assert len(data_of(await answered(answer))) == 2


async def test_provider_with_duplicate_role_chunks_is_read() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    chunks = await answered(stream_of(role, role, TOKEN, FINISH, END))
    assert [chunk.content for chunk in chunks if chunk.data] == [False, False, True, False]


async def test_provider_with_usage_before_the_finish_is_read() -> None:
    chunks = await answered(stream_of(TOKEN, event(usage(5, 1)), FINISH, END))
    assert [chunk.usage for chunk in chunks if chunk.usage] == [
        ReplyUsage(5, 1, chunk=json.dumps(usage(5, 1)).encode())
    ]
    assert data_of(chunks) == [TOKEN[6:-2], FINISH[6:-2]]


async def test_provider_with_two_choices_gives_only_the_one_asked_for() -> None:
    both = {
        "choices": [
            {"index": 1, "delta": {"content": "other"}, "finish_reason": "stop"},
            {"index": 0, "delta": {"content": "mine"}},
        ]
    }
    other = {"choices": [{"index": 1, "delta": {"content": "other"}}]}
    chunks = await answered(stream_of(event(both), event(other), FINISH, END))
    assert b"other" not in b"".join(data_of(chunks))
    assert [chunk.finish for chunk in chunks if chunk.data] == [False, True]


async def test_finish_without_done_is_a_complete_answer() -> None:
    for answer in (stream_of(TOKEN, FINISH), raw(UNBOUNDED_HEAD, TOKEN, FINISH)):
        assert len(data_of(await answered(answer))) == 2


async def test_done_without_finish_is_a_complete_answer() -> None:
    assert len(data_of(await answered(stream_of(TOKEN, END)))) == 1


async def test_stream_of_many_small_chunks_is_not_taken_for_an_attack() -> None:
    """The sizes of 20,000 chunks are far more than the bytes that one answer may have
    around its body.
    """
    chunks = await answered(stream_of(*[TOKEN] * 20_000, FINISH, END))
    assert sum(chunk.content for chunk in chunks) == 20_000


async def test_body_cut_at_every_byte_gives_the_same_chunks() -> None:
    pieces = [chunked(WHOLE[i : i + 1]) for i in range(len(WHOLE))]
    chunks = await answered(raw(HEAD, *pieces, b"0\r\n\r\n"))
    assert data_of(chunks) == [TOKEN[6:-2], FINISH[6:-2]]


# Streams and answers that are wrong


@pytest.mark.parametrize("media_type", [b"text/html", b"text/event-stream"])
async def test_page_instead_of_a_stream_is_garbage(media_type: bytes) -> None:
    page = b"<!DOCTYPE html>\n<html><body>502 Bad Gateway</body></html>\n"
    failure = await failed(status(200, page, b"Content-Type: " + media_type))
    assert failure.error.code == "upstream_garbage"


async def test_gzip_nobody_asked_for_is_garbage() -> None:
    headers = (b"Content-Type: text/event-stream", b"Content-Encoding: gzip")
    failure = await failed(status(200, gzip.compress(WHOLE), *headers))
    assert failure.error.code == "upstream_garbage"
    assert "compressed" in failure.error.message
    undeclared = await failed(status(200, gzip.compress(WHOLE) + b"\n", headers[0]))
    assert undeclared.error.code == "upstream_garbage"


async def test_event_of_10_mb_is_garbage_long_before_its_end() -> None:
    sent = 0

    async def answer(_request: Received, writer: asyncio.StreamWriter) -> After:
        nonlocal sent
        writer.write(HEAD + chunked(b"data: "))
        while sent < 10_000_000:
            writer.write(chunked(b"a" * 10_000))
            await writer.drain()
            sent += 10_000
        return "close"

    failure = await failed(answer)
    assert failure.error.code == "upstream_garbage"
    assert sent < 9_000_000


async def test_half_an_event_at_the_end_is_a_truncated_stream() -> None:
    failure = await failed(stream_of(TOKEN, FINISH[:-1], then="close"))
    assert failure.error.code == "upstream_truncated"


async def test_clean_close_without_an_end_is_a_truncated_stream() -> None:
    for answer in (stream_of(TOKEN), raw(UNBOUNDED_HEAD, TOKEN), stream_of()):
        assert (await failed(answer)).error.code == "upstream_truncated"


async def test_body_that_is_cut_off_is_a_lost_connection() -> None:
    for answer in (
        raw(HEAD, chunked(TOKEN)),
        raw(HEAD, b"ffff\r\n" + TOKEN),
        raw(HEAD.replace(b"Transfer-Encoding: chunked", b"Content-Length: 5000"), TOKEN),
    ):
        assert (await failed(answer)).error.code == "upstream_lost"


@pytest.mark.parametrize(
    "answer",
    [
        status(200, b'{"error":{"message":"overloaded"}}', b"Content-Type: application/json"),
        stream_of(event({"error": {"message": "overloaded"}})),
    ],
    ids=["json", "event"],
)
async def test_error_inside_a_200_is_the_providers_error(answer: Answer) -> None:
    error = (await failed(answer)).error
    assert error.code == "upstream_error"
    assert json.loads(error.body) == {"message": "overloaded"}


async def test_whole_completion_instead_of_a_stream_is_garbage() -> None:
    body = b'{"object":"chat.completion","choices":[{"message":{"content":"hi"}}]}'
    failure = await failed(status(200, body, b"Content-Type: application/json"))
    assert failure.error.code == "upstream_garbage"


@pytest.mark.parametrize("code", [301, 302, 307, 308])
async def test_redirect_is_garbage_and_is_not_followed(code: int) -> None:
    async with Upstream(completion("a")) as other:
        location = f"Location: {other.base_url}/chat/completions".encode()
        failure = await failed(status(code, b"", location))
        assert other.requests == []
    assert failure.error.code == "upstream_garbage"


@pytest.mark.parametrize(
    ("head", "again"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"X: a\r\n"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (HEAD + b"1;", b"a"),
        (HEAD + b"0\r\n", b"X: a\r\n"),
    ],
    ids=["headers", "one header", "interim answers", "chunk extension", "trailers"],
)
async def test_endless_headers_are_garbage(head: bytes, again: bytes) -> None:
    assert (await failed(endless(head, again))).error.code == "upstream_garbage"


async def test_what_is_not_http_is_garbage() -> None:
    assert (await failed(raw(b"SSH-2.0-OpenSSH_9.6\r\n"))).error.code == "upstream_garbage"


async def test_error_body_without_end_is_read_up_to_its_bound() -> None:
    began = time.monotonic()
    head = b"HTTP/1.1 400 No\r\nTransfer-Encoding: chunked\r\n\r\n"
    failure = await failed(endless(head, chunked(b"a" * 4096)))
    assert (failure.error.code, failure.error.body) == ("upstream_refused", b"")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("code", [401, 402, 403, 404, 408])
async def test_fault_of_the_operator_is_not_the_clients(code: int) -> None:
    failure = await failed(status(code, b'{"error":{"message":"Incorrect API key: sk-very"}}'))
    assert not failure.final and not failure.capacity
    assert (failure.error.code, failure.error.status) == ("upstream_unavailable", 502)
    assert failure.error.body == b""


@pytest.mark.parametrize("code", [400, 413, 422])
async def test_refusal_keeps_its_status(code: int) -> None:
    failure = await failed(status(code, b'{"detail":"too long"}'))
    assert failure.final
    assert (failure.error.code, failure.error.status) == ("upstream_refused", code)
    assert failure.error.body == b'{"detail":"too long"}'


@pytest.mark.parametrize("code", [500, 502, 504])
async def test_server_error_is_unavailable(code: int) -> None:
    failure = await failed(status(code))
    assert not failure.final and not failure.capacity
    assert (failure.error.code, failure.error.status) == ("upstream_unavailable", 502)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(b"Retry-After: 12", 12), (b"Retry-After: soon", None), (b"X: y", None)],
)
async def test_retry_after_of_a_provider_without_room(header: bytes, seconds: float | None) -> None:
    failure = await failed(status(529, b"", header))
    assert failure.capacity
    assert failure.retry_after_seconds == seconds


async def test_connection_refused_is_unavailable() -> None:
    async with Upstream(completion("a")) as server:
        pass
    async with provider_of(server) as provider:
        with pytest.raises(ProviderFailed) as caught:
            await ask(provider)
    assert caught.value.error.code == "upstream_unavailable"


def tls_upstream(folder: Path, *, signs_itself: bool = False) -> tuple[Upstream, Path]:
    """A server with a certificate for 127.0.0.1, and who issued that: a private CA."""
    if signs_itself:
        cert, key = certificate(folder)
        ca = cert
    else:
        ca, cert, key = issued_certificate(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return Upstream(completion("a", "b"), tls=context), ca


@pytest.mark.parametrize("signs_itself", [True, False])
async def test_provider_with_a_good_certificate_streams_over_tls(
    signs_itself: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream, ca = tls_upstream(tmp_path, signs_itself=signs_itself)
    monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    async with upstream as server, provider_of(server) as provider:
        assert server.base_url.startswith("https://")
        for _ in range(2):
            assert len(data_of(await ask(provider))) == 3
        assert server.connections == 1


@pytest.mark.parametrize(
    ("host", "trusted", "signs_itself", "reason"),
    [
        ("127.0.0.1", False, True, "is not trusted: self-signed certificate"),
        ("127.0.0.1", False, False, "is not trusted: unable to get local issuer certificate"),
        ("localhost", True, False, "is for another host"),
    ],
)
async def test_provider_with_a_bad_certificate_gets_no_request_and_the_log_says_why(
    host: str,
    trusted: bool,
    signs_itself: bool,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upstream, ca = tls_upstream(tmp_path, signs_itself=signs_itself)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
    output = io.StringIO()
    async with upstream as server:
        url = server.base_url.replace("127.0.0.1", host)
        route = route_to(OpenAICompatibleProvider("p", DEFAULT_POOL, url, KEY, SystemClock()))
        with logging_to(output), pytest.raises(ProviderFailed) as caught:
            await route.stream(ProviderRequest("m", {}, "r1"), SharedLease()).pour(print)
        assert server.requests == []
    error = caught.value.error
    assert (error.code, error.status) == ("upstream_unavailable", 502)
    assert error.message == f"the provider cannot be reached (its certificate {reason})"
    assert error.message in output.getvalue() and '"provider":"p"' in output.getvalue()
    assert route.status()[0].trouble == error.message


async def test_provider_that_speaks_no_tls_gets_no_request() -> None:
    received = b""

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        received += await reader.read(1000)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    provider = OpenAICompatibleProvider("p", DEFAULT_POOL, url, KEY, SystemClock())
    with pytest.raises(ProviderFailed, match="cannot be reached \\(no TLS: ") as caught:
        await ask(provider)
    server.close()
    assert caught.value.error.code == "upstream_unavailable"
    assert received.startswith(b"\x16\x03") and KEY.encode() not in received


async def test_reset_before_the_headers_is_a_lost_connection() -> None:
    assert (await failed(raw(then="reset"))).error.code == "upstream_lost"
    assert (await failed(raw(then="close"))).error.code == "upstream_lost"


# Connections


async def test_connection_of_a_complete_answer_is_used_again() -> None:
    async with Upstream(completion("a", "b")) as server, provider_of(server) as provider:
        for _ in range(5):
            await ask(provider)
        assert server.connections == 1
        assert len(server.requests) == 5


async def test_connection_whose_end_comes_a_moment_later_is_used_again() -> None:
    async def answer(_request: Received, writer: asyncio.StreamWriter) -> After:
        writer.write(HEAD + chunked(WHOLE))
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(b"0\r\n\r\n")
        return "keep"

    async with Upstream(answer) as server, provider_of(server) as provider:
        for _ in range(3):
            await ask(provider)
        assert server.connections == 1


async def test_connection_of_a_failed_answer_is_not_used_again() -> None:
    garbage = stream_of(event(b"garbage"), TOKEN, then="hang")
    answer = in_turn(garbage, completion("a"))
    async with Upstream(answer) as server, provider_of(server) as provider:
        with pytest.raises(ProviderFailed):
            await ask(provider)
        assert len(data_of(await ask(provider))) == 2
        assert server.connections == 2


async def _leave_block(provider: OpenAICompatibleProvider) -> None:
    request = ProviderRequest("m", {}, "r1")
    async with provider.stream(request) as chunks:
        await anext(chunks)


async def _cancel_read(provider: OpenAICompatibleProvider) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async with provider.stream(ProviderRequest("m", {}, "r1")) as chunks:
            async for _ in chunks:
                begun.set()

    reading = asyncio.create_task(read())
    await begun.wait()
    reading.cancel()
    await asyncio.wait([reading])


@pytest.mark.parametrize("leave", [_leave_block, _cancel_read])
async def test_leaving_closes_the_upstream_at_once(
    leave: Callable[[OpenAICompatibleProvider], Awaitable[None]],
) -> None:
    async with (
        Upstream(stream_of(TOKEN, then="hang")) as server,
        provider_of(server) as provider,
    ):
        await leave(provider)
        left_at = time.monotonic()
        await server.until(lambda server: len(server.left) == 1)
        assert server.left[0] - left_at < 0.5


async def test_cancelled_connection_attempt_leaves_nothing_behind() -> None:
    async with Upstream(raw(then="hang")) as server, provider_of(server) as provider:
        asking = asyncio.create_task(ask(provider))
        await server.until(lambda server: server.open_answers == 1)
        asking.cancel()
        await server.until(lambda server: server.open_answers == 0)
        with pytest.raises(asyncio.CancelledError):
            await asking


# Through routing

PADDING = b"a" * 10_000
BAD: dict[str, Answer] = {
    "html": status(200, b"<html></html>", b"Content-Type: text/html"),
    "gzip": status(
        200,
        gzip.compress(WHOLE),
        b"Content-Type: text/event-stream",
        b"Content-Encoding: gzip",
    ),
    "10 MB event": stream_of(b"data: ", *[PADDING] * 1000),
    "half an event": stream_of(TOKEN[:-1]),
    "error inside": stream_of(event({"error": {"message": "no"}})),
    "redirect": status(302, b"", b"Location: http://127.0.0.1:9/"),
    "endless headers": endless(b"HTTP/1.1 200 OK\r\n", b"X: a\r\n"),
    "no headers": raw(then="hang"),
    "no token": stream_of(b": alive\n\n", then="hang"),
    "no end": stream_of(then="close"),
    "nothing but the end": stream_of(END),
    "number out of range": stream_of(event(b'{"x":1e400,"choices":[{"delta":{"content":"a"}}]}')),
    "reset": stream_of(then="reset"),
    "no room": status(429, b"", b"Retry-After: 60"),
    "bad key": status(401),
    "server error": status(500),
}


@pytest.mark.parametrize("kind", BAD)
async def test_bad_provider_is_followed_by_the_next_one(kind: str) -> None:
    async with Upstream(BAD[kind]) as bad_server, Upstream(completion("good")) as good_server:
        settings = StreamingSettings(
            providers=(
                ProviderSettings("bad", base_url=bad_server.base_url),
                ProviderSettings("good", base_url=good_server.base_url),
            ),
            models=(ModelSettings("m", ("bad:m", "good:m")),),
            clocks=ReplyClocks(headers_seconds=0.3, first_token_seconds=0.5),
        )
        route = open_routing(settings, {}, SystemClock(), random.Random(1))
        stream = route.stream(ProviderRequest("m", {"messages": b"[]"}, "r1"), SharedLease())
        chunks = list[ProviderChunk]()
        async with asyncio.timeout(10):
            await stream.pour(chunks.extend)
        assert stream.provider == "good"
        assert [json.loads(data)["choices"][0]["delta"] for data in data_of(chunks)] == [
            {"content": "good"},
            {},
        ]
        await bad_server.until(lambda server: server.open_answers == 0)
        await route.close()
