"""Reads of memberships for a crowd: together where they are asked for together, and
nobody at another's expense.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from holdfast.access.proofs import CursorProofs
from holdfast.errors import InternalError, ServerBusy, Unavailable
from holdfast.history.history import ChatHistory, HistorySettings
from holdfast.history.memberships import CHATS_PER_TURN, GATHER_SECONDS, USERS_PER_READ
from holdfast.message import Cursor, User
from holdfast.store.memory import MemoryStore
from proof.virtual_loop import LoopClock

Found = Mapping[User, Mapping[str, Cursor]]
USERS = [User("acme", f"user-{n}") for n in range(120)]


class Store(MemoryStore):
    """Records what it was asked; each read takes a second."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[User]] = []
        self.epoch = 1
        self.seconds = 1.0
        self.broken: set[User] = set()
        self.failure: Callable[[], Exception] = lambda: InternalError("a row makes no sense")

    async def memberships(self, users: Sequence[User]) -> Found:
        self.asked.append(list(users))
        epoch = self.epoch
        await asyncio.sleep(self.seconds)
        if self.broken & set(users):
            raise self.failure()
        return {user: {f"chat of {user.user_id}": Cursor(epoch, 0)} for user in users}


async def never(user: User, chat_id: str, epoch: int, deadline: float) -> None:
    raise AssertionError("nobody proved a rollback")


@asynccontextmanager
async def reading(
    settings: HistorySettings | None = None,
) -> AsyncIterator[tuple[Store, ChatHistory]]:
    store = Store()
    yield store, ChatHistory(store, never, CursorProofs(b"test"), LoopClock(), settings)


def chats_of(user: User, epoch: int = 1) -> Mapping[str, Cursor]:
    return {f"chat of {user.user_id}": Cursor(epoch, 0)}


async def test_who_asks_in_one_turn_of_the_loop_is_read_together_and_a_read_is_bounded() -> None:
    async with reading() as (store, history):
        found = await asyncio.gather(*(history.memberships(user) for user in USERS))
        assert found == [chats_of(user) for user in USERS]
        assert [len(users) for users in store.asked] == [USERS_PER_READ, USERS_PER_READ, 20]


class Crowded(Store):
    """Everybody has many chats: a read answers for three users."""

    async def memberships(self, users: Sequence[User]) -> Found:
        self.asked.append(list(users))
        await asyncio.sleep(self.seconds)
        return {
            user: {f"chat_{n}": Cursor(1, 0) for n in range(CHATS_PER_TURN)} for user in users[:3]
        }


async def test_users_for_whom_a_read_had_no_room_are_read_for_next() -> None:
    store = Crowded()
    history = ChatHistory(store, never, CursorProofs(b"test"), LoopClock())
    store.seconds = 0.1
    found = await asyncio.gather(*(history.memberships(user) for user in USERS[:8]))
    assert [len(chats) for chats in found] == [CHATS_PER_TURN] * 8
    assert [len(users) for users in store.asked] == [8, 5, 2]
    assert list(await history.memberships_of(USERS[:5])) == USERS[:5]


async def test_who_waits_for_the_reads_of_a_crowd_is_answered_in_time() -> None:
    store = Crowded()
    history = ChatHistory(store, never, CursorProofs(b"test"), LoopClock())
    found = await asyncio.gather(
        *(history.memberships(user) for user in USERS[:20]), return_exceptions=True
    )
    assert LoopClock().monotonic() == pytest.approx(5.0)
    assert [type(each) for each in found] == [dict] * 12 + [Unavailable] * 8


async def test_heavy_users_are_let_in_one_in_each_turn_of_the_loop() -> None:
    """Fifty would build progress for 250,000 chats before any other task ran."""
    store = Crowded()
    store.seconds = 0
    history = ChatHistory(store, never, CursorProofs(b"test"), LoopClock())
    turn = 0
    let_in: list[int] = []

    async def come(user: User) -> None:
        await history.memberships(user)
        let_in.append(turn)

    async with asyncio.TaskGroup() as crowd:
        coming = [crowd.create_task(come(user)) for user in USERS[:3]]
        while not all(task.done() for task in coming):
            await asyncio.sleep(0)
            turn += 1
    assert len(set(let_in)) == 3


async def test_resumes_are_read_together_with_those_who_come() -> None:
    async with reading() as (store, history):
        resumed, came = await asyncio.gather(
            history.resume(USERS[0], {}), history.memberships(USERS[1])
        )
        assert (resumed.joined, came) == ([f"chat of {USERS[0].user_id}"], chats_of(USERS[1]))
        assert sorted(store.asked[0]) == USERS[:2]


async def test_two_devices_of_one_user_are_one_question() -> None:
    async with reading() as (store, history):
        assert (
            await asyncio.gather(*(history.memberships(USERS[0]) for _ in range(2)))
            == [chats_of(USERS[0])] * 2
        )
        assert store.asked == [[USERS[0]]]


async def test_a_read_that_is_under_way_answers_nobody_who_asks_later() -> None:
    """It may have been read before the event that made them ask."""
    async with reading() as (store, history):
        first = asyncio.create_task(history.memberships(USERS[0]))
        await asyncio.sleep(0.5)
        store.epoch = 2
        assert await history.memberships(USERS[0]) == chats_of(USERS[0], 2)
        assert await first == chats_of(USERS[0], 1)


async def test_request_during_a_read_waits_for_others_but_not_for_that_read() -> None:
    async with reading() as (store, history):
        asked = [asyncio.create_task(history.memberships(USERS[0]))]
        for user in USERS[1:3]:
            await asyncio.sleep(GATHER_SECONDS / 10)
            asked.append(asyncio.create_task(history.memberships(user)))
        await asyncio.gather(*asked)
        assert store.asked == [USERS[:1], USERS[1:3]]
        assert LoopClock().monotonic() == pytest.approx(1 + GATHER_SECONDS * 1.1)


@pytest.mark.parametrize("when", [0.0, 0.5])
async def test_who_gives_up_takes_nobody_along(when: float) -> None:
    async with reading() as (_store, history):
        waiting = [
            asyncio.create_task(history.memberships(user)) for user in [*USERS[:3], USERS[0]]
        ]
        await asyncio.sleep(when)
        waiting[0].cancel()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert found[1:] == [chats_of(USERS[1]), chats_of(USERS[2]), chats_of(USERS[0])]


@pytest.mark.parametrize("failure", [InternalError, Unavailable, KeyError])
async def test_one_whose_chats_cannot_be_read_keeps_nobody_else_out(
    failure: type[Exception],
) -> None:
    async with reading() as (store, history):
        store.broken, store.failure = {USERS[1]}, lambda: failure("damaged")
        found = await asyncio.gather(
            *(history.memberships(user) for user in USERS[:4]), return_exceptions=True
        )
        assert isinstance(found[1], InternalError | Unavailable)
        assert [found[0], *found[2:]] == [chats_of(USERS[n]) for n in (0, 2, 3)]


async def test_who_is_alone_is_not_read_for_twice() -> None:
    async with reading() as (store, history):
        store.broken = {USERS[0]}
        with pytest.raises(InternalError):
            await history.memberships(USERS[0])
        assert len(store.asked) == 1


async def test_everybody_is_answered_in_time_though_a_read_for_all_hangs() -> None:
    async with reading() as (store, history):

        async def hang(users: Sequence[User]) -> Found:
            await asyncio.sleep(60)
            return {}

        store.memberships = hang  # type: ignore[method-assign]
        for failed in await asyncio.gather(
            *(history.memberships(user) for user in USERS), return_exceptions=True
        ):
            assert isinstance(failed, Unavailable | ServerBusy), (
                "by its own read, or because it found no place for one"
            )
        assert LoopClock().monotonic() <= 5.001


async def test_who_has_little_time_left_does_not_wait_as_long_as_the_others_may() -> None:
    async with reading() as (store, history):

        async def slow(users: Sequence[User]) -> Found:
            await asyncio.sleep(2.4)
            return {user: chats_of(user) for user in users}

        store.memberships = slow  # type: ignore[method-assign]
        hurried = asyncio.create_task(history.resume(USERS[0], {}, asked_at=-4.0))
        others = asyncio.gather(*(history.memberships(user) for user in USERS[1:3]))
        with pytest.raises(Unavailable):
            await hurried
        assert LoopClock().monotonic() == pytest.approx(1.0)
        assert await others == [chats_of(USERS[1]), chats_of(USERS[2])]
