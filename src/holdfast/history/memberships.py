"""Who is in which chats, read for many at once: a crowd that comes together costs a few reads, not one each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from holdfast.message import Cursor, User

USERS_PER_READ = 50
"""Each may be in thousands of chats: the store answers for as many as it can at once, and is asked again."""
CHATS_PER_TURN = 5_000
"""So many are handed out in one turn of the loop, for who gets them makes something of each; others run in between."""
GATHER_SECONDS = 0.005
"""So long those who ask while a read is under way wait for each other."""

_Chats = Mapping[str, Cursor]
_Asked = tuple[User, asyncio.Future[_Chats | None]]


class MembershipReader:
    """Reads for one user each. Those who ask in one turn of the loop, while a read is under way within
    ``GATHER_SECONDS``, are read together, ``USERS_PER_READ`` at a time.

    Who waits here is bounded by the callers, of whom each asks for one user at a time. Cancel-safe: who gives up takes
    nobody along.
    """

    def __init__(self, read: Callable[[Sequence[User]], Awaitable[Mapping[User, _Chats]]]) -> None:
        """``read`` may leave out some users, for which it is called again, but not the first."""
        self._read = read
        self._asked: list[_Asked] = []
        self._reads: set[asyncio.Task[None]] = set()

    def of(self, user: User) -> Awaitable[_Chats | None]:
        """The (epoch, head) of every chat of the user, read after this was called. Raises what the read raises.

        None if a read for several failed: it may have failed because of one of them, so each should ask alone.
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
            while waiting and (found := await self._read(list(dict.fromkeys(user for user, _ in waiting)))):
                await _hand_out(waiting, found)
                waiting = [(user, answer) for user, answer in waiting if user not in found]
        except Exception as error:
            failure = error
        finally:  # a server that stops cancels the read, and then nobody has an answer to wait for
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
