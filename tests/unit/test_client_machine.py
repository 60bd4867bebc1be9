"""The client's machine, frame by frame: no socket, no waiting."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from msgspec.structs import replace as with_proof
from session_driver import Talk, run
from session_driver import page as talk_page

from holdfast.client import (
    ChatGone,
    ChatJoined,
    ChatReset,
    ClientEvent,
    ClientSettings,
    ConnectionChanged,
    SendRefused,
    Sent,
    Warned,
)
from holdfast.client.chats import PASSED_OVER_SECONDS
from holdfast.client.events import (
    Announced,
    Drop,
    Keep,
    MachineAction,
    Online,
    RenewToken,
    Settled,
    Synced,
    Write,
)
from holdfast.client.inbox import Inbox
from holdfast.client.machine import Machine
from holdfast.client.outbox import Outbox, OutboxEntry
from holdfast.errors import InternalError, NotAMember
from holdfast.message import Message, Page
from holdfast.session.effects import Delivered, Emit
from holdfast.wire.codec import ServerFrame
from holdfast.wire.frames import (
    Ack,
    AnyClientFrame,
    Authenticate,
    ChatHead,
    ConnectionClosing,
    ConnectionEstablished,
    CursorClaim,
    Error,
    Heartbeat,
    HeartbeatAck,
    MessageAck,
    Read,
    Resume,
    Resumed,
    ResumedChat,
    Resync,
    Sendable,
    SendMessage,
    SyncRequest,
    Typing,
)

SETTINGS = ClientSettings(buffer_messages_max=10, page_messages=4, resume_chats_per_frame=3)


def message(sequence: int, chat_id: str = "c") -> Message:
    return Message(
        f"m{sequence}",
        chat_id,
        sequence,
        "text",
        "bob",
        f"k{sequence}",
        f"t{sequence}",
        "text/plain",
        "",
    )


def messages(first: int, last: int, chat_id: str = "c") -> list[Message]:
    return [message(sequence, chat_id) for sequence in range(first, last + 1)]


def page(
    first: int, last: int, head: int, epoch: int = 1, reset: bool = False, chat_id: str = "c"
) -> Page:
    return Page(chat_id, epoch, messages(first, last, chat_id), last, last < head, head, reset)


class Bench:
    """A machine with its time and everything it has sent."""

    def __init__(
        self,
        cursors: dict[str, CursorClaim] | None = None,
        entries: Sequence[OutboxEntry] = (),
        settings: ClientSettings = SETTINGS,
        follow: set[str] | None = None,
        keeps: bool = True,
        listens: bool = True,
    ) -> None:
        rng = random.Random(1)
        outbox = Outbox(entries, settings.sends_in_flight_max, settings.backoff, rng)
        self.machine = Machine(settings, outbox, cursors or {}, rng, follow)
        self.now = 100.0
        if listens:
            self.machine.listen(self.now)
        self.keeps = keeps
        self.actions: list[MachineAction] = []
        self.kept: dict[str, CursorClaim | None] = {}

    def do(self, actions: list[MachineAction]) -> list[MachineAction]:
        self.actions += actions
        kept = [action for action in actions if isinstance(action, Keep)]
        self.kept.update((keep.chat_id, keep.cursor) for keep in kept)
        if self.keeps and kept:
            self.do(self.machine.on_kept(kept, self.now))
        return actions

    def open(
        self, expires_at: float | None = None, limits: Mapping[str, float] | None = None
    ) -> list[AnyClientFrame]:
        self.do(self.machine.on_opened(expires_at, self.now))
        return self.get(ConnectionEstablished("conn", "alice", "dev", "", 30_000, 1, limits or {}))

    def acked(self) -> list[int]:
        """The sequences of all acks so far."""
        return [frame.payload.sequence for frame in self.frames(Ack) if isinstance(frame, Ack)]

    def get(self, payload: Sendable, request_id: str | None = None) -> list[AnyClientFrame]:
        return written(self.do(self.machine.receive(ServerFrame(payload, request_id), self.now)))

    def resume(
        self, *chats: ResumedChat, joined: Sequence[str] = (), gone: Sequence[str] = ()
    ) -> list[AnyClientFrame]:
        frames = self.open()
        return self.get(Resumed(chats, joined, gone), frames[-1].request_id)

    def trickle(self, seconds: float, every: float = 1.0) -> list[MachineAction]:
        """A frame comes in, so slowly that it is not whole at the end."""
        actions: list[MachineAction] = []
        for _ in range(round(seconds / every)):
            actions += self.pass_time(every)
            actions += self.do(self.machine.on_partial_frame(self.now))
        return actions

    def pass_time(self, seconds: float) -> list[MachineAction]:
        self.now += seconds
        return self.do(self.machine.tick(self.now))

    def send(self, number: int, chat_id: str = "c") -> list[AnyClientFrame]:
        return written(self.do(self.machine.send(entry(number, chat_id), self.now)))

    def take(self) -> ClientEvent | None:
        taken = self.machine.inbox.take()
        if taken is None:
            return None
        self.do(self.machine.on_consumed(*taken, self.now))
        return taken[0]

    def take_all(self) -> list[ClientEvent]:
        return list(iter(self.take, None))

    def drop(self) -> None:
        self.machine.on_disconnected()

    def frames(self, kind: type[AnyClientFrame]) -> list[AnyClientFrame]:
        return [frame for frame in written(self.actions) if isinstance(frame, kind)]


def written(actions: list[MachineAction]) -> list[AnyClientFrame]:
    return [action.frame for action in actions if isinstance(action, Write)]


def entry(number: int, chat_id: str = "c") -> OutboxEntry:
    return OutboxEntry(f"k{number}", chat_id, f"text {number}", "text/plain")


def ack(number: int, chat_id: str = "c") -> MessageAck:
    return MessageAck(f"k{number}", f"m{number}", chat_id, number, "", False)


def at(sequence: int, epoch: int = 1) -> dict[str, CursorClaim]:
    return {"c": CursorClaim(epoch, sequence)}


def sequences(events: Sequence[ClientEvent]) -> list[int]:
    return [event.sequence for event in events if isinstance(event, Message)]


# Placing messages


def test_messages_in_order_reach_the_application_once() -> None:
    bench = Bench(at(0))
    bench.resume()
    for sequence in (1, 2, 2, 1, 3):
        bench.get(message(sequence))
    assert sequences(bench.take_all()) == [1, 2, 3]


def test_a_gap_is_pulled_and_nothing_is_shown_out_of_order() -> None:
    bench = Bench(at(1))
    bench.resume()
    [sync] = bench.get(message(4))
    assert isinstance(sync, SyncRequest)
    assert (sync.payload.epoch, sync.payload.after_sequence) == (1, 1)
    assert bench.take() is None
    bench.get(page(2, 4, 4), sync.request_id)
    assert sequences(bench.take_all()) == [2, 3, 4]


@pytest.mark.covers("001 gap safety: clients tolerate gaps")
def test_a_page_is_authoritative_where_it_has_holes() -> None:
    bench = Bench(at(1))
    bench.resume()
    [sync] = bench.get(Resync([ChatHead("c", 5)]))
    bench.get(Page("c", 1, [message(2), message(4)], 5, False, 5), sync.request_id)
    assert sequences(bench.take_all()) == [2, 4]
    assert bench.kept["c"] == CursorClaim(1, 5)
    assert bench.get(message(6)) == []
    assert sequences(bench.take_all()) == [6]


def test_one_page_is_in_flight_and_a_chat_is_pulled_to_its_end() -> None:
    bench = Bench({"c": CursorClaim(1, 0), "d": CursorClaim(1, 0)})
    bench.resume()
    frames = bench.get(Resync([ChatHead("c", 6), ChatHead("d", 1)]))
    assert [frame.payload.chat_id for frame in frames if isinstance(frame, SyncRequest)] == ["c"]
    [second] = bench.get(page(1, 4, 6), frames[0].request_id)
    assert isinstance(second, SyncRequest) and second.payload.chat_id == "d"
    [third] = bench.get(page(1, 1, 1, chat_id="d"), second.request_id)
    assert isinstance(third, SyncRequest) and third.payload.after_sequence == 4


def test_a_page_nobody_asked_for_is_ignored() -> None:
    bench = Bench(at(0))
    bench.resume()
    bench.get(page(1, 3, 3), "stranger")
    assert bench.take() is None


def test_heads_above_the_cursor_are_pulled_and_the_heartbeat_is_answered() -> None:
    bench = Bench(at(3))
    bench.resume()
    assert [type(frame) for frame in bench.get(Heartbeat({"c": (1, 3)}))] == [HeartbeatAck]
    assert [type(frame) for frame in bench.get(Heartbeat({"c": (1, 4)}))] == [
        HeartbeatAck,
        SyncRequest,
    ]


def test_heads_of_another_epoch_are_pulled_even_below_the_cursor() -> None:
    bench = Bench(at(3))
    bench.resume()
    assert [type(frame) for frame in bench.get(Heartbeat({"c": (2, 1)}))] == [
        HeartbeatAck,
        SyncRequest,
    ]


def test_head_that_arrives_during_a_pull_is_pulled_after_it() -> None:
    bench = Bench(at(0))
    bench.resume()
    [sync] = bench.get(message(3))
    bench.get(message(5))
    [again] = bench.get(page(1, 4, 4), sync.request_id)
    assert isinstance(again, SyncRequest) and again.payload.after_sequence == 4


def test_reset_is_reported_and_the_chat_starts_at_zero() -> None:
    bench = Bench(at(3))
    bench.resume()
    [sync] = bench.get(Resync([ChatHead("c", 2)]))
    [again] = bench.get(page(1, 2, 2, epoch=2, reset=True), sync.request_id)
    assert isinstance(again, SyncRequest)
    assert (again.payload.epoch, again.payload.after_sequence) == (2, 0)
    assert bench.kept == {}, "until the application knows, the old cursor stays"
    bench.get(page(1, 2, 2, epoch=2), again.request_id)
    assert bench.take() == ChatReset("c", 2)
    assert bench.kept["c"] == CursorClaim(2, 0)
    assert sequences(bench.take_all()) == [1, 2]
    assert bench.kept["c"] == CursorClaim(2, 2)


def test_reset_of_this_device_alone_keeps_the_epoch_and_starts_at_zero() -> None:
    bench = Bench(at(5))
    bench.resume()
    [sync] = bench.get(Resync([ChatHead("c", 3)]))
    [again] = bench.get(page(1, 3, 3, reset=True), sync.request_id)
    assert isinstance(again, SyncRequest) and (
        again.payload.epoch,
        again.payload.after_sequence,
    ) == (1, 0)
    bench.get(page(1, 3, 3), again.request_id)
    assert bench.take() == ChatReset("c", 1)
    assert sequences(bench.take_all()) == [1, 2, 3]
    assert bench.kept["c"] == CursorClaim(1, 3)


def test_cursor_is_kept_and_shown_with_the_proof_that_came_with_it() -> None:
    bench = Bench(at(3))
    bench.resume()
    [sync] = bench.get(Resync([ChatHead("c", 5)]))
    bench.get(with_proof(page(4, 5, 5), proof="five"), sync.request_id)
    bench.take()
    assert bench.kept["c"] == CursorClaim(1, 4), "a page proves its end only"
    bench.take_all()
    assert bench.kept["c"] == CursorClaim(1, 5, "five")
    bench.get(with_proof(message(6), proof="six"))
    bench.get(with_proof(message(7), proof="seven"))
    bench.take()
    assert bench.kept["c"] == CursorClaim(1, 6, "six")
    [sync] = bench.get(Resync([ChatHead("c", 7)]))
    assert isinstance(sync, SyncRequest) and (sync.payload.after_sequence, sync.payload.proof) == (
        7,
        "seven",
    )
    bench.drop()
    [resume] = bench.open()
    assert isinstance(resume, Resume) and resume.payload.cursors == {"c": (1, 7, "seven")}


def test_a_page_without_messages_does_not_hide_a_reset_from_the_application() -> None:
    bench = Bench(at(3))
    bench.resume()
    [sync] = bench.get(Resync([ChatHead("c", 2)]))
    [again] = bench.get(page(1, 2, 2, epoch=2, reset=True), sync.request_id)
    bench.get(Page("c", 2, [], 2, False, 2, False), again.request_id)
    assert bench.kept == {}, "after a crash now, the reset is reported again"
    assert bench.take() == ChatReset("c", 2)
    assert bench.kept["c"] == CursorClaim(2, 2)


def test_user_who_joined_again_starts_at_zero_whenever_it_crashes() -> None:
    bench = Bench(at(2))
    bench.resume()
    bench.drop()
    bench.resume(gone=["c"])
    bench.drop()
    bench.resume(joined=["c"])
    assert [bench.take(), bench.take()] == [ChatGone("c"), ChatJoined("c")]
    assert bench.kept["c"] is None


def test_user_who_joined_again_keeps_the_new_cursor_though_the_old_was_higher() -> None:
    bench = Bench(at(0), settings=replace(SETTINGS, buffer_messages_max=100))
    bench.resume(ResumedChat("c", 1, 5, messages(1, 5), 5, False, False))
    [sync] = bench.get(Resync([ChatHead("c", 6)]))
    bench.get(Error("NOT_A_MEMBER", "", False), sync.request_id)
    [sync] = bench.get(Resync([ChatHead("c", 6)]))
    bench.get(page(1, 6, 6), sync.request_id)
    assert sequences([e for e in [bench.take() for _ in range(7)] if e]) == [1, 2, 3, 4, 5]
    assert bench.kept["c"] is None, "it is past its leaving"
    assert sequences([e for e in [bench.take() for _ in range(2)] if e]) == [1, 2]
    assert bench.kept["c"] == CursorClaim(1, 2)


def test_messages_of_the_old_epoch_still_in_the_buffer_do_not_move_the_new_cursor() -> None:
    bench = Bench(at(0))
    bench.resume()
    bench.get(message(1))
    bench.get(message(2))
    [sync] = bench.get(Heartbeat({"c": (2, 1)}))[1:]
    bench.get(page(1, 1, 1, epoch=2, reset=True), sync.request_id)
    assert sequences([e for e in [bench.take(), bench.take()] if e]) == [1, 2]
    assert bench.kept["c"] == CursorClaim(1, 2), "after a crash now, the reset is reported again"
    assert bench.take() == ChatReset("c", 2)
    assert bench.kept["c"] == CursorClaim(2, 0)


# Coming back


def test_resume_carries_what_is_received_in_frames_of_bounded_size() -> None:
    bench = Bench({f"c{n}": CursorClaim(1, n) for n in range(7)})
    frames = [frame for frame in bench.open() if isinstance(frame, Resume)]
    assert [len(frame.payload.cursors) for frame in frames] == [3, 3, 1]
    assert [frame.payload.more for frame in frames] == [True, True, False]
    bench.get(Resumed([], [], []), frames[-1].request_id)
    bench.get(message(7, "c6"))
    bench.drop()
    again = [frame for frame in bench.open() if isinstance(frame, Resume)]
    assert again[-1].payload.cursors["c6"] == (1, 7, None)


def test_a_server_s_lower_limits_are_kept_to() -> None:
    bench = Bench({f"c{n}": CursorClaim(1, n) for n in range(4)})
    bench.do(bench.machine.on_opened(None, bench.now))
    limits = {"resume_chats_per_frame": 2.0, "page_messages_max": 1.0}
    frames = bench.get(ConnectionEstablished("conn", "alice", "dev", "", 30_000, 1, limits))
    assert [len(frame.payload.cursors) for frame in frames if isinstance(frame, Resume)] == [2, 2]
    bench.get(Resumed([], [], []), frames[-1].request_id)
    [sync] = bench.get(message(9, "c1"))
    assert isinstance(sync, SyncRequest) and sync.payload.limit == 1


def test_nothing_is_pulled_before_the_resume_is_answered() -> None:
    bench = Bench(at(0))
    [resume] = bench.open()
    assert bench.get(Heartbeat({"c": (1, 9)})) == [HeartbeatAck()]
    assert [type(f) for f in bench.get(Resumed([], [], []), resume.request_id)] == [SyncRequest]


BUSY = Error("SERVER_BUSY", "too many resumes at once", True, retry_after_seconds=2.0)
UNAVAILABLE = Error("SERVICE_UNAVAILABLE", "an earlier frame was refused", True)


def test_a_resume_refused_for_now_is_repeated_whole_on_the_same_connection() -> None:
    bench = Bench({f"c{n}": CursorClaim(1, n) for n in range(5)})
    first = bench.open()
    assert bench.get(BUSY, first[0].request_id) == [], "the answer to the last frame ends a resume"
    assert bench.get(BUSY, first[-1].request_id) == []
    assert written(bench.pass_time(1.9)) == []
    again = written(bench.pass_time(0.7))
    assert [frame.payload for frame in again] == [frame.payload for frame in first]
    assert not [action for action in bench.actions if isinstance(action, Drop)]
    assert bench.get(Resumed([], ["new"], []), again[-1].request_id)[0].payload.chat_id == "new"


@pytest.mark.parametrize(
    "refusal", [UNAVAILABLE, Error("SERVER_BUSY", "", True, retry_after_seconds=1)]
)
def test_a_resume_refused_again_and_again_waits_longer_up_to_the_cap(refusal: Error) -> None:
    bench = Bench(at(3))
    asked = bench.open()[-1].request_id
    waits = []
    for _ in range(300):
        bench.get(refusal, asked)
        began = bench.now
        while not (
            again := written(bench.pass_time((bench.machine.wake_at() or 0.0) - bench.now + 0.001))
        ):
            bench.get(Heartbeat({}))
        waits.append(bench.now - began)
        asked = again[-1].request_id
    assert max(waits[:1]) <= 1.26
    assert 12 < max(waits) <= 16.01


def test_nothing_is_asked_for_until_the_application_listens() -> None:
    bench = Bench(at(3), listens=False)
    assert bench.open() == []
    assert [type(frame) for frame in bench.send(1)] == [SendMessage]
    assert bench.get(Heartbeat({"c": (1, 9)})) == [HeartbeatAck()]
    bench.get(ack(1))
    assert bench.machine.wake_at() == bench.now + 45, "only silence would end it"
    [resume] = written(bench.do(bench.machine.listen(bench.now)))
    assert isinstance(resume, Resume) and resume.payload.cursors == {"c": (1, 3, None)}


def test_while_a_resume_waits_sends_leave_and_nothing_is_pulled() -> None:
    bench = Bench(at(3))
    bench.get(UNAVAILABLE, bench.open()[-1].request_id)
    assert [type(frame) for frame in bench.send(1)] == [SendMessage]
    assert [type(frame) for frame in bench.get(Resync([ChatHead("c", 9)]))] == []


def test_a_resume_refused_for_good_is_replaced_by_pulling_every_chat() -> None:
    bench = Bench({"c": CursorClaim(1, 3), "d": CursorClaim(1, 5)})
    asked = bench.open()[-1].request_id
    (pull,) = bench.get(Error("INTERNAL_ERROR", "a defect", False), asked)
    assert isinstance(pull, SyncRequest)
    assert (pull.payload.chat_id, pull.payload.after_sequence) == ("c", 3)
    (pull,) = bench.get(page(4, 4, 4), pull.request_id)
    assert (pull.payload.chat_id, pull.payload.after_sequence) == ("d", 5)
    assert Warned("INTERNAL_ERROR", "a defect") in bench.take_all()


RATE = {"other_rate_limit_per_second": 10.0, "other_rate_limit_burst": 20.0}


def test_thousands_of_chats_are_pulled_and_acked_within_the_server_s_rate() -> None:
    names = [f"c{n}" for n in range(2000)]
    bench = Bench(settings=ClientSettings())
    asked = bench.open(limits={**RATE, "resume_chats_per_frame": 500})
    bench.get(Resumed([], names, []), asked[-1].request_id)
    began, pulled, frames = bench.now, dict.fromkeys(names, False), 1
    while not all(pulled.values()) or bench.machine.wake_at() == bench.now:
        for frame in (pulls := [f for f in written(bench.actions) if isinstance(f, SyncRequest)]):
            pulled[frame.payload.chat_id] = True
        frames += len(written(bench.actions))
        bench.actions = []
        for frame in pulls:
            bench.get(page(1, 1, 1, chat_id=frame.payload.chat_id), frame.request_id)
        bench.take_all()
        if not pulls:
            bench.now = max(bench.now, bench.machine.wake_at() or 0.0)
            bench.get(Heartbeat({}))
            bench.pass_time(0)
            frames -= len([f for f in written(bench.actions) if isinstance(f, HeartbeatAck)])
        assert frames <= 20 + 10 * (bench.now - began), "more than the server allows"
    assert frames > 8 * (bench.now - began), "much less than the server allows"
    assert bench.frames(SyncRequest) == []


def test_a_pull_that_waits_for_its_turn_is_woken_also_at_the_clock_s_zero() -> None:
    bench = Bench()
    bench.now = 0.0
    (resume,) = bench.open(
        limits={"other_rate_limit_per_second": 1.0, "other_rate_limit_burst": 1.0}
    )
    assert bench.get(Resumed([], ["c"], []), resume.request_id) == []
    bench.now = bench.machine.wake_at() or bench.now
    assert 1.0 < bench.now < 2.0
    assert [type(frame) for frame in written(bench.pass_time(0))] == [SyncRequest]


def test_a_rate_limit_on_a_pull_holds_back_the_others_too() -> None:
    bench = Bench({"c": CursorClaim(1, 3), "d": CursorClaim(1, 5)})
    bench.resume()
    (pull,) = bench.get(Resync([ChatHead("c", 9), ChatHead("d", 9)]))
    limited = Error("RATE_LIMITED", "slow down", True, retry_after_seconds=0.5)
    assert bench.get(limited, pull.request_id) == []
    assert written(bench.pass_time(0.4)) == []
    assert [type(frame) for frame in written(bench.pass_time(0.2))] == [SyncRequest]


def test_ack_that_may_be_refused_is_sent_again() -> None:
    bench = Bench(at(0))
    bench.resume()
    bench.get(message(1))
    bench.take_all()
    assert len(bench.frames(Ack)) == 1
    bench.get(Error("RATE_LIMITED", "slow down", True, retry_after_seconds=0.5))
    bench.pass_time(1)
    assert [frame.payload.sequence for frame in bench.frames(Ack)] == [1, 1]


def test_resumed_pages_are_taken_and_the_rest_is_pulled() -> None:
    bench = Bench(at(2))
    chat = ResumedChat("c", 1, 9, messages(3, 5), 5, True, False)
    [sync] = bench.resume(chat)
    assert isinstance(sync, SyncRequest) and sync.payload.after_sequence == 5
    assert sequences(bench.take_all()) == [3, 4, 5]


def resumed_chats(names: Sequence[str], brought: int) -> list[ResumedChat]:
    """One message of the first ones; of the others only that there is one."""
    with_message = [
        ResumedChat(name, 1, 1, [message(1, name)], 1, False, False) for name in names[:brought]
    ]
    return with_message + [ResumedChat(name, 1, 1, [], 0, True, False) for name in names[brought:]]


def is_pull(frame: AnyClientFrame) -> bool:
    """Whether the server answers it with pages."""
    return isinstance(frame, SyncRequest) or (isinstance(frame, Resume) and not frame.payload.more)


def test_a_device_that_is_behind_in_thousands_of_chats_resumes_until_few_are_left() -> None:
    behind = dict.fromkeys(f"c{n}" for n in range(2020))
    bench = Bench(settings=ClientSettings())
    bench.open(limits={**RATE, "resume_chats_per_frame": 500})
    asked: list[AnyClientFrame] = []
    while behind:
        pulls, bench.actions = [frame for frame in written(bench.actions) if is_pull(frame)], []
        for pull in pulls:
            if isinstance(pull, SyncRequest):
                bench.get(page(1, 1, 1, chat_id=pull.payload.chat_id), pull.request_id)
                behind.pop(pull.payload.chat_id, None)
            else:
                bench.get(
                    Resumed(resumed_chats(list(behind), 400), list(behind), []), pull.request_id
                )
                behind = dict.fromkeys(list(behind)[400:])
        asked += pulls
        bench.take_all()
        if not pulls:
            bench.now = max(bench.now, bench.machine.wake_at() or 0.0)
            bench.get(Heartbeat({}))
            bench.pass_time(0)
    syncs = [frame for frame in asked if isinstance(frame, SyncRequest)]
    assert len(asked) - len(syncs) == 5
    assert len(syncs) < 30, "the last few, and one while there was no room for more"


def test_a_resume_that_brought_little_is_not_followed_by_another() -> None:
    names = [f"c{n}" for n in range(200)]
    bench = Bench(settings=ClientSettings())
    asked = bench.open()
    frames = bench.get(Resumed(resumed_chats(names, 10), names, []), asked[-1].request_id)
    assert [type(frame) for frame in frames if not isinstance(frame, Ack)] == [SyncRequest]


def test_nothing_more_is_resumed_than_there_is_room_for() -> None:
    names = [f"c{n}" for n in range(200)]
    bench = Bench(settings=ClientSettings(buffer_messages_max=180))
    asked = bench.open()
    frames = bench.get(Resumed(resumed_chats(names, 100), names, []), asked[-1].request_id)
    (pull,) = [frame for frame in frames if is_pull(frame)]
    assert isinstance(pull, SyncRequest), "a page there is room for"
    bench.take_all()
    frames = bench.get(page(1, 1, 1, chat_id=pull.payload.chat_id), pull.request_id)
    assert [type(frame) for frame in frames if is_pull(frame)] == [Resume]


def test_chat_whose_page_brought_nothing_waits_and_lets_others_go_first() -> None:
    bench = Bench({"c": CursorClaim(1, 3), "d": CursorClaim(1, 5)})
    bench.resume()
    (pull,) = bench.get(Resync([ChatHead("c", 9)]))
    assert bench.get(Page("c", 1, (), 3, True, 9), pull.request_id) == [], (
        "not at once, or it would be asked without end"
    )
    assert written(bench.pass_time(0.9)) == []
    (pull,) = written(bench.pass_time(0.2))
    assert isinstance(pull, SyncRequest) and pull.payload.chat_id == "c"
    (pull,) = bench.get(page(4, 6, 9), pull.request_id)
    assert isinstance(pull, SyncRequest) and pull.payload.after_sequence == 6, (
        "at once: this one brought something"
    )


def test_joined_chat_is_reported_and_kept_and_a_gone_one_forgotten() -> None:
    bench = Bench(at(5))
    [sync] = bench.resume(joined=["new"], gone=["c"])
    assert isinstance(sync, SyncRequest) and sync.payload.chat_id == "new"
    assert bench.kept == {}
    assert bench.take_all() == [ChatGone("c"), ChatJoined("new")]
    assert bench.kept == {"c": None}


def test_a_push_of_an_unknown_chat_is_a_chat_joined() -> None:
    bench = Bench()
    bench.resume()
    [sync] = bench.get(message(1, "new"))
    bench.get(page(1, 1, 1, epoch=3, reset=True, chat_id="new"), sync.request_id)
    events = bench.take_all()
    assert events == [ChatJoined("new"), message(1, "new")]
    assert bench.kept["new"] == CursorClaim(3, 1)


def test_a_pull_refused_for_want_of_membership_means_gone() -> None:
    bench = Bench(at(1))
    bench.resume()
    [sync] = bench.get(message(9))
    bench.get(Error("NOT_A_MEMBER", "", False), sync.request_id)
    assert bench.take_all() == [ChatGone("c")]


def test_a_refusal_that_names_a_chat_makes_the_client_ask_whether_it_is_gone() -> None:
    """So the ack of a removed member's last message is refused, or the next send."""
    refused = Error("NOT_A_MEMBER", "not a member of this chat", False, details={"chat_id": "c"})
    bench = Bench(at(3))
    bench.resume()
    (pull,) = bench.get(refused)
    assert isinstance(pull, SyncRequest)
    bench.get(refused, pull.request_id)
    assert ChatGone("c") in bench.take_all()
    bench = Bench(at(3))
    bench.resume()
    (sent,) = bench.send(1)
    assert [type(frame) for frame in bench.get(refused, sent.request_id)] == [SyncRequest]


def test_refusal_that_names_an_unknown_chat_is_only_a_warning() -> None:
    bench = Bench(at(3))
    bench.resume()
    assert bench.get(Error("NOT_A_MEMBER", "no", False, details={"chat_id": "other"})) == []
    assert bench.get(Error("NOT_A_MEMBER", "no", False)) == []
    assert bench.take_all() == [Warned("NOT_A_MEMBER", "no")]


def test_a_pull_that_failed_for_now_is_repeated_later() -> None:
    bench = Bench(at(1))
    bench.resume()
    [sync] = bench.get(message(9))
    assert bench.get(Error("SERVER_BUSY", "", True, retry_after_seconds=2), sync.request_id) == []
    assert written(bench.pass_time(1.9)) == []
    assert [type(frame) for frame in written(bench.pass_time(0.2))] == [SyncRequest]


# Syncing and ready


def synced(bench: Bench) -> int:
    return sum(isinstance(action, Synced) for action in bench.actions)


@pytest.mark.covers("000 clients: sync all active chats")
def test_client_is_synced_when_the_resume_and_every_pull_it_asks_for_are_answered() -> None:
    bench = Bench(at(0))
    resume = bench.open()[-1]
    assert synced(bench) == 0
    first = ResumedChat("c", 1, 6, messages(1, 2), 2, True, False)
    [sync] = bench.get(Resumed([first], [], []), resume.request_id)
    assert synced(bench) == 0, "there is more"
    [sync] = bench.get(page(3, 4, 6), sync.request_id)
    assert synced(bench) == 0
    bench.get(page(5, 6, 6), sync.request_id)
    assert synced(bench) == 1
    bench.get(Resync([ChatHead("c", 9)]))
    assert synced(bench) == 1, "said once per connection"
    bench.drop()
    bench.resume()
    assert synced(bench) == 2


def test_client_that_follows_one_chat_is_synced_without_the_others() -> None:
    bench = Bench({"c": CursorClaim(1, 0), "d": CursorClaim(1, 0)}, follow={"c"})
    resume = bench.open()[-1]
    other = ResumedChat("d", 1, 50, messages(1, 2, "d"), 2, True, False)
    bench.get(Resumed([other], [], []), resume.request_id)
    assert synced(bench) == 1


@pytest.mark.covers("000 state machine: syncing, ready")
def test_ready_comes_after_missed_messages_and_any_other_state_before_them() -> None:
    inbox = Inbox(10)
    for sequence in (1, 2):
        inbox.put(message(sequence))
    inbox.put_ephemeral(ConnectionChanged("ready"))
    inbox.put(message(3))
    inbox.put_ephemeral(Warned("SLOW_CONSUMER", ""))

    def take() -> object:
        taken = inbox.take()
        assert taken is not None
        return taken[0]

    assert [take() for _ in range(5)] == [
        Warned("SLOW_CONSUMER", ""), message(1), message(2), ConnectionChanged("ready"), message(3),
    ]  # fmt: skip
    inbox.put(message(4))
    inbox.put_ephemeral(ConnectionChanged("ready"))
    inbox.put_ephemeral(ConnectionChanged("backoff", "gone", 1.0))
    assert [take(), take()] == [ConnectionChanged("backoff", "gone", 1.0), message(4)]
    assert inbox.take() is None, "a state that is over is not reported"


# Acks and cursors


def test_a_message_is_kept_and_acked_only_after_the_application_moved_past_it() -> None:
    bench = Bench(at(0), keeps=False)
    bench.resume()
    bench.get(message(1))
    taken = bench.machine.inbox.take()
    assert taken is not None and bench.kept == {}
    [keep] = bench.do(bench.machine.on_consumed(*taken, bench.now))
    assert isinstance(keep, Keep) and bench.kept == {"c": CursorClaim(1, 1)}
    bench.pass_time(1)
    assert bench.frames(Ack) == [], "the cursor is not on disk yet"
    bench.do(bench.machine.on_kept([keep], bench.now))
    assert bench.acked() == [1]


def test_acks_are_merged_and_leave_at_most_once_per_interval() -> None:
    bench = Bench(at(0))
    bench.resume()
    for sequence in range(1, 7):
        bench.get(message(sequence))
        bench.take()
    assert bench.acked() == [1]
    bench.pass_time(0.24)
    assert len(bench.frames(Ack)) == 1
    bench.pass_time(0.02)
    assert bench.acked() == [1, 6]


def test_acks_of_a_broken_connection_are_sent_again_on_the_next() -> None:
    bench = Bench(at(0))
    bench.resume()
    bench.get(message(1))
    bench.take()
    bench.drop()
    bench.actions.clear()
    bench.now += 1
    bench.resume()
    assert bench.acked() == [1]


def test_acks_wait_until_the_resume_of_their_connection_is_answered() -> None:
    """Before that the server has sent nothing here, and would refuse them."""
    bench = Bench(at(0))
    bench.resume()
    bench.get(message(1))
    bench.take()
    bench.drop()
    bench.actions.clear()
    bench.now += 1
    [resume] = bench.open()
    assert isinstance(resume, Resume)
    bench.pass_time(1)
    assert bench.acked() == []
    wake_at = bench.machine.wake_at()
    assert wake_at is not None and wake_at > bench.now, "nothing to do until the answer"
    bench.get(Resumed([], [], []), resume.request_id)
    assert bench.acked() == [1]


# The buffer


def test_a_full_buffer_takes_nothing_in_and_the_rest_is_pulled_when_there_is_room() -> None:
    bench = Bench(at(0))
    bench.resume()
    for sequence in range(1, 15):
        bench.get(message(sequence))
    assert bench.machine.inbox.room == 0
    assert bench.frames(SyncRequest) == []
    assert [bench.take() for _ in range(3)] == messages(1, 3)
    [sync] = bench.frames(SyncRequest)
    assert isinstance(sync, SyncRequest)
    assert (sync.payload.after_sequence, sync.payload.limit) == (10, 3)
    bench.get(page(11, 13, 14), sync.request_id)
    assert sequences(bench.take_all()) == list(range(4, 14))


def test_a_full_buffer_does_not_keep_the_answer_of_a_send() -> None:
    bench = Bench(at(0))
    bench.resume()
    for sequence in range(1, 15):
        bench.get(message(sequence))
    bench.send(1)
    bench.get(ack(1))
    assert [type(action.outcome) for action in bench.actions if isinstance(action, Settled)] == [
        Sent
    ]


def test_ephemeral_events_keep_the_newest_only() -> None:
    bench = Bench()
    bench.resume()
    for active in (True, False, True):
        bench.get(Typing("c", "bob", active))
    assert bench.take_all() == [Typing("c", "bob", True)]
    for n in range(1000):
        bench.get(Typing("c", f"user{n}", True))
    assert len(bench.machine.inbox) == 256


def test_chats_that_are_not_followed_are_passed_over_and_not_acked() -> None:
    bench = Bench({"c": CursorClaim(1, 0), "d": CursorClaim(1, 0)}, follow={"c"})
    bench.resume(ResumedChat("d", 1, 50, messages(1, 3, "d"), 3, True, False))
    [sync] = bench.frames(SyncRequest)
    assert isinstance(sync, SyncRequest) and sync.payload.after_sequence == 50
    bench.get(Page("d", 1, [], 50, False, 50), sync.request_id)
    bench.get(message(51, "d"))
    bench.get(message(1))
    assert bench.take_all() == [message(1)]
    bench.pass_time(1)
    assert bench.kept["d"] == CursorClaim(1, 51)
    bench.drop()
    bench.resume()
    bench.pass_time(1)
    assert {f.payload.chat_id for f in bench.frames(Ack) if isinstance(f, Ack)} == {"c"}


def test_chat_that_is_not_followed_is_pulled_before_the_server_closes() -> None:
    bench = Bench({"c": CursorClaim(1, 0)}, follow={"c"})
    bench.resume(ResumedChat("d", 1, 2, messages(1, 2, "d"), 2, False, False), joined=["d"])
    assert bench.frames(SyncRequest) == []
    bench.pass_time(20)
    bench.get(Heartbeat({}))
    [sync] = written(bench.pass_time(20))
    assert isinstance(sync, SyncRequest) and (
        sync.payload.chat_id,
        sync.payload.after_sequence,
    ) == ("d", 2)
    assert bench.get(Page("d", 1, [], 2, False, 2), sync.request_id) == []
    for number in range(3, 6):
        bench.get(message(number, "d"))
        assert written(bench.pass_time(8)) == []
    [sync] = written(bench.pass_time(8))
    assert isinstance(sync, SyncRequest) and sync.payload.after_sequence == 5, (
        "once for all that came meanwhile"
    )


def test_a_chat_that_is_followed_is_pulled_before_those_that_are_not() -> None:
    bench = Bench({"c": CursorClaim(1, 0)}, follow={"c"})
    bench.resume(*(ResumedChat(f"d{n}", 1, 9, [], 0, True, False) for n in range(3)))
    [first] = bench.frames(SyncRequest)
    bench.get(message(2))
    [sync] = bench.get(Page("d0", 1, [], 9, False, 9), first.request_id)
    assert isinstance(sync, SyncRequest) and sync.payload.chat_id == "c"


def test_session_whose_client_pulls_instead_of_acking_stays_open() -> None:
    talk = Talk().live(0)
    for number in range(1, 20):
        talk.deliver(run(number))
        talk.wait(PASSED_OVER_SECONDS)
        talk.receive(HeartbeatAck())
        talk.pull(number, talk_page(number, number))
    assert talk.closing is None and talk.count(Delivered) == talk.count(Emit) == 0


# Sending


def test_one_send_of_a_chat_is_in_flight_and_chats_do_not_wait_for_each_other() -> None:
    bench = Bench()
    bench.resume()
    assert len(bench.send(1)) == 1
    assert bench.send(2) == []
    assert len(bench.send(3, "d")) == 1
    [second] = bench.get(ack(1))
    assert isinstance(second, SendMessage) and second.payload.client_message_id == "k2"


def test_sends_in_flight_are_bounded_over_all_chats() -> None:
    bench = Bench(settings=ClientSettings(sends_in_flight_max=2))
    bench.resume()
    for n in range(5):
        bench.send(n, f"c{n}")
    assert len(bench.frames(SendMessage)) == 2
    bench.get(ack(0, "c0"))
    assert len(bench.frames(SendMessage)) == 3


def test_a_send_without_an_answer_leaves_again_first_with_the_same_id() -> None:
    bench = Bench(entries=[entry(1), entry(2)])
    bench.resume()
    bench.drop()
    bench.actions.clear()
    bench.resume()
    assert [
        f.payload.client_message_id for f in bench.frames(SendMessage) if isinstance(f, SendMessage)
    ] == ["k1"]


def test_retryable_failure_waits_for_its_delay_and_its_followers_behind_it() -> None:
    bench = Bench(entries=[entry(1), entry(2)])
    bench.resume()
    [first] = bench.frames(SendMessage)
    bench.get(Error("SERVER_BUSY", "", True, "rejected", 3), first.request_id)
    assert written(bench.pass_time(2.9)) == []
    [again] = written(bench.pass_time(1.0))
    assert isinstance(again, SendMessage) and again.payload.client_message_id == "k1"


def test_a_rate_limit_holds_back_every_chat() -> None:
    bench = Bench()
    bench.resume()
    [first] = bench.send(1)
    bench.get(Error("RATE_LIMITED", "", True, "rejected", 1), first.request_id)
    assert bench.send(2, "d") == []
    assert len(written(bench.pass_time(1.5))) == 2


def test_a_send_that_meets_a_defect_is_settled_and_does_not_hold_up_its_chat() -> None:
    bench = Bench(entries=[entry(1), entry(2)])
    bench.resume()
    [first] = bench.frames(SendMessage)
    [second] = bench.get(
        Error("INTERNAL_ERROR", "it is logged", False, "unknown"), first.request_id
    )
    [settled] = [action for action in bench.actions if isinstance(action, Settled)]
    assert settled.entry == entry(1) and isinstance(settled.outcome, InternalError)
    assert settled.outcome.outcome == "unknown" and "may be stored" in str(settled.outcome)
    assert isinstance(second, SendMessage) and second.payload.client_message_id == "k2"


def test_final_refusal_is_reported_and_the_next_send_leaves() -> None:
    bench = Bench(entries=[entry(1), entry(2)])
    bench.resume()
    [first] = bench.frames(SendMessage)
    bench.get(Error("NOT_A_MEMBER", "no", False, "rejected"), first.request_id)
    [settled] = [action for action in bench.actions if isinstance(action, Settled)]
    assert settled.entry == entry(1) and isinstance(settled.outcome, NotAMember)
    assert len(bench.frames(SendMessage)) == 2
    bench.machine.report_refusal(settled.entry, settled.outcome)
    assert bench.take() == SendRefused("c", "k1", "text 1", settled.outcome)


def test_an_ack_of_something_else_settles_nothing() -> None:
    bench = Bench(entries=[entry(1)])
    bench.resume()
    bench.get(ack(7))
    assert not [action for action in bench.actions if isinstance(action, Settled)]
    assert len(bench.machine.outbox) == 1


# Time


def test_a_send_that_is_not_answered_drops_the_connection() -> None:
    bench = Bench(entries=[entry(1)])
    bench.resume()
    assert bench.machine.wake_at() == bench.now + 15
    assert [a for a in bench.pass_time(15) if isinstance(a, Drop)]


def test_silence_longer_than_a_heartbeat_and_its_grace_drops_the_connection() -> None:
    bench = Bench()
    bench.resume()
    assert not [a for a in bench.pass_time(44.9) if isinstance(a, Drop)]
    assert [a for a in bench.pass_time(0.2) if isinstance(a, Drop)]


def test_a_connection_that_is_never_established_is_dropped() -> None:
    bench = Bench()
    bench.do(bench.machine.on_opened(None, bench.now))
    assert [a for a in bench.pass_time(15) if isinstance(a, Drop)]


def test_reply_that_still_arrives_is_waited_for_however_slowly() -> None:
    bench = Bench(at(0), entries=[entry(1)])
    [_, resume] = bench.open()
    assert not [a for a in bench.trickle(300) if isinstance(a, Drop)]
    bench.get(
        Resumed([ResumedChat("c", 1, 2, messages(1, 2), 2, False, False)], [], []),
        resume.request_id,
    )
    assert sequences(bench.take_all()) == [1, 2]


def test_reply_that_stops_arriving_drops_the_connection() -> None:
    bench = Bench(at(0))
    bench.open()
    bench.trickle(60)
    assert not [a for a in bench.pass_time(14.9) if isinstance(a, Drop)]
    assert [a for a in bench.pass_time(0.2) if isinstance(a, Drop)]


def test_whole_frames_are_no_reply_to_a_request() -> None:
    bench = Bench(at(0))
    bench.open()
    bench.pass_time(14)
    bench.get(message(1))
    assert [a for a in bench.pass_time(1) if isinstance(a, Drop)], (
        "a question that was lost would never be asked again"
    )


def test_an_announced_closing_that_does_not_come_drops_the_connection() -> None:
    bench = Bench()
    bench.resume()
    closing = ConnectionClosing("server_shutdown", "", True, 100, {})
    bench.get(closing)
    assert Announced(closing) in bench.actions
    assert [a for a in bench.pass_time(5) if isinstance(a, Drop)]


def test_a_token_is_renewed_in_band_before_it_ends() -> None:
    bench = Bench()
    bench.open(expires_at=bench.now + 600)
    assert not [a for a in bench.pass_time(30) if isinstance(a, RenewToken)]
    bench.get(Heartbeat({}))
    bench.now = 100 + 539
    assert not [a for a in bench.do(bench.machine.tick(bench.now)) if isinstance(a, RenewToken)]
    bench.now = 100 + 541
    assert [a for a in bench.do(bench.machine.tick(bench.now)) if isinstance(a, RenewToken)]
    [frame] = written(
        bench.do(bench.machine.on_token_renewed("new", "dev", bench.now + 600, bench.now))
    )
    assert isinstance(frame, Authenticate) and frame.payload.token == "new"


def test_the_watermark_of_an_offline_reader_leaves_with_the_next_connection() -> None:
    bench = Bench()
    bench.do(bench.machine.read("c", 5, bench.now))
    bench.do(bench.machine.read("c", 3, bench.now))
    bench.resume()
    assert [f.payload.sequence for f in bench.frames(Read) if isinstance(f, Read)] == [5]


def test_watermarks_of_hundreds_of_chats_all_leave_within_the_server_s_rate() -> None:
    bench = Bench()
    for number in range(300):
        bench.do(bench.machine.read(f"c{number}", 1, bench.now))
    frames = bench.open(limits=RATE)
    bench.get(Resumed([], [], []), frames[0].request_id)
    began = bench.now
    while len(bench.frames(Read)) < 300:
        assert len(bench.frames(Read)) <= 20 + 10 * (bench.now - began), (
            "more than the server allows"
        )
        bench.now = bench.machine.wake_at() or bench.now
        bench.get(Heartbeat({}))


def test_watermark_that_may_be_refused_or_lost_is_sent_again() -> None:
    bench = Bench()
    bench.resume()
    bench.do(bench.machine.read("c", 5, bench.now))
    bench.get(Error("RATE_LIMITED", "slow down", True, retry_after_seconds=0.5))
    bench.do(bench.machine.read("c", 4, bench.now))
    bench.pass_time(1)
    assert [f.payload.sequence for f in bench.frames(Read) if isinstance(f, Read)] == [5, 5]
    bench.do(bench.machine.read("c", 4, bench.now))
    bench.drop()
    bench.resume()
    assert [f.payload.sequence for f in bench.frames(Read) if isinstance(f, Read)] == [5, 5, 4, 5]


def test_watermark_of_an_old_epoch_is_not_sent_again() -> None:
    bench = Bench(at(7))
    bench.resume()
    bench.do(bench.machine.read("c", 7, bench.now))
    (pull,) = bench.get(Heartbeat({"c": (2, 1)}))[1:]
    (pull,) = bench.get(page(1, 1, 1, epoch=2, reset=True), pull.request_id)
    bench.get(page(1, 1, 1, epoch=2), pull.request_id)
    assert [type(event) for event in bench.take_all()] == [ChatReset, Message]
    bench.drop()
    bench.resume()
    assert len(bench.frames(Read)) == 1


def test_watermark_of_a_chat_that_is_gone_is_not_sent_again() -> None:
    bench = Bench()
    bench.resume()
    bench.do(bench.machine.read("c", 5, bench.now))
    bench.get(Error("NOT_A_MEMBER", "not a member", False, details={"chat_id": "c"}))
    bench.drop()
    bench.resume()
    assert len(bench.frames(Read)) == 1


def test_an_error_without_a_request_is_a_warning() -> None:
    bench = Bench()
    bench.resume()
    bench.get(Error("SLOW_CONSUMER", "slow", True, grace_period_seconds=5))
    assert bench.take_all() == [Warned("SLOW_CONSUMER", "slow")]


def test_frames_after_the_end_of_a_connection_are_ignored() -> None:
    bench = Bench(at(0))
    bench.resume()
    bench.drop()
    assert bench.get(message(1)) == []
    assert bench.machine.wake_at() is None
    assert [type(a) for a in bench.actions if isinstance(a, Online)] == [Online]
