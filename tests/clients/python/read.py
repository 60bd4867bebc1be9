"""Reads one reply with an SDK as people use it, only its text, and prints what it saw.

``python read.py CLIENT BASE_URL KEY MODEL WORDS`` runs in a virtual environment of its
own (``requirements/clients.lock``). The last line is JSON: ``{"text": …, "error": …}``;
error is null after a success.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable


async def agents_chat(base_url: str, key: str, model: str, words: str) -> AsyncIterator[str]:
    from agents import OpenAIChatCompletionsModel

    async for text in _run_agent(OpenAIChatCompletionsModel, base_url, key, model, words):
        yield text


async def agents_responses(base_url: str, key: str, model: str, words: str) -> AsyncIterator[str]:
    from agents import OpenAIResponsesModel

    async for text in _run_agent(OpenAIResponsesModel, base_url, key, model, words):
        yield text


async def _run_agent(
    kind: Callable[..., object], base_url: str, key: str, model: str, words: str
) -> AsyncIterator[str]:
    from agents import Agent, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0)
    agent = Agent(name="reader", model=kind(model, openai_client=client))
    result = Runner.run_streamed(agent, input=words)
    async for event in result.stream_events():
        data = getattr(event, "data", None)
        if getattr(data, "type", "") == "response.output_text.delta":
            yield data.delta


async def langchain_chat(base_url: str, key: str, model: str, words: str) -> AsyncIterator[str]:
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(base_url=base_url, api_key=key, model=model, max_retries=0)
    async for chunk in llm.astream(words):
        yield str(chunk.content)


async def langchain_responses(
    base_url: str, key: str, model: str, words: str
) -> AsyncIterator[str]:
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(
        base_url=base_url, api_key=key, model=model, max_retries=0, use_responses_api=True
    )
    async for chunk in llm.astream(words):
        yield "".join(part.get("text", "") for part in chunk.content)


CLIENTS = {
    "agents-chat": agents_chat,
    "agents-responses": agents_responses,
    "langchain-chat": langchain_chat,
    "langchain-responses": langchain_responses,
}


async def main(client: str, *arguments: str) -> None:
    text, error = "", None
    try:
        async for part in CLIENTS[client](*arguments):
            text += part
    except Exception as raised:
        error = str(raised) or repr(raised)
    print(json.dumps({"text": text, "error": error}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
