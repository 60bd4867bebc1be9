"""Gateways, sessions, intakes and clients that break a promise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from holdfast.clock import Clock
from holdfast.errors import HoldfastError, Unavailable
from holdfast.fanout.registry.contract import Registry
from holdfast.gateway.connection import Connection
from holdfast.ingest.durability import StoreDurability
from holdfast.ingest.intake import Intake
from holdfast.message import Draft, Message, Outcome, User
from holdfast.session.effects import Effects
from holdfast.session.session import Session
from holdfast.store.contract import ChatStore
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.codec import EncodedRun
from holdfast.wire.frames import SendBody
from proof.simulation.device import Device


class CarelessSession(Session):
    """Pushes every message, whatever its client has: no continuity check."""

    __slots__ = ()

    def deliver_at_once(self, run: EncodedRun) -> bool:
        self._skip_gap(run)
        return super().deliver_at_once(run)

    def deliver(self, run: EncodedRun, now: float) -> Effects:
        self._skip_gap(run)
        return super().deliver(run, now)

    def _skip_gap(self, run: EncodedRun) -> None:
        progress = self._outbound.chats.get(run.chat_id)
        if progress is not None and progress.live and run.first > progress.expects:
            progress.expects = run.first


class SilentConnection(Connection):
    """Closes without a closing frame."""

    __slots__ = ()

    def _close(self, closing: CloseReason) -> None:
        self._close_socket(closing)


class ForgetfulIntake(Intake):
    """Never answers one send in six."""

    _submitted = 0

    def submit(
        self,
        body: SendBody,
        sender: User,
        source: str,
        deadline: float,
        answer: Callable[[Outcome], None],
    ) -> None:
        self._submitted += 1
        if self._submitted % 6:
            super().submit(body, sender, source, deadline, answer)


class CoupledStore(StoreDurability):
    """Acks a send after asking who is online: a fanout failure becomes a send's."""

    def __init__(self, store: ChatStore, clock: Clock, registry: Registry) -> None:
        super().__init__(store, clock)
        self._registry = registry

    async def persist(self, drafts: Sequence[Draft], deadline: float) -> list[Outcome]:
        outcomes = await super().persist(drafts, deadline)
        try:
            async with asyncio.timeout(1.0):
                await self._registry.gateways_of([draft.sender for draft in drafts])
        except (HoldfastError, TimeoutError):
            return [Unavailable("nobody knows who is online")] * len(drafts)
        return outcomes


class HighestAcks(Device):
    """Sometimes loses a message, and acks the highest instead of the contiguous."""

    _received = 0

    def store(self, message: Message) -> None:
        self._received += 1
        if self._received % 7:
            super().store(message)
