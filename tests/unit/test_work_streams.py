"""What may start: order in a stream, blocks, releases, backlogs, bounds, suspects."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.work.contract import ClaimRequest
from holdfast.work.destinations import Destinations
from holdfast.work.job import (
    LANES,
    PARTITIONS,
    SUSPECTS_MAX,
    Block,
    Job,
    partition_and_lane,
    share_of,
)
from holdfast.work.streams import Streams


def jobs(stream: str | None, *seqs: int, crashes: int = 0) -> list[Job]:
    return [Job(seq, "order", b"{}", stream, crashes=crashes) for seq in seqs]


def start_all(streams: Streams, announce: int = 1000) -> list[int]:
    streams.dispatch.announce(announce, announce)
    started = []
    while (job := streams.next()) is not None:
        started.append(job.seq)
    return started


def test_stream_starts_one_job_at_a_time_and_streams_run_side_by_side() -> None:
    streams = Streams()
    streams.add([*jobs("a", 1, 3), *jobs("b", 2), *jobs(None, 4, 5)])
    assert sorted(start_all(streams)) == [1, 2, 4, 5]
    streams.done(streams.started[1])
    assert start_all(streams) == [3]


def test_held_jobs_of_a_closed_partition_are_not_reported() -> None:
    """The store may hear of it after another worker has read the partition, and counts
    on it as ready.
    """
    streams = Streams(per_stream_max=1)
    streams.add(
        [
            Job(seq, "order", b"{}", stream, partition=7)
            for seq, stream in ((1, "a"), (2, "a"), (3, "a"))
        ]
    )
    streams.add(
        [Job(seq, "order", b"{}", stream, partition=8) for seq, stream in ((4, "b"), (5, "b"))]
    )
    streams.close([7])
    assert streams.take_held() == [5]


def test_only_announced_jobs_start() -> None:
    streams = Streams()
    streams.add(jobs(None, 1, 2, 3))
    assert streams.next() is None
    assert len(start_all(streams, announce=2)) == 2
    streams.announced_by_store([3])
    assert start_all(streams, announce=0) == [3]


def test_jobs_announced_before_a_rewind_must_be_announced_again() -> None:
    streams, same = Streams(), [*jobs(None, 1), *jobs("a", 2)]
    streams.add(same)
    streams.dispatch.announce(2, 0)
    streams.rewound([])
    assert streams.dispatch.announced == set() and streams.next() is None
    streams.add(same)
    assert start_all(streams, announce=0) == []
    assert start_all(streams) == [1, 2]


def test_followers_of_a_failed_head_are_held_and_come_back_when_it_succeeds() -> None:
    streams = Streams()
    streams.add(jobs("a", 1, 2, 3))
    start_all(streams)
    streams.failed(streams.started[1], Block("a", 1))
    assert streams.take_held() == [2, 3]
    streams.reported([1])
    streams.add(jobs("a", 4))
    assert streams.take_held() == [4]
    streams.add(jobs("a", 1))
    assert start_all(streams) == [1]
    streams.done(streams.started[1])
    assert streams.backlogs() == {"a": 0}
    streams.add(jobs("a", 5))
    assert streams.take_held() == [5], "a newer job must not overtake the backlog"
    streams.add_backlog(jobs("a", 2, 3, 4, 5), ClaimRequest(backlogs={"a": 0}), through=5)
    assert streams.backlogs() == {}
    order = []
    for _ in range(4):
        (seq,) = start_all(streams)
        order.append(seq)
        streams.done(streams.started[seq])
    assert order == [2, 3, 4, 5]


def test_released_job_passes_the_block_and_a_later_failure_makes_a_new_one() -> None:
    streams = Streams()
    streams.rewound([Block("a", 1, released_ids=frozenset({2, 3}))])
    streams.add(jobs("a", 2, 3, 4))
    assert streams.take_held() == [4]
    assert start_all(streams) == [2]
    streams.failed(streams.started[2], Block("a", 2))
    assert streams.take_held() == [3]


def test_deep_stream_does_not_crowd_out_the_others() -> None:
    streams = Streams(per_stream_max=2)
    streams.add([*jobs("deep", 1, 2, 3, 4, 5), *jobs("b", 6)])
    assert streams.take_held() == [3, 4, 5]
    assert sorted(start_all(streams)) == [1, 6]
    streams.done(streams.started[1])
    assert streams.backlogs() == {"deep": 2}


def test_deep_stream_takes_no_announcement_from_the_others() -> None:
    streams = Streams()
    streams.add(jobs("deep", *range(1, 100)))
    streams.dispatch.announce(10, 10)
    streams.add([*jobs("b", 200, 202), *jobs(None, 201), *jobs("c", 203)])
    assert streams.dispatch.announced == {1, 2} and streams.dispatch.ahead == 1, (
        "one that has not moved yet has one more"
    )
    assert streams.dispatch.possible(1, 0) and not streams.dispatch.possible(0, 9)
    streams.dispatch.announce(2, 0)
    assert streams.dispatch.announced == {1, 2, 200, 201}, "what came first"
    streams.dispatch.announce(9, 0)
    assert streams.dispatch.announced == {1, 2, 200, 201, 203}, (
        "what could not start has to wait for room"
    )
    assert not streams.dispatch.possible(9, 0) and streams.dispatch.possible(0, 1)


def test_followers_announced_ahead_match_the_pace_of_their_stream() -> None:
    streams = Streams()
    streams.add(jobs("a", *range(1, 1000)))
    most = []
    for _ in range(5):
        streams.dispatch.announce(1, 1000)
        most.append(streams.dispatch.ahead)
        while (job := streams.next()) is not None:
            streams.done(job)
    assert most == [1, 3, 7, 15, 31], "all of them ended before the next announcement"
    for _ in range(70):
        streams.dispatch.announce(1, 1000)
        job = streams.next()
        assert job is not None
        streams.done(job)
    streams.dispatch.announce(1, 1000)
    assert streams.dispatch.ahead == 1, "one ended between two announcements"


def test_announced_jobs_are_always_the_front_of_their_stream() -> None:
    streams = Streams()
    streams.add(jobs("a", *range(10, 20)))
    streams.dispatch.announce(1, 1)
    assert streams.dispatch.announced == {10, 11}
    streams.add(jobs("a", 5))
    assert streams.dispatch.announced == set(), (
        "a retried head comes first, and so is nothing behind it in flight"
    )
    streams.announced_by_store([10, 11])
    assert streams.dispatch.announced == set(), "nor out of turn"
    streams.dispatch.announce(1, 0)
    streams.announced_by_store([10, 11])
    assert streams.dispatch.announced == {5, 10} and streams.dispatch.ahead == 1, (
        "nor more than its pace asks for"
    )


def test_few_deep_streams_make_room_when_runners_are_idle() -> None:
    streams = Streams(jobs_max=16, per_stream_max=8)
    streams.add([*jobs("a", *range(1, 9)), *jobs("b", *range(11, 19))])
    start_all(streams)
    assert streams.room()[0] == 0
    streams.make_room(runners=2)
    assert streams.room()[0] == 0, "nobody would gain by it"
    streams.make_room(runners=3)
    assert sorted(streams.take_held()) == [6, 7, 8, 16, 17, 18]
    assert streams.room()[0] == 6 and streams.backlogs() == {}, (
        "read on when they have worked off what they kept"
    )
    streams.add([*jobs("a", 20), *jobs("c", 21)])
    assert streams.take_held() == [20] and start_all(streams) == [21]
    for seq in range(1, 5):
        streams.done(streams.started[seq])
        start_all(streams)
    assert streams.backlogs() == {"a": 5}


def test_stream_of_large_jobs_makes_room_and_keeps_one() -> None:
    streams = Streams(bytes_max=1000)
    streams.add(Job(seq, "t", b"x" * 250, "a") for seq in range(1, 5))
    streams.make_room(runners=2)
    assert streams.take_held() == [3, 4] and streams.room()[1] == 500
    streams.add([Job(9, "t", b"x" * 900, "b")])
    streams.make_room(runners=3)
    assert streams.take_held() == [2] and sorted(start_all(streams)) == [1, 9]


def test_backlog_cut_by_bytes_is_continued_and_every_stream_has_its_turn() -> None:
    streams = Streams()
    streams.rewound([], dict.fromkeys("abc", ("order", "")))
    asked = ClaimRequest(bytes_max=4, backlogs=streams.backlogs(limit=2))
    assert list(asked.backlogs) == ["a", "b"]
    streams.add_backlog([*jobs("a", 1), *jobs("b")], asked, through=1)
    assert streams.backlogs(limit=2) == {"c": 0, "a": 1}, (
        "two bytes of a were all that was asked for; b has no more"
    )


def test_memory_is_bounded_in_jobs_and_bytes() -> None:
    streams = Streams(jobs_max=3, bytes_max=10)
    streams.add([Job(1, "t", b"123456"), Job(2, "t", b"1")])
    assert streams.room() == (1, 3)
    start_all(streams)
    streams.done(streams.started[1])
    assert streams.room() == (1, 3), "an unreported job still has its place"
    streams.reported([1])
    assert streams.room() == (2, 9)


def test_at_most_eight_suspects_are_in_flight_beside_other_jobs() -> None:
    streams = Streams()
    streams.add([*jobs(None, *range(1, 11), crashes=1), *jobs(None, 11, 12)])
    assert start_all(streams) == [*range(1, 9), 11, 12]
    assert not streams.dispatch.possible(100, 100)
    streams.done(streams.started[5])
    assert start_all(streams) == [9]


def test_suspect_is_not_announced_behind_another_job_of_its_stream() -> None:
    """It would take the place of one that could run."""
    streams = Streams()
    streams.add([job for n in range(16) for job in jobs(f"s{n}", 2 * n + 1, 2 * n + 2, crashes=1)])
    assert start_all(streams) == [2 * n + 1 for n in range(8)]
    assert len(streams.dispatch.announced) == 8


def test_suspect_is_not_announced_with_followers_of_a_fast_stream() -> None:
    streams = Streams()
    streams.add([*jobs("a", 1, 2, 3, 4), *jobs("a", 5, crashes=1)])
    assert start_all(streams) == [1]
    streams.done(streams.started[1])
    assert streams.next() is not None
    streams.done(streams.started[2])  # two since the last announcement: it may be three ahead
    assert start_all(streams) == [3]
    assert streams.dispatch.announced == {3, 4}


def test_job_with_two_crashes_is_in_flight_alone() -> None:
    streams = Streams()
    streams.add(
        [*jobs("a", 1), *jobs(None, 2, crashes=2), *jobs(None, 4, 5), *jobs("b", 6, crashes=2)]
    )
    streams.add(jobs(None, 7))
    assert start_all(streams, announce=1) == [1]
    assert start_all(streams) == [], (
        "it waits for what runs, and nothing else is announced meanwhile"
    )
    assert streams.dispatch.isolates and not streams.dispatch.possible(100, 100)
    streams.done(streams.started[1])
    assert streams.dispatch.possible(100, 100)
    assert start_all(streams) == [2] and streams.dispatch.announced == {2}
    assert start_all(streams) == [] and not streams.dispatch.possible(100, 100)
    streams.done(streams.started[2])
    assert start_all(streams) == [4, 5], "what was there before the next one that must be alone"
    for seq in (4, 5):
        streams.done(streams.started[seq])
    assert start_all(streams) == [6]
    streams.done(streams.started[6])
    assert start_all(streams) == [7] and not streams.dispatch.isolates


def test_isolated_job_that_is_given_back_blocks_no_other() -> None:
    streams = Streams()
    streams.add(
        [
            Job(1, "t", b""),
            Job(2, "t", b"", partition=7, crashes=2),
            Job(3, "t", b"", "a", partition=7, crashes=2),
        ]
    )
    assert start_all(streams) == [1]
    assert streams.dispatch.isolates
    streams.add(jobs(None, 4))
    streams.close([7])
    assert not streams.dispatch.isolates
    assert start_all(streams) == [4]


@pytest.mark.parametrize("seed", range(40))
def test_suspects_are_bounded_and_each_has_a_turn(seed: int) -> None:
    """Whatever comes and ends in whatever order, with rewinds in between."""
    rng, streams = random.Random(seed), Streams()
    keys = [None, None, *(f"s{n}" for n in range(12))]
    todo = {
        seq: Job(seq, "order", b"{}", rng.choice(keys), crashes=rng.choice([0, 0, 0, 1, 1, 2]))
        for seq in range(1, 121)
    }
    coming, turns = deque(todo.values()), 0
    while todo:
        turns += 1
        assert turns < 3000, f"{len(todo)} wait without end"
        if coming:
            streams.add([coming.popleft() for _ in range(min(len(coming), rng.randrange(8)))])
        if rng.random() < 0.05:
            streams.rewound([])
            coming = deque(job for seq, job in sorted(todo.items()) if seq not in streams.started)
        window = 20 - len(streams.dispatch.announced)
        possible = streams.dispatch.possible(window, window)
        before = set(streams.dispatch.announced)
        streams.dispatch.announce(window, window)
        announced = streams.dispatch.announced
        assert possible or announced == before, "a worker that rests would miss it"
        crashes = [todo[seq].crashes for seq in announced]
        assert crashes.count(1) <= SUSPECTS_MAX
        assert 2 not in crashes or crashes == [2]
        while streams.next():
            pass
        for seq in rng.sample(sorted(streams.started), min(len(streams.started), rng.randrange(4))):
            streams.done(streams.started[seq])
            streams.reported([seq])
            del todo[seq]


def test_followers_of_suspects_do_not_use_up_the_announcements() -> None:
    streams = Streams()
    streams.add(
        [*jobs("a", 1, crashes=1), *jobs("b", 2, crashes=1), *jobs("a", 3, 5), *jobs("b", 4, 6)]
    )
    done = []
    for _ in range(6):
        streams.announced_by_store([3, 4, 5, 6])
        for seq in start_all(streams, announce=2 - len(streams.dispatch.announced)):
            streams.done(streams.started[seq])
            done.append(seq)
    assert sorted(done) == [1, 2, 3, 4, 5, 6]


def test_known_job_is_not_added_twice() -> None:
    streams = Streams()
    streams.add(jobs("a", 1))
    start_all(streams)
    streams.add(jobs("a", 1, 2))
    streams.done(streams.started[1])
    streams.add(jobs("a", 1))
    assert start_all(streams) == [2]


def test_closed_partition_starts_nothing_and_is_idle_when_reported() -> None:
    streams = Streams()
    streams.add(
        [
            Job(1, "t", b"", "a", partition=7),
            Job(2, "t", b"", "a", partition=7),
            Job(3, "t", b"", partition=9),
        ]
    )
    streams.dispatch.announce(1, 1)
    assert streams.next() is not None
    streams.close([7])
    streams.done(streams.started[1])
    assert start_all(streams) == [3]
    assert streams.in_use() == {7, 9}
    streams.reported([1])
    assert streams.in_use() == {9}


@dataclass
class Store:
    """A model store for one worker: its rows by sequence, which of them are held or
    retried, and the blocks.
    """

    streams: dict[int, str]
    held: set[int] = field(default_factory=set)
    retry: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, Block] = field(default_factory=dict)
    cursor: int = 0

    def __post_init__(self) -> None:
        self.last = max(self.streams)

    def report(self, done: list[int], failed: dict[int, Block], held: list[int]) -> None:
        for seq in done:
            self.streams.pop(seq, None)
            self.blocks.pop(seq, None)
            self.held.discard(seq)
        for seq, block in failed.items():
            self.attempts[seq] = 2
            self.retry.add(seq)
            self.held.discard(seq)
            self.blocks[seq] = block
        self.held.update(seq for seq in held if seq in self.streams and seq not in self.retry)

    def backlog(self, asked: ClaimRequest) -> list[Job]:
        rows = {
            key: sorted(s for s in self.held if self.streams[s] == key and s > at)
            for key, at in asked.backlogs.items()
        }
        return [self.job(seq) for seqs in rows.values() for seq in seqs[: asked.per_backlog]]

    def claim(self, want: int) -> list[Job]:
        late = sorted(seq for seq in self.retry if seq <= self.cursor)
        self.retry.clear()
        forward = [
            seq for seq in sorted(self.streams) if seq > self.cursor and seq not in self.held
        ][:want]
        if want:
            self.cursor = forward[-1] if len(forward) == want else self.last
        return [self.job(seq) for seq in late + forward]

    def rewind(self) -> tuple[list[Block], dict[str, tuple[str, str]]]:
        self.cursor = 0
        blocks = list(self.blocks.values())
        first: dict[str, int] = {}
        for seq in sorted(self.held):
            first.setdefault(self.streams[seq], seq)
        free = [
            s for s, seq in first.items() if not any(b.stream == s and b.head < seq for b in blocks)
        ]
        return blocks, {stream: ("t", DESTINATIONS[stream]) for stream in free}

    def job(self, seq: int) -> Job:
        stream = self.streams[seq]
        return Job(seq, "t", b"", stream, DESTINATIONS[stream], attempt=self.attempts.get(seq, 1))


DESTINATIONS = {"a": "x", "b": "x", "c": "x", "d": "y", "e": "y"}


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2))
def test_every_stream_ends_in_order_with_each_job_once_despite_failures(
    seed: int, cap: int
) -> None:
    rng = random.Random(seed)
    stream_of = {seq: rng.choice("abcde") for seq in range(1, 60)}
    now = 0.0
    destinations = Destinations({"t": cap} if cap else {}, rng.choice((2, 6, 100)), lambda: now)
    store, streams = (
        Store(dict(stream_of)),
        Streams(jobs_max=12, per_stream_max=3, destinations=destinations),
    )
    paused: set[tuple[str, str]] = set()
    finished: list[int] = []
    done: list[int] = []
    failed: dict[int, Block] = {}

    def run_some() -> None:
        nonlocal now
        now += rng.random()
        while rng.random() < 0.8 and (job := streams.next()) is not None:
            assert ("t", job.destination) not in paused
            running.append(job)
        while running and rng.random() < 0.7:
            job = running.pop(rng.randrange(len(running)))
            if job.attempt == 1 and rng.random() < 0.3:
                failed[job.seq] = Block(job.stream or "", job.seq)
                streams.failed(job, failed[job.seq])
            else:
                streams.done(job)
                finished.append(job.seq)
                done.append(job.seq)

    running: list[Job] = []
    for turn in range(4000):
        if not store.streams:
            break
        if rng.random() < 0.1:
            streams.make_room(8)
        streams.dispatch.announce(rng.randrange(1, 5), rng.randrange(4))
        assert streams.dispatch.ahead == len(streams.dispatch.announced) - len(
            {stream_of[seq] for seq in streams.dispatch.announced}
        )
        for name in "xy" if cap else "":
            assert (
                sum(DESTINATIONS[stream_of[seq]] == name for seq in streams.dispatch.announced)
                <= cap
            )
        reported = [*done, *failed]
        store.report(done, failed, streams.take_held())
        done, failed = [], {}
        asked = ClaimRequest(backlogs=streams.backlogs(), per_backlog=2)
        backlog, claimed = store.backlog(asked), store.claim(streams.room()[0])
        run_some()  # while the answer is under way
        streams.reported(reported)
        streams.add_backlog(backlog, asked, store.cursor)
        streams.add(claimed)
        streams.announced_by_store([job.seq for job in claimed if rng.random() < 0.5])
        run_some()
        if rng.random() < 0.1:
            destinations.regroup({("t", name): rng.choice("gh") for name in "xy"})
        if rng.random() < 0.1:
            pauses = {("t", name) for name in "xy" if cap and turn < 2000 and rng.random() < 0.3}
            blocks, backlogs = store.rewind()
            run_some()
            paused = pauses
            streams.rewound(blocks, backlogs, paused)
    assert sorted(finished) == list(range(1, 60))
    for stream in "abcde":
        order = [seq for seq in finished if stream_of[seq] == stream]
        assert order == sorted(order)


def test_held_jobs_are_read_although_the_head_fails_before_the_backlog_arrives() -> None:
    streams = Streams()
    streams.add(jobs("a", 1))
    start_all(streams)
    streams.rewound([], {"a": ("order", "")})
    streams.failed(streams.started[1], Block("a", 1))
    streams.reported([1])
    streams.add(jobs("a", 1))
    start_all(streams)
    streams.done(streams.started[1])
    assert streams.backlogs() == {"a": 0}
    streams.add(jobs("a", 9))
    assert start_all(streams) == [] and streams.take_held() == [9], (
        "a newer job must not overtake the held ones"
    )


def test_backlog_restarted_while_it_is_read_ignores_the_response() -> None:
    streams = Streams()
    streams.rewound([Block("a", 1, released_ids=frozenset({3, 4}))], {"a": ("order", "")})
    streams.add_backlog(jobs("a", 2), ClaimRequest(backlogs={"a": 0}, per_backlog=1), through=4)
    streams.add(jobs("a", 1))
    start_all(streams)
    asked = ClaimRequest(backlogs=streams.backlogs(), per_backlog=1)
    assert asked.backlogs == {"a": 2}
    streams.done(streams.started[1])
    streams.add_backlog(jobs("a", 3), asked, through=4)
    assert streams.backlogs() == {"a": 0}, "what the lifted block held stands before"
    assert start_all(streams) == []


def test_held_jobs_wait_for_unread_ready_jobs_before_them() -> None:
    """Another worker left the stream so: what it had in memory is ready, what it gave
    back before is held.
    """
    streams = Streams()
    streams.rewound([], {"a": ("order", "")})
    streams.add_backlog(jobs("a", 2, 4, 6), ClaimRequest(backlogs={"a": 0}), through=3)
    assert start_all(streams) == [2]
    streams.add_backlog(jobs("a", 4, 6), ClaimRequest(backlogs={"a": 2}), through=3)
    streams.done(streams.started[2])
    assert start_all(streams) == [] and streams.backlogs() == {"a": 2}
    streams.add(jobs("a", 5))
    assert streams.take_held() == [5]
    streams.add_backlog(jobs("a", 4, 5, 6), ClaimRequest(backlogs={"a": 2}), through=9)
    assert start_all(streams) == [4] and streams.backlogs() == {}
    streams.done(streams.started[4])
    assert start_all(streams) == [5]


def test_share_moves_only_to_a_joining_or_from_a_leaving_worker() -> None:
    before = {instance: share_of(instance, [1, 2, 3]) for instance in (1, 2, 3)}
    after = {instance: share_of(instance, [1, 2, 3, 4]) for instance in (1, 2, 3, 4)}
    assert set().union(*after.values()) == set(range(PARTITIONS))
    assert all(after[instance] <= before[instance] for instance in (1, 2, 3))
    assert all(40 < len(share) < 90 for share in after.values())


def test_stream_has_one_partition_and_lane() -> None:
    places = [partition_and_lane(f"order-{n}") for n in range(5000)]
    assert partition_and_lane("order-17") == places[17]
    assert {partition for partition, _ in places} == set(range(PARTITIONS))
    assert max(lane for _, lane in places) < LANES
