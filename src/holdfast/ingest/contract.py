"""The seams of ingest: ``Sends`` in front of it, ``Durability`` behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from holdfast.message import Draft, Outcome, User, Watermark
from holdfast.store.commands import Command, CommandResult
from holdfast.wire.frames import SendBody


class Sends(Protocol):
    """Where sends are submitted: ``admission``, and ``intake`` behind it."""

    def submit(
        self,
        body: SendBody,
        sender: User,
        source: str,
        deadline: float,
        answer: Callable[[Outcome], None],
    ) -> None:
        """Take a valid send and answer it exactly once, by ``deadline`` (monotonic)."""
        ...


class Durability(Protocol):
    """Makes writes durable, and says for each whether it is done, not done or unknown.
    Never waits past a deadline.
    """

    async def persist(self, drafts: Sequence[Draft], deadline: float) -> list[Outcome]:
        """One outcome per draft, in order, by ``deadline``. All are of one lane of the
        store. Never raises.
        """
        ...

    async def change(self, command: Command, deadline: float) -> CommandResult:
        """Commit a command, or raise one of ``holdfast.errors``."""
        ...

    async def mark(self, watermarks: Sequence[Watermark]) -> bool:
        """Merge watermarks into the store, best effort. Returns whether it succeeded; a
        failure is counted, never raised.
        """
        ...
