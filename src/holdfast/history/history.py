"""Reads for sessions and REST: bounded, with a deadline, behind a breaker of their own.

Reads never wait for the writer and never delay it, and a failed read says nothing about
sends. A read that misses its deadline is a retryable error. A resume that misses it
answers with the pages it has, and heads for the other chats.

Each page carries the proof of the cursor at its end. ``store.rollbacks`` decides what a
cursor beyond the head means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from holdfast import telemetry
from holdfast.access.proofs import CursorProofs
from holdfast.bounds import KIB, positive
from holdfast.clock import Clock
from holdfast.errors import (
    Deferred,
    HoldfastError,
    NotAMember,
    NotFound,
    OutcomeUnknown,
    Refused,
    Unavailable,
)
from holdfast.history.memberships import GATHER_SECONDS, MembershipReader
from holdfast.history.semaphore import FairSemaphore
from holdfast.message import Cursor, Page, ResumeRead, User
from holdfast.resilience import BreakerSettings, BreakerState, DependencyBreaker
from holdfast.store.contract import ChatStore
from holdfast.store.pages import ENVELOPE_BYTES, size_of
from holdfast.store.rollbacks import Rollbacks, _RaiseEpoch

T = TypeVar("T")


OWN = ""
"""The tenant of the server's own reads, which serve many users at once."""
_NOTHING = Cursor(0, 0)
"""No chat has epoch 0, so a read from this cursor is always a reset."""
RECOVERY_SECONDS = 1.0
"""How long a read may take that asks whether the store is back."""
NO_CHAT = "-"
"""No chat has this id: looking it up is the cheapest read there is."""


@dataclass(frozen=True, slots=True)
class HistorySettings:
    """How many reads run at once, and for how long.

    Tenants take turns, so that one tenant's reads do not delay another's. Admitted
    reads run in order, so the store says how many keep its readers busy.
    """

    max_reads: int = 0
    """Concurrent reads; more wait, tenants in turn. 0: as many as the store names
    (SQLite: four for each reader).
    """
    max_resumes: int = 100
    """Concurrent resumes; more wait for ``max_wait_seconds``, tenants in turn."""
    max_wait_seconds: float = 2
    """A read or resume that waited longer: SERVER_BUSY."""
    read_timeout_seconds: float = 2.5
    """The time for one read. Beyond: a retryable SERVICE_UNAVAILABLE; a resume answers
    with the pages it has, and heads.
    """
    request_timeout_seconds: float = 5
    """The time in which a sync or a resume is answered, however many reads it takes."""
    resume_page_messages: int = 100
    """Messages of each chat's first page in ``resumed``."""
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    """The circuit breaker of the store's reads."""

    def __post_init__(self) -> None:
        positive(self, *(n for n in self.__slots__ if n not in ("breaker", "max_reads")))
        if self.max_reads < 0:
            raise ValueError(f"max_reads must be 0 or more, not {self.max_reads}")


class _Wanted(NamedTuple):
    """A page to read, and its deadline."""

    user: User
    chat_id: str
    cursor: Cursor
    limit: int
    bytes_max: int
    deadline: float
    proof: str | None = None


class ChatHistory:
    """The read side of a store, for clients."""

    def __init__(
        self,
        store: ChatStore,
        raise_epoch: _RaiseEpoch,
        proofs: CursorProofs,
        clock: Clock,
        settings: HistorySettings | None = None,
        page_bytes_max: int = 256 * KIB,
    ) -> None:
        self._store = store
        self._proofs = proofs
        self._clock = clock
        self._settings = settings or HistorySettings()
        self._page_bytes_max = page_bytes_max
        refusal = "messages cannot be read now; try again later"
        self._guard = DependencyBreaker(
            "store_reads",
            refusal,
            self._settings.breaker,
            clock,
            telemetry.dependency_state,
            store.grouping.retry_seconds_max,
        )
        self._rollbacks = Rollbacks(raise_epoch, self.heads, proofs, clock)
        self._memberships = MembershipReader(self._some_memberships)
        reads_at_once = self._settings.max_reads or store.grouping.reads_at_once
        self._reads = FairSemaphore("reads", reads_at_once, self._settings.max_wait_seconds)
        self._resumes = FairSemaphore(
            "resumes", self._settings.max_resumes, self._settings.max_wait_seconds
        )

    @property
    def breaker(self) -> BreakerState:
        return self._guard.state

    @property
    def trouble(self) -> str | None:
        """Why the last read failed; None if it succeeded."""
        return self._guard.trouble

    async def probe(self) -> None:
        """Find out whether the store can be read, unless a read has succeeded since the
        last probe. Raises nothing.
        """
        if not self._guard.worked_since_asked():
            with suppress(HoldfastError):
                await self.ask(lambda store: store.heads([NO_CHAT]))

    async def check_recovery(self) -> None:
        """Whether a store that others restart can be read again, although the breaker
        rests. Raises nothing.
        """
        if not self._store.grouping.is_shared or not self._guard.is_resting:
            return
        with suppress(HoldfastError, TimeoutError):
            async with asyncio.timeout(RECOVERY_SECONDS):
                await self._store.heads([NO_CHAT])
            self._guard.recovered()

    async def ask(
        self,
        read: Callable[[ChatStore], Awaitable[T]],
        deadline: float | None = None,
        user: User | None = None,
    ) -> T:
        """Run any read of the store, bounded and by a deadline, in the turn of the
        user's tenant (or of the server itself).

        Raises only ``holdfast.errors``. Cancel-safe.
        """
        started = self._clock.monotonic()
        seconds = self._settings.request_timeout_seconds if deadline is None else deadline - started
        outcome = "timeout"
        try:
            if seconds <= 0:  # no fault of the store: the breaker does not count it
                raise Unavailable(
                    "there was no time left to read; try again", retry_after_seconds=1
                )
            outcome = "busy"
            async with self._reads.one(user.tenant if user else OWN, seconds):
                outcome = "breaker_open"
                refusal = self._guard.refusal()
                if refusal is not None:
                    raise refusal
                outcome = "failed"
                result = await self._judged(read, started + seconds)
                outcome = "done"
                return result
        except Refused:
            outcome = "refused"
            raise
        finally:
            telemetry.history_read(outcome, self._clock.monotonic() - started)

    async def memberships(self, user: User, deadline: float | None = None) -> Mapping[str, Cursor]:
        """The (epoch, head) of every chat of the user. Concurrent callers share a read.

        A caller with less time than a shared read may take reads alone, and so does
        every caller of a shared read that failed.
        """
        deadline = self._deadline(None) if deadline is None else deadline
        longest = (
            GATHER_SECONDS + self._settings.max_wait_seconds + self._settings.read_timeout_seconds
        )
        if deadline - self._clock.monotonic() >= longest:
            try:
                async with asyncio.timeout(deadline - self._clock.monotonic()):
                    found = await self._memberships.of(user)
            except TimeoutError:
                raise Unavailable(
                    "your chats could not be read in time; try again", retry_after_seconds=1
                ) from None
            if found is not None:
                return found
        return (await self.ask(lambda store: store.memberships([user]), deadline, user))[user]

    async def memberships_of(self, users: Sequence[User]) -> Mapping[User, Mapping[str, Cursor]]:
        """The same for several users, in as few reads as their chats allow."""
        found: dict[User, Mapping[str, Cursor]] = {}
        while rest := [user for user in users if user not in found]:
            found.update(await self._some_memberships(rest))
        return found

    async def _some_memberships(self, users: Sequence[User]) -> Mapping[User, Mapping[str, Cursor]]:
        return await self.ask(lambda store: store.memberships(users))

    async def memberships_in(
        self, asked: Sequence[tuple[User, str]]
    ) -> Mapping[tuple[User, str], Cursor]:
        """The (epoch, head) for each (user, chat_id) that is a membership now."""
        return await self.ask(lambda store: store.memberships_in(asked))

    async def heads(
        self, chat_ids: Iterable[str], deadline: float | None = None
    ) -> Mapping[str, Cursor]:
        """The (epoch, head) of each chat that exists."""
        return await self.ask(lambda store: store.heads(chat_ids), deadline)

    async def sync(
        self,
        user: User,
        chat_id: str,
        cursor: Cursor,
        limit: int,
        asked_at: float | None = None,
        proof: str | None = None,
    ) -> Page:
        """The page behind a cursor. If the chat has another epoch or a lower head, the
        page starts at 0 and is marked ``reset``.

        The deadline counts from ``asked_at`` (monotonic; now, if not given), because a
        request may have waited before it gets here.
        """
        wanted = _Wanted(
            user, chat_id, cursor, limit, self._page_bytes_max, self._deadline(asked_at), proof
        )
        return await self._page(wanted)

    async def resume(
        self,
        user: User,
        cursors: Mapping[str, Cursor],
        asked_at: float | None = None,
        only: Collection[str] | None = None,
        proofs: Mapping[str, str] | None = None,
    ) -> ResumeRead:
        """What a returning client missed, see ``ResumeRead``.

        ``asked_at`` is as for ``sync``; ``proofs`` are by chat. ``only`` is for a
        credential that is valid for some chats: the others are treated as if the user
        were not in them.

        Unproven cursors beyond their heads count as one reset, however many there are:
        a client that lost its proofs must get through.
        """
        deadline = self._deadline(asked_at)
        async with self._resumes.one(user.tenant, max(deadline - self._clock.monotonic(), 0.0)):
            heads = dict(await self.memberships(user, deadline))
            if only is not None:
                heads = {chat_id: head for chat_id, head in heads.items() if chat_id in only}
            joined = [chat_id for chat_id in heads if chat_id not in cursors]
            gone = [chat_id for chat_id in cursors if chat_id not in heads]
            unproven: dict[str, Cursor] = {}
            for chat_id, cursor in cursors.items():
                head = heads.get(chat_id)
                if head is None or not _beyond(cursor, head):
                    continue
                if self._rollbacks.proven(user, chat_id, cursor, (proofs or {}).get(chat_id)):
                    heads[chat_id] = await self._rollbacks.raise_epoch(
                        user, chat_id, cursor, head, deadline
                    )
                else:
                    if not unproven:
                        self._rollbacks.charge_reset(user, chat_id, cursor, head)
                    unproven[chat_id] = _NOTHING
            pages = await self._first_pages(
                user, _moved(heads, {**cursors, **unproven}), deadline, gone
            )
            for chat_id in (*gone, *(page.chat_id for page in pages)):
                heads.pop(chat_id, None)
            return ResumeRead(pages=pages, joined=joined, gone=gone, heads=heads)

    def _deadline(self, asked_at: float | None) -> float:
        since = self._clock.monotonic() if asked_at is None else asked_at
        return since + self._settings.request_timeout_seconds

    async def _first_pages(
        self, user: User, moved: Iterable[tuple[str, Cursor]], deadline: float, gone: list[str]
    ) -> list[Page]:
        """As many first pages as fit into the bytes and the time. Chats that the user
        lost meanwhile are added to ``gone``.
        """
        pages: list[Page] = []
        left = self._page_bytes_max - ENVELOPE_BYTES
        for chat_id, cursor in moved:
            if left <= 0 or self._clock.monotonic() >= deadline:
                break
            try:
                wanted = _Wanted(
                    user, chat_id, cursor, self._settings.resume_page_messages, left, deadline
                )
                page = await self._page(wanted)
            except (NotAMember, NotFound):
                gone.append(chat_id)
                continue
            except (Deferred, OutcomeUnknown):
                break
            left -= size_of(page)
            if left >= 0:
                pages.append(page)
        return pages

    async def _page(self, wanted: _Wanted) -> Page:
        cursor = wanted.cursor
        page = await self._read(wanted, cursor.sequence)
        head = Cursor(page.epoch, page.head)
        if _beyond(cursor, head):
            if self._rollbacks.proven(wanted.user, wanted.chat_id, cursor, wanted.proof):
                await self._rollbacks.raise_epoch(
                    wanted.user, wanted.chat_id, cursor, head, wanted.deadline
                )
            else:
                self._rollbacks.charge_reset(wanted.user, wanted.chat_id, cursor, head)
        elif page.epoch == cursor.epoch:
            return page
        if cursor.sequence:
            page = await self._read(wanted, 0)
        return replace(page, reset=True)

    async def _read(self, wanted: _Wanted, after: int) -> Page:
        user, chat_id, _, limit, bytes_max, deadline, _ = wanted
        page = await self.ask(
            lambda store: store.read_after(chat_id, after, limit, bytes_max, user), deadline, user
        )
        return replace(
            page, proof=self._proofs.of(user.tenant, chat_id, Cursor(page.epoch, page.through))
        )

    async def _judged(self, read: Callable[[ChatStore], Awaitable[T]], deadline: float) -> T:
        """Carry out an admitted read and report its result to the breaker."""
        seconds = min(self._settings.read_timeout_seconds, deadline - self._clock.monotonic())
        try:
            async with asyncio.timeout(seconds):
                result = await read(self._store)
        except asyncio.CancelledError:
            self._guard.learned_nothing()
            raise
        except TimeoutError:
            self._guard.failed("it does not answer in time")
            raise Unavailable(
                "the store did not answer in time; try again", retry_after_seconds=1
            ) from None
        except (Unavailable, OutcomeUnknown) as error:
            self._guard.failed(error.message)
            raise
        except HoldfastError as error:
            # A refusal is an answer of a store that works; a private error is not.
            if error.private:
                self._guard.failed(error.message)
            else:
                self._guard.succeeded()
            raise
        except Exception as error:
            self._guard.failed("a defect, which is logged")
            telemetry.defect("store", error)
            raise Unavailable("the store failed; try again") from error
        self._guard.succeeded()
        return result


def _beyond(cursor: Cursor, head: Cursor) -> bool:
    return cursor.epoch == head.epoch and cursor.sequence > head.sequence


def _moved(heads: Mapping[str, Cursor], cursors: Mapping[str, Cursor]) -> list[tuple[str, Cursor]]:
    """The chats whose head differs from the client's cursor, each with its cursor."""
    places = (
        (chat_id, head, cursors.get(chat_id, Cursor(head.epoch, 0)))
        for chat_id, head in heads.items()
    )
    return [(chat_id, cursor) for chat_id, head, cursor in places if cursor != head]
