"""What may start now: order within a stream, blocks, releases, backlogs, bounds, suspects."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.work.balance import place_of, share_of
from holdfast.work.contract import Want
from holdfast.work.job import LANES, PARTITIONS, Block, Job
from holdfast.work.streams import Streams


def jobs(stream: str | None, *seqs: int, crashes: int = 0) -> list[Job]:
    return [Job(seq, "order", b"{}", stream, crashes=crashes) for seq in seqs]


def start_all(streams: Streams, announce: int = 1000) -> list[int]:
    streams.announce(announce)
    started = []
    while (job := streams.next()) is not None:
        started.append(job.seq)
    return started


def test_a_stream_starts_one_job_after_another_and_streams_run_side_by_side() -> None:
    streams = Streams()
    streams.add([*jobs("a", 1, 3), *jobs("b", 2), *jobs(None, 4, 5)])
    assert sorted(start_all(streams)) == [1, 2, 4, 5]
    streams.done(streams.started[1])
    assert start_all(streams) == [3]


def test_only_announced_jobs_start() -> None:
    streams = Streams()
    streams.add(jobs(None, 1, 2, 3))
    assert streams.next() is None
    assert len(start_all(streams, announce=2)) == 2
    streams.announced_by_store([3])
    assert start_all(streams, announce=0) == [3]


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
    streams.add_backlog(jobs("a", 2, 3, 4, 5), Want(backlogs={"a": 0}))
    assert streams.backlogs() == {}
    order = []
    for _ in range(4):
        (seq,) = start_all(streams)
        order.append(seq)
        streams.done(streams.started[seq])
    assert order == [2, 3, 4, 5]


def test_a_released_job_passes_the_block_and_a_later_failure_makes_a_new_one() -> None:
    streams = Streams()
    streams.rewound([Block("a", 1, released_ids=frozenset({2, 3}))])
    streams.add(jobs("a", 2, 3, 4))
    assert streams.take_held() == [4]
    assert start_all(streams) == [2]
    streams.failed(streams.started[2], Block("a", 2))
    assert streams.take_held() == [3]


def test_a_deep_stream_does_not_crowd_out_the_others() -> None:
    streams = Streams(per_stream_max=2)
    streams.add([*jobs("deep", 1, 2, 3, 4, 5), *jobs("b", 6)])
    assert streams.take_held() == [3, 4, 5]
    assert sorted(start_all(streams)) == [1, 6]
    streams.done(streams.started[1])
    assert streams.backlogs() == {"deep": 2}


def test_a_backlog_that_was_cut_by_its_bytes_is_read_on_and_every_stream_has_its_turn() -> None:
    streams = Streams()
    streams.rewound([], ["a", "b", "c"])
    asked = Want(bytes_max=4, backlogs=streams.backlogs(limit=2))
    assert list(asked.backlogs) == ["a", "b"]
    streams.add_backlog([*jobs("a", 1), *jobs("b")], asked)
    assert streams.backlogs(limit=2) == {"c": 0, "a": 1}, "two bytes of a were all that was asked for; b has no more"


def test_memory_is_bounded_in_jobs_and_bytes() -> None:
    streams = Streams(jobs_max=3, bytes_max=10)
    streams.add([Job(1, "t", b"123456"), Job(2, "t", b"1")])
    assert streams.room() == (1, 3)
    start_all(streams)
    streams.done(streams.started[1])
    assert streams.room() == (1, 3), "an unreported job still has its place"
    streams.reported([1])
    assert streams.room() == (2, 9)


def test_suspects_are_announced_one_at_a_time() -> None:
    streams = Streams()
    streams.add([*jobs(None, 1, 2, crashes=1), *jobs(None, 3)])
    assert start_all(streams) == [1, 3]
    streams.done(streams.started[1])
    assert start_all(streams) == [2]


def test_followers_of_suspects_do_not_use_up_the_announcements() -> None:
    streams = Streams()
    streams.add([*jobs("a", 1, crashes=1), *jobs("b", 2, crashes=1), *jobs("a", 3, 5), *jobs("b", 4, 6)])
    done = []
    for _ in range(6):
        streams.announced_by_store([3, 4, 5, 6])
        for seq in start_all(streams, announce=2 - len(streams.announced)):
            streams.done(streams.started[seq])
            done.append(seq)
    assert sorted(done) == [1, 2, 3, 4, 5, 6]


def test_what_is_known_is_not_taken_twice() -> None:
    streams = Streams()
    streams.add(jobs("a", 1))
    start_all(streams)
    streams.add(jobs("a", 1, 2))
    streams.done(streams.started[1])
    streams.add(jobs("a", 1))
    assert start_all(streams) == [2]


def test_a_closed_partition_starts_nothing_and_is_idle_when_reported() -> None:
    streams = Streams()
    streams.add([Job(1, "t", b"", "a", partition=7), Job(2, "t", b"", "a", partition=7), Job(3, "t", b"", partition=9)])
    streams.announce(1)
    assert streams.next() is not None
    streams.close([7])
    streams.done(streams.started[1])
    assert start_all(streams) == [3]
    assert streams.in_use() == {7, 9}
    streams.reported([1])
    assert streams.in_use() == {9}


@dataclass
class Store:
    """A model store for one worker: what is ready, held, retried; blocks by stream."""

    rows: dict[int, str] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    retry: set[int] = field(default_factory=set)
    cursor: int = 0


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_fails_every_stream_ends_in_order_with_each_job_once(seed: int) -> None:
    rng, store = random.Random(seed), Store()
    streams = Streams(jobs_max=12, per_stream_max=3)
    for seq in range(1, 60):
        store.rows[seq] = rng.choice("abc")
    finished: list[int] = []
    ended: list[int] = []

    def exchange() -> None:
        streams.reported(ended)
        ended.clear()
        store.held.update(seq for seq in streams.take_held() if seq in store.rows)
        asked = streams.backlogs()
        backlog = [
            Job(seq, "t", b"", store.rows[seq])
            for key, after in asked.items()
            for seq in sorted(s for s in store.held if store.rows[s] == key and s > after)[:2]
        ]
        due = sorted(store.retry)
        store.retry.clear()
        want = streams.room()[0]
        forward = [seq for seq in sorted(store.rows) if seq > store.cursor][:want]
        store.cursor = forward[-1] if forward else store.cursor
        streams.add_backlog(backlog, Want(backlogs=asked, per_backlog=2))
        streams.add(Job(seq, "t", b"", store.rows[seq], attempt=2) for seq in due)
        streams.add(Job(seq, "t", b"", store.rows[seq]) for seq in forward)

    for _ in range(2000):
        if not store.rows:
            break
        exchange()
        streams.announce(4)
        while (job := streams.next()) is not None:
            if job.attempt == 1 and rng.random() < 0.3:
                streams.failed(job, Block(job.stream or "", job.seq))
                store.retry.add(job.seq)
                store.held.discard(job.seq)
            else:
                streams.done(job)
                finished.append(job.seq)
                store.held.discard(job.seq)
            ended.append(job.seq)
            if job.seq in finished:
                del store.rows[job.seq]
    streams_of = {}
    for seq in finished:
        streams_of.setdefault(rng_stream(seed, seq), []).append(seq)
    assert sorted(finished) == list(range(1, 60))
    assert all(order == sorted(order) for order in streams_of.values())


def rng_stream(seed: int, wanted: int) -> str:
    rng = random.Random(seed)
    return [rng.choice("abc") for _ in range(1, 60)][wanted - 1]


def test_a_share_moves_only_from_or_to_the_one_who_comes_or_goes() -> None:
    before = {instance: share_of(instance, [1, 2, 3]) for instance in (1, 2, 3)}
    after = {instance: share_of(instance, [1, 2, 3, 4]) for instance in (1, 2, 3, 4)}
    assert set().union(*after.values()) == set(range(PARTITIONS))
    assert all(after[instance] <= before[instance] for instance in (1, 2, 3))
    assert all(40 < len(share) < 90 for share in after.values())


def test_a_stream_has_one_place() -> None:
    places = [place_of(f"order-{n}") for n in range(5000)]
    assert place_of("order-17") == places[17]
    assert {partition for partition, _ in places} == set(range(PARTITIONS))
    assert max(lane for _, lane in places) < LANES
