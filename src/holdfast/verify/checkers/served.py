"""Checkers 4, 5, 9 and 12: what clients received. (Pure.)"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from itertools import accumulate
from operator import itemgetter

from holdfast.message import Cursor
from holdfast.verify.checkers.fault_timeline import FaultTimeline
from holdfast.verify.checkers.verdict import Verdict
from holdfast.verify.history import (
    ChatAtEnd,
    CommitSeen,
    CommitsLost,
    CursorMoved,
    Dropped,
    EphemeralSeen,
    FaultPlane,
    Held,
    History,
    HistoryEvent,
    Invoke,
    LogAtEnd,
    Logged,
    MembershipSpan,
    Ok,
    Opened,
    Pushed,
)

EPHEMERAL_SECONDS = 40.0
"""How long after leaving a client may still get typing events.

A gateway reads memberships once per heartbeat.
"""
HIDES_LEAVING: tuple[FaultPlane, ...] = ("fanout", "history", "durability", "process")
_RESUMED = ""
_Fact = tuple[float, Cursor, HistoryEvent]


def no_late_fill(history: History) -> Verdict:
    """4: no message appears below a served cursor; pages and pushes have no hole."""
    verdict = Verdict("no late fill below a served cursor")
    numbers = {
        chat.chat_id: sorted(m.sequence for m in chat.messages) for chat in history.chats.values()
    }
    for invoke, _, page in history.pages():
        chat = history.chats.get(page.chat_id)
        if chat is None or chat.epoch != page.epoch:
            continue  # the chat was renumbered later
        start = max(
            0 if page.reset or page.after is None else page.after.sequence, chat.first_sequence - 1
        )
        stored = numbers[page.chat_id]
        ought = stored[bisect_right(stored, start) : bisect_right(stored, page.through)]
        late = sorted(set(ought) - {m.sequence for m in page.messages})
        verdict.require(
            not late, f"{page.chat_id} was served up to {page.through} without {late}", invoke
        )
    _pushes_follow(history, verdict)
    return verdict


def _pushes_follow(history: History, verdict: Verdict) -> None:
    """On one connection a chat's pushes continue its pushes and pages, none twice.

    After a reset a chat's numbers may be given again.
    """
    through: dict[str, dict[str, int]] = {}
    connections: dict[str, str] = {}
    pushed: dict[tuple[str, str], int] = {}
    invokes = {o.invoke.op: o.invoke for o in history.operations}
    for event in history.events:
        if isinstance(event, Opened):
            through[event.client], connections[event.client] = {}, event.connection
        elif isinstance(event, Ok):
            invoke = invokes[event.op]
            _count_answer(through.setdefault(invoke.client, {}), invoke, event)
            for page in event.pages:
                if page.reset:
                    pushed.pop((connections.get(invoke.client, ""), page.chat_id), None)
        elif isinstance(event, Pushed) and event.message.message_id not in history.lost:
            given = through.setdefault(event.client, {})
            known = given.get(event.chat_id, given.get(_RESUMED))
            kept = known is not None and event.message.sequence <= known + 1
            verdict.require(kept, f"{event.client} was pushed a message past {known}", event)
            given[event.chat_id] = max(known or 0, event.message.sequence)
            before = pushed.get((event.connection, event.chat_id), 0)
            once = event.message.sequence > before
            verdict.require(
                once,
                f"{event.connection} was pushed {event.message.sequence} after {before}",
                event,
            )
            pushed[event.connection, event.chat_id] = event.message.sequence


def _count_answer(given: dict[str, int], invoke: Invoke, ok: Ok) -> None:
    if invoke.verb == "resume":
        given[_RESUMED] = 0  # a chat without a cursor starts at 0
        for chat_id, cursor in invoke.cursors.items():  # the reply omits unchanged chats
            given.setdefault(chat_id, cursor.sequence)
    for page in ok.pages:
        given[page.chat_id] = (
            page.through if page.reset else max(given.get(page.chat_id, 0), page.through)
        )


def cursors_monotone(history: History) -> Verdict:
    """5: heads, epochs and cursors never go back; no page hides another epoch."""
    verdict = Verdict("cursors are monotone, epochs honest")
    for invoke, _, page in history.pages():
        asked = page.after
        if asked is not None:
            honest = page.reset == (page.epoch != asked.epoch)
            verdict.require(
                honest, "a reset without another epoch, or another epoch without one", invoke, page
            )
            verdict.require(
                page.reset or page.through >= asked.sequence, "a page goes back", invoke, page
            )
        verdict.require(page.head >= page.through, "a page goes beyond its head", invoke, page)
        numbers = [m.sequence for m in page.messages]
        verdict.require(numbers == sorted(set(numbers)), "a page is out of order", invoke, page)
    _reads_see_what_was_known(history, verdict)
    _acks_rise(history, verdict)
    return verdict


def _reads_see_what_was_known(history: History, verdict: Verdict) -> None:
    """A read that began after a reply does not see less than the reply showed."""
    heads: dict[str, list[_Fact]] = defaultdict(list)
    acks: dict[str, list[_Fact]] = defaultdict(list)
    for _, ok, page in history.pages():
        heads[page.chat_id].append((ok.at, Cursor(page.epoch, page.head), ok))
    for invoke, ok, acked in history.acks():
        acks[invoke.chat_id].append((ok.at, Cursor(0, acked.sequence), ok))
    known_heads = {chat_id: _Highest(facts) for chat_id, facts in heads.items()}
    known_acks = {chat_id: _Highest(facts) for chat_id, facts in acks.items()}
    one_epoch = {
        chat_id for chat_id, facts in heads.items() if len({fact[1].epoch for fact in facts}) == 1
    }
    for invoke, _, page in history.pages():
        seen = Cursor(page.epoch, page.head)
        highest, shown_by = known_heads[page.chat_id].before(invoke.at)
        verdict.require(
            seen >= highest,
            f"a read of {page.chat_id} saw less than was known",
            shown_by,
            invoke,
            page,
        )
        if page.chat_id in known_acks and page.chat_id in one_epoch:  # an ack names no epoch
            promised, shown_by = known_acks[page.chat_id].before(invoke.at)
            kept = page.head >= promised.sequence
            verdict.require(
                kept,
                f"a read of {page.chat_id} does not show what was acked",
                shown_by,
                invoke,
                page,
            )


class _Highest:
    """The highest of some facts before a given time."""

    def __init__(self, facts: list[_Fact]) -> None:
        facts.sort(key=lambda fact: fact[0])
        self._times = [fact[0] for fact in facts]
        self._highest = list(accumulate(facts, _higher))

    def before(self, at: float) -> tuple[Cursor, HistoryEvent | None]:
        index = bisect_left(self._times, at)
        return self._highest[index - 1][1:] if index else (Cursor(0, 0), None)


def _higher(a: _Fact, b: _Fact) -> _Fact:
    return b if b[1] > a[1] else a


def _acks_rise(history: History, verdict: Verdict) -> None:
    last: dict[tuple[str, str], CursorMoved] = {}
    for moved in history.events:
        if isinstance(moved, Dropped):
            last.pop((moved.client, moved.chat_id), None)
        if not isinstance(moved, CursorMoved):
            continue
        before = last.get((moved.client, moved.chat_id))
        if before is not None:
            forward = (moved.epoch, moved.sequence) >= (before.epoch, before.sequence)
            verdict.require(forward, "a client's cursor went back", before, moved)
        last[moved.client, moved.chat_id] = moved


def acked_is_offered(history: History) -> Verdict:
    """9: an acked message is in the log; every member at rest has all, in order."""
    verdict = Verdict("acked is offered in the end")
    if history.of(LogAtEnd):
        _all_published(history, verdict)
    for held in history.of(Held):
        chat_held = history.chats.get(held.chat_id)
        if chat_held is not None:
            _holds_all(chat_held, held, verdict)
    return verdict


def _all_published(history: History, verdict: Verdict) -> None:
    logged = {(entry.chat_id, entry.sequence) for entry in history.of(Logged)}
    for chat in history.chats.values():
        for message in chat.messages:
            published = (chat.chat_id, message.sequence) in logged
            verdict.require(
                published, f"{chat.chat_id} {message.sequence} is stored, never published", message
            )


def _holds_all(chat: ChatAtEnd, held: Held, verdict: Verdict) -> None:
    have = list(held.messages)
    ought = [(m.sequence, m.message_id) for m in chat.messages if m.sequence >= chat.first_sequence]
    ought.sort()
    if have == ought or [pair for pair in have if pair[0] >= chat.first_sequence] == ought:
        verdict.require(True, "")
        return
    missing = sorted(set(ought) - set(have))
    extra = sorted(set(have) - set(ought))
    verdict.require(
        False,
        f"{held.client} at rest has not {chat.chat_id} as it is: missing {missing[:5]}, "
        f"extra {extra[:5]}, in order and once: {have == sorted(set(have))}",
        f"cursor {held.epoch}:{held.cursor}, chat {chat.epoch}:{chat.counter}",
    )


def nothing_leaks(history: History) -> Verdict:
    """12: no user reads or writes a chat of another tenant, or one they are not in.

    Nor does a muted member write.
    """
    verdict = Verdict("nobody sees another's data")
    for invoke, _, page in history.pages():
        if _was_lost(history, page.chat_id, page.head, invoke.at):
            continue
        inside = _inside(history, invoke.client, page.chat_id, page.head)
        verdict.require(
            inside or not page.messages, f"{invoke.client} was served {page.chat_id}", invoke, page
        )
    for push in history.of(Pushed):
        if push.message.message_id in history.lost:
            continue  # who was a member then may be lost too
        inside = _inside(
            history, push.client, push.chat_id, push.message.sequence, moment_before=True
        )
        verdict.require(inside, f"{push.client} was pushed {push.chat_id}", push)
    for invoke, ok, acked in history.acks():
        if not ok.deduplicated:
            inside = _inside(history, invoke.client, invoke.chat_id, acked.sequence - 1)
            verdict.require(inside, f"{invoke.client} wrote into {invoke.chat_id}", invoke, ok)
            muted = _muted(history, invoke.client, invoke.chat_id, acked.sequence - 1)
            verdict.require(
                not muted, f"{invoke.client} wrote into {invoke.chat_id} while muted", invoke, ok
            )
    _check_ephemeral(history, verdict)
    return verdict


def _check_ephemeral(history: History, verdict: Verdict) -> None:
    """The receiver of an ephemeral event was a member shortly before it.

    The event has no sequence to compare with the membership's.
    A gateway that missed the event of leaving reads the store, which may be unavailable
    for as long as a fault lasts.
    """
    timeline = FaultTimeline(history)
    heads: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for commit in history.of(CommitSeen):
        heads[commit.chat_id].append((commit.at, commit.sequence))
    for event in history.of(EphemeralSeen):
        since, known = event.at - EPHEMERAL_SECONDS, heads[event.chat_id]
        first = bisect_right(known, since, key=itemgetter(0))
        recent = known[max(first - 1, 0) : bisect_right(known, event.at, key=itemgetter(0))]
        sequences = (
            [sequence for _, sequence in recent]
            if first
            else [0, *(sequence for _, sequence in recent)]
        )
        excused = _is_of(history, event.client, event.chat_id) and (
            any(timeline.faults(plane, since, event.at) for plane in HIDES_LEAVING)
            or any(_was_lost(history, event.chat_id, each, since) for each in sequences)
        )
        inside = excused or any(
            _inside(history, event.client, event.chat_id, each) for each in sequences
        )
        verdict.require(inside, f"{event.client} got {event.kind} of {event.chat_id}", event)


def _was_lost(history: History, chat_id: str, sequence: int, at: float) -> bool:
    """Whether the engine lost, after this moment, the chat as it was at a sequence."""
    return any(
        loss.chat_id == chat_id and loss.kept < sequence and loss.at >= at
        for loss in history.of(CommitsLost)
    )


def _is_of(history: History, client: str, chat_id: str) -> bool:
    """Whether the chat, if known, belongs to the client's tenant."""
    chat = history.chats.get(chat_id)
    return chat is None or chat.tenant == history.clients[client].tenant


def _inside(
    history: History, client: str, chat_id: str, sequence: int, *, moment_before: bool = False
) -> bool:
    """Whether a client's user was a member when the chat's head was ``sequence``.

    ``moment_before``: or just before it, since a removed member gets that event.
    """
    who, chat = history.clients[client], history.chats.get(chat_id)
    if not _is_of(history, client, chat_id):
        return False
    if chat is None or not chat.memberships:  # nothing is known of it
        return True
    here = _at(chat, who.user_id, sequence).member
    return here or (moment_before and _at(chat, who.user_id, sequence - 1).member)


def _muted(history: History, client: str, chat_id: str, sequence: int) -> bool:
    """Whether a client's user was muted when the chat's head was ``sequence``."""
    chat = history.chats.get(chat_id)
    return chat is not None and _at(chat, history.clients[client].user_id, sequence).muted


def _at(chat: ChatAtEnd, user_id: str, sequence: int) -> MembershipSpan:
    found = MembershipSpan(0, user_id, False)
    for change in chat.memberships:
        if change.sequence <= sequence and change.user_id == user_id:
            found = change
    return found
