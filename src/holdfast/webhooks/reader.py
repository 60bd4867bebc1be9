"""From the event log to jobs: one per (endpoint, chat, sequence).

The position is stored in the same transaction as the jobs, so a crash repeats nothing and leaves nothing out.
An endpoint gets what is committed after it was added; a first start begins at the log's end.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.clock import Clock, timestamp
from holdfast.errors import UnreadableEvent
from holdfast.eventlog.contract import EventLog
from holdfast.message import Entry
from holdfast.webhooks.contract import Endpoint, Endpoints
from holdfast.webhooks.delivery import Notice, draft_of
from holdfast.work.contract import Mark, WorkStore
from holdfast.work.job import Draft

NAME = "webhooks"
BATCH = 500


class Reader:
    """Runs until cancelled; where it fails it is started again by its node, at its stored position."""

    def __init__(self, log: EventLog, endpoints: Endpoints, jobs: WorkStore, clock: Clock) -> None:
        self._log, self._endpoints, self._jobs, self._clock = log, endpoints, jobs, clock
        self._known: tuple[int, dict[str, list[Endpoint]]] = (0, {})

    async def run(self) -> None:
        position = await self._jobs.position(NAME)
        if position is None:
            position = await self._log.end()
            await self._jobs.enqueue([], Mark(NAME, position))
        while True:
            await self._log.wait(position)
            position = await self.advance(position)

    async def advance(self, position: int) -> int:
        """Make jobs of the entries after ``position``; returns where it stands then."""
        try:
            entries = await self._log.read(position, BATCH)
        except UnreadableEvent:
            # The fanout reports it; a message that cannot be read cannot be sent.
            await self._jobs.enqueue([], Mark(NAME, position + 1))
            return position + 1
        if not entries:
            return position
        by_tenant = await self._by_tenant()
        at = timestamp(self._clock.now())
        drafts = [draft for entry in entries for draft in _drafts(entry, by_tenant.get(entry.tenant, ()), at)]
        reached = entries[-1].position
        await self._jobs.enqueue(drafts, Mark(NAME, reached))
        return reached

    async def _by_tenant(self) -> dict[str, list[Endpoint]]:
        version, known = self._known
        if version != self._endpoints.version:
            version, known = self._endpoints.version, {}
            for endpoint in await self._endpoints.all():
                if not endpoint.disabled:
                    known.setdefault(endpoint.tenant, []).append(endpoint)
            self._known = (version, known)
        return known


def _drafts(entry: Entry, endpoints: Sequence[Endpoint], at: str) -> list[Draft]:
    return [draft_of(Notice(endpoint.endpoint_id, entry.tenant, at, entry.message)) for endpoint in endpoints]
