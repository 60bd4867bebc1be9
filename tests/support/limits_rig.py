"""A rule database and shared counters that fail as a test asks, for virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from msgspec import structs

from holdfast.errors import OutcomeUnknown, Unavailable
from holdfast.limits.counters.contract import (
    Adjustment,
    CounterRequest,
    CounterResponse,
    NodesAnnounced,
)
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.rule_changes import RuleChange
from holdfast.limits.rules import Rule, RuleName, RuleSet, RuleSnapshot
from holdfast.limits.rulestore.contract import ChangeNotification, RuleLogHead
from holdfast.limits.rulestore.notifications import LocalNotifications
from proof import virtual_loop


class Log:
    """A database with a log; it can be unavailable, lag, or lose its last changes."""

    def __init__(self, store: str = "ours") -> None:
        self.store = store
        self.epoch = 1
        self.changes: list[RuleChange] = []
        self.committed_at: list[float] = []
        self.unavailable = False
        self.lag = 0
        self.lag_seconds = 0.0
        self.snapshots = 0
        self.channel = LocalNotifications()
        self.deaf = False
        self.forgettings: list[tuple[int, int]] = []
        """At which place of the log it forgot up to which: its changes, and the
        tombstones that are older.
        """

    def put(self, resource: str, limit: int, deleted: bool = False, notify: bool = True) -> Rule:
        return self.commit(
            Rule("acme", resource, "token_bucket", limit, 60.0, deleted=deleted), notify
        )

    def commit(self, rule: Rule, notify: bool = True) -> Rule:
        """The rule in its next version."""
        versions = [c.rule.version for c in self.changes if c.rule.name == rule.name]
        rule = structs.replace(rule, epoch=self.epoch, version=max(versions, default=0) + 1)
        seq = len(self.changes) + 1
        self.changes.append(RuleChange(seq, "update", rule, "olga", "", ""))
        self.committed_at.append(asyncio.get_running_loop().time())
        if notify:
            self.channel.notify(ChangeNotification(self.epoch, seq, rule, self.store))
        return rule

    def fail_over(self, lost: int) -> None:
        self.epoch += 1
        del self.changes[len(self.changes) - lost :]
        del self.committed_at[len(self.changes) :]
        self.forgettings = [each for each in self.forgettings if each[0] <= len(self.changes)]

    def forget(self, up_to: int) -> None:
        self.forgettings.append((len(self.changes), up_to))

    def _forgotten(self) -> int:
        """As a reader knows it: who lags has not seen the last of it either."""
        known = len(self._seen())
        return max((up_to for at, up_to in self.forgettings if at <= known), default=0)

    def _seen(self) -> list[RuleChange]:
        if self.unavailable:
            raise Unavailable("unavailable")
        return self.changes[: len(self.changes) - self.lag]

    def rules(self) -> dict[RuleName, Rule]:
        last = {change.rule.name: change for change in self._seen()}
        return {
            n: c.rule
            for n, c in last.items()
            if not (c.rule.deleted and c.seq <= self._forgotten())
        }

    async def head(self) -> RuleLogHead:
        return RuleLogHead(
            self.epoch,
            len(self._seen()),
            RuleSet(self.rules()).digest,
            self.lag_seconds,
            self.store,
        )

    async def changes_after(self, seq: int, limit: int = 100) -> Sequence[RuleChange]:
        return [change for change in self._seen() if change.seq > max(seq, self._forgotten())][
            :limit
        ]

    async def snapshot(self) -> RuleSnapshot:
        self.snapshots += 1
        return RuleSnapshot(
            self.epoch, len(self._seen()), tuple(self.rules().values()), store=self.store
        )

    def notifications(self) -> AsyncIterator[ChangeNotification]:
        if self.deaf:
            raise Unavailable("deaf")
        return self.channel.notifications()


class Shared(MemoryCounters):
    """Remote counters, which can be unavailable (refuse), lost (count, no answer),
    silent (hang) or broken.
    """

    in_process = False

    def __init__(self) -> None:
        super().__init__(virtual_loop.LoopClock())
        self.mood = "well"
        self.delay = 0.001
        self.calls: list[Sequence[Sequence[CounterRequest]]] = []
        self.adjustments: list[Adjustment] = []
        self.nodes = 1

    async def take(self, entries: Sequence[Sequence[CounterRequest]]) -> CounterResponse:
        self.calls.append(entries)
        await asyncio.sleep(self.delay)
        if self.mood == "unavailable":
            raise Unavailable("unavailable")
        taken = await super().take(entries)
        if self.mood == "broken":
            raise ValueError("a defect")
        if self.mood == "lost":
            raise OutcomeUnknown("lost")
        if self.mood == "silent":
            await asyncio.sleep(3600)
        return taken

    async def adjust(self, adjustments: Sequence[Adjustment]) -> int:
        if self.mood != "well":
            raise Unavailable("unavailable")
        self.adjustments += adjustments
        return await super().adjust(adjustments)

    async def announce(self, node: str, ttl_seconds: float) -> NodesAnnounced:
        if self.mood != "well":
            raise Unavailable("unavailable")
        return NodesAnnounced(self.nodes, (node, *(f"other {n}" for n in range(1, self.nodes))))


class Members(Shared):
    """Counts who announced itself, as Redis does, and can lose all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.members: dict[str, float] = {}

    async def announce(self, node: str, ttl_seconds: float) -> NodesAnnounced:
        if self.mood != "well":
            raise Unavailable("unavailable")
        now = asyncio.get_running_loop().time()
        self.members[node] = now + ttl_seconds
        alive = sorted(name for name, until in self.members.items() if until > now)
        return NodesAnnounced(len(alive), tuple(alive))
