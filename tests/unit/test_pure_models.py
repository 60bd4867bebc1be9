"""Small pure cores against models that are too simple to be wrong: whatever happens, in
whatever order, they agree.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.errors import ChatHalted, KeyReused, NotAMember, NotFound
from holdfast.fanout.hot_chats import HotChats
from holdfast.fanout.receipts import Receipts
from holdfast.fanout.routing import Gaps
from holdfast.message import SEQUENCE_MAX, Acked, Draft, LogEntry, Message, User, Watermark
from holdfast.resilience import Backoff, Breaker, BreakerSettings, BreakerState, Bucket
from holdfast.store.numbering import ChatState, GroupState, number

ANN, BOB = User("t", "ann"), User("t", "bob")


class BreakerModel(RuleBasedStateMachine):
    """Callers come and end in any order while time passes. What the breaker did is
    judged by every call there was.
    """

    @initialize(ratio=st.sampled_from([0.0, 0.5, 1.0]), probes=st.integers(1, 3))
    def begin(self, ratio: float, probes: int) -> None:
        self.settings = BreakerSettings(min_failure_ratio=ratio, half_open_probe_count=probes)
        self.breaker = Breaker(self.settings)
        self.now = 0.0
        self.out = 0
        self.ended: list[tuple[float, bool]] = []
        self.opened_at: float | None = None

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 5.0, 29.9, 30.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def ask(self) -> None:
        state = self.breaker.state(self.now)
        admitted = self.breaker.admit(self.now)
        if state is BreakerState.CLOSED:
            assert admitted
        if state is BreakerState.OPEN:
            assert not admitted
        if state is BreakerState.HALF_OPEN and admitted:
            self.probing += 1
            assert self.probing <= self.settings.half_open_probe_count, "one probe too many"
        self.out += admitted

    @rule(calls=st.integers(2, 8))
    def trouble(self, calls: int) -> None:
        """Everything fails for a while: chance alone would seldom open a breaker."""
        for _ in range(calls):
            self.ask()
            if self.out:
                self.end("failure")

    @rule(calls=st.integers(2, 5))
    def rest_and_crowd(self, calls: int) -> None:
        """After a rest several come at once."""
        self.now += self.settings.open_duration_seconds
        for _ in range(calls):
            self.ask()

    @precondition(lambda self: self.out)
    @rule(how=st.sampled_from(["success", "failure", "neither"]))
    def end(self, how: str) -> None:
        before = self.breaker.state(self.now)
        self.out -= 1
        if how == "neither":
            self.breaker.neither()
            self.probing -= before is BreakerState.HALF_OPEN and self.probing > 0
            assert self.breaker.state(self.now) is before
            return
        getattr(self.breaker, how)(self.now)
        if before is BreakerState.CLOSED:
            self.ended.append((self.now, how == "success"))
        after = self.breaker.state(self.now)
        if before is BreakerState.CLOSED and after is not BreakerState.CLOSED:
            assert how == "failure"
            failures = [at for at, good in self.ended if not good and at > self.now - 30 * 1.001]
            assert len(failures) >= self.settings.failure_threshold, "opened without reason"
        if after is BreakerState.OPEN:
            self.opened_at, self.probing, self.ended = self.now, 0, []
        if before is BreakerState.HALF_OPEN and after is BreakerState.CLOSED:
            self.ended = []

    @invariant()
    def an_open_breaker_rests_its_time(self) -> None:
        if (
            getattr(self, "opened_at", None) is not None
            and self.breaker.state(self.now) is BreakerState.OPEN
        ):
            assert self.now < self.opened_at + self.settings.open_duration_seconds
            assert self.breaker.retry_after(self.now) >= 1.0

    probing = 0


TestBreaker = BreakerModel.TestCase


@given(
    st.floats(0.1, 50), st.integers(1, 30), st.lists(st.floats(0, 2), min_size=1, max_size=60)
)  # fmt: skip
def test_a_bucket_never_gives_more_than_its_burst_and_its_rate(
    rate: float, burst: int, waits: list[float]
) -> None:
    now, given_at = 0.0, []
    bucket = Bucket(rate, burst, now)
    for wait in waits:
        now += wait
        refused = bucket.take(now)
        if not refused:
            given_at.append(now)
        else:
            assert Bucket.take(bucket, now) > 0, "a refusal takes nothing"
    for first, since in enumerate(given_at):
        assert len(given_at) - first <= burst + rate * (now - since) + 1e-6


@given(st.floats(0.1, 5), st.floats(5, 60), st.integers(1, 5000), st.randoms(use_true_random=False))
def test_a_delay_lies_between_nothing_and_the_doubled_bound(
    initial: float, cap: float, failures: int, rng: random.Random
) -> None:
    backoff = Backoff(initial, cap)
    assert 0 <= backoff.delay(failures, rng) <= backoff.bound(failures) <= cap
    assert backoff.bound(failures) == min(cap, initial * 2 ** min(failures - 1, 60))


SENDS = st.lists(
    st.tuples(
        st.sampled_from([ANN, BOB, User("t", "eve"), User("other", "ann")]),
        st.sampled_from(["a", "b", "halted", "lost", "nowhere"]),
        st.sampled_from(["k1", "k2", "k3"]),
        st.sampled_from(["x", "y"]),
    ),
    max_size=25,
)


@given(st.lists(SENDS, max_size=4))
def test_numbers_are_dense_and_a_key_is_answered_once_however_sends_are_grouped(
    groups: list[list[tuple]],
) -> None:  # type: ignore[type-arg]
    counters: dict[str, int | None] = {"a": 0, "b": 7, "halted": 3, "lost": None}
    members = {(chat, user) for chat in counters for user in ("ann", "bob")}
    known = GroupState({}, members, set(), {})
    model: dict[tuple[User, str, str], tuple[str, int]] = {}
    for index, sends in enumerate(groups):
        known.chats = {
            c: ChatState("t", "by hand" if c == "halted" else None, n, 1)
            for c, n in counters.items()
        }
        group = [
            Draft(who, chat, key, content, "text/plain", f"m{index}.{n}", "now")
            for n, (who, chat, key, content) in enumerate(sends)
        ]
        numbered = number(group, known)
        for (who, chat, key, content), outcome in zip(sends, numbered.outcomes, strict=True):
            expected = _expected(who, chat, key, content, counters, model)
            if isinstance(expected, int):
                assert isinstance(outcome, Acked) and outcome.message.sequence == expected
            else:
                assert isinstance(outcome, expected)
        assert numbered.counters == {c: n for c, n in counters.items() if c in numbered.counters}


def _expected(
    who: User,
    chat: str,
    key: str,
    content: str,
    counters: dict[str, int | None],
    model: dict[tuple, tuple[str, int]],  # type: ignore[type-arg]
) -> int | type[Exception]:
    if chat not in counters or who.tenant != "t":
        return NotFound
    if (who, chat, key) in model:
        said, sequence = model[who, chat, key]
        return sequence if said == content else KeyReused
    if who.user_id == "eve":
        return NotAMember
    counter = counters[chat]
    if chat == "halted" or counter is None:
        return ChatHalted
    counters[chat] = counter + 1
    model[who, chat, key] = (content, counter + 1)
    return counter + 1


def entry(position: int, chat_id: str, sequence: int, sender: str = "ann") -> LogEntry:
    message = Message(
        f"m{position}", chat_id, sequence, "text", sender, f"k{position}", "x", "text/plain", "now"
    )
    return LogEntry(0, position, "t", message.chat_id, 1, message)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), max_size=60), st.integers(1, 5)
)
def test_gaps_are_what_no_neighbour_held(seen: list[tuple[str, int]], size: int) -> None:
    """As counted over the whole log at once: every jump forward of a chat, once,
    however it is cut into batches.
    """
    entries = [entry(n, chat, sequence) for n, (chat, sequence) in enumerate(seen)]
    gaps = Gaps()
    counted = sum(gaps.missing(entries[at : at + size]) for at in range(0, len(entries), size))
    newest: dict[str, int] = {}
    expected = 0
    for chat, sequence in seen:
        if chat in newest:
            expected += max(0, sequence - newest[chat] - 1)
        newest[chat] = max(sequence, newest.get(chat, 0))
    assert counted == expected


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.integers(1, 150)), max_size=30
    )
)
def test_hot_chats_are_those_of_the_last_full_minute(counts: list[tuple[str, int, int]]) -> None:
    hot, now, by_minute = HotChats(100), 0.0, defaultdict[int, Counter[str]](Counter)
    for chat, seconds, messages in counts:
        now += seconds
        hot.count([entry(n, chat, n) for n in range(messages)], now)
        by_minute[int(now // 60)][chat] += messages
        last = by_minute[int(now // 60) - 1]
        assert dict(hot.hot(now)) == {chat: n for chat, n in last.items() if n > 100}


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 12), st.integers(0, 12)), max_size=30))
def test_sender_gets_each_receipt_once_and_never_a_lower_one(
    marks: list[tuple[int, int, int]],
) -> None:
    receipts = Receipts()
    receipts.on_entries(entry(n, "c", n, "ann" if n % 2 else "bob") for n in range(1, 11))
    sent: list[tuple[int, int, int]] = []
    epoch = 0
    for mark_epoch, delivered, read in marks:
        mark = Watermark(BOB, "phone", "c", mark_epoch, delivered, min(read, delivered))
        found = list(receipts.of([mark]))
        assert all(sender == ANN and reader == BOB for sender, reader, _ in found), (
            "nobody gets a receipt of their own"
        )
        assert len(found) <= 1
        epoch = max(epoch, mark_epoch if delivered else 0)
        assert not found or mark_epoch == epoch, "no receipt of an old epoch"
        sent += [(mark_epoch, receipt.delivered, receipt.read) for _, _, receipt in found]
    assert sent == sorted(set(sent))
    for earlier, later in pairwise(sent):
        assert later[0] > earlier[0] or (later[1] >= earlier[1] and later[2] >= earlier[2])


def test_the_last_number_is_given_and_none_beyond_it() -> None:
    """Beyond it a client in JavaScript could not distinguish two sequences."""
    known = GroupState({"a": ChatState("t", None, SEQUENCE_MAX - 1, 1)}, {("a", "ann")}, set(), {})
    group = [Draft(ANN, "a", f"k{n}", "x", "text/plain", f"m{n}", "now") for n in (1, 2)]
    last, beyond = number(group, known).outcomes
    assert isinstance(last, Acked) and last.message.sequence == SEQUENCE_MAX
    assert isinstance(beyond, ChatHalted)
