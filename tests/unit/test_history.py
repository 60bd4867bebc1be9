"""Reads for sessions: pages, resets, proofs of a rollback, resumes within a budget,
bounds, the reads' own breaker.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from scripted_durability import ANNA, BELA, CHAT, CLEO, create_chat
from store_rigs import act, operator
from structlog.testing import capture_logs

from holdfast.access.proofs import CursorProofs
from holdfast.bounds import KIB
from holdfast.errors import InternalError, NotAMember, RateLimited, ServerBusy, Unavailable
from holdfast.history.history import ChatHistory, HistorySettings
from holdfast.history.semaphore import FairSemaphore
from holdfast.message import Cursor, Draft, User
from holdfast.resilience import BreakerState
from holdfast.store.commands import CreateChat, RaiseEpoch, RecoverChat, RemoveMember
from holdfast.store.memory import MemoryStore
from holdfast.telemetry import REGISTRY
from proof.faults import Fault, FaultPlan, Odds, faulty
from proof.virtual_loop import LoopClock

OTHER = User("other", "olaf")
PROOFS = CursorProofs(b"test")


def proof_of(cursor: Cursor, chat_id: str = CHAT) -> str:
    return PROOFS.of(ANNA.tenant, chat_id, cursor)


async def raise_no_epoch(user: User, chat_id: str, epoch: int, deadline: float) -> None:
    raise AssertionError


class Bench:
    """A history over a memory store whose reads the plan may disturb."""

    def __init__(self, settings: HistorySettings | None = None, **odds: Odds) -> None:
        self.store = MemoryStore()
        self.plan = FaultPlan(random.Random(1), odds)
        self.raised: list[tuple[str, int]] = []
        self.history = ChatHistory(
            faulty(self.store, self.plan), self.raise_epoch, PROOFS, LoopClock(), settings
        )  # type: ignore[arg-type]

    async def raise_epoch(self, user: User, chat_id: str, epoch: int, deadline: float) -> None:
        self.raised.append((chat_id, epoch))
        await self.store.change(RaiseEpoch(operator(), chat_id, epoch))

    async def fill(self, count: int, chat_id: str = CHAT, content: str = "hello") -> Cursor:
        for n in range(count):
            await self.store.append(
                [
                    Draft(
                        ANNA,
                        chat_id,
                        f"key-{n}",
                        content,
                        "text/plain",
                        f"msg_{n}",
                        "2027-01-15T08:00:00.000Z",
                    )
                ]
            )
        return (await self.store.heads([chat_id]))[chat_id]


@asynccontextmanager
async def reading(
    settings: HistorySettings | None = None, page_bytes_max: int = 256 * KIB, **odds: Odds
) -> AsyncIterator[Bench]:
    bench = Bench(settings, **odds)
    bench.history._page_bytes_max = page_bytes_max
    await create_chat(bench.store, ANNA, BELA)
    yield bench


def shown_up() -> bool:
    return REGISTRY.get_sample_value("holdfast_dependency_up", {"dependency": "store_reads"}) == 1


def sequences(page: Any) -> list[int]:
    return [message.sequence for message in page.messages]


async def test_a_page_follows_its_cursor() -> None:
    async with reading() as bench:
        head = await bench.fill(5)
        page = await bench.history.sync(BELA, CHAT, Cursor(head.epoch, 2), 2)
        assert (sequences(page), page.through, page.has_more, page.head, page.reset) == (
            [3, 4],
            4,
            True,
            5,
            False,
        )


async def test_another_epoch_starts_again_from_zero() -> None:
    async with reading() as bench:
        head = await bench.fill(5)
        page = await bench.history.sync(BELA, CHAT, Cursor(head.epoch + 1, 4), 100)
        assert (sequences(page), page.reset, page.epoch) == ([1, 2, 3, 4, 5], True, head.epoch)
        assert bench.raised == []


async def test_proven_cursor_beyond_the_head_raises_the_epoch_and_is_never_clamped() -> None:
    async with reading() as bench:
        head = await bench.fill(5)
        beyond = Cursor(head.epoch, 9)
        page = await bench.history.sync(BELA, CHAT, beyond, 100, proof=proof_of(beyond))
        assert bench.raised == [(CHAT, head.epoch)]
        assert (sequences(page), page.reset, page.epoch) == ([1, 2, 3, 4, 5], True, head.epoch + 1)
        again = await bench.history.sync(ANNA, CHAT, beyond, 100, proof=proof_of(beyond))
        assert again.reset and bench.raised == [(CHAT, head.epoch)], "many proofs raise it once"
        second = Cursor(head.epoch + 1, 7)
        page = await bench.history.sync(BELA, CHAT, second, 100, proof=proof_of(second))
        assert page.reset and page.epoch == head.epoch + 2, (
            "a second rollback is as real as the first"
        )


OF_OTHERS = [
    proof_of(Cursor(1, 8)),
    proof_of(Cursor(2, 9)),
    proof_of(Cursor(1, 9), "chat_other"),
    PROOFS.of(OTHER.tenant, CHAT, Cursor(1, 9)),
    CursorProofs(b"another secret").of(ANNA.tenant, CHAT, Cursor(1, 9)),
]


@pytest.mark.parametrize("verb", ["sync", "resume"])
@pytest.mark.parametrize("proof", [None, "", "é", "0" * 16, *OF_OTHERS])
async def test_made_up_cursor_resets_the_device_that_shows_it_and_nobody_else(
    verb: str, proof: str | None
) -> None:
    async with reading() as bench:
        head = await bench.fill(5)
        beyond = Cursor(head.epoch, 9)
        before = REGISTRY.get_sample_value("holdfast_durability_cursors_unproven_total") or 0
        if verb == "sync":
            page = await bench.history.sync(BELA, CHAT, beyond, 100, proof=proof)
        else:
            proofs = {} if proof is None else {CHAT: proof}
            (page,) = (await bench.history.resume(BELA, {CHAT: beyond}, proofs=proofs)).pages
        assert (sequences(page), page.reset, page.epoch) == ([1, 2, 3, 4, 5], True, head.epoch)
        assert bench.raised == []
        assert REGISTRY.get_sample_value("holdfast_durability_cursors_unproven_total") == before + 1
        assert not (await bench.history.sync(ANNA, CHAT, Cursor(head.epoch, 3), 100)).reset


async def test_user_gets_ten_resets_a_minute_for_made_up_cursors() -> None:
    async with reading() as bench:
        head = await bench.fill(5)
        beyond = Cursor(head.epoch, 9)
        for _ in range(5):
            assert (await bench.history.sync(BELA, CHAT, beyond, 100)).reset
            assert (await bench.history.resume(BELA, {CHAT: beyond})).pages[0].reset
        for ask in (
            bench.history.sync(BELA, CHAT, beyond, 100),
            bench.history.resume(BELA, {CHAT: beyond}),
        ):
            with pytest.raises(RateLimited) as refused:
                await ask
            assert 1 <= (refused.value.retry_after_seconds or 0) <= 6
        assert (await bench.history.sync(ANNA, CHAT, beyond, 100)).reset, (
            "another user is not concerned"
        )
        page = await bench.history.sync(BELA, CHAT, beyond, 100, proof=proof_of(beyond))
        assert page.epoch == head.epoch + 1, "nor is who has a proof"
        await asyncio.sleep(6)
        assert (await bench.history.sync(BELA, CHAT, Cursor(head.epoch + 1, 9), 100)).reset


async def test_a_resume_counts_as_one_reset_however_many_cursors_are_beyond_their_heads() -> None:
    async with reading() as bench:
        cursors = {CHAT: Cursor((await bench.fill(1)).epoch, 9)}
        for n in range(11):
            await create_chat(bench.store, ANNA, BELA, chat_id=f"c{n}")
            cursors[f"c{n}"] = Cursor((await bench.store.heads([f"c{n}"]))[f"c{n}"].epoch, 9)
        for _ in range(10):
            assert all(page.reset for page in (await bench.history.resume(BELA, cursors)).pages)
        with pytest.raises(RateLimited):
            await bench.history.resume(BELA, cursors)


async def test_many_made_up_cursors_log_one_warning_a_minute() -> None:
    with capture_logs() as logged:
        async with reading() as bench:
            head = await bench.fill(5)
            for _ in range(8):
                await bench.history.sync(BELA, CHAT, Cursor(head.epoch, 9), 100)
            await asyncio.sleep(60)
            await bench.history.sync(BELA, CHAT, Cursor(head.epoch, 9), 100)
    warnings = [line for line in logged if line["event"] == "store.cursor_unproven"]
    assert [line["requests"] for line in warnings] == [1, 8]
    assert all(line["log_level"] == "warning" for line in warnings)


async def test_every_page_carries_the_proof_of_its_end() -> None:
    async with reading() as bench:
        head = await bench.fill(5)
        page = await bench.history.sync(BELA, CHAT, Cursor(head.epoch, 1), 2)
        assert page.proof == proof_of(Cursor(head.epoch, 3))
        (page,) = (await bench.history.resume(BELA, {CHAT: Cursor(head.epoch, 1)})).pages
        assert page.proof == proof_of(head)


async def test_members_proving_the_same_rollback_share_one_raise_and_are_all_answered() -> None:
    """After a rollback everybody reconnects; one that gives up affects no other."""

    async with reading() as bench:
        head, begun, may_end = await bench.fill(5), asyncio.Event(), asyncio.Event()

        async def slowly(user: User, chat_id: str, epoch: int, deadline: float) -> None:
            begun.set()
            await may_end.wait()
            await bench.raise_epoch(user, chat_id, epoch, deadline)

        history, beyond = (
            ChatHistory(bench.store, slowly, PROOFS, LoopClock()),
            Cursor(head.epoch, 9),
        )
        first = asyncio.create_task(
            history.resume(ANNA, {CHAT: beyond}, proofs={CHAT: proof_of(beyond)})
        )
        await begun.wait()
        others = [
            asyncio.create_task(
                history.resume(BELA, {CHAT: beyond}, proofs={CHAT: proof_of(beyond)})
            )
            for _ in range(3)
        ]
        stale = asyncio.create_task(history._rollbacks.raise_epoch(ANNA, CHAT, beyond, head, 5.0))
        await asyncio.sleep(0.1)
        first.cancel()
        may_end.set()
        for read in await asyncio.gather(*others):
            assert [(page.epoch, page.reset) for page in read.pages] == [(head.epoch + 1, True)]
        assert (await stale).epoch == head.epoch + 1
        late = await history._rollbacks.raise_epoch(BELA, CHAT, beyond, head, 5.0)
        assert late.epoch == head.epoch + 1, "its head was read before the raise was committed"
        assert bench.raised == [(CHAT, head.epoch)]


async def test_a_raise_that_did_not_last_is_done_again() -> None:
    async with reading() as bench:
        head, lost = await bench.fill(5), [True]

        async def raise_epoch(user: User, chat_id: str, epoch: int, deadline: float) -> None:
            if lost:
                lost.pop()
            else:
                await bench.raise_epoch(user, chat_id, epoch, deadline)

        history, beyond = (
            ChatHistory(bench.store, raise_epoch, PROOFS, LoopClock()),
            Cursor(head.epoch, 9),
        )
        with pytest.raises(Unavailable):
            await history.sync(BELA, CHAT, beyond, 100, proof=proof_of(beyond))
        assert (
            await history.sync(BELA, CHAT, beyond, 100, proof=proof_of(beyond))
        ).epoch == head.epoch + 1


async def test_who_joins_a_raise_waits_no_longer_than_its_own_time() -> None:
    async with reading() as bench:
        head = await bench.fill(5)

        async def hanging(user: User, chat_id: str, epoch: int, deadline: float) -> None:
            await asyncio.sleep(60)

        history, beyond = (
            ChatHistory(bench.store, hanging, PROOFS, LoopClock()),
            Cursor(head.epoch, 9),
        )
        asking = [
            asyncio.create_task(history.sync(ANNA, CHAT, beyond, 100, asked_at, proof_of(beyond)))
            for asked_at in (0.0, -3.0)
        ]
        with pytest.raises(Unavailable):
            await asking[1]
        assert LoopClock().monotonic() == pytest.approx(2) and not asking[0].done()
        with pytest.raises(Unavailable):
            await asking[0]


async def test_a_sync_is_answered_within_five_seconds_however_many_reads_it_takes() -> None:
    async with reading(
        HistorySettings(read_timeout_seconds=4.5), read_after=Odds(delay=1.0, seconds_max=4.4)
    ) as bench:
        head = await bench.fill(5)
        started = LoopClock().monotonic()
        for n in range(20):
            try:
                await bench.history.sync(BELA, CHAT, Cursor(head.epoch + 1, n), 100)
            except Unavailable:
                pass
            assert LoopClock().monotonic() - started <= 5.001
            started = LoopClock().monotonic()


@pytest.mark.covers("000 gateway to durability 5 s, reads")
@pytest.mark.parametrize("verb", ["sync", "resume"])
async def test_the_time_of_a_request_runs_from_when_it_was_asked_and_through_a_repair(
    verb: str,
) -> None:
    """It waited two seconds for its turn, its cursor proves a rollback, and every step
    takes almost its own limit.
    """

    always = Odds(delay=1.0, seconds_max=2.4)
    async with reading(read_after=always, heads=always, memberships=always) as bench:
        head, clock = await bench.fill(5), LoopClock()

        async def slowly(user: User, chat_id: str, epoch: int, deadline: float) -> None:
            await asyncio.sleep(min(1.9, deadline - clock.monotonic()))
            await bench.raise_epoch(user, chat_id, epoch, deadline)

        history, beyond, asked_at = (
            ChatHistory(bench.history._store, slowly, PROOFS, clock),
            Cursor(head.epoch, 9),
            -2.0,
        )
        with pytest.raises(Unavailable):
            if verb == "sync":
                await history.sync(BELA, CHAT, beyond, 100, asked_at, proof_of(beyond))
            else:
                await history.resume(
                    BELA, {CHAT: beyond}, asked_at, proofs={CHAT: proof_of(beyond)}
                )
        assert clock.monotonic() <= asked_at + 5.001


async def test_a_request_without_any_time_left_says_nothing_about_the_store() -> None:
    async with reading() as bench:
        await bench.fill(5)
        for _ in range(10):
            with pytest.raises(Unavailable):
                await bench.history.sync(BELA, CHAT, Cursor(1, 0), 100, asked_at=-6.0)
        assert bench.history.breaker is BreakerState.CLOSED


async def test_if_the_epoch_cannot_be_raised_nothing_is_answered_in_the_old_one() -> None:
    async with reading() as bench:
        head = await bench.fill(5)

        async def cannot(user: User, chat_id: str, epoch: int, deadline: float) -> None:
            raise Unavailable("the writer is unavailable")

        history, beyond = (
            ChatHistory(bench.store, cannot, PROOFS, LoopClock()),
            Cursor(head.epoch, 9),
        )
        for _ in range(2):
            with pytest.raises(Unavailable, match="the writer is unavailable"):
                await history.sync(BELA, CHAT, beyond, 100, proof=proof_of(beyond))
        with pytest.raises(Unavailable):
            await history.resume(BELA, {CHAT: beyond}, proofs={CHAT: proof_of(beyond)})


async def test_user_who_is_not_a_member_reads_nothing() -> None:
    async with reading() as bench:
        head = await bench.fill(1)
        with pytest.raises(NotAMember):
            await bench.history.sync(CLEO, CHAT, Cursor(head.epoch, 0), 100)


async def test_a_resume_lists_only_what_moved_what_was_joined_and_what_is_gone() -> None:
    async with reading() as bench:
        for chat_id in ("still", "moved", "joined", "left", "other_epoch", "empty"):
            await create_chat(bench.store, ANNA, BELA, chat_id=chat_id)
        heads = {
            c: await bench.fill(3, c) for c in ("still", "moved", "joined", "left", "other_epoch")
        }
        await bench.store.change(RemoveMember(act(ANNA), "left", "bela"))
        read = await bench.history.resume(
            BELA,
            {
                "still": heads["still"],
                "moved": Cursor(heads["moved"].epoch, 1),
                "left": heads["left"],
                "other_epoch": Cursor(0, 2),
                CHAT: Cursor(heads["still"].epoch, 0),
            },
        )
        assert {p.chat_id: (sequences(p), p.reset) for p in read.pages} == {
            "moved": ([2, 3], False),
            "joined": ([1, 2, 3], False),
            "other_epoch": ([1, 2, 3], True),
        }
        assert sorted(read.joined) == ["empty", "joined"]
        assert read.gone == ["left"]
        assert set(read.heads) == {"still", "empty", CHAT}
        assert read.heads["still"] == heads["still"]


@pytest.mark.parametrize("content", ["x" * 4000, "\x01" * 4000])
async def test_a_resume_carries_one_budget_of_bytes_and_heads_for_the_rest(content: str) -> None:
    async with reading() as bench:
        chats = [f"chat_{n}" for n in range(100, 110)]
        for chat_id in chats:
            await create_chat(bench.store, ANNA, BELA, chat_id=chat_id)
            await bench.fill(20, chat_id, content=content)
        read = await bench.history.resume(BELA, {})
        size = len(msgspec.json.encode(read.pages))
        assert 200 * 1024 < size <= 256 * 1024, "as it is sent"
        assert 0 < len(read.pages) < len(chats)
        assert set(read.heads) | {p.chat_id for p in read.pages} == {CHAT, *chats}
        assert all(read.heads[c].sequence == 20 for c in read.heads if c != CHAT)


async def test_a_rollback_is_proved_by_a_resume_too_whatever_the_budget() -> None:
    async with reading(page_bytes_max=1000) as bench:
        await create_chat(bench.store, ANNA, BELA, chat_id="a")
        await bench.fill(2, "a", content="x" * 900)
        head = await bench.fill(3)
        beyond = Cursor(head.epoch, 7)
        read = await bench.history.resume(BELA, {CHAT: beyond}, proofs={CHAT: proof_of(beyond)})
        assert bench.raised == [(CHAT, head.epoch)]
        places = {p.chat_id: p.epoch for p in read.pages} | {
            c: h.epoch for c, h in read.heads.items()
        }
        assert places[CHAT] == head.epoch + 1


@pytest.mark.covers("000 DynamoDB read (history): graceful")
async def test_a_resume_that_meets_its_deadline_answers_what_it_has() -> None:
    async with reading(read_after=Odds(delay=1.0, seconds_max=1.0)) as bench:
        for n in range(20):
            await create_chat(bench.store, ANNA, BELA, chat_id=f"c{n}")
            await bench.fill(1, f"c{n}")
        started = LoopClock().monotonic()
        read = await bench.history.resume(BELA, {})
        assert LoopClock().monotonic() - started <= 5.0
        assert 0 < len(read.pages) < 20
        assert len(read.heads) == 21 - len(read.pages)


async def test_fifty_resumes_for_one_slot_return_at_spread_times_and_all_succeed() -> None:
    async with reading(HistorySettings(max_resumes=1)) as bench:
        bench.plan.odds = {"memberships": Odds(delay=1.0, seconds_max=0.5)}
        asked_back: list[float] = []

        async def come_back() -> None:
            while True:
                try:
                    await bench.history.resume(BELA, {})
                    return
                except ServerBusy as busy:
                    assert busy.retry_after_seconds is not None
                    asked_back.append(busy.retry_after_seconds)
                    await asyncio.sleep(busy.retry_after_seconds)

        await asyncio.gather(*(come_back() for _ in range(50)))
        first = asked_back[:30]
        assert len(set(first)) > 25 and max(first) - min(first) > 5, (
            "spread, and the more wait the further"
        )
        assert len(asked_back) < 200


@pytest.mark.parametrize(("named", "set_to", "at_once"), [(8, 0, 8), (5, 0, 5), (5, 7, 7)])
async def test_reads_at_once_are_those_the_store_names_unless_an_operator_sets_them(
    named: int, set_to: int, at_once: int
) -> None:
    store, plan = MemoryStore(), FaultPlan(random.Random(1), script={"heads": [Fault.HANG] * 20})
    store.grouping = replace(store.grouping, reads_at_once=named)
    settings = HistorySettings(max_reads=set_to)
    history = ChatHistory(faulty(store, plan), raise_no_epoch, PROOFS, LoopClock(), settings)  # type: ignore[arg-type]
    asked = [asyncio.create_task(history.heads([CHAT])) for _ in range(20)]
    await asyncio.sleep(0.1)
    assert plan.injected() == at_once
    plan.heal()
    await asyncio.gather(*asked)
    with pytest.raises(ValueError, match="max_reads must be 0 or more"):
        HistorySettings(max_reads=-1)


async def test_greedy_tenant_delays_another_by_one_read_not_by_all() -> None:
    """Two slots, a second per read: one tenant has forty waiting as another comes."""

    slow = Odds(delay=1.0, seconds_max=1.0)
    settings = HistorySettings(
        max_reads=2, max_wait_seconds=60, read_timeout_seconds=60, request_timeout_seconds=60
    )
    async with reading(settings, read_after=slow) as bench:
        await bench.store.change(CreateChat(act(OTHER), "chat_o", "group", "Other", []))
        asked = [
            asyncio.create_task(bench.history.sync(BELA, CHAT, Cursor(1, 0), 100))
            for _ in range(40)
        ]
        await asyncio.sleep(0.5)
        before = LoopClock().monotonic()
        await bench.history.sync(OTHER, "chat_o", Cursor(1, 0), 100)
        assert LoopClock().monotonic() - before <= 2, "what was under way, and one's own"
        more = [
            asyncio.create_task(bench.history.sync(OTHER, "chat_o", Cursor(1, 0), 100))
            for _ in range(4)
        ]
        answers = await asyncio.gather(*asked, *more, return_exceptions=True)
        assert not any(isinstance(answer, BaseException) for answer in answers), (
            "and nobody is forgotten"
        )


async def test_who_gives_up_waiting_takes_no_place_along() -> None:
    async with reading():
        gate = FairSemaphore("reads", 1, 60)

        async def pass_through() -> None:
            async with gate.one("a", 60):
                pass

        async with gate.one("a", 60):
            early, late = asyncio.create_task(pass_through()), asyncio.create_task(pass_through())
            await asyncio.sleep(1)
            early.cancel()
            await asyncio.sleep(1)
        late.cancel()  # in the moment in which it has got its place
        await asyncio.gather(early, late, return_exceptions=True)
        before = LoopClock().monotonic()
        await pass_through()
        assert LoopClock().monotonic() == before


async def test_resume_beyond_a_hundred_waits_its_turn_for_a_bounded_time() -> None:
    async with reading() as bench:
        bench.plan.script["memberships"] = [Fault.HANG] * 100
        first = [asyncio.create_task(bench.history.resume(BELA, {})) for _ in range(100)]
        await asyncio.sleep(0.1)
        started = LoopClock().monotonic()
        with pytest.raises(ServerBusy):
            await bench.history.resume(BELA, {})
        assert LoopClock().monotonic() - started == pytest.approx(2)
        next_one = asyncio.create_task(bench.history.resume(BELA, {}))
        await asyncio.sleep(0.1)
        bench.plan.heal()
        await asyncio.gather(*first)
        assert (await next_one).joined == [CHAT]


async def test_a_hanging_read_is_a_retryable_error_in_time() -> None:
    async with reading(read_after=Odds(hang=1.0)) as bench:
        with pytest.raises(Unavailable):
            await bench.history.sync(BELA, CHAT, Cursor(1, 0), 100)
        assert LoopClock().monotonic() == pytest.approx(2.5)


async def test_reads_have_a_breaker_of_their_own_that_refusals_do_not_open() -> None:
    async with reading() as bench:
        for _ in range(20):
            with pytest.raises(NotAMember):
                await bench.history.sync(CLEO, CHAT, Cursor(1, 0), 100)
        assert bench.history.breaker is BreakerState.CLOSED
        bench.plan.script["read_after"] = [Fault.FAIL] * 40
        for _ in range(40):
            with pytest.raises(Unavailable):
                await bench.history.sync(BELA, CHAT, Cursor(1, 0), 100)
        assert bench.history.breaker is BreakerState.OPEN
        with pytest.raises(Unavailable) as refused:
            await bench.history.memberships(BELA)
        assert refused.value.retry_after_seconds == pytest.approx(30)
        assert await bench.store.append(
            [Draft(ANNA, CHAT, "k", "hi", "text/plain", "msg_1", "2027-01-15T08:00:00.000Z")]
        ), "the writer does not care"


async def test_reads_of_a_store_that_others_restart_go_on_when_it_is_back() -> None:
    async with reading() as bench:
        bench.store.grouping = replace(bench.store.grouping, by="shard")
        bench.plan.script["read_after"] = [Fault.FAIL] * 5
        bench.plan.script["heads"] = [Fault.FAIL]
        for _ in range(5):
            with pytest.raises(Unavailable):
                await bench.history.sync(BELA, CHAT, Cursor(1, 0), 100)
        await bench.history.check_recovery()
        assert bench.history.breaker is BreakerState.OPEN, "it is not back"
        await bench.history.check_recovery()
        assert bench.history.breaker is BreakerState.CLOSED


async def test_reads_that_nobody_wants_are_tried_and_shown_as_they_are() -> None:
    async with reading() as bench:
        bench.plan.script["heads"] = [Fault.FAIL]
        await bench.history.probe()
        assert not shown_up() and bench.history.trouble is not None
        await bench.history.probe()
        assert shown_up() and bench.history.trouble is None
        asked = dict(bench.plan.counts)
        await bench.history.probe()
        assert bench.plan.counts == asked, "it worked a moment ago"


async def test_recovered_chat_is_read_again_from_its_beginning() -> None:
    async with reading() as bench:
        head = await bench.fill(3)
        await bench.store.change(RecoverChat(operator(), CHAT))
        page = await bench.history.sync(BELA, CHAT, head, 100)
        assert page.reset and sequences(page) == [1, 2, 3]


async def test_reads_that_fail_by_a_defect_open_the_breaker() -> None:
    async with reading() as bench:

        async def broken(store: Any) -> None:
            raise InternalError("a row makes no sense")

        for _ in range(5):
            with pytest.raises(InternalError):
                await bench.history.ask(broken)
        assert bench.history.breaker is BreakerState.OPEN
