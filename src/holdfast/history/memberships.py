"""The chats of users, read for many users at once.

After a restart thousands of users connect together; they cost a few reads, not one
each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from holdfast.message import Cursor, User

USERS_PER_READ = 50
"""Each may be in thousands of chats: the store answers for as many users as it can, and
is asked again for the rest.
"""
CHATS_PER_TURN = 5_000
"""Chats handed out in one turn of the event loop. Callers do work for each chat, and
other tasks run in between.
"""
GATHER_SECONDS = 0.005
"""While a read is in progress, callers wait this long for others to join the next one.
"""

_Chats = Mapping[str, Cursor]
_Asked = tuple[User, asyncio.Future[_Chats | None]]


class MembershipReader:
    """Gathers callers that each ask for one user.

    Callers in one turn of the event loop share a read, ``USERS_PER_READ`` users at a
    time. While a read is in progress, callers within ``GATHER_SECONDS`` share the next.

    The number of waiting callers is bounded by the callers themselves: each asks for
    one user at a time. Cancel-safe: a cancelled caller does not affect the others.
    """

    def __init__(self, read: Callable[[Sequence[User]], Awaitable[Mapping[User, _Chats]]]) -> None:
        """``read`` may leave out users except the first; it is called again."""
        self._read = read
        self._asked: list[_Asked] = []
        self._reads: set[asyncio.Task[None]] = set()

    def of(self, user: User) -> Awaitable[_Chats | None]:
        """The (epoch, head) of every chat of the user, read after this call. Raises
        what the read raises.

        None if a read for several users failed: one of them may be the cause, so each
        caller should read alone.
        """
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_later(GATHER_SECONDS if self._reads else 0, self._begin)
        answer: asyncio.Future[_Chats | None] = loop.create_future()
        self._asked.append((user, answer))
        return answer

    def _begin(self) -> None:
        asked, self._asked = self._asked, []
        for start in range(0, len(asked), USERS_PER_READ):
            task = asyncio.ensure_future(self._answer(asked[start : start + USERS_PER_READ]))
            self._reads.add(task)
            task.add_done_callback(self._reads.discard)

    async def _answer(self, asked: Sequence[_Asked]) -> None:
        waiting = asked
        failure: Exception | None = None
        try:
            while waiting and (
                found := await self._read(list(dict.fromkeys(user for user, _ in waiting)))
            ):
                await _hand_out(waiting, found)
                waiting = [(user, answer) for user, answer in waiting if user not in found]
        except Exception as error:
            failure = error
        finally:  # also when a stopping server cancels the read: nobody is left waiting
            for _, answer in asked:
                if answer.done():
                    continue
                if failure is not None and len(waiting) == 1:
                    answer.set_exception(failure)
                else:
                    answer.set_result(None)


async def _hand_out(waiting: Sequence[_Asked], found: Mapping[User, _Chats]) -> None:
    chats = 0
    for user, answer in waiting:
        if user not in found or answer.done():
            continue
        answer.set_result(found[user])
        chats += len(found[user])
        if chats >= CHATS_PER_TURN:
            chats = 0
            await asyncio.sleep(0)
