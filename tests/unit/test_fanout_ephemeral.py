"""Typing, presence and receipts: newest wins, one a second, none in large chats,
bounded, never in the way.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import pairwise
from types import FrameType
from typing import Any

import msgspec
import pytest
from scripted_durability import ANNA, BELA, CHAT, CLEO, create_chat
from store_rigs import act

from holdfast.clock import TURN_SECONDS
from holdfast.fanout.bus.contract import Status
from holdfast.fanout.bus.memory import MemoryBus
from holdfast.fanout.ephemeral import GATHER_SECONDS, Ephemeral, EphemeralSettings
from holdfast.fanout.members import Members
from holdfast.fanout.receipts import Receipts
from holdfast.message import LogEntry, Message, User, Watermark
from holdfast.store.commands import AddMember
from holdfast.store.memory import MemoryStore
from proof.faults import Fault, FaultPlan, Odds, faulty
from proof.virtual_loop import LoopClock


class Working(LoopClock):
    """Virtual time that also passes while something works, not only while all wait."""

    worked = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.worked


class Bench:
    """Notes what reaches the sessions, and when."""

    def __init__(self, settings: EphemeralSettings | None = None) -> None:
        self.clock = Working()
        self.seconds_of_a_push = 0.0
        self.store = MemoryStore()
        self.plan = FaultPlan(random.Random(1))
        store = faulty(self.store, self.plan)
        self.members = Members(store.members)
        self.bus = MemoryBus("east")
        self.ephemeral = Ephemeral(self.members, store.memberships, self.clock, self.bus, settings)
        self.ephemeral.connect(self)
        self.sent: list[tuple[object, dict[str, Any]]] = []
        self.at: list[float] = []

    def presence(self, user: User, status: Status) -> None:
        """What the registry says at this moment."""
        self.ephemeral.presence(user, status, int(self.clock.now() * 1_000_000))

    async def push_to_chats(
        self, chat_ids: Iterable[str], key: tuple[str, ...], frame: bytes
    ) -> None:
        for chat_id in chat_ids:
            self._note(chat_id, frame)
        self.clock.worked += self.seconds_of_a_push

    def push_to_user(self, user: User, chat_id: str, key: tuple[str, ...], frame: bytes) -> None:
        self._note(user, frame)

    def _note(self, to: object, frame: bytes) -> None:
        decoded = msgspec.json.decode(frame[frame.index(b"{") :])
        self.sent.append((to, {"type": decoded["type"], **decoded["payload"]}))
        self.at.append(self.clock.monotonic())

    def take(self) -> list[tuple[object, dict[str, Any]]]:
        sent, self.sent, self.at = self.sent, [], []
        return sent


@asynccontextmanager
async def running(settings: EphemeralSettings | None = None) -> AsyncIterator[Bench]:
    bench = Bench(settings)
    await create_chat(bench.store, ANNA, BELA)
    task = asyncio.create_task(bench.ephemeral.run())
    await asyncio.sleep(0)
    yield bench
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def typing(user: User, active: bool, chat_id: str = CHAT) -> tuple[object, dict[str, Any]]:
    return (
        chat_id,
        {"type": "typing", "chat_id": chat_id, "user_id": user.user_id, "active": active},
    )


def message(position: int, sender: User, chat_id: str = CHAT) -> LogEntry:
    text = Message(
        f"msg_{position}",
        chat_id,
        position,
        "text",
        sender.user_id,
        None,
        "hi",
        "text/plain",
        "now",
    )
    return LogEntry(0, position, sender.tenant, text.chat_id, 1, text)


def mark(
    user: User, delivered: int, read: int = 0, device: str = "phone", epoch: int = 1
) -> Watermark:
    return Watermark(user, device, CHAT, epoch, delivered, read)


async def test_typing_is_sent_at_once_and_ends_by_itself_after_ten_seconds() -> None:
    async with running() as bench:
        bench.ephemeral.typing(ANNA, CHAT, True)
        await asyncio.sleep(0.01)
        assert bench.take() == [typing(ANNA, True)]
        await asyncio.sleep(9.9)
        assert bench.take() == []
        await asyncio.sleep(1.2)
        assert bench.take() == [typing(ANNA, False)]
        await asyncio.sleep(60)
        assert bench.take() == []


async def test_a_new_start_keeps_it_alive_and_a_stop_ends_it() -> None:
    async with running() as bench:
        for _ in range(3):
            bench.ephemeral.typing(ANNA, CHAT, True)
            await asyncio.sleep(6)
        bench.ephemeral.typing(ANNA, CHAT, False)
        await asyncio.sleep(30)
        assert [payload["active"] for _, payload in bench.take()] == [True, True, True, False]


async def test_the_newest_wins_and_at_most_one_a_second_leaves() -> None:
    async with running() as bench:
        for n in range(100):
            bench.ephemeral.typing(ANNA, CHAT, n % 2 == 0)
            bench.ephemeral.typing(BELA, CHAT, True)
            await asyncio.sleep(0.05)
        await asyncio.sleep(2)
        annas = [
            at
            for at, (_, payload) in zip(bench.at, bench.sent, strict=True)
            if payload["user_id"] == "anna"
        ]
        assert all(later - earlier >= 1 for earlier, later in pairwise(annas))
        assert 4 <= len(annas) <= 7
        assert [p for _, p in bench.take() if p["user_id"] == "anna"][-1]["active"] is False


async def test_user_typing_in_all_chats_is_shown_in_few_without_delaying_others() -> None:
    async with running() as bench:
        settings = EphemeralSettings()
        for n in range(100):
            await create_chat(bench.store, ANNA, BELA, chat_id=f"chat-{n}")
        began = asyncio.get_running_loop().time()
        for n in range(1_000):  # fifty frames a second of each of her five connections
            bench.ephemeral.typing(ANNA, f"chat-{n // 2 % 100}", n % 2 == 0)
            await asyncio.sleep(0.004)
        bench.ephemeral.typing(BELA, CHAT, True)
        await asyncio.sleep(0.01)
        sent = bench.take()
        most = settings.typing_burst + settings.typing_per_second * (
            asyncio.get_running_loop().time() - began
        )
        assert settings.typing_burst < len(sent) <= most + 1
        assert sent[-1] == typing(BELA, True)
        await asyncio.sleep(settings.typing_seconds + 1)
        last = {
            to: payload["active"]
            for to, payload in [*sent, *bench.take()]
            if payload["user_id"] == "anna"
        }
        assert not any(last.values()), "whatever was dropped: nobody types without end"


async def test_note_sent_more_than_a_second_ago_is_sent_again_at_once() -> None:
    async with running() as bench:
        bench.ephemeral.typing(ANNA, CHAT, True)
        await asyncio.sleep(0.5)
        bench.ephemeral.typing(BELA, CHAT, True)
        await asyncio.sleep(0.8)
        bench.take()
        bench.ephemeral.typing(ANNA, CHAT, False)
        await asyncio.sleep(0.01)
        assert bench.take() == [typing(ANNA, False)]


async def test_a_chat_above_a_hundred_members_hears_nothing() -> None:
    async with running() as bench:
        for chat_id, size in (("large", 101), ("small", 100)):
            await create_chat(bench.store, ANNA, chat_id=chat_id)
            for n in range(size - 1):
                await bench.store.change(AddMember(act(ANNA), chat_id, f"user-{n}"))
            bench.ephemeral.typing(ANNA, chat_id, True)
        await asyncio.sleep(1)
        assert {to for to, _ in bench.take()} == {"small"}
        bench.presence(ANNA, "online")
        await asyncio.sleep(1)
        assert {to for to, _ in bench.take()} == {"small", CHAT}


async def test_presence_goes_to_the_chats_one_shares_with_the_time_last_seen() -> None:
    async with running() as bench:
        await create_chat(bench.store, BELA, CLEO, chat_id="other", owner=BELA)
        bench.presence(ANNA, "online")
        await asyncio.sleep(GATHER_SECONDS / 2)
        assert bench.take() == []
        await asyncio.sleep(GATHER_SECONDS)
        ((to, payload),) = bench.take()
        assert to == CHAT
        assert (payload["user_id"], payload["status"]) == ("anna", "online")
        assert payload["last_seen"] == bench.ephemeral.last_seen(ANNA)
        assert bench.ephemeral.last_seen(BELA) is None


async def test_short_absence_is_sent_as_its_end() -> None:
    async with running() as bench:
        bench.presence(ANNA, "online")
        await asyncio.sleep(0.1)
        bench.presence(ANNA, "offline")
        bench.presence(ANNA, "online")
        await asyncio.sleep(2)
        assert [payload["status"] for _, payload in bench.take()] == ["online", "online"]


async def test_a_storm_of_arrivals_does_not_hold_up_typing() -> None:
    async with running() as bench:
        bench.plan.odds = {"memberships": Odds(delay=1.0, seconds_max=0.05)}
        for n in range(500):
            bench.presence(User("default", f"user-{n}"), "online")
        bench.ephemeral.typing(ANNA, CHAT, True)
        await asyncio.sleep(0.01)
        assert bench.take() == [typing(ANNA, True)], "it goes first"
        bench.ephemeral.typing(BELA, CHAT, True)
        await asyncio.sleep(50 * 0.05)
        assert bench.take() == [typing(BELA, True)], "a round sends fifty presences at most"


async def test_a_storm_of_arrivals_gives_way_to_the_rest_every_few_milliseconds() -> None:
    async with running() as bench:
        bench.seconds_of_a_push = TURN_SECONDS / 2
        for n in range(20):
            bench.presence(User("default", f"user-{n}"), "online")
        telling = asyncio.create_task(bench.ephemeral.send_due())
        turns = 0
        while not telling.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns > 20 / 3, "a push takes half of a turn"


async def test_who_comes_a_moment_later_is_looked_up_with_those_before() -> None:
    async with running() as bench:
        for round_of_three in range(2):
            for n in range(3):
                bench.presence(User("default", f"user-{round_of_three}-{n}"), "online")
                await asyncio.sleep(GATHER_SECONDS / 4)
            await asyncio.sleep(GATHER_SECONDS)
        assert bench.plan.counts == {("memberships", Fault.NONE): 2}


async def test_the_chats_of_a_crowd_that_comes_are_looked_up_together() -> None:
    async with running() as bench:
        for user in (ANNA, BELA, *(User("default", f"user-{n}") for n in range(118))):
            bench.presence(user, "online")
        await asyncio.sleep(3)
        assert [payload["user_id"] for _, payload in bench.take()] == [ANNA.user_id, BELA.user_id]
        assert bench.plan.counts == {("memberships", Fault.NONE): 3, ("members", Fault.NONE): 1}


async def test_what_is_too_much_is_dropped() -> None:
    async with running(EphemeralSettings(max_waiting=3)) as bench:
        for n in range(10):
            bench.ephemeral.typing(User("default", f"user-{n}"), CHAT, True)
        await asyncio.sleep(1)
        assert len(bench.take()) == 3


async def test_cost_of_a_note_does_not_depend_on_notes_sent_recently() -> None:
    async def cost(sent_before: int) -> int:
        """Interpreter steps: seconds would count the rest of the process, too."""
        steps = 0

        def count(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal steps
            frame.f_trace_opcodes = True
            steps += event == "opcode"
            return count

        async with running() as bench:
            for n in range(sent_before):
                bench.ephemeral.typing(User("default", f"user-{n}"), CHAT, True)
            await asyncio.sleep(0.01)
            for n in range(sent_before):
                bench.ephemeral.typing(User("default", f"user-{n}"), CHAT, False)
            sys.settrace(count)
            try:
                for n in range(30):
                    bench.ephemeral.typing(User("default", f"late-{n}"), CHAT, False)
                    await bench.ephemeral.send_due()
            finally:
                sys.settrace(None)
            assert len(bench.take()) == sent_before + 30
        return steps

    few = await cost(10)
    assert few > 0 and await cost(5000) < 1.1 * few, "the rest is not looked at"


async def test_typing_that_cannot_be_remembered_is_not_sent_as_it_would_never_end() -> None:
    async with running(EphemeralSettings(max_waiting=3)) as bench:
        for n in range(5):
            bench.ephemeral.typing(User("default", f"user-{n}"), CHAT, True)
            await asyncio.sleep(0.01)
        await asyncio.sleep(30)
        sent = [(payload["user_id"], payload["active"]) for _, payload in bench.take()]
        assert sent == [(f"user-{n}", active) for active in (True, False) for n in range(3)]


async def test_stop_without_room_is_sent_when_typing_ends_by_itself() -> None:
    async with running(EphemeralSettings(max_waiting=3)) as bench:
        bench.ephemeral.typing(ANNA, CHAT, True)
        await asyncio.sleep(0.01)
        for n in range(3):
            bench.ephemeral.typing(User("default", f"user-{n}"), CHAT, False)
        bench.ephemeral.typing(ANNA, CHAT, False)
        await asyncio.sleep(30)
        assert [
            payload["active"] for _, payload in bench.take() if payload["user_id"] == "anna"
        ] == [True, False]


@pytest.mark.covers("000 presence updates: stale, eventually consistent")
async def test_a_store_in_trouble_costs_notes_and_nothing_else() -> None:
    async with running() as bench:
        bench.plan.odds = {"members": Odds(hang=1.0)}
        for n in range(50):
            bench.ephemeral.typing(User("default", f"user-{n}"), f"chat-{n}", False)
        await asyncio.sleep(5)
        assert bench.take() == []
        bench.plan.odds = {}
        bench.ephemeral.typing(ANNA, CHAT, True)
        await asyncio.sleep(1)
        assert bench.take() == [typing(ANNA, True)]


def test_receipts_go_to_the_senders_of_what_moved_and_to_nobody_else() -> None:
    receipts = Receipts()
    receipts.on_entries([message(1, ANNA), message(2, CLEO), message(3, ANNA), message(4, BELA)])

    def sent(*marks: Watermark) -> dict[str, tuple[int, int]]:
        return {sender.user_id: (r.delivered, r.read) for sender, _, r in receipts.of(marks)}

    assert sent(mark(BELA, 1)) == {"anna": (1, 0)}
    assert sent(mark(BELA, 1)) == {}, "nothing moved"
    assert sent(mark(BELA, 2)) == {"cleo": (2, 0)}
    assert sent(mark(BELA, 4, 3)) == {"anna": (4, 3), "cleo": (4, 3)}, "never to the reader"
    assert sent(mark(BELA, 2, device="tablet")) == {}, "the furthest device counts"
    assert sent(mark(BELA, 1, epoch=2)) == {"anna": (1, 0)}, "a new epoch starts again"
    assert sent(mark(BELA, 4, 4, epoch=1)) == {}, "an old one is late"


def test_devices_of_one_reader_make_one_receipt() -> None:
    receipts = Receipts()
    receipts.on_entries([message(1, ANNA), message(2, ANNA)])
    ((sender, reader, receipt),) = receipts.of([mark(BELA, 1), mark(BELA, 2, device="tablet")])
    assert (sender, reader, receipt.delivered) == (ANNA, BELA, 2)


async def test_users_of_the_same_name_in_two_tenants_are_two() -> None:
    async with running() as bench:
        twin = User("other", "bela")
        bench.ephemeral.on_entries([message(1, ANNA)])
        bench.ephemeral.on_watermarks_moved(
            [mark(BELA, 1), Watermark(twin, "phone", "elsewhere", 1, 1, 0)]
        )
        await asyncio.sleep(0.01)
        assert [(to, p["type"]) for to, p in bench.take()] == [(ANNA, "receipt")]


async def test_user_who_left_a_chat_gets_no_receipts_of_it() -> None:
    async with running() as bench:
        bench.ephemeral.on_entries([message(1, ANNA), message(2, CLEO)])
        bench.ephemeral.on_watermarks_moved([mark(BELA, 2)])
        await asyncio.sleep(0.01)
        assert [to for to, _ in bench.take()] == [ANNA], "cleo is not in it"


def test_what_receipts_remember_is_bounded() -> None:
    receipts = Receipts(max_chats=2, max_readers=2)
    for n in range(10):
        receipts.on_entries([message(1, ANNA, chat_id=f"chat-{n}")])
        list(receipts.of([Watermark(BELA, "phone", f"chat-{n}", 1, 1, 0)]))
    assert len(receipts._senders) == len(receipts._furthest) == 2
    for n in range(500):
        receipts.on_entries([message(n, ANNA, chat_id="long")])
    assert len(receipts._senders["long"]) == 100


def test_of_many_chats_the_quiet_ones_are_forgotten_and_not_the_busy_ones() -> None:
    receipts = Receipts(max_chats=2)
    receipts.on_entries(
        message(n, ANNA, chat_id) for n, chat_id in enumerate(("busy", "quiet", "busy", "new"), 1)
    )
    sent = receipts.of(
        [Watermark(BELA, "phone", chat_id, 1, 9, 0) for chat_id in ("busy", "quiet", "new")]
    )
    assert [receipt.chat_id for _, _, receipt in sent] == ["busy", "new"]


async def test_a_lookup_that_fails_never_raises_into_the_loop() -> None:
    async with running() as bench:
        bench.plan.odds = {"memberships": Odds(fail=1.0)}
        bench.presence(ANNA, "online")
        await asyncio.sleep(2)
        bench.ephemeral.typing(ANNA, CHAT, True)
        await asyncio.sleep(1)
        assert bench.take() == [typing(ANNA, True)]
