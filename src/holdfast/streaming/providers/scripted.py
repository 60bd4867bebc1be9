"""A provider that makes up its answers, at a settable pace and with settable faults.

It is the default, so that a new server answers at once, and the model behind tests and
benchmarks. It repeats what the user wrote. A provider's table ``script`` changes that::

    [[streaming.providers]]
    name = "trial"
    kind = "scripted"

    [streaming.providers.script]
    tokens = 200
    tokens_per_second = 20
    fault = "reset"
    fault_after_tokens = 50

The faults, and what a real provider does that they stand for:

============  ==============================================================
refuse        answers 400 with an error object
rate_limit    answers 429 with Retry-After
overload      answers 503 with Retry-After
no_headers    accepts the connection and answers nothing
html          answers 200 with a page
truncate      ends cleanly after ``fault_after_tokens``, without its end
reset         breaks the connection after ``fault_after_tokens``
stall         sends nothing more after ``fault_after_tokens``
error         sends an error object inside the stream after ``fault_after_tokens``
============  ==============================================================
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

import msgspec

from holdfast.clock import Clock
from holdfast.streaming.provider_stream import NOT_SSE, failure_of_status
from holdfast.streaming.providers.contract import ProviderChunk, ProviderFailed, ProviderRequest
from holdfast.streaming.providers.script import (
    ChunkShape,
    Fault,
    ScriptedAnswer,
    ScriptSettings,
    compose,
)
from holdfast.streaming.reply import ReplyError

_AT_ONCE = 64
"""Tokens in one batch when there is no pace."""
_ROLE = b'{"role":"assistant","content":""}'
_EMPTY_BYTES = len(b'{"content":""}')
_UNREADABLE = b'{"error":{"message":"messages, tools or token limits cannot be read"}}'
_REFUSAL = b'{"error":{"message":"the script refuses","type":"invalid_request_error"}}'
_FAULTS_OF_A_STREAM = {
    "truncate": ReplyError("upstream_truncated", "the provider's stream ended without its end"),
    "reset": ReplyError("upstream_lost", "the connection to the provider broke"),
    "error": ReplyError(
        "upstream_error",
        "the provider reported an error inside its stream",
        body=b'{"message":"the script fails","type":"server_error"}',
    ),
    "stall": None,
}
"""How a stream ends with each; None: it does not."""


class ScriptedProvider:
    """Answers from a script. ``pool`` as in the contract."""

    def __init__(self, name: str, pool: str, script: ScriptSettings, clock: Clock) -> None:
        self.name, self.pool = name, pool
        self._script, self._clock = script, clock
        self._requests = 0

    @asynccontextmanager
    async def stream(
        self, request: ProviderRequest
    ) -> AsyncIterator[AsyncIterator[Sequence[ProviderChunk]]]:
        fault = self._next_fault()
        await self._before_headers(fault)
        try:
            answer = compose(self._script, request)
        except (msgspec.DecodeError, RecursionError):
            raise failure_of_status(400, _UNREADABLE) from None
        shape = ChunkShape(request, int(self._clock.now()))
        del request
        async with aclosing(self._chunks(answer, shape, fault)) as chunks:
            yield chunks

    async def close(self) -> None:
        """It holds nothing."""

    def _next_fault(self) -> Fault:
        self._requests += 1
        is_over = 0 < self._script.fault_count < self._requests
        return "none" if is_over else self._script.fault

    async def _before_headers(self, fault: Fault) -> None:
        retry_after_seconds = self._script.retry_after_seconds
        match fault:
            case "refuse":
                raise failure_of_status(400, _REFUSAL)
            case "rate_limit":
                raise failure_of_status(429, retry_after_seconds=retry_after_seconds)
            case "overload":
                raise failure_of_status(503, retry_after_seconds=retry_after_seconds)
            case "html":
                raise ProviderFailed(NOT_SSE)
            case "no_headers":
                await _never()

    async def _chunks(
        self, answer: ScriptedAnswer, shape: ChunkShape, fault: Fault
    ) -> AsyncGenerator[Sequence[ProviderChunk], None]:
        script, breaks = self._script, fault in _FAULTS_OF_A_STREAM
        deltas = answer.deltas[: script.fault_after_tokens] if breaks else answer.deltas
        batch = [ProviderChunk(shape.chunk(_ROLE))]
        begin = asyncio.get_running_loop().time() + script.first_token_seconds
        sent = 0
        while sent < len(deltas):
            due = await _due(sent, begin, script.tokens_per_second)
            batch += [
                ProviderChunk(
                    shape.chunk(delta), content=True, text_bytes=len(delta) - _EMPTY_BYTES
                )
                for delta in deltas[sent:due]
            ]
            yield batch
            sent, batch = due, []
        if breaks:
            await _break(fault)
        finish = shape.chunk(b"{}", answer.finish_reason)
        batch.append(ProviderChunk(finish, finish=True))
        if script.usage:
            batch.append(shape.usage(answer.prompt_tokens, len(deltas)))
        yield batch


async def _due(sent: int, begin: float, rate: float) -> int:
    """Wait for the next token; returns how many are due. Late ones come together."""
    time = asyncio.get_running_loop().time
    await asyncio.sleep(max(begin + (sent / rate if rate else 0) - time(), 0))
    return max(int((time() - begin) * rate), sent) + 1 if rate else sent + _AT_ONCE


async def _break(fault: Fault) -> None:
    error = _FAULTS_OF_A_STREAM[fault]
    if error is None:
        await _never()
    else:
        raise ProviderFailed(error)


async def _never() -> None:
    await asyncio.Event().wait()
