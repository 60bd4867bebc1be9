"""Reads a growing table without missing a row of a transaction that commits late.
(Pure.)

The theory. Every row carries its transaction's id. The id is assigned before the row's
``seq`` is drawn, and sequences are drawn one by one. So when a row with ``seq`` R is
visible, every row at or below R belongs to a transaction whose id was assigned before
that moment, and is lower than any id assigned later. Three numbers follow:

- ``through``: the forward read starts here; rows above it have not been read.
- ``settled``: no row at or below it can still appear, except rows of the transactions
  in ``late``.
- The checkpoint: the ``through`` of one call, bounded by the id that the *next* call
  takes. Once a snapshot's xmax has passed that id, every transaction that may own a row
  at or below the checkpoint has ended or is listed as running in that snapshot. Then
  the checkpoint is settled, and the running ones become ``late``: the worker looks
  their rows up by transaction id until they end.

The bound must be the next call's id: a snapshot's xmax is only "latest completed + 1",
and a transaction above it may already have drawn a lower sequence.

Between ``settled`` and ``through`` every call looks again for rows that the previous
call's snapshot could not see. One statement, hence one snapshot, reads everything: it
never shows a later row of a stream without an earlier one.
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
    """One worker's progress through the table. A new one reads everything."""

    settled: int = 0
    through: int = 0
    snapshot: str | None = None
    xid: int = 0
    late: set[int] = field(default_factory=set)
    _checkpoint: int | None = None
    _bound: int | None = None

    def advance(self, xid: int, snapshot_text: str, through: int) -> None:
        """Note a call that took ``xid``, then read up to ``through``."""
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
        self.xid = xid  # the call saw its own rows, though its snapshot counts them as unseen
        if self._checkpoint is None and self.through > self.settled:
            self._checkpoint = self.through


_SOON_SECONDS = 0.002
_LATER_SECONDS = 1.0


@dataclass(slots=True)
class PollInterval:
    """How soon a sleeping worker must poll for writers that may not wake it.

    A writer takes its transaction id, enqueues, then asks which workers sleep. A
    worker's first call that finds nothing records with its commit that the worker
    sleeps. Every writer with an id above the *second* such call's asks after that
    commit, and wakes the worker. A writer that was open at the second call may have
    asked before: it is ``unaware``. Until all of these end, the worker polls with a
    doubling interval, so that it finds a short commit at once and a long transaction
    costs little.
    """

    calls: int = 0
    unaware: frozenset[int] = frozenset()

    def found_something(self) -> None:
        """Reset: the call found jobs, or did not ask to be woken."""
        self.calls, self.unaware = 0, frozenset()

    def found_nothing(self, xid: int, snapshot_text: str) -> None:
        """Note a call that took ``xid``, read nothing and asked to be woken."""
        snapshot = TransactionSnapshot.parse(snapshot_text)
        self.calls += 1
        if self.calls <= 2:
            self.unaware = snapshot.running.union(range(snapshot.xmax, xid))
        else:
            self.unaware = frozenset(
                writer for writer in self.unaware if not snapshot.ended(writer)
            )

    @property
    def next_poll_seconds(self) -> float | None:
        """When to poll for unaware writers; None: every writer wakes the worker."""
        return (
            min(_SOON_SECONDS * 2.0 ** min(self.calls - 1, 30), _LATER_SECONDS)
            if self.unaware
            else None
        )
