"""The bytes of request bodies that a node holds: arriving, waiting, running.

A body for whose Content-Length there is no room is refused unread. It counts as it
arrives: what is only announced takes no room from others, and a body that finds none on
its way is refused then. Its bytes are freed at the first token: until then a provider
may fail and the next one needs the body again.
"""

from __future__ import annotations

from collections import Counter

from holdfast import telemetry
from holdfast.errors import RateLimited, Unavailable
from holdfast.streaming.reply import Owner
from holdfast.streaming.settings import QueueFailoverSettings

RETRY_SECONDS = 2.0


class ReservedBytes:
    """The bytes of one request."""

    __slots__ = ("_bytes", "_node", "_owner")

    def __init__(self, node: BodyBytes, owner: Owner) -> None:
        self._node, self._owner, self._bytes = node, owner, 0

    def grow(self, size: int) -> None:
        """More of the body has arrived. Raises as ``BodyBytes.reserve``."""
        self._node.check(self._owner, size)
        self._node.count(self._owner, size)
        self._bytes += size

    def free(self) -> None:
        """May be called more than once."""
        if self._bytes:
            self._node.count(self._owner, -self._bytes)
            self._bytes = 0


class BodyBytes:
    """The bodies of a node, by owner."""

    def __init__(self, settings: QueueFailoverSettings) -> None:
        self._settings = settings
        self._by_owner: Counter[Owner] = Counter()
        """Bounded by the requests being read, waiting or running."""
        self.total = 0

    def reserve(self, owner: Owner, announced: int) -> ReservedBytes:
        """Unavailable if the node has no room for as many bytes, RateLimited if the
        owner has used up its own.
        """
        self.check(owner, announced)
        return ReservedBytes(self, owner)

    def check(self, owner: Owner, size: int) -> None:
        """Raises if there is no room for more bytes of this owner."""
        settings = self._settings
        of_key = owner.kind == "key"
        own_max = settings.bytes_per_key_max if of_key else settings.bytes_per_user_max
        if self._by_owner[owner] + size > own_max:
            telemetry.reply_refused("user")
            raise RateLimited(
                f"your requests that wait or run have more than {own_max} bytes",
                retry_after_seconds=RETRY_SECONDS,
            )
        if self.total + size > settings.bytes_max:
            telemetry.reply_refused("bytes")
            raise Unavailable(
                "this node holds too many requests", retry_after_seconds=RETRY_SECONDS
            )

    def count(self, owner: Owner, change: int) -> None:
        self.total += change
        self._by_owner[owner] += change
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        telemetry.reply_bytes(self.total)
