"""Cursors beyond the head of their epoch: lost messages, or a made-up cursor.

With its proof such a cursor shows that the store lost acknowledged messages. It is
never clamped: the chat's epoch is raised at once, so that every copy of the chat is
dropped and read again. Without a proof only the device that sent it is reset: it drops
its own copy, and nobody else is affected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from holdfast import telemetry
from holdfast.access.proofs import CursorProofs
from holdfast.clock import Clock
from holdfast.errors import RateLimited, Unavailable
from holdfast.message import Cursor, User
from holdfast.resilience import Buckets

RESETS_PER_MINUTE = 10
"""Requests per user with an unproven cursor beyond the head; then RATE_LIMITED."""
WARNING_SECONDS = 60.0
"""Unproven cursors are counted, and logged at most this often."""
RAISE_REMEMBERED_SECONDS = 60.0
"""Later proofs of the same rollback find the new epoch and need no memory of it."""
RAISE_SECONDS_MAX = 5.0

_RaiseEpoch = Callable[[User, str, int, float], Awaitable[None]]
"""Raise a chat's epoch if it is still this one, by a deadline. The user is the one
whose cursor proved the rollback.
"""
ReadHeads = Callable[[list[str], float], Awaitable[Mapping[str, Cursor]]]

_REPAIRED = "the chat is being repaired; try again"


class _Raise(NamedTuple):
    """An epoch raise in progress or just done."""

    epoch: int
    at: float
    done: asyncio.Future[None]


class Rollbacks:
    """Decides what to do about cursors beyond the head."""

    def __init__(
        self, raise_epoch: _RaiseEpoch, heads: ReadHeads, proofs: CursorProofs, clock: Clock
    ) -> None:
        self._raise_epoch, self._heads, self._proofs, self._clock = (
            raise_epoch,
            heads,
            proofs,
            clock,
        )
        self._raised: dict[str, _Raise] = {}
        self._resets = Buckets(RESETS_PER_MINUTE / 60, RESETS_PER_MINUTE)
        self._unproven, self._warned_at = 0, float("-inf")

    def proven(self, user: User, chat_id: str, cursor: Cursor, proof: str | None) -> bool:
        return self._proofs.proves(proof, user.tenant, chat_id, cursor)

    def charge_reset(self, user: User, chat_id: str, cursor: Cursor, head: Cursor) -> None:
        """Count one request of this user that is answered with a reset. Raises
        RateLimited above the rate.
        """
        now = self._clock.monotonic()
        telemetry.cursor_unproven()
        self._unproven += 1
        if now - self._warned_at >= WARNING_SECONDS:
            telemetry.log.warning(
                "store.cursor_unproven", chat_id=chat_id, user_id=user.user_id, epoch=cursor.epoch,
                cursor=cursor.sequence, head=head.sequence, requests=self._unproven,
            )  # fmt: skip
            self._unproven, self._warned_at = 0, now
        if wait := self._resets.take(user, now):
            raise RateLimited(
                "too many cursors beyond the head of their chat, without the proof that came with"
                " them",
                retry_after_seconds=max(round(wait, 1), 1),
            )

    async def raise_epoch(
        self, user: User, chat_id: str, cursor: Cursor, head: Cursor, deadline: float
    ) -> Cursor:
        """Raise the epoch and return the new head; nothing is answered in the old one.

        All callers that prove the same rollback share one raise. A caller that is
        cancelled or runs out of time does not stop it for the others.
        """
        raised = self._raised.get(chat_id)
        if raised is None or cursor.epoch > raised.epoch:
            raised = self._begin(user, chat_id, cursor, head)
        try:
            async with asyncio.timeout(deadline - self._clock.monotonic()):
                await asyncio.shield(raised.done)
        except TimeoutError:
            raise Unavailable(_REPAIRED, retry_after_seconds=1) from None
        now = (await self._heads([chat_id], deadline)).get(chat_id)
        if now is None or now.epoch == cursor.epoch:
            self._forget(chat_id, raised)  # lost again: the next proof raises
            raise Unavailable(_REPAIRED, retry_after_seconds=1)
        return now

    def _begin(self, user: User, chat_id: str, cursor: Cursor, head: Cursor) -> _Raise:
        """Start a raise; a failed one is forgotten."""
        now = self._clock.monotonic()
        oldest = now - RAISE_REMEMBERED_SECONDS
        self._raised = {c: r for c, r in self._raised.items() if r.at > oldest or not r.done.done()}
        telemetry.rollback_proven(
            chat_id, user.user_id, cursor.epoch, cursor.sequence, head.sequence
        )
        raising = self._raise_epoch(user, chat_id, cursor.epoch, now + RAISE_SECONDS_MAX)
        begun = self._raised[chat_id] = _Raise(cursor.epoch, now, asyncio.ensure_future(raising))

        def on_done(done: asyncio.Future[None]) -> None:
            if done.cancelled() or done.exception() is not None:
                self._forget(chat_id, begun)

        begun.done.add_done_callback(on_done)
        return begun

    def _forget(self, chat_id: str, raised: _Raise) -> None:
        if self._raised.get(chat_id) is raised:
            del self._raised[chat_id]
