"""Operators' endpoints about AI replies: list, show, cancel; what was used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from api_rig import Rest, error_of, serving
from reply_rig import FakeProvider, ReplyRig, read

from holdfast.errors import Unavailable
from holdfast.streaming.reply import Owner, Payer
from holdfast.streaming.usage_store.contract import RunUsage, UsageKey
from holdfast.streaming.usage_store.memory import MemoryUsage

BOB = Owner("other", "key", "bob")
SECRET = "what nobody but the owner may read"


@asynccontextmanager
async def replying() -> AsyncIterator[tuple[Rest, ReplyRig]]:
    """Three replies of Anna run, two wait; one of Bob's key runs."""
    provider = FakeProvider(steps=[SECRET] * 100, token_seconds=1.0)
    rig = ReplyRig(provider=provider)
    async with serving(replies=rig) as rest:
        for _ in range(5):
            await rig.start(kind="background", replicated=True)
        await rig.start(kind="background", owner=BOB, payer=Payer("other", "bob", is_key=True))
        await asyncio.sleep(3.5)
        yield rest, rig


async def get(rest: Rest, path: str) -> Any:
    answer = await rest.ask("GET", path, rest.admin_key())
    assert answer.status_code == 200, answer.text
    assert SECRET not in answer.text
    return answer.json()


async def test_operator_lists_replies_without_their_text() -> None:
    async with replying() as (rest, _):
        page = await get(rest, "/admin/replies")
        assert (page["node"], page["nodes"], page["next"]) == ("node-a", ["node-a"], None)
        shown = {
            reply["reply_id"]: (reply["state"], reply["position"], reply["owner_kind"])
            for reply in page["replies"]
        }
        assert list(shown.values()) == [
            *[("running", 0, "user")] * 3,
            ("waiting", 1, "user"),
            ("waiting", 2, "user"),
            ("running", 0, "key"),
        ]
        first = page["replies"][0]
        assert (first["tenant"], first["owner"], first["kind"], first["model"], first["node"]) == (
            "acme",
            "anna",
            "background",
            "tiny",
            "node-a",
        )
        assert await get(rest, f"/admin/replies/{first['reply_id']}") == first


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("state=waiting", 2),
        ("state=ended", 0),
        ("tenant=other", 1),
        ("tenant=acme&state=running", 3),
        ("owner=bob", 1),
        ("model=tiny", 6),
        ("model=none", 0),
    ],
)
async def test_list_of_replies_is_filtered(query: str, count: int) -> None:
    async with replying() as (rest, _):
        assert len((await get(rest, f"/admin/replies?{query}"))["replies"]) == count


async def test_list_of_replies_is_paged_in_the_order_of_ids() -> None:
    async with replying() as (rest, rig):
        after, seen = "", []
        while after is not None:
            page = await get(rest, f"/admin/replies?limit=4{f'&after={after}' if after else ''}")
            seen += [reply["reply_id"] for reply in page["replies"]]
            after = page["next"]
        assert seen == sorted(summary.reply_id for summary in rig.parts.replies())
        assert len(seen) == 6


async def test_operator_cancels_a_reply_and_it_is_in_the_audit_log() -> None:
    async with replying() as (rest, rig):
        key, path = rest.admin_key(), "/admin/replies/rpl_node-a_1"
        cursor = asyncio.create_task(
            read(await rig.parts.find(Owner("acme", "user", "anna"), "rpl_node-a_1"))
        )
        await asyncio.sleep(1)
        done = await rest.ask("POST", f"{path}/cancel", key, {"reason": "runaway"})
        assert (done.status_code, done.json()) == (200, {"cancelled": True})
        assert (await cursor).code == "cancelled"
        again = await rest.ask("POST", f"{path}/cancel", key, {"reason": "runaway"})
        assert again.json() == {"cancelled": False}
        records = (await get(rest, "/admin/audit"))["records"]
        assert [(r["action"], r["target"], r["reason"]) for r in records] == [
            ("reply.cancel", "rpl_node-a_1", "runaway")
        ], "what changed nothing is not recorded"


async def test_unknown_reply_is_not_found() -> None:
    async with serving() as rest:
        key = rest.admin_key()
        for method, path, body in [
            ("GET", "/admin/replies/none", None),
            ("POST", "/admin/replies/none/cancel", {"reason": "r"}),
        ]:
            assert error_of(await rest.ask(method, path, key, body)) == (404, "NOT_FOUND")


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        ("replies:read", {"/admin/replies", "/admin/replies/r"}),
        ("usage:read", {"/admin/usage"}),
        ("replies:write", {"/admin/replies/r/cancel"}),
        ("status:read", set()),
    ],
)
async def test_each_endpoint_needs_its_scope(scope: Any, allowed: set[str]) -> None:
    async with serving() as rest:
        key = rest.admin_key(scope)
        passed = set()
        for path in ("/admin/replies", "/admin/replies/r", "/admin/usage"):
            if (await rest.ask("GET", path, key)).status_code != 403:
                passed.add(path)
        path = "/admin/replies/r/cancel"
        if (await rest.ask("POST", path, key, {"reason": "r"})).status_code != 403:
            passed.add(path)
        assert passed == allowed


TODAY = "2023-11-14"
"""By the clock of the rig."""


def run(number: int, day: str = TODAY, user: str = "anna", tenant: str = "acme") -> RunUsage:
    return RunUsage(f"use_{number}", UsageKey(day, tenant, user, "tiny", "openai"), 10, 5, False)


async def test_usage_is_read_by_day_tenant_and_user() -> None:
    usage = MemoryUsage()
    await usage.count(
        [
            run(1),
            run(2),
            run(3, user="key:k1")._replace(estimated=True),
            run(4, tenant="other"),
            run(5, day="2023-10-16"),
            run(6, day="2023-10-15"),
        ]
    )
    async with serving(usage=usage) as rest:
        whole = await get(rest, "/admin/usage")
        assert (whole["node"], whole["next"]) == ("node-a", None)
        assert [(r["day"], r["tenant"], r["user"], r["replies"]) for r in whole["rows"]] == [
            ("2023-10-16", "acme", "anna", 1),
            (TODAY, "acme", "anna", 2),
            (TODAY, "acme", "key:k1", 1),
            (TODAY, "other", "anna", 1),
        ], "of the last 30 days"
        assert whole["rows"][1] == {
            "day": TODAY, "tenant": "acme", "user": "anna", "model": "tiny", "provider": "openai",
            "replies": 2, "prompt_tokens": 20, "completion_tokens": 10, "estimated": 0,
        }  # fmt: skip
        assert whole["rows"][2]["estimated"] == 1
        for query, count in [
            (f"since={TODAY}", 3),
            ("until=2023-10-31", 2),
            ("since=2023-10-01&until=2023-10-15", 1),
            ("tenant=other", 1),
            ("user=key:k1", 1),
            ("tenant=acme&user=anna", 2),
        ]:
            assert len((await get(rest, f"/admin/usage?{query}"))["rows"]) == count, query


async def test_usage_is_paged() -> None:
    usage = MemoryUsage()
    await usage.count([run(n, user=f"user-{n}") for n in range(5)])
    async with serving(usage=usage) as rest:
        after, seen = "", []
        while after is not None:
            page = await get(rest, f"/admin/usage?limit=2{f'&after={after}' if after else ''}")
            seen += [row["user"] for row in page["rows"]]
            after = page["next"]
        assert seen == [f"user-{n}" for n in range(5)]


@pytest.mark.parametrize(
    "query",
    [
        "since=yesterday",
        "since=2026-02-30",
        "until=20260101",
        "since=2026-W01-1",
        "after=!",
        "after=e30",
        "x=1",
    ],
)
async def test_unreadable_query_of_usage_is_refused(query: str) -> None:
    async with serving() as rest:
        answer = await rest.ask("GET", f"/admin/usage?{query}", rest.admin_key())
        assert error_of(answer) == (400, "INVALID_MESSAGE")


async def test_usage_that_cannot_be_read_is_unavailable() -> None:
    class Broken(MemoryUsage):
        async def rows(self, query: object) -> Any:
            raise Unavailable("disk I/O error")

    async with serving(usage=Broken()) as rest:
        answer = await rest.ask("GET", "/admin/usage", rest.admin_key())
        assert error_of(answer) == (503, "SERVICE_UNAVAILABLE")
