"""The sweep against a model of PostgreSQL's transactions: nothing is lost, and a
stream's order is kept.

The model knows what the theory needs: ids assigned before sequences are drawn, a
snapshot whose xmax is only the latest completed id plus one, and streams that are
locked from before the draw to the commit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from holdfast.work.postgres.sweep import PollInterval, Sweep, TransactionSnapshot


@dataclass
class Transaction:
    xid: int
    reader: bool = False
    rows: list[int] = field(default_factory=list)
    streams: set[int] = field(default_factory=set)


@dataclass
class Model:
    """A table of rows (seq -> (xid, stream)), open transactions, and completed ids."""

    next_xid: int = 1
    next_seq: int = 1
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    open: dict[int, Transaction] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)
    latest_completed: int = 0

    def begin(self, *, reader: bool = False) -> Transaction:
        transaction = Transaction(self.next_xid, reader)
        self.open[self.next_xid] = transaction
        self.next_xid += 1
        return transaction

    def insert(self, transaction: Transaction, stream: int) -> None:
        if any(stream in other.streams for other in self.open.values() if other is not transaction):
            return
        transaction.streams.add(stream)
        self.rows[self.next_seq] = (transaction.xid, stream)
        transaction.rows.append(self.next_seq)
        self.next_seq += 1

    def end(self, transaction: Transaction, *, commit: bool) -> None:
        del self.open[transaction.xid]
        self.latest_completed = max(self.latest_completed, transaction.xid)
        if commit:
            self.committed.add(transaction.xid)
        else:
            for seq in transaction.rows:
                del self.rows[seq]

    def snapshot(self) -> str:
        xmax = self.latest_completed + 1
        running = sorted(xid for xid in self.open if xid < xmax)
        return f"{running[0] if running else xmax}:{xmax}:{','.join(map(str, running))}"

    def visible(self, xid: int, snapshot: TransactionSnapshot) -> bool:
        return xid in self.committed and snapshot.ended(xid)


def call(model: Model, sweep: Sweep, want: int, race: random.Random | None = None) -> list[int]:
    """One round of `process`, as in SQL: take an id, read in one snapshot, end."""
    mine = model.begin(reader=True)
    if race is not None:
        act(model, race)
    text = model.snapshot()
    snapshot, previous = (
        TransactionSnapshot.parse(text),
        TransactionSnapshot.parse(sweep.snapshot) if sweep.snapshot else None,
    )
    seen = [seq for seq, (xid, _) in sorted(model.rows.items()) if model.visible(xid, snapshot)]
    overdue = [
        seq
        for seq in seen
        if (
            previous is not None
            and sweep.settled < seq <= sweep.through
            and not model.visible(model.rows[seq][0], previous)
        )
        or (seq <= sweep.settled and model.rows[seq][0] in sweep.late)
    ]
    forward = [seq for seq in seen if seq > sweep.through][:want]
    through = forward[-1] if len(forward) == want else max(seen, default=0)
    sweep.advance(mine.xid, text, through)
    model.end(mine, commit=True)
    return sorted(overdue + forward)


def act(model: Model, rng: random.Random) -> None:
    """One random act of a producer: begin, insert, commit or abort."""
    choice = rng.random()
    if choice < 0.3 and len(model.open) < 6:
        model.begin()
    elif writers := [transaction for transaction in model.open.values() if not transaction.reader]:
        transaction = rng.choice(writers)
        if choice < 0.75:
            model.insert(transaction, rng.randrange(4))
        else:
            model.end(transaction, commit=rng.random() < 0.9)


def run(seed: int, sweep: Sweep) -> tuple[list[int], Model]:
    rng, model, delivered = random.Random(seed), Model(), list[int]()
    for _ in range(300):
        if rng.random() < 0.25:
            for seq in call(model, sweep, want=rng.choice([1, 3, 100]), race=rng):
                if seq not in delivered:
                    delivered.append(seq)
        else:
            act(model, rng)
    for transaction in list(model.open.values()):
        model.end(transaction, commit=True)
    for _ in range(60):
        delivered.extend(seq for seq in call(model, sweep, want=5) if seq not in delivered)
    return delivered, model


@pytest.mark.covers("003 order by created_at")
@pytest.mark.parametrize("block", range(10))
def test_no_row_is_lost_and_every_stream_keeps_its_order(block: int) -> None:
    for seed in range(block * 40, block * 40 + 40):
        delivered, model = run(seed, Sweep())
        assert set(delivered) == set(model.rows), f"seed {seed}"
        for stream in range(4):
            order = [seq for seq in delivered if model.rows[seq][1] == stream]
            assert order == sorted(order), f"seed {seed}, stream {stream}"


class BoundIsXmax(Sweep):
    """The earlier rule, which lost jobs: the bound is the xmax of the snapshot."""

    def advance(self, xid: int, snapshot_text: str, through: int) -> None:
        snapshot = TransactionSnapshot.parse(snapshot_text)
        self.late = {late for late in self.late if not snapshot.ended(late)} | set(snapshot.running)
        self.settled = self.through = max(self.through, through)
        self.snapshot = snapshot_text


def test_control_xmax_of_the_snapshot_as_bound_loses_rows() -> None:
    lost = 0
    for seed in range(60):
        delivered, model = run(seed, BoundIsXmax())
        lost += len(set(model.rows) - set(delivered))
    assert lost > 0


def test_open_transaction_is_remembered_once_and_everything_else_settles() -> None:
    model, sweep = Model(), Sweep()
    held = model.begin()
    model.insert(held, 0)
    for _ in range(20):
        other = model.begin()
        model.insert(other, 1)
        model.end(other, commit=True)
        assert call(model, sweep, want=10)
    assert sweep.late == {held.xid}
    assert sweep.settled >= model.next_seq - 4
    model.end(held, commit=True)
    assert call(model, sweep, want=10) == held.rows
    assert not sweep.late


def test_writer_open_at_falling_asleep_is_polled_more_rarely_until_it_ends() -> None:
    interval = PollInterval()
    interval.found_nothing(10, "5:5:")
    assert interval.unaware == {5, 6, 7, 8, 9}, "assigned before this call's own id, and not ended"
    interval.found_nothing(13, "9:11:9")
    assert interval.unaware == {9, 11, 12}, "they may have asked before the first call's commit"
    interval.found_nothing(16, "9:14:9,13")
    assert interval.unaware == {9}, "13 to 15 asked later, and wake it"
    waits = list[float]()
    for xid in range(17, 37):
        interval.found_nothing(xid, f"9:{xid}:9")
        waits.append(interval.next_poll_seconds or 0.0)
    assert waits[0] < 0.05 and waits[-1] == 1.0 and waits == sorted(waits)
    interval.found_nothing(37, "37:37:")
    assert interval.next_poll_seconds is None


def test_worker_that_woke_starts_its_poll_interval_again() -> None:
    interval = PollInterval()
    for xid in (10, 11, 12):
        interval.found_nothing(xid, f"{xid}:{xid}:")
    assert interval.next_poll_seconds is None
    interval.found_something()
    interval.found_nothing(20, "15:20:15")
    assert interval.unaware == {15} and interval.next_poll_seconds == 0.002
