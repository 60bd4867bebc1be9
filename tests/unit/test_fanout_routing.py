"""Routing: what a gateway does with a batch, exactly, at each place of the log."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from scripted_durability import BELA, CHAT

from holdfast.fanout.routing import DeliveryStep, Gaps, route
from holdfast.message import AllEpochsRaised, ChatCreated, EpochRaised, LogEntry, LogEvent, Message
from holdfast.store.commands import MembershipEvent


def entry(
    position: int, sequence: int, chat_id: str = CHAT, kind: str = "text", epoch: int = 1
) -> LogEntry:
    content = "hello"
    if kind == "event":
        content = msgspec.json.encode(MembershipEvent("member_removed", BELA.user_id)).decode()
    message = Message(
        f"msg_{position}", chat_id, sequence, kind, "anna", None, content, "text/plain", "now"
    )  # type: ignore[arg-type]
    return LogEntry(0, position, "default", chat_id, epoch, message)


def log_event(position: int, what: LogEvent, chat_id: str = CHAT, epoch: int = 1) -> LogEntry:
    return LogEntry(0, position, "default", chat_id, epoch, what)


def shown(steps: list[DeliveryStep]) -> list[tuple[str, list[int], int | None]]:
    """Each step: its chat, its sequences, and the offset of the entry that ends it."""
    return [
        (
            step.chat_id,
            [message.sequence for message in step.messages],
            None if step.ends_with is None else step.ends_with.offset,
        )
        for step in steps
    ]


def test_a_chat_has_one_run_however_the_log_mixes_it_with_others() -> None:
    batch = [entry(1, 1, "a"), entry(2, 8, "b"), entry(3, 2, "a"), entry(4, 1, "elsewhere")]
    assert shown(route(batch, {"a", "b"})) == [("a", [1, 2], None), ("b", [8], None)]


def test_a_run_ends_behind_an_event_so_that_the_roster_is_exact_for_what_follows() -> None:
    batch = [entry(1, 1), entry(2, 2, kind="event"), entry(3, 3), entry(4, 4, kind="event")]
    assert shown(route(batch, {CHAT})) == [(CHAT, [1, 2], 2), (CHAT, [3, 4], 4)]


def test_an_event_of_a_chat_without_sessions_is_applied_and_not_delivered() -> None:
    batch = [entry(1, 1), entry(2, 2, kind="event"), log_event(3, ChatCreated(("bela",)), "new")]
    assert shown(route(batch, set())) == [(CHAT, [], 2), ("new", [], 3)]


def test_a_run_has_one_epoch() -> None:
    batch = [
        entry(1, 1),
        log_event(2, EpochRaised(1), epoch=2),
        entry(3, 2, epoch=2),
        entry(4, 3, epoch=3),
    ]
    steps = route(batch, {CHAT})
    assert shown(steps) == [(CHAT, [1], None), (CHAT, [], 2), (CHAT, [2], None), (CHAT, [3], None)]
    assert [step.epoch for step in steps] == [1, 2, 2, 3]


def test_a_run_is_consecutive_whatever_the_log_repeats_or_lacks() -> None:
    batch = [entry(1, 1), entry(2, 2), entry(3, 2), entry(4, 3), entry(5, 7)]
    assert [sequences for _, sequences, _ in shown(route(batch, {CHAT}))] == [[1, 2], [2, 3], [7]]


def test_the_raise_of_all_epochs_is_of_no_chat() -> None:
    assert route([log_event(1, AllEpochsRaised(7), chat_id="")], {CHAT}) == []


kinds = st.sampled_from(["text", "event", "raised", "created"])


@given(
    st.lists(st.tuples(st.sampled_from("abc"), kinds), max_size=40), st.sets(st.sampled_from("abc"))
)
def test_every_message_of_a_chat_here_is_in_one_step_and_every_event_ends_one(
    what: list[tuple[str, str]], here: set[str]
) -> None:
    heads, epochs = dict.fromkeys("abc", 0), dict.fromkeys("abc", 1)
    batch = []
    for position, (chat_id, kind) in enumerate(what, 1):
        if kind == "created":
            batch.append(log_event(position, ChatCreated(()), chat_id, epochs[chat_id]))
        elif kind == "raised":
            epochs[chat_id] += 1
            batch.append(log_event(position, EpochRaised(heads[chat_id]), chat_id, epochs[chat_id]))
        else:
            heads[chat_id] += 1
            batch.append(entry(position, heads[chat_id], chat_id, kind, epochs[chat_id]))
    steps = route(batch, here)
    for chat_id in "abc":
        mine = [step for step in steps if step.chat_id == chat_id]
        walked: list[object] = []
        for step in mine:
            walked += step.messages
            if step.ends_with is not None and step.ends_with.what not in step.messages:
                walked.append(step.ends_with.what)
            assert all(m.kind == "text" for m in step.messages[:-1])
        expected = [
            e.what
            for e in batch
            if e.chat_id == chat_id
            and (chat_id in here or not isinstance(e.what, Message) or e.what.kind == "event")
        ]
        assert walked == expected


def test_missing_sequences_are_counted_once_and_repeats_are_not_gaps() -> None:
    gaps = Gaps()
    assert gaps.missing([entry(1, 5), entry(2, 6), entry(3, 6), entry(4, 9)]) == 2
    assert gaps.missing([entry(5, 10), entry(6, 1, "other")]) == 0
    small = Gaps(max_chats=1)
    assert small.missing([entry(1, 1, "a"), entry(2, 1, "b"), entry(3, 9, "a")]) == 0
