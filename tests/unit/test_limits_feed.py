"""How a change reaches a node: sync, notifications, disk, staleness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from limits_rig import Log
from msgspec import structs
from redis.asyncio.client import PubSub
from redis.exceptions import TimeoutError as RedisTimeout
from structlog.testing import capture_logs

from holdfast import telemetry
from holdfast.errors import Unavailable
from holdfast.limits.feed import FeedSettings, RuleFeed
from holdfast.limits.rule_changes import RuleChange
from holdfast.limits.rules import RuleSet, RuleSnapshot
from holdfast.limits.rulestore.contract import ChangeNotification, RuleLogHead
from holdfast.limits.rulestore.redis import RedisNotifications
from holdfast.limits.rulestore.serialization import decode_notification, notification_of
from holdfast.limits.snapshot_file import RulesFile
from proof import virtual_loop


def feed_of(log: Log, file: Path | None = None) -> tuple[RuleFeed, list[RuleSet]]:
    applied: list[RuleSet] = []
    return RuleFeed(log, [log], applied.append, virtual_loop.LoopClock(), file), applied


def limit_of(feed: RuleFeed, resource: str = "a") -> int | None:
    rule = feed.rules.lookup("acme", resource)
    return rule.limit if rule is not None else None


async def test_notification_applies_its_rule_and_does_not_move_the_cursor() -> None:
    log = Log()
    feed, applied = feed_of(log)
    async with feed:
        log.put("a", 5)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert limit_of(feed) == 5
        assert applied[-1] is feed.rules
        assert feed.cursor == (1, 0)
        await asyncio.sleep(10.1)
        assert feed.cursor == (1, 1)


class Clinging(Log):
    """Its notifications ignore the first cancellation."""

    async def notifications(self) -> AsyncIterator[ChangeNotification]:  # type: ignore[override]
        async for notification in self.channel.notifications():
            yield notification
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.Event().wait()


async def test_source_that_ignores_one_cancellation_does_not_block_shutdown() -> None:
    feed, _ = feed_of(Clinging())
    async with feed:
        await asyncio.sleep(1)


@pytest.mark.covers("004 worst case 11 s: one sync and the replication lag")
async def test_lost_notification_costs_one_sync_interval() -> None:
    log = Log()
    feed, _ = feed_of(log)
    async with feed:
        log.put("a", 5, notify=False)
        await asyncio.sleep(7.9)
        assert limit_of(feed) is None
        await asyncio.sleep(0.2)
        assert limit_of(feed) == 5


@pytest.mark.covers("004 option 2: fetch again with backoff")
async def test_gap_between_notifications_is_read_at_once() -> None:
    log = Log()
    feed, _ = feed_of(log)
    async with feed:
        log.put("a", 5, notify=False)
        log.put("b", 6)
        await asyncio.sleep(0.2)
        assert (limit_of(feed, "a"), limit_of(feed, "b")) == (5, 6)


async def test_deleted_rule_stays_deleted_after_late_notifications() -> None:
    log = Log()
    feed, _ = feed_of(log)
    async with feed:
        first = log.put("a", 5)
        log.put("a", 5, deleted=True)
        await asyncio.sleep(0.2)
        feed.on_notification(ChangeNotification(1, 1, first, log.store))
        assert limit_of(feed) is None
        await asyncio.sleep(30)
        assert limit_of(feed) is None


async def test_lagging_reader_never_moves_a_rule_backwards() -> None:
    log = Log()
    log.put("a", 5)
    feed, _ = feed_of(log)
    async with feed:
        log.lag, log.lag_seconds = 1, 12.0
        log.put("a", 50)
        await asyncio.sleep(25)
        assert limit_of(feed) == 50
        assert feed.stale, "the replica says how far behind it may be"
        log.lag, log.lag_seconds = 0, 0.0
        await asyncio.sleep(11)
        assert limit_of(feed) == 50
        assert not feed.stale


async def test_node_behind_the_trimmed_log_reads_a_snapshot_and_drops_trimmed_rules() -> None:
    log = Log()
    log.put("a", 5)
    feed, _ = feed_of(log)
    async with feed:
        assert limit_of(feed, "a") == 5
        log.put("a", 5, deleted=True, notify=False)
        log.put("b", 7, notify=False)
        log.put("c", 8, notify=False)
        log.forget(3)
        await asyncio.sleep(10.1)
        assert (limit_of(feed, "a"), limit_of(feed, "b"), limit_of(feed, "c")) == (None, 7, 8)
        assert (feed.cursor, log.snapshots) == ((1, 4), 2)
        assert feed.rules.digest == (await log.head()).digest, (
            "the tombstone is not kept here either"
        )


async def test_trimmed_tombstone_is_dropped_except_by_a_lagging_reader() -> None:
    log = Log()
    for resource in ("a", "b"):
        log.put(resource, 5)
    log.put("a", 5, deleted=True)
    feed, _ = feed_of(log)
    async with feed:
        log.forget(3)
        log.put("c", 9)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        log.lag = 1  # the reader knows that a is forgotten and not that c is there
        await asyncio.sleep(10.1)
        assert limit_of(feed, "c") == 9, "what was heard is newer than what was read"
        log.lag = 0
        await asyncio.sleep(10.1)
        assert (limit_of(feed, "b"), limit_of(feed, "c")) == (5, 9)
        assert feed.rules.digest == (await log.head()).digest


async def test_failover_that_lost_a_change_converges_on_what_survived() -> None:
    log = Log()
    log.put("a", 5)
    feed, _ = feed_of(log)
    async with feed:
        log.put("a", 50)
        await asyncio.sleep(0.1)
        assert limit_of(feed) == 50
        log.fail_over(lost=1)
        await asyncio.sleep(10.1)
        assert limit_of(feed) == 5
        assert feed.cursor == (2, 1)
        log.put("a", 7)
        await asyncio.sleep(0.1)
        assert limit_of(feed) == 7


async def test_snapshot_is_read_only_if_the_digests_differ() -> None:
    log = Log()
    log.put("a", 5)
    feed, _ = feed_of(log)
    async with feed:
        assert log.snapshots == 1
        await asyncio.sleep(60)
        assert log.snapshots == 1
        log.fail_over(lost=0)
        await asyncio.sleep(11)
        assert (log.snapshots, feed.cursor) == (1, (2, 1)), "a new epoch with the same rules"
        feed.rules = RuleSet(epoch=2)
        await asyncio.sleep(11)
        assert log.snapshots == 2
        assert limit_of(feed) == 5


async def test_start_without_the_database_uses_the_disk_and_reports_it(tmp_path: Path) -> None:
    log, file = Log(), tmp_path / "rules.json"
    log.put("a", 5)
    feed, _ = feed_of(log, file)
    async with feed:
        pass
    log.unavailable = log.deaf = True
    await asyncio.sleep(60)
    again, applied = feed_of(log, file)
    async with again:
        assert again.from_disk
        assert limit_of(again) == 5
        assert applied
        assert 59 < again.staleness_seconds < 62, "as old as what it knows"
        assert again.stale
        log.unavailable = False
        log.put("a", 6, notify=False)
        await asyncio.sleep(1.2)
        assert not again.from_disk
        assert limit_of(again) == 6
        assert not again.stale


async def test_damaged_rules_file_is_not_used(tmp_path: Path) -> None:
    log, file = Log(), tmp_path / "rules.json"
    log.put("a", 5)
    feed, _ = feed_of(log, file)
    async with feed:
        pass
    good = file.read_bytes()
    for bad in (b"", good[:-10], good.replace(b'"limit":5', b'"limit":9'), b"\xff\xfe"):
        file.write_bytes(bad)
        assert RulesFile(file).load() is None
    log.unavailable = True
    nothing, _ = feed_of(log, file)
    async with nothing:
        assert len(nothing.rules) == 0


@pytest.mark.covers("004 tolerates stale rules for up to 10 s")
async def test_staleness_grows_without_the_database_and_ends_with_any_sync() -> None:
    log = Log()
    feed, _ = feed_of(log)
    async with feed:
        await asyncio.sleep(30)
        assert feed.staleness_seconds <= 8.1
        log.unavailable = True
        await asyncio.sleep(30)
        assert feed.stale
        log.unavailable = False
        await asyncio.sleep(1.5)
        assert not feed.stale


async def test_source_that_failed_is_followed_again() -> None:
    log = Log()
    log.deaf = True
    feed, _ = feed_of(log)
    async with feed:
        log.deaf = False
        await asyncio.sleep(1.5)
        log.put("a", 5)
        await asyncio.sleep(0.01)
        assert limit_of(feed) == 5


class SlowLog(Log):
    async def head(self) -> RuleLogHead:
        await asyncio.sleep(0.005)
        return await super().head()


async def test_idle_node_never_reports_stale_rules() -> None:
    log = SlowLog()
    log.lag_seconds = 1.0
    feed, _ = feed_of(log)
    with capture_logs() as logs:
        async with feed:
            await asyncio.sleep(120)
    assert [entry["event"] for entry in logs if "stale" in entry["event"]] == []


class FalteringLog(Log):
    """Every other look at it fails, and a look takes a while."""

    looks = 0

    async def head(self) -> RuleLogHead:
        self.looks += 1
        await asyncio.sleep(0.3)
        if self.looks % 2 == 0:
            raise Unavailable("not now")
        return await super().head()


async def test_one_failed_sync_does_not_make_the_rules_stale() -> None:
    feed, _ = feed_of(FalteringLog())
    with capture_logs() as logs:
        async with feed:
            for _ in range(1200):
                await asyncio.sleep(0.1)
                assert not feed.stale
    assert not [entry for entry in logs if entry["event"] == "limits.rules_stale"]


@pytest.mark.parametrize(
    "times",
    [
        {"sync_seconds": 10.0},
        {"stale_seconds": 9.0},
        {"retry_seconds": 2.0},
        {"sync_seconds": 60.0},
    ],
)
def test_settings_that_make_one_failed_sync_an_alarm_are_refused(
    times: dict[str, float],
) -> None:
    with pytest.raises(
        ValueError, match="stale_seconds must be greater than sync_seconds \\+ retry_seconds"
    ):
        FeedSettings(**times)


class BrokenLog(Log):
    """Raises what no contract names, until it is mended."""

    broken = False

    async def head(self) -> RuleLogHead:
        if self.broken:
            raise ValueError("a foreign error")
        return await super().head()

    def notifications(self) -> AsyncIterator[ChangeNotification]:
        if self.broken:
            raise ValueError("a foreign error")
        return super().notifications()


async def test_feed_survives_any_reader_error_and_reports_staleness() -> None:
    log = BrokenLog()
    feed, _ = feed_of(log)
    async with feed:
        log.broken = True
        log.channel.close()
        with capture_logs() as logs:
            await asyncio.sleep(30)
        said = [entry["event"] for entry in logs]
        assert "node.defect_found" in said
        assert "limits.rules_stale" in said
        log.broken = False
        log.put("a", 5, notify=False)
        await asyncio.sleep(1.5)
        assert limit_of(feed) == 5
        assert not feed.stale
        log.put("a", 6)
        await asyncio.sleep(0.01)
        assert limit_of(feed) == 6, "its notifications arrive again"


async def test_feed_starts_with_a_broken_reader() -> None:
    log = BrokenLog()
    log.broken = True
    feed, _ = feed_of(log)
    async with feed:
        log.broken = False
        log.put("a", 5, notify=False)
        await asyncio.sleep(1.5)
        assert limit_of(feed) == 5


async def test_rules_that_failed_to_apply_are_applied_by_the_next_sync() -> None:
    log, applied = Log(), list[RuleSet]()

    def apply(rules: RuleSet) -> None:
        if not applied:
            applied.append(RuleSet())
            raise ValueError("a foreign error")
        applied.append(rules)

    log.put("a", 5)
    async with RuleFeed(log, [log], apply, virtual_loop.LoopClock()) as feed:
        await asyncio.sleep(1.5)
        assert applied[-1] is feed.rules
        assert limit_of(feed) == 5


class NewerLog(Log):
    """Has a rule in its last version that this node cannot read."""

    unreadable: str | None = None

    async def changes_after(self, seq: int, limit: int = 100) -> Sequence[RuleChange]:
        return [
            each
            for each in await super().changes_after(seq, limit)
            if each.rule.resource != self.unreadable
        ]

    async def snapshot(self) -> RuleSnapshot:
        all_of_them = await super().snapshot()
        rules = tuple(rule for rule in all_of_them.rules if rule.resource != self.unreadable)
        return structs.replace(all_of_them, rules=rules, whole=len(rules) == len(all_of_them.rules))


async def test_unreadable_rule_keeps_its_old_value_and_others_are_applied() -> None:
    log = NewerLog()
    log.put("a", 5)
    feed, _ = feed_of(log)
    async with feed:
        log.unreadable = "a"
        log.put("a", 50, notify=False)
        await asyncio.sleep(11)
        log.put("b", 7, notify=False)
        await asyncio.sleep(11)
        assert (limit_of(feed, "a"), limit_of(feed, "b")) == (5, 7)
        log.unreadable = None
        await asyncio.sleep(11)
        assert limit_of(feed, "a") == 50, "upgraded, it reads what it could not"


def test_unreadable_notification_still_causes_a_read() -> None:
    newer = '{"seq":9,"rule":{"epoch":3,"algorithm":"of_next_year"}}'
    assert notification_of(newer, "ours") == ChangeNotification(3, 9, store="ours"), (
        "the follower goes past it, and other nodes may read it"
    )
    assert decode_notification(newer).rule is None
    assert decode_notification(b"\xff").rule is None


def foreign(
    log: Log, resource: str, limit: int, epoch: int = 1, version: int = 9, seq: int = 7
) -> ChangeNotification:
    """A notification of another deployment that shares our channel."""
    rule = structs.replace(
        log.changes[0].rule, resource=resource, limit=limit, epoch=epoch, version=version
    )
    return ChangeNotification(epoch, seq, rule, "theirs")


async def test_notifications_of_another_store_change_nothing_in_any_epoch() -> None:
    log = Log()
    log.put("a", 5)
    feed, applied = feed_of(log)
    async with feed:
        for epoch in (1, 99):
            log.channel.notify(foreign(log, "a", 999, epoch))
            log.channel.notify(foreign(log, "b", 1, epoch))
        await asyncio.sleep(30)
        assert (limit_of(feed, "a"), limit_of(feed, "b"), len(applied)) == (5, None, 1)
        assert feed.rules.digest == (await log.head()).digest


async def test_notification_without_a_store_only_causes_a_read() -> None:
    log = Log()
    log.put("a", 5)
    feed, _ = feed_of(log)
    async with feed:
        feed.on_notification(structs.replace(foreign(log, "a", 999), store=""))
        assert limit_of(feed) == 5
        log.put("b", 6, notify=False)
        await asyncio.sleep(0.2)
        assert limit_of(feed, "b") == 6, (
            "an older node changed it, and its notification said only: read"
        )


async def test_notifications_before_the_first_sync_are_applied_after_it() -> None:
    log = SlowLog()
    log.put("a", 5)
    log.lag, log.lag_seconds = 1, 1.0
    feed, _ = feed_of(log)
    starting = asyncio.create_task(feed.__aenter__())
    await asyncio.sleep(0.001)
    log.channel.notify(foreign(log, "a", 999))
    log.put("a", 50)
    log.lag = 2
    await starting
    assert limit_of(feed) == 50, "the reader knows of nothing yet"
    await feed.__aexit__()


@pytest.mark.parametrize("epoch", [1, 99])
async def test_notification_missing_from_the_log_is_trusted_for_a_minute_at_most(
    epoch: int,
) -> None:
    """A copy of our database has our store's name, and so has a rolled-back change."""
    log = Log()
    log.put("a", 5)
    feed, _ = feed_of(log)
    async with feed:
        for second in range(70):  # repeats the notification, which proves nothing
            feed.on_notification(
                structs.replace(foreign(log, "a", 999 + second, epoch, 9 + second), store=log.store)
            )
            await asyncio.sleep(1)
        assert limit_of(feed) == 5
        assert feed.rules.digest == (await log.head()).digest
        log.put("a", 6)
        await asyncio.sleep(0.2)
        assert limit_of(feed) == 6, "from then on a notification makes it read"


async def test_notification_ahead_of_a_lagging_reader_stays_trusted() -> None:
    log = Log()
    log.put("a", 5)
    feed, applied = feed_of(log)
    async with feed:
        for second in range(300):
            log.put("a", 10 + second)
            log.lag = min(second, 120)
            log.lag_seconds = float(log.lag)
            await asyncio.sleep(1)
        limits = [rule.limit for rules in applied if (rule := rules.lookup("acme", "a"))]
        assert limits == sorted(limits)
        assert limits[-1] == 309


async def test_node_pointed_to_another_store_replaces_its_rules(
    tmp_path: Path,
) -> None:
    old, new, file = Log("old"), Log("new"), tmp_path / "rules.json"
    for _ in range(3):
        old.fail_over(0)
    old.put("a", 5)
    new.put("b", 6)
    feed, _ = feed_of(old, file)
    async with feed:
        feed._reader = new
        await asyncio.sleep(8.02)
        assert (limit_of(feed, "a"), limit_of(feed, "b"), feed.cursor) == (None, 6, (1, 1))
        new.put("b", 7, notify=False)
        await asyncio.sleep(0.2)
        assert limit_of(feed, "b") == 7, (
            "it looks again at once: what it heard meanwhile it took for another's"
        )
        old.put("a", 50)
        await asyncio.sleep(0.2)
        assert limit_of(feed, "a") is None, "the old source is not ours any more"


async def test_unconfirmed_notification_is_awaited_after_a_restart(tmp_path: Path) -> None:
    log, file = Log(), tmp_path / "rules.json"
    log.put("a", 5)
    feed, _ = feed_of(log, file)
    async with feed:
        feed.on_notification(structs.replace(foreign(log, "a", 999, epoch=99), store=log.store))
        await asyncio.sleep(8.1)
    log.unavailable = log.deaf = True
    again, _ = feed_of(log, file)
    async with again:
        assert limit_of(again) == 999
        log.unavailable = False
        await asyncio.sleep(70)
        assert limit_of(again) == 5


async def test_restart_knows_when_unchanged_rules_were_last_complete(
    tmp_path: Path,
) -> None:
    log, file = Log(), tmp_path / "rules.json"
    log.put("a", 5)
    feed, _ = feed_of(log, file)
    async with feed:
        written = file.stat().st_ino
        await asyncio.sleep(3_600)
        assert file.stat().st_ino == written, "the rules are not written again for it"
        file.unlink()
        await asyncio.sleep(8.1)
        assert RulesFile(file).load() is not None, "but are written if the file was removed"
    log.unavailable = log.deaf = True
    await asyncio.sleep(60)
    again, _ = feed_of(log, file)
    async with again:
        assert 60 <= again.staleness_seconds < 60 + 8 + 3


async def test_applied_rules_are_counted_one_by_one() -> None:
    def applied_by(by: str) -> float:
        return (
            telemetry.REGISTRY.get_sample_value("holdfast_limits_rules_applied_total", {"by": by})
            or 0.0
        )

    before = {by: applied_by(by) for by in ("event", "sync", "snapshot")}
    log = Log()
    for resource in "abc":
        log.put(resource, 5)
    feed, _ = feed_of(log)
    async with feed:
        for limit in (6, 7):
            log.put("a", limit)
        await asyncio.sleep(0.01)
        for resource in "abcd":
            log.put(resource, 8, notify=False)
        await asyncio.sleep(8.1)
        log.put("b", 5, deleted=True)
        await asyncio.sleep(8.1)
        log.forget(len(log.changes))
        log.put("c", 5, notify=False)
        await asyncio.sleep(8.1)
    counts = {by: applied_by(by) - count for by, count in before.items()}
    assert counts == {
        "event": 3,
        "sync": 5,
        "snapshot": 3 + 1,
    }, "the forgotten tombstone came with a snapshot"


async def test_changes_without_a_notification_appear_in_the_lag() -> None:
    def lag() -> float | None:
        return telemetry.REGISTRY.get_sample_value("holdfast_limits_cursor_lag")

    log = Log()
    feed, _ = feed_of(log)
    async with feed:
        log.put("a", 5)
        await asyncio.sleep(9)
        assert lag() == 0, "a notification announced it"
        for limit in (6, 7):
            log.put("a", limit, notify=False)
        await asyncio.sleep(9)
        assert (limit_of(feed), lag()) == (7, 2), "found by the sync alone"
        await asyncio.sleep(9)
        assert lag() == 0
        log.lag, log.lag_seconds = 1, 1.0
        log.put("a", 8)
        await asyncio.sleep(2)
        assert lag() == 1, "announced, and not read yet"


async def test_changes_read_together_are_applied_together() -> None:
    log = Log()
    feed, applied = feed_of(log)
    async with feed:
        applied.clear()
        for number in range(100):
            log.put(f"r{number}", 5, notify=False)
        await feed.sync()
        assert [len(rules) for rules in applied] == [100]
        for limit in range(150):
            log.put("r1", limit + 1, notify=False)
        await feed.sync()
        assert (len(applied), limit_of(feed, "r1")) == (3, 150), "a hundred at a time"


async def test_source_that_fails_to_close_ends_with_the_feed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failed closing once took the place of the cancellation: the feed listened on,
    and the node never ended.
    """

    async def connects(*_: object) -> None:
        pass

    async def hears(*_: object, **__: object) -> None:
        await asyncio.sleep(3600)

    # one: with more a feed that is wrong would never end
    failures = [RedisTimeout("Timed out closing connection")]

    async def fails(*_: object) -> None:
        if failures:
            raise failures.pop()

    for method, replaced in (("subscribe", connects), ("get_message", hears), ("aclose", fails)):
        monkeypatch.setattr(PubSub, method, replaced)

    log = Log()
    async with (
        asyncio.timeout(600),
        RuleFeed(
            log,
            [RedisNotifications("redis://127.0.0.1:1")],
            lambda _: None,
            virtual_loop.LoopClock(),
        ),
    ):
        pass


class Busy(Log):
    """A rule changes, with a notification, while the snapshot is read."""

    async def snapshot(self) -> RuleSnapshot:
        found = await super().snapshot()
        await asyncio.sleep(0.1)
        if len(self.changes) == 1:
            self.put("a", 50)
        return found


@pytest.mark.covers("004 load all, then subscribe")
async def test_change_during_startup_is_not_lost() -> None:
    """It listens first, so a notification during the load is applied without a sync."""
    log = Busy()
    log.put("a", 5)
    feed = RuleFeed(log, [log], lambda rules: None, virtual_loop.LoopClock(), None)
    async with feed:
        await asyncio.sleep(1)
        found = feed.rules.lookup("acme", "a")
        assert len(log.changes) == 2, "it changed while it was read"
        assert found is not None and found.limit == 50
