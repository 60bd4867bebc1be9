"""A gateway with the real parts behind it, on memory adapters and without sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.access.principal import USER_SCOPES, Principal
from holdfast.access.proofs import CursorProofs
from holdfast.clock import Ids, timestamp
from holdfast.errors import HoldfastError, Unauthorized
from holdfast.gateway.connection import Connection
from holdfast.gateway.contract import GatewayDeps
from holdfast.gateway.gateway import Gateway
from holdfast.gateway.settings import GatewaySettings
from holdfast.history.history import ChatHistory
from holdfast.ingest.durability import EpochRaiser, StoreDurability
from holdfast.ingest.intake import Intake
from holdfast.ingest.watermarks import Watermarks
from holdfast.message import LogEntry, Message, User
from holdfast.session.heartbeat import Transmission
from holdfast.store.commands import AddMember, CommandContext, CreateChat, RemoveMember
from holdfast.store.contract import ChatStore
from holdfast.store.memory import MemoryStore
from proof.virtual_loop import LoopClock

TENANT = "default"
PLENTY = 1 << 40


PROOFS = CursorProofs(b"test")


def decode_frames(data: bytes) -> list[dict[str, Any]]:
    """The JSON of every unmasked text frame in ``data``."""
    frames = []
    while data:
        assert data[0] == 0x81, data[:20]
        size, start = data[1], 2
        if size == 126:
            size, start = int.from_bytes(data[2:4], "big"), 4
        elif size == 127:
            size, start = int.from_bytes(data[2:10], "big"), 10
        frames.append(msgspec.json.decode(data[start : start + size]))
        data = data[start + size :]
    return frames


class FakeSocket:
    """The client's end: what was written; ``stopped`` takes no more."""

    def __init__(self) -> None:
        self.connection: Connection
        self.writes: list[bytes] = []
        self.closed: tuple[int, str] | None = None
        self.aborted = False
        self.reading = True
        self.stopped = False
        self.unsent = 0

    def write(self, data: bytes) -> None:
        assert self.closed is None, "nothing is written behind a close frame"
        self.writes.append(data)
        if self.stopped:
            self.connection.writing_paused()

    def close(self, code: int, reason: str) -> None:
        self.closed = (code, reason)

    def abort(self) -> None:
        self.aborted = True

    def transmission(self) -> Transmission:
        return Transmission.of_buffer(self.unsent)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def take(self) -> list[dict[str, Any]]:
        """The frames written since the last time."""
        frames = decode_frames(b"".join(self.writes))
        self.writes = []
        return frames

    def say(self, kind: str, request_id: str | None = None, **payload: Any) -> None:
        """A frame from the client."""
        frame: dict[str, Any] = {"type": kind, "payload": payload}
        if request_id is not None:
            frame["request_id"] = request_id
        self.connection.frame_received(msgspec.json.encode(frame))
        self.connection.work_done(1)


class RecordingPresence:
    """A presence listener that records what it is called with."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._devices: dict[str, tuple[str, str]] = {}

    def on_connected(self, user: User, device_id: str, connection_id: str) -> None:
        self.events.append(("came", user.user_id, device_id))
        self._devices[connection_id] = (user.user_id, device_id)

    def on_disconnected(self, connection_id: str) -> None:
        self.events.append(("left", *self._devices.pop(connection_id)))

    def typing(self, user: User, chat_id: str, active: bool) -> None:
        self.events.append(("typing", user.user_id, chat_id, active))


def verify(token: str) -> Principal:
    """Tokens are user names here; `bad` is none."""
    if token == "bad":
        raise Unauthorized("the token is not valid here: get a new one")
    return principal(token)


def principal(user_id: str, expires_at: float | None = None) -> Principal:
    return Principal(TENANT, user_id, USER_SCOPES, "user", expires_at)


@dataclass
class Bench:
    """The parts of a node around one gateway."""

    gateway: Gateway
    store: Any
    clock: LoopClock
    ids: Ids
    presence: RecordingPresence
    intake: Intake
    watermarks: Watermarks
    sockets: list[FakeSocket] = field(default_factory=list)

    def connect(
        self, user_id: str | None, device_id: str = "", expires_at: float | None = None
    ) -> FakeSocket:
        socket = FakeSocket()
        who = None if user_id is None else principal(user_id, expires_at)
        socket.connection = self.gateway.accept(socket, who, device_id)
        self.sockets.append(socket)
        return socket

    async def chat(self, *users: str) -> str:
        """A chat of these users; the first is its owner."""
        chat_id = self.ids.new("chat_")
        act = CommandContext(
            User(TENANT, users[0]), timestamp(self.clock.now()), self.ids.new("msg_")
        )
        await self.store.change(CreateChat(act, chat_id, "group", "a chat", users[1:]))
        return chat_id

    async def add(self, chat_id: str, user_id: str) -> LogEntry:
        """An operator adds a member; the entry reaches nobody here by itself."""
        changed = await self.store.change(AddMember(self._operator(), chat_id, user_id))
        return entry(changed.event, changed.chat.epoch)

    async def remove(self, chat_id: str, user_id: str) -> LogEntry:
        """An operator removes a member; the entry reaches nobody here by itself."""
        changed = await self.store.change(RemoveMember(self._operator(), chat_id, user_id))
        return entry(changed.event, changed.chat.epoch)

    def _operator(self) -> CommandContext:
        at, message_id = timestamp(self.clock.now()), self.ids.new("msg_")
        return CommandContext(User(TENANT, "op"), at, message_id, operator=True)


async def settle(turns: int = 20) -> None:
    """Let everything that is ready run."""
    for _ in range(turns):
        await asyncio.sleep(0)


def message(chat_id: str, sequence: int, **changes: Any) -> Message:
    given = {
        "message_id": f"msg_{sequence}",
        "chat_id": chat_id,
        "sequence": sequence,
        "kind": "text",
        "sender_id": "alice",
        "client_message_id": f"c{sequence}",
        "content": f"message {sequence}",
        "content_type": "text/plain",
        "created_at": "2026-01-01T00:00:00.000Z",
    }
    return Message(**{**given, **changes})


def entry(message: Message, epoch: int = 1) -> LogEntry:
    """A message as the log has it; a gateway does not look at offsets."""
    return LogEntry(0, 0, TENANT, message.chat_id, epoch, message)


def entries(chat_id: str, *sequences: int) -> list[LogEntry]:
    return [entry(message(chat_id, sequence)) for sequence in sequences]


@asynccontextmanager
async def bench(
    settings: GatewaySettings | None = None,
    store: ChatStore | None = None,
    memory_budget_bytes: int = PLENTY,
    verify: Callable[[str], Principal] = verify,
    refusal: Callable[[Principal, str], HoldfastError | None] = lambda principal, device_id: None,
    connection_type: Callable[..., Connection] = Connection,
) -> AsyncIterator[Bench]:
    clock = LoopClock()
    ids = Ids(clock, random.Random(1))
    store = store or MemoryStore()
    durability = StoreDurability(store, clock)
    intake = Intake(durability, clock, ids)
    deps = GatewayDeps(
        settings=settings or GatewaySettings(),
        clock=clock,
        ids=ids,
        sends=intake,
        history=ChatHistory(store, EpochRaiser(durability, clock, ids), PROOFS, clock),
        watermarks=Watermarks(durability, lambda moved: None),
        proofs=PROOFS,
        verify=verify,
        refusal=refusal,
        rng=random.Random(1),
        sends_failing_seconds=lambda: durability.breaker_open_seconds,
    )
    presence = RecordingPresence()
    running = asyncio.create_task(intake.run())
    async with Gateway(deps, presence, memory_budget_bytes, connection_type) as gateway:
        made = Bench(gateway, store, clock, ids, presence, intake, deps.watermarks)
        yield made
        for socket in made.sockets:
            socket.connection.connection_lost()
    intake.stop()
    await running
