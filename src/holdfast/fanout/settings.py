"""The settings of fanout: reading the log, retries, dead letters, ephemeral events."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.bounds import positive
from holdfast.fanout.dead_letters import DeadLetterSettings
from holdfast.fanout.ephemeral import EphemeralSettings
from holdfast.resilience import Backoff


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """How often a joined chat is read (``gateway.roster_sync``), and how long is waited
    between attempts, there and while the log is unavailable.
    """

    max_attempts: int = 3
    """Attempts to read the membership of a user who joined a chat, the first included;
    then it is skipped and counted, and the next heartbeat finds it.
    """
    initial_backoff_ms: float = 100
    """The first wait between attempts."""
    max_backoff_ms: float = 1000
    """The longest wait between attempts."""

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)

    @property
    def backoff(self) -> Backoff:
        return Backoff(self.initial_backoff_ms / 1000, self.max_backoff_ms / 1000)


@dataclass(frozen=True, slots=True)
class FanoutSettings:
    """Fanout: reading the log, retries, dead letters, ephemeral events."""

    read_entries_max: int = 500
    """Entries read from the event log at once."""
    retry: RetrySettings = field(default_factory=RetrySettings)
    dlq: DeadLetterSettings = field(default_factory=DeadLetterSettings)
    ephemeral: EphemeralSettings = field(default_factory=EphemeralSettings)

    def __post_init__(self) -> None:
        positive(self, "read_entries_max")
