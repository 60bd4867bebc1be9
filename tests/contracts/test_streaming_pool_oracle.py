"""``pool.lua`` gives the answers of ``FairQueue`` to the same calls at the same times,
and ``FairQueue`` keeps what its docstring promises.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from engines import Server
from holdfast.streaming.fair_queue import FRESH_MS, FairQueue
from holdfast.streaming.fair_rings import QueueEntry
from holdfast.streaming.pool.contract import (
    PASSED_OVER_MAX,
    Admit,
    Admitted,
    CancelElsewhere,
    Confirm,
    Locate,
    Move,
    NodeBeat,
    PoolAnswer,
    PoolOperation,
    PoolRequest,
    PoolSizes,
    PoolView,
    QueueBounds,
    Release,
)
from holdfast.streaming.pool.redis import RedisPool

SIZES = PoolSizes(4, {"own": 2, "tiny": 1})
BOUNDS = QueueBounds(waiting_max=9, waiting_per_tenant=6, waiting_per_user=4)
NODES = ("a", "b", "c")
START_MS = 1_700_000_000_000


class Call(NamedTuple):
    operations: tuple[PoolOperation, ...]


class Beat(NamedTuple):
    """``True``: as the pool has it; else of nothing."""

    is_true: bool
    reading: dict[str, str]


class Announce(NamedTuple):
    """What it has, with some forgotten, some unknown to the pool and some demoted."""

    requests: tuple[PoolRequest, ...]
    leases: int


class Leave(NamedTuple):
    pass


class Step(NamedTuple):
    after_ms: int
    node: str
    what: Call | Beat | Announce | Leave


ids = st.integers(0, 23).map("r{:02}".format)
pools = st.sampled_from(("default", "default", "own", "tiny"))
requests = st.builds(
    PoolRequest,
    reply_id=ids,
    tenant=st.sampled_from(("x", "y", "z")),
    user=st.sampled_from(("u", "v")),
    user_limit=st.sampled_from((0, 1, 2, 2, 3)),
    pool=pools,
    capped=st.booleans(),
    head=st.booleans(),
    waiting_max=st.sampled_from((0, 0, 2)),
)
operations = st.one_of(
    st.builds(Admit, requests),
    st.builds(Admit, requests),
    st.builds(Confirm, ids),
    st.builds(Release, ids),
    st.builds(Move, ids, pools),
    st.builds(CancelElsewhere, ids, st.sampled_from(NODES)),
    st.builds(Locate, ids),
)
whats = st.one_of(
    st.builds(Call, st.lists(operations, min_size=1, max_size=6).map(tuple)),
    st.builds(Call, st.lists(operations, min_size=1, max_size=6).map(tuple)),
    st.builds(Beat, st.booleans(), st.dictionaries(ids, st.sampled_from(NODES), max_size=2)),
    st.builds(
        Announce,
        st.lists(requests, max_size=6, unique_by=lambda each: each.reply_id).map(tuple),
        st.integers(0, 6),
    ),
    st.builds(Leave),
)
steps = st.builds(
    Step,
    st.sampled_from((0, 0, 0, 1, 200, 900, 1999, 2000, 2001, 2501, 3000, 10_001, -7_000)),
    st.sampled_from(NODES),
    whats,
)


class Oracle:
    """A ``FairQueue`` that is asked like a node would ask it."""

    def __init__(self, *, rebuilds: bool = True) -> None:
        self.queue = FairQueue(SIZES, BOUNDS, rebuilds=rebuilds)

    def beat_of(self, step: Step, beat: Beat) -> NodeBeat:
        node = self.queue._nodes.get(step.node)
        if node is None or not beat.is_true:
            return NodeBeat(0, 0, 0, 0, beat.reading)
        waiting = sorted(e.reply_id for e in node.entries.values() if e.state == "waiting")
        return NodeBeat(
            node.leases, node.leases_sum, node.waiting, node.waiting_sum, beat.reading, waiting
        )

    def carry_out(self, step: Step, now_ms: int) -> Sequence[PoolAnswer] | PoolView | None:
        match step.what:
            case Call(operations):
                return self.queue.call(step.node, operations, now_ms)
            case Beat() as beat:
                return self.queue.beat(step.node, self.beat_of(step, beat), now_ms)
            case Announce(requests, leases):
                return self.queue.announce(step.node, requests[:leases], requests[leases:], now_ms)
            case Leave():
                self.queue.leave(step.node, now_ms)
                return None


class Pooled:
    """A ``RedisPool`` on the test's clock, called from outside a loop."""

    def __init__(self, url: str, runner: asyncio.Runner, prefix: str) -> None:
        self.now_ms = 0
        self._runner = runner
        self._pool = RedisPool(url, SIZES, BOUNDS, prefix=prefix, clock_ms=lambda: self.now_ms)

    def carry_out(
        self, oracle: Oracle, step: Step, now_ms: int
    ) -> Sequence[PoolAnswer] | PoolView | None:
        self.now_ms = now_ms
        return self._runner.run(self._carry_out(oracle, step))

    async def _carry_out(
        self, oracle: Oracle, step: Step
    ) -> Sequence[PoolAnswer] | PoolView | None:
        match step.what:
            case Call(operations):
                return await self._pool.call(step.node, operations)
            case Beat() as beat:
                return await self._pool.beat(step.node, oracle.beat_of(step, beat))
            case Announce(requests, leases):
                return await self._pool.announce(step.node, requests[:leases], requests[leases:])
            case Leave():
                await self._pool.leave(step.node)
                return None

    def close(self) -> None:
        self._runner.run(self._pool.close())


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


PREFIXES = itertools.count()


@given(st.lists(steps, min_size=12, max_size=50))
@settings(max_examples=60)
def test_redis_gives_the_answers_of_the_fair_queue(
    redis_server: Server, runner: asyncio.Runner, history: list[Step]
) -> None:
    oracle, now_ms = Oracle(), START_MS
    redis = Pooled(redis_server.url, runner, f"oracle{next(PREFIXES)}:")
    try:
        for step in history:
            now_ms += step.after_ms
            answered = redis.carry_out(oracle, step, now_ms)
            expected = oracle.carry_out(step, now_ms)
            assert answered == expected, step
    finally:
        redis.close()


def entries_of(queue: FairQueue) -> list[QueueEntry]:
    return list(queue._entries.values())


def check_counts(queue: FairQueue) -> None:
    """Whatever is counted step by step equals what is there."""
    entries, rings = entries_of(queue), queue._rings
    active = [each for each in entries if each.is_active]
    waiting = [each for each in entries if not each.is_active]
    assert rings.active == Counter(each.pool for each in active)
    assert rings.waiting == Counter(each.pool for each in waiting)
    assert rings.waiting_of_tenant == Counter(each.user.tenant for each in waiting)
    assert (rings.active_total, rings.waiting_total) == (len(active), len(waiting))
    for node in queue._nodes.values():
        own = [each for each in entries if each.node is node]
        leased = [each.crc for each in own if each.state == "leased"]
        assert (node.leases, node.leases_sum) == (len(leased), sum(leased))
        assert node.waiting == len(own) - len(leased)
        assert node.waiting_sum == sum(each.crc for each in own) - sum(leased)
        assert set(node.granted) == {e.reply_id for e in own if e.state == "granted"}
        assert set(node.set_aside) == {e.reply_id for e in own if e.state == "set_aside"}
    for user in {id(each.user): each.user for each in entries}.values():
        assert user.active == sum(each.user is user for each in active)
        assert user.waiting == sum(each.user is user for each in waiting)
        for waits in user.lists.values():
            places = [each.place for each in waits.values()]
            assert places == sorted(places)
    assert set(rings._users) == {(each.user.tenant, each.user.name) for each in entries}


def check_invariant(queue: FairQueue) -> None:
    """Free capacity: nobody below the limit waits at a node that gets grants."""
    if queue._now_ms < queue._no_grants_until_ms or queue._passed_over >= PASSED_OVER_MAX:
        return
    for entry in entries_of(queue):
        if entry.is_active or not entry.user.is_below_limit:
            continue
        node = entry.node
        if not node.is_blocked and queue._now_ms - node.beat_ms <= FRESH_MS:
            assert not queue._has_room(entry.pool), f"{entry.reply_id} waits beside free capacity"


@given(st.lists(steps, min_size=12, max_size=50))
@settings(max_examples=80)
def test_free_capacity_leaves_nobody_waiting_and_counts_are_true(history: list[Step]) -> None:
    oracle, now_ms = Oracle(rebuilds=False), START_MS
    for step in history:
        now_ms += step.after_ms
        oracle.carry_out(step, now_ms)
        check_counts(oracle.queue)
        check_invariant(oracle.queue)


@given(st.lists(steps, min_size=12, max_size=50), st.integers(1, 3))
@settings(max_examples=60)
def test_no_user_and_no_pool_is_ever_above_its_limit(history: list[Step], limit: int) -> None:
    """Announcements apart: a node that runs something has it."""
    oracle, now_ms = Oracle(rebuilds=False), START_MS
    for step in history:
        if isinstance(step.what, Announce):
            continue
        if isinstance(step.what, Call):
            fixed = tuple(
                Admit(each.request._replace(user_limit=limit)) if isinstance(each, Admit) else each
                for each in step.what.operations
            )
            step = step._replace(what=Call(fixed))
        now_ms += step.after_ms
        oracle.carry_out(step, now_ms)
        rings = oracle.queue._rings
        assert rings.active_total <= SIZES.total
        assert all(count <= SIZES.of(pool) for pool, count in rings.active.items())
        assert all(each.user.active <= limit for each in entries_of(oracle.queue))


TENANTS, USERS = 4, 3


@given(
    st.lists(st.tuples(st.integers(0, TENANTS - 1), st.integers(0, USERS - 1)), max_size=80),
    st.integers(0, 11),
    st.data(),
)
@settings(max_examples=60)
@example([(0, 0)] * 60, 0, None)
def test_nobody_starves_whatever_the_others_send(
    arrivals: list[tuple[int, int]], ahead: int, data: st.DataObject | None
) -> None:
    """Others send as much as they like before and after: the victim's only request is
    granted after at most one turn of every tenant for every user of its own.
    """
    queue = FairQueue(PoolSizes(3), QueueBounds(), rebuilds=False)
    numbers = itertools.count()
    fillers = [PoolRequest(f"b{n}", "other", "other", 0) for n in range(3)]
    queue.announce("b", fillers, (), 0)
    running = [each.reply_id for each in fillers]

    def admit(tenant: int, user: int) -> None:
        request = PoolRequest(f"r{next(numbers)}", f"t{tenant}", f"u{user}", 2, capped=False)
        (answer,) = queue.call("a", [Admit(request)], 0)
        if isinstance(answer, Admitted) and answer.leased:
            running.append(request.reply_id)

    for tenant, user in arrivals[:ahead]:
        admit(tenant, user)
    queue.call("a", [Admit(PoolRequest("victim", "t0", "victim", 1))], 0)
    queue.wakes.clear()
    turns, left = 0, arrivals[ahead:]
    while not any(wake[1] == "victim" for wake in queue.wakes):
        turns += 1
        assert turns <= TENANTS * (USERS + 1), "it starves"
        if left:
            admit(*left.pop())
        if running:
            which = data.draw(st.integers(0, len(running) - 1)) if data else 0
            gone = running.pop(which)
            queue.call("b" if gone.startswith("b") else "a", [Release(gone)], 0)
        for _, reply_id, _ in queue.wakes:
            if reply_id not in running:
                queue.call("a", [Confirm(reply_id)], 0)
                running.append(reply_id)
        queue.wakes[:] = [wake for wake in queue.wakes if wake[1] == "victim"]
    event(f"turns: {turns}")
