"""Which handshakes are accepted, and the response to the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from http import HTTPStatus
from ipaddress import ip_network
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from holdfast.access.connection_limits import ConnectionCounts, ConnectionLimits
from holdfast.access.principal import USER_SCOPES, Principal
from holdfast.clock import ManualClock, SystemClock
from holdfast.errors import RateLimited, Unauthorized, Unavailable
from holdfast.gateway.handshake import AcceptedHandshake, Handshake, Refusal, UpgradeRequest
from holdfast.gateway.transport.upgrade import WebSocketUpgrade
from holdfast.limits.counters.memory import MemoryCounters
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rules import Rule, RuleSet
from holdfast.session.settings import InboundSettings
from holdfast.wire.frames import ErrorBody

ALICE = Principal("default", "alice", USER_SCOPES, "user", None)


def verify(token: str) -> Principal:
    if token != "good":
        raise Unauthorized("the token is not valid here: get a new one")
    return ALICE


def handshake(
    *,
    draining: Callable[[], bool] = lambda: False,
    limits: ConnectionLimits | None = None,
    rules: EntryPoints | None = None,
    legacy: bool = False,
) -> Handshake:
    return Handshake(
        verify=verify,
        counts=ConnectionCounts(limits),
        origins={"http://127.0.0.1:8080"},
        proxies=[ip_network("10.0.0.0/8")],
        draining=draining,
        rules=rules,
        legacy_rate_limit_headers=legacy,
    )


def decide(door: Handshake, path: str = "/v1/ws", **headers: str) -> AcceptedHandshake | Refusal:
    upgrade = {"Sec_WebSocket_Version": "13", "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    headers = {**upgrade, **headers}
    return door.decide(request(path, **headers), "192.0.2.1")


def request(path: str, **headers: str) -> UpgradeRequest:
    sent = [
        (name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()
    ]
    path, _, query = path.partition("?")
    return UpgradeRequest("GET", "1.1", path, query, sent)


def error_of(answer: AcceptedHandshake | Refusal) -> dict[str, Any]:
    assert isinstance(answer, Refusal)
    body: dict[str, Any] = msgspec.json.decode(answer.body)["error"]
    return body


def test_a_token_in_the_header_lets_in() -> None:
    answer = decide(handshake(), Authorization="Bearer good", X_Device_ID="phone")
    assert isinstance(answer, AcceptedHandshake)
    assert (answer.principal, answer.device_id, answer.subprotocol) == (ALICE, "phone", False)


def test_a_browser_carries_its_token_in_a_subprotocol() -> None:
    answer = decide(
        handshake(),
        Sec_WebSocket_Protocol="holdfast.v1, bearer.good",
        Origin="http://127.0.0.1:8080",
    )
    assert isinstance(answer, AcceptedHandshake)
    assert answer.principal == ALICE
    assert answer.subprotocol


def test_without_a_credential_the_first_frame_must_bring_it() -> None:
    answer = decide(handshake())
    assert isinstance(answer, AcceptedHandshake)
    assert answer.principal is None


def test_a_bad_token_is_401_and_says_what_to_do() -> None:
    answer = decide(handshake(), Authorization="Bearer bad")
    assert isinstance(answer, Refusal)
    assert answer.status is HTTPStatus.UNAUTHORIZED
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert error_of(answer)["code"] == "UNAUTHORIZED"


def test_a_token_in_the_url_is_refused_even_if_it_is_good() -> None:
    answer = decide(handshake(), "/v1/ws?token=good")
    assert isinstance(answer, Refusal)
    assert answer.status is HTTPStatus.UNAUTHORIZED
    assert "URL" in error_of(answer)["message"]


def test_another_origin_is_403() -> None:
    answer = decide(handshake(), Authorization="Bearer good", Origin="https://evil.example")
    assert isinstance(answer, Refusal)
    assert answer.status is HTTPStatus.FORBIDDEN


def test_another_path_is_404() -> None:
    answer = decide(handshake(), "/socket", Authorization="Bearer good")
    assert isinstance(answer, Refusal)
    assert answer.status is HTTPStatus.NOT_FOUND


def test_a_bad_device_id_is_400() -> None:
    answer = decide(handshake(), Authorization="Bearer good", X_Device_ID="a b")
    assert isinstance(answer, Refusal)
    assert answer.status is HTTPStatus.BAD_REQUEST
    assert "X-Device-ID" in error_of(answer)["message"]


def entrances(*rules: Rule) -> EntryPoints:
    return EntryPoints(
        Limiter(MemoryCounters(ManualClock()), ManualClock(), rules=RuleSet.of(rules))
    )


def test_handshakes_of_an_address_are_counted_before_the_credential_is_read() -> None:
    door = handshake(rules=entrances(Rule("*", "connect:address", "fixed_window", 3, 60.0)))
    for credential in ("Bearer bad", "Bearer good"):
        decide(door, Authorization=credential)
    assert isinstance(decide(door), AcceptedHandshake), "who says it in the first frame"
    for headers in ({}, {"Authorization": "Bearer good"}, {"Authorization": "Bearer bad"}):
        answer = decide(door, **headers)
        assert isinstance(answer, Refusal)
        assert answer.status is HTTPStatus.TOO_MANY_REQUESTS
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.headers["RateLimit-Policy"] == '"*/connect:address";q=3;w=60'
        body = msgspec.json.decode(answer.body)
        assert (body["status"], body["violated-policies"]) == (429, ["*/connect:address"])
        assert body["error"]["retry_after_seconds"] > 0


@pytest.mark.parametrize(
    "changed",
    [
        {"path": "/else"},
        {"Sec_WebSocket_Version": "12"},
        {"Sec_WebSocket_Key": "short"},
        {"Origin": "x"},
    ],
)
def test_handshakes_that_are_refused_are_counted_too(changed: dict[str, str]) -> None:
    door = handshake(rules=entrances(Rule("*", "connect:address", "fixed_window", 3, 60.0)))
    for _ in range(3):
        answer = decide(door, **changed)
        assert isinstance(answer, Refusal) and answer.status is not HTTPStatus.TOO_MANY_REQUESTS
    for answer in (decide(door, **changed), decide(door)):
        assert isinstance(answer, Refusal) and answer.status is HTTPStatus.TOO_MANY_REQUESTS


def test_a_tenants_own_rule_for_addresses_is_asked_besides_that_of_all_tenants() -> None:
    """Once who it is is known, by a header or by the first frame; without such a rule
    nothing is counted twice.
    """
    ours = Rule("default", "connect:*", "fixed_window", 2, 60.0)
    for own, admitted in (
        (ours, 2),
        (Rule("other", "connect:address", "fixed_window", 1, 60.0), 5),
    ):
        door = handshake(
            rules=entrances(Rule("*", "connect:address", "fixed_window", 5, 60.0), own)
        )
        answers = [decide(door, Authorization="Bearer good") for _ in range(4)] + [decide(door)]
        assert sum(isinstance(answer, AcceptedHandshake) for answer in answers) == min(
            admitted + 1, 5
        )
        by_frame = answers[-1]
        assert isinstance(by_frame, AcceptedHandshake), "of an unknown tenant"
        if own is ours:
            with pytest.raises(RateLimited, match="default/connect:"):
                by_frame.slot.identify(ALICE)
        else:
            by_frame.slot.identify(ALICE)
            assert isinstance(decide(door), Refusal), "five of this address in all"


@pytest.mark.parametrize("legacy", [False, True])
def test_refusing_rule_is_in_the_headers_and_the_problem_document(legacy: bool) -> None:
    rule = Rule("*", "connect:user", "fixed_window", 1, 3600.0)
    rules = EntryPoints(
        Limiter(MemoryCounters(SystemClock()), SystemClock(), rules=RuleSet.of([rule]))
    )
    door = handshake(rules=rules, legacy=legacy)
    assert isinstance(decide(door, Authorization="Bearer good"), AcceptedHandshake)
    answer = decide(door, Authorization="Bearer good")
    assert isinstance(answer, Refusal)
    assert answer.status is HTTPStatus.TOO_MANY_REQUESTS
    wait = answer.headers["Retry-After"]
    assert answer.headers["RateLimit-Policy"] == '"*/connect:user";q=1;w=3600'
    assert answer.headers["RateLimit"] == f'"*/connect:user";r=0;t={wait}'
    assert answer.headers.get("X-RateLimit-Limit") == ("1" if legacy else None)
    body = msgspec.json.decode(answer.body)
    assert body["violated-policies"] == ["*/connect:user"] and body["type"].endswith(
        "#quota-exceeded"
    )
    assert body["error"]["code"] == "RATE_LIMITED" and body["detail"] == body["error"]["message"]
    others = decide(door, Authorization="Bearer bad")
    assert isinstance(others, Refusal) and others.headers["Content-Type"] == "application/json"


def test_a_draining_node_is_503_with_retry_after() -> None:
    answer = decide(handshake(draining=lambda: True), Authorization="Bearer good")
    assert isinstance(answer, Refusal)
    assert answer.status is HTTPStatus.SERVICE_UNAVAILABLE
    assert answer.headers["Retry-After"] == "1"


def test_a_full_node_is_503() -> None:
    door = handshake(limits=ConnectionLimits(connections_max=1))
    assert isinstance(decide(door, Authorization="Bearer good"), AcceptedHandshake)
    answer = decide(door, Authorization="Bearer good")
    assert isinstance(answer, Refusal)
    assert answer.status is HTTPStatus.SERVICE_UNAVAILABLE


def test_a_refusal_never_repeats_the_credential() -> None:
    answer = decide(handshake(), Authorization="Bearer s3cret-t0ken")
    assert isinstance(answer, Refusal)
    assert b"s3cret" not in answer.body


def test_other_version_of_websocket_gets_426_and_our_version() -> None:
    answer = decide(handshake(), Sec_WebSocket_Version="8")
    assert isinstance(answer, Refusal)
    assert answer.status is HTTPStatus.UPGRADE_REQUIRED
    assert answer.headers["Sec-WebSocket-Version"] == "13"


def test_a_bad_websocket_key_is_400() -> None:
    for key in ("", "short", "%%%", "AAAA"):
        answer = decide(handshake(), Sec_WebSocket_Key=key)
        assert isinstance(answer, Refusal)
        assert answer.status is HTTPStatus.BAD_REQUEST


def test_client_authenticated_by_its_first_frame_counts_for_its_tenant() -> None:
    door = handshake(limits=ConnectionLimits(per_tenant_max=1))
    by_header, by_frame = decide(door, Authorization="Bearer good"), decide(door)
    assert (
        isinstance(by_header, AcceptedHandshake)
        and isinstance(by_frame, AcceptedHandshake)
        and by_header.principal
    )
    with pytest.raises(Unavailable, match="this tenant holds its 1 connections"):
        by_frame.slot.identify(by_header.principal)
    by_header.slot.leave()
    by_frame.slot.identify(by_header.principal)
    assert isinstance(decide(door, Authorization="Bearer good"), Refusal)
    by_frame.slot.leave()
    assert door.counts.total == 0
    assert isinstance(decide(door, Authorization="Bearer good"), AcceptedHandshake)


def test_a_defect_in_a_handshake_is_500_and_keeps_its_words_to_itself() -> None:
    def broken(token: str) -> Principal:
        raise RuntimeError("the words of a library")

    door = dataclasses.replace(handshake(), verify=broken)
    upgrade = {"Sec_WebSocket_Version": "13", "Sec_WebSocket_Key": "dGhlIHNhbXBsZSBub25jZQ=="}
    asked = request("/v1/ws", Authorization="Bearer good", **upgrade)
    transport: Any = SimpleNamespace(get_extra_info=lambda name: ("192.0.2.1", 4711))
    gateway: Any = SimpleNamespace(now=lambda: 0.0)
    answer = WebSocketUpgrade(door, gateway, InboundSettings())(asked, transport)
    assert isinstance(answer, Refusal) and answer.status is HTTPStatus.INTERNAL_SERVER_ERROR
    error = msgspec.json.decode(answer.body, type=ErrorBody).error
    assert error.code == "INTERNAL_ERROR" and b"library" not in answer.body
