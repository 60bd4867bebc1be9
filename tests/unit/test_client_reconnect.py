"""When the client comes back, and when it does not."""

from __future__ import annotations

import random
import re

import pytest

from holdfast.client.reconnect import Reconnect, Retry, Stop, refusal
from holdfast.errors import Forbidden, InvalidMessage, NotFound, Unauthorized
from holdfast.resilience import Backoff
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.frames import ConnectionClosing, Error


def reconnect(can_renew: bool = True, seed: int = 1) -> Reconnect:
    return Reconnect(Backoff(1, 16), random.Random(seed), can_renew)


def announced(closing: CloseReason, delay_ms: int = 0) -> ConnectionClosing:
    return ConnectionClosing(
        closing.reason, closing.message, closing.reconnect_allowed, delay_ms, {}
    )


@pytest.mark.covers("000 clients: a server's close is not permanent")
@pytest.mark.parametrize("closing", CloseReason, ids=lambda closing: closing.reason)
def test_range_of_the_close_code_decides(closing: CloseReason) -> None:
    verdict = reconnect().on_closed(closing.code)
    assert isinstance(verdict, Retry if closing.code < 4500 else Stop)


@pytest.mark.covers("000 clients: a server's close is not permanent")
@pytest.mark.parametrize("code", [None, 1000, 1001, 1006, 1011, 1012, 4123, 4499])
def test_every_other_close_is_retried(code: int | None) -> None:
    assert isinstance(reconnect().on_closed(code), Retry)


@pytest.mark.covers("000 clients: backoff 1 s to 16 s, ±20 % jitter")
def test_delay_doubles_to_its_cap_with_full_jitter_without_end() -> None:
    for failures, bound in [(1, 1), (2, 2), (3, 4), (5, 16), (50, 16)]:
        delays = []
        for seed in range(200):
            machine = reconnect(seed=seed)
            for _ in range(failures):
                verdict = machine.on_closed(None)
            assert isinstance(verdict, Retry)
            delays.append(verdict.delay_seconds)
        assert 0 <= min(delays) < bound * 0.05
        assert bound * 0.95 < max(delays) <= bound


def test_a_connection_that_lasted_makes_the_next_failure_a_first_one() -> None:
    machine = reconnect()
    for _ in range(10):
        machine.on_closed(None)
    machine.on_lasted()
    verdict = machine.on_closed(None)
    assert isinstance(verdict, Retry) and verdict.delay_seconds <= 1


def test_delay_of_the_server_is_used_as_it_is_and_once() -> None:
    machine = reconnect()
    machine.on_announced(announced(CloseReason.SERVER_SHUTDOWN, 12_345))
    assert machine.on_closed(4000) == Retry(12.345, "server_shutdown")
    verdict = machine.on_closed(None)
    assert isinstance(verdict, Retry) and verdict.delay_seconds <= 2


def test_after_a_restart_that_was_announced_the_first_retry_comes_within_a_second() -> None:
    machine = reconnect()
    for _ in range(10):
        machine.on_closed(None)
    machine.on_lasted()
    machine.on_announced(announced(CloseReason.SERVER_SHUTDOWN, 20))
    assert machine.on_closed(4000) == Retry(0.02, "server_shutdown")
    assert machine.on_unreachable("it has not started yet").delay_seconds <= 1
    machine.on_announced(announced(CloseReason.SERVER_SHUTDOWN, 20))
    machine.on_closed(4000)
    assert max(machine.on_unreachable("and again").delay_seconds for _ in range(50)) > 1, (
        "one that did not last counts"
    )


def test_close_for_too_many_frames_delays_the_reconnect_by_30_s() -> None:
    verdict = reconnect().on_closed(4009)
    assert isinstance(verdict, Retry)
    assert verdict.delay_seconds >= 30


def test_an_announced_end_without_reconnect_stops_whatever_the_code() -> None:
    machine = reconnect()
    machine.on_announced(announced(CloseReason.UNAUTHORIZED))
    verdict = machine.on_closed(None)
    assert isinstance(verdict, Stop) and isinstance(verdict.error, Unauthorized)


def test_expired_token_is_renewed_once_and_then_stops() -> None:
    machine = reconnect()
    first = machine.on_closed(4008)
    assert isinstance(first, Retry) and first.new_token
    refused = machine.on_refused(401, None, "no")
    assert isinstance(refused, Stop) and isinstance(refused.error, Unauthorized)
    machine.on_established()
    again = machine.on_closed(4008)
    assert isinstance(again, Retry) and again.new_token


def test_expired_token_that_cannot_be_renewed_stops() -> None:
    assert isinstance(reconnect(can_renew=False).on_closed(4008), Stop)
    assert isinstance(reconnect(can_renew=False).on_refused(401, None, ""), Stop)


@pytest.mark.parametrize(
    ("status", "error"),
    [(400, InvalidMessage), (403, Forbidden), (404, NotFound), (426, InvalidMessage)],
)
def test_a_handshake_refused_for_good_stops(status: int, error: type[Exception]) -> None:
    verdict = reconnect().on_refused(status, None, "FORBIDDEN: no")
    assert isinstance(verdict, Stop) and isinstance(verdict.error, error)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_handshake_refused_for_now_is_tried_again_after_what_the_server_says(status: int) -> None:
    verdict = reconnect().on_refused(status, 20, "")
    assert isinstance(verdict, Retry) and 20 <= verdict.delay_seconds <= 25


def test_repeated_refusals_lengthen_the_delay_beyond_retry_after() -> None:
    machine = reconnect()
    delays = [
        verdict.delay_seconds
        for _ in range(300)
        if isinstance(verdict := machine.on_refused(503, 1, ""), Retry)
    ]
    assert all(1 <= delay <= 16 for delay in delays) and len(delays) == 300
    assert max(delays[:1]) <= 1.25 < 7 < sum(delays) / 300, (
        "at a second each, ten thousand clients are a storm without end"
    )


@pytest.mark.parametrize("status", [301, 308])
def test_permanent_redirect_is_named_and_not_followed(
    status: int,
) -> None:
    verdict = reconnect().on_refused(status, None, "https://elsewhere.example/")
    assert isinstance(verdict, Stop) and "elsewhere.example" in str(verdict.error)


@pytest.mark.parametrize("status", [302, 303, 307])
def test_temporary_redirect_is_named_and_the_address_tried_again(status: int) -> None:
    verdict = reconnect().on_refused(status, None, "https://maintenance.example/")
    assert isinstance(verdict, Retry) and "maintenance.example" in verdict.reason


@pytest.mark.parametrize("status", [400, 403, 404, 426])
def test_refusal_of_a_proxy_is_retried(status: int) -> None:
    machine = reconnect()
    for _ in range(3):
        verdict = machine.on_refused(status, None, "")
        assert isinstance(verdict, Retry) and f"answered with {status}; " in verdict.reason


@pytest.mark.covers("000 client-induced failures: the error code guides the fix")
@pytest.mark.parametrize(
    "code", ["FORBIDDEN", "NOT_A_MEMBER", "NOT_FOUND", "IDEMPOTENCY_KEY_REUSED", "UNHEARD_OF"]
)
def test_a_refused_send_says_why_and_what_to_do(code: str) -> None:
    error = refusal(
        Error(code, "so it is", False, details={"message": "a detail may have any name"})
    )
    assert (
        re.fullmatch(r"(UNHEARD_OF: )?so it is; .{8,}", str(error)) and str(error) == error.message
    )
    assert error.code == (code if code != "UNHEARD_OF" else "INTERNAL_ERROR")
    assert error.details == {"message": "a detail may have any name"}


@pytest.mark.covers("000 client-induced failures: the error code guides the fix")
@pytest.mark.parametrize(
    "closing", [c for c in CloseReason if not c.reconnect_allowed], ids=lambda c: c.reason
)
def test_a_connection_closed_for_good_says_why_and_what_to_do(closing: CloseReason) -> None:
    machine = reconnect()
    machine.on_announced(announced(closing))
    verdict = machine.on_closed(closing.code)
    assert isinstance(verdict, Stop)
    assert re.search(rf"{closing.message}; .{{8,}}", verdict.error.message)


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 426])
def test_refused_handshake_says_what_to_do(status: int) -> None:
    verdict = reconnect(can_renew=False).on_refused(status, None, "so it is")
    assert isinstance(verdict, Stop)
    assert re.search(r"; .{8,}", verdict.error.message)
