"""The client: the shell that runs the machine over a socket and a state file.

``Client`` passes frames, time and the application's calls to ``Machine`` and carries
out the actions it returns (``_do``). One task connects and reconnects until the server
refuses for good. The machine decides; this module only does I/O and wakes the callers
that wait. Each caller waits on a future of its own, so cancelling one affects no other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, assert_never

from holdfast.client.chat_copy import ChatCopy
from holdfast.client.connection import (
    ClientSocket,
    HandshakeRefused,
    NoToken,
    TokenProvider,
    Unreachable,
    claims_of,
    connect,
    fresh_token,
    socket_url,
)
from holdfast.client.events import (
    Announced,
    ClientEvent,
    ConnectionChanged,
    ConnectionState,
    Drop,
    Keep,
    MachineAction,
    Online,
    RenewToken,
    Sent,
    Settled,
    Synced,
    Write,
)
from holdfast.client.machine import Machine
from holdfast.client.outbox import Outbox, OutboxEntry, check
from holdfast.client.reconnect import Reconnect, ReconnectVerdict, Retry, Stop
from holdfast.client.settings import ClientSettings
from holdfast.client.state import state_at
from holdfast.client.waiters import Unsettled
from holdfast.clock import Clock, Ids, SystemClock
from holdfast.errors import BadSetting, HoldfastError, InvalidMessage, KeyReused, Unavailable
from holdfast.message import Cursor, Message
from holdfast.wire.codec import decode_server_frame, encode_client_frame
from holdfast.wire.frames import ConnectionEstablished, CursorClaim


class Client:
    """One device of one user, connected whenever possible.

    Use it as ``async with Client(…) as client``. It connects in the background and
    reconnects without limit until the server refuses for good (``stopped``); from then
    on ``send``, ``connected`` and the events raise the reason.

    - ``token``: a JWT, or a coroutine function that returns a new one when needed.
    - ``state``: the file with unsent messages and cursors; None: memory, lost with the
      process.
    - ``device_id``: stable per device. Default: the one in the state file, or a new
      one.
    - ``follow``: only these chats reach the application; the others are skipped and not
      acked. None: all.
    - ``start``: the cursors to begin from, in place of those in the state file.
    - ``machine_type``: a subclass that records or breaks something, for tests.
    """

    def __init__(
        self,
        url: str,
        token: str | TokenProvider,
        *,
        device_id: str | None = None,
        state: Path | str | None = None,
        follow: Collection[str] | None = None,
        start: Mapping[str, Cursor] | None = None,
        settings: ClientSettings | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        machine_type: type[Machine] = Machine,
    ) -> None:
        self._url = socket_url(url)
        self._provider = None if isinstance(token, str) else token
        self._token = token if isinstance(token, str) else None
        self.device_id = device_id or ""
        self._state = state_at(None if state is None else Path(state))
        self._follow = follow
        self._start = start or {}
        self._settings = settings or ClientSettings()
        self._clock = clock or SystemClock()
        self._rng = rng or random.SystemRandom()
        self._ids = Ids(self._clock, rng)
        self._reconnect = Reconnect(
            self._settings.backoff, self._rng, can_renew=self._provider is not None
        )
        self._machine_type = machine_type
        self._tasks = asyncio.TaskGroup()
        self._socket: ClientSocket | None = None
        self._online = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._error: Exception | None = None
        self._wrong_user: HoldfastError | None = None
        self._content_bytes_max = self._settings.content_bytes_max
        self._unsettled: dict[tuple[str, str], Unsettled] = {}
        self._taken: tuple[ClientEvent, ChatCopy | None] | None = None
        self._reader: asyncio.Future[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self.user_id: str | None = None

    async def __aenter__(self) -> Self:
        saved = self._state.open(self._on_written)
        self.device_id = self.device_id or saved.identity.get("device_id") or self._ids.new("dev_")
        self._state.identify("device_id", self.device_id)
        self.user_id = saved.identity.get("user_id")
        self._unsettled = {entry.key: Unsettled(entry, on_disk=True) for entry in saved.outbox}
        outbox = Outbox(
            saved.outbox, self._settings.sends_in_flight_max, self._settings.backoff, self._rng
        )
        cursors: dict[str, Cursor | CursorClaim] = {**saved.cursors, **self._start}
        self._machine = self._machine_type(self._settings, outbox, cursors, self._rng, self._follow)
        await self._tasks.__aenter__()
        self._running = self._tasks.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Without an exception, leaving confirms the last event.

        Unsent messages stay on disk.
        """
        if error is None:
            self._confirm_taken()
        await self._state.drain()
        self._do(self._machine.leave(self._now()))
        self._running.cancel()
        if self._renewing is not None:
            self._renewing.cancel()
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await self._state.close()

    # Sending

    async def send(
        self,
        chat_id: str,
        content: str,
        content_type: str = "text/plain",
        client_message_id: str | None = None,
    ) -> Sent:
        """Send a message; return when the server has it on stable storage.

        The message is in the outbox, on disk, before its first byte is sent, and is
        retried under the same id over any number of reconnects and restarts. A chat's
        messages keep the order of the calls. Raises a ``Refused`` if the server refuses
        the message for good, an ``InternalError`` if the server failed and the message
        may or may not be stored. Cancelling stops the waiting, not the sending.
        """
        unsettled = self._accept(chat_id, content, content_type, client_message_id)
        return await unsettled.sent.wait()

    async def post(
        self,
        chat_id: str,
        content: str,
        content_type: str = "text/plain",
        client_message_id: str | None = None,
    ) -> str:
        """As ``send``, but return once it is on disk; a refusal is an event."""
        unsettled = self._accept(chat_id, content, content_type, client_message_id)
        if not unsettled.on_disk:
            await unsettled.stored.wait()
        return unsettled.entry.client_message_id

    def unsent(self) -> list[OutboxEntry]:
        """The messages in the outbox, in order within each chat."""
        return [unsettled.entry for unsettled in self._unsettled.values()]

    def typing(self, chat_id: str, active: bool = True) -> None:
        """Show the members that the user types, or not; lost while offline."""
        self._do(self._machine.typing(chat_id, active, self._now()))

    def read(self, chat_id: str, sequence: int) -> None:
        """Report that the user has read up to ``sequence``."""
        self._do(self._machine.read(chat_id, sequence, self._now()))

    # Receiving

    async def connected(self) -> None:
        """Return when the server accepts the connection; raise if the client stops.

        Missed messages may still be on their way: ``ConnectionChanged`` reports
        ``ready``.
        """
        await self._online.wait()
        if self._error is not None:
            raise self._error

    async def events(self) -> AsyncIterator[ClientEvent]:
        """All events, for one loop at a time.

        The client requests nothing from the server before the first is asked for.
        Taking the next event confirms the last one: only then the client keeps its
        cursor and acks it. So an event that a crash interrupts is delivered again, and
        no other.
        """
        while True:
            yield await self._next()

    async def messages(self, chat_id: str) -> AsyncIterator[Message]:
        """One chat's messages.

        All other events are discarded: for several chats, use events.
        """
        async for event in self.events():
            if isinstance(event, Message) and event.chat_id == chat_id:
                yield event

    async def _next(self) -> ClientEvent:
        self._confirm_taken()
        if not self._machine.listens:
            self._do(self._machine.listen(self._now()))
        while (taken := self._machine.inbox.take()) is None:
            if self._error is not None:
                raise self._error
            if self._reader is not None:
                raise RuntimeError(
                    "the events are read by another loop; end it, or hand its events on"
                )
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._taken = taken
        return taken[0]

    def _confirm_taken(self) -> None:
        if self._taken is not None:
            taken, self._taken = self._taken, None
            self._do(self._machine.on_consumed(*taken, self._now()))

    # The outbox

    def _accept(
        self, chat_id: str, content: str, content_type: str, client_message_id: str | None
    ) -> Unsettled:
        """Hand a message to the state file; a repeated call joins the first."""
        if self._error is not None:
            raise self._error
        entry = OutboxEntry(
            client_message_id or self._ids.new("cmsg_"), chat_id, content, content_type
        )
        check(entry, self._content_bytes_max)
        unsettled = self._unsettled.get(entry.key)
        if unsettled is None:
            if len(self._unsettled) >= self._settings.outbox_messages_max:
                raise Unavailable(
                    f"{len(self._unsettled)} messages wait in the outbox, which takes no more; "
                    "try again when some are sent, or raise outbox_messages_max"
                )
            unsettled = self._unsettled[entry.key] = Unsettled(entry)
            self._state.put(entry)
        elif unsettled.entry != entry:
            raise KeyReused(
                "another message with this client_message_id waits in the outbox; give this one an"
                " id of its own"
            )
        return unsettled

    def _on_written(
        self, entries: Iterable[OutboxEntry], cursors: Iterable[Keep], error: HoldfastError | None
    ) -> None:
        """The state file has these entries and cursors, or ``error`` says why not."""
        for entry in entries:
            unsettled = self._unsettled[entry.key]
            if error is not None:
                del self._unsettled[entry.key]
                unsettled.stored.resolve(error)
                unsettled.sent.resolve(error)
            else:
                unsettled.on_disk = True
                unsettled.stored.resolve(True)
                self._do(self._machine.send(entry, self._now()))
        if error is None:
            self._do(self._machine.on_kept(cursors, self._now()))

    def _settle(self, entry: OutboxEntry, outcome: Sent | HoldfastError) -> None:
        self._state.remove(entry)
        unsettled = self._unsettled.pop(entry.key)
        if not unsettled.sent.resolve(outcome) and isinstance(outcome, HoldfastError):
            self._machine.report_refusal(entry, outcome)

    # The connection

    async def _run(self) -> None:
        """Connect and reconnect until the verdict is Stop."""
        try:
            while True:
                match await self._one_connection():
                    case Stop(error):
                        return self._stop(error)
                    case Retry(delay_seconds, reason, new_token):
                        if new_token:
                            self._token = None
                        self._set_state("backoff", reason, delay_seconds)
                        await asyncio.sleep(delay_seconds)
        except Exception as error:  # the application must see it, not the event loop's handler
            self._stop(error)

    async def _one_connection(self) -> ReconnectVerdict:
        self._set_state("reconnecting")
        try:
            token = await self._get_token()
            headers = {"Authorization": f"Bearer {token}", "X-Device-ID": self.device_id}
            timeout = self._settings.connect_timeout_seconds
            socket = await connect(
                self._url,
                headers,
                self._on_opened,
                self._on_received,
                self._on_partial_frame,
                timeout,
            )
        except HandshakeRefused as refused:
            return self._reconnect.on_refused(refused.status, refused.retry_after, refused.message)
        except (Unreachable, NoToken) as error:
            return self._reconnect.on_unreachable(str(error))
        began = self._now()
        try:
            code = await socket.closed
        finally:
            self._online.clear()
            self._socket = None
            self._machine.on_disconnected()
            socket.close()
            self._set_state("disconnected")
        if self._now() - began >= self._settings.reconnect_cap_seconds:
            self._reconnect.on_lasted()
        return (
            Stop(self._wrong_user)
            if self._wrong_user is not None
            else self._reconnect.on_closed(code)
        )

    def _on_opened(self, socket: ClientSocket) -> None:
        self._socket = socket
        self._set_state("connected")
        self._do(self._machine.on_opened(self._expires_at(), self._now()))

    def _on_received(self, data: bytes) -> None:
        try:
            frame = decode_server_frame(data)
        except InvalidMessage:
            self._cut()  # not our protocol, perhaps for now: reconnect later
            return
        if frame is not None:
            self._do(self._machine.receive(frame, self._now()))

    def _on_partial_frame(self) -> None:
        self._do(self._machine.on_partial_frame(self._now()))

    async def _get_token(self) -> str:
        if self._token is None:
            assert self._provider is not None
            self._token = await fresh_token(self._provider, self._settings.connect_timeout_seconds)
        return self._token

    async def _renew(self) -> None:
        """Get a new token and send it on the open connection."""
        if self._provider is None:
            return
        try:
            self._token = await fresh_token(self._provider, self._settings.connect_timeout_seconds)
        except (NoToken, HoldfastError):  # still valid for now; the next connection reports it
            self._token = None
            return
        self._do(
            self._machine.on_token_renewed(
                self._token, self.device_id, self._expires_at(), self._now()
            )
        )

    def _expires_at(self) -> float | None:
        expiry = claims_of(self._token or "").exp
        return None if expiry is None else self._now() + expiry - self._clock.now()

    def _on_established(self, established: ConnectionEstablished) -> bool:
        """Whether the server's user is the one the state file belongs to."""
        if self.user_id not in (None, established.user_id):
            self._wrong_user = BadSetting(
                f"the state file belongs to {self.user_id}, the token to {established.user_id}; use"
                " another file"
            )
            return False
        if self.user_id is None:
            self.user_id = established.user_id
            self._state.identify("user_id", established.user_id)
        self._content_bytes_max = int(
            established.limits.get("max_message_size_bytes", self._content_bytes_max)
        )
        self._reconnect.on_established()
        self._set_state("syncing")
        self._online.set()
        return True

    def _stop(self, error: Exception) -> None:
        """Stop for good: every caller that waits gets ``error``.

        The outbox stays on disk.
        """
        self._error = error
        self._set_state("stopped", str(error))
        for unsettled in self._unsettled.values():
            unsettled.sent.resolve(error)
        self._online.set()

    # The machine

    def _do(self, actions: Iterable[MachineAction]) -> None:
        for action in actions:
            match action:
                case Write(frame):
                    if self._socket is not None:
                        self._socket.send(encode_client_frame(frame))
                case Keep() as keep:
                    self._state.keep(keep)
                case Settled(entry, outcome):
                    self._settle(entry, outcome)
                case RenewToken():
                    if self._renewing is None or self._renewing.done():
                        self._renewing = self._tasks.create_task(self._renew())
                case Synced():
                    self._set_state("ready")
                case Announced(closing):
                    self._reconnect.on_announced(closing)
                    self._set_state("closing", closing.reason)
                case Online(established):
                    if not self._on_established(established):
                        self._cut()
                        return
                case Drop():
                    self._cut()
                    return
                case _:
                    assert_never(action)
        self._wake_reader()
        self._set_timer()

    def _cut(self) -> None:
        if self._socket is not None:
            self._socket.cut()

    def _set_state(
        self, state: ConnectionState, reason: str = "", retry_in_seconds: float = 0.0
    ) -> None:
        self._machine.inbox.put_ephemeral(ConnectionChanged(state, reason, retry_in_seconds))
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done() and len(self._machine.inbox):
            self._reader.set_result(None)

    def _set_timer(self) -> None:
        """One timer, moved only to an earlier time; firing too early is harmless."""
        wake_at = self._machine.wake_at()
        if wake_at is None or (self._timer is not None and self._timer_at <= wake_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = wake_at
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, wake_at - self._now()), self._on_timer
        )

    def _on_timer(self) -> None:
        self._timer = None
        self._do(self._machine.tick(self._now()))

    def _now(self) -> float:
        return self._clock.monotonic()
