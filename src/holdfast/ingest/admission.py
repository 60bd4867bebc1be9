"""Asks limits before a send reaches the intake.

It never waits: limits answer at once from what this node knows, see
``holdfast.limits.entry_points``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import HoldfastError, InternalError, RateLimited
from holdfast.ingest.contract import Sends
from holdfast.limits.entry_points import EntryPoints
from holdfast.message import Outcome, User
from holdfast.wire.frames import SendBody

_Send = tuple[SendBody, User, str, float, Callable[[Outcome], None]]
_sender = itemgetter(1)


class AdmissionControl:
    """Checks the entry point ``send`` before sends; a refused one is answered here.

    The sends of one event-loop turn are checked together, once per sender, and go on in
    order. The bounds of sessions and requests bound what waits here.
    """

    def __init__(self, sends: Sends, entry_points: EntryPoints, clock: Clock) -> None:
        self._sends = sends
        self._entry_points = entry_points
        self._clock = clock
        self._waiting: list[_Send] = []
        self._since = 0.0
        """When the first of them came."""

    def submit(
        self,
        body: SendBody,
        sender: User,
        source: str,
        deadline: float,
        answer: Callable[[Outcome], None],
    ) -> None:
        if not self._waiting:
            self._since = self._clock.monotonic()
            asyncio.get_running_loop().call_soon(self._admit)
        self._waiting.append((body, sender, source, deadline, answer))

    def _admit(self) -> None:
        waiting, self._waiting = self._waiting, []
        for sender, group in groupby(waiting, _sender):
            sends = list(group)
            admitted, refused = self._ask(sender, len(sends))
            for index, send in enumerate(sends):
                try:
                    if refused is None or index < admitted:
                        self._sends.submit(*send)
                    else:
                        self._count(refused)
                        send[4](refused)
                except Exception as error:
                    # one broken listener must not cost the others their answers
                    telemetry.defect("limits", error)

        telemetry.message_step("admit", self._clock.monotonic() - self._since)

    def _count(self, refused: HoldfastError) -> None:
        if isinstance(refused, RateLimited):
            telemetry.sends_refused()
        else:
            telemetry.send_turned_away("defect")

    def _ask(self, sender: User, count: int) -> tuple[int, HoldfastError | None]:
        """How many may pass, and the others' error; a defect fails this sender only."""
        try:
            return self._entry_points.admit_at_once("send", sender, count)
        except Exception as error:
            telemetry.defect("limits", error)
            return 0, InternalError("limits could not decide; the log has the cause")
