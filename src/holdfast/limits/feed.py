"""How a change reaches this node: the log of changes read by a cursor, with doorbells as hints.

The cursor is the truth; nothing is ever marked as sent. A doorbell that brings a rule has it applied at once if it
is newer, and the cursor does not move. Lost, repeated and reordered rings change nothing, because merging rules does
not depend on order (see ``rules.RuleSet``).

Only the rings of our own store count: a Redis is often shared, and its channels know no databases. Which store is ours
the first look at it tells; rings that come before wait for it. And a ring is never believed for ever (see below):
what it told and the log never shows is dropped, and from then on a ring only makes us read.

Start: the last good snapshot on disk, listen, read what is newer, ready. The disk comes first because a reader that
lags may know less than this node did before it was started again. If the database is away, go on with that and say so;
without it, with the rules that everybody starts with, which are older than any that a database has. Then a sync every
eight seconds, or at once when a ring or the counters say that we are behind: by delta, or by a full snapshot when the
epoch is new or the digests differ.

Staleness is how long ago this node knew that it had everything: without end, if it never did. A replica tells how far
it may lag behind.

What doorbells told and the log has not shown yet: how far ahead it is, and how long it is believed.

A ring may be ahead of whoever we read from, because a replica lags. It cannot be for ever: a reader tells up to which
moment it knows everything, and a place of the log that was rung for before that moment and is not there then is not of
our log. Two databases that are copies of one ring by one name.
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
from holdfast.limits.rulestore.notifications import RINGS_WAITING_MAX, end_tasks
from holdfast.limits.snapshot_file import RulesFile, SavedRules

HEARSAY_SECONDS = 60.0
"""How long a ring is believed by itself. More than the clocks of a primary and its replica can differ: how far a
replica lags is told by them."""

_LogPosition = tuple[int, int]
"""An epoch and a ``seq`` in its log."""


class PendingNotifications:
    """``last`` is the furthest place that was rung for. Times are monotonic seconds."""

    def __init__(self) -> None:
        self.last: _LogPosition = (0, 0)
        self._awaited: tuple[_LogPosition, float] | None = None

    def seq(self, epoch: int) -> int:
        """The furthest place in the log of this epoch; 0 if what was heard is of another."""
        return self.last[1] if self.last[0] == epoch else 0

    def heard(self, place: _LogPosition, cursor: _LogPosition, now: float) -> None:
        """A ring brought what is at this place; we have read up to the cursor."""
        self.last = max(self.last, place)
        if self._awaited is None and place > cursor:
            self._awaited = (place, now)

    def overdue(self, head: _LogPosition, known_at: float, now: float) -> bool:
        """Whether a place that was rung for is still not in a log whose reader should know it by now.

        One place is awaited at a time; when the log reaches it, the furthest is next. So rings that go on and on
        neither put the day off nor bring it nearer.
        """
        if self._awaited is None:
            return False
        place, since = self._awaited
        if place > head:
            return known_at > since + HEARSAY_SECONDS
        self._awaited = (self.last, now) if self.last > head else None
        return False

    def forget(self, place: _LogPosition) -> None:
        """We have read everything up to here, and believe nothing beyond it."""
        self.last, self._awaited = place, None


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """How a node follows the rules."""

    sync_seconds: float = 8.0
    """How often the log is read without being rung for; a lost ring costs at most this."""
    retry_seconds: float = 1.0
    """Between attempts while the database or a doorbell is away."""
    nudge_seconds: float = 0.05
    """How long a nudge waits for others, to be read together."""
    listen_seconds: float = 2.0
    """How long the start waits for the doorbells."""
    stale_seconds: float = 10.0
    """Above this age of what the node knows, it says so."""

    def __post_init__(self) -> None:
        if min(self.sync_seconds, self.retry_seconds, self.nudge_seconds, self.listen_seconds, self.stale_seconds) <= 0:
            raise ValueError("the feed's times must be greater than 0")
        if self.stale_seconds <= self.sync_seconds + self.retry_seconds:
            raise ValueError(
                "stale_seconds must be greater than sync_seconds + retry_seconds, or one sync that fails is an alarm"
            )


class RuleFeed:
    """Keeps a RuleSet up to date and hands each new one to ``apply``. ``async with`` starts and stops it."""

    def __init__(
        self,
        reader: RuleReader,
        doorbells: Sequence[ChangeNotifications],
        apply: Callable[[RuleSet], None],
        clock: Clock,
        file: Path | None = None,
        settings: FeedSettings | None = None,
        starts_with: Sequence[Rule] = (),
    ) -> None:
        self._reader = reader
        self._doorbells = doorbells
        self._apply = apply
        self._clock = clock
        self._file = RulesFile(file) if file is not None else None
        self._settings = settings or FeedSettings()
        self._starts_with = RuleSet.of(structs.replace(rule, epoch=0, version=0) for rule in starts_with)
        self.rules = RuleSet()
        self.cursor = (0, 0)
        self.from_disk = False
        self._store = ""
        self._early: deque[ChangeNotification] = deque(maxlen=RINGS_WAITING_MAX)
        self._hearsay = PendingNotifications()
        self._believes = True
        self._known_at = -math.inf
        self._nudged = asyncio.Event()
        self._missed = 0
        self._alarmed = False
        self._work: list[asyncio.Task[None]] = []

    @property
    def staleness_seconds(self) -> float:
        """Since this node last knew that it had every rule; infinite if it never did."""
        return self._clock.monotonic() - self._known_at

    @property
    def stale(self) -> bool:
        return self.staleness_seconds > self._settings.stale_seconds

    @property
    def _heard(self) -> int:
        """The last place in the log of our epoch from which a doorbell brought a rule."""
        return self._hearsay.seq(self.rules.epoch)

    def nudge(self) -> None:
        """Something says that we are behind: sync now."""
        self._nudged.set()

    async def __aenter__(self) -> Self:
        if len(self._starts_with):
            self._put(self._starts_with, "start")
        await self._load()
        listening = [asyncio.Event() for _ in self._doorbells]
        for doorbell, event in zip(self._doorbells, listening, strict=True):
            self._work.append(asyncio.create_task(self._listen(doorbell, event)))
        try:
            async with asyncio.timeout(self._settings.listen_seconds):
                await asyncio.gather(*[event.wait() for event in listening])
        except TimeoutError:
            telemetry.log.warning("limits.doorbell_silent_at_start")
        self._nudged.clear()
        complete = await self._try_sync()
        if self.from_disk:
            telemetry.log.error("limits.rules_from_disk", age_seconds=round(self.staleness_seconds, 1))
        elif not complete:
            telemetry.log.error("limits.rules_unknown", reason="the database is away and there is no snapshot on disk")
        self._watch()
        self._work.append(asyncio.create_task(self._follow(complete)))
        return self

    async def __aexit__(self, *_: object) -> None:
        await end_tasks(self._work)

    async def sync(self) -> None:
        """Read what is new. Raises what the reader raises; what was read before that is kept."""
        asked_at = self._clock.monotonic()
        head = await self._reader.head()
        in_order = head.epoch == self.cursor[0]
        self._missed = max(0, head.seq - max(self.cursor[1], self._heard)) if in_order else 0
        if self._store not in ("", head.store):
            telemetry.log.warning("limits.read_anew", reason="these are the rules of another store", seq=head.seq)
            await self._begin_anew(head.store)
        elif head.epoch < self.rules.epoch or (head.epoch == self.cursor[0] and head.seq < self.cursor[1]):
            return  # a reader that is behind us: nothing to learn, and nothing is known to be complete
        elif self._hearsay.overdue((head.epoch, head.seq), asked_at - head.lag_seconds, asked_at):
            telemetry.log.error("limits.read_anew", reason="a doorbell told what is not in the log", seq=head.seq)
            self._believes = False
            await self._begin_anew(head.store)
        elif head.epoch > self.rules.epoch or self.cursor == (0, 0):
            await self._take_snapshot(head)
        else:
            await self._take_changes(head)
            if self._heard <= head.seq == self.cursor[1] and self.rules.digest != head.digest:
                telemetry.log.info("limits.read_anew", reason="the digests differ", seq=head.seq)
                await self._take_snapshot(head)
        self._recognise(head.store)
        self._known_at = max(self._known_at, asked_at - head.lag_seconds)
        self.from_disk = False
        await self._save()

    async def _take_changes(self, head: RuleLogHead) -> None:
        while self.cursor[1] < head.seq:
            changes = await self._reader.changes_after(self.cursor[1], CHANGES_PER_READ)
            if not changes or changes[0].seq != self.cursor[1] + 1:
                await self._take_snapshot(head)  # further behind than the log reaches back
                return
            changed = [change.rule for change in changes if isinstance(change.rule, Rule)]
            self._put(self.rules.merge(*changed), "sync", {rule.name for rule in changed})
            self.cursor = (head.epoch, changes[-1].seq)

    async def _take_snapshot(self, head: RuleLogHead) -> None:
        """Everything, unless the digest says that we have it."""
        if self.rules.digest == head.digest:
            snapshot = RuleSnapshot(head.epoch, head.seq, tuple(self.rules.all()), store=head.store)
        else:
            snapshot = await self._reader.snapshot()
        self._put(self.rules.merge_snapshot(snapshot, max(self.cursor[1], self._heard)), "snapshot")
        self.cursor = max(self.cursor, (snapshot.epoch, snapshot.seq))

    async def _begin_anew(self, store: str) -> None:
        """Nothing of what we have counts, except what we could not read now."""
        snapshot = await self._reader.snapshot()
        if snapshot.whole or store != self._store:
            self._put(RuleSet.of(snapshot.rules, snapshot.epoch, store), "snapshot")
        self.cursor = (snapshot.epoch, snapshot.seq)
        self._hearsay.forget(self.cursor)
        self._store = store
        self.nudge()  # what was rung meanwhile was not heeded

    def _recognise(self, store: str) -> None:
        """From here on we know which rings are ours, also of those that came too early."""
        self._store = store
        while self._early:
            self.on_notification(self._early.popleft())

    def _put(self, rules: RuleSet, by: str, names: Set[RuleName] | None = None) -> None:
        """Put rules in place; only those of these names are not what they were, if whoever merged them knows."""
        if rules is not self.rules:
            self._apply(rules)
            before, self.rules = self.rules, rules
            names = before.names() | rules.names() if names is None else names
            telemetry.rules_applied(by, sum(before.get(name) != rules.get(name) for name in names))

    async def _listen(self, doorbell: ChangeNotifications, listening: asyncio.Event) -> None:
        """Follow one doorbell for ever; whenever it was away, rings may have been lost."""
        while True:
            try:
                async for ring in doorbell.rings():
                    listening.set()
                    self.on_notification(ring)
            except HoldfastError:
                listening.set()  # it will not ring now; the start need not wait for it
            except Exception as error:  # whatever it is, the next ring must be heard
                listening.set()
                telemetry.defect("limits", error)
            await asyncio.sleep(self._settings.retry_seconds)

    def on_notification(self, ring: ChangeNotification) -> None:
        """A hint. Its rule is applied if it is newer; a gap before it, or a rule left at home, makes us read.

        A ring of another store is not for us, and one that does not say whose it is only makes us read.
        """
        if ring.store and not self._store:
            self._early.append(ring)
            self.nudge()
        elif ring.store == self._store:
            self._heed(ring)
        elif not ring.store:
            self.nudge()

    def _heed(self, ring: ChangeNotification) -> None:
        expected = max(self.cursor[1], self._heard) + 1
        if ring.rule is not None and self._believes:
            self._put(self.rules.merge(ring.rule), "event", {ring.rule.name})
            self._hearsay.heard((ring.epoch, ring.seq), self.cursor, self._clock.monotonic())
        if ring.rule is None or not self._believes or ring.seq > expected or ring.epoch > self.rules.epoch:
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
        """Before what we know grows older than a sync interval: counted from then, not from when the read ended."""
        retry = self._clock.monotonic() + self._settings.retry_seconds
        return max(self._known_at + self._settings.sync_seconds, retry) if complete else retry

    async def _pause(self, next_sync: float) -> None:
        """Until the next sync, a nudge, or a second: staleness is watched each second."""
        try:
            async with asyncio.timeout(max(0.0, min(1.0, next_sync - self._clock.monotonic()))):
                await self._nudged.wait()
            await asyncio.sleep(self._settings.nudge_seconds)  # what comes together is read together
        except TimeoutError:
            pass

    async def _try_sync(self) -> bool:
        try:
            await self.sync()
        except HoldfastError:
            telemetry.dependency_up("rules", False)
            return False
        except Exception as error:  # whatever it is, the next sync comes, and staleness is watched until then
            telemetry.defect("limits", error)
            telemetry.dependency_up("rules", False)
            return False
        telemetry.dependency_up("rules", True)
        return True

    def _watch(self) -> None:
        telemetry.rule_staleness(self.staleness_seconds, max(self._missed, self._heard - self.cursor[1]))
        if self.stale != self._alarmed:
            self._alarmed = self.stale
            say = telemetry.log.error if self.stale else telemetry.log.info
            age = "never known" if math.isinf(self.staleness_seconds) else round(self.staleness_seconds, 1)
            say("limits.rules_stale" if self.stale else "limits.rules_fresh", seconds=age)

    async def _load(self) -> None:
        """What this node knew when it was stopped."""
        saved = await asyncio.to_thread(self._file.load) if self._file is not None else None
        if saved is None:
            return
        self._put(self.rules.merge_snapshot(saved.snapshot), "disk")
        self.cursor = (saved.snapshot.epoch, saved.snapshot.seq)
        self._hearsay.heard(saved.heard, self.cursor, self._clock.monotonic())
        self._store = saved.snapshot.store
        self.from_disk = True
        self._known_at = self._clock.monotonic() - max(0.0, self._clock.now() - saved.known_at)

    async def _save(self) -> None:
        if self._file is not None:
            known_at = self._clock.now() - self.staleness_seconds
            snapshot = RuleSnapshot(*self.cursor, tuple(self.rules.all()), store=self._store)
            saved = SavedRules(known_at, self.rules.digest, snapshot, self._hearsay.last)
            await asyncio.to_thread(self._file.save, saved)
