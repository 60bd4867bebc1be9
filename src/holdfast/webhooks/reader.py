"""From the event log to jobs: one per (endpoint, chat, sequence).

The job store commits the reader's position together with the jobs, so a crash neither
repeats nor skips anything. For batches without jobs the position is stored only now and
then: a server without webhooks must not pay a commit per batch. An endpoint gets what
is committed after it was added; the first start begins at the log's end.

Its position is stored as one mark per shard. A position beyond the log's end means that
the chats were restored from a backup, and the jobs, in another database, were not. The
entries of the restored log had jobs before, so the reader begins at the log's end. A
job store never moves a position back, so the reader continues under its next name
(``webhooks.1``); the highest name counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.clock import Clock, timestamp
from holdfast.errors import UnreadableEvent
from holdfast.eventlog.contract import START, EventLog, Position
from holdfast.message import LogEntry
from holdfast.telemetry import log
from holdfast.webhooks.contract import WebhookEndpoint, WebhookEndpoints
from holdfast.webhooks.delivery import DeliveryNotice, draft_of
from holdfast.work.contract import ReaderMark, WorkStore
from holdfast.work.job import JobDraft

NAME = "webhooks"
BATCH = 500
UNMARKED_MAX = 10_000
"""How many entries without jobs a crash may make it read again."""


class WebhookReader:
    """Runs until cancelled; the node restarts a failed one at its stored position."""

    def __init__(
        self, log: EventLog, endpoints: WebhookEndpoints, jobs: WorkStore, clock: Clock
    ) -> None:
        self._log, self._endpoints, self._jobs, self._clock = log, endpoints, jobs, clock
        self._known: tuple[int, dict[str, list[WebhookEndpoint]]] = (0, {})
        self._name, self._marked, self._unmarked = NAME, START, 0
        self.begun = False
        """Whether its position is stored; endpoints added before may miss messages."""
        self._noticed: dict[str, Position] = {}
        """The log's end when an endpoint was first seen; later entries are its to get.
        """

    async def run(self) -> None:
        position = await self.begin()
        while True:
            await self._log.wait(position)
            position = await self.advance(position)

    async def begin(self) -> Position:
        """The position to start from: the stored one, or else the log's end."""
        self._marked = await self._begin()
        self.begun = True
        return self._marked

    async def _begin(self) -> Position:
        end = await self._log.end()
        restores, position = 0, await self._stored(NAME, end)
        while (later := await self._stored(f"{NAME}.{restores + 1}", end)) is not None:
            restores, position = restores + 1, later
        if position is not None and position.is_beyond(end):
            log.warning(
                "webhooks.log_restored",
                detail="the log ends before the reader's position",
                end=list(end.offsets),
                position=list(position.offsets),
            )
            restores, position = restores + 1, None
        self._name = f"{NAME}.{restores}" if restores else NAME
        if position is None:
            position = end
            await self._mark(position)
        return position

    async def _stored(self, name: str, end: Position) -> Position | None:
        """The stored position of a reader of all shards that the log has."""
        stored = [await self._jobs.reader_offset(name, n) for n in range(len(end.offsets))]
        if all(offset is None for offset in stored):
            return None
        return Position(tuple(offset or 0 for offset in stored))

    async def advance(self, position: Position) -> Position:
        """Make jobs of the next entries; returns the new position."""
        try:
            entries, reached = await self._log.read(position, BATCH)
        except UnreadableEvent as event:
            # Skip it: an unreadable message cannot be sent. The fanout reports it.
            reached = position.moved(event.shard, event.offset)
            await self._mark(reached)
            return reached
        if not entries:
            return position
        by_tenant = await self._by_tenant(position)
        at = timestamp(self._clock.now())
        drafts = [
            draft
            for entry in entries
            if entry.tenant in by_tenant
            for draft in self._drafts(entry, by_tenant[entry.tenant], at)
        ]
        self._unmarked += len(entries)
        if drafts or self._unmarked >= UNMARKED_MAX:
            await self._mark(reached, drafts)
        return reached

    async def _mark(self, position: Position, drafts: Sequence[JobDraft] = ()) -> None:
        marks = [ReaderMark(self._name, *moved) for moved in enumerate(position.offsets)]
        await self._jobs.enqueue(drafts, marks)
        self._marked, self._unmarked = position, 0

    async def _by_tenant(self, position: Position) -> dict[str, list[WebhookEndpoint]]:
        """The endpoints by tenant. Before a change of endpoints takes effect, the
        position from which it does is stored.
        """
        version, known = self._known
        if version != self._endpoints.version:
            if position.is_beyond(self._marked):
                await self._mark(position)
            version, known = self._endpoints.version, {}
            endpoints, end = await self._endpoints.all(), await self._log.end()
            self._noticed = {
                each.endpoint_id: self._noticed.get(each.endpoint_id, end) for each in endpoints
            }
            for endpoint in endpoints:
                # also if disabled: its jobs are parked
                known.setdefault(endpoint.tenant, []).append(endpoint)
            self._known = (version, known)
        return known

    def _drafts(
        self, entry: LogEntry, endpoints: Sequence[WebhookEndpoint], at: str
    ) -> list[JobDraft]:
        """The jobs of one entry: none for endpoints that were added after it.

        Positions decide. Times decide only for entries before the endpoint was first
        seen, so a clock that is set back costs no message.
        """
        about = (entry.message.chat_id, entry.message.sequence, entry.message.message_id)
        return [
            draft_of(DeliveryNotice(each.endpoint_id, entry.tenant, at, *about))
            for each in endpoints
            if not self._noticed[each.endpoint_id].includes(entry)
            or each.created_at <= entry.message.created_at
        ]
