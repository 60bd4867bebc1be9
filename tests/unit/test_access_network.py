"""Origins, addresses, handshakes, connections; and who may do what in a chat."""

from __future__ import annotations

from ipaddress import ip_network
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.access.connection_limits import (
    ConnectionCounts,
    ConnectionLimits,
    HttpCounts,
    HttpLimits,
)
from holdfast.access.network import address_group, client_ip, origin_allowed
from holdfast.access.principal import Principal, bearer, require_scope
from holdfast.access.roles import Action, may
from holdfast.errors import Forbidden
from holdfast.message import Role
from holdfast.resilience import Buckets

ALLOWED = {"https://chat.example.com"}
PROXIES = [ip_network("10.0.0.0/8"), ip_network("fd00::/8")]


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (None, True),
        ("https://chat.example.com", True),
        ("http://chat.example.com", False),
        ("https://chat.example.com:8443", False),
        ("https://chat.example.com.evil.net", False),
        ("https://evil.net/https://chat.example.com", False),
        ("https://CHAT.example.com", False),
        ("https://sub.chat.example.com", False),
        ("null", False),
        ("", False),
        ("*", False),
    ],
)
def test_an_origin_is_allowed_only_if_it_is_listed_exactly(
    origin: str | None, allowed: bool
) -> None:
    assert origin_allowed(origin, ALLOWED) is allowed


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("203.0.113.9", [], "203.0.113.9"),
        ("203.0.113.9", ["1.1.1.1"], "203.0.113.9"),  # nobody vouches for the header
        ("10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.1", ["6.6.6.6, 198.51.100.7"], "198.51.100.7"),  # the client's own word stays left
        ("10.0.0.1", ["198.51.100.7, 10.2.2.2"], "198.51.100.7"),  # two proxies
        ("10.0.0.1", ["6.6.6.6", "198.51.100.7"], "198.51.100.7"),  # two headers
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["garbage"], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.7, garbage"], "10.0.0.1"),
        ("10.0.0.1", ["10.0.0.2"], "10.0.0.2"),
        ("fd00::1", ["2001:db8::1"], "2001:db8::1"),
        ("::ffff:10.0.0.1", ["198.51.100.7"], "198.51.100.7"),
        ("", ["198.51.100.7"], ""),
    ],
)
def test_the_client_address_comes_only_from_declared_proxies(
    peer: str, forwarded: list[str], client: str
) -> None:
    assert client_ip(peer, ",".join(forwarded), PROXIES) == client


@given(st.lists(st.text(max_size=30), max_size=50))
def test_no_header_makes_an_undeclared_peer_somebody_else(forwarded: list[str]) -> None:
    assert client_ip("203.0.113.9", ",".join(forwarded), PROXIES) == "203.0.113.9"


def test_addresses_are_counted_by_customer() -> None:
    assert address_group("2001:db8:1:2::1") == address_group("2001:db8:1:2:ffff::9")
    assert address_group("2001:db8:1:2::1") != address_group("2001:db8:1:3::1")
    assert address_group("::ffff:192.0.2.1") == address_group("192.0.2.1")
    assert address_group("unix") == "unix"


def test_flood_from_many_addresses_forgets_the_longest_unused() -> None:
    buckets = Buckets(1, 1, keys_max=100)
    buckets.take("mine", 0.0)
    for n in range(10_000):
        buckets.take(n, 0.0)
        assert buckets.take("mine", 0.0) > 0, "one who keeps asking is not forgotten"
        assert len(buckets) <= 100


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_buckets_without_a_bound_are_refused(bad: tuple[float, int, int]) -> None:
    with pytest.raises(ValueError):
        Buckets(*bad)


def test_each_connection_limit_is_named_when_it_is_reached_and_freed_when_one_closes() -> None:
    counts = ConnectionCounts(
        ConnectionLimits(connections_max=4, per_address_max=2, per_tenant_max=3)
    )
    assert counts.open("192.0.2.1", "a") is None
    assert counts.open("192.0.2.1", "a") is None
    assert "address" in (counts.open("192.0.2.1", "b") or "")
    assert counts.open("192.0.2.2", "a") is None
    assert "tenant" in (counts.open("192.0.2.3", "a") or "")
    assert counts.open("192.0.2.3", "b") is None
    assert "node" in (counts.open("192.0.2.4", "c") or "")
    counts.close("192.0.2.1", "a")
    assert counts.open("192.0.2.1", "a") is None
    assert counts.total == 4


def test_http_connections_are_bounded_per_address_and_those_of_a_proxy_in_all() -> None:
    """A declared proxy speaks for many users; one connection may serve each in turn."""
    counts = HttpCounts(
        HttpLimits(connections_max=5, per_address_max=2), [ip_network("10.0.0.0/8")]
    )
    assert [counts.open("192.0.2.1") for _ in range(2)] == [None, None]
    assert counts.open("192.0.2.1") == "this address holds its 2 HTTP connections"
    assert [counts.open("10.1.2.3") for _ in range(3)] == [None] * 3
    assert (
        counts.open("10.1.2.3")
        == counts.open("192.0.2.9")
        == "this node holds its 5 HTTP connections"
    )
    counts.close("10.1.2.3")
    counts.close("192.0.2.1")
    assert (counts.open("192.0.2.1"), counts.total) == (None, 4)
    for full in ({"connections_max": 0}, {"per_address_max": 0}):
        with pytest.raises(ValueError):
            HttpLimits(**full)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("xyz"), st.sampled_from("ab"))))
def test_counts_are_exactly_what_is_open(steps: list[tuple[bool, str, str]]) -> None:
    counts = ConnectionCounts(
        ConnectionLimits(connections_max=5, per_address_max=3, per_tenant_max=4)
    )
    held: list[tuple[str, str]] = []
    for opens, address, tenant in steps:
        if opens:
            full = (
                len(held) == 5
                or sum(a == address for a, _ in held) == 3
                or sum(t == tenant for _, t in held) == 4
            )  # fmt: skip
            assert (counts.open(address, tenant) is not None) == full
            if not full:
                held.append((address, tenant))
        elif held:
            counts.close(*held.pop())
        assert counts.total == len(held)


def test_no_connection_limit_is_below_one() -> None:
    with pytest.raises(ValueError):
        ConnectionLimits(per_tenant_max=0)


@pytest.mark.parametrize(
    ("header", "credential"),
    [
        (None, None),
        ("", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("Bearer abc", "abc"),
        ("bearer abc", "abc"),
        ("Basic abc", None),
        ("Bearer  abc ", "abc"),
    ],
)
def test_the_bearer_credential_of_a_header(header: str | None, credential: str | None) -> None:
    assert bearer(header) == credential


def test_a_missing_scope_is_named() -> None:
    principal = Principal("acme", "alice", frozenset({"chats:read"}), "user")
    require_scope(principal, "chats:read")
    with pytest.raises(Forbidden, match="chats:write"):
        require_scope(principal, "chats:write")


# Written out, so that a slip in the table is a red line here: (action, role of the
# other) -> who may.
EXPECTED: dict[tuple[Action, Role], str] = {
    ("read", "member"): "owner admin member",
    ("send", "member"): "owner admin member",
    ("leave", "member"): "owner admin member",
    ("redact_own", "member"): "owner admin member",
    ("rename", "member"): "owner admin",
    ("redact_any", "member"): "owner admin",
    ("add_member", "member"): "owner admin",
    ("add_member", "admin"): "owner",
    ("add_member", "owner"): "owner",
    ("remove_member", "member"): "owner admin",
    ("remove_member", "admin"): "owner",
    ("remove_member", "owner"): "owner",
    ("restrict_member", "member"): "owner admin",
    ("restrict_member", "admin"): "owner",
    ("restrict_member", "owner"): "",
    ("change_role", "member"): "owner",
    ("change_role", "admin"): "owner",
    ("change_role", "owner"): "owner",
}


def test_the_role_table_says_for_every_action_who_may() -> None:
    assert {action for action, _ in EXPECTED} == set(get_args(Action))
    for (action, other), who in EXPECTED.items():
        for role in get_args(Role):
            assert may(role, action, other) is (role in who.split()), (role, action, other)
