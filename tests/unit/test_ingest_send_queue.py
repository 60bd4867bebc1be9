"""The queue of sends: bounds, ages, groups, order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_durability import ANNA, body

from holdfast.errors import HoldfastError, OutcomeUnknown, ServerBusy, Unavailable
from holdfast.ingest.send_queue import IntakeSettings, Send, SendQueue
from holdfast.store.contract import Grouping


def send(
    key: str,
    chat: str = "c",
    source: str = "conn",
    since: float = 0.0,
    deadline: float = 5.0,
    lane: int = 0,
) -> Send:
    return Send(body(key, chat), ANNA, source, since, deadline, lambda _: None, lane)


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
    refusals = waiting.fail_followers(0, {("1", "c"): error})
    assert [(s.body.client_message_id, e) for s, e in refusals] == [("a", error), ("d", error)]
    assert keys(waiting.take(0)[0]) == ["b", "c"]


def lanes_of(*sends: tuple[str, int]) -> SendQueue:
    waiting = SendQueue(IntakeSettings(max_group_sends=2))
    for key, lane in sends:
        assert waiting.admit(send(key, f"chat {lane}", lane=lane)) is None
    return waiting


def test_lanes_take_turns_and_a_full_one_waits_behind_the_others() -> None:
    waiting = lanes_of(("a1", 1), ("a2", 1), ("a3", 1), ("b1", 2), ("c1", 3), ("a4", 1))
    groups = [keys(waiting.take(0)[0]) for _ in range(5)]
    assert groups == [["a1", "a2"], ["b1"], ["c1"], ["a3", "a4"], []]


def test_busy_lane_is_passed_over_and_keeps_its_turn() -> None:
    waiting = lanes_of(("a", 1), ("b", 2), ("c", 3))
    assert keys(waiting.take(0, {1, 2})[0]) == ["c"]
    assert waiting.take(0, {1, 2}) == ([], []) and len(waiting) == 2
    assert keys(waiting.take(0)[0]) == ["a"]


def test_take_looks_at_one_lane_more_than_are_busy_however_many_wait() -> None:
    class Busy:
        looks = 0

        def __contains__(self, lane: object) -> bool:
            self.looks += 1
            return lane in range(8)

    busy, waiting = Busy(), lanes_of(*((f"k{lane}", lane) for lane in range(5_000)))
    assert keys(waiting.take(0, busy)[0]) == ["k8"]
    assert busy.looks == 9


def test_lane_in_which_all_have_waited_too_long_does_not_end_the_turn() -> None:
    waiting = SendQueue(IntakeSettings())
    waiting.admit(send("old", lane=1, since=0))
    waiting.admit(send("young", "d", lane=2, since=1))
    group, refusals = waiting.take(2.0)
    assert keys(group) == ["young"] and refused(refusals) == {"old": ServerBusy}


def test_expire_finds_the_old_in_every_lane() -> None:
    waiting = SendQueue(IntakeSettings())
    for n, deadline in enumerate((9.0, 1.5, 9.0)):
        waiting.admit(send(f"old {n}", f"chat {n}", since=n / 10, deadline=deadline, lane=n))
    assert waiting.next_expiry() == 1.5
    assert refused(waiting.expire(2.0)) == {"old 1": Unavailable, "old 0": ServerBusy}
    assert waiting.next_expiry() == 2.2
    waiting.take(2.1)
    assert waiting.next_expiry() is None


def test_of_a_groups_bounds_the_smaller_one_wins() -> None:
    grouping = Grouping("chat", sends_max=47, bytes_max=1024, at_once=64, reads_at_once=256)
    small = IntakeSettings(max_group_sends=10, max_group_bytes=2048).within(grouping)
    assert (small.max_group_sends, small.max_group_bytes) == (10, 1024)
    assert IntakeSettings(max_waiting=7).within(grouping) == IntakeSettings(
        max_waiting=7, max_group_sends=47, max_group_bytes=1024
    )


class ListedSends:
    """What ``SendQueue`` promises, over one list with a scan for everything."""

    def __init__(self, settings: IntakeSettings) -> None:
        self.settings = settings
        self.sends: list[Send] = []
        self.turns: list[int] = []

    def admit(self, new: Send) -> bool:
        limits, chat_id = self.settings, new.body.chat_id
        if (
            len(self.sends) >= limits.max_waiting
            or sum(s.body.chat_id == chat_id for s in self.sends) >= limits.max_waiting_per_chat
            or sum(s.bytes for s in self.sends) + new.bytes > limits.max_waiting_bytes
        ):
            return False
        self.sends.append(new)
        if new.lane not in self.turns:
            self.turns.append(new.lane)
        return True

    def verdict(self, each: Send, now: float) -> type[HoldfastError] | None:
        if now >= each.deadline:
            return Unavailable
        return ServerBusy if now >= each.since + self.settings.max_age_seconds else None

    def take(self, now: float, busy: set[int]) -> tuple[list[str], dict[str, type]]:
        gone: dict[str, type] = {}
        for lane in [each for each in self.turns if each not in busy]:
            group: list[Send] = []
            failed: dict[tuple[str, str], type] = {}
            full = False
            for each in [s for s in self.sends if s.lane == lane]:
                error = failed.get(each.order_key)
                full = full or len(group) == self.settings.max_group_sends
                if error is None and not full:
                    error = self.verdict(each, now)
                if error is not None:
                    failed[each.order_key] = gone[each.body.client_message_id] = error
                    self.sends.remove(each)
                    continue
                size = sum(s.bytes for s in [*group, each])
                full = full or (bool(group) and size > self.settings.max_group_bytes)
                if not full:
                    group.append(each)
            self.sends = [s for s in self.sends if s not in group]
            self.turns.remove(lane)
            self.turns += [lane] if any(s.lane == lane for s in self.sends) else []
            if group:
                return keys(group), gone
        return [], gone

    def expire(self, now: float) -> dict[str, type]:
        gone: dict[str, type] = {}
        for lane in list(self.turns):
            failed: dict[tuple[str, str], type] = {}
            front = True
            for each in [s for s in self.sends if s.lane == lane]:
                error = failed.get(each.order_key) or (self.verdict(each, now) if front else None)
                front = front and error is not None
                if error is not None:
                    failed[each.order_key] = gone[each.body.client_message_id] = error
                    self.sends.remove(each)
        self._drop_empty()
        return gone

    def fail(self, order_key: tuple[str, str]) -> list[str]:
        gone = [s for s in self.sends if s.order_key == order_key]
        self.sends = [s for s in self.sends if s not in gone]
        self._drop_empty()
        return keys(gone)

    def next_expiry(self) -> float | None:
        fronts = {s.lane: s for s in reversed(self.sends)}.values()
        age = self.settings.max_age_seconds
        return min((min(s.since + age, s.deadline) for s in fronts), default=None)

    def _drop_empty(self) -> None:
        self.turns = [lane for lane in self.turns if any(s.lane == lane for s in self.sends)]


chats = st.sampled_from("abcdef")
step = st.one_of(
    st.tuples(st.just("admit"), chats, st.sampled_from("12"), st.integers(1, 8)),
    st.tuples(st.just("take"), st.integers(0, 3), st.sets(st.integers(0, 2))),
    st.tuples(st.just("expire"), st.integers(0, 3)),
    st.tuples(st.just("fail"), chats, st.sampled_from("12")),
)


@given(st.lists(step, max_size=60))
def test_queue_of_lanes_agrees_with_a_list_that_is_scanned(steps: list[tuple]) -> None:
    settings = IntakeSettings(
        max_waiting=14, max_waiting_per_chat=5, max_group_sends=3, max_group_bytes=10
    )
    queue, listed, now = SendQueue(settings), ListedSends(settings), 0.0
    for number, (action, *args) in enumerate(steps):
        match action:
            case "admit":
                chat, source, halves = args
                lane = ord(chat) % 3
                new = send(str(number), chat, source, now, now + halves / 2, lane)
                assert (queue.admit(new) is None) == listed.admit(new)
            case "take":
                now += args[0] / 4
                group, refusals = queue.take(now, args[1])
                assert (keys(group), refused(refusals)) == listed.take(now, args[1])
            case "expire":
                now += args[0] / 4
                assert refused(queue.expire(now)) == listed.expire(now)
            case "fail":
                chat, source = args
                failed = {(source, chat): OutcomeUnknown()}
                gone = queue.fail_followers(ord(chat) % 3, failed)
                assert list(refused(gone)) == listed.fail((source, chat))
        assert queue.next_expiry() == listed.next_expiry()
        assert len(queue) == len(listed.sends)
        assert queue.bytes == sum(s.bytes for s in listed.sends)
        for chat in "abcdef":
            assert queue.in_chat(chat) == sum(s.body.chat_id == chat for s in listed.sends)
        for lane in range(3):
            assert queue.in_lane(lane) == sum(s.lane == lane for s in listed.sends)
    assert {s.body.client_message_id for s in queue.clear()} == set(keys(listed.sends))


def test_a_group_stays_within_its_bytes_and_one_send_above_them_goes_alone() -> None:
    waiting = SendQueue(IntakeSettings(max_group_bytes=100))
    for key, size in (("a", 60), ("b", 40), ("c", 1), ("d", 100), ("e", 500), ("f", 1)):
        waiting.admit(Send(body(key, content="x" * size), ANNA, "conn", 0.0, 5.0, lambda _: None))
    groups = [keys(waiting.take(0.0)[0]) for _ in range(5)]
    assert groups == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
