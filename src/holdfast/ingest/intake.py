"""Sends in, answers out: gathers the sends that arrive during a commit and commits them
as the next group.

There is no artificial delay: a send that finds no commit of its lane in flight leaves
at once, alone; under load the groups grow by themselves. A lane has one group in flight
at a time, and the store says how many lanes commit at once: SQLite has one lane. A
group is answered while the next one is committed. ``send_queue`` decides; this is the
loop around it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from holdfast import telemetry
from holdfast.clock import Clock, Ids, timestamp
from holdfast.errors import Deferred, HoldfastError, OutcomeUnknown, ServerBusy, Unavailable
from holdfast.ingest.contract import Durability
from holdfast.ingest.send_queue import IntakeSettings, Refusals, Send, SendQueue
from holdfast.message import Draft, Outcome, User
from holdfast.store.contract import ONE_LANE, Grouping
from holdfast.wire.frames import SendBody


class Intake:
    """The only entry point for sends, by WebSocket or by REST.

    Every submitted send is answered exactly once: Acked only after its commit. An
    answer may come before ``submit`` returns. ``run`` must be running. It ends after
    ``stop``, when everything has been answered; if it is cancelled, it still answers
    everything truthfully.
    """

    def __init__(
        self,
        durability: Durability,
        clock: Clock,
        ids: Ids,
        settings: IntakeSettings | None = None,
        is_muted: Callable[[User], bool] = lambda user: False,
        grouping: Grouping = ONE_LANE,
        lane: Callable[[str], int] = lambda chat_id: 0,
    ) -> None:
        """``is_muted``: by the whole tenant; asked when the commit begins. ``grouping``
        and ``lane`` are the store's.
        """
        self._is_muted = is_muted
        self._at_once = grouping.at_once
        self._lane = lane
        self._durability = durability
        self._clock = clock
        self._ids = ids
        self._settings = (settings or IntakeSettings()).within(grouping)
        self._waiting = SendQueue(self._settings)
        self._in_flight: dict[int, Sequence[Send]] = {}
        """The group that each busy lane commits."""
        self._settled: list[tuple[Send, Outcome]] = []
        """Outcomes that are known but not answered yet."""
        self._stopping = False
        self._sleepers: list[asyncio.Future[None]] = []
        """The loops that found no group. While there are any, no free lane has sends
        that none of the other loops will find.
        """
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def submit(
        self,
        body: SendBody,
        sender: User,
        source: str,
        deadline: float,
        answer: Callable[[Outcome], None],
    ) -> None:
        """Take a valid send of a connection, ``source``; answer it by ``deadline``."""
        if self._stopping:
            telemetry.send_turned_away("stopping")
            answer(
                Unavailable(
                    "the server is stopping; send it again elsewhere", retry_after_seconds=1
                )
            )
            return
        lane = self._lane(body.chat_id)
        send = Send(body, sender, source, self._clock.monotonic(), deadline, answer, lane)
        refusal = self._waiting.admit(send)
        if refusal is not None:
            telemetry.send_turned_away(refusal[0])
            answer(refusal[1])
            return
        if self._sleepers and lane not in self._in_flight and self._waiting.in_lane(lane) == 1:
            self._wake()
        if deadline < self._timer_at:
            self._watch_ages()

    def stop(self) -> None:
        """Accept no more; ``run`` ends when everything accepted is answered."""
        self._stopping = True
        while self._sleepers:
            self._wake()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def committing(self) -> int:
        """Sends in the commits that are open now."""
        return sum(map(len, self._in_flight.values()))

    async def run(self) -> None:
        """Commit what is submitted, until ``stop``."""
        try:
            async with asyncio.TaskGroup() as loops:
                for _ in range(self._at_once - 1):
                    loops.create_task(self._commit_groups())
                await self._commit_groups()
        finally:
            self._stopping = True
            self._answer_rest()

    async def _commit_groups(self) -> None:
        """Commit group after group; each is answered while the next is committed."""
        while True:
            group, refused = self._waiting.take(self._clock.monotonic(), self._in_flight)
            self._refuse(refused)
            if group:
                await self._commit(group)
            elif self._settled:
                self._answer_settled()
            elif self._stopping:
                return  # what still waits is in lanes whose loops will find it
            else:
                await self._sleep()

    async def _commit(self, group: Sequence[Send]) -> None:
        """Commit the group. What the one before it came to is answered a turn later:
        then the store has this one.
        """
        self._in_flight[group[0].lane] = group
        telemetry.message_step("wait", self._clock.monotonic() - group[0].since)
        telemetry.sends_waiting(len(self._waiting))
        if self._timer is None:
            self._watch_ages()
        if self._settled:
            asyncio.get_running_loop().call_soon(self._answer_settled)
        self._settle(group, await self._persist(group))

    def _settle(self, group: Sequence[Send], outcomes: Sequence[Outcome]) -> None:
        """The outcomes are known; followers of a send that may be retried are taken out
        before the lane's next group.
        """
        settled = list(zip(group, outcomes, strict=True))
        self._settled += settled
        lane = group[0].lane
        del self._in_flight[lane]
        failed: dict[tuple[str, str], HoldfastError] = {}
        for send, outcome in settled:
            if isinstance(outcome, Deferred | OutcomeUnknown):
                failed.setdefault(send.order_key, outcome)
        for follower, error in self._waiting.fail_followers(lane, failed):
            telemetry.send_turned_away("follower")
            self._settled.append((follower, error))
        telemetry.group_persisted(len(group), self._clock.monotonic() - group[0].since)

    def _answer_settled(self) -> None:
        settled, self._settled = self._settled, []
        for send, outcome in settled:
            _answer(send, outcome)

    async def _persist(self, group: Sequence[Send]) -> Sequence[Outcome]:
        """One outcome per send, also if the durability plane breaks its promise never
        to raise: a defect there must not stop all sends.
        """
        try:
            outcomes = await self._durability.persist(
                self._stamp(group), min(send.deadline for send in group)
            )
            if len(outcomes) == len(group):
                return outcomes
            raise ValueError(f"{len(outcomes)} outcomes for {len(group)} sends")
        except Exception as error:
            telemetry.defect("ingest", error)
            telemetry.sends_answered("unknown", len(group))
            return [
                OutcomeUnknown(
                    "the server failed during the commit; send it again with the same id"
                )
            ] * len(group)

    def _stamp(self, group: Sequence[Send]) -> list[Draft]:
        """The group's drafts; one moment for all, for they are one commit."""
        at = timestamp(self._clock.now())
        new, is_muted = self._ids.new, self._is_muted
        return [
            Draft(
                send.sender,
                send.body.chat_id,
                send.body.client_message_id,
                send.body.content,
                send.body.content_type,
                new("msg_"),
                at,
                is_muted(send.sender),
            )
            for send in group
        ]

    def _watch_ages(self) -> None:
        """While a commit is in flight, answer what grows too old at the moment it does:
        one timer, for the send that will be first.
        """
        if self._timer is not None:
            self._timer.cancel()
        now = self._clock.monotonic()
        expiry = self._waiting.next_expiry()
        delay = self._settings.max_age_seconds if expiry is None else max(expiry - now, 0.0)
        self._timer = asyncio.get_running_loop().call_later(delay, self._expire)
        self._timer_at = now + delay

    def _expire(self) -> None:
        self._timer, self._timer_at = None, 0.0
        self._refuse(self._waiting.expire(self._clock.monotonic()))
        if self._in_flight:
            self._watch_ages()

    def _refuse(self, refused: Refusals) -> None:
        for send, error in refused:
            telemetry.send_turned_away("age" if isinstance(error, ServerBusy) else "deadline")
            _answer(send, error)

    def _answer_rest(self) -> None:
        """Answer everything: sends in flight are unknown, the rest were never tried."""
        if self._timer is not None:
            self._timer.cancel()
        self._answer_settled()
        in_flight, self._in_flight = self._in_flight, {}
        for send in (send for group in in_flight.values() for send in group):
            telemetry.sends_answered("unknown", 1)
            _answer(
                send,
                OutcomeUnknown(
                    "the server stopped during the commit; send it again with the same id"
                ),
            )
        for send in self._waiting.clear():
            telemetry.send_turned_away("stopping")
            _answer(
                send, Unavailable("the server stopped before the send was tried; send it again")
            )

    async def _sleep(self) -> None:
        sleeper = asyncio.get_running_loop().create_future()
        self._sleepers.append(sleeper)
        try:
            await sleeper
        finally:
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)

    def _wake(self) -> None:
        sleeper = self._sleepers.pop()
        if not sleeper.done():
            sleeper.set_result(None)


def _answer(send: Send, outcome: Outcome) -> None:
    """One broken listener must not cost the others their answers."""
    try:
        send.answer(outcome)
    except Exception as error:
        telemetry.defect("answer", error)
