"""Jobs, dead letters, blocks and counts as operators see them. (Pure: values.)"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from holdfast.work.job import Block, Reason, State, reason_of

POISON_CANDIDATE_ATTEMPTS = 10
BURIED = "buried"
"""What stands for the reason of a dead letter that never failed."""


@dataclass(frozen=True, slots=True)
class JobEntry:
    """A job as operators see it."""

    seq: int
    type: str
    stream: str | None
    state: State
    attempt: int
    strikes: int
    crashes: int
    stages: int
    created_at: float
    due_at: float | None = None
    destination: str = ""
    payload: bytes = b""
    reason: Reason | None = None
    error_type: str = ""
    error: str = ""
    trace: str = ""
    fingerprint: str = ""
    source: str = ""
    source_id: str = ""
    origin: int = 0
    dead_at: float | None = None
    reasons: Sequence[Reason] = ()
    """Its reasons in order, repeats in a row once; the first 63 and the last."""

    @classmethod
    def stored(cls, values: Iterable[tuple[str, Any]]) -> JobEntry:
        """From a table's columns: numbers for states and reasons, NULL for unknown."""
        found = dict(values)
        found["state"], found["reason"] = State(found["state"]), reason_of(found["reason"])
        kept = found["reasons"]
        found["reasons"] = [
            reason_of(n) for n in (json.loads(kept) if isinstance(kept, str) else kept or ())
        ]
        for name in ("error_type", "error", "trace", "fingerprint", "source", "source_id"):
            found[name] = found[name] or ""
        return cls(**found)


@dataclass(frozen=True, slots=True)
class Query:
    """Selects the jobs or dead letters for which every given condition holds."""

    seqs: Sequence[int] = ()
    type: str | None = None
    stream: str | None = None
    reason: Reason | None = None
    state: State | None = None
    fingerprint: str | None = None

    def __str__(self) -> str:
        """``type=SendMail reason=throttled``, the sequences alone, or ``all``."""
        if self.seqs:
            return " ".join(map(str, self.seqs))
        given = (
            (field.name, getattr(self, field.name))
            for field in fields(self)
            if field.name != "seqs"
        )
        named = (
            f"{name}={getattr(value, 'name', value)}" for name, value in given if value is not None
        )
        return " ".join(named) or "all"


@dataclass(frozen=True, slots=True)
class BlockedStream:
    """A blocked stream: its head, why the head waits, and how many jobs follow it."""

    block: Block
    waiting: int
    head_type: str
    head_attempt: int
    head_reason: Reason | None
    head_error: str
    head_due_at: float | None
    since: float


@dataclass(frozen=True, slots=True)
class OpenBreaker:
    """A job type whose dependency fails; its jobs wait until ``open_until``."""

    type: str
    open_until: float
    by: str


class Group(NamedTuple):
    """A count of similar jobs: since when the oldest waits (None: all on purpose), the
    first and last due times.
    """

    state: int
    reason: int | None
    attempt: int
    jobs: int
    oldest: float | None
    next_due: float | None
    last_due: float | None

    @property
    def failed(self) -> bool:
        return self.reason is not None and self.state in (State.RETRY, State.PARKED)


@dataclass(frozen=True, slots=True)
class Stats:
    """The numbers that operators look at first. ``oldest_age_seconds``: of the jobs
    that should run; not of those whose time has not come or whose destination is
    parked.
    """

    by_state: Mapping[State, int]
    by_reason: Mapping[Reason, int]
    by_attempt: Mapping[int, int]
    dead: int
    dead_by_reason: Mapping[Reason | None, int]
    poison_candidates: int
    scheduled: int
    next_due_at: float | None
    last_due_at: float | None
    oldest_age_seconds: float
    blocked_streams: int

    @classmethod
    def counted(
        cls,
        groups: Iterable[Group],
        dead: Mapping[Reason | None, int],
        blocked: int,
        now: float,
    ) -> Stats:
        """From one pass over all jobs; ``dead`` as ``WorkStore.dead_counts``."""
        by_state, by_reason, by_attempt = Counter[State](), Counter[Reason](), Counter[int]()
        oldest, due = now, list[float]()
        for group in groups:
            oldest = min(oldest, oldest if group.oldest is None else group.oldest)
            by_state[State(group.state)] += group.jobs
            if (reason := reason_of(group.reason)) is not None and group.failed:
                by_reason[reason] += group.jobs
                by_attempt[group.attempt] += group.jobs
            if group.state == State.RETRY:
                due += [at for at in (group.next_due, group.last_due) if at is not None]
        poison = sum(
            count for attempt, count in by_attempt.items() if attempt >= POISON_CANDIDATE_ATTEMPTS
        )
        return cls(
            by_state,
            by_reason,
            by_attempt,
            sum(dead.values()),
            dead,
            poison,
            scheduled=by_state[State.RETRY],
            next_due_at=min(due, default=None),
            last_due_at=max(due, default=None),
            oldest_age_seconds=now - oldest,
            blocked_streams=blocked,
        )


def counted_reasons(rows: Iterable[tuple[int | None, int]]) -> dict[Reason | None, int]:
    """Dead letters by reason, from rows of a reason as it is stored and a count."""
    counts = Counter[Reason | None]()
    for reason, count in rows:
        counts[reason_of(reason)] += count
    return dict(counts)


def by_name(counts: Mapping[Reason, int] | Mapping[Reason | None, int]) -> dict[str, int]:
    """Counts by reason with the words that operators see."""
    return {
        BURIED if reason is None else reason.name.lower(): count for reason, count in counts.items()
    }


class WaitingJobs(NamedTuple):
    """A destination's unfinished jobs: how many, and when the oldest was enqueued."""

    jobs: int
    oldest_at: float


@dataclass(frozen=True, slots=True)
class JobAct:
    """One recorded act of an operator; ``number`` rises with time."""

    number: int
    at: float
    verb: str
    target: str
    count: int
    by: str
    why: str
