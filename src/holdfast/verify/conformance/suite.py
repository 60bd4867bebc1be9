"""Runs every scenario, one after the other, and reports the results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from holdfast.verify.conformance import connections, replies, scenarios, together
from holdfast.verify.conformance.scenarios import Scenario, verify
from holdfast.verify.conformance.subject import ProgramSubject
from holdfast.verify.scripted_server import ScriptedServer

SCENARIOS: list[Scenario] = [
    scenarios.in_order,
    scenarios.drop_before_store,
    scenarios.drop_after_store,
    scenarios.duplicate_pushes,
    scenarios.gap,
    scenarios.heads,
    scenarios.resync,
    scenarios.pushes_during_a_pull,
    scenarios.slow_link,
    scenarios.reset,
    scenarios.reset_of_one_device,
    connections.rotation,
    connections.shutdown_with_delay,
    connections.slow_closing,
    connections.announced_and_not_closed,
    connections.token_expiry,
    connections.token_refused_at_connect,
    connections.bad_handshakes,
    connections.unanswered_handshake,
    connections.blackhole,
    scenarios.refusals,
    scenarios.refused_without_a_delay,
    scenarios.other_refusals,
    connections.replaced,
    scenarios.killed_client,
    scenarios.resume_refused_for_now,
    scenarios.resume_refused_for_good,
    scenarios.refused_ack,
    scenarios.doubted_membership,
    scenarios.removed,
    scenarios.unknown_and_missing,
    connections.codes_to_return_from,
    connections.codes_to_stop_at,
    replies.growing_reply,
    replies.reply_missed_in_part,
    replies.reply_begun_again,
    replies.reply_cut_off,
    together.resumed_then_messages,
    together.empty_resumed_then_message,
    together.reset_then_messages,
    together.page_then_messages,
    together.messages_then_page,
    together.ack_then_message,
    together.message_then_ack,
    together.messages_then_resync,
    together.messages_then_closing,
]

WITHOUT_VERIFY = (connections.replaced, scenarios.removed, connections.token_refused_at_connect)
"""Scenarios after which the client has no more of the chat to show or to ack."""


class Result(Struct, frozen=True):
    """The result of one scenario.

    ``why`` and ``log`` (the end of the program's) are of a failure.
    """

    scenario: str
    passed: bool
    seconds: float
    why: str = ""
    log: Sequence[str] = ()


def name_of(scenario: Scenario) -> str:
    return str(scenario.__name__)


async def run_suite(
    command: Sequence[str],
    chosen: Sequence[Scenario],
    patience_seconds: float,
    on_result: Callable[[Result], None],
) -> list[Result]:
    """Run each scenario with its own program and state file, also after a failure."""
    results = []
    with tempfile.TemporaryDirectory(prefix="holdfast-conformance-") as folder:
        for scenario in chosen:
            result = await _run(
                command, scenario, Path(folder) / f"{name_of(scenario)}.state", patience_seconds
            )
            on_result(result)
            results.append(result)
    return results


async def _run(
    command: Sequence[str], scenario: Scenario, state: Path, patience_seconds: float
) -> Result:
    started, why = time.monotonic(), ""
    async with ScriptedServer(patience_seconds) as server:
        subject = ProgramSubject(command, server, state)
        try:
            async with subject:
                await scenario(server, subject)
                if scenario not in WITHOUT_VERIFY:
                    await verify(server, subject)
        except AssertionError as error:
            why = str(error)
        why = server.failure or why
    seconds = round(time.monotonic() - started, 2)
    return Result(name_of(scenario), not why, seconds, why, list(subject.log) if why else [])
