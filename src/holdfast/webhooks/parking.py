"""The jobs of disabled endpoints: parked until the endpoint is enabled, or until they
are too many or too old and become dead letters.

A disabled endpoint is a paused destination of the worker. Its jobs, new ones included,
stay in the store in order, and run when it is enabled. A pause writes nothing: it
follows from the endpoints, also after a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime

from msgspec import Struct

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import NotFound
from holdfast.webhooks.contract import JOB_TYPE, WebhookEndpoint, WebhookEndpoints
from holdfast.webhooks.delivery import FailingEndpoints, WebhookSettings
from holdfast.work.contract import WorkStore
from holdfast.work.job import Failure, Reason

EXPIRE_SECONDS = 10.0
"""How often parked jobs are counted; in between, their number may exceed the bound."""
EXPIRED_AT_ONCE_MAX = 1000


class ParkedStatus(Struct, frozen=True):
    """The number of endpoints, and of jobs parked for each disabled one by its id."""

    endpoints: int = 0
    parked: Mapping[str, int] = {}


class Parking:
    """Runs until cancelled; the node restarts it after a failure."""

    def __init__(
        self,
        endpoints: WebhookEndpoints,
        jobs: WorkStore,
        pause: Callable[[Collection[tuple[str, str]]], None],
        group: Callable[[Mapping[tuple[str, str], str]], None],
        clock: Clock,
        settings: WebhookSettings,
        failing: FailingEndpoints | None = None,
    ) -> None:
        self._failing = failing or FailingEndpoints()
        self._endpoints, self._jobs, self._clock, self._settings = endpoints, jobs, clock, settings
        self._pause, self._group = pause, group
        self._version = -1
        self._disabled: Sequence[WebhookEndpoint] = ()
        self.status = ParkedStatus()

    async def run(self) -> None:
        while True:
            await self.update()
            await self.expire()
            try:
                async with asyncio.timeout(EXPIRE_SECONDS):
                    await self._endpoints.changed(self._version)
            except TimeoutError:
                pass

    async def update(self) -> None:
        """Pause exactly the disabled endpoints; each tenant's endpoints are a group."""
        version = self._endpoints.version
        if version == self._version:
            return
        endpoints = await self._endpoints.all()
        self._disabled = [endpoint for endpoint in endpoints if endpoint.disabled]
        self._group({(JOB_TYPE, endpoint.endpoint_id): endpoint.tenant for endpoint in endpoints})
        self._failing.on_endpoints({each.endpoint_id for each in endpoints if not each.disabled})
        self._pause({(JOB_TYPE, endpoint.endpoint_id) for endpoint in self._disabled})
        self._version = version
        self.status = ParkedStatus(len(endpoints), {each.endpoint_id: 0 for each in self._disabled})

    async def expire(self) -> None:
        """Bury jobs that are parked for too long, and the oldest beyond the bound."""
        parked: dict[str, int] = {}
        for endpoint in self._disabled:
            parked[endpoint.endpoint_id] = await self._expire(endpoint)
        self.status = ParkedStatus(self.status.endpoints, parked)
        telemetry.webhooks_parked(len(parked), sum(parked.values()))

    async def _expire(self, endpoint: WebhookEndpoint) -> int:
        """Expire one endpoint's jobs; how many stay parked."""
        name, chosen = endpoint.endpoint_id, self._settings
        days = chosen.parked_seconds_max / 86400
        before = self._clock.now() - chosen.parked_seconds_max
        if datetime.fromisoformat(endpoint.disabled_at).timestamp() <= before:
            while aged := await self._jobs.oldest(name, before=before, limit=EXPIRED_AT_ONCE_MAX):
                if not await self._bury(endpoint, aged, f"it was parked for {days:g} days"):
                    break
        waiting = await self._jobs.waiting([name])
        jobs = waiting[name].jobs if name in waiting else 0
        while (excess := jobs - chosen.parked_max) > 0:
            oldest = await self._jobs.oldest(
                name, before=float("inf"), limit=min(excess, EXPIRED_AT_ONCE_MAX)
            )
            if not await self._bury(
                endpoint, oldest, f"more than {chosen.parked_max:,} jobs were parked"
            ):
                break
            jobs -= len(oldest)
        return jobs

    async def _bury(self, endpoint: WebhookEndpoint, seqs: Sequence[int], why: str) -> bool:
        """Bury these jobs; False if the endpoints changed or the jobs are gone."""
        if self._endpoints.version != self._version:
            return False
        error = f"{endpoint.endpoint_id} is disabled ({endpoint.disabled}): {why}"
        failure = Failure(Reason.TRANSPORT_UNAVAILABLE, "EndpointDisabled", error)
        try:
            count = await self._jobs.bury(seqs, by="holdfast", why=error, failure=failure)
        except NotFound:
            return False
        telemetry.webhooks_expired(count)
        telemetry.log.warning(
            "webhooks.parked_jobs_expired", endpoint=endpoint.endpoint_id, jobs=count, reason=why
        )
        return True
