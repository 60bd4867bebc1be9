"""Reading a growing table without losing a row of a transaction that commits late. (Pure.)

The theory. Every row carries its transaction's id, assigned before its ``seq`` is drawn, and sequences are drawn one
by one. So when a row with ``seq`` R is visible, every row at or below R belongs to a transaction whose id was
assigned before that moment: below any id that is assigned later. Three numbers follow:

- ``through``: rows above it have not been read; the forward read starts there.
- ``settled``: nothing at or below it can still appear, but for the transactions in ``late``.
- the checkpoint (``through`` of one call, the id the *next* call takes): once a snapshot's xmax has passed that id,
  every transaction that may own a row at or below the checkpoint is over or listed as running in that snapshot.
  Then the checkpoint is settled, and those still running are remembered and looked up by id until they end.

The bound must be the next call's id: a snapshot's xmax is only "latest completed + 1", and a transaction above it
may already have drawn a lower sequence.

Between ``settled`` and ``through`` every call looks again for rows that its predecessor's snapshot could not see.
All of it is read in one statement, hence one snapshot: a stream's later row is never seen without its earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TransactionSnapshot:
    """A PostgreSQL snapshot, ``xmin:xmax:running``."""

    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> TransactionSnapshot:
        _, xmax, running = text.split(":")
        return cls(int(xmax), frozenset(map(int, running.split(","))) if running else frozenset())

    def ended(self, xid: int) -> bool:
        return xid < self.xmax and xid not in self.running


@dataclass(slots=True)
class Sweep:
    """Where one worker stands in the table. A new one reads everything."""

    settled: int = 0
    through: int = 0
    snapshot: str | None = None
    xid: int = 0
    late: set[int] = field(default_factory=set)
    _checkpoint: int | None = None
    _bound: int | None = None

    def advance(self, xid: int, snapshot_text: str, through: int) -> None:
        """After a call that took ``xid``, then read in this snapshot up to ``through``."""
        snapshot = TransactionSnapshot.parse(snapshot_text)
        self.late = {late for late in self.late if not snapshot.ended(late)}
        if self._checkpoint is not None and self._bound is None:
            self._bound = xid
        if self._checkpoint is not None and self._bound is not None and snapshot.xmax > self._bound:
            self.late.update(running for running in snapshot.running if running < self._bound)
            self.settled = self._checkpoint
            self._checkpoint = self._bound = None
        self.through = max(self.through, through)
        self.snapshot = snapshot_text
        self.xid = xid  # that call saw its own rows, though its snapshot does not list them
        if self._checkpoint is None and self.through > self.settled:
            self._checkpoint = self.through


_SOON_SECONDS = 0.002
_LATER_SECONDS = 1.0


@dataclass(slots=True)
class PollInterval:
    """Who may enqueue without waking a worker that sleeps.

    A writer takes its id, enqueues, and then asks who sleeps. The first call that finds nothing tells the store so with
    its commit; whoever has an id above the *second* such call's asks after that, and wakes the worker. Those that
    were open at the second call may have asked before: they are ``unaware``, and until they end the worker looks
    again, twice as long after each look, so that a short commit is found at once and a long transaction costs little.
    """

    calls: int = 0
    unaware: frozenset[int] = frozenset()

    def found_something(self) -> None:
        """Or did not ask to be woken: the store knows that this worker is awake."""
        self.calls, self.unaware = 0, frozenset()

    def found_nothing(self, xid: int, snapshot_text: str) -> None:
        """After a call that took ``xid``, then read in this snapshot, and asked to be woken."""
        snapshot = TransactionSnapshot.parse(snapshot_text)
        self.calls += 1
        if self.calls <= 2:
            self.unaware = snapshot.running.union(range(snapshot.xmax, xid))
        else:
            self.unaware = frozenset(writer for writer in self.unaware if not snapshot.ended(writer))

    @property
    def look_again_seconds(self) -> float | None:
        """When to look whether one of them has committed; None: who commits now wakes the worker."""
        return min(_SOON_SECONDS * 2.0 ** min(self.calls - 1, 30), _LATER_SECONDS) if self.unaware else None
