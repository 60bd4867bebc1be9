"""The one question Holdfast's own doors ask.

A door names an entrance and who stands there; the rules decide by user, by tenant and by address, each under its own
resource (``send:user``, ``send:tenant``, …), so that an operator can see and change each. The bucket of a single
connection is not here: it belongs to its session.

Doors that cannot wait (a send on a socket, a handshake) are answered at once: exactly where the counters are in this
process, otherwise by what is known here, and counted a moment later. What slips through is what one subject can send
within one round trip to the counters; it is charged, so that he waits for it afterwards. So the absence of limits
never delays a send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Literal, Protocol

from holdfast import telemetry
from holdfast.access.network import Buckets, address_group
from holdfast.errors import HoldfastError, InternalError, RateLimited
from holdfast.limits.entry_rules import ADMIN, ADMIN_CALLS_PER_MINUTE_MIN
from holdfast.limits.http import refusal
from holdfast.limits.limiter.limiter import Limiter
from holdfast.limits.rules import ANY, Check, Decision
from holdfast.message import Outcome, User
from holdfast.wire.frames import SendBody

EntryPoint = Literal["connect", "send", "rest", "check", "admin"]

CONNECT_ADDRESS = "connect:address"
QUESTIONS_MAX = 16_384
"""Who asked lately: their questions are the same for every send."""


@lru_cache(QUESTIONS_MAX)
def questions(entrance: EntryPoint, who: User, address: str = "") -> Sequence[Check]:
    """What is asked at an entrance. An unknown user, tenant or address is not asked about.

    An address stands for whose it is: an IPv6 customer has a whole /64. A handshake asks twice: for its address before
    anybody knows who it is, by the rule of all tenants; then for its user, and for its address among those of its
    tenant.
    """
    if entrance == "admin":
        return [Check(*ADMIN, who.user_id or address_group(address))]
    asked = []
    if who.user_id and entrance != "check":  # a service that asks about limits asks for everybody
        asked.append(Check(who.tenant, f"{entrance}:user", who.user_id))
    if entrance == "connect":
        if address:
            asked.append(Check(who.tenant or ANY, CONNECT_ADDRESS, address_group(address)))
    elif who.tenant:
        asked.append(Check(who.tenant, f"{entrance}:tenant", who.tenant))
    return asked


class EntryPoints:
    """What the doors ask; a refusal to give, or None."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._operators = Buckets(ADMIN_CALLS_PER_MINUTE_MIN / 60, ADMIN_CALLS_PER_MINUTE_MIN)
        """What each has here when the share of a limit is used up: among many nodes the share may be nothing."""

    async def decide(self, entrance: EntryPoint, who: User, address: str = "") -> list[Decision]:
        """For doors that can wait: exact, all rules or none. Never longer than the limiter's deadline.

        Rules in shadow mode are counted and not told. While the counters are unavailable an operator has so many calls
        on each node that whatever was set can be undone.
        """
        asked = self._asked(entrance, who, address)
        decisions = self._limiter.told(asked, await self._limiter.check_many(asked))
        if entrance == "admin" and any(decision.degraded and not decision.allowed for decision in decisions):
            wait = self._operators.take(asked[0].subject, asyncio.get_running_loop().time())
            return decisions if wait else []
        return decisions

    def ask_at_once(self, entrance: EntryPoint, who: User, address: str = "") -> RateLimited | None:
        """For doors that cannot wait."""
        return self.admit_at_once(entrance, who, 1, address)[1]

    def admit_at_once(
        self, entrance: EntryPoint, who: User, count: int, address: str = ""
    ) -> tuple[int, RateLimited | None]:
        """``ask_at_once`` for ``count`` alike: how many of them may pass, and what the others are told.

        The later rules are looked at first, so that what they refuse is not charged to the first.
        """
        asked, refused = self._asked(entrance, who, address), None
        for check in asked[1:]:
            admitted, decision = self._limiter.look(check, count)
            if decision is not None:
                count, refused = admitted, refusal([decision])
        for check in asked if count else ():
            admitted, decision = self._limiter.admit_soon(check, count)
            if decision is not None:
                count, refused = admitted, refusal([decision])
        return count, refused

    def _asked(self, entrance: EntryPoint, who: User, address: str) -> Sequence[Check]:
        """The address of somebody known was charged before; a rule of his own tenant is asked besides."""
        asked = questions(entrance, who, address)
        if entrance != "connect" or not who.tenant or self._limiter.has_own_rule(who.tenant, CONNECT_ADDRESS):
            return asked
        return [check for check in asked if check.resource != CONNECT_ADDRESS]


class Sends(Protocol):
    """Where sends go in, to be grouped with all others: ``holdfast.ingest.intake.Intake``, or what stands before it."""

    def submit(
        self, body: SendBody, sender: User, source: str, deadline: float, answer: Callable[[Outcome], None]
    ) -> None:
        """Take a valid send and answer it exactly once, by ``deadline`` (monotonic)."""
        ...


_Send = tuple[SendBody, User, str, float, Callable[[Outcome], None]]
_sender = itemgetter(1)


class AdmissionControl:
    """Sends with the entrance ``send`` before them; a refused one is answered and goes no further.

    What comes in one turn of the loop is asked for together, once per sender, and goes on in its order. What waits
    here is bounded by what sessions and requests may have open.
    """

    def __init__(self, sends: Sends, entrances: EntryPoints) -> None:
        self._sends = sends
        self._entrances = entrances
        self._waiting: list[_Send] = []

    def submit(
        self, body: SendBody, sender: User, source: str, deadline: float, answer: Callable[[Outcome], None]
    ) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._admit)
        self._waiting.append((body, sender, source, deadline, answer))

    def _admit(self) -> None:
        waiting, self._waiting = self._waiting, []
        for sender, group in groupby(waiting, _sender):
            sends = list(group)
            admitted, refused = self._ask(sender, len(sends))
            for place, send in enumerate(sends):
                try:
                    if refused is None or place < admitted:
                        self._sends.submit(*send)
                    else:
                        send[4](refused)
                except Exception as error:  # one broken listener must not cost the others their answers
                    telemetry.defect("limits", error)

    def _ask(self, sender: User, count: int) -> tuple[int, HoldfastError | None]:
        """How many may go in, and what the others are told: also by a defect, which is nobody else's trouble."""
        try:
            return self._entrances.admit_at_once("send", sender, count)
        except Exception as error:
            telemetry.defect("limits", error)
            return 0, InternalError("limits could not decide; the log has the cause")
