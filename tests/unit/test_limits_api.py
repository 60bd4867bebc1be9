"""Rules over REST as in document 004, the check API, headers, entry point ``rest``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import apsw
import httpx
import jsonschema_rs
import pytest
from api_rig import Rest, error_of, serving
from limits_rig import Shared
from msgspec import structs
from structlog.testing import capture_logs

from holdfast.api.deps import ApiSettings
from holdfast.api.limit_schemas import RULES_PER_PAGE_MAX
from holdfast.api.openapi import describe
from holdfast.api.routes import ENDPOINTS
from holdfast.cli.operations import alarms
from holdfast.clock import ManualClock, SystemClock
from holdfast.errors import InvalidMessage, Unauthorized, Unavailable
from holdfast.limits.admin import RuleAdmin
from holdfast.limits.asgi import RateLimitMiddleware
from holdfast.limits.composition import LimitsParts
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.entry_rules import ADMIN, DEFAULT_RULES
from holdfast.limits.feed import RuleFeed
from holdfast.limits.http import rate_limit_headers, retry_after
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rule_json import NAMES
from holdfast.limits.rules import Algorithm, Check, Decision, Precision, Rule, RuleSet
from holdfast.limits.rulestore.sqlite import SqliteRuleStore
from holdfast.message import User

RULE: dict[str, Any] = {
    "tenantID": "acme",
    "resource": "/api/search",
    "algorithm": "token_bucket",
    "limit": 100,
    "window": "60s",
}
DOCUMENT_UPDATE: dict[str, Any] = {**RULE, "limit": 500, "expectedVersion": 7}
ONE = "/admin/rules?tenantID=acme&resource=/api/search"

pytestmark = pytest.mark.real_time


@asynccontextmanager
async def limited(
    folder: Path, shared: bool = False, **api: Any
) -> AsyncIterator[tuple[Rest, LimitsParts, SqliteRuleStore]]:
    """Open a server with embedded limits, or with remote counters."""
    clock = SystemClock()
    async with SqliteRuleStore(folder / "limits.db", clock) as store:
        standing = ManualClock()  # no window ends while a test runs
        limiter = Limiter(Shared() if shared else MemoryCounters(standing), standing)

        def apply(rules: RuleSet) -> None:
            limiter.use(rules)

        feed = RuleFeed(store, [store], apply, clock)
        control = RuleAdmin(store, clock, "postgres")
        async with feed:
            parts = LimitsParts(limiter, control, feed, EntryPoints(limiter))
            async with serving(limits=parts, settings=ApiSettings(**api)) as rest:
                yield rest, parts, store


async def applied(parts: LimitsParts, store: SqliteRuleStore) -> None:
    """Until the node has what the store has: a notification takes a turn or two."""
    head = await store.head()
    for _ in range(1_000):
        if parts.limiter.rules.digest == head.digest:
            return
        await asyncio.sleep(0)
    raise AssertionError("no notification arrived")


async def at_version_seven(rest: Rest, key: str) -> None:
    assert (await rest.ask("POST", "/admin/rules", key, RULE)).status_code == 201
    for version in range(1, 7):
        body = {**RULE, "expectedVersion": version}
        assert (await rest.ask("PUT", "/admin/rules", key, body)).status_code == 200


@pytest.mark.parametrize("act_as", [{}, {"X-Act-As": "ann"}])
async def test_service_may_check_as_often_as_its_tenant_rule_allows(
    tmp_path: Path, act_as: dict[str, str]
) -> None:
    async with limited(tmp_path) as (rest, _, _):
        tenant, check = rest.tenant_key(), {"resource": "/api/search", "subject": "ann"}
        for _ in range(1_000):
            answer = await rest.ask("POST", "/v1/limits/check", tenant, check, **act_as)
            assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("check", {"resource": "/api/search", "subject": "ann"}),
        ("check-many", {"checks": [{"resource": "/api/search", "subject": "ann"}]}),
        ("release", {"resource": "/api/search", "subject": "ann", "hold": "h"}),
    ],
)
async def test_checks_have_their_own_limit(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with limited(tmp_path) as (rest, parts, store):
        few = next(rule for rule in DEFAULT_RULES if rule.resource == "check:tenant")
        await parts.control.ensure([structs.replace(few, limit=3, burst_size=0)])
        await applied(parts, store)
        service, other = rest.tenant_key(), rest.tenant_key("other")
        for user in ("ann", "bob", "eve"):
            assert (
                await rest.ask("POST", f"/v1/limits/{path}", service, body, X_Act_As=user)
            ).status_code != 429
        refused = await rest.ask("POST", f"/v1/limits/{path}", service, body)
        assert error_of(refused) == (429, "RATE_LIMITED")
        assert refused.json()["error"]["details"]["rule"] == "*/check:tenant"
        assert refused.json()["violated-policies"] == ["*/check:tenant"]
        assert refused.headers["RateLimit-Policy"] == '"*/check:tenant";q=3;w=60'
        assert refused.headers["RateLimit"].startswith('"*/check:tenant";r=0;t=')
        assert (await rest.ask("POST", f"/v1/limits/{path}", other, body)).status_code != 429


async def test_check_many_counts_each_check(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, parts, store):
        await parts.control.ensure([Rule("acme", "check:tenant", "fixed_window", 10, 86_400.0)])
        await applied(parts, store)
        service = rest.tenant_key()

        async def ask(count: int) -> httpx.Response:
            checks = [{"resource": "/q", "subject": f"{n}"} for n in range(count)]
            return await rest.ask("POST", "/v1/limits/check-many", service, {"checks": checks})

        assert (await ask(6)).status_code == 200
        refused = await ask(5)
        assert error_of(refused) == (429, "RATE_LIMITED")
        assert refused.json()["violated-policies"] == ["acme/check:tenant"]
        assert refused.headers["RateLimit-Policy"].startswith('"acme/check:tenant"')
        assert (await ask(2)).status_code == 200, (
            "the first of a refused call counts, its others do not"
        )


async def test_check_many_beyond_the_tenants_capacity_is_refused(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, parts, store):
        await parts.control.ensure([Rule("acme", "check:tenant", "fixed_window", 10, 86_400.0)])
        await applied(parts, store)
        checks = [{"resource": "/q", "subject": f"{n}"} for n in range(50)]
        refused = await rest.ask(
            "POST", "/v1/limits/check-many", rest.tenant_key(), {"checks": checks}
        )
        assert error_of(refused) == (422, "INVALID_CHECK") and "ask fewer" in refused.text


@pytest.mark.parametrize("algorithm", ["token_bucket", "fixed_window", "sliding_window"])
@pytest.mark.parametrize("precision", ["strict", "leased"])
async def test_concurrent_checks_stay_within_the_rule(
    tmp_path: Path, algorithm: Algorithm, precision: Precision
) -> None:
    """Also with remote counters: a check can wait for an answer."""

    async with limited(tmp_path, shared=True) as (rest, parts, store):
        own = Rule("acme", "check:tenant", algorithm, 5, 86_400.0, precision=precision)
        await parts.control.ensure([own])
        await applied(parts, store)
        service, check = rest.tenant_key(), {"resource": "/q", "subject": "x"}
        asked = [rest.ask("POST", "/v1/limits/check", service, check) for _ in range(60)]
        statuses = [answer.status_code for answer in await asyncio.gather(*asked)]
        statuses += [
            (await rest.ask("POST", "/v1/limits/check", service, check)).status_code
            for _ in range(5)
        ]
        assert (statuses.count(200), statuses.count(429)) == (5, 60)


@pytest.mark.parametrize("tenant", ["holdfast", "acme"])
async def test_service_cannot_use_up_an_operators_limit(tmp_path: Path, tenant: str) -> None:
    async with limited(tmp_path) as (rest, parts, store):
        few = next(rule for rule in DEFAULT_RULES if rule.name == ADMIN)
        await parts.control.ensure([structs.replace(few, limit=10, burst_size=0)])
        await applied(parts, store)
        operator, service = rest.admin_key(), rest.tenant_key(tenant)
        (key_id,) = [key.key_id for key in rest.deps.keys.list() if key.kind == "admin"]
        first = await rest.ask("GET", "/admin/rules", operator)
        assert '"*/admin:key";r=9' in first.headers["ratelimit"], (
            "the rule for every tenant is the one that answers"
        )
        for _ in range(12):
            spent = await rest.ask(
                "POST", "/v1/limits/check", service, {"resource": ADMIN.resource, "subject": key_id}
            )
        assert not spent.json()["allowed"], "its own counter of that name is used up"
        assert (
            '"*/admin:key";r=8'
            in (await rest.ask("GET", "/admin/rules", operator)).headers["ratelimit"]
        )


async def test_no_credential_acts_for_every_tenant(tmp_path: Path) -> None:
    """``*`` counts what belongs to no tenant: operators, and addresses that have not
    said who they are.
    """

    async with limited(tmp_path) as (rest, _, _):
        with pytest.raises(InvalidMessage, match="every tenant"):
            rest.tenant_key("*")
        with pytest.raises(Unauthorized, match="every tenant"):
            rest.deps.tokens.verify(rest.deps.tokens.mint(User("*", "ann"), 60))


@pytest.mark.covers("004 `PUT /admin/rules` with `expectedVersion`")
async def test_requests_of_the_design_document_as_written(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, _, _):
        key = rest.admin_key()
        await at_version_seven(rest, key)
        updated = await rest.ask("PUT", "/admin/rules", key, DOCUMENT_UPDATE)
        assert (updated.status_code, updated.json()["limit"], updated.json()["version"]) == (
            200,
            500,
            8,
        )
        conflict = await rest.ask(
            "PUT", "/admin/rules", key, {**RULE, "limit": 200, "expectedVersion": 7}
        )
        assert conflict.status_code == 409
        assert conflict.json()["currentVersion"] == 8
        assert conflict.json()["rule"]["limit"] == 500
        assert (
            conflict.json()["error"]["message"]
            == "version conflict: expected version 7, but rule was already updated"
        )
        current = await rest.ask("GET", ONE, key)
        assert {name: current.json()[name] for name in ("limit", "version")} == {
            "limit": 500,
            "version": 8,
        }
        partial = {
            "tenantID": "acme",
            "resource": "/api/search",
            "limit": 200,
            "expectedVersion": 8,
        }
        assert (await rest.ask("PUT", "/admin/rules", key, partial)).json()["version"] == 9
        health = await rest.ask("GET", "/health/admin", key)
        assert health.json() == {
            "status": "healthy",
            "postgres_primary": "reachable",
            "rate_limiting": "healthy",
            "region": "local",
        }


async def test_rule_keys_history_rollback_and_deletion(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, _, _):
        key = rest.admin_key()
        first = await rest.ask(
            "POST", "/admin/rules", key, {**RULE, "reason": "launch"}, Idempotency_Key="k1"
        )
        again = await rest.ask(
            "POST", "/admin/rules", key, {**RULE, "reason": "launch"}, Idempotency_Key="k1"
        )
        assert (again.json(), again.headers["Idempotency-Replayed"]) == (first.json(), "true")
        other = await rest.ask(
            "POST", "/admin/rules", key, {**RULE, "limit": 5}, Idempotency_Key="k1"
        )
        assert error_of(other) == (409, "IDEMPOTENCY_KEY_REUSED")
        assert "another request" in other.json()["error"]["details"]["fields"]["idempotencyKey"]
        await rest.ask("PUT", "/admin/rules", key, {**RULE, "limit": 7, "expectedVersion": 1})
        back = {"tenantID": "acme", "resource": "/api/search", "version": 1, "reason": "too low"}
        assert (await rest.ask("POST", "/admin/rules/rollback", key, back)).json()["limit"] == 100
        gone = await rest.ask("DELETE", ONE + "&expectedVersion=3", key)
        assert (gone.status_code, gone.json()["deleted"], gone.json()["version"]) == (200, True, 4)
        assert error_of(await rest.ask("GET", ONE, key)) == (404, "NOT_FOUND")
        history = await rest.ask(
            "GET", "/admin/rules/history?tenantID=acme&resource=/api/search", key
        )
        assert [(c["action"], c["version"]) for c in history.json()["changes"]] == [
            ("delete", 4), ("rollback", 3), ("update", 2), ("create", 1),
        ]  # fmt: skip
        assert history.json()["changes"][1]["reason"] == "too low"


async def test_creating_an_existing_rule_is_a_conflict(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, _, _):
        key = rest.admin_key()
        await rest.ask("POST", "/admin/rules", key, RULE)
        again = await rest.ask("POST", "/admin/rules", key, {**RULE, "limit": 7})
        assert again.status_code == 409
        assert (
            again.json()["error"]["message"]
            == "version conflict: the rule exists already, at version 1"
        )
        assert (again.json()["currentVersion"], again.json()["rule"]["limit"]) == (1, 100)


async def test_pages(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, _, _):
        key = rest.admin_key()
        for n in range(5):
            await rest.ask("POST", "/admin/rules", key, {**RULE, "resource": f"/r/{n}"})
        first = (await rest.ask("GET", "/admin/rules?limit=3", key)).json()
        rest_of = (await rest.ask("GET", f"/admin/rules?limit=3&after={first['next']}", key)).json()
        assert [r["resource"] for r in (*first["rules"], *rest_of["rules"])] == [
            f"/r/{n}" for n in range(5)
        ]
        assert rest_of["next"] is None


async def test_largest_page_has_a_next(tmp_path: Path) -> None:
    """It once had no ``next``, and ``rules export`` of 528 rules printed 500."""

    async with limited(tmp_path) as (rest, parts, _):
        key = rest.admin_key()
        rule = Rule("acme", "/", "token_bucket", limit=1, window_seconds=60)
        await parts.control.ensure(
            [structs.replace(rule, resource=f"/r/{n:03}") for n in range(RULES_PER_PAGE_MAX + 1)]
        )
        first = (await rest.ask("GET", f"/admin/rules?limit={RULES_PER_PAGE_MAX}", key)).json()
        last = (
            await rest.ask(
                "GET", f"/admin/rules?limit={RULES_PER_PAGE_MAX}&after={first['next']}", key
            )
        ).json()
        assert (len(first["rules"]), len(last["rules"]), last["next"]) == (
            RULES_PER_PAGE_MAX,
            1,
            None,
        )


async def test_pages_continue_after_any_name(tmp_path: Path) -> None:
    """A page token is safe in a URL, and no two names have the same."""

    async with limited(tmp_path) as (rest, _, _):
        key = rest.admin_key()
        names = [
            ("*", "*"),
            ("a", "b/c"),
            ("a/b", "c"),
            ("a/b", "d"),
            ("a/b/c", "/"),
            ("t" * 64, "&?#%+=" + "r" * 250),
        ]
        for tenant, resource in names:
            made = await rest.ask(
                "POST", "/admin/rules", key, {**RULE, "tenantID": tenant, "resource": resource}
            )
            assert made.status_code == 201, made.text
        seen, after = [], ""
        for _ in names:
            page = (await rest.ask("GET", f"/admin/rules?limit=1{after}", key)).json()
            seen += [(rule["tenantID"], rule["resource"]) for rule in page["rules"]]
            after = f"&after={page['next']}"
        assert seen == names and page["next"] is None


@pytest.mark.parametrize(
    "after", ["nonsense", "a/b", "*", "YQ", "AAAg", "_w", "YSBiIGM", "%00", "%C3%A9", "x" * 500]
)
async def test_invalid_page_token_is_refused(tmp_path: Path, after: str) -> None:
    async with limited(tmp_path) as (rest, _, _):
        answer = await rest.ask("GET", f"/admin/rules?after={after}", rest.admin_key())
        assert error_of(answer) == (422, "INVALID_RULE")
        assert list(answer.json()["error"]["details"]["fields"]) == ["after"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({**RULE, "limit": -5}, "limit"),
        ({**RULE, "limit": 10**12}, "limit"),
        ({**RULE, "algorithm": "leaky"}, "algorithm"),
        ({**RULE, "window": "soon"}, "window"),
        ({**RULE, "colour": "red"}, "colour"),
        ({**RULE, "resource": "/a*/b"}, "resource"),
        ({**RULE, "idempotencyKey": "a\0b"}, "idempotencyKey"),
        ({**RULE, "expectedVersion": 7}, "expectedVersion"),
        ({"tenantID": "acme"}, "resource"),
    ],
)
async def test_bad_rules_are_refused_by_field_and_change_nothing(
    tmp_path: Path, body: dict[str, Any], field: str
) -> None:
    async with limited(tmp_path) as (rest, _, store):
        answer = await rest.ask("POST", "/admin/rules", rest.admin_key(), body)
        assert error_of(answer) == (422, "INVALID_RULE")
        assert field in answer.json()["error"]["details"]["fields"]
        assert (await store.head()).seq == 0


@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_every_error_of_a_request_is_reported_at_once(tmp_path: Path, method: str) -> None:
    async with limited(tmp_path) as (rest, _, _):
        wrong = {
            "tenantID": "a b", "resource": "/a*/b", "algorithm": "leaky", "limit": -5,
            "window": "soon", "colour": "red", "reason": 7, "idempotencyKey": "a b",
            "expectedVersion": 0,
        }  # fmt: skip
        answer = await rest.ask(method, "/admin/rules", rest.admin_key(), wrong)
        assert error_of(answer) == (422, "INVALID_RULE")
        assert set(answer.json()["error"]["details"]["fields"]) == set(wrong)
        missing = await rest.ask(method, "/admin/rules", rest.admin_key(), {"limit": -5})
        required = {"algorithm", "window"} if method == "POST" else {"expectedVersion"}
        assert (
            set(missing.json()["error"]["details"]["fields"])
            == {"tenantID", "resource", "limit"} | required
        )


@pytest.mark.covers("004 HTTP 500")
async def test_admin_answers_503_without_the_database_and_limiting_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with limited(tmp_path) as (rest, parts, store):
        key = rest.admin_key()
        await rest.ask("POST", "/admin/rules", key, {**RULE, "limit": 2})
        await applied(parts, store)

        async def unreachable(*_: object) -> None:
            raise Unavailable(
                "the database of the rules cannot be reached now", retry_after_seconds=5.0
            )

        for verb in ("change", "get", "head", "page"):
            monkeypatch.setattr(store, verb, unreachable)
        answer = await rest.ask("PUT", "/admin/rules", key, {**RULE, "expectedVersion": 1})
        assert error_of(answer) == (503, "SERVICE_UNAVAILABLE")
        assert answer.headers["Retry-After"] == "5"
        health = await rest.ask("GET", "/health/admin", key)
        assert health.status_code == 503
        assert health.json() == {
            "status": "unhealthy",
            "postgres_primary": "unreachable",
            "rate_limiting": "healthy",
            "region": "local",
        }
        monkeypatch.setattr(parts.feed, "_known_at", parts.feed._known_at - 11)
        rest.clock.advance(1)
        assert (await rest.ask("GET", "/health/admin", key)).json()["rules"] == "stale"
        assert parts.dependencies() == {"counters": "up", "rules": "stale"}
        check = {"resource": "/api/search", "subject": "ann"}
        answers = [
            (await rest.ask("POST", "/v1/limits/check", rest.tenant_key(), check)).json()
            for _ in range(3)
        ]
        assert [a["allowed"] for a in answers] == [True, True, False]


async def test_check_answers_200_with_the_decision(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, parts, store):
        key, tenant = rest.admin_key(), rest.tenant_key()
        await rest.ask(
            "POST", "/admin/rules", key, {**RULE, "algorithm": "fixed_window", "limit": 2}
        )
        slots = {**RULE, "resource": "slots", "algorithm": "concurrency", "limit": 1}
        await rest.ask("POST", "/admin/rules", key, slots)
        await applied(parts, store)
        check = {"resource": "/api/search", "subject": "ann"}
        answer = await rest.ask("POST", "/v1/limits/check", tenant, check)
        decision = answer.json()
        assert answer.status_code == 200
        assert (decision["allowed"], decision["limit"], decision["remaining"]) == (True, 2, 1)
        assert (decision["rule"], decision["rule_version"], decision["decided_by"]) == (
            "acme//api/search",
            1,
            "counters",
        )
        many = await rest.ask("POST", "/v1/limits/check-many", tenant, {"checks": [check, check]})
        assert (many.status_code, many.json()["allowed"]) == (200, False)
        others = await rest.ask("POST", "/v1/limits/check", rest.tenant_key("evil"), check)
        assert others.json()["decided_by"] == "no_rule", "the tenant is the credential's"
        too_much = await rest.ask("POST", "/v1/limits/check", tenant, {**check, "cost": 3})
        assert error_of(too_much) == (422, "INVALID_CHECK")
        for wrong in ({"cost": 0}, {"cost": 10**12}, {"subject": ""}, {"subject": "x" * 1025}):
            refused = await rest.ask("POST", "/v1/limits/check", tenant, {**check, **wrong})
            assert error_of(refused) == (422, "INVALID_CHECK")
            assert refused.json()["error"]["details"]["field"] == next(iter(wrong))
            nobodys = {**check, "resource": "nobody/asks", **wrong}
            assert (
                await rest.ask("POST", "/v1/limits/check", tenant, nobodys)
            ).status_code == 422, "rule or not"
        one = (
            await rest.ask(
                "POST", "/v1/limits/check", tenant, {"resource": "slots", "subject": "ann"}
            )
        ).json()
        assert one["hold"]
        release = {"resource": "slots", "subject": "ann", "hold": one["hold"]}
        renewed = (await rest.ask("POST", "/v1/limits/renew", tenant, release)).json()
        assert (renewed["allowed"], renewed["hold"]) == (True, one["hold"])
        assert (await rest.ask("POST", "/v1/limits/release", tenant, release)).json() == {
            "released": True
        }
        two = (
            await rest.ask(
                "POST", "/v1/limits/check", tenant, {"resource": "slots", "subject": "ann"}
            )
        ).json()
        assert two["allowed"]
        status = (await rest.ask("GET", "/admin/limits", key)).json()
        assert (status["rules"], status["stale"], status["counters"]) == (2, False, "up")


@pytest.mark.parametrize(
    ("path", "body", "field", "reason"),
    [
        ("check", {"resource": "a"}, "subject", "is missing"),
        ("check", {"resource": "a", "subject": 7}, "subject", "must be text"),
        (
            "check",
            {"resource": "a", "subject": "ann", "cost": "1"},
            "cost",
            "must be a whole number",
        ),
        ("check", {"resource": "a", "subject": "ann", "colour": 1}, "colour", "there is no field"),
        ("check", {"resource": "", "subject": "ann"}, "resource", "must not be empty"),
        ("check-many", {"checks": []}, "checks", "must not be empty"),
        (
            "check-many",
            {"checks": [{"resource": "a", "subject": "ann", "cost": 1.5}]},
            "cost",
            "whole number",
        ),
        ("release", {"resource": "a", "subject": "ann"}, "hold", "is missing"),
    ],
)
async def test_malformed_check_is_refused_by_field(
    tmp_path: Path, path: str, body: dict[str, Any], field: str, reason: str
) -> None:
    async with limited(tmp_path) as (rest, _, _):
        answer = await rest.ask("POST", f"/v1/limits/{path}", rest.tenant_key(), body)
        assert error_of(answer) == (422, "INVALID_CHECK")
        assert answer.json()["error"]["details"]["field"].endswith(field)
        assert reason in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "query", "field"),
    [
        ("DELETE", "?tenantID=acme&resource=a&expectedVersion=soon", "expectedVersion"),
        ("DELETE", "?tenantID=acme&resource=a", "expectedVersion"),
        ("GET", "?limit=501", "limit"),
        ("GET", "?tenantID=%00", "tenantID"),
        ("GET", "?tenantID=acme&resource=a&after=YSBi", "after"),
        ("GET", "?colour=red", "colour"),
        ("GET", "/history?tenantID=acme", "resource"),
        ("GET", "/changes?after=-1", "after"),
    ],
)
async def test_malformed_rules_query_is_refused_by_field(
    tmp_path: Path, method: str, query: str, field: str
) -> None:
    async with limited(tmp_path) as (rest, _, _):
        answer = await rest.ask(method, f"/admin/rules{query}", rest.admin_key())
        assert error_of(answer) == (422, "INVALID_RULE")
        assert field in answer.json()["error"]["details"]["fields"]


async def test_body_that_is_not_json_is_refused(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, _, _):
        headers = {
            "Authorization": f"Bearer {rest.tenant_key()}",
            "Content-Type": "application/json",
        }
        for body in (b"", b"{", b"[]"):
            answer = await rest.client.post("/v1/limits/check", content=body, headers=headers)
            assert error_of(answer) == (400, "INVALID_MESSAGE")


async def test_charge_overdraws_and_gives_back_for_the_callers_tenant(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, parts, store):
        await parts.control.ensure([Rule("acme", "tokens", "fixed_window", 100, 86_400.0)])
        await applied(parts, store)
        key = rest.tenant_key()

        async def charge(amount: int, resource: str = "tokens") -> bool:
            body = {"resource": resource, "subject": "ann", "amount": amount}
            answer = await rest.ask("POST", "/v1/limits/charge", key, body)
            assert answer.status_code == 200
            return bool(answer.json()["charged"])

        async def allowed() -> bool:
            body = {"resource": "tokens", "subject": "ann"}
            answer = await rest.ask("POST", "/v1/limits/check", key, body)
            return bool(answer.json()["allowed"])

        assert await charge(250) and not await allowed()
        assert await charge(-200) and await allowed()
        assert not await charge(5, "/api/search"), "no rule counts it"
        for amount in (10**9 + 1, -(10**9) - 1, "5", None):
            body = {"resource": "tokens", "subject": "ann", "amount": amount}
            refused = await rest.ask("POST", "/v1/limits/charge", key, body)
            assert error_of(refused) == (422, "INVALID_CHECK")


async def test_rest_entry_point_is_limited_and_reports_it_in_headers(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, parts, store):
        rule = {
            **RULE,
            "tenantID": "*",
            "resource": "rest:user",
            "algorithm": "fixed_window",
            "limit": 2,
        }
        await rest.ask("POST", "/admin/rules", rest.admin_key(), rule)
        await applied(parts, store)
        answers = [await rest.ask("GET", "/v1/chats", rest.token("alice")) for _ in range(3)]
        assert [a.status_code for a in answers] == [200, 200, 429]
        assert answers[0].headers["RateLimit-Policy"] == '"*/rest:user";q=2;w=60'
        assert answers[0].headers["RateLimit"].startswith('"*/rest:user";r=1;t=')
        assert 1 <= int(answers[2].headers["Retry-After"]) <= 60
        assert answers[2].headers["RateLimit"].startswith('"*/rest:user";r=0;t=')
        assert error_of(answers[2]) == (429, "RATE_LIMITED")
        assert answers[2].json()["error"]["details"]["rule"] == "*/rest:user"
        assert answers[2].json()["violated-policies"] == ["*/rest:user"]
        assert (await rest.ask("GET", "/v1/chats", rest.token("bob"))).status_code == 200


ASKED = {
    "rest:user": ("GET", "/v1/chats", "user", None),
    "rest:tenant": ("POST", "/v1/tokens", "tenant", {"user_id": "ann"}),
    "check:tenant": (
        "POST",
        "/v1/limits/check",
        "tenant",
        {"resource": "/api/search", "subject": "ann"},
    ),
    "admin:key": ("GET", "/admin/limits", "operator", None),
}
"""What asks each of the rules that limit requests."""
ONCE_AT_MOST = {"rest:user": 100, "check:tenant": 2_000, "admin:key": 100}
"""What buckets beside the rules admitted at once, when there were any."""


@pytest.mark.parametrize("resource", ASKED)
async def test_rule_is_the_only_limiter_of_its_entry_point(tmp_path: Path, resource: str) -> None:
    """A refusal names policy and wait; a raised rule applies to the next request."""
    method, path, who, body = ASKED[resource]

    async with limited(tmp_path) as (rest, parts, store):
        keys = {
            "user": rest.token("alice"),
            "tenant": rest.tenant_key(),
            "operator": rest.admin_key(),
        }

        async def ask() -> httpx.Response:
            return await rest.ask(method, path, keys[who], body)

        rule = {**RULE, "tenantID": "*", "resource": resource, "limit": 12, "burstSize": 12}
        await parts.control.create(rule, "olga")
        await applied(parts, store)
        assert [(await ask()).status_code < 300 for _ in range(13)] == [True] * 12 + [False]
        refused = await ask()
        assert error_of(refused) == (429, "RATE_LIMITED")
        assert refused.json()["error"]["retry_after_seconds"] > 0
        assert refused.headers["RateLimit-Policy"] == f'"*/{resource}";q=12;w=60'
        assert (
            refused.headers["RateLimit"] == f'"*/{resource}";r=0;t={refused.headers["Retry-After"]}'
        )
        assert refused.json()["violated-policies"] == [f"*/{resource}"]
        raised = {**rule, "limit": 600_000, "burstSize": 60_000, "expectedVersion": 1}
        await parts.control.update(raised, "olga")
        await applied(parts, store)
        for _ in range(ONCE_AT_MOST.get(resource, 100) + 1):
            assert (await ask()).status_code < 300


@pytest.mark.parametrize(
    ("who", "path", "resource"),
    [
        ("user", "/admin/limits", "rest:user"),
        ("user", "/v1/limits/check", "rest:user"),
        ("tenant", "/admin/limits", "rest:tenant"),
        ("operator", "/v1/chats", "admin:key"),
    ],
)
async def test_forbidden_requests_are_counted(
    tmp_path: Path, who: str, path: str, resource: str
) -> None:
    async with limited(tmp_path) as (rest, parts, store):
        keys = {
            "user": rest.token("alice"),
            "tenant": rest.tenant_key(),
            "operator": rest.admin_key(),
        }
        await parts.control.create(
            {**RULE, "tenantID": "*", "resource": resource, "limit": 12}, "olga"
        )
        await applied(parts, store)
        method = "POST" if path == "/v1/limits/check" else "GET"
        statuses = [(await rest.ask(method, path, keys[who])).status_code for _ in range(13)]
        assert statuses == [403] * 12 + [429]


def test_default_rules_are_as_tight_as_the_settings_they_replaced() -> None:
    rules = {
        rule.resource: (rule.limit, rule.window_seconds, rule.burst_size) for rule in DEFAULT_RULES
    }
    assert rules["connect:address"] == (600, 60.0, 600)
    assert rules["rest:user"] == (1_200, 60.0, 100)
    assert rules["rest:tenant"] == (60_000, 60.0, 2_000)


async def test_refusal_names_every_refusing_rule_and_no_other(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, parts, store):
        few = {**RULE, "tenantID": "*", "algorithm": "fixed_window", "limit": 1}
        for resource in ("rest:user", "rest:tenant"):
            await rest.ask("POST", "/admin/rules", rest.admin_key(), {**few, "resource": resource})
        await applied(parts, store)
        await rest.ask("GET", "/v1/chats", rest.token("alice"))
        refused = await rest.ask("GET", "/v1/chats", rest.token("alice"))
        assert refused.json()["violated-policies"] == ["*/rest:user", "*/rest:tenant"]
        refused = await rest.ask("GET", "/v1/chats", rest.token("bob"))
        assert refused.json()["violated-policies"] == ["*/rest:tenant"]


@pytest.mark.parametrize("legacy", [False, True])
async def test_legacy_headers_are_sent_only_if_configured(tmp_path: Path, legacy: bool) -> None:
    async with limited(tmp_path, legacy_rate_limit_headers=legacy) as (rest, parts, store):
        rule = {
            **RULE,
            "tenantID": "*",
            "resource": "rest:user",
            "algorithm": "fixed_window",
            "limit": 1,
        }
        await rest.ask("POST", "/admin/rules", rest.admin_key(), rule)
        await applied(parts, store)
        answers = [await rest.ask("GET", "/v1/chats", rest.token("alice")) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        for answer in answers:
            assert "RateLimit" in answer.headers
            old = [answer.headers.get(f"X-RateLimit-{word}") for word in ("Limit", "Remaining")]
            assert old == (["1", "0"] if legacy else [None, None])
            assert ("X-RateLimit-Reset" in answer.headers) is legacy


def test_headers_name_and_escape_every_rule() -> None:
    decisions = [
        Decision(True, 100, 7, 12.3, 0.0, 'a/"x"', 1, "counters", window_seconds=60.0),
        Decision(True, 10, 3, 0.2, 0.0, "b/y", 1, "counters", window_seconds=0.5),
        Decision(True),
    ]
    assert rate_limit_headers(decisions, legacy=True) == [
        ("RateLimit-Policy", '"a/\\"x\\"";q=100;w=60, "b/y";q=10;w=1'),
        ("RateLimit", '"a/\\"x\\"";r=7;t=13, "b/y";r=3;t=1'),
        ("X-RateLimit-Limit", "10"),
        ("X-RateLimit-Remaining", "3"),
        ("X-RateLimit-Reset", "1"),
    ]
    assert rate_limit_headers([Decision(True)]) == []


def test_reset_of_a_refusing_rule_is_not_after_the_retry() -> None:
    """The draft: t is when there is more, and Retry-After is not before it; a bucket
    has room before it is empty.
    """
    refused = Decision(
        False, 100, 0, 60.0, 0.6, "a/x", 1, "counters", exceeded=True, window_seconds=60.0
    )
    other = Decision(False, 10, 3, 0.2, 0.0, "b/y", 1, "counters", window_seconds=1.0)
    assert dict(rate_limit_headers([refused, other]))["RateLimit"] == '"a/x";r=0;t=1, "b/y";r=3;t=1'
    assert retry_after([refused, other]) == 1


def test_wait_too_long_for_a_header_is_capped() -> None:
    """A billion used of a rule that drains one a year: headers have 15 digits."""
    decision = Decision(False, 1, 0, 3.2e16, 3.2e16, "acme/x", exceeded=True, window_seconds=60)
    headers = dict(rate_limit_headers([decision]))
    assert headers["RateLimit"] == '"acme/x";r=0;t=999999999999999'
    assert retry_after([decision]) == 999_999_999_999_999


async def test_any_asgi_application_can_be_limited() -> None:
    clock = ManualClock()
    rules = RuleSet.of([Rule("acme", "/", "fixed_window", 1, 60.0)])
    limiter = Limiter(MemoryCounters(clock), clock, rules=rules)
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    guarded = RateLimitMiddleware(
        app, limiter, lambda scope: [Check("acme", scope["path"], "ann")], legacy=True
    )
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    for _ in range(2):
        await guarded({"type": "http", "path": "/"}, receive, send)
    assert seen == ["/"], "a refused request never reaches the application"
    statuses = [message["status"] for message in sent if "status" in message]
    assert statuses == [200, 429]
    passed = dict(sent[0]["headers"])
    assert (
        passed[b"ratelimit-policy"] == b'"acme//";q=1;w=60'
        and passed[b"x-ratelimit-remaining"] == b"0"
    )
    assert passed[b"ratelimit"].startswith(b'"acme//";r=0;t=')
    headers = dict(sent[2]["headers"])
    assert headers[b"content-type"] == b"application/problem+json"
    assert int(headers[b"retry-after"]) >= 1
    assert b"ratelimit-policy" in headers and b"x-ratelimit-limit" in headers
    assert b'"violated-policies":["acme//"]' in sent[3]["body"]
    await guarded({"type": "lifespan", "path": "/"}, receive, send)
    assert len(seen) == 2


def test_status_lists_alarms() -> None:
    fresh = {"counters": "up", "stale": False, "staleness_seconds": 3.0}
    assert alarms({"limits": fresh}) == [] == alarms({})
    stale, down = alarms({"limits": {"counters": "down", "stale": True, "staleness_seconds": 12.3}})
    assert "12 s" in stale and "rules-stale.md" in stale
    assert "counters" in down


@pytest.mark.parametrize(
    ("method", "path", "body", "outcome"),
    [
        ("POST", "/admin/rules", RULE, "unknown"),
        ("PUT", "/admin/rules", {**RULE, "expectedVersion": 1}, "unknown"),
        ("DELETE", ONE + "&expectedVersion=1", None, "unknown"),
        (
            "POST",
            "/admin/rules/rollback",
            {"tenantID": "acme", "resource": "a", "version": 1},
            "unknown",
        ),
        ("GET", ONE, None, None),
        ("GET", "/admin/rules", None, None),
        ("GET", "/admin/rules/history?tenantID=acme&resource=a", None, None),
        ("GET", "/admin/rules/changes", None, None),
    ],
)
async def test_hanging_database_costs_an_operator_the_deadline_at_most(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    body: dict[str, Any] | None,
    outcome: str | None,
) -> None:
    async with limited(tmp_path, request_seconds_max=0.01) as (rest, _, store):

        async def hang(*_: object) -> None:
            await asyncio.Event().wait()

        key = rest.admin_key()
        for verb in ("change", "get", "page", "history", "changes_after"):
            monkeypatch.setattr(store, verb, hang)
        with capture_logs() as logs:
            answer = await asyncio.wait_for(rest.ask(method, path, key, body), 5)
        assert error_of(answer) == (503, "SERVICE_UNAVAILABLE")
        assert answer.json()["error"].get("outcome") == outcome
        assert "no answer in time" in answer.json()["error"]["message"]
        assert "no_answer_in_time" in [entry.get("error") for entry in logs]


@pytest.mark.covers("004 `GET /health/admin`")
async def test_strangers_see_one_word_and_cannot_load_the_primary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with limited(tmp_path) as (rest, parts, _):
        asked, health = 0, parts.control.health
        begun, may_answer = asyncio.Event(), asyncio.Event()

        async def counted() -> Any:
            nonlocal asked
            asked += 1
            begun.set()
            await may_answer.wait()
            return await health()

        monkeypatch.setattr(parts.control, "health", counted)
        many = [asyncio.create_task(rest.ask("GET", "/health/admin")) for _ in range(50)]
        await begun.wait()
        many[0].cancel()
        may_answer.set()
        answers = await asyncio.gather(*many[1:])
        assert {answer.text for answer in answers} == {'{"status":"healthy"}'} and asked == 1
        await rest.ask("GET", "/health/admin")
        assert asked == 1, "within the second"
        rest.clock.advance(1)
        await rest.ask("GET", "/health/admin")
        assert asked == 2


async def test_import_is_compared_then_made_unless_the_rules_changed(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, _, store):
        key, path = rest.admin_key(), "/admin/rules/import"
        rules = [{**RULE, "resource": f"/{n}"} for n in range(1_500)]
        dry = (await rest.ask("POST", path, key, {"rules": rules, "dryRun": True})).json()
        assert len(dry["changes"]) == dry["created"] == 1_500 and not dry["changeID"]
        assert (await store.head()).seq == dry["seq"] == 0
        body = {"rules": rules, "expectedDigest": dry["digest"], "reason": "from git"}
        made = await rest.ask("POST", path, key, body, Idempotency_Key="k1")
        assert made.status_code == 200 and made.json()["seq"] == 1_500 and "changes" in made.json()
        again = await rest.ask("POST", path, key, body, Idempotency_Key="k1")
        assert again.json() == made.json() and again.headers["Idempotency-Replayed"] == "true"
        moved = await rest.ask("POST", path, key, body)
        assert error_of(moved) == (409, "VERSION_CONFLICT")
        assert moved.json()["error"]["details"]["digest"] == made.json()["digest"]
        history = (
            await rest.ask("GET", "/admin/rules/history?tenantID=acme&resource=/7", key)
        ).json()
        assert history["changes"][0]["changeID"] == made.json()["changeID"] != ""
        assert (await rest.ask("POST", path, rest.admin_key("rules:read"), body)).status_code == 403


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([RULE, {**RULE, "window": "1s"}], "rule 2 (acme /api/search): is in the file twice"),
        ([{**RULE, "limit": 0}], "rule 1 (acme /api/search): limit must be a whole number"),
        ([{**RULE, "tenantID": "*", "resource": "admin:key", "limit": 1}], "lock operators out"),
        (
            [{**RULE, "resource": f"/{n}"} for n in range(10_001)],
            "at most 10000 rules in one import, not 10001",
        ),
        ({"acme": RULE}, "must be a list of rules"),
        ([1], "must be a list of rules"),
        (None, "must be a list of rules"),
    ],
)
async def test_invalid_import_changes_nothing(tmp_path: Path, rules: Any, said: str) -> None:
    async with limited(tmp_path) as (rest, parts, store):
        await parts.control.create({**RULE, "tenantID": "*", "resource": "admin:key"}, "olga")
        before = await store.head()
        for dry_run in (True, False):
            answer = await rest.ask(
                "POST", "/admin/rules/import", rest.admin_key(), {"rules": rules, "dryRun": dry_run}
            )
            assert (
                error_of(answer) == (422, "INVALID_RULE")
                and said in answer.json()["error"]["message"]
            )
        assert await store.head() == before


async def test_oversized_import_is_refused_unread(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, _, _):
        body = {"rules": [{**RULE, "resource": "/" * 200}] * 40_000}
        answer = await rest.ask("POST", "/admin/rules/import", rest.admin_key(), body)
        assert error_of(answer) == (413, "MESSAGE_TOO_LARGE")


async def test_openapi_schema_of_a_rule_equals_the_validation(tmp_path: Path) -> None:
    """OpenAPI's bodies for rules, compared with how the server validates each field."""
    described = {
        e["operationId"]: e for path in describe(ENDPOINTS)["paths"].values() for e in path.values()
    }

    def schema(name: str) -> dict[str, Any]:
        content: dict[str, Any] = described[name]["requestBody"]["content"]["application/json"][
            "schema"
        ]
        return content

    assert {*NAMES, "reason", "idempotencyKey"} == set(schema("create_rule")["properties"])
    assert {*NAMES, "reason", "idempotencyKey", "expectedVersion"} == set(
        schema("update_rule")["properties"]
    )

    async with limited(tmp_path) as (rest, _, _):
        key = rest.admin_key()
        whole = {
            **RULE,
            "resource": "/one",
            "burstSize": None,
            "precision": "strict",
            "mode": "off",
            "reason": "",
        }
        texts = ("", "*", "a*", "*a", "{a}", "a b", "é", "60s", "enforce", "x" * 65, "/" * 257)
        validator = jsonschema_rs.Draft202012Validator(schema("create_rule"))
        for name in schema("create_rule")["properties"]:
            for value in (None, 0, 1, 10**9 + 1, 1.5, True, [], *texts):
                body = {**whole, name: value}
                answer = await rest.ask("POST", "/admin/rules", key, body)
                taken = answer.status_code in (201, 409)
                assert taken == validator.is_valid(body), (name, value, answer.text)


async def test_unreadable_rule_is_shown_as_stored_and_can_be_replaced(tmp_path: Path) -> None:
    described = describe(ENDPOINTS)["paths"]["/admin/rules"]["post"]["responses"]["201"]["content"]
    validator = jsonschema_rs.Draft202012Validator(described["application/json"]["schema"])

    async with limited(tmp_path) as (rest, _, _):
        key = rest.admin_key()
        await rest.ask("POST", "/admin/rules", key, RULE)
        readable = (await rest.ask("GET", ONE, key)).json()
        assert validator.is_valid(readable) and not validator.is_valid(
            {**readable, "algorithm": "gcra"}
        )
        with closing(apsw.Connection(str(tmp_path / "limits.db"))) as db:
            for table in ("rules", "rule_changes"):
                db.execute(
                    f"""UPDATE {table} SET body = replace(body, '"token_bucket"', '"gcra"')"""
                )
        shown = (await rest.ask("GET", ONE, key)).json()
        assert (shown["algorithm"], shown["version"]) == (
            "gcra",
            1,
        ) and "set all its fields" in shown["unreadable"]
        assert validator.is_valid(shown)
        assert (await rest.ask("GET", "/admin/rules", key)).json()["rules"] == [shown]
        history = "/admin/rules/history?tenantID=acme&resource=/api/search"
        assert (await rest.ask("GET", history, key)).json()["changes"][0]["rule"] == shown
        assert (await rest.ask("GET", "/admin/rules/changes", key)).json()["changes"][0][
            "rule"
        ] == shown
        back = {"tenantID": "acme", "resource": "/api/search", "version": 1}
        refused = await rest.ask("POST", "/admin/rules/rollback", key, back)
        assert error_of(refused) == (422, "INVALID_RULE")
        assert "gcra" in refused.json()["error"]["details"]["fields"]["version"]
        replaced = await rest.ask("PUT", "/admin/rules", key, {**RULE, "expectedVersion": 1})
        assert (replaced.status_code, replaced.json()["version"]) == (200, 2)
        assert "unreadable" not in (await rest.ask("GET", ONE, key)).json()


async def test_charge_repeated_with_its_key_counts_once(tmp_path: Path) -> None:
    async with limited(tmp_path) as (rest, parts, store):
        await parts.control.ensure([Rule("acme", "tokens", "fixed_window", 100, 86_400.0)])
        await applied(parts, store)
        key, body = rest.tenant_key(), {"resource": "tokens", "subject": "ann", "amount": 40}
        for _ in range(3):
            answer = await rest.ask("POST", "/v1/limits/charge", key, body, Idempotency_Key="c1")
            assert answer.json() == {"charged": True}
        standing = await parts.limiter.peek(Check("acme", "tokens", "ann"))
        assert standing is not None and standing.used == 40
