"""The client's side of a session: what ends with its connection, deadlines, pace, resume. (Pure.)"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from holdfast.resilience import Bucket
from holdfast.wire.frames import CursorClaim

NEVER = float("inf")
SHARE_OF_RATE = 0.9
"""What we use of the rate the server allows: a network bunches what left well spaced."""


class Sync:
    """The page in flight; ``heard`` is what we knew of its chat when we asked."""

    __slots__ = ("at", "chat_id", "heard", "request_id")

    def __init__(self, chat_id: str, request_id: str, heard: int, at: float) -> None:
        self.chat_id = chat_id
        self.request_id = request_id
        self.heard = heard
        self.at = at


class FramePace:
    """The rate of all frames that are no sends. At the bound what wants to leave waits for ``until``."""

    __slots__ = ("_bucket", "until")

    def __init__(self, limits: Mapping[str, float], now: float) -> None:
        rate, burst = limits.get("other_rate_limit_per_second"), limits.get("other_rate_limit_burst")
        self._bucket = None
        if rate and burst:
            self._bucket = Bucket(rate * SHARE_OF_RATE, max(1, int(burst * SHARE_OF_RATE)), now)
        self.until = now

    def allows(self, now: float) -> bool:
        """Whether one more may leave now; if so it counts."""
        if now < self.until:
            return False
        wait = self._bucket.take(now) if self._bucket is not None else 0.0
        if wait:
            self.until = now + max(wait, 0.001)  # never so little that the clock does not notice
        return not wait

    def hold(self, until: float) -> None:
        """The server asks us to wait."""
        self.until = max(self.until, until)


class Resuming:
    """A resume under way: begun at ``at`` or later, frame by frame; the answer to the last frame is the answer."""

    __slots__ = ("_requests", "asked_at", "at", "failures", "frames")

    def __init__(self, now: float) -> None:
        self.at = now
        self.failures = 0
        self.again(now)

    def again(self, at: float) -> None:
        """All of it, from the beginning: a part of the cursors would make chats seem joined that we have."""
        self.at = at
        self.frames: deque[dict[str, CursorClaim]] | None = None
        self.asked_at = NEVER
        self._requests: list[str] = []

    def begin(self, frames: Iterable[dict[str, CursorClaim]]) -> None:
        self.frames = deque(frames)

    def asked(self, request_id: str, now: float) -> None:
        self._requests.append(request_id)
        if not self.frames:
            self.asked_at = now

    def has_asked(self, request_id: str | None) -> bool:
        """Whether this is one of its requests."""
        return request_id in self._requests

    def ends_with(self, request_id: str | None) -> bool:
        """Whether this is the request whose answer ends it."""
        return self.frames is not None and not self.frames and self._requests[-1] == request_id


class ClientSession:
    """On one connection. ``heard_at``: the last bytes; ``coming_at``: the last that left a frame unfinished.

    ``resumed_many``: the last resume brought many chats, so that another one may too. ``synced``: nothing that was
    missed before it is missing any more.
    """

    __slots__ = (
        "accepted",
        "coming_at",
        "drop_at",
        "heard_at",
        "opened_at",
        "pace",
        "renew_at",
        "resumed_many",
        "resuming",
        "silence_seconds",
        "sync",
        "synced",
    )

    def __init__(self, now: float) -> None:
        self.accepted = self.synced = False
        self.opened_at = self.heard_at = now
        self.coming_at = -NEVER
        self.silence_seconds = NEVER
        self.pace = FramePace({}, now)
        self.resuming: Resuming | None = None
        self.resumed_many = False
        self.sync: Sync | None = None
        self.renew_at = NEVER
        self.drop_at = NEVER

    @property
    def silent_at(self) -> float:
        """When the server will have been silent for too long."""
        return self.heard_at + self.silence_seconds

    def waits_since(self) -> float:
        """Since when the oldest of our questions, sends apart, waits for its answer; NEVER if none does."""
        if not self.accepted:
            return self.opened_at
        asked = [self.sync.at] if self.sync is not None else []
        if self.resuming is not None:
            asked.append(self.resuming.asked_at)
        return min(asked, default=NEVER)
