"""openai-python, unmodified, and curl against a real node with scripted models.

Every failure is read as most programs read: the text alone, without a look at what
kind of event it came in. A failure must then be an exception, never a shorter text.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from scripted_node import SCRIPTS, STREAMING, ScriptedNode, scripted_node, until

from holdfast.streaming.pool.contract import PoolSettings
from holdfast.streaming.settings import QueueFailoverSettings, StreamingSettings
from proof.proxy import Proxy

HELLO: Any = [{"role": "user", "content": "hello wide world"}]
TEXT = "You wrote: hello wide world"
WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


class World(ScriptedNode):
    """The node, and openai-python."""

    client: Any

    def other(self, base_url: str = "", **options: Any) -> Any:
        return openai.AsyncOpenAI(
            base_url=base_url or self.base_url,
            api_key=self.token,
            **{"max_retries": 0, **options},
        )


@asynccontextmanager
async def serving(state: Path, streaming: StreamingSettings = STREAMING) -> AsyncIterator[World]:
    async with scripted_node(state, streaming) as node:
        world = World(node.node, node.token)
        async with world.other() as client:
            world.client = client
            yield world


async def chat_text(client: Any, model: str) -> str:
    """The text of a streamed chat completion, and nothing else of it."""
    text = ""
    async for chunk in await client.chat.completions.create(
        model=model, messages=HELLO, stream=True
    ):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
    return text


async def response_text(client: Any, model: str) -> str:
    text = ""
    async for event in await client.responses.create(model=model, input=HELLO, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
    return text


async def test_chat_streams_answers_whole_and_calls_tools(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        client = world.client
        assert [model.id async for model in client.models.list()] == list(SCRIPTS)
        assert await chat_text(client, "quick") == TEXT
        whole = await client.chat.completions.create(model="quick", messages=HELLO)
        assert whole.choices[0].message.content == TEXT
        assert whole.choices[0].finish_reason == "stop" and whole.usage.completion_tokens > 0
        options: Any = {"include_usage": True}
        asked = {"model": "quick", "messages": HELLO, "stream": True}
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(**asked, stream_options=options)
        ]
        assert chunks[-1].usage.total_tokens > 0 and not chunks[-1].choices
        without = [chunk async for chunk in await client.chat.completions.create(**asked)]
        assert not any(chunk.usage for chunk in without)

        tools: Any = [{"type": "function", "function": WEATHER}]
        called = await client.chat.completions.create(model="tools", messages=HELLO, tools=tools)
        message = called.choices[0].message
        assert called.choices[0].finish_reason == "tool_calls"
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo"}
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        history = [*HELLO, message.model_dump(exclude_none=True), result]
        final = await client.chat.completions.create(model="tools", messages=history, tools=tools)
        assert final.choices[0].message.content == TEXT
        async with client.chat.completions.stream(
            model="tools", messages=HELLO, tools=tools
        ) as stream:
            streamed = await stream.get_final_completion()
        assert streamed.choices[0].message.tool_calls[0].function.name == "weather"


async def test_responses_stream_answer_whole_call_tools_and_resume(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        client = world.client
        async with client.responses.stream(model="quick", input=HELLO) as stream:
            seen = [event async for event in stream]
            response = await stream.get_final_response()
        assert response.output_text == TEXT and response.usage.output_tokens > 0
        for after in (0, 4, len(seen) - 2):
            async with client.responses.stream(
                response_id=response.id, starting_after=after
            ) as stream:
                again = [event async for event in stream]
                assert (await stream.get_final_response()).output_text == TEXT
            numbers = [event.sequence_number for event in again]
            assert numbers == list(range(after + 1, len(seen)))
        later = await client.responses.retrieve(response.id, stream=True, starting_after=4)
        assert [event.sequence_number async for event in later] == list(range(5, len(seen)))
        assert (await client.responses.retrieve(response.id)).output_text == TEXT

        tool: Any = {"type": "function", **WEATHER, "strict": False}
        asked = await client.responses.create(model="tools", input=HELLO, tools=[tool])
        call = asked.output[0]
        assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Oslo"})
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        history: Any = [*HELLO, *[item.model_dump() for item in asked.output], output]
        final = await client.responses.create(model="tools", input=history, tools=[tool])
        assert final.output_text == TEXT
        async with client.responses.stream(model="tools", input=HELLO, tools=[tool]) as stream:
            kinds = [event.type async for event in stream]
        assert "response.function_call_arguments.delta" in kinds
        short = await client.responses.create(model="short", input=HELLO)
        assert (short.status, short.incomplete_details.reason) == (
            "incomplete",
            "max_output_tokens",
        )


async def test_background_response_runs_on_and_is_cancelled(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        client = world.client
        begun = await client.responses.create(model="slow", input=HELLO, background=True)
        assert begun.status in ("queued", "in_progress")
        async with asyncio.timeout(20):
            while not (await client.responses.retrieve(begun.id)).output_text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        await client.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(begun.id)


@pytest.mark.parametrize("read", [chat_text, response_text])
async def test_failure_is_an_exception_to_who_reads_only_the_text(
    tmp_path: Path, read: Any
) -> None:
    async with serving(tmp_path) as world:
        for model, status in (("refuse", 400), ("html", 502)):
            with pytest.raises(openai.APIStatusError) as refused:
                await read(world.client, model)
            assert refused.value.status_code == status
        for model in ("truncate", "reset", "error", "stall"):
            with pytest.raises(openai.APIError) as failed:
                await read(world.client, model)
            assert not isinstance(failed.value, openai.APIStatusError), "the stream had begun"
            assert failed.value.body["message"], model
        with pytest.raises(openai.NotFoundError) as missing:
            await read(world.client, "nothing")
        assert missing.value.code == "model_not_found"


@pytest.mark.parametrize("read", [chat_text, response_text])
async def test_aborted_connection_is_an_exception_to_who_reads_only_the_text(
    tmp_path: Path, read: Any
) -> None:
    async with serving(tmp_path) as world:
        port = world.port
        async with Proxy("127.0.0.1", port) as proxy:
            client = world.other(f"http://127.0.0.1:{proxy.port}/v1")
            reading = asyncio.create_task(read(client, "slow"))
            await until(lambda: any(reply.entries > 5 for reply in world.replies()))
            proxy.reset()
            with pytest.raises(openai.APIConnectionError):
                await reading
            await client.close()


async def test_whole_answers_that_fail_are_status_errors(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        for model in ("truncate", "reset", "error"):
            with pytest.raises(openai.APIStatusError) as failed:
                await world.client.chat.completions.create(model=model, messages=HELLO)
            assert failed.value.status_code == 502, model


async def test_break_closes_the_upstream(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        stream = await world.client.chat.completions.create(
            model="slow", messages=HELLO, stream=True
        )
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        assert len(world.replies()) == 1
        await stream.close()
        await until(lambda: not world.replies())


async def test_full_queue_is_503_and_the_sdk_comes_again(tmp_path: Path) -> None:
    tight = replace(
        STREAMING,
        pool=PoolSettings(total=1),
        queue_failover=QueueFailoverSettings(waiting_max=1, max_retries=0),
    )
    async with serving(tmp_path, tight) as world:
        first = await world.client.chat.completions.create(
            model="slow", messages=HELLO, stream=True
        )
        waiting = asyncio.create_task(chat_text(world.client, "quick"))
        await until(lambda: len(world.replies()) == 2)
        with pytest.raises(openai.InternalServerError) as full:
            await chat_text(world.client, "quick")
        assert full.value.status_code == 503
        assert 1 <= int(full.value.response.headers["retry-after"]) <= 60
        await first.close()
        assert await waiting == TEXT


async def test_wait_that_is_over_is_503_and_the_sdk_comes_again(tmp_path: Path) -> None:
    async with serving(tmp_path, replace(STREAMING, pool=PoolSettings(total=1))) as world:
        first = await world.client.chat.completions.create(
            model="slow", messages=HELLO, stream=True
        )
        impatient = {"Prefer": "wait=0"}
        async with world.other(default_headers=impatient) as once:
            with pytest.raises(openai.InternalServerError) as over:
                await chat_text(once, "quick")
            assert (over.value.status_code, over.value.code) == (503, "queue_timeout")
        async with world.other(default_headers=impatient, max_retries=5) as again:
            second = asyncio.create_task(chat_text(again, "quick"))
            await asyncio.sleep(0)
            await first.close()
            assert await second == TEXT


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_sees_each_token_when_it_comes(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        body = json.dumps({"model": "slow", "messages": HELLO, "stream": True})
        curl = await asyncio.create_subprocess_exec(
            "curl", "-sN", f"{world.base_url}/chat/completions", "-d", body,
            "-H", "Content-Type: application/json", "-H", f"x-api-key: {world.token}",
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert curl.stdout is not None
        async with asyncio.timeout(20):
            lines = [await curl.stdout.readline() for _ in range(6)]
        assert all(line.startswith(b"data: ") for line in lines[::2]), lines
        assert any(reply.state == "running" for reply in world.replies()), "it is not over yet"
        curl.terminate()
        await curl.wait()
