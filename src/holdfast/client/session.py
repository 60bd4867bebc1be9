"""The client's state that ends with its connection: deadlines, pace, resume. (Pure.)"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from holdfast.resilience import Bucket
from holdfast.wire.frames import CursorClaim

NEVER = float("inf")
SHARE_OF_RATE = 0.9
"""The used share of the server's rate: a network bunches evenly spaced frames."""


class Sync:
    """The page in flight; ``known_head``: its chat's when we asked."""

    __slots__ = ("at", "chat_id", "known_head", "request_id")

    def __init__(self, chat_id: str, request_id: str, known_head: int, at: float) -> None:
        self.chat_id = chat_id
        self.request_id = request_id
        self.known_head = known_head
        self.at = at


class FramePace:
    """The rate of all frames but sends. At the bound, frames wait until ``until``."""

    __slots__ = ("_bucket", "until")

    def __init__(self, limits: Mapping[str, float], now: float) -> None:
        rate, burst = (
            limits.get("other_rate_limit_per_second"),
            limits.get("other_rate_limit_burst"),
        )
        self._bucket = None
        if rate and burst:
            self._bucket = Bucket(rate * SHARE_OF_RATE, max(1, int(burst * SHARE_OF_RATE)), now)
        self.until = now

    def allows(self, now: float) -> bool:
        """Whether one more frame may be sent now; if so, it is counted."""
        if now < self.until:
            return False
        wait = self._bucket.take(now) if self._bucket is not None else 0.0
        if wait:
            self.until = now + max(wait, 0.001)  # more than the clock's resolution
        return not wait

    def hold(self, until: float) -> None:
        """The server asked the client to wait."""
        self.until = max(self.until, until)


class Resuming:
    """A resume, from ``at`` on, frame by frame; its last frame's reply ends it."""

    __slots__ = ("_requests", "asked_at", "at", "failures", "frames")

    def __init__(self, now: float) -> None:
        self.at = now
        self.failures = 0
        self.restart(now)

    def restart(self, at: float) -> None:
        """Repeat all of it: a chat without its cursor would seem new."""
        self.at = at
        self.frames: deque[dict[str, CursorClaim]] | None = None
        self.asked_at = NEVER
        self._requests: list[str] = []

    def begin(self, frames: Iterable[dict[str, CursorClaim]]) -> None:
        self.frames = deque(frames)

    def on_asked(self, request_id: str, now: float) -> None:
        self._requests.append(request_id)
        if not self.frames:
            self.asked_at = now

    def has_asked(self, request_id: str | None) -> bool:
        """Whether this is one of its requests."""
        return request_id in self._requests

    def ends_with(self, request_id: str | None) -> bool:
        """Whether this is the request whose reply ends it."""
        return self.frames is not None and not self.frames and self._requests[-1] == request_id


class ClientSession:
    """One connection. ``received_at``: last bytes; ``partial_at``: last partial frame.

    ``resumed_many``: the last resume brought many chats, so another one may too.
    ``synced``: all messages missed before this connection have been received.
    """

    __slots__ = (
        "accepted",
        "drop_at",
        "opened_at",
        "pace",
        "partial_at",
        "received_at",
        "renew_at",
        "resumed_many",
        "resuming",
        "silence_seconds",
        "sync",
        "synced",
    )

    def __init__(self, now: float) -> None:
        self.accepted = self.synced = False
        self.opened_at = self.received_at = now
        self.partial_at = -NEVER
        self.silence_seconds = NEVER
        self.pace = FramePace({}, now)
        self.resuming: Resuming | None = None
        self.resumed_many = False
        self.sync: Sync | None = None
        self.renew_at = NEVER
        self.drop_at = NEVER

    @property
    def silent_at(self) -> float:
        """When the server's silence becomes too long."""
        return self.received_at + self.silence_seconds

    def waits_since(self) -> float:
        """When the oldest open request but sends was made; NEVER if none is open."""
        if not self.accepted:
            return self.opened_at
        asked = [self.sync.at] if self.sync is not None else []
        if self.resuming is not None:
            asked.append(self.resuming.asked_at)
        return min(asked, default=NEVER)
