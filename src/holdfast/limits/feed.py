"""How a rule change reaches this node: the change log by cursor, notifications as
hints.

The cursor is authoritative; nothing is ever marked as sent. A notification that carries
a rule has it applied at once if it is newer, and the cursor does not move. Lost,
repeated and reordered notifications do no harm, because merging rules does not depend
on order (see ``rules.RuleSet``).

Only notifications of our own store count: Redis is often shared, and its channels span
all its databases. The first read shows which store is ours; earlier notifications wait
for it.

A notification may be ahead of the reader, because a replica lags, but not for long: a
reader reports up to which moment it knows everything. If it should know an entry that
was announced and does not have it 60 s later, the entry is not of our log (two copies
of one database announce under one name). Then the node reads everything again, and from
then on notifications only make it read the log.

At startup the node loads the last good snapshot from disk, listens, reads what is
newer, and is ready. The disk comes first because a lagging reader may know less than
this node did before its restart. If the database is unavailable, the node continues
with that snapshot and logs it; without a snapshot it uses the default rules, which are
older than any stored rule. Then it syncs every eight seconds, and at once if a
notification or the counters show that it is behind: by changes, or by a full snapshot
if the epoch is new or the digests differ.

Staleness is the time since this node last knew that it had every rule, infinite if it
never did. A replica's lag counts towards it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from msgspec import structs

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import HoldfastError
from holdfast.limits.rules import Rule, RuleName, RuleSet, RuleSnapshot
from holdfast.limits.rulestore.contract import (
    CHANGES_PER_READ,
    ChangeNotification,
    ChangeNotifications,
    RuleLogHead,
    RuleReader,
)
from holdfast.limits.rulestore.notifications import WAITING_MAX, end_tasks
from holdfast.limits.snapshot_file import RulesFile, SavedRules

UNCONFIRMED_SECONDS = 60.0
"""How long a notification is trusted without confirmation by the log. Longer than the
clocks of a primary and its replica can differ, since a replica's lag is measured by
both."""

_LogPosition = tuple[int, int]
"""An epoch and a ``seq`` in its log."""


class PendingNotifications:
    """Notifications the log has not confirmed yet. Times are monotonic seconds.

    ``last`` is the furthest log position that was announced.
    """

    def __init__(self) -> None:
        self.last: _LogPosition = (0, 0)
        self._awaited: tuple[_LogPosition, float] | None = None

    def seq(self, epoch: int) -> int:
        """The furthest ``seq`` announced; 0 if that was in another epoch."""
        return self.last[1] if self.last[0] == epoch else 0

    def add(self, position: _LogPosition, cursor: _LogPosition, now: float) -> None:
        """A notification brought ``position``; this node has read up to ``cursor``."""
        self.last = max(self.last, position)
        if self._awaited is None and position > cursor:
            self._awaited = (position, now)

    def overdue(self, head: _LogPosition, known_at: float, now: float) -> bool:
        """Whether an announced position is missing that the reader should know by now.

        One position is awaited at a time; once the log reaches it, the furthest is
        next. So a stream of notifications neither postpones the verdict nor hastens it.
        """
        if self._awaited is None:
            return False
        position, since = self._awaited
        if position > head:
            return known_at > since + UNCONFIRMED_SECONDS
        self._awaited = (self.last, now) if self.last > head else None
        return False

    def forget(self, position: _LogPosition) -> None:
        """Everything up to ``position`` is read; trust nothing beyond it."""
        self.last, self._awaited = position, None


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """How a node follows the rules."""

    sync_seconds: float = 8.0
    """How often the log is read without a notification; a lost notification costs at
    most this."""
    retry_seconds: float = 1.0
    """Between attempts while the database or a source of notifications is
    unavailable."""
    nudge_seconds: float = 0.05
    """How long a nudge waits for others, to be read together."""
    listen_seconds: float = 2.0
    """How long startup waits for notifications to be connected."""
    stale_seconds: float = 10.0
    """Above this age of its rules, the node logs and reports that they are stale."""

    def __post_init__(self) -> None:
        if (
            min(
                self.sync_seconds,
                self.retry_seconds,
                self.nudge_seconds,
                self.listen_seconds,
                self.stale_seconds,
            )
            <= 0
        ):
            raise ValueError("the feed's times must be greater than 0")
        if self.stale_seconds <= self.sync_seconds + self.retry_seconds:
            raise ValueError(
                "stale_seconds must be greater than sync_seconds + retry_seconds, or one sync that"
                " fails is an alarm"
            )


class RuleFeed:
    """Keeps a RuleSet current, passing each new one to ``apply``, in ``async with``."""

    def __init__(
        self,
        reader: RuleReader,
        sources: Sequence[ChangeNotifications],
        apply: Callable[[RuleSet], None],
        clock: Clock,
        file: Path | None = None,
        settings: FeedSettings | None = None,
        starts_with: Sequence[Rule] = (),
        dependency: str = "rules",
    ) -> None:
        """``dependency``: what metrics call the database that ``reader`` reads."""
        self._dependency = dependency
        self._reader = reader
        self._sources = sources
        self._apply = apply
        self._clock = clock
        self._file = RulesFile(file) if file is not None else None
        self._settings = settings or FeedSettings()
        self._starts_with = RuleSet.of(
            structs.replace(rule, epoch=0, version=0) for rule in starts_with
        )
        self.rules = RuleSet()
        self.cursor = (0, 0)
        self.from_disk = False
        self._store = ""
        self._early: deque[ChangeNotification] = deque(maxlen=WAITING_MAX)
        self._pending = PendingNotifications()
        self._trusts_notifications = True
        self._known_at = -math.inf
        self._nudged = asyncio.Event()
        self._missed = 0
        self._alarmed = False
        self._work: list[asyncio.Task[None]] = []

    @property
    def staleness_seconds(self) -> float:
        """Since this node last knew that it had every rule, or infinite."""
        return self._clock.monotonic() - self._known_at

    @property
    def stale(self) -> bool:
        return self.staleness_seconds > self._settings.stale_seconds

    @property
    def _announced(self) -> int:
        """The last ``seq`` of our epoch whose rule came by notification."""
        return self._pending.seq(self.rules.epoch)

    def nudge(self) -> None:
        """Sync now: something shows that this node is behind."""
        self._nudged.set()

    async def __aenter__(self) -> Self:
        if len(self._starts_with):
            self._put(self._starts_with, "start")
        await self._load()
        listening = [asyncio.Event() for _ in self._sources]
        for source, event in zip(self._sources, listening, strict=True):
            self._work.append(asyncio.create_task(self._listen(source, event)))
        try:
            async with asyncio.timeout(self._settings.listen_seconds):
                await asyncio.gather(*[event.wait() for event in listening])
        except TimeoutError:
            telemetry.log.warning(
                "limits.notifications_delayed", waited_seconds=self._settings.listen_seconds
            )
        self._nudged.clear()
        complete = await self._try_sync()
        if self.from_disk:
            telemetry.log.error(
                "limits.snapshot_used", age_seconds=round(self.staleness_seconds, 1)
            )
        elif not complete:
            telemetry.log.error(
                "limits.rules_unknown",
                reason="the database is unavailable and there is no snapshot on disk",
            )
        self._watch()
        self._work.append(asyncio.create_task(self._follow(complete)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._work)

    async def sync(self) -> None:
        """Read what is new. Raises what the reader raises; keeps what it read before
        that."""
        asked_at = self._clock.monotonic()
        head = await self._reader.head()
        in_order = head.epoch == self.cursor[0]
        self._missed = max(0, head.seq - max(self.cursor[1], self._announced)) if in_order else 0
        if self._store not in ("", head.store):
            telemetry.log.warning(
                "limits.rules_reloaded",
                reason="the database has the rules of another store",
                seq=head.seq,
            )
            await self._reload(head.store)
        elif head.epoch < self.rules.epoch or (
            head.epoch == self.cursor[0] and head.seq < self.cursor[1]
        ):
            return  # the reader is behind us: nothing to learn, and no proof that we are complete
        elif self._pending.overdue((head.epoch, head.seq), asked_at - head.lag_seconds, asked_at):
            telemetry.log.error(
                "limits.rules_reloaded",
                reason="a notification announced what is not in the log",
                seq=head.seq,
            )
            self._trusts_notifications = False
            await self._reload(head.store)
        elif head.epoch > self.rules.epoch or self.cursor == (0, 0):
            await self._take_snapshot(head)
        else:
            await self._take_changes(head)
            if self._announced <= head.seq == self.cursor[1] and self.rules.digest != head.digest:
                telemetry.log.info(
                    "limits.rules_reloaded", reason="the digests differ", seq=head.seq
                )
                await self._take_snapshot(head)
        self._recognise(head.store)
        self._known_at = max(self._known_at, asked_at - head.lag_seconds)
        self.from_disk = False
        await self._save()

    async def _take_changes(self, head: RuleLogHead) -> None:
        while self.cursor[1] < head.seq:
            changes = await self._reader.changes_after(self.cursor[1], CHANGES_PER_READ)
            if not changes or changes[0].seq != self.cursor[1] + 1:
                await self._take_snapshot(head)  # the log no longer reaches back that far
                return
            changed = [change.rule for change in changes if isinstance(change.rule, Rule)]
            self._put(self.rules.merge(*changed), "sync", {rule.name for rule in changed})
            self.cursor = (head.epoch, changes[-1].seq)

    async def _take_snapshot(self, head: RuleLogHead) -> None:
        """Take everything, unless the digest shows that we have it."""
        if self.rules.digest == head.digest:
            snapshot = RuleSnapshot(head.epoch, head.seq, tuple(self.rules.all()), store=head.store)
        else:
            snapshot = await self._reader.snapshot()
        self._put(
            self.rules.merge_snapshot(snapshot, max(self.cursor[1], self._announced)), "snapshot"
        )
        self.cursor = max(self.cursor, (snapshot.epoch, snapshot.seq))

    async def _reload(self, store: str) -> None:
        """Replace all our rules, unless the snapshot is of our store and incomplete."""
        snapshot = await self._reader.snapshot()
        if snapshot.whole or store != self._store:
            self._put(RuleSet.of(snapshot.rules, snapshot.epoch, store), "snapshot")
        self.cursor = (snapshot.epoch, snapshot.seq)
        self._pending.forget(self.cursor)
        self._store = store
        self.nudge()  # notifications that came meanwhile were not applied

    def _recognise(self, store: str) -> None:
        """Now that our store is known, handle the notifications that came too early."""
        self._store = store
        while self._early:
            self.on_notification(self._early.popleft())

    def _put(self, rules: RuleSet, by: str, names: Set[RuleName] | None = None) -> None:
        """Apply ``rules``; only those of ``names`` can differ, if the caller knows."""
        if rules is not self.rules:
            self._apply(rules)
            before, self.rules = self.rules, rules
            names = before.names() | rules.names() if names is None else names
            telemetry.rules_applied(by, sum(before.get(name) != rules.get(name) for name in names))

    async def _listen(self, source: ChangeNotifications, listening: asyncio.Event) -> None:
        """Follow one source of notifications for good.

        Each new connection causes a sync, because notifications may have been lost.
        """
        while True:
            try:
                async for notification in source.notifications():
                    listening.set()
                    self.on_notification(notification)
            except HoldfastError:
                listening.set()  # it cannot listen now; startup need not wait for it
            except Exception as error:  # whatever it is, later notifications must arrive
                listening.set()
                telemetry.defect("limits", error)
            await asyncio.sleep(self._settings.retry_seconds)

    def on_notification(self, notification: ChangeNotification) -> None:
        """A hint: apply its rule if that is newer; read the log if anything is missing.

        Ignores notifications of other stores. One that names no store only causes a
        read.
        """
        if notification.store and not self._store:
            self._early.append(notification)
            self.nudge()
        elif notification.store == self._store:
            self._apply_notification(notification)
        elif not notification.store:
            self.nudge()

    def _apply_notification(self, notification: ChangeNotification) -> None:
        expected = max(self.cursor[1], self._announced) + 1
        if notification.rule is not None and self._trusts_notifications:
            self._put(self.rules.merge(notification.rule), "event", {notification.rule.name})
            self._pending.add(
                (notification.epoch, notification.seq), self.cursor, self._clock.monotonic()
            )
        if (
            notification.rule is None
            or not self._trusts_notifications
            or notification.seq > expected
            or notification.epoch > self.rules.epoch
        ):
            self.nudge()

    async def _follow(self, complete: bool) -> None:
        next_sync = self._next_sync(complete)
        while True:
            await self._pause(next_sync)
            if self._nudged.is_set() or self._clock.monotonic() >= next_sync:
                self._nudged.clear()
                next_sync = self._next_sync(await self._try_sync())
            self._watch()

    def _next_sync(self, complete: bool) -> float:
        """Before what we know, which a lagging reader ages, is a sync interval old."""
        retry = self._clock.monotonic() + self._settings.retry_seconds
        return max(self._known_at + self._settings.sync_seconds, retry) if complete else retry

    async def _pause(self, next_sync: float) -> None:
        """Wait for a sync or nudge, at most a second, to check staleness."""
        try:
            async with asyncio.timeout(max(0.0, min(1.0, next_sync - self._clock.monotonic()))):
                await self._nudged.wait()
            # read nudges that come together at once
            await asyncio.sleep(self._settings.nudge_seconds)
        except TimeoutError:
            pass

    async def _try_sync(self) -> bool:
        try:
            await self.sync()
        except HoldfastError:
            telemetry.dependency_up(self._dependency, False)
            return False
        except Exception as error:
            # whatever it is, sync again later and watch staleness until then
            telemetry.defect("limits", error)
            telemetry.dependency_up(self._dependency, False)
            return False
        telemetry.dependency_up(self._dependency, True)
        return True

    def _watch(self) -> None:
        telemetry.rule_staleness(
            self.staleness_seconds, max(self._missed, self._announced - self.cursor[1])
        )
        if self.stale != self._alarmed:
            self._alarmed = self.stale
            say = telemetry.log.error if self.stale else telemetry.log.info
            age = (
                "never known"
                if math.isinf(self.staleness_seconds)
                else round(self.staleness_seconds, 1)
            )
            say("limits.rules_stale" if self.stale else "limits.rules_fresh", seconds=age)

    async def _load(self) -> None:
        """Start with what this node knew when it stopped."""
        saved = await asyncio.to_thread(self._file.load) if self._file is not None else None
        if saved is None:
            return
        self._put(self.rules.merge_snapshot(saved.snapshot), "disk")
        self.cursor = (saved.snapshot.epoch, saved.snapshot.seq)
        self._pending.add(saved.announced, self.cursor, self._clock.monotonic())
        self._store = saved.snapshot.store
        self.from_disk = True
        self._known_at = self._clock.monotonic() - max(0.0, self._clock.now() - saved.known_at)

    async def _save(self) -> None:
        if self._file is not None:
            known_at = self._clock.now() - self.staleness_seconds
            snapshot = RuleSnapshot(*self.cursor, tuple(self.rules.all()), store=self._store)
            saved = SavedRules(known_at, self.rules.digest, snapshot, self._pending.last)
            await asyncio.to_thread(self._file.save, saved)
