"""The real client on a real socket, with a witness: whatever crosses its wire goes into a history."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import TracebackType

from holdfast.client import ChatGone, ChatReset, Client, ClientSettings, Message
from holdfast.client.events import ClientEvent
from holdfast.client.reconnect import Reconnect, ReconnectVerdict
from holdfast.client.tokens import TokenProvider
from holdfast.message import Cursor, User
from holdfast.resilience import Backoff
from holdfast.verify.history import ClientSeen as Who
from holdfast.verify.history import Recorder
from holdfast.verify.witness import RecordingMachine, watched


class RecordingClient(Client):
    """A client whose user, tenant and device are known from the start. ``copies`` is what it has of every chat.

    Times are those of the monotonic clock. ``take`` must be called with every event that the application gets.
    """

    def __init__(
        self,
        url: str,
        token: str | TokenProvider,
        record: Recorder,
        user: User,
        device_id: str,
        *,
        name: str | None = None,
        state: Path | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        """``name``: its name in the history, if the device's own is taken."""
        super().__init__(url, token, device_id=device_id, state=state, settings=settings)
        who = Who(client=name or device_id, tenant=user.tenant, user_id=user.user_id, device_id=device_id)
        self.witness = RecordingMachine(record, who, time.monotonic, alone=True)
        self.machine_type = watched(self.witness)
        self._reconnect = _Watched(self.witness, self._settings.backoff, self._rng, self._provider is not None)
        self.copies: dict[str, list[tuple[int, str]]] = {}
        self._epochs: dict[str, int] = {}

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        self.witness.ended("client")

    def cut(self) -> None:
        """Break the connection as a network would."""
        self._cut()

    def take(self, event: ClientEvent) -> None:
        """The application keeps a message, or drops its copy of a chat."""
        match event:
            case Message():
                self.copies.setdefault(event.chat_id, []).append((event.sequence, event.message_id))
            case ChatReset(chat_id=chat_id, epoch=epoch):
                self._epochs[chat_id] = epoch
                self._drop(chat_id)
            case ChatGone(chat_id=chat_id):
                self._drop(chat_id)
            case _:
                pass

    def note_copy(self, chat_id: str) -> None:
        """The client has had time to catch up: this is what it has."""
        copy = self.copies.get(chat_id, [])
        self.witness.holds(chat_id, Cursor(self._epochs.get(chat_id, 1), copy[-1][0] if copy else 0), copy)

    def _drop(self, chat_id: str) -> None:
        self.copies.pop(chat_id, None)
        self.witness.dropped(chat_id)


class _Watched(Reconnect):
    """Tells the witness how connections end: with a close frame the server did it, without one the network."""

    def __init__(self, witness: RecordingMachine, backoff: Backoff, rng: random.Random, can_renew: bool) -> None:
        super().__init__(backoff, rng, can_renew)
        self._witness = witness

    def closed(self, code: int | None) -> ReconnectVerdict:
        self._witness.ended("network" if code is None else "server")
        return super().closed(code)
