"""Power cuts under work.db and webhooks.db: what was enqueued is there, what was
completed does not run again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from powercuts import Cuts, Synchronous
from work_rigs import ManualWorker, draft

from holdfast.drivers.sqlite.database import SqliteSettings
from holdfast.webhooks.contract import WebhookEndpoint
from holdfast.webhooks.sqlite import SqliteEndpoints
from holdfast.work.contract import ReaderMark
from holdfast.work.inspection import Query
from holdfast.work.job import State
from holdfast.work.sqlite import SqliteWork
from proof.powercut import FaultyDisk

CUTS = 40
OPERATIONS_MAX = 600
READER = "log"


@dataclass
class Acknowledged:
    """What the store acknowledged; ``asked``: of unknown outcome at the power cut."""

    enqueued: dict[int, str] = field(default_factory=dict)
    completed: set[int] = field(default_factory=set)
    failed: dict[int, int] = field(default_factory=dict)
    position: int = 0
    asked: set[int] = field(default_factory=set)


async def work_until_the_cut(
    store: SqliteWork, rng: random.Random, acknowledged: Acknowledged
) -> None:
    manual, number = await ManualWorker.join(store), 0
    while True:
        drafts = [
            draft(f"s{rng.randrange(4)}", payload=f"{number + n}".encode())
            for n in range(rng.choice((1, 2, 7)))
        ]
        before, number = await store.reader_offset(READER), number + len(drafts)
        seqs = await store.enqueue(drafts, [ReaderMark(READER, 0, number, before)])
        acknowledged.enqueued.update(
            (seq, d.payload.decode()) for seq, d in zip(seqs, drafts, strict=True)
        )
        acknowledged.position = number
        got = await manual.turn(8, starting=8)
        failing = [seq for seq in got if rng.random() < 0.2]
        done = [seq for seq in got if seq not in failing]
        acknowledged.asked = set(got)
        await manual.call(0, completed=done, failed=[manual.failure(seq) for seq in failing])
        acknowledged.completed.update(done)
        acknowledged.failed.update((seq, manual.jobs[seq].attempt) for seq in failing)
        acknowledged.asked = set()


async def cut(folder: Path, seed: int, synchronous: Synchronous) -> tuple[int, int]:
    """How many jobs were acknowledged before one cut, and how many promises about them
    are broken after it.
    """
    rng, acknowledged = random.Random(seed), Acknowledged()
    disk = FaultyDisk(f"work-{synchronous}-{seed}", rng, rng.randint(1, OPERATIONS_MAX))
    settings = SqliteSettings(
        synchronous=synchronous, readers=1, checkpoint_pages=rng.choice((4, 16, 4_000))
    )
    with disk.until_the_cut():
        store = await SqliteWork.open(folder / "work.db", settings=settings, vfs=disk.name)
        try:
            await work_until_the_cut(store, rng, acknowledged)
        finally:
            await store.close()
    store = await SqliteWork.open(folder / "work.db", settings=settings)
    try:
        return len(acknowledged.enqueued), await _broken(store, acknowledged)
    finally:
        await store.close()


async def _broken(store: SqliteWork, acknowledged: Acknowledged) -> int:
    left = {job.seq: job for job in await store.find(Query(), 100_000)}
    owed = acknowledged.enqueued.keys() - acknowledged.completed - acknowledged.asked
    broken = sum(
        seq not in left or left[seq].payload.decode() != acknowledged.enqueued[seq] for seq in owed
    )
    for seq, attempt in acknowledged.failed.items():
        broken += seq in left and (
            left[seq].state is not State.RETRY or left[seq].attempt < attempt
        )
    broken += (await store.reader_offset(READER) or 0) < acknowledged.position
    heir = await ManualWorker.join(store, "heir")
    again = set(await heir.turn(100_000))
    return broken + len(again & acknowledged.completed)


def test_power_cuts_lose_no_job_and_repeat_no_completed_one(tmp_path: Path) -> None:
    cuts = Cuts.made(cut, tmp_path, CUTS)
    enqueued = sum(enqueued for enqueued, _ in cuts.reports)
    how = "an SQLite VFS that loses, keeps or tears unsynced writes; FULL"
    must = "0 acknowledged enqueues lost, 0 completed jobs run again, failures and marks kept"
    cuts.tally(
        "power cut of work.db",
        how,
        must,
        sum(broken > 0 for _, broken in cuts.reports),
        enqueued=enqueued,
    )
    assert enqueued > 20 * CUTS


def test_control_power_cuts_lose_jobs_without_a_sync_per_commit(tmp_path: Path) -> None:
    assert sum(broken for _, broken in Cuts.made(cut, tmp_path, 12, "NORMAL").reports) > 0


async def endpoint_cut(folder: Path, seed: int, synchronous: Synchronous) -> tuple[int, int]:
    """Endpoints added, disabled and removed before one cut, and how many of them are
    not as was answered.
    """
    rng, known = random.Random(seed), dict[str, WebhookEndpoint]()
    disk = FaultyDisk(f"webhooks-{synchronous}-{seed}", rng, rng.randint(1, OPERATIONS_MAX))
    settings = SqliteSettings(synchronous=synchronous, readers=1)
    asked, answered = "", 0
    with disk.until_the_cut():
        endpoints = await SqliteEndpoints.open(
            folder / "webhooks.db", settings=settings, vfs=disk.name
        )
        try:
            while True:
                asked = (
                    f"ep_{answered}"
                    if rng.random() < 0.6 or not known
                    else rng.choice(sorted(known))
                )
                if asked not in known:
                    endpoint = WebhookEndpoint(
                        asked, "acme", "https://example.com/", "whsec_", "", "2026-01-01"
                    )
                    await endpoints.add(endpoint)
                    known[asked] = endpoint
                else:
                    await endpoints.remove(asked)
                    del known[asked]
                answered, asked = answered + 1, ""
        finally:
            await endpoints.close()
    endpoints = await SqliteEndpoints.open(folder / "webhooks.db")
    left = {endpoint.endpoint_id: endpoint for endpoint in await endpoints.all()}
    await endpoints.close()
    differing = {name for name in left.keys() | known.keys() if left.get(name) != known.get(name)}
    return answered, len(differing - {asked})


def test_power_cuts_lose_no_endpoint_and_restore_no_removed_one(tmp_path: Path) -> None:
    reports = Cuts.made(endpoint_cut, tmp_path, 20).reports
    assert not [report for report in reports if report[1]], reports
    assert sum(answered for answered, _ in reports) > 200


def test_control_power_cuts_lose_endpoints_without_a_sync_per_commit(tmp_path: Path) -> None:
    assert (
        sum(differing for _, differing in Cuts.made(endpoint_cut, tmp_path, 12, "NORMAL").reports)
        > 0
    )
