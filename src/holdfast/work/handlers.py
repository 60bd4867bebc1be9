"""Handlers: their registration, and the payload and context that each one gets.

    handlers = Handlers()

    @handlers.handle(OrderCreated, stream=lambda order: order.order_id)
    async def ship(ctx: Context, order: OrderCreated) -> None:
        await ctx.step(Stage.USER, lambda: book_carrier(order))
        async with ctx.transaction() as connection:
            await connection.execute(SHIPPED, order.order_id)

A handler runs at least once: it may run again after a crash. Its effects inside
``ctx.transaction`` happen exactly once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from holdfast.errors import BadSetting, HoldfastError
from holdfast.work.contract import Child, RunEnded, WorkerSession
from holdfast.work.failures import PayloadUnreadable, Reasons
from holdfast.work.job import (
    InvalidArgument,
    Job,
    JobDraft,
    Reason,
    check_draft,
    check_seq,
    check_stage,
    shown,
)

_PayloadT = TypeVar("_PayloadT")
_Run = Callable[["Context", Any], Awaitable[None]]
Typed = Callable[["Context", _PayloadT], Awaitable[None]]
_encode = msgspec.json.Encoder().encode
CHILDREN_MAX = 1000
CHILDREN_BYTES_MAX = 16 << 20
"""The most that one run may enqueue; beyond it ``ctx.enqueue`` raises InvalidArgument.
"""
RELEASED_MAX = 10_000


class Context(msgspec.Struct, eq=False):
    """One run of one job. When the run is ``over``, every verb raises RunEnded.

    ``job`` and the verbs are public; the other fields belong to the worker.
    """

    job: Job
    session: WorkerSession
    deadline: float = float("inf")
    stages: int = 0
    children_bytes: int = 0
    entered: bool = False
    finished: bool = False
    overdue: bool = False
    dismissed: bool = False
    over: bool = False
    children: list[Child] = []
    released: list[int] = []
    store_error: HoldfastError | None = None
    """The last error of the job store in this run, for example LeaseLost or JobGone."""

    @property
    def fence(self) -> int:
        """A fencing token: it rises with every new owner of the job's stream.

        Pass it to a resource that can refuse an older one.
        """
        self._require_open()
        return self.session.fence(self.job)

    @property
    def key(self) -> int:
        """An idempotency key: the same for every run of the job and every replay."""
        return self.job.key

    def completed(self, stage: int) -> bool:
        """Whether an earlier run completed this stage."""
        return bool((self.job.stages | self.stages) & check_stage(stage))

    async def step(self, stage: int, action: Callable[[], Awaitable[Any]]) -> None:
        """Run ``action`` unless an earlier run completed it; durable on return."""
        self._require_open()
        if self.finished:
            raise BadSetting(
                "the job is finished: its transaction must be the last thing a handler does"
            )
        if self.completed(stage):
            return
        if not callable(action):
            raise InvalidArgument(
                f"a step's action must be an async function, not {shown(action)}", field="action"
            )
        await action()
        self._require_open()
        bit = check_stage(stage)
        try:
            await self.session.step(self.job, bit)
        except HoldfastError as error:
            self.store_error = error
            raise
        self.stages |= bit

    def enqueue(self, draft: JobDraft) -> None:
        """Enqueue another job atomically with the success of this one."""
        self._require_open()
        check_draft(draft)
        if self.finished:
            raise InvalidArgument(
                "the job is finished: enqueue inside its transaction with holdfast.work.outbox"
            )
        if draft.source:
            raise InvalidArgument(
                "what comes from outside is stored by holdfast.work.outbox, not with ctx.enqueue"
            )
        size = self.children_bytes + len(draft.payload)
        if len(self.children) >= CHILDREN_MAX or size > CHILDREN_BYTES_MAX:
            message = (
                f"a run may enqueue at most {CHILDREN_MAX} jobs and {CHILDREN_BYTES_MAX} bytes of"
                " payload"
            )
            raise InvalidArgument(f"{message} with ctx.enqueue; enqueue more in ctx.transaction()")
        self.children_bytes = size
        self.children.append(Child(self.job.seq, draft))

    def release(self, *seqs: int) -> None:
        """Let these later jobs of the stream run even if this one fails."""
        self._require_open()
        if len(self.released) + len(seqs) > RELEASED_MAX:
            raise InvalidArgument(f"a run may release at most {RELEASED_MAX} jobs", field="seqs")
        self.released.extend([check_seq(seq) for seq in seqs])

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        """The store's own transaction, for effects that happen exactly once.

        Leaving it completes the job, or rolls back on an error. It must be the last
        thing a handler does. After a rollback it may be entered again.
        """
        self._require_open()
        if self.finished or self.entered:
            raise BadSetting(
                "a job ends with its transaction: it cannot be entered within itself or after it"
            )
        if self.children:
            raise InvalidArgument(
                "enqueue inside the transaction with holdfast.work.outbox, not with ctx.enqueue"
            )
        self.entered = True
        own: BaseException | None = None
        try:
            async with self.session.transaction(self.job) as connection:
                try:
                    yield connection
                    self._require_open()
                except BaseException as error:
                    own = error
                    raise
            self.finished = True
        except HoldfastError as error:
            if error is own:
                raise
            self.store_error = error
            # RunEnded if the store revoked the transaction of a run that is over
            self._require_open()
            raise
        finally:
            self.entered = False

    def _require_open(self) -> None:
        if self.over:
            raise RunEnded


class Transport(Protocol):
    """Sends the payload of an outbox job to its destination."""

    async def send(self, ctx: Context, address: str) -> None:
        """Return when the receiver has ``ctx.job.payload``.

        A crash may repeat the call with the same ``ctx.key``. ``address`` is the job's
        destination without the scheme.
        """
        ...


@dataclass(frozen=True, slots=True)
class HandlerSpec:
    """How one job type is handled."""

    type: str
    decode: Callable[[bytes], Any]
    run: _Run
    stream: Callable[[Any], str] | None
    deadline_seconds: float
    per_destination_max: int = 0
    reasons: Reasons = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.deadline_seconds > 0:
            raise BadSetting("deadline_seconds must be greater than 0")
        if self.per_destination_max < 0:
            raise BadSetting("per_destination_max must be at least 0; 0 is no cap")
        for kind, reason in self.reasons.items():
            if not (
                isinstance(kind, type)
                and issubclass(kind, BaseException)
                and isinstance(reason, Reason)
            ):
                raise BadSetting(
                    f"reasons maps classes of exceptions to a Reason, not {shown(kind)} to"
                    f" {shown(reason)}"
                )

    def decoded(self, data: bytes) -> Any:
        """The decoded payload. Raises PayloadUnreadable."""
        try:
            return self.decode(data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise PayloadUnreadable(f"{type(error).__name__}: {error}") from error


class Handlers:
    """The handlers of job types, and the transports for all other jobs."""

    def __init__(self) -> None:
        self._by_type: dict[str, HandlerSpec] = {}
        self._by_class: dict[type[Any], list[HandlerSpec]] = {}
        self._by_scheme: dict[str, HandlerSpec] = {}

    def find(self, job: Job) -> HandlerSpec | None:
        """The handler of the job's type, or its destination's transport."""
        return self._by_type.get(job.type) or self._by_scheme.get(job.destination.partition(":")[0])

    def caps(self) -> dict[str, int]:
        """The job types with a cap per destination."""
        return {
            each.type: each.per_destination_max
            for each in self._by_type.values()
            if each.per_destination_max
        }

    def carry(
        self,
        scheme: str,
        transport: Transport,
        *,
        deadline_seconds: float = 300.0,
        reasons: Reasons | None = None,
    ) -> None:
        """Register a transport for jobs with a destination ``scheme:address``.

        It takes the jobs that no handler of their type takes.
        """
        if not scheme or ":" in scheme or scheme in self._by_scheme:
            raise BadSetting(f"{scheme!r} is no scheme, or has a transport already")

        async def send(ctx: Context, _payload: bytes) -> None:
            await transport.send(ctx, ctx.job.destination.partition(":")[2])

        self._by_scheme[scheme] = HandlerSpec(
            scheme, bytes, send, None, deadline_seconds, reasons=dict(reasons or {})
        )

    def handle(
        self,
        payload: type[_PayloadT],
        *,
        type: str | None = None,
        stream: Callable[[_PayloadT], str] | None = None,
        deadline_seconds: float = 300.0,
        per_destination_max: int = 0,
        reasons: Reasons | None = None,
    ) -> Callable[[Typed[_PayloadT]], Typed[_PayloadT]]:
        """Register a handler for a payload type (msgspec Struct, dataclass, dict, …).

        ``stream`` returns the stream's key; jobs of a stream run in order. A run beyond
        the deadline is cancelled. ``per_destination_max`` caps the jobs of one
        destination that a worker runs at once, so that a slow destination leaves
        runners to the others; 0 is no cap, and jobs without a stream have none.
        ``reasons`` maps this handler's exceptions to reasons and precedes the table in
        ``failures``.
        """
        name = type or payload.__name__
        if name in self._by_type:
            raise BadSetting(f"there is a handler for {name!r} already")
        decode = msgspec.json.Decoder(payload).decode

        def register(run: Typed[_PayloadT]) -> Typed[_PayloadT]:
            table = dict(reasons or {})
            spec = HandlerSpec(
                name, decode, run, stream, deadline_seconds, per_destination_max, table
            )
            self._by_type[name] = spec
            self._by_class.setdefault(payload, []).append(spec)
            return run

        return register

    def draft(
        self, payload: Any, *, delay_seconds: float = 0.0, source: str = "", source_id: str = ""
    ) -> JobDraft:
        """The job for a payload whose class has exactly one handler."""
        known = self._by_class.get(payload.__class__, [])
        if len(known) != 1:
            message = (
                f"handled as {', '.join(each.type for each in known)}: make its JobDraft"
                if known
                else "not handled"
            )
            raise BadSetting(f"a payload of {payload.__class__.__name__} is {message}")
        (spec,) = known
        stream = spec.stream(payload) if spec.stream is not None else None
        data = _encode(payload)
        return JobDraft(
            spec.type,
            data,
            stream,
            delay_seconds=delay_seconds,
            source=source,
            source_id=source_id,
        )
