"""Idempotency-Keys for requests whose effect is not a commit of the chat store.

The key is claimed before the request runs, and the answer is stored after it. While it
runs, here or on another node, a retry gets SERVER_BUSY. After a crash in between nobody
knows how far the request came, so a retry is refused, not run: one key never acts
twice. A request that times out before its claim succeeds has not
run, so it releases the key once it gets it. Secrets are not stored: a retry gets the
rest of the answer, and must make a new secret.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec

from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call, Endpoint
from holdfast.clock import timestamp
from holdfast.errors import HoldfastError, KeyReused
from holdfast.message import User
from holdfast.store.commands import CommandContext
from holdfast.store.plan import still_running
from holdfast.telemetry import log

KEEP_SECONDS = 1.0
"""Time to store the answer, beyond the request's own: a backup may use all of that."""


class IdempotentRequests:
    """Runs keyed requests. Running ones are known here, finished ones in the store."""

    def __init__(self, deps: ApiDeps) -> None:
        self._deps = deps
        self._running: set[tuple[User, str]] = set()
        """Bounded by the concurrent requests and by writes whose caller has gone."""
        self._late: set[asyncio.Task[None]] = set()

    async def run(self, endpoint: Endpoint, call: Call) -> Answer:
        """Run the request, or repeat its first answer.

        If cancelled, its key stays claimed.
        """
        if endpoint.key != "kept" or call.key is None or endpoint.stream is not None:
            return await endpoint.run(self._deps, call)
        running_key = (call.principal.user, call.key)
        if running_key in self._running:
            raise still_running()
        now = timestamp(self._deps.clock.now())
        act = CommandContext(
            call.principal.user, now, "", key=call.key, fingerprint=call.fingerprint
        )
        self._running.add(running_key)
        seconds = max(call.seconds_left, 0.0) + KEEP_SECONDS
        begun = asyncio.ensure_future(self._deps.records.begin(act, self._deps.node_id, seconds))
        try:
            earlier = await call.in_time(asyncio.shield(begun))
        except BaseException:
            if begun.done() and begun.exception() is not None:
                self._running.discard(running_key)
            else:
                late = asyncio.create_task(self._give_back(running_key, act, begun))
                self._late.add(late)
                late.add_done_callback(self._late.discard)
            raise
        try:
            return (
                await self._once(endpoint, call, act)
                if earlier is None
                else _again(endpoint, earlier)
            )
        finally:
            self._running.discard(running_key)

    async def _give_back(
        self, running_key: tuple[User, str], act: CommandContext, begun: asyncio.Future[str | None]
    ) -> None:
        """Release a key whose request timed out before the claim succeeded."""
        try:
            if await begun is None:
                await self._deps.records.keep(act, None)
        except HoldfastError as error:
            log.warning(
                "api.key_release_failed",
                key=act.key,
                error=error.message,
            )
        finally:
            self._running.discard(running_key)

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
        """Store the answer.

        If that fails the effect stays, and a retry gets "unknown".
        """
        try:
            async with asyncio.timeout(KEEP_SECONDS):
                await self._deps.records.keep(act, answer)
        except (HoldfastError, TimeoutError) as error:
            log.warning("api.answer_store_failed", key=act.key, error=repr(error))


def _kept(endpoint: Endpoint, answer: Answer) -> str:
    shown = msgspec.to_builtins(answer.body)
    shown.pop(endpoint.secret, None)
    return msgspec.json.encode(shown).decode()


def _again(endpoint: Endpoint, kept: str) -> Answer:
    if not kept:
        text = (
            "this was begun under this key and nobody knows how far it came: look, then ask under a"
            " new key"
        )
        raise KeyReused(text)
    if endpoint.secret:
        text = (
            "this was done under this key; its secret is shown once and not kept: remove what it"
            " made, and ask under a new key"
        )
        raise KeyReused(text, answer=msgspec.json.decode(kept))
    return Answer(kept.encode(), headers={"Idempotency-Replayed": "true"})
