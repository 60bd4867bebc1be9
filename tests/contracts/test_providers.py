"""What every provider promises: the same stream, the same failures, an upstream that is
closed when its block is left.

``openai_compatible`` talks to a real server on loopback; ``scripted`` makes the same
up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from upstream import (
    DONE,
    Answer,
    Upstream,
    chunk,
    completion,
    event,
    silence,
    status,
    stream_of,
)

from holdfast.clock import SystemClock
from holdfast.streaming.provider_stream import ProviderStream
from holdfast.streaming.providers.contract import (
    Provider,
    ProviderChunk,
    ProviderFailed,
    ProviderRequest,
    pour,
)
from holdfast.streaming.providers.openai_compatible import OpenAICompatibleProvider
from holdfast.streaming.providers.script import Fault, ScriptSettings
from holdfast.streaming.providers.scripted import ScriptedProvider
from holdfast.streaming.reply import ReplyUsage

MESSAGES = b'[{"role":"user","content":"hi"}]'
WAIT_SECONDS = 0.2
"""How long a test waits to see that nothing comes."""


@asynccontextmanager
async def scripted(fault: Fault, after: int) -> AsyncIterator[Provider]:
    script = ScriptSettings(
        text="a b c d",
        tokens_per_second=0,
        fault=fault,
        fault_after_tokens=after,
        retry_after_seconds=7,
    )
    yield ScriptedProvider("p", "p", script, SystemClock())


def answer_with(fault: Fault, after: int) -> Answer:
    """What a server does that has this fault."""
    tokens = [event(chunk(text)) for text in ("a", " b", " c", " d")[:after]]
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    retry_after = b"Retry-After: 7"
    match fault:
        case "none":
            return completion("a", " b", " c", " d", prompt_tokens=len(MESSAGES) // 4)
        case "refuse":
            return status(400, b'{"error":{"message":"no","type":"invalid_request_error"}}')
        case "rate_limit":
            return status(429, b"{}", retry_after)
        case "overload":
            return status(503, b"<html>", retry_after)
        case "no_headers":
            return silence
        case "html":
            return status(200, b"<html>maintenance</html>", b"Content-Type: text/html")
        case "truncate":
            return stream_of(role, *tokens, then="close")
        case "reset":
            return stream_of(role, *tokens, then="reset")
        case "stall":
            return stream_of(role, *tokens, then="hang")
        case "error":
            return stream_of(role, *tokens, event({"error": {"message": "x", "type": "y"}}))


@asynccontextmanager
async def openai_compatible(fault: Fault, after: int) -> AsyncIterator[Provider]:
    async with Upstream(answer_with(fault, after)) as server:
        provider = OpenAICompatibleProvider("p", "p", server.base_url, "key", SystemClock())
        yield provider
        await provider.close()
        # nobody left a connection behind
        await server.until(lambda server: server.open_answers == 0)


ADAPTERS = {"scripted": scripted, "openai_compatible": openai_compatible}


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def ask() -> ProviderRequest:
    return ProviderRequest("m", {"messages": MESSAGES}, "r1")


async def read(provider: Provider, into: list[ProviderChunk]) -> None:
    """Read as routing does: the first batch, then the rest as it arrives."""

    def take(batch: Sequence[ProviderChunk]) -> None:
        assert batch
        into.extend(batch)

    async with asyncio.timeout(5), provider.stream(ask()) as chunks:
        take(await anext(chunks))
        await pour(chunks, take)


async def failure_of(provider: Provider, into: list[ProviderChunk]) -> ProviderFailed:
    with pytest.raises(ProviderFailed) as caught:
        await read(provider, into)
    return caught.value


def contents(chunks: Sequence[ProviderChunk]) -> int:
    return sum(chunk.content for chunk in chunks)


async def test_whole_answer_has_tokens_finish_usage_and_ends(adapter: str) -> None:
    chunks: list[ProviderChunk] = []
    async with ADAPTERS[adapter]("none", 0) as provider:
        await read(provider, chunks)
    shown = [chunk for chunk in chunks if chunk.data]
    assert contents(chunks) == 4
    assert [chunk.finish for chunk in shown] == [False] * (len(shown) - 1) + [True]
    (counts,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert counts == ReplyUsage(len(MESSAGES) // 4, 4, chunk=counts.chunk)
    assert b'"choices":[]' in counts.chunk.replace(b" ", b"")


async def test_provider_answers_many_at_once_and_again(adapter: str) -> None:
    async with ADAPTERS[adapter]("none", 0) as provider:
        for _ in range(2):
            answers: list[list[ProviderChunk]] = [[] for _ in range(20)]
            await asyncio.gather(*(read(provider, answer) for answer in answers))
            assert [contents(answer) for answer in answers] == [4] * 20


async def test_refused_request_is_final_and_brings_the_error_object(adapter: str) -> None:
    async with ADAPTERS[adapter]("refuse", 0) as provider:
        failure = await failure_of(provider, [])
    assert failure.final and not failure.capacity
    assert (failure.error.code, failure.error.status) == ("upstream_refused", 400)
    assert b'"type":"invalid_request_error"' in failure.error.body


@pytest.mark.parametrize("fault", ["rate_limit", "overload"])
async def test_no_room_is_capacity_with_retry_after(adapter: str, fault: Fault) -> None:
    async with ADAPTERS[adapter](fault, 0) as provider:
        failure = await failure_of(provider, [])
    assert failure.capacity and not failure.final
    assert failure.retry_after_seconds == 7
    assert (failure.error.code, failure.error.status) == ("upstream_unavailable", 503)


async def test_page_instead_of_a_stream_is_garbage(adapter: str) -> None:
    async with ADAPTERS[adapter]("html", 0) as provider:
        failure = await failure_of(provider, [])
    assert (failure.error.code, failure.error.status) == ("upstream_garbage", 502)
    assert not failure.final and not failure.capacity


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("truncate", "upstream_truncated"),
        ("reset", "upstream_lost"),
        ("error", "upstream_error"),
    ],
)
async def test_stream_that_breaks_gives_its_tokens_and_says_how(
    adapter: str, fault: Fault, code: str, after: int
) -> None:
    chunks: list[ProviderChunk] = []
    async with ADAPTERS[adapter](fault, after) as provider:
        failure = await failure_of(provider, chunks)
    assert failure.error.code == code
    assert failure.error.status == 502
    assert contents(chunks) == after
    assert bool(failure.error.body) == (fault == "error")


async def test_no_headers_leaves_the_caller_waiting_until_it_leaves(adapter: str) -> None:
    async with ADAPTERS[adapter]("no_headers", 0) as provider:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS), provider.stream(ask()):
                raise AssertionError("it was entered")


@pytest.mark.parametrize("after", [0, 2])
async def test_stall_leaves_the_caller_waiting_until_it_leaves(adapter: str, after: int) -> None:
    chunks: list[ProviderChunk] = []
    async with ADAPTERS[adapter]("stall", after) as provider:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS), provider.stream(ask()) as batches:
                async for batch in batches:
                    chunks += batch
    assert contents(chunks) == after


async def test_block_may_be_left_in_the_middle(adapter: str) -> None:
    async with ADAPTERS[adapter]("stall", 2) as provider, provider.stream(ask()) as batches:
        async for batch in batches:
            if contents(batch):
                break


async def test_entered_block_keeps_nothing_of_the_request(adapter: str) -> None:
    freed = asyncio.Event()

    class Fields(dict[str, bytes]):
        def __del__(self) -> None:
            freed.set()

    async with ADAPTERS[adapter]("stall", 2) as provider:
        block = provider.stream(ProviderRequest("m", Fields(messages=MESSAGES), "r1"))
        async with block:
            assert freed.is_set()


async def test_usage_is_none_if_the_provider_has_none() -> None:
    script = ScriptSettings(tokens=2, tokens_per_second=0, usage=False)
    provider: Provider = ScriptedProvider("p", "p", script, SystemClock())
    chunks: list[ProviderChunk] = []
    await read(provider, chunks)
    assert [chunk for chunk in chunks if chunk.usage] == []

    without = stream_of(event(chunk("a")), event(chunk(finish="stop")), event(DONE))
    async with Upstream(without) as server:
        other = OpenAICompatibleProvider("p", "p", server.base_url, "", SystemClock())
        chunks = []
        await read(other, chunks)
        await other.close()
    assert [chunk for chunk in chunks if chunk.usage] == []


async def test_both_send_chunks_of_the_same_form() -> None:
    """What the scripted provider makes up reads back as it was meant."""
    async with scripted("none", 0) as provider:
        made: list[ProviderChunk] = []
        await read(provider, made)
    bodies = [chunk.usage.chunk if chunk.usage else chunk.data for chunk in made]
    assert ProviderStream().feed(b"".join(map(event, bodies))) == made
