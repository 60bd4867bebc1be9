"""Gateways, sessions, intakes and clients that break a promise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.clock import Clock
from holdfast.errors import HoldfastError, Unavailable
from holdfast.fanout.registry.contract import Registry
from holdfast.gateway.connection import Connection
from holdfast.gateway.contract import GatewayDeps
from holdfast.gateway.gateway import Gateway
from holdfast.gateway.roster_sync import RosterSync, _Event
from holdfast.ingest.durability import StoreDurability
from holdfast.ingest.intake import Intake
from holdfast.message import Draft, LogEntry, Message, Outcome, User
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


class EpochBlindSession(Session):
    """Takes every run for one of its own epoch.

    Red: 3, because a client is shown two messages under one number. 9 follows: the
    stored one is dropped as known.
    """

    __slots__ = ()

    def deliver_at_once(self, run: EncodedRun) -> bool:
        return super().deliver_at_once(self._adopted(run))

    def deliver(self, run: EncodedRun, now: float) -> Effects:
        return super().deliver(self._adopted(run), now)

    def _adopted(self, run: EncodedRun) -> EncodedRun:
        progress = self.chats.get(run.chat_id)
        return run if progress is None else EncodedRun(run.messages, progress.epoch)


class SkippingGateway(Gateway):
    """Skips one batch in three, as a defect would: its sessions must notice."""

    _batches = 0

    def deliver(self, entries: Sequence[LogEntry]) -> Sequence[LogEntry]:
        self._batches += 1
        return super().deliver(entries) if self._batches % 3 else ()


class AgelessSync(RosterSync):
    """Applies the end of a membership also if the user has joined again since."""

    def _on_left(self, user: User, chat_id: str, event: _Event) -> None:
        super()._on_left(user, chat_id, event)
        for connection in self._roster.of_user(user):
            if connection.established and chat_id in connection.chats:
                self._leave(connection, chat_id, event_delivered=True)


class CredulousSync(RosterSync):
    """Applies a join from its entry, without asking the store."""

    def _on_joined(self, user: User, chat_id: str, event: _Event) -> None:
        for connection in self._roster.of_user(user):
            if connection.established:
                progress = connection.session.chats.get(chat_id)
                if progress is None or not progress.reflects(event.at):
                    self._join(connection, chat_id, event.at)
            elif connection in self._connecting:
                self._connecting[connection][chat_id] = event


class AgelessGateway(Gateway):
    """A gateway that looks at no membership event's age."""

    def __init__(self, deps: GatewayDeps, *given: Any) -> None:
        super().__init__(deps, *given)
        self.roster_sync = AgelessSync(self.roster, deps.history, deps.clock, deps.rng)


class CredulousGateway(Gateway):
    """A gateway that believes every entry."""

    def __init__(self, deps: GatewayDeps, *given: Any) -> None:
        super().__init__(deps, *given)
        self.roster_sync = CredulousSync(self.roster, deps.history, deps.clock, deps.rng)


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
