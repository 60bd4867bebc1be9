"""An entry of the list of revocations, and what a store of such entries promises. Adapters: memory, sqlite.

What is said to be done is on stable storage when the call returns. Errors are those of ``holdfast.errors``:
``Unavailable`` means that nothing happened, ``OutcomeUnknown`` that the change may have happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from holdfast.errors import Forbidden, NotFound

RevocationKind = Literal["token", "user", "device", "ban", "mute", "tenant"]
ENTRIES_MAX = 100_000
"""Entries that have not ended. The next is refused (FORBIDDEN with the limit); none is dropped to make room."""


class RevocationKey(Struct, frozen=True):
    """What an entry is about; there is one entry of each."""

    kind: RevocationKind
    tenant: str
    user_id: str
    item: str


class Revocation(Struct, frozen=True):
    """One entry. ``number`` is given by the store; 0 before that.

    token: the token whose id is ``item``. user: tokens of the user issued before ``issued_before``. device: such
    tokens, where they are shown by the device ``item``. ban: every token of the user. mute: every send of the user.
    tenant: tokens of every user of the tenant issued before ``issued_before``.
    """

    kind: RevocationKind
    tenant: str
    user_id: str
    """"" of a tenant, and of a token that is known by its id alone."""
    item: str
    issued_before: float
    """Seconds since the epoch; 0 where it does not count."""
    made_at: str
    ends_at: float | None
    """When every token it concerns has expired anyway (seconds since the epoch); None: never, it must be lifted."""
    number: int = 0

    @property
    def key(self) -> RevocationKey:
        return RevocationKey(self.kind, self.tenant, "" if self.kind == "token" else self.user_id, self.item)


class Revocations(Protocol):
    """The entries of all tenants. One that has ended is as good as removed."""

    async def add(self, entry: Revocation) -> Revocation:
        """Store an entry; as it is stored now. One of the same key is merged with it (``merged``) and keeps its number.

        Forbidden if there are ``ENTRIES_MAX``.
        """
        ...

    async def remove(self, number: int) -> Revocation:
        """Take an entry out; NotFound if there is none of this number."""
        ...

    async def all(self) -> Sequence[Revocation]:
        """Every entry, by number."""
        ...

    async def version(self) -> int:
        """Rises by one with every change: who has read ``all`` at this version has every entry."""
        ...


def merged(earlier: Revocation, entry: Revocation) -> Revocation:
    """Two entries of one key: whatever either of them refuses stays refused, for as long as the later one says."""
    ends = None if earlier.ends_at is None or entry.ends_at is None else max(earlier.ends_at, entry.ends_at)
    issued_before = max(earlier.issued_before, entry.issued_before)
    user_id = entry.user_id or earlier.user_id
    return replace(entry, number=earlier.number, user_id=user_id, issued_before=issued_before, ends_at=ends)


def full() -> Forbidden:
    return Forbidden(
        f"there are {ENTRIES_MAX} revocations, which is the limit; lift some first (holdfast revoke undo)",
        limit=ENTRIES_MAX,
    )


def unknown(number: int | str) -> NotFound:
    return NotFound(f"there is no revocation {number}: nothing was changed", number=number)
