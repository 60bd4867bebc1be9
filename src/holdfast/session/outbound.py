"""What the client must be sent: progress, lanes, slow-consumer machine. (Pure.)

``deliver_at_once`` and ``deliver`` are the hot paths: thousands of connections get the
same run. The gateway tries ``deliver_at_once`` first, for a socket that takes the run
now. In its usual case ``deliver`` compares a few integers, appends the run and returns
a shared constant, in about 0.2 µs. Everything else takes the slow path: a run that is
not the next one, or a buffer above its ceilings. The ceilings are the warning
threshold, so a slow connection is always above them; a close sets one below zero, so
that nothing passes.

So four states need no test of their own in ``deliver``: not established yet (no
progress), behind (``expects`` is 0, and no sequence is), slow, and closed. A run of
another epoch than the session's has its own: a lower one is dropped, a higher one makes
the chat behind.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping

from holdfast.message import Cursor
from holdfast.session.effects import (
    Effect,
    Effects,
    Emit,
    PauseReading,
    ResumeReading,
    SessionEvent,
    Wake,
)
from holdfast.session.growing_reply import GrowingReply
from holdfast.session.lanes import Lanes
from holdfast.session.progress import ChatProgress
from holdfast.session.settings import OutboundSettings, SessionSettings
from holdfast.session.slow_consumer import Flow, SlowConsumer, SlowConsumerAction
from holdfast.wire.codec import EncodedRun, encode_frame
from holdfast.wire.frames import ChatHead, Error, Resync, ServerPayload

NOTHING: Effects = ()
WAKE: Effects = (Wake(),)
_NO_ROOM = -1


class OutboundBuffer:
    """The outbound side of one session.

    ``unobstructed``: reading is not paused and the buffer is not filling, so ``take``
    needs no ``on_written`` after it.
    """

    __slots__ = (
        "_bytes_ceiling",
        "_chats_per_frame",
        "_closed",
        "_messages_ceiling",
        "_pending_resyncs",
        "_reading",
        "_recovered",
        "_settings",
        "_slow",
        "_woken",
        "chats",
        "lanes",
        "unobstructed",
    )

    def __init__(self, settings: SessionSettings) -> None:
        self._settings: OutboundSettings = settings.backpressure.outbound
        self._chats_per_frame = settings.pages.resume_chats_per_frame
        self._closed = False
        self._pending_resyncs: dict[str, ChatProgress] | None = None
        self._reading = True
        self._recovered = False
        self._slow = SlowConsumer(self._settings)
        self._woken = False
        self.unobstructed = True
        self.lanes = Lanes()
        self.chats: dict[str, ChatProgress] = {}
        percent = self._settings.warning_threshold_percent
        self._messages_ceiling = self._settings.max_buffer_messages * percent // 100
        self._bytes_ceiling = self._settings.max_buffer_bytes * percent // 100

    def establish(self, memberships: Mapping[str, Cursor]) -> None:
        """Set the chats as read from the store; all start behind.

        Chat ids are interned, as in runs: they are shared by all connections, and found
        in a dictionary by identity.
        """
        self.chats = {
            sys.intern(chat_id): ChatProgress(head) for chat_id, head in memberships.items()
        }

    def deliver_at_once(self, run: EncodedRun) -> bool:
        """If the run is next and nothing waits, count it as sent and return True.

        The caller then writes it. Not for a socket that is paused.
        """
        progress = self.chats.get(run.chat_id)
        lanes = self.lanes
        if (
            progress is None
            or progress.expects != run.first
            or progress.epoch != run.epoch
            or lanes.runs
            or lanes.mixed
            or self._closed
        ):
            return False
        progress.expects = run.next
        return True

    def deliver(self, run: EncodedRun, now: float) -> Effects:
        """Queue the run if it is next and fits.

        A gap or a full buffer makes the chat behind, with a resync; anything else is
        dropped.
        """
        # ``run.chat_id`` and the keys are interned: the lookup compares by identity.
        # The sums below are computed once and stored as they are if the run passes; the
        # object is the run itself, shared by all connections.
        progress = self.chats.get(run.chat_id)
        lanes = self.lanes
        messages = lanes.messages + run.count
        size = lanes.bytes + run.size
        if (
            progress is None
            or progress.expects != run.first
            or progress.epoch != run.epoch
            or messages > self._messages_ceiling
            or size > self._bytes_ceiling
        ):
            return self._deliver_slow_path(progress, run, now)
        progress.expects = run.next
        lanes.runs.append(run)
        lanes.messages = messages
        lanes.bytes = size
        if self._woken:
            return NOTHING
        self._woken = True
        return WAKE  # one tuple for all: the gateway recognises it by identity

    def _deliver_slow_path(
        self, progress: ChatProgress | None, run: EncodedRun, now: float
    ) -> Effects:
        if progress is None or self._closed or run.epoch < progress.epoch:
            return NOTHING
        effects: list[Effect] = []
        if run.epoch > progress.epoch:
            progress.on_head(Cursor(run.epoch, run.last))
            self._leave_behind(run.chat_id, progress, effects)
            return effects
        if run.last <= progress.through:
            return NOTHING
        progress.raise_head(run.last)
        if not progress.live:
            return NOTHING
        if run.first > progress.expects:
            self._leave_behind(run.chat_id, progress, effects)
            return effects
        if run.first < progress.expects:
            run = run.after(progress.through)
        if self._admit_run(run, effects, now):
            progress.expects = run.last + 1
            self.lanes.runs.append(run)
            self.lanes.messages += run.count
            self.lanes.bytes += run.size
            self._wake(effects)
        else:
            self._leave_behind(run.chat_id, progress, effects)
        return effects

    def _admit_run(self, run: EncodedRun, effects: list[Effect], now: float) -> bool:
        """Move the slow-consumer machine; return whether the run may be queued.

        A run that does not fit into a buffer below the warning threshold is left to a
        sync: the run is large, the client is not slow.
        """
        if self._slow.slow:
            return False
        self.unobstructed = False
        fill = self._fill(self.lanes.messages + run.count, self.lanes.bytes + run.size)
        if fill > self._settings.critical_threshold_percent:
            if (
                self._fill(self.lanes.messages, self.lanes.bytes)
                >= self._settings.warning_threshold_percent
            ):
                self._warn(effects, now)
            return False
        if (
            fill > self._settings.warning_threshold_percent
            and self._slow.rose_above_warning() is SlowConsumerAction.LOG
        ):
            effects.append(Emit(SessionEvent.BUFFER_ABOVE_WARNING))
        return True

    def _warn(self, effects: list[Effect], now: float) -> None:
        self._slow.rose_above_critical(self._fill(self.lanes.messages, self.lanes.bytes), now)
        warning = Error(
            code="SLOW_CONSUMER",
            message=(
                "the connection does not take what is sent to it; it gets heads instead of messages"
                " until it does"
            ),
            retryable=True,
            grace_period_seconds=self._settings.grace_period_seconds,
        )
        self.enqueue_control(warning, None, effects)
        effects.append(Emit(SessionEvent.SLOW_CONSUMER_WARNED))

    def _leave_behind(self, chat_id: str, progress: ChatProgress, effects: list[Effect]) -> None:
        progress.fall_behind()
        effects.append(Emit(SessionEvent.FELL_BEHIND))
        self.request_resync(chat_id, progress, effects)

    def request_resync(self, chat_id: str, progress: ChatProgress, effects: list[Effect]) -> None:
        """Queue a resync of this chat behind what is queued now."""
        if self._pending_resyncs is None:
            self._pending_resyncs = {}
        self._pending_resyncs[chat_id] = progress
        self.lanes.want_resync()
        self._wake(effects)

    def on_membership(
        self, chat_id: str, head: Cursor | None, effects: list[Effect], announced: bool
    ) -> None:
        """The user is in the chat, whose head was read with that, or left it (None).

        A joined chat starts behind, with a resync. A chat that was left is dropped,
        with a resync unless the client learns of it otherwise (``announced``).
        """
        if head is None:
            progress = self.chats.pop(chat_id, None)
            self.lanes.drop_replies(chat_id)
            if self._pending_resyncs:
                self._pending_resyncs.pop(chat_id, None)
            if progress is not None and not announced:
                progress.fall_behind()
                self.request_resync(chat_id, progress, effects)
        elif (progress := self.chats.get(chat_id)) is not None:
            if progress.on_membership_read(head):
                self._leave_behind(chat_id, progress, effects)
        else:
            progress = self.chats[sys.intern(chat_id)] = ChatProgress(head)
            self.request_resync(chat_id, progress, effects)

    def enqueue_ephemeral(self, key: Hashable, frame: bytes, effects: list[Effect]) -> None:
        lanes = self.lanes
        fill = self._fill(lanes.messages, lanes.bytes)
        if fill > self._settings.ephemeral_threshold_percent:
            return
        lanes.enqueue_ephemeral(key, frame, self._settings.max_ephemeral_frames)
        self._wake(effects)

    def show_reply(self, reply: GrowingReply, effects: list[Effect]) -> None:
        """The reply has grown or ended. Above the threshold only its end is worth a
        frame; later frames carry what this one would have.
        """
        if reply.chat_id not in self.chats or self._closed:
            return
        lanes = self.lanes
        lanes.add_reply(reply, self._settings.max_ephemeral_frames)
        fill = self._fill(lanes.messages, lanes.bytes)
        if fill <= self._settings.ephemeral_threshold_percent or reply.state != "running":
            lanes.mixed = True
            self._wake(effects)

    def enqueue_control(
        self, payload: ServerPayload, request_id: str | None, effects: list[Effect]
    ) -> None:
        """Queue a control frame. A full lane pauses reading, it drops nothing."""
        self.lanes.enqueue_control(encode_frame(payload, request_id))
        self._wake(effects)
        if self._reading and len(self.lanes.control) >= self._settings.max_control_frames:
            self._reading = self.unobstructed = False
            effects.append(PauseReading())

    def control_overflows(self, requests_max: int) -> bool:
        """Whether the client asks on while its responses are not written."""
        return len(self.lanes.control) > 2 * self._settings.max_control_frames + requests_max

    def enqueue_page(self, page: bytes, effects: list[Effect]) -> None:
        """Queue a page; the lane must be free."""
        self.lanes.enqueue_page(page)
        self._wake(effects)

    def _wake(self, effects: list[Effect]) -> None:
        if not self._woken:
            self._woken = True
            effects.append(WAKE[0])

    def take_single(self) -> bytes | None:
        """The one run that waits, if nothing else does; the usual case, made cheap."""
        lanes = self.lanes
        runs = lanes.runs
        if len(runs) != 1 or lanes.mixed or not self.unobstructed:
            return None
        self._woken = False
        lanes.messages = lanes.bytes = 0
        return runs.pop().data

    def take(self, bytes_max: int) -> list[bytes]:
        """Whole frames to write, of about ``bytes_max``; everything, once closed."""
        self._woken = False
        lanes = self.lanes
        if lanes.mixed or lanes.bytes > bytes_max:
            frames = lanes.take(sys.maxsize if self._closed else bytes_max, self._resync)
        else:
            frames = lanes.take_deliveries()
        if not self.unobstructed:
            fill = self._fill(self.lanes.messages, self.lanes.bytes)
            self._recovered = (
                self._slow.drained(fill) is SlowConsumerAction.RECOVER or self._recovered
            )
        return frames

    def on_written(self, effects: list[Effect], now: float) -> None:
        """The frames of ``take`` are written.

        Resume reading if the control lane has room; extend a slow client's grace.
        """
        if self._may_read_on:
            self._reading = True
            effects.append(ResumeReading())
        if self._slow.slow:
            self._slow.lowered(self._fill(self.lanes.messages, self.lanes.bytes), now)
        if self._recovered:
            self._recovered = False
            effects.append(Emit(SessionEvent.SLOW_CONSUMER_RECOVERED))
        self.unobstructed = self._reading and self._slow.flow is Flow.FLOWING

    @property
    def _may_read_on(self) -> bool:
        return not self._reading and len(self.lanes.control) * 2 < self._settings.max_control_frames

    @property
    def has_lost_effects(self) -> bool:
        """Whether ``catch_up`` has something to do."""
        return self._may_read_on or (bool(self.lanes.control) and not self._woken)

    def catch_up(self, effects: list[Effect], now: float) -> None:
        """Repeat effects that the caller dropped.

        That is after a ``take`` not followed by ``on_written``, or after
        ``on_effects_dropped``.
        """
        self.on_written(effects, now)
        if self.lanes.control:
            self._wake(effects)

    def on_effects_dropped(self) -> None:
        """The last effects were dropped: ``catch_up`` must wake again."""
        self._woken = False

    def _resync(self) -> list[bytes]:
        """Resync frames for the chats that need one and are still behind."""
        pending, self._pending_resyncs = self._pending_resyncs or {}, None
        heads = [
            ChatHead(chat_id, progress.head)
            for chat_id, progress in pending.items()
            if not progress.live
        ]
        per_frame = self._chats_per_frame
        return [
            encode_frame(Resync(heads[i : i + per_frame])) for i in range(0, len(heads), per_frame)
        ]

    @property
    def grace_ends(self) -> float | None:
        return self._slow.deadline if self._slow.slow else None

    def end_grace_if_due(self, now: float) -> bool:
        """End a slow client's grace; True if it was due, and the session must close."""
        if not self._slow.slow:
            return False
        return (
            self._slow.passed(self._fill(self.lanes.messages, self.lanes.bytes), now)
            is SlowConsumerAction.CLOSE
        )

    def close(self) -> dict[str, int]:
        """Stop queueing; return the last acknowledged sequence of each incomplete chat.

        At most ``resume_chats_per_frame`` of them.
        """
        lacking = {
            chat_id: progress.acked
            for chat_id, progress in self.chats.items()
            if progress.through and progress.acked < progress.head
        }
        self._closed = True
        self._pending_resyncs = None
        self._messages_ceiling = _NO_ROOM
        self.lanes.drop_all_but_control()
        return dict(list(lacking.items())[: self._chats_per_frame])

    def _fill(self, messages: int, size: int) -> float:
        """How full the buffer is in percent, of messages or of bytes."""
        settings = self._settings
        return max(messages / settings.max_buffer_messages, size / settings.max_buffer_bytes) * 100
