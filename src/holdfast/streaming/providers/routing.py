"""Which provider answers a reply, and what comes after a failure.

A model has an ordered list of providers. Until the first token nothing has been sent,
so a failure only costs time: the next provider is asked at once, and after the last one
the list begins again, ``max_retries`` times, with a growing delay. After the first
token every failure is the end of the reply: another provider would say something else.

- A provider that fails often is left out by its breaker. A reply counts there once,
  however many rounds it takes, and the failures of one payer leave the provider out for
  that payer alone (``source``): who sends what a provider cannot answer must not close
  it for everybody.
- A provider without room (429, 503, 529) pauses until its Retry-After; its breaker does
  not count that. If all of them pause, the reply keeps its lease and sleeps until the
  first pause ends.
- A request that the provider itself refuses (4xx) ends the reply.

The clocks: headers and first token for each attempt, first token in all, and the gap
between two signs of life after it. Waiting for a lease is not in them: the queue has
its own clock.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, TypeVar

from holdfast.bounds import MIB
from holdfast.clock import Clock, SharedTimeout
from holdfast.errors import BadSetting
from holdfast.resilience import Backoff
from holdfast.streaming.providers.contract import (
    MovableLease,
    Provider,
    ProviderChunk,
    ProviderFailed,
    ProviderRequest,
    TakeChunks,
    pour,
)
from holdfast.streaming.providers.openai_compatible import OpenAICompatibleProvider
from holdfast.streaming.providers.scripted import ScriptedProvider
from holdfast.streaming.providers.source import ProviderSource, ProviderStatus
from holdfast.streaming.reply import ReplyError
from holdfast.streaming.settings import (
    ModelSettings,
    ProviderSettings,
    QueueFailoverSettings,
    ReplyClocks,
    StreamingSettings,
)

T = TypeVar("T")

FINISHED_SECONDS = 2.0
"""How long to wait after a finish_reason for usage and ``[DONE]``."""
HELD_BYTES_MAX = MIB
"""Chunks before the first token; a provider that sends more sends no tokens."""


class _Rules(NamedTuple):
    """When to try again, and by which clock."""

    backoff: Backoff
    retries_max: int
    clock: Clock
    rng: random.Random


class _Target(NamedTuple):
    """One line of a model's list: a provider, and its own name of the model."""

    source: ProviderSource
    model: str


_Stream = AbstractAsyncContextManager[AsyncIterator[Sequence[ProviderChunk]]]


class _Answer(NamedTuple):
    """A stream that has begun, with its chunks up to the first token. Exit it."""

    source: ProviderSource
    stream: _Stream
    chunks: AsyncIterator[Sequence[ProviderChunk]]
    batch: Sequence[ProviderChunk]


class Routing:
    """The models of this node and the providers behind them."""

    def __init__(
        self,
        providers: Sequence[Provider],
        models: Sequence[ModelSettings],
        clocks: ReplyClocks,
        failover: QueueFailoverSettings,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        backoff = Backoff(failover.base_delay_ms / 1000, failover.max_delay_ms / 1000)
        self._rules = _Rules(backoff, failover.max_retries, clock, rng)
        self._sources = {
            provider.name: ProviderSource(provider, clock, backoff) for provider in providers
        }
        self._targets = {model.name: self._targets_of(model) for model in models}
        self._clocks = {model.name: model.clocks or clocks for model in models}

    def _targets_of(self, model: ModelSettings) -> Sequence[_Target]:
        pairs = (line.split(":", 1) for line in model.providers)
        return [_Target(self._sources[provider], name) for provider, name in pairs]

    def models(self) -> Sequence[str]:
        """The names that clients may ask for."""
        return list(self._targets)

    def clocks(self, model: str) -> ReplyClocks:
        return self._clocks[model]

    def status(self) -> Sequence[ProviderStatus]:
        return [source.status() for source in self._sources.values()]

    def first_pool(self, model: str) -> str:
        """The pool of the provider that would be asked first now."""
        targets = self._targets[model]
        first = next((t for t in targets if t.source.is_available()), targets[0])
        return first.source.provider.pool

    def stream(self, request: ProviderRequest, lease: MovableLease) -> RoutedStream:
        """A reply of the model that ``request`` names; nothing is sent before
        ``pour``.
        """
        targets, clocks = self._targets[request.model], self._clocks[request.model]
        return RoutedStream(self._rules, targets, clocks, request, lease)

    async def close(self) -> None:
        for source in self._sources.values():
            await source.provider.close()


def open_routing(
    settings: StreamingSettings, environ: Mapping[str, str], clock: Clock, rng: random.Random
) -> Routing:
    """The routing of these settings. BadSetting if a provider's key is missing."""
    providers = [_provider(each, environ, clock) for each in settings.providers_in_use]
    return Routing(
        providers, settings.models_in_use, settings.clocks, settings.queue_failover, clock, rng
    )


def _provider(settings: ProviderSettings, environ: Mapping[str, str], clock: Clock) -> Provider:
    if settings.kind == "scripted":
        return ScriptedProvider(settings.name, settings.pool, settings.script, clock)
    key = environ.get(settings.key_env, "").strip() if settings.key_env else ""
    if settings.key_env and not (key.isascii() and key.isprintable() and key):
        raise BadSetting(
            f"streaming.providers: {settings.name}: key_env names the variable {settings.key_env},"
            " which is not set or holds no key"
        )
    return OpenAICompatibleProvider(settings.name, settings.pool, settings.base_url, key, clock)


class RoutedStream:
    """One reply's chunks, from the first provider that gives a token."""

    provider = ""
    """Who answers; empty before the first token."""

    def __init__(
        self,
        rules: _Rules,
        targets: Sequence[_Target],
        clocks: ReplyClocks,
        request: ProviderRequest,
        lease: MovableLease,
    ) -> None:
        self._rules, self._targets, self._clocks = rules, targets, clocks
        self._request: ProviderRequest | None = request
        self._payer = request.payer
        self._lease = lease
        self._now = rules.clock.monotonic
        self._first_token_by = 0.0
        self._failure: ProviderFailed | None = None
        """The last one; None: nobody was asked."""
        self._failed = set[ProviderSource]()
        self._has_finished = False

    async def pour(self, take: TakeChunks) -> None:
        """Give the chunks to ``take``, as they arrive, until the end of the reply.

        A chunk of every batch has ``data`` or ``usage``. Raises ProviderFailed, from
        the lease ReplyFailed, or what ``take`` raises. Cancelling it closes the
        upstream connection at once.
        """
        self._loop, self._timeout = asyncio.get_running_loop(), SharedTimeout()
        self._take = take
        try:
            try:
                answer = await self._first_token()
            finally:
                self._request = None  # it may be megabytes, and nobody needs it now
            try:
                await self._pour(answer)
            except BaseException as error:
                await answer.stream.__aexit__(type(error), error, error.__traceback__)
                raise
            await answer.stream.__aexit__(None, None, None)
        finally:
            self._timeout.close()

    async def _pour(self, answer: _Answer) -> None:
        source, _, chunks, batch = answer
        self.provider = source.provider.name
        self._on_batch(batch)
        try:
            await self._timeout.wait(pour(chunks, self._on_batch), self._timeout.due)
        except TimeoutError:
            if not self._has_finished:
                failure = _late("sign of life", self._clocks.gap_seconds)
                source.on_break(self._payer, failure)
                raise failure from None
        except ProviderFailed as failure:
            if not self._has_finished:
                source.on_break(self._payer, failure)
                raise
        source.on_done()

    def _on_batch(self, batch: Sequence[ProviderChunk]) -> None:
        """Pass on what says something. Anything is a sign of life until the finish."""
        says_something = False
        for chunk in batch:
            if chunk.data or chunk.usage is not None:
                says_something = True
            if chunk.finish:
                self._has_finished = True
        if says_something:
            self._take(batch)
        if not self._has_finished:
            self._timeout.due = self._loop.time() + self._clocks.gap_seconds
        elif says_something:
            self._timeout.move(self._loop.time() + FINISHED_SECONDS)

    async def _first_token(self) -> _Answer:
        """Ask providers until one gives a token."""
        self._first_token_by = self._now() + self._clocks.first_token_total_seconds
        rounds = 0
        while True:
            for target in self._targets:
                if await self._turn_to(target.source):
                    answer = await self._attempt(target)
                    if answer is not None:
                        return answer
            rounds = await self._rest(rounds)

    async def _turn_to(self, source: ProviderSource) -> bool:
        """Whether this provider may be asked now; then its lease is here, and its
        breaker waits for a result.
        """
        if self._now() >= self._first_token_by:
            raise self._failure or _no_room()
        if source.is_available(self._payer) and self._lease.pool != source.provider.pool:
            waiting_since = self._now()
            await self._lease.move(source.provider.pool)
            self._first_token_by += self._now() - waiting_since
        if source.paused_seconds:
            return False
        refusal = source.refusal(self._payer)
        if refusal is not None and not self._failed:  # else its own failure says more
            self._failure = ProviderFailed(
                ReplyError("upstream_unavailable", refusal.message),
                retry_after_seconds=refusal.retry_after_seconds,
            )
        return refusal is None

    async def _rest(self, rounds: int) -> int:
        """Wait before the list begins again; returns the rounds that count. Raises the
        last failure if there is no use.
        """
        rules = self._rules
        pauses = [s for t in self._targets if (s := t.source.paused_seconds)]
        if len(pauses) == len(self._targets) or (pauses and rounds >= rules.retries_max):
            # the jitter keeps those who sleep from coming back all at once
            delay = min(pauses) + rules.rng.random() * rules.backoff.initial_seconds
        elif rounds < rules.retries_max:
            rounds += 1
            delay = rules.backoff.delay(rounds, rules.rng)
        else:
            raise self._failure or _no_room()
        if self._now() + delay >= self._first_token_by:
            raise self._failure or _no_room()
        await asyncio.sleep(delay)
        return rounds

    async def _attempt(self, target: _Target) -> _Answer | None:
        """Ask one provider; None if it failed and another may be asked."""
        source, clocks, now = target.source, self._clocks, self._now
        assert self._request is not None
        request = self._request._replace(model=target.model)
        until = min(now() + clocks.first_token_seconds, self._first_token_by)
        try:
            stream = source.provider.stream(request)
            seconds = min(clocks.headers_seconds, until - now())
            chunks = await self._within(seconds, "headers", stream.__aenter__())
            try:
                batch = await self._within(until - now(), "token", _up_to_first_token(chunks))
            except BaseException as error:
                await stream.__aexit__(type(error), error, error.__traceback__)
                raise
        except ProviderFailed as failure:
            self._failure, again = failure, source in self._failed
            self._failed.add(source)
            source.on_failure(self._payer, failure, again=again)
            if failure.final:
                raise
            return None
        except BaseException:
            source.breaker.learned_nothing()
            raise
        source.on_first_token(self._payer)
        return _Answer(source, stream, chunks, batch)

    async def _within(self, seconds: float, what: str, awaited: Awaitable[T]) -> T:
        """ProviderFailed if it takes longer."""
        try:
            return await self._timeout.wait(awaited, self._loop.time() + seconds)
        except TimeoutError:
            raise _late(what, seconds) from None


async def _up_to_first_token(chunks: AsyncIterator[Sequence[ProviderChunk]]) -> list[ProviderChunk]:
    """The chunks until the first token, or all of a stream that ends without one."""
    held: list[ProviderChunk] = []
    held_bytes = 0
    async for batch in chunks:
        held += [chunk for chunk in batch if chunk.data or chunk.usage]
        if any(chunk.content or chunk.finish for chunk in batch):
            break
        held_bytes += sum(len(chunk.data) for chunk in batch)
        if held_bytes > HELD_BYTES_MAX:
            raise ProviderFailed(
                ReplyError("upstream_garbage", "the provider sent a MiB without a token")
            )
    return held


def _late(awaited: str, seconds: float) -> ProviderFailed:
    message = f"the provider sent no {awaited} for {seconds:g} s"
    return ProviderFailed(ReplyError("upstream_timeout", message, 504))


def _no_room() -> ProviderFailed:
    message = "every provider of this model is out of room"
    return ProviderFailed(ReplyError("upstream_unavailable", message, 503), capacity=True)
