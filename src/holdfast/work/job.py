"""What a job is, what is decided when it fails, and which worker owns it. (Pure: tables
and values.)

Progress and state are two things. *Progress* is a set of completed stages, bits that
are only ever added. *State* is where the job stands now:

    READY ──start──▶ (in a worker's memory) ──success──▶ gone
      ▲                        │
      │ due                    ├─ failure ─▶ RETRY (due_at)  its stream waits or goes on
      └────────────────────────┤            PARKED           until an operator acts
    HELD  waits behind its     └─ failure ─▶ dead letter     row moves to the dead table
          stream's failed head

``attempt`` counts the times a handler got the job and drives the delay; ``strikes`` are
the attempts that count against the maximum. What happens after a failure is a policy,
looked up by (job type, reason).

A stream belongs to one of 256 partitions, which workers lease. Rendezvous hashing
assigns them: every worker computes the same owners from the list of live workers, and
when a worker joins or leaves, only its own share moves.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, IntFlag
from hashlib import blake2b
from zlib import crc32

from msgspec import Struct

from holdfast.errors import InvalidMessage, MessageTooLarge

PAYLOAD_BYTES_MAX = 1 << 20
NAME_LENGTH_MAX = 200
ERROR_BYTES_MAX = 4 << 10
TRACE_BYTES_MAX = 16 << 10
DELAY_MAX_SECONDS = 10 * 366 * 86400.0
"""Ten years: the longest delay until a job is due; every store can represent it."""
SEQ_MAX = (1 << 63) - 1
"""The greatest sequence a store can keep: 64 bits with a sign."""
CRASHES_MAX = 3
"""A job that was in flight when its process died this often is isolated as poison."""
SUSPECTS_MAX = 8
"""How many jobs with one crash are in flight at once; with more, one is alone."""

FAILED_BIT = 32768
"""The design document's `Failed`: shown in the views, never stored, since it is a state
and not progress."""
LANES = 1024
PARTITIONS = 256


class InvalidArgument(InvalidMessage):
    """A program gave a verb of work a value that no store can take; nothing was
    changed. In a handler it is a defect of the handler, not of the job's data.
    """


class Stage(IntFlag):
    """What a job has accomplished. Users may use the free bits from ``USER`` up to
    16384 for their own stages.
    """

    NONE = 0
    STORED = 1
    EVENT_STORED = 2
    PUBLISHED = 4
    USER = 8


def check_stage(stage: int) -> int:
    """The stage as one bit; refuses several bits, the failed bit, or out of range."""
    if not _is_int(stage) or not 0 < stage < FAILED_BIT or stage & (stage - 1):
        raise InvalidArgument(
            f"{shown(stage)} is no stage: one bit between 1 and {FAILED_BIT >> 1}", field="stage"
        )
    return int(stage)


def check_seq(seq: int) -> int:
    """The sequence of a job; refuses what no store can have given to one."""
    if not _is_int(seq) or not 0 < seq <= SEQ_MAX:
        raise InvalidArgument(
            f"{shown(seq)} is no job's sequence: an integer from 1 to {SEQ_MAX}", field="seq"
        )
    return int(seq)


def check_seqs(seqs: Iterable[int]) -> list[int]:
    return [check_seq(seq) for seq in seqs]


def check_draft(draft: JobDraft) -> JobDraft:
    """The draft; refuses anything that is not a JobDraft."""
    if not isinstance(draft, JobDraft):
        raise InvalidArgument(f"a job is enqueued as a JobDraft, not {shown(draft)}", field="draft")
    return draft


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A wrong value in an error: its type and the beginning of its text."""
    try:
        text = repr(value) if isinstance(value, str | int | float | None) else "…"
    except Exception:  # an integer of too many digits has no text
        text = "…"
    return f"{type(value).__name__} {text[:40]}"


class State(IntEnum):
    """Where a job stands; done and dead jobs have no row here."""

    READY = 0
    RETRY = 1
    HELD = 2
    PARKED = 3


class Reason(IntEnum):
    """Why a job failed; every report carries one."""

    TRANSPORT_UNAVAILABLE = 1
    HANDLER_EXCEPTION = 2
    VALIDATION_FAILURE = 3
    TIMEOUT_EXCEEDED = 4
    SERIALIZATION_ERROR = 5
    DEPENDENCY_FAILURE = 6
    POISON_MESSAGE = 7
    THROTTLED = 8
    UNKNOWN = 99


def reason_of(number: int | None) -> Reason | None:
    """A reason as it is stored; UNKNOWN if only a newer version knows it."""
    try:
        return None if number is None else Reason(number)
    except ValueError:
        return Reason.UNKNOWN


class OnFailure(IntEnum):
    """What a stream does when its head fails and will be tried again."""

    BLOCK = 0
    SKIP = 1
    PARK = 2


class FailureAction(IntEnum):
    """What becomes of the failed job itself."""

    RETRY = 1
    PARK = 2
    DEAD = 3
    POSTPONE = 4
    """Not run (open breaker, or postponed by its handler): no attempt is counted."""


@dataclass(frozen=True, slots=True)
class JobDraft:
    """A job to be enqueued. ``stream`` None: it keeps no order with anything.

    ``delay_seconds`` > 0: it joins its stream when it is due. ``source`` and
    ``source_id`` together: it came from outside (the inbox) and is stored once.
    """

    type: str
    payload: bytes
    stream: str | None = None
    destination: str = ""
    delay_seconds: float = 0.0
    source: str = ""
    source_id: str = ""

    def __post_init__(self) -> None:
        _name("type", self.type)
        if self.stream is not None:
            _name("stream", self.stream)
        if self.destination != "":
            _name("destination", self.destination, 2000)
        if not isinstance(self.payload, bytes):
            raise InvalidArgument(
                f"payload must be bytes, not {shown(self.payload)}", field="payload"
            )
        if len(self.payload) > PAYLOAD_BYTES_MAX:
            raise MessageTooLarge(
                f"a payload of {len(self.payload)} bytes; at most {PAYLOAD_BYTES_MAX}"
            )
        number = _is_int(self.delay_seconds) or isinstance(self.delay_seconds, float)
        if not number or not 0 <= self.delay_seconds <= DELAY_MAX_SECONDS:
            message = (
                "delay_seconds must be a number between 0 and ten years, not"
                f" {shown(self.delay_seconds)}"
            )
            raise InvalidArgument(message, field="delay_seconds")
        if bool(self.source) != bool(self.source_id):
            raise InvalidArgument("source and source_id go together", field="source")
        if (self.source, self.source_id) != ("", ""):
            _name("source", self.source)
            _name("source_id", self.source_id)


def _name(what: str, value: str, length_max: int = NAME_LENGTH_MAX) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= length_max or not value.isprintable():
        message = f"{what} must be 1 to {length_max} printable characters, not {shown(value)}"
        raise InvalidArgument(message, field=what)


class Job(Struct, frozen=True, gc=False):
    """A job as a worker holds it. ``attempt`` is the number of this run: 1 for the
    first.

    ``seq`` is its id and its order in its stream; ``key`` stays the same when the job
    is replayed from the dead letters.
    """

    seq: int
    type: str
    payload: bytes
    stream: str | None = None
    destination: str = ""
    partition: int = 0
    attempt: int = 1
    strikes: int = 0
    crashes: int = 0
    stages: int = int(Stage.STORED)
    origin: int = 0

    @property
    def key(self) -> int:
        return self.origin or self.seq

    @property
    def suspect(self) -> bool:
        """Was in flight when a process died; few run at once, to find the culprit."""
        return self.crashes > 0


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong: bounded texts, and a fingerprint that groups equal failures."""

    reason: Reason
    error_type: str = ""
    error: str = ""
    trace: str = ""
    fingerprint: str = ""
    retry_after_seconds: float = 0.0
    postponed: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do about a failure. Delay: min(cap, base × factor^n), ± jitter."""

    retry: bool = True
    base_seconds: float = 30.0
    factor: float = 2.0
    cap_seconds: float = 3600.0
    jitter: float = 0.1
    strikes_max: int = 10
    strike: bool = True
    feeds_breaker: bool = False
    stream: OnFailure = OnFailure.BLOCK

    def __post_init__(self) -> None:
        if not (self.base_seconds > 0 and self.factor >= 1 and self.cap_seconds > 0):
            raise ValueError(
                "base_seconds and cap_seconds must be greater than 0, factor at least 1"
            )
        if not 0 <= self.jitter < 1 or self.strikes_max < 1:
            raise ValueError("jitter must be in [0, 1), strikes_max at least 1")

    def delay(self, attempt: int, rng: random.Random) -> float:
        """Seconds to wait after the attempt with this number."""
        exponent = min(attempt, 1000)
        try:
            delay = min(self.cap_seconds, self.base_seconds * self.factor**exponent)
        except OverflowError:
            delay = self.cap_seconds
        return delay * (1 + self.jitter * (2 * rng.random() - 1)) if self.jitter else delay

    def for_store_failure(self, seconds: float) -> Policy:
        """After a failure of the job store itself: retried, without a strike."""
        stream = OnFailure.BLOCK if self.stream is OnFailure.PARK else self.stream
        return Policy(True, seconds, 1.0, seconds, strike=False, stream=stream)


_STRIKE = Policy()
_DEAD_AT_ONCE = Policy(retry=False)
_INFRASTRUCTURE = Policy(strike=False, feeds_breaker=True)

DEFAULTS: Mapping[Reason, Policy] = {
    Reason.TRANSPORT_UNAVAILABLE: _INFRASTRUCTURE,
    Reason.HANDLER_EXCEPTION: _STRIKE,
    Reason.VALIDATION_FAILURE: _DEAD_AT_ONCE,
    Reason.TIMEOUT_EXCEEDED: _STRIKE,
    Reason.SERIALIZATION_ERROR: _DEAD_AT_ONCE,
    Reason.DEPENDENCY_FAILURE: _INFRASTRUCTURE,
    Reason.POISON_MESSAGE: _DEAD_AT_ONCE,
    Reason.THROTTLED: Policy(strike=False),
    Reason.UNKNOWN: _STRIKE,
}

_UNIFORM = Policy(cap_seconds=float("inf"), jitter=0.0)
UNIFORM: Mapping[Reason, Policy] = dict.fromkeys(Reason, _UNIFORM)
"""The design document's behaviour: every reason is retried and is a strike; no jitter,
no cap, dead at ten."""


@dataclass(frozen=True, slots=True)
class Policies:
    """The policy for each (job type, reason): the type's own, else the reason's."""

    by_reason: Mapping[Reason, Policy] = field(default_factory=lambda: DEFAULTS)
    by_type: Mapping[tuple[str, Reason], Policy] = field(default_factory=dict)
    store_retry_seconds: float = 1.0
    """How long a job waits whose run failed because the job store was unavailable."""

    @classmethod
    def preset(cls, name: str) -> Policies:
        presets = {"default": DEFAULTS, "uniform": UNIFORM}
        if name not in presets:
            raise ValueError(f"there is no preset {name!r}; known presets: {', '.join(presets)}")
        return cls(presets[name])

    def lookup(self, job_type: str, reason: Reason) -> Policy:
        return self.by_type.get((job_type, reason)) or self.by_reason[reason]

    def after_store_failure(self, job_type: str) -> Policy:
        """The policy for a run that failed because the job store was unavailable."""
        policy = self.lookup(job_type, Reason.DEPENDENCY_FAILURE)
        return policy.for_store_failure(self.store_retry_seconds)

    def with_type(self, job_type: str, reason: Reason | None = None, **changes: object) -> Policies:
        """The same with changed values for one job type, for one reason or for all."""
        reasons = [reason] if reason else list(Reason)
        by_type = dict(self.by_type)
        for each in reasons:
            policy = self.lookup(job_type, each)
            by_type[job_type, each] = replace(policy, **changes)  # type: ignore[arg-type]
        return replace(self, by_type=by_type)


@dataclass(frozen=True, slots=True)
class FailureVerdict:
    """What becomes of a failed job and of its stream."""

    action: FailureAction
    reason: Reason
    delay_seconds: float = 0.0
    strike: bool = False
    stream: OnFailure = OnFailure.BLOCK

    @property
    def blocks(self) -> bool:
        """Whether the job's followers are held."""
        return self.action is not FailureAction.DEAD and self.stream is not OnFailure.SKIP


def decide(job: Job, failure: Failure, policy: Policy, rng: random.Random) -> FailureVerdict:
    """The verdict on a failure: dead at once, dead as poison, parked, or retried."""
    if failure.postponed:
        return FailureVerdict(FailureAction.POSTPONE, failure.reason, failure.retry_after_seconds)
    if not policy.retry:
        return FailureVerdict(
            FailureAction.DEAD, failure.reason, strike=policy.strike, stream=policy.stream
        )
    if policy.strike and job.strikes + 1 >= policy.strikes_max:
        return FailureVerdict(
            FailureAction.DEAD, Reason.POISON_MESSAGE, strike=True, stream=policy.stream
        )
    if policy.stream is OnFailure.PARK:
        return FailureVerdict(
            FailureAction.PARK, failure.reason, strike=policy.strike, stream=policy.stream
        )
    delay = max(policy.delay(job.attempt, rng), failure.retry_after_seconds)
    return FailureVerdict(
        FailureAction.RETRY,
        failure.reason,
        min(delay, DELAY_MAX_SECONDS),
        policy.strike,
        policy.stream,
    )


@dataclass(frozen=True, slots=True)
class Block:
    """The record that a stream waits behind its failed ``head``, and what was released
    past it, by whom and why.

    A job behind the head may start only if it is released: by id, by type, or through a
    sequence.
    """

    stream: str
    head: int
    policy: OnFailure = OnFailure.BLOCK
    released_through: int = 0
    released_ids: frozenset[int] = frozenset()
    released_types: frozenset[str] = frozenset()
    by: str = ""
    why: str = ""

    @property
    def released(self) -> bool:
        """Whether anything was released past it."""
        return bool(self.released_through or self.released_ids or self.released_types)

    def holds(self, seq: int, job_type: str) -> bool:
        released = (
            seq <= self.released_through
            or seq in self.released_ids
            or job_type in self.released_types
        )
        return seq > self.head and not released


def partition_and_lane(stream: str) -> tuple[int, int]:
    """The (partition, lane) of a stream; the same in every process and release."""
    number = crc32(stream.encode())
    return number % PARTITIONS, number // PARTITIONS % LANES


def share_of(instance: int, alive: Iterable[int]) -> set[int]:
    """The partitions that belong to this instance while these are alive."""
    living = list(alive)
    return {
        p for p in range(PARTITIONS) if max(living, key=lambda other: _weight(p, other)) == instance
    }


def _weight(partition: int, instance: int) -> bytes:
    return blake2b(f"{partition}:{instance}".encode(), digest_size=8).digest()
