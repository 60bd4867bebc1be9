"""Checker 11: a job's effects happen once, in stream order, fenced. (Pure.)

Producers, handlers and the resource they change record the events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from holdfast.verify.checkers.verdict import Verdict
from holdfast.verify.history import EffectSeen, Enqueued, Excused, History, Ran

_E = TypeVar("_E", EffectSeen, Ran)


@dataclass(slots=True)
class JobHistory:
    """``excused``: jobs without effect, by a recorded act or verdict (dead letters)."""

    enqueued: list[Enqueued] = field(default_factory=list)
    runs: list[Ran] = field(default_factory=list)
    effects: list[EffectSeen] = field(default_factory=list)
    excused: set[int] = field(default_factory=set)


def job_effects_once(history: History) -> Verdict:
    """11, for the jobs of a history; see ``effects_once_in_order``."""
    excused = {event.seq for event in history.of(Excused)}
    return effects_once_in_order(
        JobHistory(history.of(Enqueued), history.of(Ran), history.of(EffectSeen), excused)
    )


def effects_once_in_order(history: JobHistory) -> Verdict:
    """No effect is lost, doubled or invented; order and fences rise within a stream.

    No two runs of a stream overlap.
    """
    verdict = Verdict("effects_once_in_order")
    _complete(history, verdict)
    for stream, effects in _by_stream(history.effects).items():
        _rising(stream, effects, verdict)
    for stream, runs in _by_stream(history.runs).items():
        _apart(stream, sorted(runs, key=lambda run: run.started), verdict)
    return verdict


def _by_stream(items: Sequence[_E]) -> dict[str, list[_E]]:
    streams: dict[str, list[_E]] = defaultdict(list)
    for item in items:
        streams[item.stream].append(item)
    return streams


def _complete(history: JobHistory, verdict: Verdict) -> None:
    known = {job.seq for job in history.enqueued}
    applied: dict[int, int] = defaultdict(int)
    for effect in history.effects:
        applied[effect.seq] += 1
        verdict.require(effect.seq in known, f"an effect of {effect.seq}, which nobody enqueued")
    for job in history.enqueued:
        count = applied[job.seq]
        verdict.require(count <= 1, f"{job.seq} of {job.stream} had its effect {count} times")
        if job.certain and job.seq not in history.excused:
            verdict.require(count >= 1, f"{job.seq} of {job.stream} is lost")


def _rising(stream: str, effects: Sequence[EffectSeen], verdict: Verdict) -> None:
    for before, after in pairwise(effects):
        verdict.require(before.seq < after.seq, f"{stream}: {after.seq} after {before.seq}")
        verdict.require(
            before.fence <= after.fence, f"{stream}: fence {after.fence} after {before.fence}"
        )


def _apart(stream: str, runs: Sequence[Ran], verdict: Verdict) -> None:
    latest = 0.0
    done = 0
    for run in runs:
        verdict.require(
            run.started >= latest, f"{stream}: {run.seq} on {run.worker} overlaps the run before"
        )
        verdict.require(
            run.seq > done or run.released, f"{stream}: {run.seq} started after {done} was done"
        )
        latest = max(latest, run.ended)
        if run.succeeded and not run.released:
            done = max(done, run.seq)


__all__ = [
    "EffectSeen",
    "Enqueued",
    "JobHistory",
    "Ran",
    "effects_once_in_order",
    "job_effects_once",
]
