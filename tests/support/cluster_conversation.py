"""People who talk in one chat of a cluster while things fail; then their history is
judged by all checkers.
"""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import pairwise

from cluster_rig import ClusterPerson, ClusterRig
from result_counts import tally

from holdfast.verify.checkers import check, red
from holdfast.verify.history import FaultPlane, FaultWindow
from proof.results import Row

PAUSE_SECONDS = 0.02
TICK_SECONDS = 0.02
STALL_SECONDS = 1.0
"""From when on it is in the history."""


class Conversation:
    """People who talk in one chat all the time, whatever happens to the nodes.

    ``pause_seconds``: at most this long between two sends of a person.
    """

    def __init__(
        self,
        rig: ClusterRig,
        chat_id: str,
        people: Sequence[ClusterPerson],
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        self.rig, self.chat_id, self.people = rig, chat_id, people
        self._pause_seconds = pause_seconds
        self._began = time.perf_counter()
        self._stalls: list[tuple[float, float]] = []
        self.acked_at: dict[str, list[float]] = {person.user.user_id: [] for person in people}
        self._acked = asyncio.Event()
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    async def acked_since(self, moment: float, users: Iterable[str] | None = None) -> None:
        """Until these people, or all, had a send acked after this moment."""
        chosen = [self.acked_at[user] for user in users or self.acked_at]
        while any(not at or at[-1] < moment for at in chosen):
            self._acked.clear()
            await self._acked.wait()

    async def all_acked(self) -> None:
        """Until everybody had a send acked after this call."""
        await self.acked_since(time.monotonic())

    def first_ack(self, users: Iterable[str], moment: float) -> float:
        """When the first of them had a send acked after this moment."""
        return min(at[bisect_left(at, moment)] for at in map(self.acked_at.__getitem__, users))

    async def talk(self, person: ClusterPerson, rng: random.Random) -> None:
        acked_at, number = self.acked_at[person.user.user_id], 0
        while self._goes_on.is_set():
            number += 1
            await person.say(self.chat_id, f"{person.user.user_id} says {number}")
            acked_at.append(time.monotonic())
            self._acked.set()
            await asyncio.sleep(rng.uniform(0.0, self._pause_seconds))

    def longest_pause(self, user: str, since: float) -> float:
        """Between two acks of a person, the last before ``since`` included. Time does
        not count while this process itself did not run.
        """
        at = self.acked_at[user]
        first = max(bisect_left(at, since) - 1, 0)
        return max((b - a - self._stalled(a, b) for a, b in pairwise(at[first:])), default=0.0)

    def _stalled(self, since: float, until: float) -> float:
        return sum(max(min(end, until) - max(start, since), 0.0) for start, end in self._stalls)

    async def watch_stalls(self) -> None:
        """Note when the machine did not let this process run: no client read then."""
        while True:
            began = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            ended = time.monotonic()
            if ended - began > TICK_SECONDS:
                self._stalls.append((began, ended))
            if ended - began > STALL_SECONDS:
                name = "the clients did not run"
                window = FaultWindow(at=began, until=ended, plane="connection", name=name)
                self.rig.record.note(window)

    def slow_answers(self, seconds: float) -> list[str]:
        """The requests that took longer, for a test that fails."""
        return [
            f"{each.invoke} {each.end}"
            for each in self.rig.record.history().operations
            if each.end is not None and each.end.at - each.invoke.at > seconds
        ]

    @contextmanager
    def fault(self, name: str, *planes: FaultPlane, users: Collection[str] = ()) -> Iterator[None]:
        """What fails meanwhile in these planes, for these users or all, has this
        reason.
        """
        began = time.monotonic()
        try:
            yield
        finally:
            until = time.monotonic()
            who = [p.client.device_id for p in self.people if p.user.user_id in users]
            for plane in planes:
                self.rig.record.note(
                    FaultWindow(at=began, until=until, plane=plane, name=name, clients=who)
                )

    async def end(self, talking: Sequence[asyncio.Task[None]]) -> None:
        """Everybody has everything that was acked; note it for the checkers."""
        self._goes_on.clear()
        await asyncio.gather(*talking)
        head = max(acked.sequence for _, _, acked in self.rig.record.history().acks())
        await asyncio.gather(*(person.has(self.chat_id, head) for person in self.people))
        for person in self.people:
            person.client.note_copy(self.chat_id)

    def count(self, name: str, runs: int, seed: int, *, promises: str = "", **figures: str) -> None:
        """Keep the count of a proof whose history was judged; ``promises``: what else
        it has checked.
        """
        nodes = f"{len(self.rig.nodes)} nodes on one PostgreSQL"
        how = f"{nodes}{' and one Redis' if self.rig.redis else ''}, people who talk"
        sends = sum(map(len, self.acked_at.values()))
        seconds = time.perf_counter() - self._began
        measured = {"sends": f"{sends:,}", **figures}
        tally(
            Row(
                name,
                how,
                runs,
                0,
                "all checkers green" + (f"; {promises}" if promises else ""),
                str(seed),
                seconds=seconds,
                figures=measured,
            )
        )


@asynccontextmanager
async def conversation(
    rig: ClusterRig,
    where: Mapping[str, int | None],
    seed: int = 1,
    *,
    listeners: Sequence[str] = (),
    pause_seconds: float = PAUSE_SECONDS,
) -> AsyncIterator[Conversation]:
    """These people talk while the block runs, each at a node, or through NGINX. Then the
    history is judged: AssertionError if a promise was broken.

    ``listeners`` are in the chat, too; the test connects them.
    """
    chat_id = await rig.chat(*where, *listeners)
    people = [rig.person(user, node) for user, node in where.items()]
    async with AsyncExitStack() as stack:
        for person in people:
            await stack.enter_async_context(person.online())
        talks = Conversation(rig, chat_id, people, pause_seconds)
        talking = [
            asyncio.create_task(talks.talk(person, random.Random(f"{seed} {person.user}")))
            for person in people
        ]
        watching = asyncio.create_task(talks.watch_stalls())
        try:
            yield talks
            await talks.end(talking)
        finally:
            for task in (*talking, watching):
                task.cancel()
            await asyncio.gather(*talking, watching, return_exceptions=True)
    await rig.note_state({chat_id: [*where, *listeners]})
    verdicts = check(rig.record.history())
    assert not red(verdicts), "\n".join(str(v) for v in verdicts if not v.ok)
