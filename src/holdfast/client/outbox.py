"""Messages that wait to be sent. (Pure.)

A chat's entries are sent one at a time, oldest first: the next one only after the one
before was acked or refused for good. So a retry can neither overtake nor be overtaken.
Chats do not wait for each other.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator

from msgspec import Struct

from holdfast.client.session import NEVER
from holdfast.errors import InvalidContentType, InvalidMessage, MessageTooLarge
from holdfast.message import check_id
from holdfast.resilience import Backoff


class OutboxEntry(Struct, frozen=True):
    """One unsent message; every retry has the same ``client_message_id``."""

    client_message_id: str
    chat_id: str
    content: str
    content_type: str

    @property
    def key(self) -> tuple[str, str]:
        return (self.chat_id, self.client_message_id)


def check(entry: OutboxEntry, content_bytes_max: int) -> None:
    """Raise now for content that the server would refuse later."""
    for value, name in ((entry.chat_id, "chat_id"), (entry.client_message_id, "client_message_id")):
        wrong = check_id(value, name)
        if wrong:
            raise InvalidMessage(wrong)
    if entry.content_type not in ("text/plain", "text/markdown"):
        raise InvalidContentType('content_type must be "text/plain" or "text/markdown"')
    try:
        size = len(entry.content.encode())
    except UnicodeEncodeError:
        raise InvalidMessage(
            "content holds lone surrogates, which UTF-8 cannot carry; replace them"
        ) from None
    if not size:
        raise InvalidMessage("content must not be empty")
    if size > content_bytes_max:
        raise MessageTooLarge(
            f"content is {size} bytes; at most {content_bytes_max} are allowed: split it"
        )


class _Line:
    """One chat's entries. ``not_before``: the earliest next try (monotonic seconds)."""

    __slots__ = ("entries", "failures", "not_before")

    def __init__(self) -> None:
        self.entries: deque[OutboxEntry] = deque()
        self.failures = 0
        self.not_before = 0.0


class Outbox:
    """The unsent messages of all chats."""

    def __init__(
        self,
        entries: Iterable[OutboxEntry],
        in_flight_max: int,
        backoff: Backoff,
        rng: random.Random,
    ) -> None:
        self._in_flight_max = in_flight_max
        self._backoff = backoff
        self._rng = rng
        self._idle: dict[str, _Line] = {}
        self._in_flight: dict[str, tuple[_Line, str, float]] = {}
        self._paused_until = 0.0
        self._count = 0
        for entry in entries:
            self.add(entry)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[OutboxEntry]:
        """Every unsent entry, in order within its chat."""
        for line in [*(line for line, _, _ in self._in_flight.values()), *self._idle.values()]:
            yield from line.entries

    def add(self, entry: OutboxEntry) -> None:
        line = self._line(entry.chat_id)
        if line is None:
            line = self._idle[entry.chat_id] = _Line()
        line.entries.append(entry)
        self._count += 1

    def start(self, now: float, request_id: str) -> OutboxEntry | None:
        """The next entry to send, now in flight as ``request_id``; None: none yet."""
        if now < self._paused_until or len(self._in_flight) >= self._in_flight_max:
            return None
        for chat_id, line in self._idle.items():
            if line.not_before <= now:
                del self._idle[chat_id]
                self._in_flight[chat_id] = (line, request_id, now)
                return line.entries[0]
        return None

    def settle(self, chat_id: str, client_message_id: str) -> OutboxEntry | None:
        """Remove an acked or refused entry; None if it is not the one in flight."""
        line, _, _ = self._in_flight.get(chat_id, (None, "", 0.0))
        if line is None or line.entries[0].client_message_id != client_message_id:
            return None
        del self._in_flight[chat_id]
        line.failures = 0
        if len(line.entries) > 1:
            self._idle[chat_id] = line
        self._count -= 1
        return line.entries.popleft()

    def in_flight_under(self, request_id: str) -> OutboxEntry | None:
        return next(
            (line.entries[0] for line, name, _ in self._in_flight.values() if name == request_id),
            None,
        )

    def defer(self, chat_id: str, now: float, retry_after: float | None, everywhere: bool) -> None:
        """A try failed and will be retried; ``everywhere``: all chats wait."""
        line, _, _ = self._in_flight.pop(chat_id)
        line.failures += 1
        wait = self._backoff.delay(line.failures, self._rng)
        if retry_after is not None:
            wait = retry_after * (1 + self._rng.random() / 4)
        line.not_before = now + wait
        if everywhere:
            self._paused_until = max(self._paused_until, now + wait)
        self._idle = {chat_id: line, **self._idle}

    def on_disconnected(self) -> None:
        """The outcome of entries in flight is unknown: send them again, first."""
        self._idle = {
            **{chat_id: line for chat_id, (line, _, _) in self._in_flight.items()},
            **self._idle,
        }
        self._in_flight.clear()

    def oldest_in_flight(self) -> float:
        """When the oldest try in flight was sent; NEVER if there is none."""
        return min((at for _, _, at in self._in_flight.values()), default=NEVER)

    def next_start(self) -> float:
        """When the next entry may be sent; NEVER if none may."""
        if not self._idle or len(self._in_flight) >= self._in_flight_max:
            return NEVER
        return max(self._paused_until, min(line.not_before for line in self._idle.values()))

    def _line(self, chat_id: str) -> _Line | None:
        held = self._in_flight.get(chat_id)
        return held[0] if held else self._idle.get(chat_id)
