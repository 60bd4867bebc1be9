"""The seam of leases, which live in the engine of the data they protect.

A lease ends by the engine's clock, never by a node's wall clock. A holder that pauses
does not notice in time that its lease ended, so what it writes under the lease carries
the fence, and the engine refuses a fence below the highest it has seen.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Fence(NamedTuple):
    """Rises with every acquisition of a lease. ``base`` is the engine's epoch base: a
    server that lost acquisitions has a higher one.
    """

    base: int
    number: int


class Leases(Protocol):
    """Adapters: memory, PostgreSQL. Every call may raise Unavailable or OutcomeUnknown:
    an acquisition with an unknown outcome ends by itself.
    """

    async def acquire(self, name: str, seconds: float) -> Fence | None:
        """Take the lease for ``seconds`` if nobody holds it; None if somebody does."""
        ...

    async def renew(self, name: str, fence: Fence, seconds: float) -> bool:
        """Hold it for ``seconds`` from now. False if it ended, even if nobody else took
        it since.
        """
        ...

    async def release(self, name: str, fence: Fence) -> None:
        """End it at once; harmless if it ended before."""
        ...
