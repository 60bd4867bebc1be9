"""The durability plane over one store: a breaker, a deadline, and an honest answer for
whatever happens.

A write that misses its deadline is *unknown*, never failed. It continues in the
background to its end, its late result is only measured, and until it has ended no other
write of its lane is sent after it (Unavailable, nothing tried). So at most one write is
overdue per caller that was in flight, and nothing is answered twice.

Other lanes go on. An overdue write is one failure of its lane: the breaker counts it
once, until a write of that lane succeeds in time, so that one slow lane alone never
opens it. As many overdue lanes as the store commits groups at once hold it open: then
nothing gets through. A store with one lane is therefore stopped by one overdue write,
and there each counts.

``EpochRaiser`` is the one change that the server makes to a chat by itself. It is
recorded like an operator's act.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from holdfast import telemetry
from holdfast.bounds import positive
from holdfast.clock import Clock, Ids, timestamp
from holdfast.errors import (
    ChatHalted,
    Deferred,
    HoldfastError,
    OperatorError,
    OutcomeUnknown,
    RateLimited,
    Refused,
    ServerBusy,
    Unavailable,
)
from holdfast.ingest.contract import Durability
from holdfast.message import Acked, Draft, Outcome, User, Watermark
from holdfast.resilience import (
    HANGING_RETRY_SECONDS,
    BreakerSettings,
    BreakerState,
    DependencyBreaker,
)
from holdfast.store.commands import Command, CommandContext, CommandResult, RaiseEpoch
from holdfast.store.contract import ChatStore

T = TypeVar("T")

MARK_SECONDS = 5.0
"""How long a flush of watermarks may take. No setting: nobody waits for it, and what it
missed waits for the next.
"""

PROBE_SECONDS = 4.0
"""How long a write that only probes the store may take."""
SHARED_PROBE_SECONDS = 2.0
"""The same of a store that others may stop: other nodes may reach it. A store that
takes this long for a commit is slow and serves; one that hangs is seen soon.
"""
RECOVERY_SECONDS = 1.0
"""The same while the breaker rests: a connection that hangs must not delay the next."""

NO_CHAT_LANE = -1
"""The lane of writes that belong to no chat: where there are several, a lane that hangs
stops neither watermarks nor probes.
"""

REFUSAL = "messages cannot be stored now; send it again later"

SERVER = "holdfast"
"""The actor of changes that no person made."""
RAISE_SECONDS = 2.0
"""How long a raise may take, if its request has that much time."""


@dataclass(frozen=True, slots=True)
class ChangeSettings:
    """The bound of commands: create a chat, add a member, …"""

    max_at_once: int = 100
    """Concurrent changes of chats and members, by REST and operators. The next:
    SERVER_BUSY with the limit. Where the store commits several groups at once, the
    chats of one shard have their part of it, so that a shard that hangs leaves the
    others theirs.
    """

    def __post_init__(self) -> None:
        positive(self, "max_at_once")


class StoreDurability:
    """Implements ``ingest.contract.Durability``."""

    def __init__(
        self,
        store: ChatStore,
        clock: Clock,
        breaker: BreakerSettings | None = None,
        changes: ChangeSettings | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._at_once = store.grouping.at_once
        self._guard = DependencyBreaker(
            "store",
            REFUSAL,
            breaker or BreakerSettings(),
            clock,
            telemetry.dependency_state,
            store.grouping.retry_seconds_max,
        )
        self._overdue: dict[int, set[asyncio.Future[Any]]] = {}
        """Writes that go on past their deadline, by lane."""
        self._slow: set[int] = set()
        """Lanes with an overdue write, and no success in time since."""
        self._abandoned: set[asyncio.Future[Any]] = set()
        """Writes whose caller was cancelled. They go on and hold nothing up."""
        self._changes_max = (changes or ChangeSettings()).max_at_once
        self._changes: list[int] = []
        """The lanes of the changes that are in progress."""

    @property
    def breaker(self) -> BreakerState:
        return self._guard.state

    @property
    def breaker_open_seconds(self) -> float:
        """For how long sends have been failing fast; 0 while the breaker is closed."""
        return self._guard.open_seconds

    @property
    def trouble(self) -> str | None:
        """Why the last write failed; None if it succeeded."""
        return self._guard.trouble

    @property
    def overdue(self) -> int:
        """Writes that go on past their deadline."""
        return sum(map(len, self._overdue.values()))

    async def persist(self, drafts: Sequence[Draft], deadline: float) -> list[Outcome]:
        started = self._clock.monotonic()
        outcomes: list[Outcome]
        try:
            outcomes = await self._write(
                lambda: self._store.append(drafts),
                self._store.lane(drafts[0].chat_id),
                deadline,
                partial(_answered, drafts),
            )
            telemetry.sequences_allocated(self._clock.monotonic() - started)
        except HoldfastError as error:
            outcomes = [error] * len(drafts)
        fresh = sum(
            [isinstance(outcome, Acked) and not outcome.deduplicated for outcome in outcomes]
        )
        if fresh == len(outcomes):
            telemetry.sends_answered("persisted", fresh)
            return outcomes
        for name, count in Counter(map(_outcome_name, outcomes)).items():
            telemetry.sends_answered(name, count)
        telemetry.key_races_lost(sum(map(_lost_its_key, drafts, outcomes)))
        return outcomes

    async def change(self, command: Command, deadline: float) -> CommandResult:
        lane = self._store.lane(command.chat_id)
        with self._one_change(lane):
            return await self._write(lambda: self._store.change(command), lane, deadline)

    async def mark(self, watermarks: Sequence[Watermark]) -> bool:
        deadline = self._clock.monotonic() + MARK_SECONDS
        try:
            await self._write(lambda: self._store.mark(watermarks), NO_CHAT_LANE, deadline)
        except HoldfastError:
            telemetry.watermarks("failed", len(watermarks))
            return False
        telemetry.watermarks("stored", len(watermarks))
        return True

    async def probe(self) -> None:
        """Find out whether the store can be written, unless a write has succeeded since
        the last probe. Raises nothing.

        The probe goes through the breaker like any write: while it is open nothing is
        tried.
        """
        if not self._guard.worked_since_asked():
            with suppress(HoldfastError):
                shared = self._store.grouping.is_shared
                seconds = SHARED_PROBE_SECONDS if shared else PROBE_SECONDS
                deadline = self._clock.monotonic() + seconds
                await self._write(self._store.touch, NO_CHAT_LANE, deadline)

    async def check_recovery(self) -> None:
        """Whether a store that others restart can be written again, although the
        breaker rests. Raises nothing.
        """
        if not self._store.grouping.is_shared or not self._guard.is_resting:
            return
        with suppress(HoldfastError, TimeoutError):
            async with asyncio.timeout(RECOVERY_SECONDS):
                await self._store.touch()
            self._guard.recovered()

    @contextmanager
    def _one_change(self, lane: int) -> Iterator[None]:
        """Count a change, or refuse it: too many are in progress, in all or in its
        lane.
        """
        most, of_a_lane = self._changes_max, -(-self._changes_max // self._at_once)
        for count, limit in ((len(self._changes), most), (self._changes.count(lane), of_a_lane)):
            if count >= limit:
                raise ServerBusy("too many changes are in progress; try again", limit=limit)
        self._changes.append(lane)
        try:
            yield
        finally:
            self._changes.remove(lane)

    async def _write(
        self,
        call: Callable[[], Awaitable[T]],
        lane: int,
        deadline: float,
        works: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """Carry out one write by its deadline. Raises only ``holdfast.errors``."""
        seconds = deadline - self._clock.monotonic()
        refusal = self._refusal(lane, seconds)
        if refusal is not None:
            raise refusal
        write = asyncio.ensure_future(call())
        try:
            await asyncio.wait((write,), timeout=seconds)
        except asyncio.CancelledError:
            self._guard.learned_nothing()
            self._abandoned.add(write)
            write.add_done_callback(self._forget)
            raise
        if not write.done():
            self._leave_overdue(write, lane)
            raise OutcomeUnknown("the store did not answer in time; send it again with the same id")
        try:
            result = write.result()
            worked = works(result)
        except BaseException as error:
            if _is_an_answer(error):
                self._succeeded(lane)
                raise
            translated = _translated(error)
            self._guard.failed(translated.message)
            raise translated from error
        if worked:
            self._succeeded(lane)
        else:
            self._guard.failed("no message can be stored")
        return result

    def _refusal(self, lane: int, seconds: float) -> HoldfastError | None:
        if seconds <= 0:
            return Unavailable("the deadline passed before the write was tried; send it again")
        if lane in self._overdue:
            return Unavailable(REFUSAL, retry_after_seconds=HANGING_RETRY_SECONDS)
        return self._guard.refusal()

    def _succeeded(self, lane: int) -> None:
        self._slow.discard(lane)
        self._guard.succeeded()

    def _leave_overdue(self, write: asyncio.Future[Any], lane: int) -> None:
        """The write goes on without its caller, and its lane is taken until it ends."""
        if len(self._slow) >= self._at_once:
            self._slow.clear()  # the store itself is slow: each counts again
        if lane not in self._slow:
            self._guard.failed("it does not answer in time")
        else:
            self._guard.learned_nothing()
        self._slow.add(lane)
        self._overdue.setdefault(lane, set()).add(write)
        self._show_overdue()
        write.add_done_callback(partial(self._ended, lane))

    def _forget(self, write: asyncio.Future[Any]) -> None:
        self._abandoned.discard(write)
        _failed(write)

    def _ended(self, lane: int, write: asyncio.Future[Any]) -> None:
        self._overdue[lane].discard(write)
        if not self._overdue[lane]:
            del self._overdue[lane]
        self._show_overdue()
        telemetry.write_overdue("failed" if _failed(write) else "done")

    def _show_overdue(self) -> None:
        self._guard.hangs(len(self._overdue) >= self._at_once)
        telemetry.lanes_overdue(len(self._overdue), self._at_once)


def _failed(write: asyncio.Future[Any]) -> bool:
    """Whether a write failed that nobody waited for to its end."""
    return write.cancelled() or write.exception() is not None


def _translated(error: BaseException) -> HoldfastError:
    """A foreign error from a store is a defect: the outcome is unknown."""
    if isinstance(error, Unavailable | OutcomeUnknown):
        return error
    telemetry.defect("store", error)
    if isinstance(error, OperatorError):
        return Unavailable(
            "the store cannot be written until its operator acts; send it again later"
        )
    return OutcomeUnknown("the store failed; send it again with the same id")


def _is_an_answer(error: BaseException) -> bool:
    """A refusal, a full quota and a halted chat are answers of a store that works."""
    return isinstance(error, Refused | Deferred) and not isinstance(error, Unavailable)


def _answered(drafts: Sequence[Draft], outcomes: Sequence[Outcome]) -> bool:
    """Whether any send of a group got an answer that only a working store gives."""
    if len(outcomes) != len(drafts):
        raise RuntimeError(f"the store gave {len(outcomes)} outcomes for {len(drafts)} sends")
    return any(isinstance(outcome, Acked) or _is_an_answer(outcome) for outcome in outcomes)


def _outcome_name(outcome: Outcome) -> str:
    match outcome:
        case Acked(deduplicated=deduplicated):
            return "deduplicated" if deduplicated else "persisted"
        case Refused():
            return "refused"
        case ChatHalted():
            return "halted"
        case RateLimited():
            return "throttled"
        case Deferred():
            return "deferred"
        case _:
            return "unknown"


def _lost_its_key(draft: Draft, outcome: Outcome) -> bool:
    """Whether a send of the same key was stored while this one was under way: not
    before its group was stamped. (A store may stamp by its own clock.)
    """
    return (
        isinstance(outcome, Acked)
        and outcome.deduplicated
        and outcome.message.created_at >= draft.created_at
    )


class EpochRaiser:
    """Raises an epoch for ``store.rollbacks`` when a cursor proves a rollback; once per
    epoch, however many cursors prove it.
    """

    def __init__(self, durability: Durability, clock: Clock, ids: Ids, node: str = "") -> None:
        self._node = node
        self._durability = durability
        self._clock = clock
        self._ids = ids

    async def __call__(self, user: User, chat_id: str, epoch: int, deadline: float) -> None:
        """On return the chat's epoch is above ``epoch``. Raises as ``change`` does."""
        act = CommandContext(
            actor=User(user.tenant, SERVER),
            at=timestamp(self._clock.now()),
            message_id=self._ids.new("msg_"),
            operator=True,
            reason=f"a cursor of {user.user_id} is beyond the head: messages were lost",
            node=self._node,
        )
        by = min(deadline, self._clock.monotonic() + RAISE_SECONDS)
        await self._durability.change(RaiseEpoch(act, chat_id, epoch), by)
