"""What is kept of a failure: bounded, and equal for equal failures. And the numbers
that the design names.
"""

from __future__ import annotations

import asyncio
import errno
import random
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from holdfast.errors import BadSetting, NotFound, RateLimited, Unavailable
from holdfast.resilience import BreakerSettings
from holdfast.webhooks.delivery import WebhookSettings
from holdfast.work.breakers import Breakers
from holdfast.work.contract import INBOX_SECONDS, WorkerSession
from holdfast.work.failures import (
    LIBRARY_REASONS,
    NETWORK_ERRORS,
    REASONS,
    RETRY_AFTER_MAX_SECONDS,
    JobFailed,
    PayloadUnreadable,
    classify,
)
from holdfast.work.handlers import Context, Handlers
from holdfast.work.job import (
    CRASHES_MAX,
    DELAY_MAX_SECONDS,
    ERROR_BYTES_MAX,
    LANES,
    PARTITIONS,
    TRACE_BYTES_MAX,
    Failure,
    InvalidArgument,
    Job,
    Policies,
    Policy,
    Reason,
    decide,
)
from holdfast.work.postgres import WorkerSessionSettings
from holdfast.work.runner import Runner, RunOutcome
from holdfast.work.worker import WorkerSettings
from proof.virtual_loop import LoopClock


def kept(raises: Callable[[], None]) -> Failure:
    try:
        raises()
    except Exception as error:
        return classify(error)
    raise AssertionError("it did not fail")


def deep(depth: int) -> None:
    if not depth:
        raise ValueError("€" * 6_000 + " the cause")
    deep(depth - 1)


def test_error_and_trace_are_bounded_and_end_with_the_cause() -> None:
    failure = kept(lambda: deep(300))
    assert ERROR_BYTES_MAX - 8 <= len(failure.error.encode()) <= ERROR_BYTES_MAX == 4 << 10
    assert TRACE_BYTES_MAX - 8 <= len(failure.trace.encode()) <= TRACE_BYTES_MAX == 16 << 10
    assert failure.error.startswith("…") and failure.error.endswith("the cause")
    assert failure.trace.rstrip().endswith("the cause") and failure.error_type == "ValueError"


def test_characters_that_no_database_can_store_are_replaced() -> None:
    def raises() -> None:
        raise ValueError("a\x00b\ud800c")

    failure = kept(raises)
    assert "\x00" not in failure.error + failure.trace and failure.error.encode()
    assert failure.error.startswith("a") and failure.error.endswith("c")


def test_long_class_name_is_cut_to_what_databases_take() -> None:
    class Odd(Exception): ...

    Odd.__qualname__ = "A\x00" + 10_000 * "E" + "rror"
    failure = classify(Odd("x"))
    assert failure.error_type.endswith("EError") and len(failure.error_type.encode()) <= 200
    Odd.__qualname__ = "A\x00B"
    assert classify(Odd("x")).error_type == "A\N{REPLACEMENT CHARACTER}B"


def test_equal_failures_have_one_fingerprint_and_others_another() -> None:
    def of(order: str) -> None:
        raise ValueError(f"no stock for {order}")

    def elsewhere() -> None:
        raise ValueError("no stock for a")

    same = {kept(lambda: of("a")).fingerprint, kept(lambda: of("b")).fingerprint}
    assert len(same) == 1, "the text may name what it is about"
    assert kept(elsewhere).fingerprint not in same
    assert kept(lambda: deep(1)).fingerprint not in same


@pytest.mark.parametrize("reason", list(Reason))
def test_job_failed_with_a_reason_keeps_that_reason(reason: Reason) -> None:
    def raises() -> None:
        raise JobFailed(reason, "so it is", retry_after_seconds=3)

    failure = kept(raises)
    assert failure.reason is reason and failure.retry_after_seconds == 3


@pytest.mark.parametrize(
    ("seconds", "kept_as"),
    [
        ("30", 0),
        (None, 0),
        (float("nan"), 0),
        (-5, 0),
        (7, 7),
        (float("inf"), 86400),
        (1e13, 86400),
        (10**400, 86400),
    ],
)
def test_retry_after_is_used_only_if_it_is_a_sensible_number(seconds: Any, kept_as: float) -> None:
    class Odd(Exception):
        retry_after_seconds = seconds

    failure = classify(Odd())
    assert failure.retry_after_seconds == kept_as <= RETRY_AFTER_MAX_SECONDS
    assert (
        decide(Job(1, "t", b""), failure, Policy(), random.Random(1)).delay_seconds
        < 2 * RETRY_AFTER_MAX_SECONDS
    )


def test_no_policy_delays_a_job_longer_than_a_store_can_represent() -> None:
    endless = Policy(strike=False, cap_seconds=float("inf"))
    for attempt in (30, 1000, 10_000):
        verdict = decide(
            Job(1, "t", b"", attempt=attempt), Failure(Reason.THROTTLED), endless, random.Random(1)
        )
        assert verdict.delay_seconds == DELAY_MAX_SECONDS
    with pytest.raises(ValueError):
        Policy(base_seconds=float("nan"))


@pytest.mark.parametrize(
    "answer", [lambda error: error.args[9], lambda error: "poison", lambda error: 7]
)
def test_hook_that_fails_or_returns_no_reason_is_ignored(answer: Any) -> None:
    assert classify(ConnectionError("unavailable"), answer).reason is Reason.TRANSPORT_UNAVAILABLE


def test_job_failed_without_a_valid_reason_is_unknown() -> None:
    assert classify(JobFailed("because", "x")).reason is Reason.UNKNOWN  # type: ignore[arg-type]


def test_the_defaults_are_those_of_the_design() -> None:
    session, worker, policy, handlers = (
        WorkerSessionSettings(),
        WorkerSettings(),
        Policy(),
        Handlers(),
    )
    assert (session.beat_seconds, session.dead_after_seconds) == (5, 20)
    assert (session.no_start_after_seconds, session.stuck_after_seconds, INBOX_SECONDS) == (
        15,
        30,
        7 * 86400,
    )
    assert (worker.poll_min_seconds, worker.poll_max_seconds) == (0.02, 1.0)
    assert (policy.base_seconds, policy.factor, policy.cap_seconds, policy.jitter) == (
        30,
        2,
        3600,
        0.1,
    )
    assert (policy.strikes_max, CRASHES_MAX, PARTITIONS, LANES) == (10, 3, 256, 1024)

    @handlers.handle(dict, type="order")
    async def handle(ctx: Context, payload: dict[str, str]) -> None: ...

    handling = handlers.find(Job(1, "order", b"{}"))
    assert handling is not None and handling.deadline_seconds == 300, (
        "no run outlives its lease of five minutes"
    )


WORKER = [
    field.name
    for field in fields(WorkerSettings)
    if field.name not in ("breaker", "stuck_loop_seconds")
]
SESSION = [field.name for field in fields(WorkerSessionSettings)]
WEBHOOKS = [
    "timeout_seconds",
    "connect_timeout_seconds",
    "concurrency_per_endpoint",
    "answer_bytes_max",
]


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        *((WorkerSettings, name) for name in WORKER),
        *((WorkerSessionSettings, name) for name in SESSION),
        *((WebhookSettings, name) for name in WEBHOOKS),
    ],
)
def test_setting_of_zero_is_refused_by_name(settings: type[Any], name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be greater than 0, not {value}$"):
        settings(**{name: value})


def test_watchdog_is_off_at_zero_and_never_negative() -> None:
    assert WorkerSettings(stuck_loop_seconds=0).stuck_loop_seconds == 0
    with pytest.raises(
        ValueError, match=r"stuck_loop_seconds must be 0 \(never\) or a number of seconds"
    ):
        WorkerSettings(stuck_loop_seconds=-1)


def test_draft_of_a_payload_class_with_several_handlers_is_refused() -> None:
    handlers = Handlers()
    with pytest.raises(BadSetting, match="a payload of dict is not handled"):
        handlers.draft({})
    for name in ("order", "mail"):

        @handlers.handle(dict, type=name)
        async def handle(ctx: Context, payload: dict[str, str]) -> None: ...

        if name == "order":
            assert handlers.draft({}).type == "order"
    with pytest.raises(BadSetting, match="handled as order, mail: make its JobDraft"):
        handlers.draft({})


def test_handler_and_transport_without_a_deadline_are_refused() -> None:
    class Nowhere:
        async def send(self, ctx: Context, address: str) -> None: ...

    with pytest.raises(BadSetting, match="deadline_seconds must be greater than 0"):

        @Handlers().handle(dict, deadline_seconds=0)
        async def handle(ctx: Context, payload: dict[str, str]) -> None: ...

    with pytest.raises(BadSetting, match="deadline_seconds must be greater than 0"):
        Handlers().carry("topic", Nowhere(), deadline_seconds=-1)


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        (WorkerSettings, {"concurrency": 9, "jobs_max": 8}),
        (WorkerSettings, {"poll_min_seconds": 2, "poll_max_seconds": 1}),
        (WorkerSessionSettings, {"beat_seconds": 15}),
        (WorkerSessionSettings, {"no_start_after_seconds": 20}),
    ],
)
def test_contradicting_settings_are_refused(settings: type[Any], given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must hold"):
        settings(**given)


@pytest.mark.covers("003 every failure has a reason")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionResetError(), Reason.TRANSPORT_UNAVAILABLE),
        (BrokenPipeError(), Reason.TRANSPORT_UNAVAILABLE),
        (socket.gaierror(-2, "name unknown"), Reason.TRANSPORT_UNAVAILABLE),
        (ssl.SSLCertVerificationError("expired"), Reason.TRANSPORT_UNAVAILABLE),
        (OSError(errno.ENETUNREACH, "x"), Reason.TRANSPORT_UNAVAILABLE),
        (OSError(errno.EHOSTUNREACH, "x"), Reason.TRANSPORT_UNAVAILABLE),
        (OSError(errno.ENETDOWN, "x"), Reason.TRANSPORT_UNAVAILABLE),
        (TimeoutError(), Reason.TIMEOUT_EXCEEDED),
        (OSError(errno.ETIMEDOUT, "x"), Reason.TIMEOUT_EXCEEDED),
        (FileNotFoundError(2, "x"), Reason.HANDLER_EXCEPTION),
        (PermissionError(13, "x"), Reason.HANDLER_EXCEPTION),
        (OSError(errno.ENOSPC, "x"), Reason.HANDLER_EXCEPTION),
        (OSError("no number"), Reason.HANDLER_EXCEPTION),
        (msgspec.DecodeError("somebody's 502 page"), Reason.HANDLER_EXCEPTION),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "x"), Reason.HANDLER_EXCEPTION),
        (RecursionError(), Reason.HANDLER_EXCEPTION),
        (InvalidArgument("5 is no stage"), Reason.HANDLER_EXCEPTION),
        (KeyboardInterrupt(), Reason.HANDLER_EXCEPTION),
        (NotFound("their answer"), Reason.VALIDATION_FAILURE),
        (RateLimited("slower"), Reason.THROTTLED),
        (Unavailable("x"), Reason.DEPENDENCY_FAILURE),
        (PayloadUnreadable("ours"), Reason.SERIALIZATION_ERROR),
    ],
)
def test_the_reason_of_an_exception(error: BaseException, reason: Reason) -> None:
    assert classify(error).reason is reason


@pytest.mark.covers("003 SerializationError = 5")
@pytest.mark.parametrize("data", [b"{", b"\xff", b"[" * 100_000, b'{"n": "x"}'])
def test_only_our_own_decoding_of_the_payload_is_a_serialization_error(data: bytes) -> None:
    handlers = Handlers()
    handlers.handle(dict[str, int], type="T")(nobody)
    handling = handlers.find(Job(1, "T", b""))
    assert handling is not None
    with pytest.raises(PayloadUnreadable) as caught:
        handling.decoded(data)
    assert classify(caught.value).reason is Reason.SERIALIZATION_ERROR


async def nobody(ctx: Context, payload: Any) -> None:
    """A handler."""


def test_reasons_of_a_handler_precede_the_table_and_the_nearest_class_decides() -> None:
    own = {LookupError: Reason.VALIDATION_FAILURE, KeyError: Reason.THROTTLED}
    assert classify(KeyError("x"), lambda _: Reason.UNKNOWN, own).reason is Reason.THROTTLED
    assert classify(IndexError("x"), None, own).reason is Reason.VALIDATION_FAILURE
    assert classify(ValueError("x"), lambda _: Reason.UNKNOWN, own).reason is Reason.UNKNOWN
    assert (
        classify(JobFailed(Reason.POISON_MESSAGE), None, {JobFailed: Reason.UNKNOWN}).reason
        is Reason.POISON_MESSAGE
    )
    for wrong in ({"KeyError": Reason.UNKNOWN}, {KeyError: "unknown"}, {int: Reason.UNKNOWN}):
        with pytest.raises(BadSetting, match="reasons"):
            Handlers().handle(dict, type="T", reasons=wrong)(nobody)  # type: ignore[arg-type]


def test_table_of_reasons_in_the_guide_matches_the_code() -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/work.md").read_text()
    table = guide.partition("| a handler raises | reason |")[2].partition("\n\n")[0]
    listed = {
        name: row.rsplit("|", 2)[1].strip()
        for row in table.splitlines()[2:]
        for name in re.findall(r"`([\w.]+)`", row.rsplit("|", 2)[0])
    }
    code = {kind.__name__: reason.name.lower() for kind, reason in REASONS}
    code |= {name: reason.name.lower() for name, reason in LIBRARY_REASONS.items()}
    code |= {errno.errorcode[number]: "transport_unavailable" for number in NETWORK_ERRORS}
    assert listed == code


async def test_deadlines_are_watched_only_while_something_runs() -> None:
    class CountingClock(LoopClock):
        asked = 0

        def monotonic(self) -> float:
            self.asked += 1
            return super().monotonic()

    clock, handlers = CountingClock(), Handlers()
    runner = Runner(
        handlers, Policies(), Breakers(BreakerSettings(), clock), clock, random.Random(0), None
    )

    @handlers.handle(dict, type="endless", deadline_seconds=2.0)
    async def endless(context: Context, payload: dict[str, Any]) -> None:
        await asyncio.sleep(3600)

    watching = asyncio.create_task(runner.watch_deadlines(1.0, lambda *_: None))
    for job in (Job(1, "endless", b"{}"), Job(2, "endless", b"{}")):
        await asyncio.sleep(1.0)  # the last run has left its last tick behind
        clock.asked = 0
        await asyncio.sleep(60)
        assert clock.asked == 0, "an idle worker does not wake"

        async def run(job: Job) -> RunOutcome | None:
            task = asyncio.current_task()
            assert task is not None
            return await runner.run(job, cast(WorkerSession, None), task)

        began = clock.now()
        outcome = await asyncio.create_task(run(job))
        assert outcome is not None and outcome.failed is not None
        assert 2.0 <= clock.now() - began < 2.3, "the deadline was noticed in time"
    watching.cancel()
