"""A node's side of the pool, on virtual time, against a pool that fails on demand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from pool_rig import PoolLink, PoolServer

from holdfast.errors import Unavailable
from holdfast.streaming.pool.contract import (
    Admit,
    Confirm,
    PoolAnswer,
    PoolOperation,
    PoolRequest,
    PoolSizes,
    QueueBounds,
    Release,
)
from holdfast.streaming.pool.leases import NodeLeases
from holdfast.streaming.pool.memory import MemoryPool
from holdfast.streaming.pool.places import PlaceReleased, PoolPlace, QueueFull
from proof.virtual_loop import LoopClock

SIZES, BOUNDS = PoolSizes(3, {"own": 1}), QueueBounds(20, 20, 4)


def request(reply_id: str, user: str = "u", pool: str = "default", limit: int = 0) -> PoolRequest:
    return PoolRequest(reply_id, "t", user, limit, pool)


class Nodes:
    """A server and its nodes, each with a way there that can be cut."""

    def __init__(self, sizes: PoolSizes = SIZES) -> None:
        self.server = PoolServer(sizes, BOUNDS, random.Random(1))
        self.links: dict[str, PoolLink] = {}
        self.clock = LoopClock()
        self.sizes = sizes

    @asynccontextmanager
    async def node(
        self, name: str = "a", link: PoolLink | None = None
    ) -> AsyncIterator[NodeLeases]:
        self.links[name] = link or self.server.link()
        leases = NodeLeases(
            name,
            self.links[name],
            self.sizes,
            self.clock,
            fallback=lambda nodes: MemoryPool(
                self.sizes.share(nodes), BOUNDS.share(nodes), self.clock
            ),
        )
        async with leases.running():
            await asyncio.sleep(3.1)  # a new pool waits for its nodes
            yield leases


async def leased(leases: NodeLeases, *reply_ids: str, user: str = "filler") -> list[PoolPlace]:
    places = [leases.ask(request(each, user)) for each in reply_ids]
    for place in places:
        await place.granted()
    return places


async def is_granted(place: PoolPlace, within_seconds: float) -> bool:
    """Without giving the place up."""
    waiting = asyncio.ensure_future(place.granted())
    await asyncio.wait([waiting], timeout=within_seconds)
    if not waiting.done():
        return False
    await waiting
    return True


async def test_place_is_leased_or_waits_and_follows_the_queue() -> None:
    nodes = Nodes()
    async with nodes.node() as leases:
        await leased(leases, "r1", "r2", "r3")
        first, second = leases.ask(request("w1")), leases.ask(request("w2"))
        await second.decided()
        assert (first.waiting, second.waiting) == (True, True)
        assert (first.position, second.position) == (1, 2)
        leases.release("r1")
        await first.granted()
        assert (first.waiting, first.position, first.eta_seconds) == (False, 0, None)
        await asyncio.sleep(1.1)
        assert second.position == 1


async def test_place_reports_each_change_without_a_task() -> None:
    async with Nodes().node() as leases:
        await leased(leases, "r1", "r2", "r3")
        place, states = leases.ask(request("w1")), list[str]()
        place.on_change = lambda: states.append(place.state)
        await asyncio.sleep(0.1)
        leases.release("r1")
        await asyncio.sleep(0.1)
        leases.release("w1")
        assert states == ["waiting", "leased", "released"]


async def test_place_may_be_released_while_it_reports_a_change() -> None:
    nodes = Nodes()
    async with nodes.node() as leases:
        await leased(leases, "r1", "r2", "r3")
        place = leases.ask(request("w1"))
        place.on_change = lambda: leases.release("w1")
        await asyncio.sleep(2.5)
        assert place.state == "released" and "w1" not in nodes.server.queue._entries
        assert leases._places.beat()[2:4] == (0, 0), "its sums are true"


async def test_operations_of_one_turn_are_one_call() -> None:
    nodes = Nodes()
    async with nodes.node() as leases:
        await asyncio.sleep(0.5)
        before = nodes.links["a"].calls
        await leased(leases, *(f"r{n}" for n in range(3)))
        for n in range(3):
            leases.release(f"r{n}")
        await asyncio.sleep(0.1)
        assert nodes.links["a"].calls == before + 2


async def test_full_queue_says_whose_bound_it_was() -> None:
    async with Nodes().node() as leases:
        await leased(leases, "r1", "r2", "r3")
        places = [leases.ask(request(f"w{n}")) for n in range(5)]
        for place in places[:4]:
            await place.decided()
        with pytest.raises(QueueFull) as full:
            await places[4].decided()
        assert full.value.cause == "user"
        leases.release("w4")  # nothing happens


@pytest.mark.parametrize("state", ["asked", "waiting", "granted"])
async def test_waiter_that_goes_away_releases_its_place(state: str) -> None:
    nodes = Nodes()
    async with nodes.node() as leases:
        await leased(leases, "r1", "r2", "r3")
        place = leases.ask(request("w1"))
        waiting = asyncio.create_task(place.granted())
        await asyncio.sleep(0 if state == "asked" else 0.1)
        if state == "granted":
            leases.release("r1")
            await asyncio.sleep(0.0011)  # carried out, and the answer on its way
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert place.state == "released"
        await asyncio.sleep(1.5)
        assert "w1" not in nodes.server.queue._entries
        assert nodes.server.freed == {}, "the node released it itself"


async def test_release_by_another_ends_the_wait() -> None:
    async with Nodes().node() as leases:
        await leased(leases, "r1", "r2", "r3")
        place = leases.ask(request("w1"))
        waiting = asyncio.create_task(place.granted())
        await asyncio.sleep(0.1)
        leases.release("w1")
        with pytest.raises(PlaceReleased):
            await waiting
        leases.release("w1")
        with pytest.raises(PlaceReleased):
            await leases.move("w1", "own")


async def test_id_that_asks_again_gives_up_its_place() -> None:
    nodes = Nodes()
    async with nodes.node() as leases:
        (first,) = await leased(leases, "r1")
        second = leases.ask(request("r1", "another"))
        await second.granted()
        assert first.state == "released"
        await asyncio.sleep(1.1)
        assert nodes.server.queue._entries["r1"].user.name == "another"
        assert nodes.server.freed == {} and leases.status().active["default"] == 1


async def test_move_returns_when_it_is_leased_in_the_other_pool() -> None:
    nodes = Nodes()
    async with nodes.node() as leases:
        own = leases.ask(request("own", pool="own"))
        await own.granted()
        await leased(leases, "r1")
        moving = asyncio.create_task(leases.move("r1", "own"))
        await asyncio.sleep(0.1)
        assert not moving.done() and nodes.server.queue._rings.active == {"own": 1}
        leases.release("own")
        await asyncio.wait_for(moving, 1)
        assert nodes.server.queue._rings.active == {"own": 1}
        await leases.move("r1", "own")


async def test_lost_wake_up_costs_a_second_at_most() -> None:
    nodes = Nodes()
    async with nodes.node() as leases:
        await leased(leases, "r1", "r2", "r3")
        place = leases.ask(request("w1"))
        await place.decided()
        nodes.server.wake_delay_seconds = 1e6
        leases.release("r1")
        assert await is_granted(place, 1.1)


class LosesAnswers(PoolLink):
    """Loses the answer to the next call with an operation of this kind."""

    def __init__(self, server: PoolServer) -> None:
        super().__init__(server)
        self.loses: type[PoolOperation] | None = None

    async def call(self, node: str, operations: Sequence[PoolOperation]) -> Sequence[PoolAnswer]:
        if self.loses is not None and any(isinstance(each, self.loses) for each in operations):
            self.loses = None
            self._server.answers_lost = 1.0
            try:
                return await super().call(node, operations)
            finally:
                self._server.answers_lost = 0.0
        return await super().call(node, operations)


@pytest.mark.parametrize("kind", [Admit, Confirm, Release])
async def test_lost_answer_is_made_good_by_the_next_heartbeat(kind: type[PoolOperation]) -> None:
    nodes = Nodes()
    link = LosesAnswers(nodes.server)
    async with nodes.node(link=link) as leases:
        await leased(leases, "r1", "r2")
        if kind is not Admit:
            await leased(leases, "r3")
        link.loses = kind
        place = leases.ask(request("w1"))
        leases.release("r1")
        assert await is_granted(place, 1.5)
        await asyncio.sleep(2.1)
        entries = nodes.server.queue._entries
        assert entries["w1"].state == "leased" and "r1" not in entries
        assert leases.shared_up


@pytest.mark.parametrize("late", [Admit, Confirm])
async def test_late_answer_with_a_lease_is_confirmed_first(late: type[PoolOperation]) -> None:
    """The node stood still between the call and its answer."""

    class Clock(LoopClock):
        jump = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.jump

    class Watched(PoolLink):
        seen: list[PoolOperation]

        async def call(
            self, node: str, operations: Sequence[PoolOperation]
        ) -> Sequence[PoolAnswer]:
            self.seen.extend(operations)
            answers = await super().call(node, operations)
            if isinstance(operations[0], late) and not nodes.clock.jump:  # type: ignore[attr-defined]
                nodes.clock.jump = 2.5  # type: ignore[attr-defined]
            return answers

    nodes = Nodes()
    nodes.clock = Clock()
    link = Watched(nodes.server)
    link.seen = []
    async with nodes.node(link=link) as leases:
        if late is Confirm:
            await leased(leases, "r1", "r2", "r3")
            link.seen.clear()
        place = leases.ask(request("w1"))
        await asyncio.sleep(0.1)
        leases.release("r1")
        await place.granted()
        asked = [type(each) for each in link.seen if each != Release("r1")]
        assert asked == [Admit, Confirm] + [Confirm] * (late is Confirm)


async def test_flushed_pool_is_rebuilt_within_five_seconds() -> None:
    nodes = Nodes()
    async with nodes.node("a") as a, nodes.node("b") as b:
        await leased(a, "a1", "a2")
        await leased(b, "b1")
        place = b.ask(request("b2"))
        await place.decided()
        nodes.server.flush()
        await asyncio.sleep(1.5)
        entries = nodes.server.queue._entries
        assert {each: entry.state for each, entry in entries.items()} == {
            "a1": "leased", "a2": "leased", "b1": "leased", "b2": "waiting"
        }  # fmt: skip
        a.release("a1")
        assert await is_granted(place, 5)


async def test_after_a_flush_nobody_is_missing_until_all_had_time_to_announce() -> None:
    nodes = Nodes()
    async with nodes.node("a"), nodes.node("b") as b:
        await asyncio.sleep(5)
        assert b.knows_since(0) and list(b.nodes) == ["a", "b"]
        nodes.links["a"].is_cut = True
        nodes.server.flush()
        await asyncio.sleep(1.1)
        assert list(b.nodes) == ["b"] and not b.knows_since(0)
        nodes.links["a"].is_cut = False
        await asyncio.sleep(4)
        assert b.knows_since(0) and list(b.nodes) == ["a", "b"]


async def test_node_that_was_presumed_dead_announces_itself_and_goes_on() -> None:
    nodes = Nodes()
    async with nodes.node("a") as a, nodes.node("b") as b:
        await leased(a, "a1", "a2")
        nodes.links["a"].is_cut = True
        await asyncio.sleep(12)
        assert list(b.nodes) == ["b"]
        assert set(nodes.server.freed) == {"node_dead"}
        await leased(b, "b1", "b2", "b3")
        nodes.links["a"].is_cut = False
        await asyncio.sleep(2.5)
        assert a.shared_up and list(a.nodes) == ["a", "b"]
        place = b.ask(request("b4"))
        b.release("b1")
        b.release("b2")
        assert not await is_granted(place, 1.5), "five were active, of three"
        b.release("b3")
        assert await is_granted(place, 1.5)


async def test_node_that_stood_still_and_was_freed_announces_itself() -> None:
    """Unlike one that was cut off, it has not gone on alone meanwhile."""
    nodes = Nodes()
    async with nodes.node("a") as a, nodes.node("b"):
        await leased(a, "a1", "a2", "a3")
        waits = a.ask(request("a4"))
        await waits.decided()
        nodes.server.carry_out(lambda queue, now: queue.leave("a", now))
        await asyncio.sleep(1.1)
        states = {each: entry.state for each, entry in nodes.server.queue._entries.items()}
        assert states == dict.fromkeys(("a1", "a2", "a3"), "leased") | {"a4": "waiting"}
        a.release("a1")
        assert await is_granted(waits, 1.5)


class TestFallback:
    """The shared pool is unavailable."""

    @pytest.mark.parametrize("how", ["down", "paused", "cut"])
    async def test_waiting_and_new_requests_run_with_a_share_and_come_back(self, how: str) -> None:
        nodes = Nodes(PoolSizes(6))
        async with nodes.node("a") as a, nodes.node("b"):
            await asyncio.sleep(1.1)
            await leased(a, *(f"r{n}" for n in range(6)))
            waits = a.ask(request("w1"))
            await waits.decided()
            self.begin(nodes, how)
            await asyncio.sleep(2.5)
            assert not a.shared_up and list(a.nodes) == ["a", "b"]
            new = a.ask(request("n1", "v"))
            await new.decided()
            for n in range(3):
                a.release(f"r{n}")
            assert not await is_granted(waits, 1), "three of three run here"
            a.release("r3")
            assert await is_granted(waits, 1) and not await is_granted(new, 1)
            status = a.status()
            assert (status.active, status.state) == ({"default": 3}, {"default": "exhausted"})
            self.end(nodes, how)
            assert await is_granted(new, 5)
            assert a.shared_up and a.status().state == {"default": "healthy"}
            states = {each: entry.state for each, entry in nodes.server.queue._entries.items()}
            assert states == {"r4": "leased", "r5": "leased", "w1": "leased", "n1": "leased"}

    def begin(self, nodes: Nodes, how: str) -> None:
        nodes.server.is_down = how == "down"
        if how == "paused":
            nodes.server.pause()
        for link in nodes.links.values():
            link.is_cut = how == "cut"

    def end(self, nodes: Nodes, how: str) -> None:
        self.begin(nodes, "")
        nodes.server.resume()

    async def test_user_has_its_share_of_its_limit_rounded_up(self) -> None:
        nodes = Nodes(PoolSizes(90))
        async with nodes.node("a") as a, nodes.node("b"):
            await asyncio.sleep(1.1)
            nodes.server.is_down = True
            await asyncio.sleep(2.5)
            places = [a.ask(request(f"r{n}", limit=3)) for n in range(4)]
            for place in places:
                await place.decided()
            assert [place.waiting for place in places] == [False, False, True, True]

    async def test_blip_shorter_than_a_second_changes_nothing(self) -> None:
        nodes = Nodes()
        async with nodes.node() as leases:
            await leased(leases, "r1")
            nodes.server.is_down = True
            place = leases.ask(request("w1"))
            await asyncio.sleep(0.9)
            assert place.state == "asked"
            nodes.server.is_down = False
            assert await is_granted(place, 0.5)
            assert leases.shared_up and nodes.server.queue._entries["w1"].state == "leased"

    async def test_local_pool_does_not_wait_for_a_silent_server(self) -> None:
        nodes = Nodes()
        async with nodes.node() as leases:
            nodes.server.pause()
            await asyncio.sleep(4)
            for n in range(30):
                started = nodes.clock.monotonic()
                place = leases.ask(request(f"r{n}"))
                await place.granted()
                leases.release(f"r{n}")
                assert nodes.clock.monotonic() - started < 0.1
                await asyncio.sleep(0.1)

    async def test_other_nodes_cannot_be_asked(self) -> None:
        nodes = Nodes()
        async with nodes.node() as leases:
            nodes.server.is_down = True
            await asyncio.sleep(3)
            for asking in (leases.locate("r1"), leases.cancel_elsewhere("r1", "b")):
                with pytest.raises(Unavailable):
                    await asking

    @pytest.mark.parametrize("how", ["down", "paused"])
    async def test_question_about_other_nodes_never_gets_a_local_answer(self, how: str) -> None:
        nodes = Nodes()
        async with nodes.node() as leases:
            self.begin(nodes, how)
            with pytest.raises(Unavailable):
                async with asyncio.timeout(2.5):
                    await leases.locate("r1")

    async def test_node_that_starts_without_it_uses_the_nodes_it_knew(self) -> None:
        server = PoolServer(SIZES, BOUNDS, random.Random(1))
        server.is_down = True
        clock, shares = LoopClock(), list[int]()

        def fallback(nodes: int) -> MemoryPool:
            shares.append(nodes)
            return MemoryPool(SIZES.share(nodes), BOUNDS.share(nodes), clock)

        leases = NodeLeases(
            "a", server.link(), SIZES, clock, fallback=fallback, nodes_last_seen=lambda: 3
        )
        async with leases.running():
            places = [leases.ask(request(f"r{n}")) for n in range(2)]
            await asyncio.sleep(2)
            assert shares == [3] and [place.waiting for place in places] == [False, True]


class TestOtherNodes:
    """Readers, cancels and whereabouts."""

    async def test_reader_elsewhere_is_seen_while_there_is_one(self) -> None:
        nodes = Nodes()
        async with nodes.node("a") as a, nodes.node("b") as b:
            for _ in range(2):
                b.reading("r1", "a")
            await asyncio.sleep(2.1)
            assert a.read_elsewhere == {"r1"}
            b.not_reading("r1")
            await asyncio.sleep(5)
            assert a.read_elsewhere == {"r1"}
            b.not_reading("r1")
            b.not_reading("r1")
            await asyncio.sleep(5)
            assert a.read_elsewhere == frozenset()

    @pytest.mark.parametrize("is_lost", [False, True])
    async def test_cancel_reaches_the_producer_once(self, is_lost: bool) -> None:
        nodes = Nodes()
        async with nodes.node("a") as a, nodes.node("b") as b:
            cancelled = list[str]()
            a.on_cancel = cancelled.append
            await leased(a, "r1")
            if is_lost:
                nodes.server.wake_delay_seconds = 1e6
            assert await b.locate("r1") == "a"
            assert await b.cancel_elsewhere("r1", "a")
            await asyncio.sleep(1.1 if is_lost else 0.1)
            assert cancelled == ["r1"]
            await asyncio.sleep(3)
            assert cancelled == ["r1"]
            a.release("r1")
            await asyncio.sleep(0.1)
            assert await b.locate("r1") == ""
            assert not await b.cancel_elsewhere("r1", "a")


async def test_stop_frees_the_leases_at_once() -> None:
    nodes = Nodes()
    async with nodes.node("b") as b:
        async with nodes.node("a") as a:
            await leased(a, "a1", "a2", "a3")
            place = b.ask(request("b1"))
            await place.decided()
        assert await is_granted(place, 0.5)


async def test_eta_is_known_once_there_is_a_rate() -> None:
    nodes = Nodes()
    async with nodes.node() as leases:
        running = ["r0", "r1", "r2"]
        await leased(leases, *running)
        for n in range(12):
            leases.ask(request(f"w{n}", f"u{n}"))
        last = leases.ask(request("last", "x"))
        await last.decided()
        assert (last.position, last.eta_seconds) == (13, None)
        for n in range(6):
            leases.release(running.pop(0))
            running.append(f"w{n}")
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.1)
        assert last.position == 7 and last.eta_seconds == pytest.approx(7 / (6 / 28), rel=0.15)


async def test_defect_of_the_pool_is_logged_and_does_not_end_the_node() -> None:
    class Broken(PoolLink):
        is_broken = False

        async def call(
            self, node: str, operations: Sequence[PoolOperation]
        ) -> Sequence[PoolAnswer]:
            if self.is_broken:
                raise RuntimeError("a defect")
            return await super().call(node, operations)

    nodes = Nodes()
    link = Broken(nodes.server)
    async with nodes.node(link=link) as leases:
        link.is_broken = True
        place = leases.ask(request("r1"))
        await place.decided()
        link.is_broken = False
        assert await is_granted(place, 3)


async def test_pool_in_this_process_answers_in_the_same_turn() -> None:
    clock = LoopClock()
    pool = MemoryPool(SIZES, BOUNDS, clock)
    leases = NodeLeases("a", pool, SIZES, clock)
    early = leases.ask(request("r0"))
    assert early.state == "asked", "nothing is sent before the node's first heartbeat"
    async with leases.running():
        await early.granted()
        assert leases.ask(request("r1")).state == "leased"
        assert leases.ask(request("r2")).state == "leased"
        third, fourth = leases.ask(request("r3")), leases.ask(request("r4"))
        assert (third.state, third.position) == ("waiting", 1)
        assert (fourth.state, fourth.position) == ("waiting", 2)
        leases.release("r1")
        assert third.is_confirming, "the grant came within the call of the release"
        await third.granted()
        leases.release("r2")
        leases.release("r4")  # while its grant is being confirmed
        assert leases.ask(request("r5")).state == "asked", "what waits to be sent goes first"
        await asyncio.sleep(1.1)
        assert leases.status().active["default"] == 3
        assert leases.status().depth["default"] == 0
