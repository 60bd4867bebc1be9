"""Checkers 6, 7, 8 and 10: bounds, warnings, answers, planes. (Pure.)"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.verify.checkers.verdict import Verdict
from holdfast.verify.history import (
    Closed,
    ClosingSaid,
    Fail,
    Fault,
    History,
    Level,
    Ok,
    Operation,
    Plane,
    Tried,
    Unknown,
    Verb,
    Warned,
)

ANSWER_SECONDS_MAX = 5.5
TRIES_MAX = 3
SETTLE_SECONDS = 36.0
"""How long a healed fault may still show: a breaker's rest and one deadline."""

BREAKS: Mapping[Plane, frozenset[Verb]] = {
    "durability": frozenset({"send", "change"}),
    "history": frozenset({"sync", "resume"}),
    "fanout": frozenset(),
    "connection": frozenset({"send", "sync", "resume", "change"}),
    "process": frozenset({"send", "sync", "resume", "change"}),
}
"""What a failure of each plane is allowed to take with it."""

INFRASTRUCTURE = {"SERVICE_UNAVAILABLE", "INTERNAL_ERROR"}
EXPECTED_CLOSINGS = {"server_shutdown", "slow_consumer", "rotation", "token_expired", "duplicate_connection"}
"""Closings that tell of a plan or of the client itself, not of a failing plane."""
CLOSES: Mapping[Plane, frozenset[str]] = {
    "durability": frozenset({"overloaded"}),
    "history": frozenset({"overloaded", "upstream_failure"}),
    "fanout": frozenset(),
    "connection": frozenset({"idle_timeout", "memory_pressure", "state_diverged", "overloaded"}),
    "process": frozenset({"idle_timeout"}),
}
"""For which reasons a failure of each plane may close connections: a client that cannot be told its chats, say."""


def buffers_bounded(history: History) -> Verdict:
    """6: nothing was ever fuller than its bound, and no delivery was tried more often than allowed."""
    verdict = Verdict("buffers are bounded")
    for level in history.of(Level):
        verdict.require(level.value <= level.bound, f"{level.where} holds {level.value} of {level.bound}", level)
    for tried in history.of(Tried):
        verdict.require(tried.attempt <= TRIES_MAX, f"delivery tried {tried.attempt} times", tried)
    return verdict


def no_silent_close(history: History) -> Verdict:
    """7: the server says why it closes, and warns a slow consumer a whole grace before."""
    verdict = Verdict("no silent close")
    said = {closing.connection: closing for closing in history.of(ClosingSaid)}
    for closed in history.of(Closed):
        if closed.by == "server":
            verdict.require(closed.connection in said, f"{closed.connection} was closed without a word", closed)
    first_warning = {warned.connection: warned for warned in reversed(history.of(Warned))}
    for closing in said.values():
        if closing.reason == "slow_consumer":
            warned = first_warning.get(closing.connection)
            kept = warned is not None and closing.at - warned.at >= warned.grace_seconds - 1e-6
            verdict.require(kept, f"{closing.connection} was closed before its grace was over", warned, closing)
    return verdict


def answered_in_time(history: History) -> Verdict:
    """8: every request is answered in time, or its connection breaks in time."""
    verdict = Verdict(f"every request is answered within {ANSWER_SECONDS_MAX} s")
    for operation in history.operations:
        invoke, end = operation.invoke, operation.end
        if end is None:
            verdict.require(False, f"{invoke.verb} of {invoke.client} was never answered", invoke)
        else:
            seconds = end.at - invoke.at
            kept = seconds <= ANSWER_SECONDS_MAX or _unreachable(history, operation)
            verdict.require(kept, f"{invoke.verb} of {invoke.client} took {seconds:.3f} s", invoke, end)
    return verdict


def _unreachable(history: History, operation: Operation) -> bool:
    """Whether nobody was there to answer, or the client could not hear it: a network away, a process dead."""
    faults = (fault for fault in history.of(Fault) if fault.plane in ("connection", "process"))
    return any(_explains(fault, operation) for fault in faults)


def failure_stays_in_its_plane(history: History) -> Verdict:
    """10: whatever failed is explained by a failure of its own plane, for that client, at that time."""
    verdict = Verdict("a plane's failure stays there")
    faults = history.of(Fault)
    for operation in history.operations:
        if isinstance(operation.end, Ok) or not _infrastructure(operation):
            verdict.examined += 1
            continue
        explained = any(_explains(fault, operation) for fault in faults)
        verdict.require(explained, f"{operation.invoke.verb} failed without a fault of its plane", operation)
    for closing in history.of(ClosingSaid):
        expected = closing.reason in EXPECTED_CLOSINGS or any(
            closing.reason in CLOSES[fault.plane] and fault.at <= closing.at <= fault.until + SETTLE_SECONDS
            for fault in faults
        )
        verdict.require(expected, f"{closing.connection} was closed for another plane's failure", closing)
    for closed in history.of(Closed):
        if closed.by == "network":
            explained = any(_breaks(fault, closed) for fault in faults)
            verdict.require(explained, f"{closed.connection} broke without a fault of its network", closed)
    return verdict


def _breaks(fault: Fault, closed: Closed) -> bool:
    return (
        fault.plane in ("connection", "process")
        and (not fault.clients or closed.client in fault.clients)
        and fault.at <= closed.at <= fault.until + SETTLE_SECONDS
    )


def _infrastructure(operation: Operation) -> bool:
    match operation.end:
        case Fail(code=code):
            return code in INFRASTRUCTURE
        case Unknown(reason=reason):
            return reason == "answered"  # a timeout is judged by 8, a broken connection has to be explained itself
        case _:
            return False


def _explains(fault: Fault, operation: Operation) -> bool:
    invoke, end = operation.invoke, operation.end
    ended_at = end.at if end is not None else invoke.at
    return (
        invoke.verb in BREAKS[fault.plane]
        and (not fault.clients or invoke.client in fault.clients)
        and fault.at <= ended_at
        and invoke.at <= fault.until + SETTLE_SECONDS
    )
