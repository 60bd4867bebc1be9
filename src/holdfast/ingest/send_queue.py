"""The sends that wait for their group. (Pure.)

A send waits while the group before it is being committed. Order is arrival order. What
waits is bounded in all, per chat and in bytes (over a bound: SERVER_BUSY at once) and
in age (too old before its group starts: SERVER_BUSY; past its deadline:
SERVICE_UNAVAILABLE; nothing was tried in either case).

Sends of one connection to one chat keep their order: where one of them fails in a way
that its client will retry, those queued behind it get the same answer. Otherwise the
retry would end up behind its followers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec import Struct

from holdfast.bounds import KIB, MIB, positive
from holdfast.errors import HoldfastError, ServerBusy, Unavailable
from holdfast.message import Outcome, User
from holdfast.wire.frames import SendBody


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """The bounds of what waits, and of one group."""

    max_waiting: int = 10_000
    """Sends that wait for their group, in all. The next: SERVER_BUSY."""
    max_waiting_per_chat: int = 500
    """In one chat. The next: SERVER_BUSY; other chats go on."""
    max_waiting_bytes: int = 64 * MIB
    """Their content; above 10,000 full messages of clients. The next: SERVER_BUSY."""
    max_age_seconds: float = 2
    """A send that waited longer was not tried: SERVER_BUSY."""
    max_group_sends: int = 512
    """Sends of one commit; the rest is the next group."""
    max_group_bytes: int = 512 * KIB
    """Content of one commit; the rest is the next group."""
    hot_messages_per_minute: int = 100
    """A chat above it is hot: counted in ``holdfast_hot_chats``, listed by
    ``holdfast chat ls --hot``. It is slowed by nothing.
    """

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


class Send(Struct, gc=False):
    """One send and who waits for its answer. ``gc``: what it holds never holds it."""

    body: SendBody
    sender: User
    source: str
    since: float
    deadline: float
    answer: Callable[[Outcome], None]
    bytes: int = 0

    def __post_init__(self) -> None:
        content = self.body.content
        self.bytes = len(content) if content.isascii() else len(content.encode())

    @property
    def lane(self) -> tuple[str, str]:
        """What keeps its order: one connection's sends to one chat."""
        return (self.source, self.body.chat_id)


Refusals = list[tuple[Send, HoldfastError]]


class SendQueue:
    """A bounded queue of sends, cut into groups."""

    def __init__(self, settings: IntakeSettings) -> None:
        self._settings = settings
        self._queue: deque[Send] = deque()
        self._per_chat: dict[str, int] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def bytes(self) -> int:
        return self._bytes

    def in_chat(self, chat_id: str) -> int:
        return self._per_chat.get(chat_id, 0)

    def admit(self, send: Send) -> tuple[str, ServerBusy] | None:
        """Queue a send, or say which bound (total, chat, bytes) it would break."""
        limits = self._settings
        chat_id = send.body.chat_id
        in_chat = self._per_chat.get(chat_id, 0)
        if len(self._queue) >= limits.max_waiting:
            return "total", _busy("too many sends are waiting", limits.max_waiting)
        if in_chat >= limits.max_waiting_per_chat:
            return "chat", _busy(
                "too many sends are waiting in this chat", limits.max_waiting_per_chat
            )
        if self._bytes + send.bytes > limits.max_waiting_bytes:
            return "bytes", _busy("too many bytes are waiting", limits.max_waiting_bytes)
        self._queue.append(send)
        self._per_chat[chat_id] = in_chat + 1
        self._bytes += send.bytes
        return None

    def take(self, now: float) -> tuple[list[Send], Refusals]:
        """The next group, and the sends that waited too long, with their answers."""
        limits = self._settings
        group: list[Send] = []
        refused: Refusals = []
        failed: dict[tuple[str, str], HoldfastError] = {}
        size = 0
        while self._queue and len(group) < limits.max_group_sends:
            send = self._queue[0]
            error = failed.get(send.lane) if failed else None
            if error is None and (
                now >= send.deadline or now >= send.since + limits.max_age_seconds
            ):
                error = self._verdict(send, now)
            if error is None and group and size + send.bytes > limits.max_group_bytes:
                break
            self._forget(self._queue.popleft())
            if error is None:
                group.append(send)
                size += send.bytes
            else:
                failed[send.lane] = error
                refused.append((send, error))
        return group, refused + self.fail_followers(failed)

    def expire(self, now: float) -> Refusals:
        """Those that waited too long, with their followers, while a commit keeps the
        next group from starting.
        """
        refused: Refusals = []
        failed: dict[tuple[str, str], HoldfastError] = {}
        while self._queue and (error := self._verdict(self._queue[0], now)) is not None:
            send = self._queue.popleft()
            self._forget(send)
            error = failed.setdefault(send.lane, error)
            refused.append((send, error))
        return refused + self.fail_followers(failed)

    def next_expiry(self) -> float | None:
        """When the send at the front will have waited too long."""
        if not self._queue:
            return None
        front = self._queue[0]
        return min(front.since + self._settings.max_age_seconds, front.deadline)

    def fail_followers(self, failed: Mapping[tuple[str, str], HoldfastError]) -> Refusals:
        """Take out the sends behind failed ones of their connection and chat."""
        if not failed or not self._queue:
            return []
        refused = [(send, failed[send.lane]) for send in self._queue if send.lane in failed]
        if refused:
            self._queue = deque(send for send in self._queue if send.lane not in failed)
            for send, _ in refused:
                self._forget(send)
        return refused

    def clear(self) -> list[Send]:
        """Take out everything."""
        sends = list(self._queue)
        self._queue.clear()
        self._per_chat.clear()
        self._bytes = 0
        return sends

    def _verdict(self, send: Send, now: float) -> HoldfastError | None:
        if now >= send.deadline:
            return Unavailable("the deadline passed before the send was tried; send it again")
        # the same sum as in next_expiry, to the last bit
        if now >= send.since + self._settings.max_age_seconds:
            return ServerBusy(
                "the send waited too long and was not tried; send it again", retry_after_seconds=1
            )
        return None

    def _forget(self, send: Send) -> None:
        chat_id = send.body.chat_id
        left = self._per_chat[chat_id] - 1
        if left:
            self._per_chat[chat_id] = left
        else:
            del self._per_chat[chat_id]
        self._bytes -= send.bytes


def _busy(message: str, limit: int) -> ServerBusy:
    return ServerBusy(f"{message}; send it again", retry_after_seconds=1, limit=limit)
