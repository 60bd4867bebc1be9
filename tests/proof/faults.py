"""Faults of dependencies: wrappers around contracts, driven by a seeded plan.

``faulty(store, plan)`` is a store again. Before each call the plan decides its fault:

- ``Fault.FAIL``      the call is not made; Unavailable
- ``Fault.DELAY``     it is made after some seconds
- ``Fault.HANG``      it never returns by itself: the caller's deadline must end it
- ``Fault.LOST_REPLY``  it is made, its effect stays, and the caller gets OutcomeUnknown
- ``Fault.LATE_REPLY``  it is made at once; its reply is delayed, behind later ones
- ``Fault.THROTTLE``  refused as RateLimited, nothing done

A wrapper adds no order of its own and no state between calls but the plan's, so it does
only what the wrapped contract allows: it reorders concurrent calls, never within one.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar, cast

from holdfast.errors import OutcomeUnknown, RateLimited, Unavailable

T = TypeVar("T")


class Fault(Enum):
    """A fault of one call."""

    NONE = "none"
    FAIL = "fail"
    DELAY = "delay"
    HANG = "hang"
    LOST_REPLY = "lost_reply"
    LATE_REPLY = "late_reply"
    THROTTLE = "throttle"


_FAULTS = tuple(Fault)[1:]


@dataclass(frozen=True, slots=True)
class Odds:
    """The probability of each fault per call; the rest: no fault."""

    fail: float = 0.0
    delay: float = 0.0
    hang: float = 0.0
    lost_reply: float = 0.0
    late_reply: float = 0.0
    throttle: float = 0.0
    seconds_max: float = 1.0

    def __post_init__(self) -> None:
        if sum(self._odds()) > 1 or min(self._odds()) < 0:
            raise ValueError("the odds of all faults must be between 0 and 1 together")

    def _odds(self) -> tuple[float, ...]:
        return (self.fail, self.delay, self.hang, self.lost_reply, self.late_reply, self.throttle)

    def draw(self, rng: random.Random) -> Fault:
        at = rng.random()
        for fault, odds in zip(_FAULTS, self._odds(), strict=True):
            if at < odds:
                return fault
            at -= odds
        return Fault.NONE


NO_FAULT = Odds()


@dataclass(slots=True)
class FaultPlan:
    """The fault of each call: by ``script``, in order, else by the odds of its verb.

    ``heal`` ends all faults and lets hanging calls continue; ``counts`` has the faults
    so far; ``during`` is entered for the time of each disturbed call.
    """

    rng: random.Random
    odds: Mapping[str, Odds] = field(default_factory=dict)
    script: dict[str, list[Fault]] = field(default_factory=dict)
    counts: dict[tuple[str, Fault], int] = field(default_factory=dict)
    healed: asyncio.Event = field(default_factory=asyncio.Event)
    during: Callable[[str, Fault], AbstractContextManager[None]] = lambda verb, fault: nullcontext()

    def next(self, verb: str) -> tuple[Fault, float]:
        """The fault of this call, and its duration where that matters."""
        if self.healed.is_set():
            return Fault.NONE, 0.0
        odds = self.odds.get(verb) or self.odds.get("*", NO_FAULT)
        scripted = self.script.get(verb)
        fault = scripted.pop(0) if scripted else odds.draw(self.rng)
        self.counts[verb, fault] = self.counts.get((verb, fault), 0) + 1
        return fault, self.rng.random() * odds.seconds_max

    def heal(self) -> None:
        self.healed.set()

    def injected(self) -> int:
        return sum(count for (_, fault), count in self.counts.items() if fault is not Fault.NONE)


class _Faulty:
    """Any contract with async verbs: the plan decides each call."""

    def __init__(self, inner: Any, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    def __getattr__(self, verb: str) -> Any:
        inner = getattr(self._inner, verb)
        if not _answers_later(inner):
            return inner

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await _disturbed(self._plan, verb, lambda: inner(*args, **kwargs))

        setattr(self, verb, call)  # looked up once
        return call


def _answers_later(verb: Any) -> bool:
    if not callable(verb):
        return False
    returns = getattr(verb, "__annotations__", {}).get("return")
    return inspect.iscoroutinefunction(verb) or str(returns).startswith("Awaitable")


async def _disturbed(plan: FaultPlan, verb: str, call: Callable[[], Awaitable[T]]) -> T:
    fault, seconds = plan.next(verb)
    if fault is Fault.NONE:
        return await call()
    with plan.during(verb, fault):
        return await _carried_out(plan, verb, call, fault, seconds)


async def _carried_out(
    plan: FaultPlan, verb: str, call: Callable[[], Awaitable[T]], fault: Fault, seconds: float
) -> T:
    match fault:
        case Fault.FAIL:
            raise Unavailable(f"injected: {verb} failed")
        case Fault.THROTTLE:
            raise RateLimited(f"injected: {verb} throttled", retry_after_seconds=1.0)
        case Fault.HANG:
            await plan.healed.wait()
        case Fault.DELAY:
            await asyncio.sleep(seconds)
        case _:
            pass
    answer = await call()
    if fault is Fault.LOST_REPLY:
        raise OutcomeUnknown(f"injected: {verb} was done, its reply was lost")
    if fault is Fault.LATE_REPLY:
        await asyncio.sleep(seconds)
    return answer


def faulty(contract: T, plan: FaultPlan) -> T:
    """``contract`` with faults: the same verbs, the same types."""
    return cast(T, _Faulty(contract, plan))
