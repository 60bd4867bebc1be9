"""The table of endpoints and what is read from it."""

from __future__ import annotations

import re

import cost_table
import pytest
from api_rig import serving

from holdfast.access.principal import CHATS_WRITE
from holdfast.api.app import Routes
from holdfast.api.deps import ApiSettings
from holdfast.api.openapi import describe
from holdfast.api.reference import fields_of, html_page
from holdfast.api.responses import RETRY_AFTER_SECONDS, STATUS
from holdfast.api.routes import ENDPOINTS, GROUPS
from holdfast.errors import HoldfastError
from holdfast.wire.frames import CLIENT_FRAMES


def every_error(root: type[HoldfastError] = HoldfastError) -> set[type[HoldfastError]]:
    """The leaves of the tree: what is really raised."""
    children = root.__subclasses__()
    return set().union(*(every_error(child) for child in children)) if children else {root}


def test_every_error_code_has_a_status_and_every_retryable_one_a_time_to_wait() -> None:
    assert {error.code for error in every_error()} == set(STATUS)
    assert {error.code for error in every_error() if error.retryable} == set(RETRY_AFTER_SECONDS)


def test_what_needs_no_credential_is_listed_here() -> None:
    open_to_all = {endpoint.path for endpoint in ENDPOINTS if endpoint.caller == "anybody"}
    assert open_to_all == {"/v1/ws", "/health/live", "/health/ready", "/health/admin"}


def test_everything_else_needs_a_scope() -> None:
    for endpoint in ENDPOINTS:
        if endpoint.caller != "anybody":
            assert endpoint.scope is not None, endpoint.name
        if endpoint.path.startswith("/admin"):
            assert endpoint.caller == "operator", endpoint.name
        if endpoint.writes and endpoint.caller == "user":
            assert endpoint.scope in CHATS_WRITE, endpoint.name


def test_every_operators_write_asks_for_a_reason() -> None:
    for endpoint in ENDPOINTS:
        if endpoint.caller == "operator" and endpoint.writes:
            assert re.search(r"\breason\b", fields_of(endpoint.body or endpoint.query)), (
                endpoint.name
            )


def test_names_of_endpoints_are_unique_because_metrics_and_openapi_use_them() -> None:
    names = [endpoint.name for endpoint in ENDPOINTS]
    assert len(names) == len(set(names))


def test_openapi_describes_every_endpoint_and_no_reference_dangles() -> None:
    document = describe(ENDPOINTS)
    assert sum(len(methods) for methods in document["paths"].values()) == len(ENDPOINTS)
    schemas = document["components"]["schemas"]
    for name in re.findall(r"#/components/schemas/(\w+)", repr(document)):
        assert name in schemas


def test_the_docs_page_loads_nothing_from_elsewhere_and_runs_nothing() -> None:
    page = html_page(GROUPS).decode()
    assert "<script" not in page and "http://" not in page and "https://" not in page


@pytest.mark.parametrize(
    "bad", [{"body_bytes_max": 0}, {"failed_logins_per_minute": 0}, {"request_seconds_max": -1}]
)
def test_bad_settings_are_refused_when_built(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        ApiSettings(**bad)  # type: ignore[arg-type]


async def test_static_pages_are_compressed_once_and_cached() -> None:
    async with serving() as rest:
        for path in ("/openapi.json", "/docs", "/docs/style.css"):
            plain = await rest.client.get(path, headers={"Accept-Encoding": "identity"})
            packed = await rest.client.get(path, headers={"Accept-Encoding": "br, gzip"})
            assert packed.headers["content-encoding"] == "gzip" and packed.content == plain.content
            assert (
                "content-encoding" not in plain.headers
                and plain.headers["cache-control"] == "public, max-age=300"
            )
            assert plain.headers["vary"] == packed.headers["vary"] == "Accept-Encoding"
            known = await rest.client.get(path, headers={"If-None-Match": plain.headers["etag"]})
            assert (known.status_code, known.content) == (304, b"")
            assert known.headers["etag"] == plain.headers["etag"] == packed.headers["etag"]
            assert plain.headers["etag"].startswith('W/"'), "of two bodies: no strong one"
            assert (
                await rest.client.get(path, headers={"If-None-Match": '"older"'})
            ).status_code == 200
        openapi = await rest.client.get("/openapi.json", headers={"Accept-Encoding": "gzip"})
        assert int(openapi.headers["content-length"]) < len(openapi.content) / 5


@pytest.mark.parametrize(
    ("accepted", "compressed"),
    [
        ("gzip", True),
        ("br, GZIP;q=0.1", True),
        ("*", True),
        ("gzip;q=1.000", True),
        ("gzip; q = 0.001", True),
        ("gzip;q=0", False),
        ("gzip; q=0.000, br", False),
        ("*, gzip;q=0", False),
        ("*;q=0", False),
        ("", False),
        ("gzipped", False),
        ("identity;q=1, not-gzip", False),
    ],
)
async def test_a_static_page_is_compressed_only_where_that_is_taken(
    accepted: str, compressed: bool
) -> None:
    async with serving() as rest:
        answer = await rest.client.get("/docs/style.css", headers={"Accept-Encoding": accepted})
        assert ("content-encoding" in answer.headers) == compressed


@pytest.mark.parametrize(
    ("known", "status"),
    [
        ("*", 304),
        ('"a", {tag}', 304),
        ("{strong}", 304),
        ('"a"', 200),
        ("x{tag}x", 200),
        ('"*"', 200),
        ("{bare}", 200),
    ],
)
async def test_a_static_page_that_is_known_is_not_sent_again(known: str, status: int) -> None:
    async with serving() as rest:
        tag = (await rest.client.get("/docs/style.css")).headers["etag"]
        strong = tag.removeprefix("W/")
        written = known.format(tag=tag, strong=strong, bare=strong.strip('"'))
        answer = await rest.client.get("/docs/style.css", headers={"If-None-Match": written})
        assert answer.status_code == status


def test_a_path_is_routed_by_its_exact_form_first() -> None:
    routes = Routes(
        {"/jobs/{seq}": "one", "/jobs/stats": "stats", "/c/{chat}/m/{user:path}": "member"}
    )
    assert routes.find("/jobs/stats") == ("stats", {})
    assert routes.find("/jobs/7") == ("one", {"seq": "7"})
    assert routes.find("/c/a/m/b/c\n") == ("member", {"chat": "a", "user": "b/c\n"})
    for nothing in ("/jobs/", "/jobs/7/", "/jobs/7/8", "/jobs/7\n/", "/c/a/b/m/c", "", "/jobsx7"):
        assert routes.find(nothing) is None, nothing


def test_every_endpoint_and_every_frame_has_a_row_of_what_it_may_cost() -> None:
    """Say what is expensive there: one line in tests/support/cost_table.py."""
    assert set(cost_table.ENDPOINTS) == {endpoint.name for endpoint in ENDPOINTS}
    assert set(cost_table.FRAMES) == set(CLIENT_FRAMES)
