"""What the server does to a chat by itself, recorded as an act like an operator's."""

from __future__ import annotations

from holdfast.clock import Clock, Ids, timestamp
from holdfast.ingest.contract import Durability
from holdfast.message import User
from holdfast.store.changes import CommandContext, RaiseEpoch

SERVER = "holdfast"
"""The actor of acts that no person did."""
RAISE_SECONDS = 2.0
"""How long a raise may take, if its request has so long."""


class EpochRaiser:
    """Called by ``store.history`` when a cursor proves a rollback; raises each epoch once, however many prove it."""

    def __init__(self, durability: Durability, clock: Clock, ids: Ids) -> None:
        self._durability = durability
        self._clock = clock
        self._ids = ids

    async def __call__(self, user: User, chat_id: str, epoch: int, deadline: float) -> None:
        """Raises what ``Durability.change`` raises; on return the chat's epoch is above ``epoch``."""
        act = CommandContext(
            actor=User(user.tenant, SERVER),
            at=timestamp(self._clock.now()),
            message_id=self._ids.new("msg_"),
            operator=True,
            reason=f"a cursor of {user.user_id} is beyond the head: messages were lost",
        )
        by = min(deadline, self._clock.monotonic() + RAISE_SECONDS)
        await self._durability.change(RaiseEpoch(act, chat_id, epoch), by)
