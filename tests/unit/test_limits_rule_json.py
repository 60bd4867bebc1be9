"""Rules as JSON: what is accepted, what is refused and by which name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidRule
from holdfast.limits.rule_json import (
    changed_rule,
    name_of,
    new_rule,
    parse_window,
    render,
    render_window,
    settable,
)

GOOD: dict[str, Any] = {
    "tenantID": "acme",
    "resource": "/api/search",
    "algorithm": "token_bucket",
    "limit": 100,
    "window": "60s",
}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60s", 60.0), ("500ms", 0.5), ("5m", 300.0), ("1h", 3600.0), ("2d", 172_800.0)],
)
def test_window_is_a_text_with_a_unit(text: str, seconds: float) -> None:
    assert parse_window(text) == seconds
    assert parse_window(render_window(seconds)) == seconds


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("limit", 0), ("limit", -5), ("limit", 1.5), ("limit", "100"), ("limit", True),
        ("limit", 10**10), ("window", "60"), ("window", 60), ("window", "-1s"), ("window", "0s"),
        ("window", "1 s"), ("window", "400d"), ("window", "1w"), ("window", "9999999999s"),
        ("window", None), ("algorithm", "leaky"), ("algorithm", None), ("burstSize", 0),
        ("burstSize", -1), ("mode", "maybe"), ("precision", "exact"), ("onStoreFailure", "panic"),
        ("tenantID", ""), ("tenantID", "a b"), ("tenantID", "a*"), ("tenantID", "{x}"),
        ("tenantID", "x" * 65), ("tenantID", 7), ("resource", ""), ("resource", "a*b"),
        ("resource", "**"), ("resource", "/x" * 200), ("resource", "naïve"), ("limits", 5),
        ("version", 3),
    ],
)  # fmt: skip
def test_invalid_field_is_named_with_the_reason(field: str, value: object) -> None:
    with pytest.raises(InvalidRule) as raised:
        new_rule({**GOOD, field: value})
    assert list(raised.value.details["fields"]) == [field]
    assert raised.value.details["fields"][field]


def test_fields_left_out_take_the_careful_default() -> None:
    rule = new_rule(GOOD)
    assert (rule.precision, rule.on_store_failure, rule.mode) == (
        "strict",
        "local_share",
        "enforce",
    )


@pytest.mark.parametrize(
    ("fields", "blamed"),
    [
        ({"algorithm": "fixed_window", "burstSize": 5}, "burstSize"),
        ({"algorithm": "concurrency", "precision": "leased"}, "precision"),
        ({"algorithm": "concurrency", "limit": 5000}, "limit"),
        ({"limit": 1, "window": "366d", "burstSize": 1_000_000_000}, "burstSize"),
        ({"limit": 1, "window": "366d", "burstSize": 101}, "burstSize"),
    ],
)
def test_contradictory_fields_are_refused(fields: dict[str, Any], blamed: str) -> None:
    with pytest.raises(InvalidRule) as raised:
        new_rule({**GOOD, **fields})
    assert list(raised.value.details["fields"]) == [blamed]


@pytest.mark.parametrize(
    "fields",
    [
        {"limit": 1, "window": "366d", "burstSize": 100},
        {"limit": 1, "window": "1s", "burstSize": 1_000_000_000},
        {"limit": 1, "window": "366d"},
    ],
)
def test_burst_that_drains_within_a_hundred_years_is_valid(fields: dict[str, Any]) -> None:
    assert new_rule({**GOOD, **fields}).capacity == fields.get("burstSize", 1)


@pytest.mark.parametrize(
    "resource",
    [
        "connect:user",
        "connect:address",
        "send:*",
        "rest:tenant",
        "admin:key",
        "rest:u*",
        "reply:*",
        "tokens:u*",
    ],
)
def test_concurrency_rule_of_an_entry_point_is_refused(resource: str) -> None:
    holders = {**GOOD, "resource": resource, "algorithm": "concurrency"}
    with pytest.raises(InvalidRule) as raised:
        new_rule(holders)
    assert "releases holds" in raised.value.details["fields"]["algorithm"]
    with pytest.raises(InvalidRule):
        changed_rule(new_rule({**GOOD, "resource": resource}), {"algorithm": "concurrency"})


@pytest.mark.parametrize("resource", ["slots", "sending", "send:mail", "/api/*", "s*", "*"])
def test_concurrency_rule_of_a_services_resource_is_valid(resource: str) -> None:
    assert (
        new_rule({**GOOD, "resource": resource, "algorithm": "concurrency"}).algorithm
        == "concurrency"
    )


@pytest.mark.parametrize("resource", ["replies:active", "replies:active:key", "replies:*"])
def test_live_rule_is_a_number_at_a_time_above_what_holders_allow(resource: str) -> None:
    live = {**GOOD, "resource": resource, "algorithm": "concurrency", "limit": 5_000}
    assert new_rule(live).limit == 5_000
    with pytest.raises(InvalidRule) as raised:
        new_rule({**GOOD, "resource": resource})
    assert list(raised.value.details["fields"]) == ["algorithm"]


@pytest.mark.covers("004 limit ≤ 0 is invalid")
def test_every_invalid_field_is_reported_at_once() -> None:
    with pytest.raises(InvalidRule) as raised:
        new_rule({"tenantID": "acme", "limit": -1, "colour": "red"})
    assert set(raised.value.details["fields"]) == {
        "resource",
        "algorithm",
        "window",
        "limit",
        "colour",
    }
    with pytest.raises(InvalidRule) as raised:
        name_of({"resource": "*x"})
    assert set(raised.value.details["fields"]) == {"tenantID", "resource"}


@pytest.mark.covers("004 the retry that names only `limit`")
def test_update_changes_only_the_fields_it_names() -> None:
    rule = new_rule({**GOOD, "burstSize": 150, "mode": "shadow"})
    changed = changed_rule(rule, {"limit": 500})
    assert (changed.limit, changed.burst_size, changed.mode, changed.window_seconds) == (
        500,
        150,
        "shadow",
        60.0,
    )


def test_burst_is_unset_by_null_or_by_another_algorithm() -> None:
    rule = new_rule({**GOOD, "burstSize": 150})
    assert changed_rule(rule, {"burstSize": None}).burst_size == 0
    assert changed_rule(rule, {"algorithm": "fixed_window"}).burst_size == 0
    assert changed_rule(rule, {"algorithm": "sliding_window", "burstSize": None}).burst_size == 0
    assert changed_rule(rule, {"algorithm": "token_bucket"}).burst_size == 150
    assert new_rule({**GOOD, "burstSize": None}) == new_rule(GOOD)
    assert new_rule({**GOOD, "algorithm": "fixed_window", "burstSize": None}).burst_size == 0
    for meaningless in ({"algorithm": "fixed_window", "burstSize": 150}, {"burstSize": 0}):
        with pytest.raises(InvalidRule) as raised:
            changed_rule(rule, meaningless)
        assert list(raised.value.details["fields"]) == ["burstSize"]
    for field in ("limit", "window", "mode"):
        with pytest.raises(InvalidRule):
            changed_rule(rule, {field: None})


@given(
    body=st.fixed_dictionaries(
        {
            "tenantID": st.sampled_from(["acme", "*"]),
            "resource": st.sampled_from(["*", "/api/*", "send"]),
            "algorithm": st.sampled_from(["token_bucket", "fixed_window", "sliding_window"]),
            "limit": st.integers(1, 10**9),
            "window": st.integers(100, 10**6).map(lambda ms: f"{ms}ms"),
            "mode": st.sampled_from(["enforce", "shadow", "off"]),
        }
    )
)
def test_rendered_rule_parses_to_the_same_rule(body: dict[str, Any]) -> None:
    rule = new_rule(body)
    assert new_rule(settable(rule)) == rule
    assert render(rule)["version"] == 1


@given(
    st.dictionaries(
        st.text(max_size=10), st.none() | st.integers() | st.text() | st.lists(st.integers())
    )
)
def test_any_body_raises_only_invalid_rule(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRule):
        new_rule(body)
