"""Each checker is green on a kept promise and red, alone, on a broken one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.message import Cursor
from holdfast.verify.checkers import CHECKERS, check, red
from holdfast.verify.history import (
    AnyEvent,
    ChatAtEnd,
    ClientSeen,
    Closed,
    ClosingSeen,
    CommitSeen,
    CommitsLost,
    CursorMoved,
    EffectSeen,
    Enqueued,
    EphemeralSeen,
    Fail,
    FaultWindow,
    Held,
    History,
    HistoryEvent,
    Invoke,
    KeySeen,
    Level,
    LogAtEnd,
    Logged,
    MembershipSpan,
    Ok,
    Opened,
    PageSeen,
    Pushed,
    ReplyMade,
    ReplySeen,
    Sighting,
    Tried,
    Unknown,
    WarningSeen,
)
from proof.invariants import INVARIANTS


def message(n: int) -> Sighting:
    return Sighting(n, f"msg_{n}", "ann", f"key-{n}", f"digest-{n}")


def ack(n: int) -> Sighting:
    return Sighting(n, f"msg_{n}")


def page(
    after: int, *numbers: int, head: int, through: int | None = None, **changes: Any
) -> PageSeen:
    last = numbers[-1] if numbers else after
    seen = PageSeen(
        "c",
        Cursor(1, after),
        1,
        [message(n) for n in numbers],
        through or last,
        last < head,
        head,
        False,
    )
    return replace(seen, **changes)


def good() -> dict[str, AnyEvent]:
    """Ann sends three; Bob is pushed one, is slow and closed; all end complete."""
    send = {
        n: Invoke(
            at=n, op=n, client="A", verb="send", chat_id="c", key=f"key-{n}", digest=f"digest-{n}"
        )
        for n in (1, 2, 3)
    }
    return {
        "ann": ClientSeen(client="A", tenant="t", user_id="ann", device_id="a"),
        "bob": ClientSeen(client="B", tenant="t", user_id="bob", device_id="b"),
        "a opens": Opened(at=0, client="A", connection="a1"),
        "send 1": send[1],
        "commit 1": CommitSeen(at=1.1, chat_id="c", sequence=1),
        "ack 1": Ok(at=1.2, op=1, acked=ack(1)),
        "b opens": Opened(at=1.5, client="B", connection="b1"),
        "resume": Invoke(at=1.6, op=10, client="B", verb="resume", cursors={"c": Cursor(1, 0)}),
        "resumed": Ok(at=1.7, op=10, pages=[page(0, 1, head=1)]),
        "send 2": send[2],
        "commit 2": CommitSeen(at=2.1, chat_id="c", sequence=2),
        "ack 2": Ok(at=2.2, op=2, acked=ack(2)),
        "push 2": Pushed(at=2.3, client="B", connection="b1", chat_id="c", message=message(2)),
        "typing": EphemeralSeen(at=2.3, client="B", chat_id="c", kind="typing"),
        "tried": Tried(at=2.3, gateway="g", envelope=1, attempt=3),
        "moved 1": CursorMoved(at=2.35, client="B", chat_id="c", epoch=1, sequence=1),
        "moved 2": CursorMoved(at=2.4, client="B", chat_id="c", epoch=1, sequence=2),
        "send 3": send[3],
        "commit 3": CommitSeen(at=3.1, chat_id="c", sequence=3),
        "ack 3": Ok(at=3.2, op=3, acked=ack(3)),
        "sync": Invoke(
            at=3.5, op=11, client="B", verb="sync", chat_id="c", cursors={"c": Cursor(1, 2)}
        ),
        "synced": Ok(at=3.6, op=11, pages=[page(2, 3, head=3)]),
        "level": Level(at=4, where="b1 messages", value=1000, bound=1000),
        "stall": FaultWindow(at=3.9, until=9.5, plane="connection", name="stall", clients=["B"]),
        "warned": WarningSeen(at=4, connection="b1", grace_seconds=5),
        "closing": ClosingSeen(at=9, connection="b1", reason="slow_consumer"),
        "closed": Closed(at=9, client="B", connection="b1", by="server"),
        "log 1": Logged(position=1, chat_id="c", sequence=1),
        "log 2": Logged(position=2, chat_id="c", sequence=2),
        "log 3": Logged(position=3, chat_id="c", sequence=3),
        "log": LogAtEnd(position=3),
        "chat": ChatAtEnd(
            chat_id="c",
            tenant="t",
            epoch=1,
            counter=3,
            messages=[message(1), message(2), message(3)],
            keys=[KeySeen("ann", f"key-{n}", n, f"msg_{n}") for n in (1, 2, 3)],
            memberships=[MembershipSpan(0, "ann", True), MembershipSpan(0, "bob", True)],
        ),
        "held": Held(
            at=10,
            client="B",
            chat_id="c",
            epoch=1,
            cursor=3,
            messages=[(1, "msg_1"), (2, "msg_2"), (3, "msg_3")],
        ),
        "job": Enqueued("ep_1/c", 1),
        "job effect": EffectSeen("ep_1/c", 1, 1),
        "reply made": ReplyMade("r", 7, ["a", "b"], "done"),
        "reply seen": ReplySeen("r", "bob", [(7, 0, "a"), (7, 1, "b")], ["done"]),
    }


def broken(drop: tuple[str, ...] = (), **changes: HistoryEvent | dict[str, Any]) -> History:
    """The good history with some events gone, changed in some fields, or replaced; keys
    use _ for a space.
    """
    events = good()
    for name in drop:
        del events[name]
    for name, change in changes.items():
        key = name.replace("_", " ")
        changed = replace(events[key], **change) if isinstance(change, dict) else change
        events[key] = changed  # type: ignore[assignment]
    return History(events.values())


def test_a_kept_promise_is_green_and_every_checker_looked_at_something() -> None:
    verdicts = check(broken())
    assert red(verdicts) == set(), "\n".join(map(str, verdicts))
    assert all(verdict.examined > 0 for verdict in verdicts)


def test_user_removed_recently_may_still_get_typing_events() -> None:
    """Longer while something is broken that keeps the gateway from learning it."""
    removed = {
        "memberships": [
            MembershipSpan(0, "ann", True),
            MembershipSpan(0, "bob", True),
            MembershipSpan(3, "bob", False),
        ]
    }
    unasked = ("sync", "synced")
    assert red(check(broken(unasked, typing={"at": 30.0}, chat=removed))) == set()
    down = FaultWindow(at=50, until=61, plane="history", name="down")
    assert red(check(broken(unasked, typing={"at": 60.0}, chat=removed, down=down))) == set()
    assert red(check(broken(unasked, typing={"at": 60.0}, chat=removed))) == {12}


LOST = [message(1), message(3)]
REPLACED = [message(1), replace(message(2), message_id="msg_other"), message(3)]

BROKEN: dict[str, tuple[set[int], History]] = {
    "an acked message is gone": (
        {1},
        broken(chat={"messages": LOST}, held={"messages": [(1, "msg_1"), (3, "msg_3")]}),
    ),
    "an acked message has another content": (
        {1},
        broken(
            chat={"messages": [message(1), message(2), replace(message(3), digest="x")]},
            synced={"pages": [page(2, 3, head=3, messages=[replace(message(3), digest="x")])]},
        ),
    ),
    "another sender's message was acked": (
        {1},
        broken(
            push_2={"message": replace(message(2), sender_id="bob")},
            chat={"messages": [message(1), replace(message(2), sender_id="bob"), message(3)]},
        ),
    ),
    "one send is stored twice": (
        {2},
        broken(
            chat={
                "messages": [message(1), message(2), message(3), replace(message(4), key="key-1")],
                "counter": 4,
            },
            log_3=Logged(position=3, chat_id="c", sequence=3),
            log_4=Logged(position=4, chat_id="c", sequence=4),
            held={"messages": [(1, "msg_1"), (2, "msg_2"), (3, "msg_3"), (4, "msg_4")]},
        ),
    ),
    "key and message disagree": ({2}, broken(chat={"keys": [KeySeen("ann", "key-1", 2, "msg_2")]})),
    "a number was given twice": (
        {1, 3},
        broken(
            chat={"messages": REPLACED, "keys": None},
            held={"messages": [(1, "msg_1"), (2, "msg_other"), (3, "msg_3")]},
        ),
    ),
    "a message changed after it was served": (
        {3},
        broken(push_2={"message": replace(message(2), digest="x")}),
    ),
    "the counter is behind": ({3}, broken(chat={"counter": 2})),
    "the counter is gone": ({3}, broken(chat={"counter": None})),
    "a page left out what appeared later": (
        {4},
        broken(resumed={"pages": [page(0, 1, head=2, through=2)]}),
    ),
    "a push jumped over a message": (
        {4},
        broken(
            push_2={"message": message(3)},
            chat={"messages": [message(1), message(2), message(3)]},
        ),
    ),
    "a message was pushed twice": (
        {4},
        broken(
            push_again=Pushed(at=2.4, client="B", connection="b1", chat_id="c", message=message(2))
        ),
    ),
    "a push came before any page": ({4}, broken(drop=("resume", "resumed"))),
    "a read saw less than was acked": (
        {5},
        broken(synced={"pages": [page(2, head=2)]}),
    ),
    "a head went back": (
        {5},
        broken(
            drop=("send 1", "ack 1", "send 2", "ack 2", "send 3", "ack 3"),
            sync={"cursors": {"c": Cursor(1, 0)}},
            resumed={"pages": [page(0, 1, 2, 3, head=3)]},
            synced={"pages": [page(0, 1, 2, head=2)]},
        ),
    ),
    "another epoch without a reset": (
        {5},
        broken(synced={"pages": [page(2, 3, head=3, epoch=2)]}, chat={"epoch": 2}),
    ),
    "a reset within an epoch": (
        {5},
        broken(synced={"pages": [page(2, 1, 2, 3, head=3, reset=True)]}),
    ),
    "a cursor was clamped": ({5}, broken(synced={"pages": [page(5, 3, head=3, through=3)]})),
    "a client's cursor went back": ({5}, broken(moved_2={"sequence": 0})),
    "a buffer overflowed": ({6}, broken(level={"value": 1001})),
    "a delivery was tried four times": ({6}, broken(tried={"attempt": 4})),
    "a connection was closed without a word": ({7}, broken(drop=("closing",))),
    "a grace was cut short": ({7}, broken(closing={"at": 8.9})),
    "a slow consumer was never warned": ({7}, broken(drop=("warned",))),
    "a slow consumer was warned again a moment before": (
        {7},
        broken(warned_again=WarningSeen(at=7, connection="b1", grace_seconds=5)),
    ),
    "a request was never answered": ({8}, broken(drop=("ack 3",))),
    "a request was answered late": (
        {8},
        broken(ack_1={"at": 7.0}, sync={"at": 7.1}, synced={"at": 7.2}),
    ),
    "a request timed out": (
        {8},
        broken(
            ack_3=Unknown(at=9.0, op=3, reason="timeout"),
            fault=FaultWindow(at=2, until=9, plane="durability", name="hang"),
        ),
    ),
    "a broken connection was felt late": (
        {8},
        broken(
            ack_3=Unknown(at=30, op=3, reason="disconnected"),
            fault=FaultWindow(at=3, until=30, plane="process", name="kill -9"),
        ),
    ),
    "the server closed without answering first": (
        {8},
        broken(
            drop=("stall",),
            sync={"at": 4},
            synced=Unknown(at=9, op=11, reason="disconnected"),
            closing={"reason": "server_shutdown"},
        ),
    ),
    "a client gave up although it could be reached": (
        {8},
        broken(ack_3=Unknown(at=5.0, op=3, reason="timeout")),
    ),
    "a request was late before its client was unreachable": (
        {8},
        broken(
            drop=("sync", "synced"),
            ack_3=Unknown(at=12, op=3, reason="timeout"),
            fault=FaultWindow(at=9, until=12, plane="connection", name="hole", clients=["A"]),
        ),
    ),
    "a stored message was never published": ({9}, broken(drop=("log 2",))),
    "nothing was published at all": ({9}, broken(drop=("log 1", "log 2", "log 3"))),
    "a client at rest lacks a message": (
        {9},
        broken(held={"messages": [(1, "msg_1"), (3, "msg_3")]}),
    ),
    "a client at rest has a message twice": (
        {9},
        broken(held={"messages": [(1, "msg_1"), (2, "msg_2"), (2, "msg_2"), (3, "msg_3")]}),
    ),
    "a client at rest has another order": (
        {9},
        broken(held={"messages": [(2, "msg_2"), (1, "msg_1"), (3, "msg_3")]}),
    ),
    "a send failed without a fault": (
        {10},
        broken(ack_3=Fail(at=3.2, op=3, code="SERVICE_UNAVAILABLE")),
    ),
    "a fanout failure stopped sends": (
        {10},
        broken(
            ack_3=Fail(at=3.2, op=3, code="SERVICE_UNAVAILABLE"),
            fault=FaultWindow(at=3, until=4, plane="fanout", name="registry down"),
        ),
    ),
    "one client's failure reached another": (
        {10},
        broken(
            closed={"client": "A", "connection": "a1", "by": "network"},
            fault=FaultWindow(at=3, until=4, plane="connection", name="cut", clients=["B"]),
        ),
    ),
    "a durability failure closed a connection": (
        {10},
        broken(
            closing={"reason": "upstream_failure"},
            fault=FaultWindow(at=3, until=9, plane="durability", name="down"),
        ),
    ),
    "a send failed long after its fault": (
        {10},
        broken(
            ack_3=Fail(at=3.2, op=3, code="SERVICE_UNAVAILABLE"),
            fault=FaultWindow(at=1, until=2.9, plane="durability", name="down"),
        ),
    ),
    "a full queue without a slow store": (
        {10},
        broken(ack_3=Fail(at=3.2, op=3, code="SERVER_BUSY")),
    ),
    "somebody who reads was called slow": (
        {10},
        broken(stall={"clients": ["A"]}),
    ),
    "somebody who answers was called idle": (
        {10},
        broken(stall={"clients": ["A"]}, closing={"reason": "idle_timeout"}),
    ),
    "a client heard nothing and hung up": (
        {10},
        broken(drop=("closing", "stall"), closed={"by": "client", "why": "the server is silent"}),
    ),
    "another tenant was served": ({12}, broken(bob={"tenant": "other"})),
    "a non-member was served": (
        {12},
        broken(chat={"memberships": [MembershipSpan(0, "ann", True)]}),
    ),
    "a removed member was pushed to": (
        {12},
        broken(
            drop=("sync", "synced"),
            chat={
                "memberships": [
                    MembershipSpan(0, "ann", True),
                    MembershipSpan(0, "bob", True),
                    MembershipSpan(1, "bob", False),
                ]
            },
            resume={"cursors": {"c": Cursor(1, 1)}},
            resumed={"pages": []},
        ),
    ),
    "another tenant heard who types": (
        {12},
        broken(
            eve=ClientSeen(client="E", tenant="other", user_id="eve", device_id="e"),
            typing={"client": "E"},
        ),
    ),
    "somebody who never was a member heard who types": (
        {12},
        broken(
            eve=ClientSeen(client="E", tenant="t", user_id="eve", device_id="e"),
            typing={"client": "E"},
        ),
    ),
    "a removed member wrote": (
        {12},
        broken(
            chat={
                "memberships": [
                    MembershipSpan(0, "ann", True),
                    MembershipSpan(0, "bob", True),
                    MembershipSpan(2, "ann", False),
                ]
            }
        ),
    ),
    "a job's effect is lost": ({11}, broken(drop=("job effect",))),
    "an entry of a reply is lost": ({15}, broken(reply_seen={"entries": [(7, 1, "b")]})),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_turns_its_own_checkers_red_and_no_other(name: str) -> None:
    expected, history = BROKEN[name]
    verdicts = check(history)
    assert red(verdicts) == expected, "\n".join(map(str, verdicts))


def test_every_checker_has_been_seen_red() -> None:
    assert set().union(*(expected for expected, _ in BROKEN.values())) == set(CHECKERS)


def lost_by_the_engine(at: float = 11, lost: str = "msg_3", **changes: Any) -> History:
    """A failover lost message 3, which was acked, pushed and read, and the member who
    had been added before it. The next one has its number, in another epoch.
    """
    other = Sighting(3, "msg_x", "ann", "key-x", "digest-x")
    sent = Invoke(
        at=13, op=20, client="A", verb="send", chat_id="c", key="key-x", digest="digest-x"
    )
    cursor = {"c": Cursor(1, 3)}
    reset = replace(page(0, 1, 2, head=2, epoch=9, reset=True), after=Cursor(1, 3))
    extra: dict[str, HistoryEvent | dict[str, Any]] = {
        "cid": ClientSeen(client="C", tenant="t", user_id="cid", device_id="c"),
        "c_opens": Opened(at=3.3, client="C", connection="c1"),
        "c_resume": Invoke(at=3.3, op=21, client="C", verb="resume", cursors={"c": Cursor(1, 2)}),
        "c_resumed": Ok(at=3.4, op=21, pages=[page(2, 3, head=3)]),
        "c_typing": EphemeralSeen(at=3.5, client="C", chat_id="c", kind="typing"),
        "push_3": Pushed(at=3.3, client="B", connection="b1", chat_id="c", message=message(3)),
        "lost": CommitsLost(at=at, chat_id="c", kept=2, message_ids=[lost]),
        "again": Opened(at=12, client="B", connection="b2"),
        "new_resume": Invoke(at=12, op=22, client="B", verb="resume", cursors=cursor),
        "new_resumed": Ok(at=12.1, op=22, pages=[reset]),
        "late_push": Pushed(  # it waited in another lane than the page
            at=12.2, client="B", connection="b2", chat_id="c", message=message(3)
        ),
        "new_send": sent,
        "new_commit": CommitSeen(at=13.1, chat_id="c", sequence=3),
        "new_ack": Ok(at=13.2, op=20, acked=Sighting(3, "msg_x")),
        "new_push": Pushed(at=13.3, client="B", connection="b2", chat_id="c", message=other),
        "chat": {"messages": [message(1), message(2), other], "epoch": 9, "keys": None},
        "held": {"at": 14, "epoch": 9, "messages": [(1, "msg_1"), (2, "msg_2"), (3, "msg_x")]},
    }
    return broken(**(extra | changes))


EXCUSED: dict[str, History] = {
    "redaction is a recorded act": broken(
        chat={"messages": [message(1), message(2), replace(message(3), digest="")], "redacted": [3]}
    ),
    "retention is a recorded act": broken(
        chat={"messages": [message(2), message(3)], "first_sequence": 2, "keys": None},
        held={"messages": [(2, "msg_2"), (3, "msg_3")]},
    ),
    "no server keeps what its engine lost": lost_by_the_engine(),
    "a durability failure explains a failed send": broken(
        ack_3=Fail(at=3.2, op=3, code="SERVICE_UNAVAILABLE"),
        fault=FaultWindow(at=3, until=4, plane="durability", name="down"),
    ),
    "an open breaker explains a failed send for its rest": broken(
        ack_3=Fail(at=3.2, op=3, code="SERVICE_UNAVAILABLE"),
        **{
            f"fault_{n}": FaultWindow(at=0, until=n / 2, plane="durability", name="down")
            for n in range(5)
        },
    ),
    "what hangs has failed long before it ends": broken(
        ack_3=Fail(at=3.2, op=3, code="SERVICE_UNAVAILABLE"),
        hangs=FaultWindow(at=-25, until=2.9, plane="durability", name="hang"),
        **{
            f"fault_{n}": FaultWindow(at=-28, until=-28, plane="durability", name="down")
            for n in range(4)
        },
    ),
    "a slow store explains a full queue": broken(
        ack_3=Fail(at=3.2, op=3, code="SERVER_BUSY"),
        fault=FaultWindow(at=3, until=4, plane="durability", name="slow"),
    ),
    "a client may leave": broken(drop=("closing", "stall"), closed={"by": "client"}),
    "a killed process closes without a word": broken(
        drop=("closing",),
        closed={"by": "network"},
        fault=FaultWindow(at=9, until=10, plane="process", name="kill -9"),
    ),
    "a request of a broken connection is unknown": broken(
        ack_3=Unknown(at=3.1, op=3, reason="disconnected"),
        fault=FaultWindow(at=3, until=30, plane="process", name="kill -9"),
    ),
    "a client notices later that its connection broke in time": broken(
        ack_3=Unknown(at=9, op=3, reason="disconnected"),
        fault=FaultWindow(at=8.4, until=30, plane="process", name="kill -9"),
    ),
    "while its network is a hole a client's clock stands": broken(
        ack_3=Unknown(at=18, op=3, reason="timeout"),
        fault=FaultWindow(at=3, until=17, plane="connection", name="hole", clients=["A"]),
    ),
}


@pytest.mark.parametrize(
    ("change", "reds"),
    [
        ({"lost": "another"}, {1, 3, 4}),
        ({"at": 3.2}, {12}),
        ({"held": {"messages": [(1, "msg_1"), (2, "msg_2"), (3, "msg_3")]}}, {9}),
    ],
)
def test_loss_excuses_what_was_lost_and_nothing_else(change: Any, reds: set[int]) -> None:
    assert red(check(lost_by_the_engine(**change))) == reds


def test_commits_go_back_only_where_the_engine_lost_some() -> None:
    rises = INVARIANTS["allocation_monotonicity"]
    assert rises(lost_by_the_engine()).ok
    assert not rises(broken(commit_3={"sequence": 1})).ok


@pytest.mark.parametrize("name", EXCUSED)
def test_allowed_history_stays_green(name: str) -> None:
    verdicts = check(EXCUSED[name])
    assert red(verdicts) == set(), "\n".join(map(str, verdicts))


INVARIANT_BREAKERS: dict[str, History] = {
    "no_silent_message_loss": broken(drop=("ack 1",)),
    "bounded_buffer": broken(level={"value": 1001}),
    "backpressure_signaled": broken(closing={"at": 8.9}),
    "failfast_persistence": broken(commit_1={"at": 1.3}),
    "graceful_fanout": broken(tried={"attempt": 4}),
    "reconnect_heals": broken(held={"messages": [(1, "msg_1")]}),
    "isolation_holds": broken(ack_3=Fail(at=3.2, op=3, code="SERVICE_UNAVAILABLE")),
    "counter_must_exist": broken(chat={"counter": None}),
    "sequence_uniqueness": broken(
        chat={"messages": [message(1), replace(message(1), message_id="msg_x")]}
    ),
    "allocation_monotonicity": broken(commit_3={"sequence": 1}),
    "counter_is_last_allocated": broken(chat={"counter": 4}),
    "sequence_monotonicity": broken(chat={"counter": 2}),
    "counter_lower_bound": broken(chat={"counter": 2}),
    "idempotency_sequence_consistency": broken(chat={"keys": []}),
    "ack_implies_persistence": broken(chat={"messages": LOST}),
    "no_zero_sequence": broken(chat={"messages": [message(0)]}),
    "gap_is_allocation_without_persistence": broken(chat={"messages": LOST}),
    "add_operation_atomicity": broken(ack_2={"acked": replace(ack(2), sequence=1)}),
}


@pytest.mark.parametrize("name", INVARIANTS)
def test_named_invariant_holds_on_a_good_history_and_fails_on_its_broken_one(
    name: str,
) -> None:
    kept, violated = INVARIANTS[name](broken()), INVARIANTS[name](INVARIANT_BREAKERS[name])
    assert kept.ok and kept.examined > 0, str(kept)
    assert not violated.ok


def test_there_are_eighteen_named_invariants() -> None:
    assert len(INVARIANTS) == 18
