"""What a rule store promises. Adapters: sqlite (embedded), postgres (shared).

Each change is one transaction: lock out other writers, compare, write the rule, append
to the log, save the idempotency key with its answer, notify. If any step fails, nothing
has changed. Because of the lock, ``seq`` follows the order of commits, so a cursor that
has read up to n never misses an entry below n.

Errors: ``Unavailable`` (nothing happened), ``OutcomeUnknown`` (the commit may have
happened; repeating the call with the same key answers), and those of
``rule_changes.decide`` and ``entry_rules.refuse_lockout``. None of them contains a host
name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from holdfast.limits.rule_changes import Change, RuleChange, RuleChangeResult
from holdfast.limits.rule_import import ImportResult, RuleDifference, RuleImport
from holdfast.limits.rules import AnyRule, Rule, RuleName, RuleSnapshot

CHANGES_PER_READ = 100
FORGOTTEN_PER_CHANGE = 100
"""Log entries trimmed per change at most: a lower setting takes effect gradually."""
NOTIFICATION_BYTES_MAX = 4_096
CHANNEL = "rule_changes"
"""The channel of notifications, in PostgreSQL and in Redis."""
TICK_SECONDS = 0.1
"""How often a follower reads the log, unless tuned."""
ABOVE_EVERY_VERSION = 2**62


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """How much history a rule store keeps.

    Live rules are never forgotten, and the versions of a name never restart.
    """

    changes_kept: int = 100_000
    """Changes in the log: what ``history`` shows and ``rollback`` reaches. A deleted
    rule is forgotten with the change that deleted it; a node that is further behind
    reads everything again."""
    keys_kept_days: float = 7.0
    """How long an idempotency key gets its first answer."""

    def __post_init__(self) -> None:
        if self.changes_kept < CHANGES_PER_READ:
            raise ValueError(f"changes_kept must be at least {CHANGES_PER_READ}")
        if self.keys_kept_days <= 0:
            raise ValueError("keys_kept_days must be greater than 0")


class RuleLogHead(Struct, frozen=True):
    """The end of the log as a reader sees it, the rules' digest, the reader's lag.

    ``store`` identifies the rule store for its whole life.
    """

    epoch: int
    seq: int
    digest: str
    lag_seconds: float
    store: str


class ChangeNotification(Struct, frozen=True):
    """A hint that something changed; ``rule`` is None if it was too long to include.

    Several stores may share a channel (Redis channels span databases): ``store`` says
    whose it is.
    """

    epoch: int
    seq: int
    rule: Rule | None = None
    store: str = ""


class RuleReader(Protocol):
    """What a node needs to follow the rules."""

    async def head(self) -> RuleLogHead: ...

    async def changes_after(self, seq: int, limit: int = CHANGES_PER_READ) -> Sequence[RuleChange]:
        """Changes with a higher ``seq``, in order. A gap shows that older ones are
        gone.

        Unreadable rules are included; the digest shows a reader that it lacks
        something.
        """
        ...

    async def snapshot(self) -> RuleSnapshot:
        """All rules, tombstones included, and the end of the log, at one moment."""
        ...


class RuleStore(RuleReader, Protocol):
    """The durable rules."""

    async def change(self, change: Change) -> RuleChangeResult:
        """Commit one change. Raises as ``rule_changes.decide`` and
        ``entry_rules.refuse_lockout``."""
        ...

    async def import_rules(
        self, wanted: RuleImport
    ) -> tuple[ImportResult, Sequence[RuleDifference]]:
        """Commit an import in one transaction, all or nothing; or plan a dry run.

        Raises as ``rule_import.plan_import`` and ``entry_rules.refuse_lockout``. A
        repetition returns no differences.
        """
        ...

    async def get(self, name: RuleName) -> AnyRule | None:
        """The rule as the primary has it now, tombstones included."""
        ...

    async def page(
        self, tenant: str | None, after: RuleName | None, limit: int
    ) -> Sequence[AnyRule]:
        """Live rules in order of their names, of one tenant or of all."""
        ...

    async def history(self, name: RuleName, before: int | None, limit: int) -> Sequence[RuleChange]:
        """The rule's changes with a version below ``before``, newest first."""
        ...


class ChangeNotifications(Protocol):
    """Best-effort notifications of rule changes."""

    def notifications(self) -> AsyncIterator[ChangeNotification]:
        """Notifications from now on, until closed.

        Raises Unavailable when it cannot listen; notifications in between are lost. The
        first item always has ``seq`` 0: it says that listening has begun.
        """
        ...
