"""Input from strangers: bodies, headers, methods, floods; and what never goes out."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import AsyncIterator
from ipaddress import ip_network
from typing import Any

import httpx
import pytest
from api_rig import SECRET, Rest, error_of, serving
from hypothesis import given, settings
from hypothesis import strategies as st
from log_capture import logging_to

from holdfast import telemetry
from holdfast.api.deps import ApiSettings, NodeStatus
from holdfast.api.middleware import SECURITY_HEADERS
from holdfast.api.routes import ENDPOINTS
from holdfast.limits.rules import Rule
from holdfast.telemetry.logs import THROTTLE_LINES, THROTTLE_SECONDS
from proof import virtual_loop

JSON = {"Content-Type": "application/json"}

BAD_BODIES: dict[str, tuple[bytes, tuple[int, str]]] = {
    "empty": (b"", (400, "INVALID_MESSAGE")),
    "not JSON": (b"name=x", (400, "INVALID_MESSAGE")),
    "cut off": (b'{"name": "x', (400, "INVALID_MESSAGE")),
    "two values": (b"{}{}", (400, "INVALID_MESSAGE")),
    "null": (b"null", (400, "INVALID_MESSAGE")),
    "a list": (b"[]", (400, "INVALID_MESSAGE")),
    "wrong type": (b'{"name": 1}', (400, "INVALID_MESSAGE")),
    "unknown field": (b'{"name": "x", "role": "owner"}', (400, "INVALID_MESSAGE")),
    "a tenant of its own choice": (b'{"name": "x", "tenant": "evil"}', (400, "INVALID_MESSAGE")),
    "bad UTF-8": (b'{"name": "\xff"}', (400, "INVALID_MESSAGE")),
    "an encoded surrogate": (b'{"name": "\xed\xa0\x80"}', (400, "INVALID_MESSAGE")),
    "a lone surrogate": (b'{"name": "\\ud800"}', (400, "INVALID_MESSAGE")),
    "a lone surrogate before text": (b'{"name": "\\ud800abcdefgh"}', (400, "INVALID_MESSAGE")),
    "a lone low surrogate": (b'{"name": "\\udc00abcdefgh"}', (400, "INVALID_MESSAGE")),
    "a depth bomb of lists": (b'{"members": ' + b"[" * 30_000, (400, "INVALID_MESSAGE")),
    "a depth bomb in an unknown field": (b'{"x": ' + b'{"x":' * 10_000, (400, "INVALID_MESSAGE")),
    "a number bomb": (b'{"name": ' + b"9" * 60_000 + b"}", (400, "INVALID_MESSAGE")),
    "NaN": (b'{"name": NaN}', (400, "INVALID_MESSAGE")),
    "one byte too many": (b" " * (64 * 1024 + 1), (413, "MESSAGE_TOO_LARGE")),
    "an id with a line break": (b'{"name": "x", "members": ["a\\n"]}', (400, "INVALID_MESSAGE")),
    "an empty id": (b'{"name": "x", "members": [""]}', (400, "INVALID_MESSAGE")),
    "a name with a line break": (b'{"name": "a\\nb"}', (400, "INVALID_MESSAGE")),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_BODIES)
async def test_a_malformed_body_is_refused_and_nothing_happens(what: str) -> None:
    body, expected = BAD_BODIES[what]

    async with serving() as rest:
        headers = {**JSON, "Authorization": f"Bearer {rest.token('alice')}"}
        answer = await rest.client.post("/v1/chats", content=body, headers=headers)
        assert error_of(answer) == expected
        assert not (await rest.ask("GET", "/v1/chats", rest.token("alice"))).json()["chats"]


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
async def test_no_body_at_all_is_a_server_error(body: bytes) -> None:
    async with serving() as rest:
        headers = {**JSON, "Authorization": f"Bearer {rest.token('alice')}"}
        answer = await rest.client.post("/v1/chats", content=body, headers=headers)
        assert answer.status_code < 500


async def test_a_body_that_hides_its_length_is_cut_off_at_the_limit() -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b" " * 16_384

    async with serving() as rest:
        headers = {**JSON, "Authorization": f"Bearer {rest.token('alice')}"}
        answer = await rest.client.post("/v1/chats", content=endless(), headers=headers)
        assert error_of(answer) == (413, "MESSAGE_TOO_LARGE")
        assert read <= 6


async def test_a_body_that_never_ends_in_time_is_refused() -> None:
    async def dripping() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with serving(ApiSettings(body_seconds_max=0.01)) as rest:
        headers = {**JSON, "Authorization": f"Bearer {rest.token('alice')}"}
        answer = await rest.client.post("/v1/chats", content=dripping(), headers=headers)
        assert error_of(answer) == (400, "INVALID_MESSAGE") and "did not arrive" in answer.text


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"]
)
async def test_only_json_is_taken(media_type: str) -> None:
    async with serving() as rest:
        headers = {"Content-Type": media_type, "Authorization": f"Bearer {rest.token('alice')}"}
        answer = await rest.client.post("/v1/chats", content=b'{"name":"x"}', headers=headers)
        assert error_of(answer) == (415, "INVALID_CONTENT_TYPE")


async def test_last_value_of_a_repeated_json_key_counts() -> None:
    async with serving() as rest:
        headers = {**JSON, "Authorization": f"Bearer {rest.token('alice')}"}
        answer = await rest.client.post(
            "/v1/chats", content=b'{"name": "a", "name": "b"}', headers=headers
        )
        assert answer.json()["chat"]["name"] == "b"


async def test_what_an_endpoint_does_not_take_is_refused_not_ignored() -> None:
    async with serving() as rest:
        alice, key = rest.token("alice"), rest.tenant_key()
        assert error_of(await rest.ask("GET", "/v1/chats", alice, {"x": 1})) == (
            400,
            "INVALID_MESSAGE",
        )
        assert error_of(await rest.ask("POST", "/v1/chats?x=1", alice, {"name": "x"})) == (
            400,
            "INVALID_MESSAGE",
        )
        keyed = await rest.ask("POST", "/v1/tokens", key, {"user_id": "zoe"}, Idempotency_Key="k")
        assert error_of(keyed) == (400, "INVALID_MESSAGE")


async def test_a_query_of_too_many_parameters_is_refused_before_it_is_parsed() -> None:
    async with serving() as rest:
        alice = rest.token("alice")
        many = "&".join(map(str, range(10_000)))
        for path in ("/v1/chats", "/v1/chats/none/messages"):
            began = time.thread_time()
            answer = await rest.ask("GET", f"{path}?{many}", alice)
            assert time.thread_time() - began < 1, (
                "linear in its length: it took 5 s when it was not"
            )
            assert (
                error_of(answer) == (400, "INVALID_MESSAGE")
                and "at most 32 parameters" in answer.text
            )
        twice = await rest.ask("GET", "/v1/chats?limit=1&limit=2", alice)
        assert error_of(twice) == (400, "INVALID_MESSAGE") and "given twice" in twice.text


@pytest.mark.parametrize("name", ["Authorization", "Idempotency-Key", "X-Act-As"])
async def test_a_header_that_says_who_asks_or_what_is_refused_if_given_twice(name: str) -> None:
    async with serving() as rest:
        key = ("Authorization", f"Bearer {rest.tenant_key()}")
        twice = {
            "Authorization": [key, key],
            "X-Act-As": [key, ("X-Act-As", "alice"), ("X-Act-As", "bob")],
        }
        once = [key, ("X-Act-As", "alice"), ("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
        answer = await rest.client.post(
            "/v1/chats", json={"name": "x"}, headers=twice.get(name, once)
        )
        assert error_of(answer) == (400, "INVALID_MESSAGE") and name in answer.text
        assert (await rest.ask("GET", "/v1/chats", rest.token("alice"))).json()["chats"] == []


async def test_404_and_405_have_the_shape_of_every_other_error() -> None:
    async with serving() as rest:
        assert error_of(await rest.ask("GET", "/nowhere")) == (404, "NOT_FOUND")
        assert error_of(await rest.ask("GET", "/v1/chats/")) == (404, "NOT_FOUND")
        refused = await rest.ask("PUT", "/v1/chats")
        assert error_of(refused) == (405, "INVALID_MESSAGE")
        assert set(refused.headers["Allow"].split(", ")) == {"GET", "HEAD", "POST"}
        assert error_of(await rest.ask("OPTIONS", "/v1/chats"))[0] == 405


async def test_head_answers_like_get() -> None:
    async with serving() as rest:
        assert (await rest.ask("HEAD", "/v1/chats", rest.token("alice"))).status_code == 200
        assert (await rest.ask("HEAD", "/v1/chats")).status_code == 401
        assert (await rest.ask("HEAD", "/health/live")).status_code == 200


async def test_plain_request_for_the_socket_gets_426() -> None:
    async with serving() as rest:
        answer = await rest.ask("GET", "/v1/ws")
        assert (
            error_of(answer) == (426, "INVALID_MESSAGE")
            and answer.headers["Upgrade"] == "websocket"
        )


@pytest.mark.parametrize(
    "path", ["/v1/chats", "/nowhere", "/docs", "/openapi.json", "/health/live", "/metrics"]
)
async def test_every_answer_carries_the_security_headers(path: str) -> None:
    async with serving() as rest:
        answer = await rest.ask("GET", path)
        for name in SECURITY_HEADERS:
            assert name in answer.headers
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert answer.headers["X-Request-ID"].startswith("req_")
        assert "set-cookie" not in answer.headers


async def test_a_401_says_how_to_authenticate_and_a_token_in_the_url_is_no_credential() -> None:
    async with serving() as rest:
        token = rest.token("alice")
        for attempt in (f"/v1/chats?token={token}", f"/v1/chats?access_token={token}"):
            answer = await rest.ask("GET", attempt)
            assert (
                error_of(answer) == (401, "UNAUTHORIZED")
                and answer.headers["WWW-Authenticate"] == "Bearer"
            )
        cookie = await rest.client.get(
            "/v1/chats", headers={"Cookie": f"token={token}; Authorization=Bearer {token}"}
        )
        assert error_of(cookie) == (401, "UNAUTHORIZED")


async def test_a_user_who_asks_too_often_waits_and_others_do_not() -> None:
    async with serving(
        rules=[Rule("*", "rest:user", "token_bucket", 2, 1.0, burst_size=3)]
    ) as rest:
        alice, bob = rest.token("alice"), rest.token("bob")
        answers = [(await rest.ask("GET", "/v1/chats", alice)).status_code for _ in range(4)]
        assert answers == [200, 200, 200, 429]
        refused = await rest.ask("GET", "/v1/chats", alice)
        assert error_of(refused) == (429, "RATE_LIMITED") and refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["retry_after_seconds"] == 0.5
        assert refused.headers["RateLimit-Policy"] == '"*/rest:user";q=2;w=1'
        assert (await rest.ask("GET", "/v1/chats", bob)).status_code == 200
        assert (await rest.ask("GET", "/v1/chats", rest.token("alice", "evil"))).status_code == 200
        rest.clock.advance(0.5)
        assert (await rest.ask("GET", "/v1/chats", alice)).status_code == 200


async def test_a_tenant_key_that_names_no_user_is_held_to_what_the_tenant_may() -> None:
    by_user = Rule("*", "rest:user", "token_bucket", 1, 1.0)
    async with serving(
        rules=[by_user, Rule("*", "rest:tenant", "token_bucket", 1, 1.0, burst_size=3)]
    ) as rest:
        key, body = rest.tenant_key(), {"user_id": "ann"}
        answers = [(await rest.ask("POST", "/v1/tokens", key, body)).status_code for _ in range(4)]
        assert answers == [201, 201, 201, 429]


async def test_a_tenant_that_asks_too_often_waits_and_others_do_not() -> None:
    async with serving(
        rules=[Rule("*", "rest:tenant", "token_bucket", 1, 1.0, burst_size=3)]
    ) as rest:
        for n in range(3):
            assert (await rest.ask("GET", "/v1/chats", rest.token(f"user{n}"))).status_code == 200
        assert error_of(await rest.ask("GET", "/v1/chats", rest.token("user3"))) == (
            429,
            "RATE_LIMITED",
        )
        assert (await rest.ask("GET", "/v1/chats", rest.token("user3", "evil"))).status_code == 200


async def test_guessing_address_is_slowed_and_good_credentials_behind_it_are_not() -> None:
    async with serving(ApiSettings(failed_logins_per_minute=3)) as rest:
        answers = [(await rest.ask("GET", "/v1/chats", "garbage")).status_code for _ in range(4)]
        assert answers == [401, 401, 401, 429]
        refused = await rest.ask("GET", "/v1/chats", "garbage")
        assert refused.headers["RateLimit-Policy"] == '"failed-logins";q=3;w=60'
        assert (
            refused.headers["RateLimit"]
            == f'"failed-logins";r=0;t={refused.headers["Retry-After"]}'
        )
        assert refused.json()["violated-policies"] == ["failed-logins"]
        assert (await rest.ask("GET", "/v1/chats", rest.token("alice"))).status_code == 200


OPEN = (
    "/health/live",
    "/health/ready",
    "/openapi.json",
    "/docs",
    "/nowhere",
    "/v1/chats",
    "/v1/ws",
    "/health/admin",
)


@pytest.mark.parametrize("path", OPEN)
async def test_requests_without_a_credential_have_a_bucket_per_address(path: str) -> None:
    settings = ApiSettings(unauthenticated_per_minute=60, unauthenticated_burst=3)
    async with serving(settings, proxies=(ip_network("127.0.0.0/8"),)) as rest:

        async def ask(address: str, who: str | None = None, method: str = "GET") -> httpx.Response:
            return await rest.ask(method, path, who, X_Forwarded_For=address)

        for _ in range(3):
            assert (await ask("198.51.100.1")).status_code != 429
        refused = await ask("198.51.100.1", method="OPTIONS" if path == "/nowhere" else "GET")
        assert error_of(refused) == (429, "RATE_LIMITED")
        assert refused.headers["RateLimit-Policy"] == '"unauthenticated";q=60;w=60'
        assert refused.json()["violated-policies"] == ["unauthenticated"]
        assert (await ask("198.51.100.2")).status_code != 429, "another address"
        good = await rest.ask(
            "GET", "/v1/chats", rest.token("alice"), X_Forwarded_For="198.51.100.1"
        )
        assert good.status_code == 200, "and whoever has a credential"
        guess = await rest.ask("GET", "/v1/chats", "garbage", X_Forwarded_For="198.51.100.1")
        assert guess.status_code == 401, "bad credentials are counted apart"
        rest.clock.advance(1)
        assert (await ask("198.51.100.1")).status_code != 429


@pytest.mark.parametrize("credential", ["junk", "hf_admin_x"])
async def test_what_is_refused_before_a_credential_is_looked_at_is_counted(credential: str) -> None:
    settings = ApiSettings(
        unauthenticated_per_minute=60, unauthenticated_burst=3, failed_logins_per_minute=3
    )
    async with serving(settings) as rest:
        asked = [await rest.ask("GET", "/v1/chats", credential, X_Act_As="anna") for _ in range(4)]
        assert [answer.status_code for answer in asked][-1] == 429


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.1.2.3", "::ffff:10.1.2.3"])
async def test_health_is_never_limited_for_this_machine_and_declared_proxies(address: str) -> None:
    settings = ApiSettings(unauthenticated_per_minute=60, unauthenticated_burst=2)
    async with serving(
        settings, proxies=(ip_network("127.0.0.0/8"), ip_network("10.0.0.0/8"))
    ) as rest:
        for _ in range(5):
            assert (
                await rest.ask("GET", "/health/live", X_Forwarded_For=address)
            ).status_code == 200
            assert (
                await rest.ask("GET", "/health/ready", "garbage", X_Forwarded_For=address)
            ).status_code == 200
        asked = [
            (await rest.ask("GET", "/docs", X_Forwarded_For=address)).status_code for _ in range(3)
        ]
        assert asked == [200, 200, 429]


def test_requests_of_strangers_fill_no_log() -> None:
    output = io.StringIO()

    def lines() -> list[dict[str, Any]]:
        return [
            line
            for line in map(json.loads, output.getvalue().splitlines())
            if line["event"] == "api.request_answered"
        ]

    async def scenario(rest: Rest) -> None:
        for n in range(100):
            await rest.ask("GET", f"/{n}")
        assert len(lines()) == THROTTLE_LINES
        await rest.ask("GET", "/v1/chats", rest.token("alice"))
        assert len(lines()) == THROTTLE_LINES + 1, "whoever is known has a line each time"
        await asyncio.sleep(THROTTLE_SECONDS + 1)
        assert (lines()[-1]["left_out"], lines()[-1]["within_seconds"]) == (80, 60)
        await rest.ask("GET", "/again")
        assert lines()[-1]["path"] == "/again"

    async def run() -> None:
        async with serving() as rest:
            await scenario(rest)

    with logging_to(output, as_json=True):
        virtual_loop.run(run())


async def test_the_address_that_is_slowed_is_the_clients_not_the_proxys() -> None:
    async with serving(
        ApiSettings(failed_logins_per_minute=1), proxies=(ip_network("127.0.0.0/8"),)
    ) as rest:
        for address in ("198.51.100.1", "198.51.100.2"):
            answer = await rest.ask("GET", "/v1/chats", "garbage", X_Forwarded_For=address)
            assert answer.status_code == 401
        again = await rest.ask(
            "GET", "/v1/chats", "garbage", X_Forwarded_For="6.6.6.6, 198.51.100.1"
        )
        assert again.status_code == 429


async def test_moving_through_ones_own_ipv6_network_is_no_way_around() -> None:
    settings = ApiSettings(failed_logins_per_minute=1)
    async with serving(settings, proxies=(ip_network("127.0.0.0/8"),)) as rest:
        answers = [
            (
                await rest.ask("GET", "/v1/chats", "garbage", X_Forwarded_For=f"2001:db8::{n:x}")
            ).status_code
            for n in range(1, 4)
        ]
        assert answers == [401, 429, 429]


async def test_pages_of_listed_origins_may_call_and_no_others() -> None:
    async with serving(origins=frozenset({"https://chat.example.com"})) as rest:

        async def preflight(origin: str) -> httpx.Response:
            headers = {"Origin": origin, "Access-Control-Request-Method": "POST",
                       "Access-Control-Request-Headers": "authorization"}  # fmt: skip
            return await rest.client.options("/v1/chats", headers=headers)

        good = await preflight("https://chat.example.com")
        assert good.headers["access-control-allow-origin"] == "https://chat.example.com"
        assert "access-control-allow-credentials" not in good.headers
        assert "access-control-allow-origin" not in (await preflight("https://evil.net")).headers


async def test_a_listed_origin_may_use_every_method_of_the_table() -> None:
    async with serving(origins=frozenset({"https://app.example"})) as rest:
        for method in {endpoint.method for endpoint in ENDPOINTS}:
            asked = {
                "Origin": "https://app.example",
                "Access_Control_Request_Method": method,
            }
            answer = await rest.ask("OPTIONS", "/admin/rules", **asked)
            assert answer.status_code == 200, (method, answer.text)


async def test_no_origin_is_allowed_unless_it_is_listed() -> None:
    async with serving() as rest:
        answer = await rest.ask("GET", "/v1/chats", rest.token("alice"), Origin="https://evil.net")
        assert "access-control-allow-origin" not in answer.headers


async def test_a_defect_is_answered_without_its_internals() -> None:
    async def broken() -> NodeStatus:
        raise RuntimeError("password=hunter2 at /srv/secret/path.py")

    async with serving(status=broken) as rest:
        answer = await rest.ask("GET", "/admin/status", rest.admin_key())
        assert error_of(answer) == (500, "INTERNAL_ERROR")
        assert (
            "hunter2" not in answer.text
            and "path.py" not in answer.text
            and "Runtime" not in answer.text
        )


async def test_the_access_log_is_json_capped_escaped_and_holds_no_secret() -> None:
    output = io.StringIO()

    with logging_to(output, as_json=True):
        async with serving() as rest:
            token, key = rest.token("alice"), rest.tenant_key()
            await rest.ask("GET", "/v1/chats", token)
            await rest.ask("GET", "/v1/chats", key, X_Act_As="alice")
            await rest.ask("GET", "/health/live")  # not worth a line
            await rest.ask("GET", f"/v1/chats?token={token}", token)
            await rest.ask("GET", f"/{token}")
            await rest.ask("GET", "/a%0Ab%1b[31m" + "x" * 9000)
            telemetry.log.warning(
                "a careless line", authorization=f"Bearer {token}", headers={"authorization": key}
            )
            text = output.getvalue()
            assert token not in text and token.split(".")[2] not in text and key not in text
            assert SECRET.decode() not in text and "\x1b" not in text
            lines = [
                line
                for line in map(json.loads, text.splitlines())
                if line["event"] in ("api.request_answered", "a careless line")
            ]
            assert len(lines) == 6
            first = lines[0]
            assert (first["method"], first["path"], first["status"]) == ("GET", "/v1/chats", 200)
            assert (first["tenant"], first["user"], first["kind"]) == ("acme", "alice", "user")
            assert all(len(line) < 2500 for line in text.splitlines())


def test_the_log_for_people_cannot_be_used_to_drive_their_terminal() -> None:
    output = io.StringIO()
    with logging_to(output, as_json=False):
        telemetry.log.info("line\nfeed", path="\x1b[2J\r\n2026 forged")
        logging.getLogger("uvicorn.error").warning("a library says %s", "hf_admin_" + "A" * 43)
    assert "\x1b[2J" not in output.getvalue() and len(output.getvalue().splitlines()) == 2
    assert "hf_admin_A" not in output.getvalue() and "a library says" in output.getvalue()


async def test_metrics_name_endpoints_and_never_a_user_a_chat_or_a_token() -> None:
    async with serving() as rest:
        chat = await rest.chat("alice-the-user", ["bob"])
        await rest.ask("GET", f"/v1/chats/{chat}", rest.token("alice-the-user"))
        await rest.ask("GET", "/some/random/path")
        text = (await rest.ask("GET", "/metrics", rest.admin_key("status:read"))).text
        assert 'holdfast_api_requests_total{endpoint="get_chat",status="200"}' in text
        assert chat not in text and "alice-the-user" not in text and "random" not in text


async def test_metrics_can_be_opened_by_a_setting() -> None:
    async with serving(ApiSettings(metrics_without_key=True)) as rest:
        answer = await rest.ask("GET", "/metrics")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")


async def test_health_shows_strangers_a_word_and_operators_the_dependencies() -> None:
    async with serving() as rest:
        assert (await rest.ask("GET", "/health/live")).json() == {"status": "live"}
        assert (await rest.ask("GET", "/healthz")).json() == {"status": "live"}
        assert (await rest.ask("GET", "/readyz")).json() == (
            await rest.ask("GET", "/health/ready")
        ).json()
        assert (await rest.ask("GET", "/health/ready")).json() == {"status": "ready"}
        answer = await rest.ask("GET", "/health/ready", rest.admin_key("status:read"))
        assert answer.json() == {"status": "ready", "dependencies": {"store": "up"}}
        rest.ready["store"] = "down"
        for who in (None, rest.token("alice"), rest.tenant_key(), rest.admin_key("audit:read")):
            answer = await rest.ask("GET", "/health/ready", who)
            assert (answer.status_code, answer.json()) == (503, {"status": "not_ready"})
        answer = await rest.ask("GET", "/health/ready", rest.admin_key("status:read"))
        assert answer.json()["dependencies"] == {"store": "down"}
        assert (await rest.ask("GET", "/health/live")).status_code == 200


PROBLEMS: dict[str, tuple[bytes, str, str | None]] = {
    "nothing": (b"", "the body is empty: send a JSON object", None),
    "cut off": (b'{"content": "x', "the body is not valid JSON: it ends too early", None),
    "no JSON": (b"content=x", "the body is not valid JSON: invalid character (byte 0)", None),
    "half a pair": (b'{"content": "\\ud83d"}', "one half of a surrogate pair", None),
    "half a pair before text": (
        b'{"content": "\\uD83D and so on"}',
        "one half of a surrogate pair",
        None,
    ),
    "the other half": (b'{"content": "\\ude00"}', "one half of a surrogate pair", None),
    "a list": (b"[]", "the body must be an object, not a list", None),
    "an empty message": (b'{"content": ""}', "content must not be empty", "content"),
    "no content": (b"{}", "content is missing", "content"),
    "a number": (b'{"content": 7}', "content must be text, not a whole number", "content"),
    "a field too many": (
        b'{"content": "x", "to": 1}',
        "there is no field to: there are content, content_type",
        "to",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
async def test_a_refused_body_names_the_field_and_what_it_should_be(name: str) -> None:
    body, words, field = PROBLEMS[name]

    async with serving() as rest:
        chat = await rest.chat()
        headers = {**JSON, "Authorization": f"Bearer {rest.token('alice')}", "Idempotency-Key": "k"}
        answer = await rest.client.post(f"/v1/chats/{chat}/messages", content=body, headers=headers)
        assert error_of(answer) == (400, "INVALID_MESSAGE")
        error = answer.json()["error"]
        assert words in error["message"] and error.get("details", {}).get("field") == field


OTHER_PROBLEMS: list[tuple[str, str, object, str, str]] = [
    ("GET", "/v1/chats?limit=0", None, "limit must be at least 1", "limit"),
    ("GET", "/v1/chats?limit=201", None, "limit must be at most 200", "limit"),
    ("GET", "/v1/chats?limit=1.5", None, "limit must be a whole number", "limit"),
    ("GET", "/v1/chats?limit=1&limit=2", None, "limit was given twice", "limit"),
    (
        "GET",
        "/v1/chats?limits=1",
        None,
        "there is no field limits: there are limit, after",
        "limits",
    ),
    ("GET", "/v1/chats?after=a%20b", None, "after is not the `next` of a page", "after"),
    ("POST", "/v1/chats", {"kind": "public"}, "kind must be one of direct, group", "kind"),
    ("POST", "/v1/chats", {"name": "x" * 201}, "a name has 1 to 200 printable characters", "name"),
    (
        "POST",
        "/v1/chats",
        {"members": ["a", "b c"]},
        "members[1] must be printable ASCII",
        "members[1]",
    ),
]


async def test_errors_outside_a_body_have_the_same_form() -> None:
    async with serving() as rest:
        for method, path, body, words, field in OTHER_PROBLEMS:
            answer = await rest.ask(method, path, rest.token("alice"), body)
            error = answer.json()["error"]
            assert answer.status_code == 400 and words in error["message"], error
            assert error["details"]["field"] == field, error


async def test_every_path_of_the_table_refuses_a_stranger_before_it_reads_the_body() -> None:
    """An unauthenticated caller learns nothing about what a good body would be."""

    async with serving() as rest:
        for endpoint in ENDPOINTS:
            if endpoint.caller == "anybody":
                continue
            path = endpoint.path.replace(":path", "").format(
                chat_id="c",
                user_id="u",
                sequence="1",
                key_id="k",
                seq="1",
                endpoint_id="e",
                number="1",
                reply_id="r",
                model_id="m",
            )
            answer = await rest.client.request(endpoint.method, path, content=b"garbage")
            assert error_of(answer) == (401, "UNAUTHORIZED"), endpoint.name


async def test_the_application_can_be_made_twice() -> None:
    async with serving() as rest:
        async with serving() as second:
            assert (await second.ask("GET", "/health/live")).status_code == 200
        assert (await rest.ask("GET", "/health/live")).status_code == 200
