"""Runs the job of a reply: asks the model, shows the text, sends the message.

The message is stored exactly once: its ``client_message_id`` is the reply's id, and so
is the job's. A job that runs again after a crash begins a new epoch of the reply's log;
if the log has the end, its text is sent.

A reply that nobody wants any more ends quietly: its trigger was redacted, or its sender
or the assistant has left. That is checked before it starts, while it runs and before
its message is sent.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Literal, Protocol

from holdfast import telemetry
from holdfast.clock import Clock
from holdfast.errors import (
    Deferred,
    HoldfastError,
    OutcomeUnknown,
    RateLimited,
    Refused,
)
from holdfast.history.history import ChatHistory
from holdfast.ingest.contract import Sends
from holdfast.session.growing_reply import GrowingReply
from holdfast.streaming.admission import ReplyRequest
from holdfast.streaming.assistants.content import ReplyContent, text_of
from holdfast.streaming.assistants.jobs import (
    DEADLINE_SECONDS,
    JOB_TYPE,
    NO_STRIKE,
    TRIES_MAX,
    TRIES_SECONDS,
    AssistantNotice,
    failure_of,
    per_destination_max,
)
from holdfast.streaming.assistants.prompt import request_fields
from holdfast.streaming.assistants.scene import Scene, Unwanted, check_wanted, is_sent, read_scene
from holdfast.streaming.assistants.sending import send_message
from holdfast.streaming.assistants.triggers import Assistants
from holdfast.streaming.attached import AttachedReply
from holdfast.streaming.reader import Entries, Lost, Queued
from holdfast.streaming.reply import Owner, Payer, ReplyError, ReplyFailed
from holdfast.streaming.reply_log.contract import LogEnded
from holdfast.streaming.settings import AssistantSettings
from holdfast.work.failures import JobFailed, JobPostponed
from holdfast.work.handlers import Context, Handlers
from holdfast.work.job import Reason

GROWING_MEMBERS_MAX = 100
"""Larger chats get only the message."""
CHECK_SECONDS = 5.0
"""How often a running reply is checked to be still wanted."""
FAILED_MAX = 10_000


class ReplyMaker(Protocol):
    """``streaming.parts`` as assistants use it."""

    async def start(self, request: ReplyRequest) -> AttachedReply: ...

    async def find(self, owner: Owner, reply_id: str) -> AttachedReply: ...

    async def cancel(self, owner: Owner, reply_id: str) -> AttachedReply: ...

    async def delete(self, owner: Owner, reply_id: str) -> None: ...


class ReplyAudience(Protocol):
    """Who sees replies grow: the gateway's sessions."""

    def begin(self, chat_id: str, reply_id: str, sender_id: str, epoch: int) -> GrowingReply: ...

    def on_grown(self, reply: GrowingReply) -> None: ...

    def end(self, chat_id: str, reply_id: str, state: Literal["done", "failed"]) -> None: ...


@dataclass(frozen=True, slots=True)
class AssistantDeps:
    """What assistants need of the node."""

    replies: ReplyMaker
    audience: ReplyAudience
    sends: Sends
    history: ChatHistory
    clock: Clock


class AssistantReplies:
    """The handler of the jobs."""

    def __init__(self, assistants: Assistants, deps: AssistantDeps) -> None:
        self._assistants = assistants
        self._replies, self._audience = deps.replies, deps.audience
        self._sends, self._history, self._clock = deps.sends, deps.history, deps.clock
        self._failed_at: OrderedDict[str, float] = OrderedDict()
        """When the first try failed of replies that are tried again."""

    def register(self, handlers: Handlers, concurrency: int) -> None:
        @handlers.handle(
            AssistantNotice,
            type=JOB_TYPE,
            deadline_seconds=DEADLINE_SECONDS,
            per_destination_max=per_destination_max(concurrency),
        )
        async def reply(ctx: Context, notice: AssistantNotice) -> None:
            await self.reply(ctx, notice)

    async def reply(self, ctx: Context, notice: AssistantNotice) -> None:
        """Return when the message is stored, or the reply is not wanted any more."""
        assistant = self._assistants.of(notice.tenant).get(notice.assistant)
        if assistant is None:
            return  # it was taken out of the settings
        try:
            await self._reply(ctx, notice, assistant)
        except Unwanted as unwanted:
            telemetry.log.info(
                "streaming.reply_unwanted", reply_id=notice.reply_id, reason=str(unwanted)
            )
            self._end(notice, "failed", "unwanted")
        except Exception as error:
            raise self._judged(ctx, notice, _job_failure(error)) from error
        else:
            self._end(notice, "done", "sent")
        self._failed_at.pop(notice.reply_id, None)

    async def _reply(
        self, ctx: Context, notice: AssistantNotice, assistant: AssistantSettings
    ) -> None:
        scene = await read_scene(self._history, notice)
        ran_before = ctx.job.attempt > 1 or ctx.job.suspect
        if ran_before and await is_sent(self._history, notice):
            return
        content = await self._written(notice, assistant, scene)
        if not content.strip():
            raise JobFailed(Reason.VALIDATION_FAILURE, "the model gave no text")
        await check_wanted(self._history, notice)
        await send_message(self._sends, self._clock, notice, content)

    # --- what failed

    def _judged(self, ctx: Context, notice: AssistantNotice, failure: JobFailed) -> JobFailed:
        """The failure to report; the chat's members learn of a final one."""
        if isinstance(failure, JobPostponed) or failure.reason in NO_STRIKE:
            return failure
        now = self._clock.monotonic()
        is_late = now - self._failed_at.setdefault(notice.reply_id, now) > TRIES_SECONDS
        if len(self._failed_at) > FAILED_MAX:
            self._failed_at.popitem(last=False)
        is_refused = failure.reason is Reason.VALIDATION_FAILURE
        if is_late or is_refused or ctx.job.strikes + 1 >= TRIES_MAX:
            self._failed_at.pop(notice.reply_id, None)
            self._end(notice, "failed", "failed")
        if is_late and not is_refused:
            return JobFailed(Reason.POISON_MESSAGE, str(failure))
        return failure

    def _end(self, notice: AssistantNotice, state: Literal["done", "failed"], outcome: str) -> None:
        self._audience.end(notice.chat_id, notice.reply_id, state)
        telemetry.assistant_job_ended(outcome)

    # --- the reply

    async def _written(
        self, notice: AssistantNotice, assistant: AssistantSettings, scene: Scene
    ) -> str:
        """The whole text of the reply, shown while it grows."""
        owner = Owner(notice.tenant, "user", notice.assistant)
        request = ReplyRequest(
            notice.reply_id,
            owner,
            Payer(notice.tenant, notice.sender_id),
            "assistant",
            "assistant",
            assistant.model,
            request_fields(assistant, scene.messages, scene.kind),
            replicated=True,
        )
        try:
            reply = await self._replies.start(request)
        except LogEnded:
            reply = await self._replies.find(owner, notice.reply_id)
        is_shown = scene.members <= GROWING_MEMBERS_MAX
        growing = self._begin(notice, reply.epoch) if is_shown else None
        content = ReplyContent()
        try:
            async with aclosing(self._entries(notice, reply)) as batches:
                async for entries in batches:
                    self._take(entries, content, growing)
        except JobFailed:
            raise
        except BaseException:
            with suppress(HoldfastError):
                await self._replies.cancel(owner, notice.reply_id)
            raise
        return content.message()

    def _begin(self, notice: AssistantNotice, epoch: int) -> GrowingReply:
        return self._audience.begin(notice.chat_id, notice.reply_id, notice.assistant, epoch)

    def _take(self, entries: Entries, content: ReplyContent, growing: GrowingReply | None) -> None:
        for entry_id, entry in entries:
            text = text_of(entry)
            if "\0" in text:  # which not every store can keep
                telemetry.reply_characters_replaced(text.count("\0"))
                text = text.replace("\0", "\ufffd")
            content.add(text)
            if growing is not None:
                growing.append(entry_id.n, text)
        if growing is not None:
            self._audience.on_grown(growing)

    async def _entries(
        self, notice: AssistantNotice, reply: AttachedReply
    ) -> AsyncGenerator[Entries, None]:
        """The reply's entries as they come, to its end; raises how else it ends.

        Now and then it checks whether the reply is still wanted.
        """
        loop, cursor = asyncio.get_running_loop(), reply.entries()
        check_at = loop.time() + CHECK_SECONDS
        while True:
            if loop.time() >= check_at:
                await check_wanted(self._history, notice)
                check_at = loop.time() + CHECK_SECONDS
            try:
                async with asyncio.timeout_at(check_at):
                    event = await anext(cursor)
            except StopAsyncIteration:
                return
            except TimeoutError:
                check_at = loop.time()
                continue
            if isinstance(event, Lost):
                raise failure_of(event.error)
            if not isinstance(event, Queued):
                yield event
                if isinstance(end := event[-1][1], ReplyError):
                    if end.code == "gap":  # the log of an earlier run was full
                        await self._replies.delete(reply.begin.owner, reply.reply_id)
                    raise _ended_by(end)


def _ended_by(error: ReplyError) -> Exception:
    """An operator's cancel ends a reply quietly, anything else fails its job."""
    return Unwanted("cancelled") if error.code == "cancelled" else failure_of(error)


def _job_failure(error: Exception) -> JobFailed:
    """A failure as the job store has it; an outage of ours is retried, no strike."""
    match error:
        case JobFailed():
            return error
        case ReplyFailed():
            return failure_of(error.error)
        case RateLimited():
            reason = Reason.THROTTLED
        case Refused():
            reason = Reason.VALIDATION_FAILURE
        case Deferred() | OutcomeUnknown():
            reason = Reason.DEPENDENCY_FAILURE
        case _:
            reason = Reason.HANDLER_EXCEPTION
    wait = error.retry_after_seconds if isinstance(error, HoldfastError) else None
    return JobFailed(reason, f"{type(error).__name__}: {error}", retry_after_seconds=wait or 0.0)
