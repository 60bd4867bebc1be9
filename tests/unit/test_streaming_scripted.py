"""The scripted provider: what it answers, at which pace, with which faults."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from holdfast.streaming.providers.contract import ProviderChunk, ProviderFailed, ProviderRequest
from holdfast.streaming.providers.script import INPUT_CHARACTERS_MAX, ScriptSettings
from holdfast.streaming.providers.scripted import ScriptedProvider
from proof.virtual_loop import WALL_CLOCK_START, LoopClock

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi there"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def scripted(**script: Any) -> ScriptedProvider:
    settings = msgspec.convert({"tokens_per_second": 0, **script}, ScriptSettings)
    return ScriptedProvider("s", "default", settings, LoopClock())


def request(messages: Any = HI, **fields: Any) -> ProviderRequest:
    everything = {"messages": messages, **fields}
    raw = {name: json.dumps(value).encode() for name, value in everything.items()}
    return ProviderRequest("m", raw, "r1")


async def ask(
    provider: ScriptedProvider, asked: ProviderRequest | None = None
) -> list[ProviderChunk]:
    async with provider.stream(asked or request()) as chunks:
        return [chunk async for batch in chunks for chunk in batch]


def deltas(chunks: list[ProviderChunk]) -> list[dict[str, Any]]:
    found = [json.loads(chunk.data)["choices"][0]["delta"] for chunk in chunks if chunk.data]
    return [delta for delta in found if delta]


def text_of(chunks: list[ProviderChunk]) -> str:
    return "".join(delta.get("content") or "" for delta in deltas(chunks))


def finish_of(chunks: list[ProviderChunk]) -> str:
    (finish,) = [chunk for chunk in chunks if chunk.finish]
    reason: str = json.loads(finish.data)["choices"][0]["finish_reason"]
    return reason


async def test_answer_repeats_what_the_user_wrote_last() -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "first"},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "image_url"}]},
        {"role": "assistant", "content": "yes?"},
    ]
    chunks = await ask(scripted(), request(messages))
    assert text_of(chunks) == "You wrote: Hello"
    assert finish_of(chunks) == "stop"
    long = [{"role": "user", "content": "x" * 10_000}]
    assert len(text_of(await ask(scripted(), request(long)))) == INPUT_CHARACTERS_MAX + 11


async def test_chunks_have_the_form_of_openai() -> None:
    first, *_ = await ask(scripted())
    assert json.loads(first.data) == {
        "id": "chatcmpl-r1",
        "object": "chat.completion.chunk",
        "created": WALL_CLOCK_START,
        "model": "m",
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        ],
    }


@pytest.mark.parametrize(("tokens", "text"), [(0, "a b"), (1, "a"), (5, "a ba ba")])
async def test_text_is_cut_or_repeated_to_its_length(tokens: int, text: str) -> None:
    assert text_of(await ask(scripted(text="a b", tokens=tokens))) == text


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_token_limit_of_the_request_cuts_the_answer(name: str) -> None:
    chunks = await ask(scripted(tokens=10, finish_reason="stop"), request(**{name: 3}))
    assert sum(chunk.content for chunk in chunks) == 3
    assert finish_of(chunks) == "length"
    assert finish_of(await ask(scripted(tokens=3), request(**{name: 3}))) == "stop"


async def test_usage_is_reported_unless_it_is_switched_off() -> None:
    usage = (await ask(scripted(tokens=7)))[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(json.dumps(HI)) // 4, 7)
    assert json.loads(usage.chunk)["usage"]["total_tokens"] == usage.prompt_tokens + 7
    assert [c for c in await ask(scripted(usage=False)) if c.usage] == []


async def test_finish_reason_is_settable() -> None:
    assert finish_of(await ask(scripted(finish_reason="content_filter"))) == "content_filter"


async def test_first_function_is_called_until_its_result_is_there() -> None:
    provider = scripted(tool_arguments='{"city":"Bern"}')
    chunks = await ask(provider, request(tools=TOOLS))
    begin, rest = (delta["tool_calls"][0] for delta in deltas(chunks)[1:])
    assert begin["function"]["name"] == "weather"
    assert begin["id"]
    assert rest["function"]["arguments"] == '{"city":"Bern"}'
    assert finish_of(chunks) == "tool_calls"
    assert sum(chunk.content for chunk in chunks) == 2

    result = [*HI, {"role": "tool", "tool_call_id": begin["id"], "content": "sunny"}]
    assert text_of(await ask(provider, request(result, tools=TOOLS))) == "You wrote: Hi there"
    assert text_of(await ask(provider)) == "You wrote: Hi there"


async def test_tokens_come_at_their_pace() -> None:
    times = []
    provider = scripted(tokens=5, tokens_per_second=10, first_token_seconds=2)
    async with provider.stream(request()) as chunks:
        async for batch in chunks:
            times += [asyncio.get_running_loop().time()] * sum(chunk.content for chunk in batch)
    assert times == pytest.approx([2.0, 2.1, 2.2, 2.3, 2.4])


async def test_late_tokens_come_together() -> None:
    sizes = []
    async with scripted(tokens=30, tokens_per_second=10).stream(request()) as chunks:
        async for batch in chunks:
            sizes.append(sum(chunk.content for chunk in batch))
            if len(sizes) == 1:
                await asyncio.sleep(1.5)
    assert sizes[1] == 15
    assert sum(sizes) == 30


async def test_fault_hits_as_many_requests_as_it_says() -> None:
    provider = scripted(fault="refuse", fault_count=2)
    for _ in range(2):
        with pytest.raises(ProviderFailed):
            await ask(provider)
    assert text_of(await ask(provider)) == "You wrote: Hi there"


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": "text"},
        {"messages": [1]},
        {"messages": [{"role": 1}]},
        {"messages": HI, "max_tokens": -1},
        {"messages": HI, "max_tokens": "many"},
        {"messages": HI, "tools": [{"type": "web_search"}]},
    ],
)
async def test_request_that_cannot_be_read_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ProviderFailed) as caught:
        await ask(scripted(tool_arguments="{}"), request(**fields))
    assert caught.value.final
    assert caught.value.error.status == 400
    assert caught.value.error.body


async def test_depth_bomb_in_a_request_is_refused() -> None:
    bomb = b'[{"role":"user","content":' + b"[" * 100_000 + b"]" * 100_000 + b"}]"
    with pytest.raises(ProviderFailed) as caught:
        await ask(scripted(), ProviderRequest("m", {"messages": bomb}, "r1"))
    assert caught.value.error.status == 400
