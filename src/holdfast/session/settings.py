"""The bounds of one connection, each with what happens beyond it. (Pure.)

Names and values come from the design document where it has them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.bounds import KIB, MIB, positive


@dataclass(frozen=True, slots=True)
class InboundSettings:
    """What one connection may ask; beyond a rate RATE_LIMITED, else SERVER_BUSY."""

    rate_limit_per_second: float = 10
    """Sends of one connection. Above: RATE_LIMITED with retry_after_seconds."""
    rate_limit_burst: int = 20
    """How many sends may come at once before the rate counts."""
    other_rate_limit_per_second: float = 50
    """All other frames of one connection, pings included. Above: RATE_LIMITED, at
    most once a second for frames that expect no answer.
    """
    other_rate_limit_burst: int = 100
    """How many frames may come at once before the rate counts."""
    work_rate_limit_per_second: float = 200
    """Every frame of one connection, also before it has authenticated: refused and
    invalid ones, pings, pongs, fragments and each 4 KiB of a long frame. Above: its
    socket is not read until it is within the rate again. At least the two rates above
    together.
    """
    work_rate_limit_burst: int = 400
    """How many frames may come at once before the rate counts."""
    work_pause_seconds_max: float = 10
    """Not read for this long within the window: close rate_limited (4009), reconnect
    after the window; before authentication close unauthorized (4502).
    """
    work_pause_window_seconds: float = 30
    """How far back these pauses count."""
    max_queue_depth: int = 100
    """Requests of one connection without an answer. The next: SERVER_BUSY."""
    max_queue_age_seconds: float = 2
    """How long a sync or resume waits for its turn, then SERVER_BUSY."""
    max_message_size_bytes: int = 4096
    """UTF-8 content of a message, by socket or REST. Above: MESSAGE_TOO_LARGE."""
    max_frame_bytes: int = 64 * KIB
    """A larger frame closes the connection (protocol_error, 4501)."""
    max_fragments: int = 16
    """Fragments of one message. More close the connection (4501)."""
    max_invalid_frames: int = 10
    """The last of this many in the window closes it (4501); each is answered first."""
    invalid_frames_window_seconds: float = 60
    """How far back invalid frames count."""

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)
        if (
            self.work_rate_limit_per_second
            < self.rate_limit_per_second + self.other_rate_limit_per_second
        ):
            raise ValueError(
                "work_rate_limit_per_second counts every frame: it must be at least"
                " rate_limit_per_second and other_rate_limit_per_second together"
            )
        if self.work_rate_limit_burst < self.rate_limit_burst + self.other_rate_limit_burst:
            raise ValueError(
                "work_rate_limit_burst counts every frame: it must be at least rate_limit_burst and"
                " other_rate_limit_burst together"
            )
        if self.work_pause_seconds_max > self.work_pause_window_seconds:
            raise ValueError("work_pause_seconds_max must not exceed work_pause_window_seconds")


@dataclass(frozen=True, slots=True)
class OutboundSettings:
    """What may wait for one connection before it is warned, then closed."""

    max_buffer_messages: int = 1000
    """Deliveries that may wait for one connection: 100 % of the thresholds below."""
    max_buffer_bytes: int = 5 * MIB
    """Their bytes; whichever is fuller counts."""
    warning_threshold_percent: int = 80
    """Above: logged once. A slow client that drains below it recovers: ``resync``."""
    critical_threshold_percent: int = 95
    """Above: ``error SLOW_CONSUMER``, heads instead of messages, the grace starts."""
    grace_period_seconds: float = 5
    """Without a new low for this long: close slow_consumer (4002)."""
    grace_total_seconds: float = 60
    """The longest grace, however steadily the client drains."""
    new_low_percent: int = 5
    """A fill this much under the last low is a new low and starts the grace again."""
    ephemeral_threshold_percent: int = 50
    """Above: typing, presence and receipts are dropped for this connection, and growing
    replies wait.
    """
    max_control_frames: int = 200
    """Responses that wait; at this many its socket is not read until half have left."""
    max_ephemeral_frames: int = 256
    """Ephemeral frames that wait for one connection, and growing replies that it gets;
    the oldest is dropped.
    """
    socket_send_buffer_bytes: int = 64 * KIB
    """SO_SNDBUF of each connection: what a stopped reader can hide in the kernel."""

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)
        if not self.warning_threshold_percent < self.critical_threshold_percent <= 100:
            raise ValueError(
                "warning_threshold_percent must be below critical_threshold_percent, at most 100"
            )
        if self.grace_period_seconds > self.grace_total_seconds:
            raise ValueError("grace_period_seconds must not exceed grace_total_seconds")


@dataclass(frozen=True, slots=True)
class BackpressureSettings:
    """Both ways of one connection."""

    inbound: InboundSettings = field(default_factory=InboundSettings)
    outbound: OutboundSettings = field(default_factory=OutboundSettings)


@dataclass(frozen=True, slots=True)
class TimeoutSettings:
    """How long a connection waits for what."""

    durability_rpc_seconds: float = 5
    """The deadline of a send, passed inward. Then SERVICE_UNAVAILABLE: outcome unknown
    if a commit was under way, else rejected.
    """
    heartbeat_interval_seconds: float = 30
    """Between heartbeats to a client, and between two comparisons with the store."""
    heartbeat_timeout_seconds: float = 10
    """No answer for this long, and no bytes leave: close idle_timeout (4001)."""
    authentication_seconds: float = 5
    """No credential for this long: close unauthorized (4502)."""
    rotation_seconds: float = 24 * 3600
    """An older connection is closed (rotation, 4004) to reconnect; spread by 5 %."""
    behind_before_heads_seconds: float = 5
    """A chat that is behind its head for this long is named in the heartbeat."""
    stale_acks_seconds: float = 60
    """Acks that stay behind: one ``resync``; again: close state_diverged (4006)."""
    overload_window_seconds: float = 30
    """More than half of its requests SERVER_BUSY: close overloaded (4005)."""
    overload_requests_min: int = 10
    """Fewer requests in a window are not judged."""
    slow_link_bytes_per_second: ClassVar[float] = 2_500
    """20 kbit/s: a client behind a proxy gets the time that its data takes at this
    rate.
    """
    slow_link_seconds_max: ClassVar[float] = 120
    """The most that a heartbeat's timeout is extended by for a slow link."""

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


@dataclass(frozen=True, slots=True)
class PageSettings:
    """Sync pages: a limit and a size, whichever is first; one at a time."""

    default_messages: int = 100
    """Messages of a sync page whose request names no limit."""
    max_messages: int = 500
    """The largest limit a request may name. Above: INVALID_MESSAGE."""
    max_bytes: int = 256 * KIB
    """A page ends here if its messages are large; ``has_more`` says so."""
    resume_chats_per_frame: int = 500
    """Cursors of one ``resume`` frame. Above: INVALID_MESSAGE."""
    resume_chats_max: int = 5000
    """Cursors of one resume in all its frames. Above: INVALID_MESSAGE."""

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Everything a session has to keep within."""

    backpressure: BackpressureSettings = field(default_factory=BackpressureSettings)
    timeouts: TimeoutSettings = field(default_factory=TimeoutSettings)
    pages: PageSettings = field(default_factory=PageSettings)

    def announced(self) -> dict[str, float]:
        """The limits that ``connection_established`` names."""
        inbound, pages = self.backpressure.inbound, self.pages
        return {
            "max_message_size_bytes": inbound.max_message_size_bytes,
            "max_frame_bytes": inbound.max_frame_bytes,
            "max_queue_depth": inbound.max_queue_depth,
            "rate_limit_per_second": inbound.rate_limit_per_second,
            "rate_limit_burst": inbound.rate_limit_burst,
            "other_rate_limit_per_second": inbound.other_rate_limit_per_second,
            "other_rate_limit_burst": inbound.other_rate_limit_burst,
            "work_rate_limit_per_second": inbound.work_rate_limit_per_second,
            "work_rate_limit_burst": inbound.work_rate_limit_burst,
            "page_messages_max": pages.max_messages,
            "resume_chats_per_frame": pages.resume_chats_per_frame,
        }
