"""Power cuts under limits.db: an answered change is never lost, and an open one can be
repeated with its key.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

from powercuts import Cuts, Synchronous

from holdfast.clock import SystemClock
from holdfast.drivers.sqlite.database import SqliteSettings
from holdfast.limits.rule_changes import Change, RuleChangeResult
from holdfast.limits.rules import RuleName, RuleSet
from holdfast.limits.rulestore.sqlite import SqliteRuleStore
from proof.powercut import FaultyDisk

CUTS = 40
OPERATIONS_MAX = 300


def change(rng: random.Random, number: int, versions: dict[str, int]) -> Change:
    resource = rng.choice("abc")
    body = {"algorithm": "token_bucket", "limit": number + 1, "window": "60s"}
    action: Literal["create", "update"] = "update" if resource in versions else "create"
    at = "2026-01-01T00:00:00.000Z"
    return Change(
        action,
        RuleName("acme", resource),
        "olga",
        at,
        body,
        versions.get(resource),
        key=f"key-{number}",
    )


async def cut(folder: Path, seed: int, synchronous: Synchronous) -> tuple[int, int, int]:
    """How many changes were answered, how many of them are lost, and how much is
    unsound after one cut.
    """
    rng = random.Random(seed)
    disk = FaultyDisk(f"rules-{synchronous}-{seed}", rng, rng.randint(1, OPERATIONS_MAX))
    settings = SqliteSettings(
        synchronous=synchronous, readers=1, checkpoint_pages=rng.choice((4, 16, 4_000))
    )
    answered: list[RuleChangeResult] = []
    versions: dict[str, int] = {}
    open_call = change(rng, 0, versions)
    with disk.until_the_cut():
        async with SqliteRuleStore(
            folder / "limits.db", SystemClock(), settings, disk.name
        ) as store:
            while True:
                open_call = change(rng, len(answered), versions)
                changed = await store.change(open_call)
                answered.append(changed)
                versions[changed.rule.resource] = changed.rule.version
    async with SqliteRuleStore(folder / "limits.db", SystemClock(), settings) as store:
        log = {entry.seq: entry.rule for entry in await store.changes_after(0, 10_000)}
        lost = sum(log.get(each.seq) != each.rule for each in answered)
        unsound = await _unsound(store)
        if not lost:
            again = await store.change(open_call)
            unsound += (await store.change(open_call)) != RuleChangeResult(
                again.rule, again.seq, repeated=True
            )
            unsound += again.seq != len(answered) + 1
        return len(answered), lost, unsound


async def _unsound(store: SqliteRuleStore) -> int:
    """Whether log, rules and head disagree."""
    head, snapshot = await store.head(), await store.snapshot()
    replayed = RuleSet(epoch=snapshot.epoch)
    for entry in await store.changes_after(0, 10_000):
        replayed = replayed.merge(entry.rule)
    return int(not replayed.digest == head.digest == RuleSet().merge_snapshot(snapshot).digest)


def test_power_cut_loses_no_answered_rule_change(tmp_path: Path) -> None:
    cuts = Cuts.made(cut, tmp_path, CUTS)
    broken = [report for report in cuts.reports if report[1] or report[2]]
    answered = sum(report[0] for report in cuts.reports)
    how = "an SQLite VFS that loses, keeps or tears unsynced writes; FULL"
    must = "0 answered changes lost; log, rules and head agree; a repeat is recognized"
    cuts.tally("power cut of limits.db", how, must, len(broken), answered=answered)
    assert answered > 5 * CUTS


def test_power_cut_without_a_sync_per_commit_loses_changes(tmp_path: Path) -> None:
    assert sum(lost for _, lost, _ in Cuts.made(cut, tmp_path, 15, "NORMAL").reports) > 0
