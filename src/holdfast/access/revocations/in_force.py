"""The revocations that a node holds in memory: what they refuse, and how they change.

A change is stored before it takes effect here. ``follow`` finds changes with an unknown
outcome, and changes of other nodes: it compares versions and reads all entries again
when they differ. A check costs a few dictionary lookups and never waits.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from holdfast import telemetry
from holdfast.access.principal import Principal
from holdfast.access.revocations.contract import (
    Revocation,
    RevocationKey,
    RevocationKind,
    Revocations,
    full,
    unknown,
)
from holdfast.clock import Clock, Turns, timestamp, wait_at_most
from holdfast.errors import HoldfastError, NotFound, Unauthorized
from holdfast.message import User

AHEAD_SECONDS_MAX = 60.0
"""How far an issuer's clock may be ahead of this server's."""
FOLLOW_SECONDS = 0.5
"""How often the stored version is compared with the one in memory."""

_REFUSALS: Mapping[RevocationKind, str] = {
    "token": "this token was revoked: get a new one",
    "user": "the tokens this user had were revoked: get a new one",
    "device": "this device was cut off: get a new token for it",
    "ban": "this user is banned",
    "tenant": "the tokens this tenant had were revoked: get a new one",
}

Added = Callable[[Sequence[Revocation]], None]


class RevocationsInForce:
    """The entries of one node.

    ``on_added`` gets new or changed ones, once in effect; ``on_stored`` is called after
    each change made here, so that other nodes can be woken.
    """

    def __init__(self, store: Revocations, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._entries: dict[RevocationKey, Revocation] = {}
        """By number."""
        self._version = -1
        self._change = asyncio.Lock()
        self._woken = asyncio.Event()
        self.on_added: Added = lambda entries: None
        self.on_stored: Callable[[], None] = lambda: None

    # --- what they refuse
    # -------------------------------------------------------------------------------

    def refusal(self, principal: Principal, device_id: str = "") -> Unauthorized | None:
        """Why a token used by this device ("": unknown) is refused.

        None if it is not.
        """
        if not self._entries or principal.kind != "user":
            return None
        tenant, user_id, issued_at = principal.tenant, principal.user_id, principal.issued_at
        asked: list[RevocationKey] = [
            RevocationKey("ban", tenant, user_id, ""),
            RevocationKey("user", tenant, user_id, ""),
            RevocationKey("tenant", tenant, "", ""),
            RevocationKey("token", tenant, "", principal.token_id),
        ]
        if device_id:
            asked.append(RevocationKey("device", tenant, user_id, device_id))
        for key in asked:
            entry = self._entries.get(key)
            if entry is None or self._has_ended(entry):
                continue
            if key.kind in ("ban", "token") or issued_at < entry.issued_before:
                telemetry.revocation_refused(key.kind)
                return Unauthorized(_REFUSALS[key.kind], revoked=key.kind)
        return None

    def check(self, principal: Principal) -> None:
        """Unauthorized if the token is refused."""
        if (refusal := self.refusal(principal)) is not None:
            raise refusal

    def is_muted(self, user: User) -> bool:
        """Whether the user is muted in the whole tenant."""
        return (
            RevocationKey("mute", user.tenant, user.user_id, "") in self._entries
            if self._entries
            else False
        )

    # --- what is in force
    # -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    def page(
        self, after: int, limit: int, wanted: Callable[[Revocation], bool]
    ) -> Sequence[Revocation]:
        """Up to ``limit`` wanted entries with numbers above ``after``, without ended
        ones."""
        entries = list(self._entries.values())
        rest = islice(entries, bisect_right(entries, after, key=lambda entry: entry.number), None)
        return list(
            islice((entry for entry in rest if wanted(entry) and not self._has_ended(entry)), limit)
        )

    def find(self, number: str) -> Revocation:
        """The entry of this number; NotFound if there is none."""
        found = [
            e for e in self._entries.values() if str(e.number) == number and not self._has_ended(e)
        ]
        if not found:
            raise unknown(number)
        return found[0]

    def require_room(self, entry: Revocation) -> None:
        """Forbidden if the store, as far as known here, has no room for the entry."""
        if len(self._entries) >= self._store.entries_max and entry.key not in self._entries:
            self._forget_ended()
            if len(self._entries) >= self._store.entries_max:
                raise full(self._store.entries_max)

    def of_user(self, user: User) -> Sequence[Revocation]:
        """Every entry that names this user and has not ended."""
        return [
            e
            for e in self._entries.values()
            if (e.tenant, e.user_id) == user and not self._has_ended(e)
        ]

    # --- how they change
    # --------------------------------------------------------------------------------

    async def add(self, entry: Revocation) -> Revocation:
        """Store an entry, then put it into effect. Raises what the store raises."""
        async with self._change:
            stored = await self._store.add(entry)
            if (held := self._entries.get(stored.key)) is not None and held.number != stored.number:
                del self._entries[stored.key]  # the old one had ended; the new one goes to the end
            self._entries[stored.key] = stored
            self._version += 1
            if len(self._entries) > self._store.entries_max:
                self._forget_ended()
        self._changed([stored])
        self.on_stored()
        return stored

    async def remove(self, number: int) -> Revocation:
        """Lift an entry. NotFound if there is none of this number."""
        async with self._change:
            removed = await self._store.remove(number)
            self._entries.pop(removed.key, None)
            self._version += 1
        self._changed([])
        self.on_stored()
        return removed

    async def condense(self, user: User) -> None:
        """Replace a user's entries for tokens and devices by one that refuses as much.

        Bans and mutes stay. It may be killed anywhere and called again.
        """
        named = [entry for entry in self.of_user(user) if entry.kind in ("token", "device")]
        if not named:
            return
        now = self._clock.now()
        ends_at = max(entry.ends_at or now for entry in named)
        before = math.floor(now) + 1.0 + AHEAD_SECONDS_MAX  # ``iat`` may be ahead of our clock
        await self.add(Revocation("user", *user, "", before, timestamp(now), ends_at))
        for entry in named:
            with suppress(NotFound):  # lifted or ended meanwhile
                await self.remove(entry.number)

    async def refresh(self) -> None:
        """Read all entries again if the stored version differs from the one in
        memory."""
        async with self._change:
            version = await self._store.version()
            if version == self._version:
                return
            turns, found = Turns(self._clock), dict[RevocationKey, Revocation]()
            for entry in await self._store.all():
                found[entry.key] = entry
                await turns.give_way()
            added = [entry for key, entry in found.items() if self._entries.get(key) != entry]
            self._entries, self._version = found, version
        self._changed(added)

    def wake(self) -> None:
        """Refresh now: another node changed something."""
        self._woken.set()

    async def follow(self) -> None:
        """Refresh until cancelled; retry a store that does not answer."""
        failing = False
        while True:
            await wait_at_most(self._woken, FOLLOW_SECONDS)
            self._woken.clear()
            try:
                await self.refresh()
                failing = False
            except HoldfastError as error:
                if not failing:
                    telemetry.log.warning("access.revocations_unread", error=error.message)
                failing = True

    def _forget_ended(self) -> None:
        """Drop ended entries, as the store does, so that memory has the same bound."""
        self._entries = {
            key: entry for key, entry in self._entries.items() if not self._has_ended(entry)
        }

    def _has_ended(self, entry: Revocation) -> bool:
        return entry.ends_at is not None and entry.ends_at <= self._clock.now()

    def _changed(self, added: Sequence[Revocation]) -> None:
        telemetry.revocations_held(len(self._entries))
        if added:
            self.on_added(added)
