"""Rows of the design documents that need a whole run of the simulation."""

from __future__ import annotations

import pytest

from holdfast import telemetry
from holdfast.verify.checkers import check, red
from holdfast.verify.checkers.fault_timeline import FaultTimeline
from holdfast.verify.history import Fail, History, Ok, Unknown
from proof.controls import only_faults
from proof.controls.stores import UnpublishedDisk
from proof.faults import Odds
from proof.simulation import Parts, play

SEEDS = range(1, 9)


def sent(history: History) -> dict[str, list[Ok | Fail | Unknown | None]]:
    """How each try of each message ended."""
    tries: dict[str, list[Ok | Fail | Unknown | None]] = {}
    for operation in history.operations:
        if operation.invoke.verb == "send":
            tries.setdefault(f"{operation.invoke.client} {operation.invoke.key}", []).append(
                operation.end
            )
    return tries


@pytest.mark.covers("000 contract 1, in time")
@pytest.mark.parametrize(
    ("plane", "odds"),
    [
        ("writes", Odds(hang=0.3)),
        ("writes", Odds(late_reply=0.9, seconds_max=8.0)),
        ("reads", Odds(hang=0.3)),
        ("reads", Odds(delay=0.9, seconds_max=4.0)),
    ],
)
def test_every_request_is_answered_within_5_5_s_whatever_hangs(plane: str, odds: Odds) -> None:
    """No fault of the store excuses a late answer; the answer may be "unknown"."""
    answers: list[Ok | Fail | Unknown] = []
    for seed in SEEDS:
        history = play(seed, Parts(options=only_faults(bursts=3, **{plane: odds})))
        for operation in history.operations:
            end = operation.end
            if operation.invoke.client == "eve over REST":
                continue
            assert end is not None and end.at - operation.invoke.at <= 5.5, operation
            assert not isinstance(end, Unknown) or end.reason != "timeout", operation
            answers.append(end)
        verdicts = check(history)
        assert red(verdicts) == set(), "\n".join(map(str, verdicts))
    refused = [end for end in answers if isinstance(end, Fail | Unknown)]
    assert refused and {end.code for end in refused} <= {"SERVICE_UNAVAILABLE", "SERVER_BUSY", ""}
    assert plane == "reads" or any(isinstance(end, Unknown) for end in refused)


@pytest.mark.covers("000 DynamoDB throttling")
@pytest.mark.covers("001 throttling: graceful degradation with retries")
def test_a_throttled_store_delays_sends_and_loses_none() -> None:
    """The client retries after RATE_LIMITED; no connection closes, no breaker opens."""
    retried = 0
    for seed in SEEDS:
        history = play(seed, Parts(options=only_faults(writes=Odds(throttle=0.4))))
        assert red(check(history)) == set()
        for tries in sent(history).values():
            assert isinstance(tries[-1], Ok)
            assert all(isinstance(end, Fail) and end.code == "RATE_LIMITED" for end in tries[:-1])
            retried += len(tries) - 1
    assert retried > 20


@pytest.mark.covers("000 connection (slow client) to durability")
def test_clients_that_do_not_read_do_not_slow_other_sends() -> None:
    warned = 0
    for seed in SEEDS:
        history = play(
            seed, Parts(options=only_faults(stalls=6, buffer_messages=5, sends_per_device=30))
        )
        timeline = FaultTimeline(history)
        for operation in history.operations:
            invoke, end = operation.invoke, operation.end
            assert end is not None
            if invoke.verb == "send" and not timeline.unreachable_seconds(
                invoke.client, invoke.at, end.at
            ):
                assert end.at - invoke.at < 0.1 or isinstance(end, Unknown), operation
        warned += any(fault.name == "stall" for fault in timeline.of("connection"))
        assert red(check(history)) == set()
    assert warned > 4


@pytest.mark.covers("001 `sequence_gap_rate`, > 5 %")
def test_log_with_holes_is_counted_as_it_is_read() -> None:
    def gaps() -> float:
        return telemetry.REGISTRY.get_sample_value("holdfast_sequence_gaps_total") or 0.0

    before = gaps()
    play(1, Parts(options=only_faults()))
    assert gaps() == before
    play(1, Parts(disk=UnpublishedDisk, options=only_faults()))
    assert gaps() > before
