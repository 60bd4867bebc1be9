"""What a store of silences promises.

Adapters: postgres. Every verb raises Unavailable if the store does not answer, and
OutcomeUnknown if nobody knows whether a change was stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from holdfast.telemetry.notices import Silence


class SharedSilences(Protocol):
    """At most one silence of an alert."""

    async def read(self) -> Sequence[Silence]:
        """All that are kept, those that have ended among them."""
        ...

    async def put(self, silence: Silence) -> None:
        """Store it, instead of the one of the same alert."""
        ...

    async def remove(self, alert: str) -> None:
        """Nothing happens if there is none."""
        ...
