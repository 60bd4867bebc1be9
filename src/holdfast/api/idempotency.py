"""Requests under an Idempotency-Key whose effect is not a commit of the store: done once, answered alike.

The key is taken before the request runs and the answer is kept after it. In between nobody can know how far it came, so
after a crash a repetition is refused rather than done again: the same key never does a thing twice. A request that gave
up before its key was taken has not run: it gives the key back as soon as it has it. Secrets are not kept: a repetition
learns what was made, and that it must be made anew.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec

from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call, Endpoint
from holdfast.clock import timestamp
from holdfast.errors import HoldfastError, KeyReused, ServerBusy
from holdfast.message import User
from holdfast.store.commands import CommandContext
from holdfast.telemetry import log

KEEP_SECONDS = 1.0
"""For keeping the answer, beside the time of the request: a backup outlasts that."""


class IdempotentRequests:
    """Runs the requests of one process; what runs now is known here, everything else in the store."""

    def __init__(self, deps: ApiDeps) -> None:
        self._deps = deps
        self._running: set[tuple[User, str]] = set()
        """As many as there are requests at the same time, and writes that nobody waits for any more."""
        self._late: set[asyncio.Task[None]] = set()

    async def run(self, endpoint: Endpoint, call: Call) -> Answer:
        """Run it, or answer as the first time. Cancelled while it runs, its key stays taken."""
        if endpoint.key != "kept" or call.key is None:
            return await endpoint.run(self._deps, call)
        place = (call.principal.user, call.key)
        if place in self._running:
            raise ServerBusy("the first request under this key is still running", retry_after_seconds=1.0)
        now = timestamp(self._deps.clock.now())
        act = CommandContext(call.principal.user, now, "", key=call.key, fingerprint=call.fingerprint)
        self._running.add(place)
        begun = asyncio.ensure_future(self._deps.store.begin(act))
        try:
            earlier = await call.in_time(asyncio.shield(begun))
        except BaseException:
            if begun.done() and begun.exception() is not None:
                self._running.discard(place)
            else:
                late = asyncio.create_task(self._give_back(place, act, begun))
                self._late.add(late)
                late.add_done_callback(self._late.discard)
            raise
        try:
            return await self._once(endpoint, call, act) if earlier is None else _again(endpoint, earlier)
        finally:
            self._running.discard(place)

    async def _give_back(self, place: tuple[User, str], act: CommandContext, begun: asyncio.Future[str | None]) -> None:
        """Nothing runs under a key whose request gave up: if it is taken after all, it shall be new again."""
        try:
            if await begun is None:
                await self._deps.store.keep(act, None)
        except HoldfastError as error:
            log.warning("a key that was taken too late may not be given back", key=act.key, error=error.message)
        finally:
            self._running.discard(place)

    async def _once(self, endpoint: Endpoint, call: Call, act: CommandContext) -> Answer:
        try:
            answer = await endpoint.run(self._deps, replace(call, key=None, fingerprint=""))
        except HoldfastError as error:
            if error.outcome == "rejected":
                await self._keep(act, None)
            raise
        await self._keep(act, _kept(endpoint, answer))
        return answer

    async def _keep(self, act: CommandContext, answer: str | None) -> None:
        """What was done is done, whether or not its answer can be kept: then a repetition is told that nobody knows."""
        try:
            async with asyncio.timeout(KEEP_SECONDS):
                await self._deps.store.keep(act, answer)
        except (HoldfastError, TimeoutError) as error:
            log.warning("the answer to a keyed request could not be kept", key=act.key, error=repr(error))


def _kept(endpoint: Endpoint, answer: Answer) -> str:
    shown = msgspec.to_builtins(answer.body)
    shown.pop(endpoint.secret, None)
    return msgspec.json.encode(shown).decode()


def _again(endpoint: Endpoint, kept: str) -> Answer:
    if not kept:
        told = "this was begun under this key and nobody knows how far it came: look, then ask under a new key"
        raise KeyReused(told)
    if endpoint.secret:
        told = "this was done under this key; its secret is shown once and not kept: remove what it made, ask anew"
        raise KeyReused(told, answer=msgspec.json.decode(kept))
    return Answer(kept.encode(), headers={"Idempotency-Replayed": "true"})
