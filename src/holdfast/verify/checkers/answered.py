"""Checkers 6, 7, 8 and 10: bounds, warnings, replies, planes. (Pure.)"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set

from holdfast.verify.checkers.fault_timeline import ASKS, FELT_SECONDS, FaultTimeline
from holdfast.verify.checkers.verdict import Verdict
from holdfast.verify.history import (
    Closed,
    ClosingSeen,
    Fail,
    History,
    Level,
    Opened,
    Operation,
    Tried,
    Unknown,
    WarningSeen,
)

ANSWER_SECONDS_MAX = 5.5
TRIES_MAX = 3

INFRASTRUCTURE = {"SERVICE_UNAVAILABLE", "INTERNAL_ERROR", "SERVER_BUSY"}
PLANNED_CLOSINGS = {"server_shutdown", "rotation", "token_expired"}
"""Closings that are planned, not caused by a failing plane."""
OVERLOAD_SECONDS = 32.0
"""The most time since an overloaded connection's first refusal: window and queue."""
HEARTBEAT_SECONDS_MAX = 40.0
"""The most time since an idle connection's last reply: a heartbeat and its deadline."""


def buffers_bounded(history: History) -> Verdict:
    """6: no buffer exceeds its bound, no delivery is tried more often than allowed."""
    verdict = Verdict("buffers are bounded")
    for level in history.of(Level):
        verdict.require(
            level.value <= level.bound, f"{level.where} holds {level.value} of {level.bound}", level
        )
    for tried in history.of(Tried):
        verdict.require(tried.attempt <= TRIES_MAX, f"delivery tried {tried.attempt} times", tried)
    return verdict


def no_silent_close(history: History) -> Verdict:
    """7: the server says why it closes, and warns a slow consumer one grace before."""
    verdict = Verdict("no silent close")
    announced = {closing.connection: closing for closing in history.of(ClosingSeen)}
    for closed in history.of(Closed):
        if closed.by == "server":
            verdict.require(
                closed.connection in announced,
                f"{closed.connection} was closed without a word",
                closed,
            )
    warnings: dict[str, list[WarningSeen]] = defaultdict(list)
    for warned in history.of(WarningSeen):
        warnings[warned.connection].append(warned)
    for closing in announced.values():
        if closing.reason == "slow_consumer":
            last = next(
                (w for w in reversed(warnings[closing.connection]) if w.at <= closing.at), None
            )
            kept = last is not None and closing.at - last.at >= last.grace_seconds - 1e-6
            verdict.require(
                kept, f"{closing.connection} was closed before its grace was over", last, closing
            )
    return verdict


def answered_in_time(history: History) -> Verdict:
    """8: every request is answered in time, or its connection breaks in time.

    There is one excuse: time does not count while nothing can reach a client (its
    network swallows bytes, or it does not read). A client that gave up although it was
    reachable was not answered; and a server that closes a connection answers first.
    """
    verdict = Verdict(f"every request is answered within {ANSWER_SECONDS_MAX} s")
    timeline = FaultTimeline(history)
    closed_at = {
        (closed.client, closed.at) for closed in history.of(Closed) if closed.by == "server"
    }
    for operation in history.operations:
        invoke, end = operation.invoke, operation.end
        if end is None:
            verdict.require(False, f"{invoke.verb} of {invoke.client} was never answered", invoke)
            continue
        unreachable = timeline.unreachable_seconds(invoke.client, invoke.at, end.at)
        seconds = end.at - invoke.at - unreachable
        gave_up = isinstance(end, Unknown) and end.reason == "timeout"
        broke = isinstance(end, Unknown) and end.reason == "disconnected"
        # the client notices a break later than it happens
        felt = FELT_SECONDS if broke and _torn(timeline, invoke.client, end.at) else 0.0
        kept = seconds <= ANSWER_SECONDS_MAX + felt and (unreachable > 0 or not gave_up)
        verdict.require(kept, f"{invoke.verb} of {invoke.client} took {seconds:.3f} s", invoke, end)
        left_open = (
            isinstance(end, Unknown)
            and end.reason == "disconnected"
            and (invoke.client, end.at) in closed_at
        )
        # request and close may have crossed
        kept = not left_open or unreachable > 0 or seconds <= FELT_SECONDS
        verdict.require(
            kept, f"{invoke.verb} of {invoke.client} was open when the server closed", invoke, end
        )
    return verdict


def failure_stays_in_its_plane(history: History) -> Verdict:
    """10: a fault of its own plane, client and time explains every failure."""
    verdict = Verdict("a plane's failure stays there")
    timeline = FaultTimeline(history)
    closed_at = {
        (closed.client, closed.at) for closed in history.of(Closed) if closed.by == "server"
    }
    for operation in history.operations:
        kept = not _infrastructure(operation) or _explained(timeline, operation, closed_at)
        verdict.require(
            kept, f"{operation.invoke.verb} failed without a fault of its plane", operation
        )
    opened = {event.connection: event for event in history.of(Opened)}
    for closing in history.of(ClosingSeen):
        kept = _closing_explained(history, timeline, opened[closing.connection], closing)
        verdict.require(kept, f"{closing.connection} was closed for another's failure", closing)
    announced = {closing.connection for closing in history.of(ClosingSeen)}
    in_vain = _waited_in_vain(history)
    for closed in history.of(Closed):
        kept = (
            closed.by == "server"
            or closed.connection in announced
            or _torn(timeline, closed.client, closed.at)
        )
        kept = kept or (
            closed.by == "client" and (not closed.why or (closed.client, closed.at) in in_vain)
        )
        verdict.require(kept, f"{closed.connection} broke without a fault of its own", closed)
    return verdict


def _torn(timeline: FaultTimeline, client: str, at: float) -> bool:
    """Whether this client's connection may break now: its own fault, or a kill."""
    since = at - FELT_SECONDS
    return timeline.faults("connection", since, at, client) or timeline.faults(
        "process", since, at, client
    )


def _waited_in_vain(history: History) -> set[tuple[str, float]]:
    """When clients gave up on a request; 8 judges whether they waited enough."""
    return {
        (operation.invoke.client, operation.end.at)
        for operation in history.operations
        if isinstance(operation.end, Unknown) and operation.end.reason == "timeout"
    }


def _infrastructure(operation: Operation) -> bool:
    match operation.end:
        case Fail(code=code):
            return code in INFRASTRUCTURE
        case Unknown(reason=reason):
            # 8 judges a timeout; a broken connection is explained itself
            return reason == "answered"
        case _:
            return False


def _explained(
    timeline: FaultTimeline, operation: Operation, closed_at: Set[tuple[str, float]]
) -> bool:
    """Whether a fault of its plane, or a breaker they opened, explains a failure."""
    invoke, end = operation.invoke, operation.end
    ended_at = end.at if end is not None else invoke.at
    if isinstance(end, Fail) and timeline.unreachable_seconds(invoke.client, invoke.at, ended_at):
        # Pages for a client that does not read wait until they are too old or it is
        # closed; the close is judged by itself.
        waited = end.code == "SERVER_BUSY" or (invoke.client, ended_at) in closed_at
        if waited:
            return True
    for plane, verbs in ASKS.items():
        if invoke.verb in verbs and (
            timeline.faults(plane, invoke.at, ended_at, invoke.client)
            or (isinstance(end, Fail) and timeline.breaker_open(plane, invoke.at, ended_at))
        ):
            return True
    return False


def _closing_explained(
    history: History, timeline: FaultTimeline, opened: Opened, closing: ClosingSeen
) -> bool:
    client, at = opened.client, closing.at
    match closing.reason:
        case reason if reason in PLANNED_CLOSINGS:
            return True
        case "duplicate_connection":  # the device reconnected before the server noticed the loss
            return any(
                later.client == client and opened.at <= later.at <= at
                for later in history.of(Opened)
            )
        case "slow_consumer":
            return timeline.faults("connection", at - FELT_SECONDS, at, client)
        case "idle_timeout":
            return timeline.faults("connection", at - HEARTBEAT_SECONDS_MAX, at, client)
        case "upstream_failure":  # the server could not read its chats at the start
            return timeline.faults("history", opened.at, at) or timeline.breaker_open(
                "history", opened.at, at
            )
        case "overloaded":
            since = at - OVERLOAD_SECONDS
            return timeline.faults("durability", since, at) or timeline.faults("history", since, at)
        case _:
            return False
