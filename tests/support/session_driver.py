"""A session without a socket: effects and written frames are kept."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import TypeVar

from holdfast.access.principal import USER_SCOPES, Principal
from holdfast.message import Acked, Cursor, Message, Page, ResumeRead, User
from holdfast.session.effects import Close, Effect, Effects, Fetch, FetchResume
from holdfast.session.heartbeat import Transmission
from holdfast.session.session import Session
from holdfast.session.settings import SessionSettings
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.codec import EncodedRun, ServerFrame, decode_server_frame
from holdfast.wire.frames import (
    AnyClientFrame,
    CursorClaim,
    Error,
    Resume,
    ResumeBody,
    SendBody,
    SendMessage,
    SyncBody,
    SyncRequest,
)

AT = "2026-01-01T00:00:00.000Z"
ANN = User("default", "ann")
AS_ANN = Principal(*ANN, USER_SCOPES, "user")
E = TypeVar("E")


def message(sequence: int, chat_id: str = "chat_1", content: str = "hello") -> Message:
    return Message(
        f"msg_{sequence}",
        chat_id,
        sequence,
        "text",
        "bob",
        f"c{sequence}",
        content,
        "text/plain",
        AT,
    )


def run(
    first: int,
    last: int | None = None,
    chat_id: str = "chat_1",
    content: str = "hello",
    epoch: int = 1,
) -> EncodedRun:
    return EncodedRun(
        [message(sequence, chat_id, content) for sequence in range(first, (last or first) + 1)],
        epoch,
    )


def page(
    after: int,
    through: int,
    head: int | None = None,
    *,
    chat_id: str = "chat_1",
    epoch: int = 1,
    reset: bool = False,
) -> Page:
    """Messages after+1..through of a chat that ends at ``head``."""
    head = through if head is None else head
    messages = [message(sequence, chat_id) for sequence in range(after + 1, through + 1)]
    return Page(chat_id, epoch, messages, through, head > through, head, reset)


def send(
    key: str = "c1", *, chat_id: str = "chat_1", content: str = "hello", kind: str = "text/plain"
) -> SendMessage:
    return SendMessage(request_id=f"r-{key}", payload=SendBody(key, chat_id, content, kind))


def sync(
    after: int, *, chat_id: str = "chat_1", epoch: int = 1, limit: int | None = None
) -> SyncRequest:
    return SyncRequest(
        request_id=f"r-{chat_id}-{after}", payload=SyncBody(chat_id, epoch, after, limit)
    )


def split_frames(data: bytes) -> Iterator[bytes]:
    """The payloads of a server's WebSocket frames (final, unmasked text)."""
    at = 0
    while at < len(data):
        assert data[at] == 0x81
        size, at = data[at + 1], at + 2
        if size >= 126:
            width = 2 if size == 126 else 8
            size, at = int.from_bytes(data[at : at + width], "big"), at + width
        yield data[at : at + size]
        at += size


def decoded(chunks: list[bytes]) -> list[ServerFrame]:
    frames = [decode_server_frame(payload) for chunk in chunks for payload in split_frames(chunk)]
    assert None not in frames
    return [frame for frame in frames if frame is not None]


class Talk:
    """One session with its time; everything it does is kept in ``effects``."""

    def __init__(
        self,
        chats: Mapping[str, Cursor] | None = None,
        limits: SessionSettings | None = None,
        *,
        expires_at: float | None = None,
        rng: random.Random | None = None,
        established: bool = True,
        principal: Principal = AS_ANN,
    ) -> None:
        self.now = 0.0
        self.unsent = 0
        """What the transport has not passed on yet."""
        self.limits = limits or SessionSettings()
        self.effects: list[Effect] = []
        self.session = Session(self.limits, "conn_1", principal, "phone", self.now, expires_at, rng)
        if established:
            self.do(
                self.session.establish({"chat_1": Cursor(1, 0)} if chats is None else chats, AT)
            )
            self.read()

    def do(self, effects: Effects) -> list[Effect]:
        self.effects += effects
        return list(effects)

    def receive(self, frame: AnyClientFrame) -> list[Effect]:
        return self.do(self.session.receive(frame, self.now))

    def deliver(self, run: EncodedRun) -> list[Effect]:
        return self.do(self.session.deliver(run, self.now))

    def tick(self, seconds: float = 0.0) -> list[Effect]:
        self.now += seconds
        return self.do(self.session.tick(self.now, Transmission.of_buffer(self.unsent)))

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass: tick whenever the session has something to do."""
        end, effects = self.now + seconds, list[Effect]()
        for _ in range(1000):
            due = max(self.session.next_tick, self.now)
            if due > end:
                break
            self.now = due
            effects += self.do(self.session.tick(self.now, Transmission.of_buffer(self.unsent)))
        else:
            raise AssertionError("tick does not do what next_tick says it has to do")
        self.now = end
        return effects

    def take(self, bytes_max: int = 1 << 30) -> list[ServerFrame]:
        frames = decoded(self.session.take(bytes_max))
        self.do(self.session.on_written(self.now))
        return frames

    def read(self) -> list[object]:
        """Everything that waits, as payloads."""
        return [frame.payload for frame in self.take()]

    def errors(self) -> list[str]:
        return [payload.code for payload in self.read() if isinstance(payload, Error)]

    def last(self, kind: type[E]) -> E:
        return [effect for effect in self.effects if isinstance(effect, kind)][-1]

    def count(self, kind: type[object]) -> int:
        return sum(isinstance(effect, kind) for effect in self.effects)

    @property
    def closing(self) -> CloseReason | None:
        closes = [effect.closing for effect in self.effects if isinstance(effect, Close)]
        assert len(closes) <= 1
        return closes[0] if closes else None

    def pull(self, after: int, answer: Page) -> list[object]:
        """Ask for a page, have it read, take it."""
        self.receive(sync(after, chat_id=answer.chat_id, epoch=answer.epoch))
        self.do(self.session.on_page(self.last(Fetch).token, answer, self.now))
        return self.read()

    def live(self, through: int = 0, chat_id: str = "chat_1") -> Talk:
        """Make a chat live at ``through``."""
        self.pull(through, page(through, through, chat_id=chat_id))
        return self

    def resume(self, cursors: Mapping[str, tuple[int, int]], read: ResumeRead) -> list[object]:
        self.receive(
            Resume(
                request_id="r-resume",
                payload=ResumeBody(
                    {chat_id: CursorClaim(*cursor) for chat_id, cursor in cursors.items()}
                ),
            )
        )
        self.do(self.session.on_page(self.last(FetchResume).token, read, self.now))
        return self.read()


def acked(sequence: int, *, deduplicated: bool = False) -> Acked:
    return Acked(message(sequence), deduplicated)
