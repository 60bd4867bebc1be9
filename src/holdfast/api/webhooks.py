"""Operators' endpoints of webhooks. Every act has a reason and is recorded first."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from holdfast.api.admin import record
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call
from holdfast.api.jobs import Count
from holdfast.api.schemas import Id, RequestBody, _Reason
from holdfast.clock import timestamp
from holdfast.errors import InvalidMessage, OutcomeUnknown, Unavailable
from holdfast.webhooks.address_guard import URL_LENGTH_MAX, check_url
from holdfast.webhooks.contract import Delivery, WebhookEndpoint
from holdfast.webhooks.delivery import DeliveryNotice, draft_of
from holdfast.webhooks.signature import SECRET_BYTES, new_secret
from holdfast.work.inspection import WaitingJobs


class NewEndpoint(RequestBody, frozen=True):
    url: Annotated[str, Meta(min_length=1, max_length=URL_LENGTH_MAX)]
    reason: _Reason
    tenant: Id = "default"
    description: Annotated[str, Meta(max_length=200)] = ""


class EndpointView(Struct, frozen=True):
    """``secret`` is shown once, when the endpoint is made. ``waiting``: its jobs that
    are not done, which are parked while it is disabled; null where the jobs were not
    asked for or do not answer.
    """

    endpoint_id: str
    tenant: str
    url: str
    description: str
    created_at: str
    disabled: str
    disabled_at: str
    secret: str | None = None
    waiting: int | None = None
    oldest_waiting_at: str | None = None


class EndpointList(Struct, frozen=True):
    endpoints: Sequence[EndpointView]


class DeliveryList(Struct, frozen=True):
    deliveries: Sequence[Delivery]


def _view(endpoint: WebhookEndpoint, secret: str | None = None) -> EndpointView:
    return EndpointView(**{**asdict(endpoint), "secret": secret})


async def _named(deps: ApiDeps, call: Call) -> WebhookEndpoint:
    """The endpoint that the path names; NotFound if there is none."""
    return await call.in_time(deps.work.webhooks.endpoints.get(call.path["endpoint_id"]))


async def list_webhooks(deps: ApiDeps, call: Call) -> Answer:
    found = await call.in_time(deps.work.webhooks.endpoints.all())
    try:
        waiting = await call.in_time(
            deps.work.jobs.waiting([endpoint.endpoint_id for endpoint in found])
        )
    except (Unavailable, OutcomeUnknown):
        return Answer(EndpointList([_view(endpoint) for endpoint in found]))
    return Answer(
        EndpointList([_counted(_view(each), waiting.get(each.endpoint_id)) for each in found])
    )


def _counted(view: EndpointView, waiting: WaitingJobs | None) -> EndpointView:
    if waiting is None:
        return replace(view, waiting=0)
    return replace(view, waiting=waiting.jobs, oldest_waiting_at=timestamp(waiting.oldest_at))


async def create_webhook(deps: ApiDeps, call: Call) -> Answer:
    body: NewEndpoint = call.body
    webhooks = deps.work.webhooks
    check_url(body.url, private_allowed=webhooks.private_allowed)
    if not webhooks.begun():
        raise Unavailable(
            "the job store has been unavailable since startup: an endpoint would miss messages"
        )
    secret, at = new_secret(secrets.token_bytes(SECRET_BYTES)), timestamp(deps.clock.now())
    endpoint = WebhookEndpoint(
        deps.ids.new("ep_"), body.tenant, body.url, secret, body.description, at
    )
    await record(
        deps,
        call,
        "webhook.add",
        f"{endpoint.endpoint_id} {endpoint.tenant} {endpoint.url}",
        body.reason,
    )
    await call.done_in_time(webhooks.endpoints.add(endpoint))
    return Answer(_view(endpoint, secret))


async def delete_webhook(deps: ApiDeps, call: Call) -> Answer:
    endpoint = await _named(deps, call)
    await record(
        deps, call, "webhook.remove", f"{endpoint.endpoint_id} {endpoint.url}", call.query.reason
    )
    await call.done_in_time(deps.work.webhooks.endpoints.remove(endpoint.endpoint_id))
    return Answer(_view(endpoint))


async def enable_webhook(deps: ApiDeps, call: Call) -> Answer:
    endpoint = await _named(deps, call)
    await record(deps, call, "webhook.enable", endpoint.endpoint_id, call.body.reason)
    await call.done_in_time(deps.work.webhooks.endpoints.enable(endpoint.endpoint_id))
    return Answer(_view(replace(endpoint, disabled="", disabled_at="")))


async def disable_webhook(deps: ApiDeps, call: Call) -> Answer:
    endpoint = await _named(deps, call)
    why, at = call.body.reason, timestamp(deps.clock.now())
    await record(deps, call, "webhook.disable", endpoint.endpoint_id, why)
    await call.done_in_time(
        deps.work.webhooks.endpoints.disable(endpoint.endpoint_id, f"by an operator: {why}", at)
    )
    return Answer(_view(await _named(deps, call)))


async def check_webhook(deps: ApiDeps, call: Call) -> Answer:
    endpoint = await _named(deps, call)
    if endpoint.disabled:
        raise InvalidMessage(
            f"{endpoint.endpoint_id} is disabled: enable it first, a test would be parked"
        )
    await record(deps, call, "webhook.test", endpoint.endpoint_id, call.body.reason)
    at = timestamp(deps.clock.now())
    jobs = deps.work.jobs.enqueue(
        [draft_of(DeliveryNotice(endpoint.endpoint_id, endpoint.tenant, at))]
    )
    return Answer(Count(len(await call.done_in_time(jobs))))


async def list_webhook_deliveries(deps: ApiDeps, call: Call) -> Answer:
    endpoint = await _named(deps, call)
    found = deps.work.webhooks.endpoints.deliveries(endpoint.endpoint_id, call.query.limit)
    return Answer(DeliveryList(await call.in_time(found)))
