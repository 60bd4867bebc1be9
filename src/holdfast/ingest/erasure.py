"""Erasing a person: all texts of a user, and the user's memberships and devices.

Each step is a commit of its own with its audit record, and looks for what is left, so
an erasure that was killed anywhere can be repeated and ends the same. What stays: the
user's id where it is a sender, a member of a direct chat or part of an event; and
sequences and keys, because a retry must not bring a message back. Of the content not
even a hash stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from hashlib import blake2b

from msgspec import Struct

from holdfast.clock import Clock
from holdfast.errors import ChatHalted, HoldfastError, NotFound, ServerBusy
from holdfast.ingest.contract import Durability
from holdfast.message import Member, PageToken, User
from holdfast.store.commands import (
    ERASE_AT_ONCE,
    ChangeRole,
    Command,
    CommandContext,
    Erase,
    RemoveMember,
)
from holdfast.store.contract import ChatStore, Records
from holdfast.store.leases.contract import Leases

STEP_SECONDS_MAX = 2.0
LEASE_SECONDS = 15.0
"""Longer than a call takes: it ends within a request, one step after ``until``."""
LEASE_NAMES = 1024
"""Names of leases stay, and must not say who was erased. Two people may share one."""


class Erasure(Struct, frozen=True):
    """How far an erasure has come. ``next``: the log has been searched up to here;
    continue from it. It is null before the search begins and when all is ``done``.

    ``kept``: chats that the user is still in: direct chats, and halted ones, which can
    be left once they are recovered.
    """

    messages: int
    chats_left: int
    kept: Sequence[str]
    next: PageToken | None
    done: bool


async def _nothing(user: User) -> None:
    """For a node that keeps nothing beside the store."""


class Eraser:
    """Erases until ``until`` (monotonic).

    The caller repeats from ``next`` until the erasure is ``done``. One request at a
    time, over all nodes, erases a person.
    """

    def __init__(
        self,
        chats: ChatStore,
        records: Records,
        durability: Durability,
        leases: Leases,
        clock: Clock,
        forget_elsewhere: Callable[[User], Awaitable[None]] = _nothing,
    ) -> None:
        """``forget_elsewhere`` deletes what the node keeps of the user beside the
        store: devices and tokens, AI replies, the name in usage rows.
        """
        self._chats = chats
        self._records = records
        self._durability = durability
        self._leases = leases
        self._clock = clock
        self._forget_elsewhere = forget_elsewhere

    async def erase(
        self,
        user: User,
        act: Callable[[], CommandContext],
        after: PageToken | None,
        until: float,
    ) -> Erasure:
        """``act`` makes a new act of the operator for each step. Raises what the store
        raises; repeat then. An ``after`` that the store does not know changes nothing.
        ServerBusy while another request, at any node, erases the same person.
        """
        lease = _lease_of(user)
        fence = await self._leases.acquire(lease, LEASE_SECONDS)
        if fence is None:
            raise ServerBusy("this person is being erased; try again", retry_after_seconds=1.0)
        try:
            return await self._erase(user, act, after, until)
        finally:
            with suppress(HoldfastError):  # it ends by itself
                await self._leases.release(lease, fence)

    async def _erase(
        self,
        user: User,
        act: Callable[[], CommandContext],
        after: PageToken | None,
        until: float,
    ) -> Erasure:
        if after is not None:
            await self._chats.texts_of(user, after)
        chats_left, kept, unfinished = await self._leave(user, act, until)
        await self._chats.forget_devices(user)
        await self._records.forget_answers_of(user)
        await self._forget_elsewhere(user)
        messages, ended = 0, False
        while not ended and self._clock.monotonic() < until:
            page = await self._chats.texts_of(user, after)
            erased = await self._empty(user, page.texts, act, until)
            messages += erased
            if erased == len(page.texts):
                after, ended = page.next or after, page.next is None
        done = ended and not unfinished
        return Erasure(messages, chats_left, kept, None if done else after, done)

    async def _leave(
        self, user: User, act: Callable[[], CommandContext], until: float
    ) -> tuple[int, list[str], bool]:
        """How many chats were left, which were not, and whether the time ran out."""
        left = 0
        kept: list[str] = []
        for chat_id in sorted((await self._chats.memberships([user])).get(user, ())):
            if self._clock.monotonic() >= until:
                return left, kept, True
            if await self._leave_one(chat_id, user, act):
                left += 1
            else:
                kept.append(chat_id)
        return left, kept, False

    async def _leave_one(self, chat_id: str, user: User, act: Callable[[], CommandContext]) -> bool:
        """Whether the user is out of the chat. A last owner is replaced first."""
        if (await self._chats.chat(chat_id)).kind == "direct":
            return False
        members = await self._chats.members(chat_id)
        try:
            if heir := _heir(members, user.user_id):
                await self._change(ChangeRole(act(), chat_id, heir, "owner"))
            await self._change(RemoveMember(act(), chat_id, user.user_id))
        except ChatHalted:
            return False
        except NotFound:
            pass  # the user left meanwhile
        return True

    async def _change(self, command: Command) -> None:
        """Each step has its own deadline: slow steps do not cut off the next."""
        await self._durability.change(command, self._clock.monotonic() + STEP_SECONDS_MAX)

    async def _empty(
        self,
        user: User,
        texts: Sequence[tuple[str, int]],
        act: Callable[[], CommandContext],
        until: float,
    ) -> int:
        by_chat: dict[str, list[int]] = defaultdict(list)
        for chat_id, sequence in texts:
            by_chat[chat_id].append(sequence)
        erased = 0
        for chat_id, sequences in by_chat.items():
            for start in range(0, len(sequences), ERASE_AT_ONCE):
                if self._clock.monotonic() >= until:
                    return erased
                some = sequences[start : start + ERASE_AT_ONCE]
                await self._change(Erase(act(), chat_id, user.user_id, some))
                erased += len(some)
        return erased


def _lease_of(user: User) -> str:
    digest = blake2b(f"{user.tenant}\0{user.user_id}".encode(), digest_size=8).digest()
    return f"erasure {int.from_bytes(digest) % LEASE_NAMES}"


def _heir(members: Sequence[Member], user_id: str) -> str | None:
    """Who becomes owner if the last one leaves: the oldest admin, or else member."""
    others = [member for member in members if member.user_id != user_id]
    leaver = next((member for member in members if member.user_id == user_id), None)
    if (
        leaver is None
        or leaver.role != "owner"
        or not others
        or any(member.role == "owner" for member in others)
    ):
        return None
    return min(
        others, key=lambda member: (member.role != "admin", member.joined_at, member.user_id)
    ).user_id
