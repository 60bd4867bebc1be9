"""A revocation, and what a store of revocations promises. Adapters: memory, sqlite,
postgres.

A change is on stable storage when its call returns. Errors are those of
``holdfast.errors``: ``Unavailable`` means that nothing happened, ``OutcomeUnknown``
that the change may have happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import Forbidden, NotFound

RevocationKind = Literal["token", "user", "device", "ban", "mute", "tenant"]
ENTRIES_MAX = 100_000
"""Entries that have not ended.

The next is refused (FORBIDDEN); none is dropped for it.
"""


class RevocationKey(Struct, frozen=True):
    """What an entry is about; there is one entry per key."""

    kind: RevocationKind
    tenant: str
    user_id: str
    item: str


class Revocation(Struct, frozen=True):
    """One entry. The store assigns ``number``; it is 0 before that.

    token: the token with the id ``item``. user: tokens of the user issued before
    ``issued_before``. device: the same, if used by the device ``item``. ban: every
    token of the user. mute: every send of the user. tenant: tokens of every user of the
    tenant issued before ``issued_before``.
    """

    kind: RevocationKind
    tenant: str
    user_id: str
    """"" for a tenant, and for a token of which only the id is known."""
    item: str
    issued_before: float
    """Seconds since the epoch; 0 for kinds that do not use it."""
    made_at: str
    ends_at: float | None
    """When all its tokens have expired (seconds since the epoch).

    None: until lifted.
    """
    number: int = 0

    @property
    def key(self) -> RevocationKey:
        return RevocationKey(
            self.kind, self.tenant, "" if self.kind == "token" else self.user_id, self.item
        )


class Revocations(Protocol):
    """The entries of all tenants. An entry that has ended counts as removed."""

    @property
    def entries_max(self) -> int:
        """How many entries there may be."""
        ...

    async def add(self, entry: Revocation) -> Revocation:
        """Store an entry and return it as stored.

        An entry of the same key is merged into it (``merged``) and keeps its number.
        Forbidden if there are ``entries_max``.
        """
        ...

    async def remove(self, number: int) -> Revocation:
        """Remove an entry; NotFound if there is none of this number."""
        ...

    async def all(self) -> Sequence[Revocation]:
        """Every entry, by number."""
        ...

    async def version(self) -> int:
        """Rises by one with every change: ``all`` read at this version is complete."""
        ...


def merged(earlier: Revocation, entry: Revocation) -> Revocation:
    """Merge two entries of one key: refuses all that either refuses, until both end."""
    ends = (
        None
        if earlier.ends_at is None or entry.ends_at is None
        else max(earlier.ends_at, entry.ends_at)
    )
    issued_before = max(earlier.issued_before, entry.issued_before)
    user_id = entry.user_id or earlier.user_id
    return replace(
        entry, number=earlier.number, user_id=user_id, issued_before=issued_before, ends_at=ends
    )


def full(entries_max: int) -> Forbidden:
    return Forbidden(
        f"there are {entries_max} revocations, which is the limit; lift some first (holdfast revoke"
        " undo)",
        limit=entries_max,
    )


def unknown(number: int | str) -> NotFound:
    return NotFound(f"there is no revocation {number}: nothing was changed", number=number)
