"""The event log as one server reads it: lost, repeated, or with entries of a dead past.

A log of one process does none of that. Logs of clusters do: a failover or a retention
loses a position, readers and publishers repeat entries, and a publisher that was cut
off brings entries of an epoch that is over.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.eventlog.contract import START, EventLog, LogLost, Position
from holdfast.message import EpochRaised, LogEntry, Message
from proof.faults import Fault, FaultPlan
from proof.simulation.options import Options

LOSE_LOG = "lose_log"


class FaultyLog:
    """The faults end when the plan heals."""

    def __init__(self, log: EventLog, plan: FaultPlan, options: Options) -> None:
        self._log, self._plan = log, plan
        self._rng = random.Random(options.seed + 4)
        self._repeats, self._zombies = options.log_repeats, options.log_zombies
        self.end, self.wait, self.lag = log.end, log.wait, log.lag

    async def read(self, after: Position, limit: int) -> tuple[Sequence[LogEntry], Position]:
        entries, reached = await self._log.read(after, limit)
        if not entries or self._plan.healed.is_set():
            return entries, reached
        if self._plan.next(LOSE_LOG)[0] is not Fault.NONE:
            with self._plan.during(LOSE_LOG, Fault.FAIL):
                raise LogLost
        past, _ = await self._log.read(START, 10**6)
        past = [entry for entry in past if entry.offset <= after.offset(0) and _is_event(entry)]
        disturbed: list[LogEntry] = []
        for entry in entries:
            if past and self._rng.random() < self._repeats:
                disturbed.append(self._rng.choice(past))
            if entry.epoch > 1 and self._rng.random() < self._zombies:
                disturbed += _zombie(entry)
            disturbed.append(entry)
        return disturbed, reached


def _is_event(entry: LogEntry) -> bool:
    """Texts that are repeated concern nobody: each session has its own place."""
    return not isinstance(entry.what, Message | EpochRaised) or (
        isinstance(entry.what, Message) and entry.what.kind == "event"
    )


def _zombie(entry: LogEntry) -> list[LogEntry]:
    """Another message under the same number, in the epoch before."""
    if not isinstance(entry.what, Message):
        return []
    lost = replace(
        entry.what,
        message_id=f"{entry.what.message_id}_lost",
        kind="text",
        client_message_id=None,
        content="committed by the old primary, and lost with it",
    )
    return [replace(entry, epoch=entry.epoch - 1, what=lost)]
