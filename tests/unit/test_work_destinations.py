"""A cap per destination in the dispatch: a slow destination takes neither the runners
nor the memory of the others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest

from holdfast.work.contract import ClaimRequest
from holdfast.work.destinations import Destinations, Paces
from holdfast.work.job import Block, Job
from holdfast.work.streams import Streams


def jobs(
    destination: str, *seqs: int, stream: str | None = None, payload: bytes = b"{}"
) -> list[Job]:
    """One stream for each job, or the one that is given."""
    return [
        Job(seq, "hook", payload, stream or f"{destination}/{seq}", destination) for seq in seqs
    ]


def capped(
    cap: int = 2, runners: int = 100, jobs_max: int = 4096, bytes_max: int = 32 << 20
) -> Streams:
    return Streams(
        jobs_max, bytes_max, destinations=Destinations({"hook": cap}, runners, paces=quick("fast"))
    )


def quick(*names: str) -> Paces:
    """These have answered at once before, the others have not been called yet."""
    paces = Paces()
    for name in names:
        paces.ended(("hook", name), 0.01)
    return paces


class Rig:
    """Streams of many destinations, whose runs take the seconds that ``takes`` says;
    each has 20 streams.
    """

    def __init__(self, runners: int = 100, groups: dict[str, str] | None = None) -> None:
        self.now = 0.0
        self.destinations = Destinations({"hook": 4}, runners, lambda: self.now, quick("good"))
        self.destinations.regroup({("hook", name): group for name, group in (groups or {}).items()})
        self.streams = Streams(destinations=self.destinations)
        self.runners, self.seq, self.began = runners, 0, dict[int, float]()
        self.order = dict[str, list[int]]()

    def add(self, destination: str, jobs: int = 1) -> None:
        for _ in range(jobs):
            self.seq += 1
            stream = f"{destination}/{self.seq % 20}"
            self.streams.add([Job(self.seq, "hook", b"{}", stream, destination)])

    def running(self) -> Counter[str]:
        return Counter(job.destination for job in self.streams.started.values())

    def turn(self, takes: Callable[[str], float], seconds: float = 0.1) -> list[str]:
        """What ended and started in this turn, with at most one job per runner."""
        self.now += seconds
        for job in list(self.streams.started.values()):
            if self.now - self.began[job.seq] >= takes(job.destination):
                self.streams.done(job)
                self.streams.reported([job.seq])
        free = self.runners - len(self.streams.started)
        self.streams.dispatch.announce(free, 0)
        started = []
        while (job := self.streams.next()) is not None:
            self.began[job.seq] = self.now
            self.order.setdefault(str(job.stream), []).append(job.seq)
            started.append(job.destination)
        assert len(self.streams.started) <= self.runners
        return started


def hangs(name: str) -> float:
    return 10.0 if name.startswith("bad") else 0.05


def start_all(streams: Streams) -> list[int]:
    streams.dispatch.announce(100, 100)
    started = []
    while (job := streams.next()) is not None:
        started.append(job.seq)
    return started


def test_job_of_a_full_destination_is_not_announced_and_others_start() -> None:
    streams = capped(cap=2)
    streams.add([*jobs("slow", *range(1, 11)), *jobs("fast", 11)])
    assert start_all(streams) == [1, 2, 11]
    assert streams.dispatch.announced == {1, 2, 11}
    assert not streams.dispatch.possible(100, 100), "nothing more to announce"
    streams.announced_by_store(range(1, 11))
    assert start_all(streams) == [], "nor when the store has recorded more than the cap"
    streams.done(streams.started[1])
    assert start_all(streams) == [3]


def test_streams_of_a_full_destination_take_turns() -> None:
    streams = capped(cap=1)
    streams.add([*jobs("slow", 1, 3, 5, stream="slow/a"), *jobs("slow", 2, 4, 6, stream="slow/b")])
    order = []
    while started := start_all(streams):
        order += started
        for seq in started:
            streams.done(streams.started[seq])
    assert order == [1, 2, 3, 4, 5, 6]


def test_types_without_a_cap_and_jobs_without_a_stream_are_not_capped() -> None:
    streams = capped(cap=1)
    streams.add([Job(seq, "order", b"", f"s{seq}", "slow") for seq in (1, 2, 3)])
    streams.add([Job(seq, "hook", b"", None, "slow") for seq in (4, 5, 6)])
    assert start_all(streams) == [1, 2, 3, 4, 5, 6]


def test_slow_destinations_leave_runners_to_an_idle_one_and_their_shares_regrow() -> None:
    streams = capped(cap=4, runners=32)
    for n in range(12):
        streams.add(jobs(f"slow{n}", *range(n * 100, n * 100 + 50)))
    started = Counter(seq // 100 for seq in start_all(streams))
    assert (started[0], started[11]) == (4, 1) and started.total() < 28
    streams.add(jobs("fast", 9999))
    assert start_all(streams) == [9999]
    for _ in range(50):
        for job in [job for job in streams.started.values() if job.destination != "slow11"]:
            streams.done(job)
        start_all(streams)
    assert {job.destination for job in streams.started.values()} == {"slow11"}
    streams.done(next(iter(streams.started.values())))
    assert len(start_all(streams)) == 4


def test_backlog_of_one_destination_leaves_jobs_in_memory_to_others() -> None:
    streams = capped(jobs_max=800)
    streams.add(jobs("slow", *range(1, 801)))
    assert streams.room()[0] > 700 and len(streams.take_held()) > 700, "the rest waits in the store"
    for n in range(100):
        streams.add(jobs(f"slow{n}", *range(1000 * n + 1001, 1000 * n + 1101)))
        start_all(streams)
    streams.make_room(runners=400)
    assert streams.room()[0] > 300
    while asked := streams.backlogs():
        found = [
            job for key in asked for job in jobs(key.partition("/")[0], int(key.partition("/")[2]))
        ]
        streams.add_backlog(found, ClaimRequest(backlogs=asked), through=999_999)
        assert streams.room()[0] > 300
    streams.add(jobs("fast", 999_999))
    assert start_all(streams) == [999_999]


def test_backlog_of_one_destination_leaves_bytes_in_memory_to_others() -> None:
    streams = capped(bytes_max=1 << 20)
    streams.add(jobs("slow", *range(1, 100), payload=b"x" * (1 << 15)))
    assert streams.room()[1] > 800_000


def test_held_jobs_of_a_full_destination_are_read_in_small_ordered_pieces() -> None:
    streams = capped(cap=1, jobs_max=64)
    everything = {job.seq: job for job in jobs("slow", *range(1, 41), stream="slow/a")}
    everything |= {job.seq: job for job in jobs("slow", *range(41, 81), stream="slow/b")}
    streams.add(everything.values())
    held, order = set(streams.take_held()), list[int]()
    assert len(held) > 60
    for _ in range(200):
        for seq in start_all(streams):
            order.append(seq)
            job = streams.started[seq]
            streams.done(job)
            streams.reported([seq])
            held.discard(seq)
        asked = ClaimRequest(backlogs=streams.backlogs())
        waiting = [everything[seq] for seq in sorted(held)]
        found = [
            job
            for key, after in asked.backlogs.items()
            for job in waiting
            if job.stream == key and job.seq > after
        ]
        streams.add_backlog(found, asked, through=80)
        assert streams.room()[0] >= 64 - 4
    assert [seq for seq in order if seq <= 40] == list(range(1, 41))
    assert [seq for seq in order if seq > 40] == list(range(41, 81))


def test_followers_of_a_block_are_not_read_to_find_its_head() -> None:
    """A retried head of a full destination is held like any other job, in front of all
    that waits behind it.
    """
    streams = capped(cap=1, jobs_max=8)
    streams.rewound([Block("slow/a", 5)], {"slow/a": ("hook", "slow")})
    assert streams.backlogs() == {"slow/a": 0}
    streams.add_backlog(
        jobs("slow", *range(5, 69), stream="slow/a"),
        ClaimRequest(backlogs={"slow/a": 0}),
        through=100,
    )
    assert start_all(streams) == [5] and streams.backlogs() == {}
    streams.done(streams.started[5])
    assert streams.backlogs() == {"slow/a": 0}


def test_paused_destination_has_no_runner_or_memory_and_resumes_held_jobs() -> None:
    streams = capped()
    streams.rewound([], {"ep/a": ("hook", "ep")}, paused={("hook", "ep")})
    streams.add([*jobs("ep", 1, 2, 3, stream="ep/a"), *jobs("fast", 4)])
    assert start_all(streams) == [4]
    assert streams.take_held() == [1, 2, 3] and streams.backlogs() == {}
    assert streams.room()[0] == 4095
    streams.rewound([], {"ep/a": ("hook", "ep")})
    streams.add(jobs("ep", 5, stream="ep/a"))
    assert streams.take_held() == [5] and start_all(streams) == [], (
        "a newer job does not overtake the held ones"
    )
    streams.add_backlog(
        jobs("ep", 1, 2, 3, 5, stream="ep/a"), ClaimRequest(backlogs=streams.backlogs()), through=5
    )
    assert start_all(streams) == [1]


def test_slow_destinations_together_leave_an_eighth_of_the_runners() -> None:
    rig = Rig()
    for n in range(150):
        rig.add(f"bad{n}", 10)
    for n in range(3):
        rig.add(f"good{n}")
    for _ in range(600):  # each has had a run
        rig.turn(hangs)
    assert 80 <= rig.running().total() <= 87
    waited = 0
    for _ in range(300):
        for n in range(3):
            rig.add(f"good{n}")
        started = rig.turn(hangs)
        waited += 3 - sum(name.startswith("good") for name in started)
        assert sum(count for name, count in rig.running().items() if name.startswith("bad")) <= 87
    assert waited == 0


def test_slow_destinations_take_turns_without_loss_or_reordering() -> None:
    rig = Rig(runners=8)
    for n in range(20):
        rig.add(f"bad{n}", 40)
    for _ in range(30_000):
        if not rig.turn(hangs, 1.0) and not rig.streams.started:
            break
    assert sum(len(seqs) for seqs in rig.order.values()) == 800
    assert all(seqs == sorted(seqs) for seqs in rig.order.values())
    rig = Rig(runners=8)
    for n in range(20):
        rig.add(f"bad{n}", 400)
    for _ in range(2000):
        rig.turn(hangs, 1.0)
    runs = Counter(stream.partition("/")[0] for stream, seqs in rig.order.items() for _ in seqs)
    assert len(runs) == 20 and max(runs.values()) - min(runs.values()) <= 8, runs


def test_few_slow_destinations_keep_their_cap_and_can_recover() -> None:
    rig = Rig()
    rig.add("bad", 100)
    for _ in range(15):
        rig.turn(hangs, 1.0)
    assert rig.running() == {"bad": 4}
    for n in range(150):
        rig.add(f"bad{n}", 30)
    for _ in range(40):
        rig.turn(hangs, 1.0)
    assert rig.running()["bad"] <= 1
    seconds = 0  # from here on it answers at once
    while rig.turn(lambda name: 0.05 if name == "bad" else 10.0, 1.0).count("bad") < 4:
        seconds += 1
    assert seconds < 30, "one turn among 151 that share 87 runners for 10 s each"


def test_destinations_of_one_group_leave_an_eighth_of_the_runners() -> None:
    """A tenant whose receivers answer once at once and then hang, so that none is slow
    when it begins to.
    """
    groups = {f"bad{n}": "evil" for n in range(150)} | {f"good{n}": "nice" for n in range(10)}
    rig = Rig(groups=groups)
    for n in range(150):
        rig.add(f"bad{n}", 30)
    for turn in range(100):
        rig.add(f"good{turn % 10}")
        started = rig.turn(lambda name: 0.05 if rig.now < 3 else hangs(name))
        assert f"good{turn % 10}" in started or rig.now < 3
        bad = sum(count for name, count in rig.running().items() if name.startswith("bad"))
        assert bad <= 87


def test_slow_destinations_of_a_group_leave_an_eighth_of_its_share() -> None:
    rig = Rig(groups=dict.fromkeys([*(f"bad{n}" for n in range(150)), "good"], "evil"))
    for n in range(150):
        rig.add(f"bad{n}", 10)
    for _ in range(601):  # each has had a run that took 10 s
        rig.turn(hangs)
    assert rig.running().total() == 76
    for _ in range(20):
        rig.add("good")
        assert "good" in rig.turn(hangs)


def test_group_assigned_later_counts_jobs_already_in_flight() -> None:
    rig = Rig(runners=16)
    for n in range(20):
        rig.add(f"bad{n}", 4)
    rig.turn(hangs)
    assert rig.running().total() == 14
    rig.destinations.regroup({("hook", f"bad{n}"): "evil" for n in range(20)})
    for _ in range(1000):
        rig.turn(hangs, 1.0)
        if rig.now > 15:
            assert rig.running().total() <= 12
    assert sum(map(len, rig.order.values())) == 80 and not rig.streams.started


def test_lone_group_has_three_quarters_of_the_runners_for_slow_destinations() -> None:
    """A deployment with one tenant, whose receivers answer after 3 s."""
    rig = Rig(groups={f"ep{n}": "only" for n in range(40)})
    for n in range(40):
        rig.add(f"ep{n}", 20)
    for _ in range(100):
        rig.turn(lambda _: 3.0)
    assert rig.running().total() == 76


@pytest.mark.parametrize("groups", [1, 100, 16_000])
def test_cost_of_a_turn_does_not_grow_with_waiting_destinations(groups: int) -> None:
    def cost(destinations: int) -> float:
        capped = Destinations({"hook": 4})
        capped.regroup({("hook", f"ep{n}"): f"group{n % groups}" for n in range(destinations)})
        streams = Streams(jobs_max=100_000, destinations=capped)
        streams.add(job for n in range(destinations) for job in jobs(f"ep{n}", n + 1))
        assert start_all(streams)
        began = time.process_time()
        for _ in range(500):
            streams.done(next(iter(streams.started.values())))
            assert start_all(streams)
        return time.process_time() - began

    assert cost(16_000) < 6 * cost(1000) + 0.02
