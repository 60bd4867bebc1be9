"""The eighteen named invariants of the two messaging design documents. (Pure.)

Each is a function over a history, under its name in the document. Most are parts of the
checkers; if this design promises more than the document, the docstring says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from holdfast.verify.checkers import Verdict
from holdfast.verify.checkers.answered import (
    TRIES_MAX,
    answered_in_time,
    failure_stays_in_its_plane,
    no_silent_close,
)
from holdfast.verify.checkers.served import acked_is_offered
from holdfast.verify.checkers.stored import acked_is_stored
from holdfast.verify.history import (
    ClosingSeen,
    CommitSeen,
    CommitsLost,
    History,
    Level,
    Tried,
    WarningSeen,
)


def no_silent_message_loss(history: History) -> Verdict:
    """Every send is answered, and an ack is true. Stronger: within 5.5 s."""
    verdict = Verdict("no_silent_message_loss")
    for part in (answered_in_time(history), acked_is_stored(history)):
        verdict.examined += part.examined
        verdict.violations += part.violations
    return verdict


def bounded_buffer(history: History) -> Verdict:
    """Outbound buffer and inbound queue within their bounds.

    Stronger: the bytes, the lanes and ingest's queues too.
    """
    verdict = Verdict("bounded_buffer")
    for level in history.of(Level):
        verdict.require(
            level.value <= level.bound, f"{level.where} holds {level.value} of {level.bound}", level
        )
    return verdict


def backpressure_signaled(history: History) -> Verdict:
    """A slow consumer is warned a grace before it is closed.

    Stronger: no close of any kind is silent.
    """
    verdict = Verdict("backpressure_signaled")
    warned = {w.connection: w.at for w in reversed(history.of(WarningSeen))}
    for closing in history.of(ClosingSeen):
        if closing.reason == "slow_consumer":
            early = closing.at - warned.get(closing.connection, closing.at)
            verdict.require(early >= 5 - 1e-6, f"{closing.connection} had {early} s", closing)
    silent = no_silent_close(history)
    verdict.examined += silent.examined
    verdict.violations += silent.violations
    return verdict


def failfast_persistence(history: History) -> Verdict:
    """No ack before its commit."""
    verdict = Verdict("failfast_persistence")
    committed = {(c.chat_id, c.sequence): c.at for c in reversed(history.of(CommitSeen))}
    for invoke, ok, acked in history.acks():
        at = committed.get((invoke.chat_id, acked.sequence))
        verdict.require(
            at is not None and at <= ok.at, f"acked at {ok.at}, committed at {at}", invoke, ok
        )
    return verdict


def graceful_fanout(history: History) -> Verdict:
    """No delivery is tried more than three times."""
    verdict = Verdict("graceful_fanout")
    for tried in history.of(Tried):
        verdict.require(tried.attempt <= TRIES_MAX, f"tried {tried.attempt} times", tried)
    return verdict


def reconnect_heals(history: History) -> Verdict:
    """A client that reconnects and syncs has the right state.

    Stronger: exactly the stored chat, in order, once.
    """
    verdict = acked_is_offered(history)
    verdict.name = "reconnect_heals"
    return verdict


def isolation_holds(history: History) -> Verdict:
    """A failure in one plane does not reach another."""
    verdict = failure_stays_in_its_plane(history)
    verdict.name = "isolation_holds"
    return verdict


def counter_must_exist(history: History) -> Verdict:
    verdict = Verdict("counter_must_exist")
    for chat in history.chats.values():
        verdict.require(chat.counter is not None, f"{chat.chat_id} has no counter")
    return verdict


def sequence_uniqueness(history: History) -> Verdict:
    verdict = Verdict("sequence_uniqueness")
    for chat in history.chats.values():
        ids: dict[int, str] = {}
        for message in chat.messages:
            same = ids.setdefault(message.sequence, message.message_id) == message.message_id
            verdict.require(same, f"{chat.chat_id} {message.sequence} is two messages", message)
    return verdict


def allocation_monotonicity(history: History) -> Verdict:
    """Later allocations are higher, unless the engine lost the earlier ones.

    Stronger: an allocation is a commit, so commits rise, one by one.
    """
    verdict = Verdict("allocation_monotonicity")
    last: dict[str, CommitSeen] = {}
    for commit in history.events:
        if isinstance(commit, CommitsLost):
            last.pop(commit.chat_id, None)
        if not isinstance(commit, CommitSeen):
            continue
        before = last.get(commit.chat_id)
        if before is not None:
            verdict.require(commit.sequence > before.sequence, "a commit went back", before, commit)
        last[commit.chat_id] = commit
    return verdict


def counter_is_last_allocated(history: History) -> Verdict:
    """The counter is the last allocated number.

    Stronger: it is the last stored one, or the end of a recorded hole.
    """
    verdict = Verdict("counter_is_last_allocated")
    for chat in history.chats.values():
        highest = max(
            [m.sequence for m in chat.messages] + [end for _, end in chat.holes], default=0
        )
        verdict.require(
            chat.counter == max(highest, chat.first_sequence - 1),
            f"{chat.chat_id} has counter {chat.counter}, last number {highest}",
        )
    return verdict


def sequence_monotonicity(history: History) -> Verdict:
    verdict = Verdict("sequence_monotonicity")
    for chat in history.chats.values():
        highest = max((m.sequence for m in chat.messages), default=0)
        verdict.require(
            highest <= (chat.counter or 0), f"{chat.chat_id} has {highest} above {chat.counter}"
        )
    return verdict


def counter_lower_bound(history: History) -> Verdict:
    verdict = Verdict("counter_lower_bound")
    for chat in history.chats.values():
        verdict.require(
            len(chat.messages) <= (chat.counter or 0),
            f"{chat.chat_id} has more messages than numbers",
        )
    return verdict


def idempotency_sequence_consistency(history: History) -> Verdict:
    """Key and message agree.

    Stronger: keys are scoped to their sender, and every keyed message has its key.
    """
    verdict = Verdict("idempotency_sequence_consistency")
    for chat in history.chats.values():
        if chat.keys is None:
            continue
        keys = {(k.sender_id, k.key): (k.sequence, k.message_id) for k in chat.keys}
        for message in chat.messages:
            if message.key is not None:
                key = keys.get((message.sender_id or "", message.key))
                verdict.require(
                    key == (message.sequence, message.message_id),
                    "key and message differ",
                    message,
                    key,
                )
    return verdict


def ack_implies_persistence(history: History) -> Verdict:
    verdict = acked_is_stored(history)
    verdict.name = "ack_implies_persistence"
    return verdict


def no_zero_sequence(history: History) -> Verdict:
    verdict = Verdict("no_zero_sequence")
    for chat in history.chats.values():
        for message in chat.messages:
            verdict.require(
                message.sequence >= 1, f"{chat.chat_id} has message {message.sequence}", message
            )
    return verdict


def gap_is_allocation_without_persistence(history: History) -> Verdict:
    """Every gap is a failed allocation.

    Stronger: only a commit allocates, so every gap is a recorded one.
    """
    verdict = Verdict("gap_is_allocation_without_persistence")
    for chat in history.chats.values():
        numbers = {m.sequence for m in chat.messages}
        recorded = {n for first, last in chat.holes for n in range(first, last + 1)}
        gaps = set(range(chat.first_sequence, (chat.counter or 0) + 1)) - numbers - recorded
        verdict.require(not gaps, f"{chat.chat_id} has unrecorded gaps {sorted(gaps)[:5]}")
    return verdict


def add_operation_atomicity(history: History) -> Verdict:
    """Concurrent allocations differ: no two new acks of a chat have one number."""
    verdict = Verdict("add_operation_atomicity")
    given: dict[str, dict[int, str]] = defaultdict(dict)
    for invoke, ok, acked in history.acks():
        same = (
            given[invoke.chat_id].setdefault(acked.sequence, acked.message_id) == acked.message_id
        )
        verdict.require(same, f"{invoke.chat_id} {acked.sequence} was given twice", invoke, ok)
    return verdict


INVARIANTS: dict[str, Callable[[History], Verdict]] = {
    f.__name__: f
    for f in (
        no_silent_message_loss,
        bounded_buffer,
        backpressure_signaled,
        failfast_persistence,
        graceful_fanout,
        reconnect_heals,
        isolation_holds,
        counter_must_exist,
        sequence_uniqueness,
        allocation_monotonicity,
        counter_is_last_allocated,
        sequence_monotonicity,
        counter_lower_bound,
        idempotency_sequence_consistency,
        ack_implies_persistence,
        no_zero_sequence,
        gap_is_allocation_without_persistence,
        add_operation_atomicity,
    )
}
