"""The queue of sends: bounds, ages, groups, order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_durability import ANNA, body

from holdfast.errors import HoldfastError, OutcomeUnknown, ServerBusy, Unavailable
from holdfast.ingest.send_queue import IntakeSettings, Send, SendQueue


def send(
    key: str, chat: str = "c", source: str = "conn", since: float = 0.0, deadline: float = 5.0
) -> Send:
    return Send(body(key, chat), ANNA, source, since, deadline, lambda _: None)


def keys(sends: list[Send]) -> list[str]:
    return [s.body.client_message_id for s in sends]


def refused(refusals: list[tuple[Send, HoldfastError]]) -> dict[str, type[HoldfastError]]:
    return {s.body.client_message_id: type(error) for s, error in refusals}


def test_the_defaults_are_those_of_the_design() -> None:
    settings = IntakeSettings()
    assert (settings.max_waiting, settings.max_waiting_per_chat, settings.max_age_seconds) == (
        10_000,
        500,
        2,
    )


@pytest.mark.covers("000 contract 2, the queues of ingest")
def test_the_ten_thousand_and_first_send_is_busy() -> None:
    waiting = SendQueue(IntakeSettings())
    for n in range(10_000):
        assert waiting.admit(send(str(n), chat=str(n // 500))) is None
    refusal = waiting.admit(send("late", chat="another"))
    assert refusal is not None and refusal[0] == "total"
    assert isinstance(refusal[1], ServerBusy) and refusal[1].details == {"limit": 10_000}
    assert refusal[1].retry_after_seconds == 1


def test_a_chat_holds_five_hundred_and_others_are_not_touched() -> None:
    waiting = SendQueue(IntakeSettings())
    for n in range(500):
        assert waiting.admit(send(str(n))) is None
    refusal = waiting.admit(send("late"))
    assert refusal is not None and refusal[0] == "chat"
    assert waiting.admit(send("elsewhere", chat="d")) is None


def test_bytes_are_bounded_too() -> None:
    waiting = SendQueue(IntakeSettings(max_waiting_bytes=9))
    assert waiting.admit(send("a")) is None
    refusal = waiting.admit(send("b"))
    assert refusal is not None and refusal[0] == "bytes"


def test_bytes_are_counted_as_utf8() -> None:
    assert Send(body("k", content="ääé"), ANNA, "s", 0, 5, lambda _: None).bytes == 6


def test_a_group_ends_at_its_sends_or_its_bytes_and_is_never_empty_for_size() -> None:
    waiting = SendQueue(IntakeSettings(max_group_sends=2, max_group_bytes=4))
    for key in "abc":
        waiting.admit(send(key))
    assert keys(waiting.take(0)[0]) == ["a"]
    waiting = SendQueue(IntakeSettings(max_group_sends=2))
    for key in "abc":
        waiting.admit(send(key))
    assert keys(waiting.take(0)[0]) == ["a", "b"]


def test_two_seconds_of_waiting_are_too_many() -> None:
    waiting = SendQueue(IntakeSettings())
    waiting.admit(send("old", source="1", since=0))
    waiting.admit(send("new", source="2", since=0.1))
    group, refusals = waiting.take(2.0)
    assert keys(group) == ["new"]
    assert refused(refusals) == {"old": ServerBusy}


def test_past_its_deadline_nothing_is_tried() -> None:
    waiting = SendQueue(IntakeSettings())
    waiting.admit(send("late", deadline=1.0))
    group, refusals = waiting.take(1.0)
    assert group == []
    assert refused(refusals) == {"late": Unavailable}


def test_followers_of_an_expired_send_share_its_answer() -> None:
    waiting = SendQueue(IntakeSettings())
    waiting.admit(send("first", since=0))
    waiting.admit(send("stranger", source="other", since=1.5))
    waiting.admit(send("follower", since=1.5))
    waiting.admit(send("other chat", chat="d", since=1.5))
    group, refusals = waiting.take(2.0)
    assert keys(group) == ["stranger", "other chat"]
    assert refused(refusals) == {"first": ServerBusy, "follower": ServerBusy}


def test_followers_beyond_the_group_share_the_answer_too() -> None:
    waiting = SendQueue(IntakeSettings(max_group_sends=1))
    waiting.admit(send("old", since=0))
    waiting.admit(send("stranger", source="other", since=1.5))
    waiting.admit(send("follower", since=1.5))
    group, refusals = waiting.take(2.0)
    assert keys(group) == ["stranger"]
    assert refused(refusals) == {"old": ServerBusy, "follower": ServerBusy}
    assert len(waiting) == 0


def test_expire_takes_only_the_old_and_their_followers() -> None:
    waiting = SendQueue(IntakeSettings())
    waiting.admit(send("old", since=0))
    waiting.admit(send("stranger", source="other", since=1))
    waiting.admit(send("follower", since=1))
    assert waiting.next_expiry() == 2.0
    assert refused(waiting.expire(1.9)) == {}
    assert refused(waiting.expire(2.0)) == {"old": ServerBusy, "follower": ServerBusy}
    assert keys(waiting.take(2.0)[0]) == ["stranger"]


def test_what_is_due_is_taken_at_the_moment_named_whatever_the_rounding() -> None:
    """2.211 - 0.211 is a little less than 2: a watch that asks again at once would
    never end on a clock that stands.
    """
    waiting = SendQueue(IntakeSettings())
    waiting.admit(send("old", since=0.211))
    due = waiting.next_expiry()
    assert due is not None and due - 0.211 < 2
    assert refused(waiting.expire(due)) == {"old": ServerBusy}


def test_followers_of_a_failed_send_leave_with_its_answer() -> None:
    waiting = SendQueue(IntakeSettings())
    error = OutcomeUnknown("who knows")
    for key, source, chat in [("a", "1", "c"), ("b", "1", "d"), ("c", "2", "c"), ("d", "1", "c")]:
        waiting.admit(send(key, chat, source))
    refusals = waiting.fail_followers({("1", "c"): error})
    assert [(s.body.client_message_id, e) for s, e in refusals] == [("a", error), ("d", error)]
    assert keys(waiting.take(0)[0]) == ["b", "c"]


step = st.one_of(
    st.tuples(st.just("admit"), st.sampled_from("cd"), st.sampled_from("12"), st.floats(0.5, 6)),
    st.tuples(st.just("take"), st.floats(0, 1)),
    st.tuples(st.just("expire"), st.floats(0, 1)),
    st.tuples(st.just("fail"), st.sampled_from("cd"), st.sampled_from("12")),
)


@given(st.lists(step, max_size=60))
def test_every_send_leaves_once_in_order_and_the_counts_agree(steps: list[tuple]) -> None:
    settings = IntakeSettings(max_waiting=12, max_waiting_per_chat=8, max_group_sends=4)
    waiting = SendQueue(settings)
    now, inside, number = 0.0, {}, 0
    for action, *args in steps:
        left: list[Send] = []
        if action == "admit":
            chat, source, lifetime = args
            number += 1
            fresh = send(str(number), chat, source, now, now + lifetime)
            if waiting.admit(fresh) is None:
                inside[str(number)] = fresh
        elif action == "fail":
            left = [s for s, _ in waiting.fail_followers({(args[1], args[0]): OutcomeUnknown()})]
        else:
            now += args[0]
            group, refusals = ([], waiting.expire(now)) if action == "expire" else waiting.take(now)
            assert len(group) <= settings.max_group_sends
            assert all(now < s.deadline and now < s.since + settings.max_age_seconds for s in group)
            numbers = [int(k) for k in keys(group)]
            assert numbers == sorted(numbers)
            failed_at: dict[tuple[str, str], int] = {}
            for gone, _ in refusals:
                failed_at[gone.lane] = min(
                    failed_at.get(gone.lane, number), int(gone.body.client_message_id)
                )
            assert all(
                int(s.body.client_message_id) < failed_at.get(s.lane, number + 1) for s in group
            )
            left = group + [s for s, _ in refusals]
        for gone in left:
            assert inside.pop(gone.body.client_message_id) is gone
        assert len(waiting) == len(inside) <= settings.max_waiting
        assert waiting.bytes == sum(s.bytes for s in inside.values())
        for chat, count in Counter(s.body.chat_id for s in inside.values()).items():
            assert waiting.in_chat(chat) == count <= settings.max_waiting_per_chat
    assert {s.body.client_message_id for s in waiting.clear()} == set(inside)


def test_a_group_stays_within_its_bytes_and_one_send_above_them_goes_alone() -> None:
    waiting = SendQueue(IntakeSettings(max_group_bytes=100))
    for key, size in (("a", 60), ("b", 40), ("c", 1), ("d", 100), ("e", 500), ("f", 1)):
        waiting.admit(Send(body(key, content="x" * size), ANNA, "conn", 0.0, 5.0, lambda _: None))
    groups = [keys(waiting.take(0.0)[0]) for _ in range(5)]
    assert groups == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
