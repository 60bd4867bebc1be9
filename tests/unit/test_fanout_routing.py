"""Routing: who gets what, exactly, at each place of the log."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from scripted_durability import ANNA, BELA, CHAT, CLEO

from holdfast.fanout.routing import Gaps, envelopes, recipients, route, undeliverable
from holdfast.message import LogEntry, Message, User
from holdfast.store.commands import MembershipEvent


def entry(
    position: int, sequence: int, chat_id: str = CHAT, content: str = "hello", kind: str = "text"
) -> LogEntry:
    message = Message(
        f"msg_{position}", chat_id, sequence, kind, "anna", None, content, "text/plain", "now"
    )  # type: ignore[arg-type]
    return LogEntry(0, position, "default", chat_id, 1, message)


def event(
    position: int, sequence: int, name: str, user: User | None, chat_id: str = CHAT
) -> LogEntry:
    content = msgspec.json.encode(MembershipEvent(name, user.user_id if user else None)).decode()
    return entry(position, sequence, chat_id, content, "event")


def heard(entries: list[LogEntry], members: dict[str, frozenset[User]], user: User) -> list[int]:
    """The sequences that reach a gateway which holds only this user."""
    made = envelopes(route(entries, dict(members)).runs, {"gateway": frozenset({user})})
    return [m.sequence for e in made.values() for s in e.runs for m in s.messages]


def test_one_envelope_per_gateway_with_only_what_concerns_it() -> None:
    members = {"a": frozenset({ANNA, BELA}), "b": frozenset({BELA, CLEO})}
    routed = route([entry(1, 1, "a"), entry(2, 1, "b"), entry(3, 2, "a")], members)
    made = envelopes(routed.runs, {"east": {ANNA}, "west": {BELA, CLEO}, "north": set()})
    assert {
        g: [(s.messages[0].chat_id, len(s.messages)) for s in e.runs] for g, e in made.items()
    } == {
        "east": [("a", 2)],
        "west": [("a", 2), ("b", 1)],
    }
    assert made["west"].runs[0].users == {BELA}
    assert recipients(routed.runs) == {ANNA, BELA, CLEO}


def test_a_removed_member_gets_the_event_of_its_removal_and_nothing_after() -> None:
    members = {CHAT: frozenset({ANNA, BELA})}
    entries = [entry(1, 1), event(2, 2, "member_removed", BELA), entry(3, 3)]
    assert heard(entries, members, BELA) == [1, 2]
    assert heard(entries, members, ANNA) == [1, 2, 3]


def test_an_added_member_gets_the_event_and_what_follows() -> None:
    members = {CHAT: frozenset({ANNA})}
    entries = [entry(1, 1), event(2, 2, "member_added", BELA), entry(3, 3)]
    assert heard(entries, members, BELA) == [2, 3]
    assert heard(entries, members, ANNA) == [1, 2, 3]
    (run,) = envelopes(route(entries, members).runs, {"g": {BELA}})["g"].runs
    assert run.users == {BELA}
    assert members == {CHAT: frozenset({ANNA, BELA})}, (
        "the members are moved on to the end of the batch"
    )


def test_a_gateway_that_stays_concerned_gets_one_run() -> None:
    entries = [
        entry(1, 1),
        event(2, 2, "member_added", BELA),
        entry(3, 3),
        event(4, 4, "member_removed", BELA),
    ]
    made = envelopes(route(entries, {CHAT: frozenset({ANNA})}).runs, {"g": {ANNA, BELA}})
    (run,) = made["g"].runs
    assert [m.sequence for m in run.messages] == [1, 2, 3, 4]
    assert run.users == {ANNA}


def test_the_removed_hear_of_it_also_if_the_store_was_ahead_of_the_log() -> None:
    entries = [entry(1, 1), event(2, 2, "member_removed", BELA), entry(3, 3)]
    assert heard(entries, {CHAT: frozenset({ANNA})}, BELA) == [2]


def test_renaming_and_roles_change_nobodys_membership() -> None:
    members = {CHAT: frozenset({ANNA, BELA})}
    entries = [event(1, 1, "chat_renamed", None), event(2, 2, "role_changed", BELA), entry(3, 3)]
    routed = route(entries, members)
    assert len(routed.runs) == 1 and members == {CHAT: frozenset({ANNA, BELA})}


def test_a_run_is_consecutive_whatever_the_log_repeats_or_lacks() -> None:
    entries = [entry(1, 1), entry(2, 2), entry(3, 2), entry(4, 3), entry(5, 7)]
    made = envelopes(route(entries, {CHAT: frozenset({ANNA})}).runs, {"g": {ANNA}})
    assert [[m.sequence for m in s.messages] for s in made["g"].runs] == [[1, 2], [2, 3], [7]]


def test_chats_without_known_members_are_left_out_and_counted() -> None:
    routed = route([entry(1, 1, "a"), entry(2, 1, "b"), entry(3, 2, "b")], {"a": frozenset({ANNA})})
    assert (len(routed.runs), routed.unknown) == (1, 2)


def test_unreadable_event_is_delivered_and_its_members_are_loaded_again() -> None:
    members = {CHAT: frozenset({ANNA})}
    broken = entry(1, 1, content="{", kind="event")
    routed = route([broken, entry(2, 2)], members)
    assert routed.unreadable == [broken]
    assert [m.sequence for run in routed.runs for m in run.messages] == [1, 2]
    assert members == {}


def test_messages_that_nobody_online_gets_are_counted() -> None:
    routed = route(
        [entry(1, 1, "a"), entry(2, 1, "b")], {"a": frozenset({ANNA}), "b": frozenset({BELA})}
    )
    assert undeliverable(routed.runs, {"g": {ANNA}}) == 1
    assert undeliverable(routed.runs, {}) == 2


USERS = (ANNA, BELA, CLEO)
step = st.one_of(
    st.just("text"),
    st.tuples(st.sampled_from(["member_added", "member_removed"]), st.sampled_from(USERS)),
)
history = st.lists(st.tuples(st.sampled_from(["a", "b"]), step), max_size=40)


@given(
    history,
    st.lists(st.integers(0, 40), max_size=5),
    st.lists(st.sets(st.sampled_from(USERS)), max_size=3),
)
def test_every_gateway_gets_exactly_what_its_users_are_owed(
    steps: list, cuts: list[int], gateways: list[set[User]]
) -> None:
    """Against a model with one member set per chat that walks the log by message."""
    members = {"a": frozenset({ANNA}), "b": frozenset({ANNA, BELA})}
    sequences = {"a": 0, "b": 0}
    now = {chat: set(users) for chat, users in members.items()}
    online = {f"g{n}": frozenset(users) for n, users in enumerate(gateways)}
    entries, owed = [], {gateway: [] for gateway in online}
    for position, (chat, what) in enumerate(steps, 1):
        sequences[chat] += 1
        audience = set(now[chat])
        if what == "text":
            entries.append(entry(position, sequences[chat], chat))
        else:
            name, user = what
            entries.append(event(position, sequences[chat], name, user, chat))
            audience.add(user)
            (now[chat].add if name == "member_added" else now[chat].discard)(user)
        for gateway, held in online.items():
            if audience & held:
                owed[gateway].append((chat, sequences[chat]))
    got: dict[str, list] = {gateway: [] for gateway in online}
    edges = sorted({0, len(entries), *(c for c in cuts if c < len(entries))})
    for start, end in pairwise(edges):
        routed = route(entries[start:end], members)
        assert routed.unknown == 0 and not routed.unreadable
        asked = recipients(routed.runs)
        here = {gateway: asked & held for gateway, held in online.items() if asked & held}
        for gateway, envelope in envelopes(routed.runs, here).items():
            for run in envelope.runs:
                numbers = [m.sequence for m in run.messages]
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
                assert run.users and run.users <= online[gateway]
                got[gateway] += [(m.chat_id, m.sequence) for m in run.messages]
    for gateway in online:
        for chat in "ab":
            assert [x for x in got[gateway] if x[0] == chat] == [
                x for x in owed[gateway] if x[0] == chat
            ]
    assert {chat: set(users) for chat, users in members.items()} == now


@given(st.lists(step, max_size=20), st.data())
def test_members_loaded_ahead_of_the_log_end_up_right(steps: list, data: st.DataObject) -> None:
    """Load at any later moment, read from any earlier offset: the end is the same."""
    states = [frozenset({ANNA})]
    for what in steps:
        state = states[-1]
        if what != "text":
            state = state | {what[1]} if what[0] == "member_added" else state - {what[1]}
        states.append(state)
    start = data.draw(st.integers(0, len(steps)))
    loaded = states[data.draw(st.integers(start, len(steps)))]
    members = {CHAT: loaded}
    entries = [
        entry(n, n) if what == "text" else event(n, n, what[0], what[1])
        for n, what in enumerate(steps, 1)
    ]
    route(entries[start:], members)
    assert members[CHAT] == states[-1]


def test_missing_sequences_are_counted_once_and_repeats_are_not_gaps() -> None:
    gaps = Gaps()
    assert gaps.missing([entry(1, 5), entry(2, 6), entry(3, 6), entry(4, 9)]) == 2
    assert gaps.missing([entry(5, 10), entry(6, 1, "other")]) == 0
    small = Gaps(max_chats=1)
    assert small.missing([entry(1, 1, "a"), entry(2, 1, "b"), entry(3, 9, "a")]) == 0
