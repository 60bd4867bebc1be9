"""The bounds of one connection, each with its policy. Names and values are the seed's where it has them."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.bounds import KIB, MIB, positive


@dataclass(frozen=True, slots=True)
class Inbound:
    """What one connection may ask of us. Over the rate: RATE_LIMITED. Over the queue: SERVER_BUSY."""

    rate_limit_per_second: float = 10
    rate_limit_burst: int = 20
    other_rate_limit_per_second: float = 50
    other_rate_limit_burst: int = 100
    max_queue_depth: int = 100
    max_queue_age_seconds: float = 2
    max_message_size_bytes: int = 4096
    max_frame_bytes: int = 64 * KIB
    max_fragments: int = 16
    max_invalid_frames: int = 10
    invalid_frames_window_seconds: float = 60

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


@dataclass(frozen=True, slots=True)
class Outbound:
    """What may wait for one connection. Above ``critical``: warned, heads only; then closed, healed by sync."""

    max_buffer_messages: int = 1000
    max_buffer_bytes: int = 5 * MIB
    warning_threshold_percent: int = 80
    critical_threshold_percent: int = 95
    grace_period_seconds: float = 5
    grace_total_seconds: float = 60
    new_low_percent: int = 5
    ephemeral_threshold_percent: int = 50
    max_control_frames: int = 200
    max_ephemeral_frames: int = 256
    socket_send_buffer_bytes: int = 64 * KIB

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)
        if not self.warning_threshold_percent < self.critical_threshold_percent <= 100:
            raise ValueError("warning_threshold_percent must be below critical_threshold_percent, at most 100")
        if self.grace_period_seconds > self.grace_total_seconds:
            raise ValueError("grace_period_seconds must not exceed grace_total_seconds")


@dataclass(frozen=True, slots=True)
class Backpressure:
    """Both ways of one connection."""

    inbound: Inbound = field(default_factory=Inbound)
    outbound: Outbound = field(default_factory=Outbound)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a connection waits for what."""

    durability_rpc_seconds: float = 5
    heartbeat_interval_seconds: float = 30
    heartbeat_timeout_seconds: float = 10
    authentication_seconds: float = 5
    rotation_seconds: float = 24 * 3600
    behind_before_heads_seconds: float = 5
    stale_acks_seconds: float = 60
    overload_window_seconds: float = 30
    overload_requests_min: int = 10

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


@dataclass(frozen=True, slots=True)
class Pages:
    """Sync pages: a limit and a size, whichever is first; one in flight per connection."""

    default_messages: int = 100
    max_messages: int = 500
    max_bytes: int = 256 * KIB
    resume_chats_per_frame: int = 500
    resume_chats_max: int = 5000

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Everything a session has to keep within."""

    backpressure: Backpressure = field(default_factory=Backpressure)
    timeouts: Timeouts = field(default_factory=Timeouts)
    pages: Pages = field(default_factory=Pages)

    def announced(self) -> dict[str, float]:
        """What a client is told when it connects, so that it can keep within it."""
        inbound, pages = self.backpressure.inbound, self.pages
        return {
            "max_message_size_bytes": inbound.max_message_size_bytes,
            "max_frame_bytes": inbound.max_frame_bytes,
            "max_queue_depth": inbound.max_queue_depth,
            "rate_limit_per_second": inbound.rate_limit_per_second,
            "rate_limit_burst": inbound.rate_limit_burst,
            "other_rate_limit_per_second": inbound.other_rate_limit_per_second,
            "other_rate_limit_burst": inbound.other_rate_limit_burst,
            "page_messages_max": pages.max_messages,
            "resume_chats_per_frame": pages.resume_chats_per_frame,
        }
