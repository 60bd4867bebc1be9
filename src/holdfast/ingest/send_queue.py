"""The sends that wait for their group. (Pure.)

A send waits while the group before it in its lane is being committed. A lane is what
the store commits one group after the other: everything in SQLite, a shard in
PostgreSQL. Within a lane order is arrival order; lanes take turns, so that a full one
delays no other. What waits is bounded in all, per chat and in bytes (over a bound:
SERVER_BUSY at once) and in age (too old before its group starts: SERVER_BUSY; past its
deadline: SERVICE_UNAVAILABLE; nothing was tried in either case).

Sends of one connection to one chat keep their order: where one of them fails in a way
that its client will retry, those queued behind it get the same answer. Otherwise the
retry would end up behind its followers. A chat is in one lane, so one group of it at
most is in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from msgspec import Struct

from holdfast.bounds import KIB, MIB, positive
from holdfast.errors import HoldfastError, ServerBusy, Unavailable
from holdfast.message import Outcome, User
from holdfast.store.contract import Grouping
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
    """Sends of one commit; the rest is the next group. Where the store takes fewer, its
    own bound applies (SQLite: 512).
    """
    max_group_bytes: int = 512 * KIB
    """Content of one commit; the rest is the next group. Where the store takes less,
    its own bound applies (SQLite: 512 KiB).
    """
    hot_messages_per_minute: int = 100
    """A chat above it is hot: counted in ``holdfast_hot_chats``, listed by
    ``holdfast chat ls --hot``. It is slowed by nothing.
    """

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)

    def within(self, grouping: Grouping) -> IntakeSettings:
        """These settings over a store: of each group's bound the smaller one."""
        return replace(
            self,
            max_group_sends=min(self.max_group_sends, grouping.sends_max),
            max_group_bytes=min(self.max_group_bytes, grouping.bytes_max),
        )


class Send(Struct, gc=False):
    """One send and who waits for its answer. ``gc``: what it holds never holds it."""

    body: SendBody
    sender: User
    source: str
    since: float
    deadline: float
    answer: Callable[[Outcome], None]
    lane: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        content = self.body.content
        self.bytes = len(content) if content.isascii() else len(content.encode())

    @property
    def order_key(self) -> tuple[str, str]:
        """What keeps its order: one connection's sends to one chat."""
        return (self.source, self.body.chat_id)


Refusals = list[tuple[Send, HoldfastError]]
_Failed = Mapping[tuple[str, str], HoldfastError]
"""The answer of the first send that failed, by ``order_key``."""


class SendQueue:
    """A bounded queue of sends, cut into groups of one lane each."""

    def __init__(self, settings: IntakeSettings) -> None:
        self._settings = settings
        self._lanes: dict[int, deque[Send]] = {}
        """The lanes in which sends wait; the lane whose turn is next comes first."""
        self._expiries: list[tuple[float, int]] = []
        """A heap: when the front of each lane will have waited too long. An entry whose
        send is no front any more is dropped when it comes to the top.
        """
        self._waiting = 0
        self._per_chat: dict[str, int] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return self._waiting

    @property
    def bytes(self) -> int:
        return self._bytes

    def in_chat(self, chat_id: str) -> int:
        return self._per_chat.get(chat_id, 0)

    def in_lane(self, lane: int) -> int:
        return len(self._lanes.get(lane, ()))

    def admit(self, send: Send) -> tuple[str, ServerBusy] | None:
        """Queue a send, or say which bound (total, chat, bytes) it would break."""
        limits = self._settings
        chat_id = send.body.chat_id
        in_chat = self._per_chat.get(chat_id, 0)
        if self._waiting >= limits.max_waiting:
            return "total", _busy("too many sends are waiting", limits.max_waiting)
        if in_chat >= limits.max_waiting_per_chat:
            return "chat", _busy(
                "too many sends are waiting in this chat", limits.max_waiting_per_chat
            )
        if self._bytes + send.bytes > limits.max_waiting_bytes:
            return "bytes", _busy("too many bytes are waiting", limits.max_waiting_bytes)
        queue = self._lanes.get(send.lane)
        if queue is None:
            self._put(send.lane, deque((send,)))
        else:
            queue.append(send)
        self._waiting += 1
        self._per_chat[chat_id] = in_chat + 1
        self._bytes += send.bytes
        return None

    def take(self, now: float, busy: Container[int] = ()) -> tuple[list[Send], Refusals]:
        """The next group of a lane that is not ``busy``, and the sends that waited too
        long, with their answers. The group is empty if no such lane has sends.

        The lane goes behind the others. At most one lane more than are busy is looked
        at, besides those in which all have waited too long.
        """
        refused: Refusals = []
        while (lane := next((each for each in self._lanes if each not in busy), None)) is not None:
            queue = self._lanes.pop(lane)
            failed: dict[tuple[str, str], HoldfastError] = {}
            group = self._cut(queue, now, failed, refused)
            self._put(lane, queue)
            refused += self.fail_followers(lane, failed)
            if group:
                return group, refused
        return [], refused

    def _cut(
        self,
        queue: deque[Send],
        now: float,
        failed: dict[tuple[str, str], HoldfastError],
        refused: Refusals,
    ) -> list[Send]:
        """Take a group off a lane's queue, and what waited too long in front of it."""
        limits = self._settings
        group: list[Send] = []
        size = 0
        while queue and len(group) < limits.max_group_sends:
            send = queue[0]
            error = failed.get(send.order_key) if failed else None
            if error is None and (
                now >= send.deadline or now >= send.since + limits.max_age_seconds
            ):
                error = self._verdict(send, now)
            if error is None and group and size + send.bytes > limits.max_group_bytes:
                break
            self._forget(queue.popleft())
            if error is None:
                group.append(send)
                size += send.bytes
            else:
                failed[send.order_key] = error
                refused.append((send, error))
        return group

    def expire(self, now: float) -> Refusals:
        """Those that waited too long, with their followers, while commits keep their
        groups from starting.
        """
        refused: Refusals = []
        while (expiry := self.next_expiry()) is not None and expiry <= now:
            lane = heappop(self._expiries)[1]
            queue = self._lanes[lane]
            failed: dict[tuple[str, str], HoldfastError] = {}
            while queue and (error := self._verdict(queue[0], now)) is not None:
                send = queue.popleft()
                self._forget(send)
                error = failed.setdefault(send.order_key, error)
                refused.append((send, error))
            self._put(lane, queue)
            refused += self.fail_followers(lane, failed)
        return refused

    def next_expiry(self) -> float | None:
        """When the first send at the front of a lane will have waited too long."""
        expiries = self._expiries
        while expiries:
            expiry, lane = expiries[0]
            queue = self._lanes.get(lane)
            if queue is not None and self._expiry(queue[0]) == expiry:
                return expiry
            heappop(expiries)
        return None

    def fail_followers(self, lane: int, failed: _Failed) -> Refusals:
        """Take out the sends behind failed ones of their connection and chat."""
        queue = self._lanes.get(lane)
        if not failed or queue is None:
            return []
        refused = [(send, failed[send.order_key]) for send in queue if send.order_key in failed]
        if refused:
            for send, _ in refused:
                self._forget(send)
            self._put(lane, deque(send for send in queue if send.order_key not in failed))
        return refused

    def clear(self) -> list[Send]:
        """Take out everything."""
        sends = [send for queue in self._lanes.values() for send in queue]
        self._lanes.clear()
        self._expiries.clear()
        self._per_chat.clear()
        self._waiting = self._bytes = 0
        return sends

    def _put(self, lane: int, queue: deque[Send]) -> None:
        """A lane has this queue now, and perhaps another front; it keeps its turn."""
        if not queue:
            self._lanes.pop(lane, None)
            return
        self._lanes[lane] = queue
        self.next_expiry()  # drops what is outdated: the heap stays as small as it can
        heappush(self._expiries, (self._expiry(queue[0]), lane))

    def _expiry(self, send: Send) -> float:
        return min(send.since + self._settings.max_age_seconds, send.deadline)

    def _verdict(self, send: Send, now: float) -> HoldfastError | None:
        if now >= send.deadline:
            return Unavailable("the deadline passed before the send was tried; send it again")
        # the same sum as in _expiry, to the last bit
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
        self._waiting -= 1
        self._bytes -= send.bytes


def _busy(message: str, limit: int) -> ServerBusy:
    return ServerBusy(f"{message}; send it again", retry_after_seconds=1, limit=limit)
