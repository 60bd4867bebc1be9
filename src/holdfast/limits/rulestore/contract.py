"""What a store of rules promises. Adapters: sqlite (embedded), postgres (a primary, and a replica for reading).

One transaction per change: lock the writers, compare, write the rule, append to the log, remember the key with its
answer, ring. If any part fails nothing has changed. The lock makes the order of ``seq`` the order of commits, so a
cursor that has read up to n will never miss one below it.

Errors: ``Unavailable`` (nothing happened), ``OutcomeUnknown`` (the commit may have happened: the same call with the
same key tells), and those of ``changes.decide`` and ``lockout.keep_open``. No host name is in any of them.
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
"""A change makes the log forget so many at most: a lower setting takes effect bit by bit."""
DOORBELL_BYTES_MAX = 4_096
CHANNEL = "rule_changes"
"""Where doorbells ring, in PostgreSQL and in Redis."""
ABOVE_EVERY_VERSION = 2**62


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    """How much of the past a store of rules keeps. The rules themselves, and their versions, are never forgotten."""

    changes_kept: int = 100_000
    """Changes in the log: what ``history`` shows and ``rollback`` reaches. A deleted rule is forgotten with the change
    that deleted it; a node that is further behind reads everything anew."""
    keys_kept_days: float = 7.0
    """How long an idempotency key gets its first answer."""

    def __post_init__(self) -> None:
        if self.changes_kept < CHANGES_PER_READ:
            raise ValueError(f"changes_kept must be at least {CHANGES_PER_READ}")
        if self.keys_kept_days <= 0:
            raise ValueError("keys_kept_days must be greater than 0")


class RuleLogHead(Struct, frozen=True):
    """Where the log stands as a reader sees it, the digest of all rules there, and how far the reader may lag.

    ``store`` tells one store of rules from every other, for as long as it lives.
    """

    epoch: int
    seq: int
    digest: str
    lag_seconds: float
    store: str


class ChangeNotification(Struct, frozen=True):
    """A doorbell: something changed. Only a hint; ``rule`` is None where it was too long to come along.

    Several stores may ring one doorbell (Redis knows no databases there): ``store`` says which one did.
    """

    epoch: int
    seq: int
    rule: Rule | None = None
    store: str = ""


class RuleReader(Protocol):
    """What a node needs to follow the rules."""

    async def head(self) -> RuleLogHead: ...

    async def changes_after(self, seq: int, limit: int = CHANGES_PER_READ) -> Sequence[RuleChange]:
        """Changes with a higher ``seq``, in order; the oldest may be forgotten, which a gap shows.

        What cannot be read here is among them: a reader finds by the digest that it does not have all.
        """
        ...

    async def snapshot(self) -> RuleSnapshot:
        """All rules and where the log stood, at one moment; tombstones included."""
        ...


class RuleStore(RuleReader, Protocol):
    """The durable rules."""

    async def change(self, change: Change) -> RuleChangeResult:
        """Commit one change; see ``changes.decide`` and ``lockout.keep_open`` for what it may raise."""
        ...

    async def import_rules(self, wanted: RuleImport) -> tuple[ImportResult, Sequence[RuleDifference]]:
        """Commit an import in one transaction, all of it or nothing; a dry run writes nothing.

        See ``rule_import.plan_import`` and ``lockout.keep_open`` for what it may raise. A repetition tells no
        differences.
        """
        ...

    async def get(self, name: RuleName) -> AnyRule | None:
        """The rule as the primary has it now; tombstones included."""
        ...

    async def page(self, tenant: str | None, after: RuleName | None, limit: int) -> Sequence[AnyRule]:
        """Living rules in order of their names, of one tenant or of all."""
        ...

    async def history(self, name: RuleName, before: int | None, limit: int) -> Sequence[RuleChange]:
        """The rule's changes, newest first, with a version below ``before``."""
        ...


class ChangeNotifications(Protocol):
    """Rings when a rule changes, if all goes well."""

    def rings(self) -> AsyncIterator[ChangeNotification]:
        """Rings from now on, until closed. Raises Unavailable when it cannot listen; rings in between are lost.

        The first item is always a ring with ``seq`` 0, which says: from here on I listen.
        """
        ...
