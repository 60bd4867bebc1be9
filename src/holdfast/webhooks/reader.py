"""From the event log to delivery jobs: one per (endpoint, chat, sequence).

An endpoint gets what is committed after it was added. ``fanout.job_reader`` says how
the position is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.clock import Clock, timestamp
from holdfast.eventlog.contract import EventLog, Position
from holdfast.fanout.job_reader import JobReader
from holdfast.message import LogEntry, Message
from holdfast.store.contract import ChatStore
from holdfast.webhooks.contract import WebhookEndpoint, WebhookEndpoints
from holdfast.webhooks.delivery import DeliveryNotice, draft_of
from holdfast.work.contract import WorkStore
from holdfast.work.job import JobDraft


class WebhookReader(JobReader):
    """Until it has ``begun``, endpoints that are added may miss messages."""

    reader = "webhooks"

    def __init__(
        self,
        log: EventLog,
        endpoints: WebhookEndpoints,
        jobs: WorkStore,
        chats: ChatStore,
        clock: Clock,
    ) -> None:
        super().__init__(log, jobs, chats, clock)
        self._endpoints = endpoints
        self._known: tuple[int, dict[str, list[WebhookEndpoint]]] = (0, {})
        self._noticed: dict[str, Position] = {}
        """The log's end when an endpoint was first seen; later entries are its to get.
        """

    async def drafts(self, entries: Sequence[LogEntry], position: Position) -> list[JobDraft]:
        by_tenant = await self._by_tenant(position)
        at = timestamp(self._clock.now())
        return [
            draft
            for entry in entries
            if entry.tenant in by_tenant and isinstance(entry.what, Message)
            for draft in self._drafts(entry, entry.what, by_tenant[entry.tenant], at)
        ]

    async def _by_tenant(self, position: Position) -> dict[str, list[WebhookEndpoint]]:
        """The endpoints by tenant. Before a change of endpoints takes effect, the
        position from which it does is stored.
        """
        version, known = self._known
        # Asked after the entries were read: endpoints added before them are there.
        if version != (stored := await self._endpoints.stored_version()):
            if position.is_beyond(self.marked):
                await self.mark(position)
            version, known = stored, {}
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
        self, entry: LogEntry, message: Message, endpoints: Sequence[WebhookEndpoint], at: str
    ) -> list[JobDraft]:
        """The jobs of one entry: none for endpoints that were added after it.

        Positions decide. Times decide only for entries before the endpoint was first
        seen, so a clock that is set back costs no message.
        """
        about = (entry.chat_id, message.sequence, message.message_id)
        return [
            draft_of(DeliveryNotice(each.endpoint_id, entry.tenant, at, *about))
            for each in endpoints
            if not self._noticed[each.endpoint_id].includes(entry)
            or each.created_at <= message.created_at
        ]
