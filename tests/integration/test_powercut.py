"""Power cuts under the product's own connections: what was acknowledged is there, or
the test is red.
"""

from __future__ import annotations

import random
from pathlib import Path

import apsw
import pytest
from powercuts import Cuts

from proof.powercut import FaultyDisk, power_cut

CUTS = 200
CONTROL_CUTS = 40


@pytest.mark.long
def test_200_power_cuts_lose_no_acknowledged_message(tmp_path: Path) -> None:
    cuts = Cuts.made(power_cut, tmp_path, CUTS)
    broken = [r for r in cuts.reports if r.lost or r.changed or r.unsound]
    acked = sum(r.acked for r in cuts.reports)
    how = (
        "an SQLite VFS that loses, keeps or tears unsynced writes, in half of the runs after failed"
        " syncs; FULL"
    )
    cuts.tally(
        "power cut", how, "0 acknowledged messages lost or changed", len(broken), acked=acked
    )
    assert not broken, broken[:3]
    assert acked > 10 * CUTS, "the workload must have something to lose"


def test_control_without_a_sync_per_commit_power_cuts_do_lose_messages(tmp_path: Path) -> None:
    """Proves that the cuts cut: synchronous=NORMAL must lose acknowledged messages."""
    cuts = Cuts.made(power_cut, tmp_path, CONTROL_CUTS, "NORMAL")
    acked, lost = sum(r.acked for r in cuts.reports), sum(r.lost for r in cuts.reports)
    how, must = (
        "the same with synchronous=NORMAL, which must lose",
        "at least one acknowledged message lost",
    )
    cuts.tally("power cut control", how, must, 0 if lost else 1, acked=acked, lost=lost)
    assert not any(r.unsound for r in cuts.reports), (
        "NORMAL loses the newest commits, it does not damage the rest"
    )


def test_a_cut_keeps_what_was_synced_and_may_take_what_was_not(tmp_path: Path) -> None:
    """The disk itself: synced bytes survive; others are lost, kept or torn, by seed."""
    outcomes = set()
    for seed in range(30):
        disk = FaultyDisk(f"disk-{seed}", random.Random(seed))
        path = str(tmp_path / f"file-{seed}")
        flags = [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_READWRITE, 0]
        file = disk.xOpen(path, flags)
        file.xWrite(b"a" * 2048, 0)
        file.xSync(0)
        file.xWrite(b"b" * 2048, 2048)
        file.xClose()
        disk.plug_in()
        disk.unregister()
        left = Path(path).read_bytes()
        assert left[:2048] == b"a" * 2048
        rest = left[2048:]
        outcomes.add("lost" if not rest.strip(b"\0") else "kept" if rest == b"b" * 2048 else "torn")
    assert outcomes == {"lost", "kept", "torn"}
