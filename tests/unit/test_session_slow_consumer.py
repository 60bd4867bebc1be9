"""Backpressure on the way out: bounded, signalled, and never a silent drop."""

from __future__ import annotations

import itertools

import pytest
from session_driver import Talk, page, run, send, sync

from holdfast.message import Cursor, Message
from holdfast.session.effects import (
    Close,
    Effect,
    Emit,
    Fetch,
    PauseReading,
    ResumeReading,
    SessionEvent,
    Wake,
)
from holdfast.session.lanes import Lanes
from holdfast.session.settings import (
    BackpressureSettings,
    InboundSettings,
    OutboundSettings,
    SessionSettings,
)
from holdfast.session.slow_consumer import (
    MOVES,
    BufferEvent,
    Flow,
    IllegalMove,
    SlowConsumer,
    SlowConsumerAction,
)
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.frames import ChatHead, ConnectionClosing, Error, HeartbeatAck, Resync


def filled(messages: int, talk: Talk | None = None) -> Talk:
    """A live session with this many ``messages`` waiting."""
    talk = talk or Talk().live(0)
    for sequence in range(1, messages + 1):
        talk.deliver(run(sequence))
    return talk


def drain(talk: Talk, messages: int) -> list[object]:
    """A reader takes this many messages, and the control frames before them."""
    payloads: list[object] = []
    while messages > 0:
        frames = [frame.payload for frame in talk.take(1)]
        messages -= sum(isinstance(payload, Message) for payload in frames)
        payloads += frames
    return payloads


def outlive(talk: Talk, seconds: float) -> list[Effect]:
    """Time passes for a client that answers heartbeats."""
    effects: list[Effect] = []
    for _ in range(round(seconds * 10)):
        effects += talk.wait(0.1)
        if not talk.session.closed:
            talk.receive(HeartbeatAck())
    return effects


@pytest.mark.covers("000 outbound buffer above 80 %: log")
def test_above_80_percent_it_is_logged_once() -> None:
    talk = filled(800)
    assert talk.count(Emit) == 0
    talk.deliver(run(801))
    talk.deliver(run(802))
    assert [e.event for e in talk.effects if isinstance(e, Emit)] == [
        SessionEvent.BUFFER_ABOVE_WARNING
    ]
    drain(talk, 10)
    for sequence in range(803, 820):
        talk.deliver(run(sequence))
    assert talk.count(Emit) == 1, "not again until the buffer has been empty"
    talk.read()
    filled_again = [talk.deliver(run(sequence)) for sequence in range(820, 820 + 801)]
    assert Emit(SessionEvent.BUFFER_ABOVE_WARNING) in filled_again[-1]


@pytest.mark.covers("000 slow consumer receives SLOW_CONSUMER before disconnect")
def test_slow_consumer_receives_slow_consumer_before_disconnect() -> None:
    talk = filled(951)
    first = talk.take(1)[0].payload
    assert isinstance(first, Error), "the warning overtakes the 950 messages"
    assert (first.code, first.grace_period_seconds, first.retryable) == ("SLOW_CONSUMER", 5, True)
    talk.wait(10)
    assert talk.closing is CloseReason.SLOW_CONSUMER


@pytest.mark.covers("000 fill outbound buffer: warning, disconnect after grace")
def test_fill_outbound_buffer_verify_warning_verify_disconnect_after_grace() -> None:
    talk = filled(950)
    assert Emit(SessionEvent.SLOW_CONSUMER_WARNED) not in talk.effects
    assert Emit(SessionEvent.SLOW_CONSUMER_WARNED) in talk.deliver(run(951))
    talk.wait(4.9)
    assert talk.closing is None
    assert talk.wait(0.1)[-1] == Close(CloseReason.SLOW_CONSUMER)
    payloads = talk.read()
    closing = payloads[-1]
    assert isinstance(closing, ConnectionClosing)
    assert (closing.reason, closing.reconnect_allowed) == ("slow_consumer", True)
    assert closing.sync_from_sequence == {"chat_1": 0}
    assert not [payload for payload in payloads if isinstance(payload, Message)], (
        "the rest is for sync"
    )


@pytest.mark.covers("000 bounded_buffer")
@pytest.mark.parametrize("size", [1, 7, 30, 300, 2000])
def test_bounded_buffer(size: int) -> None:
    """At most 1000 messages and 5 MiB wait, whatever is delivered."""
    talk = Talk().live(0)
    for first in range(1, 8 * size + 3000, size):
        talk.deliver(run(first, first + size - 1))
        assert talk.session.waiting_messages <= 1000
        assert talk.session.waiting_bytes <= 5 * 1024 * 1024 + 10_000


@pytest.mark.covers("000 contract 2: no unbounded buffering")
def test_bytes_bound_the_buffer_as_messages_do() -> None:
    talk = Talk(
        limits=SessionSettings(
            BackpressureSettings(outbound=OutboundSettings(max_buffer_bytes=100_000))
        )
    ).live(0)
    for sequence in range(1, 200):
        talk.deliver(run(sequence, content="x" * 2000))
        assert talk.session.waiting_bytes <= 100_000
    assert talk.errors()[0] == "SLOW_CONSUMER"


@pytest.mark.covers("000 backpressure_signaled")
@pytest.mark.parametrize("pace", [0.0, 0.4, 1.0, 4.9])
def test_backpressure_signaled(pace: float) -> None:
    """No close of a slow consumer sooner than 5 s after its warning."""
    talk = filled(951)
    warned_at = talk.now
    while talk.closing is None:
        talk.tick(pace or 0.01)
        if talk.closing is None:
            talk.receive(HeartbeatAck())
    assert talk.closing is CloseReason.SLOW_CONSUMER
    assert talk.now - warned_at >= 5


@pytest.mark.covers("000 outbound buffer above 95 %")
def test_while_slow_no_body_is_queued_and_heads_are_remembered() -> None:
    talk = filled(
        951, Talk({"chat_1": Cursor(1, 0), "chat_2": Cursor(1, 0)}).live(0).live(0, "chat_2")
    )
    assert talk.session.waiting_messages == 950
    talk.deliver(run(1, 4, chat_id="chat_2"))
    talk.deliver(run(952, 960))
    assert talk.session.waiting_messages == 950
    payloads = drain(talk, 200)
    assert not [payload for payload in payloads if isinstance(payload, Resync)]
    rest = talk.read()
    assert isinstance(rest[-1], Resync)
    assert rest[-1] == Resync([ChatHead("chat_1", 960), ChatHead("chat_2", 4)])


@pytest.mark.covers("000 1.2 drained below 80 %: continue")
def test_drained_below_80_percent_it_goes_on_with_a_resync() -> None:
    talk = filled(951)
    drain(talk, 151)
    talk.do(talk.session.on_written(talk.now))
    assert Emit(SessionEvent.SLOW_CONSUMER_RECOVERED) in talk.effects
    outlive(talk, 20)
    assert talk.closing is None
    assert Resync([ChatHead("chat_1", 951)]) in talk.read()


def test_the_chat_goes_on_live_after_its_sync() -> None:
    talk = filled(951)
    talk.read()
    talk.pull(950, page(950, 951))
    talk.deliver(run(952))
    assert [p.sequence for p in talk.read() if isinstance(p, Message)] == [952]


@pytest.mark.covers("000 slow-consumer grace of one that drains")
def test_a_new_low_of_5_percent_starts_the_grace_again() -> None:
    talk = filled(951)
    outlive(talk, 4)
    drain(talk, 50)
    outlive(talk, 4.5)
    assert talk.closing is None
    drain(talk, 50)
    outlive(talk, 4.5)
    assert talk.closing is None
    outlive(talk, 1)
    assert talk.closing is CloseReason.SLOW_CONSUMER


def test_less_than_5_percent_is_no_new_low() -> None:
    talk = filled(951)
    outlive(talk, 4)
    drain(talk, 49)
    outlive(talk, 1.1)
    assert talk.closing is CloseReason.SLOW_CONSUMER


@pytest.mark.covers("000 slow-consumer grace, in all")
def test_sixty_seconds_in_all_are_the_most() -> None:
    limits = SessionSettings(
        BackpressureSettings(
            outbound=OutboundSettings(new_low_percent=1, warning_threshold_percent=10)
        )
    )
    talk = filled(951, Talk(limits=limits).live(0))
    for _ in range(14):
        outlive(talk, 4)
        drain(talk, 10)
    assert talk.closing is None
    drain(talk, 10)
    outlive(talk, 4.1)
    assert talk.closing is CloseReason.SLOW_CONSUMER


def test_run_too_large_for_a_buffer_that_is_not_full_is_left_to_sync() -> None:
    talk = Talk().live(0)
    talk.deliver(run(1, 2000))
    assert talk.session.waiting_messages == 0
    assert talk.read() == [Resync([ChatHead("chat_1", 2000)])]


def test_pages_and_control_frames_never_make_a_client_slow() -> None:
    talk = filled(900)
    talk.receive(sync(0))
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(0, 500, head=900), talk.now))
    assert Emit(SessionEvent.SLOW_CONSUMER_WARNED) not in talk.effects


def test_ephemeral_frames_keep_the_newest_of_their_key() -> None:
    talk = Talk().live(0)
    for frame in (b"\x81\x01a", b"\x81\x01b"):
        talk.do(talk.session.ephemeral(("typing", "chat_1"), frame))
    talk.do(talk.session.ephemeral(("typing", "chat_2"), b"\x81\x01c"))
    talk.deliver(run(1))
    frames = talk.session.take(1 << 20)
    assert frames[1:] == [b"\x81\x01b", b"\x81\x01c"], "after the deliveries"
    assert talk.session.waiting_bytes == 0


def test_ephemeral_frames_are_dropped_above_half_and_never_make_slow() -> None:
    talk = filled(500)
    for number in range(1000):
        talk.do(talk.session.ephemeral(("typing", str(number)), b"\x81\x01x"))
    assert talk.count(Emit) == 0
    assert len(talk.session._outbound.lanes.ephemeral or ()) == 256, "the bound of their lane"
    before = talk.session.waiting_bytes
    talk.deliver(run(501))
    talk.do(talk.session.ephemeral(("typing", "more"), b"\x81\x01x"))
    assert talk.session.waiting_bytes == before + run(501).size


def test_the_order_on_the_wire_is_control_page_deliveries_ephemeral() -> None:
    talk = Talk({"chat_1": Cursor(1, 0), "chat_2": Cursor(1, 1)}).live(0)
    talk.do(talk.session.ephemeral(("typing",), b'\x81\x24{"type":"ephemeral","payload":{"a":1}}'))
    talk.deliver(run(1))
    talk.receive(sync(0, chat_id="chat_2"))
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(0, 1, chat_id="chat_2"), talk.now))
    talk.receive(send(content=""))
    kinds = [chunk.split(b'"type":"')[1].split(b'"')[0] for chunk in talk.session.take(1 << 20)]
    assert kinds == [b"error", b"sync_response", b"message", b"ephemeral"]


def test_take_gives_about_as_much_as_asked_in_whole_frames() -> None:
    talk = filled(100)
    size = run(1).size
    taken = [len(talk.session.take(10 * size)) for _ in range(12)]
    assert sum(taken) == 100
    assert all(10 <= count <= 11 for count in taken if count)
    assert talk.session.waiting_messages == talk.session.waiting_bytes == 0


def test_run_passes_the_lanes_only_if_it_is_next_and_nothing_waits() -> None:
    talk = Talk().live(0)
    session = talk.session
    assert not session.deliver_at_once(run(1, chat_id="chat_9"))
    assert not session.deliver_at_once(run(2))
    assert session.deliver_at_once(run(1))
    assert not session.deliver_at_once(run(1)), "it was"
    talk.deliver(run(2))
    talk.deliver(run(3))
    assert not session.deliver_at_once(run(4)), "what waits goes first"
    talk.session.take(1)
    assert not session.deliver_at_once(run(4)), "what still waits after a take, too"
    talk.read()
    assert session.deliver_at_once(run(4))
    talk.receive(send(kind="image/png"))
    assert not session.deliver_at_once(run(5)), "an answer waits"
    talk.read()
    talk.deliver(run(5))
    assert [p.sequence for p in talk.read() if isinstance(p, Message)] == [5]
    talk.do(talk.session.close(CloseReason.ROTATION))
    assert not session.deliver_at_once(run(6))


def test_take_single_gives_a_lone_run_and_nothing_if_there_is_more() -> None:
    talk = Talk({"chat_1": Cursor(1, 0), "chat_2": Cursor(1, 0)}).live(0)
    assert talk.session.take_single() is None
    talk.deliver(run(1))
    assert talk.session.take_single() == run(1).data
    assert talk.session.waiting_messages == talk.session.waiting_bytes == 0
    assert talk.deliver(run(2)) == [Wake()], "woken again after it"
    talk.receive(send(kind="image/png"))
    assert talk.session.take_single() is None, "an answer waits"
    talk.read()
    talk.deliver(run(3))
    talk.deliver(run(4))
    assert talk.session.take_single() is None, "two runs wait"
    talk.read()
    talk.deliver(run(5))
    talk.deliver(run(7))
    assert talk.session.take_single() is None, "a resync waits"
    talk.read()
    talk.receive(sync(0, chat_id="chat_2"))
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(0, 0, chat_id="chat_2"), talk.now))
    talk.deliver(run(1, chat_id="chat_2"))
    assert talk.session.take_single() is None, "a page waits"
    talk.read()
    talk.deliver(run(2, chat_id="chat_2"))
    talk.do(talk.session.ephemeral("key", b"\x81\x00"))
    assert talk.session.take_single() is None, "an ephemeral frame waits"


@pytest.mark.covers("000 contract 2, the control lane")
def test_a_full_control_lane_stops_reading_and_half_empty_reads_on() -> None:
    talk = Talk()
    sends = (send(f"c{n}", kind="image/png") for n in itertools.count())
    for _ in range(199):
        assert PauseReading() not in talk.receive(next(sends))
    assert PauseReading() in talk.receive(next(sends))
    assert PauseReading() not in talk.receive(next(sends)), "said once"
    while len(talk.session._outbound.lanes.control) >= 100:
        assert talk.count(ResumeReading) == 0
        talk.take(1)
    assert talk.count(ResumeReading) == 1


def test_a_client_that_asks_on_without_reading_is_closed() -> None:
    talk = Talk()
    for number in range(600):
        talk.receive(send(f"c{number}", kind="image/png"))
    assert talk.closing is CloseReason.OVERLOADED


def test_a_forgotten_taken_is_made_up_for_by_the_next_tick() -> None:
    talk = Talk()
    for number in range(200):
        talk.receive(send(f"c{number}", kind="image/png"))
    talk.session.take(1 << 30)
    assert talk.session.next_tick <= talk.now
    assert ResumeReading() in talk.tick()


def test_the_machine_refuses_what_cannot_be_and_changes_nothing() -> None:
    for flow, seen in itertools.product(Flow, BufferEvent):
        machine = SlowConsumer(OutboundSettings())
        machine.flow = flow
        if (flow, seen) in MOVES:
            assert machine._move(seen) is MOVES[flow, seen][1]
        else:
            with pytest.raises(IllegalMove):
                machine._move(seen)
            assert machine.flow is flow


def test_every_way_into_slow_warns_and_the_only_way_out_of_it_to_over_closes() -> None:
    assert {move[1] for (_, _), move in MOVES.items() if move[0] is Flow.OVER} == {
        SlowConsumerAction.CLOSE
    }
    into_slow = {
        action
        for (flow, _), (to, action) in MOVES.items()
        if to is Flow.SLOW and flow is not Flow.SLOW
    }
    assert into_slow == {SlowConsumerAction.WARN}


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="warning_threshold_percent"):
        OutboundSettings(warning_threshold_percent=95)
    with pytest.raises(ValueError, match="grace_total_seconds"):
        OutboundSettings(grace_period_seconds=61)
    with pytest.raises(ValueError, match="max_queue_depth"):
        InboundSettings(max_queue_depth=0)


def test_nothing_waits_after_a_close_but_the_last_words() -> None:
    talk = filled(500)
    talk.do(talk.session.close(CloseReason.MEMORY_PRESSURE, 1500))
    assert talk.deliver(run(501)) == []
    (words,) = talk.read()
    assert isinstance(words, ConnectionClosing)
    assert (words.reconnect_delay_ms, words.sync_from_sequence) == (1500, {"chat_1": 0})
    assert talk.tick(60) == []
    assert Wake() not in talk.do(talk.session.on_written(talk.now))


def test_ephemeral_frames_wait_for_the_last_delivery() -> None:
    lanes = Lanes()
    for waiting in (run(1), run(2)):
        lanes.runs.append(waiting)
        lanes.messages += waiting.count
        lanes.bytes += waiting.size
    lanes.enqueue_ephemeral("typing", b"bob types", 10)
    assert lanes.take(1, list) == [run(1).data]
    assert lanes.take(1_000, list) == [run(2).data, b"bob types"]
