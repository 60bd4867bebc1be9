"""Operators' endpoints about AI replies: which there are, cancel one, what they used.

They never show what a reply or its request says. Each node knows the replies it makes
and the usage of those; what an answer says of others comes from the shared log.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from holdfast.api.admin import record
from holdfast.api.deps import ApiDeps
from holdfast.api.endpoint import Answer, Call
from holdfast.api.schemas import Id, RequestBody, Why
from holdfast.errors import InvalidMessage
from holdfast.streaming.live_reply import ReplyState
from holdfast.streaming.reply import ReplyBegin
from holdfast.streaming.summary import ReplySummary
from holdfast.streaming.usage_store.contract import UsageKey, UsageQuery, UsageRow

USAGE_DAYS = 30
"""How far back usage goes unless ``since`` says."""

_Limit = Annotated[int, Meta(ge=1, le=1000)]
_Day = Annotated[
    str, Meta(max_length=40, description="In UTC.", extra_json_schema={"format": "date"})
]
_Text = Annotated[str, Meta(min_length=1, max_length=512)]


class RepliesQuery(RequestBody, frozen=True):
    """``after`` is the ``next`` of the page before; the others leave out what does not
    match.
    """

    after: Id | None = None
    limit: _Limit = 100
    tenant: Id | None = None
    owner: Id | None = None
    model: _Text | None = None
    state: Literal["waiting", "running", "ended"] | None = None


class ReplyPage(Struct, frozen=True):
    """What this node makes; ``nodes`` are the others to ask. ``next`` is null on the
    last page.
    """

    node: str
    nodes: Sequence[str]
    replies: Sequence[ReplySummary]
    next: str | None


class ReplyCancelled(Struct, frozen=True):
    """``cancelled`` false: it had ended already."""

    cancelled: bool


class UsageRowsQuery(RequestBody, frozen=True):
    """Days that both count; left out: the last 30 days. ``after`` is the ``next`` of
    the page before.
    """

    since: _Day | None = None
    until: _Day | None = None
    tenant: Id | None = None
    user: _Text | None = None
    after: Annotated[str, Meta(max_length=4096)] | None = None
    limit: _Limit = 1000


class UsageView(Struct, frozen=True):
    """Runs of one day, tenant, user, model and provider. ``estimated``: how many of
    them count by an estimate. ``user``: ``key:<id>`` for a key that named nobody, ""
    for erased users. ``provider`` "": no provider accepted the request.
    """

    day: str
    tenant: str
    user: str
    model: str
    provider: str
    replies: int
    prompt_tokens: int
    completion_tokens: int
    estimated: int


class UsagePage(Struct, frozen=True):
    """What the replies of this node used. ``next`` is null on the last page."""

    node: str
    rows: Sequence[UsageView]
    next: str | None


async def list_running_replies(deps: ApiDeps, call: Call) -> Answer:
    query: RepliesQuery = call.query

    def fits(begin: ReplyBegin, state: ReplyState) -> bool:
        """Called for every reply of the node in one turn of the loop."""
        return (
            (query.tenant is None or begin.owner_tenant == query.tenant)
            and (query.owner is None or begin.owner_name == query.owner)
            and (query.model is None or begin.model == query.model)
            and (query.state is None or state == query.state)
        )

    parts = deps.streaming
    found = parts.replies(query.after or "", query.limit + 1, fits)
    shown = found[: query.limit]
    more = shown[-1].reply_id if len(found) > query.limit else None
    return Answer(ReplyPage(parts.node, parts.nodes, shown, more))


async def get_reply_summary(deps: ApiDeps, call: Call) -> Answer:
    return Answer(await call.in_time(deps.streaming.summary(call.path["reply_id"])))


async def cancel_any_reply(deps: ApiDeps, call: Call) -> Answer:
    """Recorded first, unless there is nothing to cancel."""
    body: Why = call.body
    reply_id = call.path["reply_id"]
    summary = await call.in_time(deps.streaming.summary(reply_id))
    if summary.state == "ended":
        return Answer(ReplyCancelled(False))
    await record(deps, call, "reply.cancel", reply_id, body.reason, summary.tenant)
    return Answer(ReplyCancelled(await call.done_in_time(deps.streaming.cancel_any(reply_id))))


async def read_usage(deps: ApiDeps, call: Call) -> Answer:
    query: UsageRowsQuery = call.query
    today = datetime.fromtimestamp(deps.clock.now(), UTC).date()
    last = _date(query.until, "until", today)
    first = _date(query.since, "since", last - timedelta(days=USAGE_DAYS - 1))
    asked = UsageQuery(
        first.isoformat(),
        last.isoformat(),
        query.tenant or "",
        query.user or "",
        _key_of_token(query.after),
        query.limit + 1,
    )
    found = await call.in_time(deps.usage.rows(asked))
    shown = found[: query.limit]
    more = _page_token(shown[-1].key) if len(found) > query.limit else None
    return Answer(UsagePage(deps.streaming.node, [_view(row) for row in shown], more))


def _view(row: UsageRow) -> UsageView:
    return UsageView(*row.key, *row[1:])


def _date(said: str | None, field: str, default: date) -> date:
    if said is None:
        return default
    with suppress(ValueError):
        if (day := date.fromisoformat(said)).isoformat() == said:
            return day
    raise InvalidMessage(f"{field} must be a day such as 2026-05-31", field=field)


def _page_token(key: UsageKey) -> str:
    """The end of a page, in characters safe in a URL."""
    return base64.urlsafe_b64encode(msgspec.json.encode(key)).decode().rstrip("=")


def _key_of_token(after: str | None) -> UsageKey | None:
    if after is None:
        return None
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(after + "=="), type=UsageKey)
    except (ValueError, msgspec.DecodeError):
        raise InvalidMessage("after must be the next of the page before", field="after") from None
