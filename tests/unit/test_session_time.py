"""Heartbeats with heads, timeouts, rotation, expiry, overload, stale acks."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest
from session_driver import Talk, acked, page, run, send, sync

from holdfast.errors import ServerBusy
from holdfast.message import Cursor, Message, Page
from holdfast.session.effects import Emit, Fetch, SessionEvent, Submit
from holdfast.session.heartbeat import HeartbeatTimer as Beats
from holdfast.session.heartbeat import Transmission
from holdfast.session.progress import ChatProgress
from holdfast.session.settings import SessionSettings, TimeoutSettings
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.frames import (
    Ack,
    AckBody,
    ChatHead,
    ConnectionClosing,
    Heartbeat,
    HeartbeatAck,
    Resync,
)


def beats(payloads: list[object]) -> list[Heartbeat]:
    return [payload for payload in payloads if isinstance(payload, Heartbeat)]


def stay(talk: Talk, seconds: float) -> list[object]:
    """Time passes for a client that reads and answers heartbeats."""
    payloads: list[object] = []
    for _ in range(round(seconds)):
        talk.wait(1)
        read = talk.read()
        payloads += read
        if beats(read):
            talk.receive(HeartbeatAck())
    return payloads


def test_a_heartbeat_every_thirty_seconds() -> None:
    talk = Talk()
    assert beats(stay(talk, 29)) == []
    assert beats(stay(talk, 1)) == [Heartbeat({})]
    assert len(beats(stay(talk, 300))) == 10


@pytest.mark.covers("000 network timeout (client, gateway)")
def test_no_answer_in_ten_seconds_closes_as_idle() -> None:
    talk = Talk()
    talk.wait(39.9)
    assert talk.closing is None
    talk.wait(0.1)
    assert talk.closing is CloseReason.IDLE_TIMEOUT
    assert isinstance(talk.read()[-1], ConnectionClosing)


def test_any_bytes_from_the_client_show_that_it_is_alive() -> None:
    talk = Talk()
    talk.wait(35)
    talk.session.on_bytes_read()
    talk.wait(25)
    assert talk.closing is None
    talk.wait(10)
    assert talk.closing is CloseReason.IDLE_TIMEOUT


SLOW_LINKS = {
    "bytes leave, and more wait": ([(100, 10), (100, 20), (100, 30)], True),
    "the last bytes have left": ([(100, 10), (0, 20)], True),
    "more is written and nothing leaves": ([(100, 10), (200, 10)], False),
    "nothing was before it, and it arrived": ([(0, 10), (0, 60)], False),
    "nothing leaves": ([(100, 10), (100, 10)], False),
    "a proxy has taken a page": ([(0, 250_000), (0, 250_050)], True),
    "the page had its time": ([(0, 250_000), *[(0, 250_050)] * 11], False),
    "a proxy takes nothing more": ([(0, 250_000), (50, 250_000)], False),
}
"""Unacknowledged and acknowledged bytes at the heartbeat, then every 10 s."""


@pytest.mark.parametrize("link", SLOW_LINKS)
def test_an_answer_is_awaited_as_long_as_the_heartbeat_may_be_on_its_way(link: str) -> None:
    """What kernel and proxy hold counts: 128 KiB are a minute of a slow link."""
    samples, alive = SLOW_LINKS[link]
    talk = Talk()
    talk.now = talk.session.next_tick
    for sample in samples:
        talk.do(talk.session.tick(talk.now, Transmission(0, *sample)))
        talk.now += 10.1
    assert (talk.closing is None) is alive


def test_heartbeat_time_starts_again_while_earlier_bytes_still_leave() -> None:
    """Over a slow link a page takes a minute, and the heartbeat follows it."""
    talk = Talk()
    for unsent in range(300, 0, -5):
        talk.unsent = unsent
        talk.wait(1)
    assert talk.closing is None
    talk.unsent = 0
    talk.wait(10)
    assert talk.closing is None, "it has only just left"
    talk.wait(10)
    assert talk.closing is CloseReason.IDLE_TIMEOUT


def test_a_transport_that_takes_no_more_does_not_stop_the_clock() -> None:
    talk = Talk()
    talk.unsent = 300
    talk.wait(39.9)
    assert talk.closing is None
    talk.wait(0.1)
    assert talk.closing is CloseReason.IDLE_TIMEOUT


def test_bytes_still_in_the_transport_do_not_make_acks_stale() -> None:
    talk = Talk().live(0)
    talk.deliver(run(1))
    assert talk.read()
    talk.unsent = 300
    assert not [p for p in stay(talk, 300) if isinstance(p, Resync)]
    talk.unsent = 0
    assert [p for p in stay(talk, 120) if isinstance(p, Resync)]


def test_a_skipped_delivery_is_named_five_seconds_after_the_store_knew_of_it() -> None:
    """Also the last one of a chat, which no later delivery would show."""
    talk = Talk().live(4)
    talk.session.on_head("chat_1", Cursor(1, 5), talk.now)
    assert beats(stay(talk, 4)) == []
    assert beats(stay(talk, 1)) == [Heartbeat({"chat_1": (1, 5)})]
    assert beats(stay(talk, 30)) == [Heartbeat({"chat_1": (1, 5)})], (
        "again, until the client has it"
    )
    talk.pull(4, page(4, 5))
    assert beats(stay(talk, 30)) == [Heartbeat({})]


def test_a_delivery_on_its_way_is_not_named() -> None:
    talk = Talk().live(4)
    talk.session.on_head("chat_1", Cursor(1, 5), talk.now)
    talk.wait(2)
    talk.deliver(run(5))
    assert beats(stay(talk, 10)) == [Heartbeat({})]


def test_a_heartbeat_that_is_due_earlier_does_not_name_it_and_the_next_comes_in_time() -> None:
    talk = Talk().live(4)
    stay(talk, 28)
    talk.session.on_head("chat_1", Cursor(1, 5), talk.now)
    assert beats(stay(talk, 4)) == [Heartbeat({})]
    assert beats(stay(talk, 1)) == [Heartbeat({"chat_1": (1, 5)})]


def test_a_chat_the_client_never_pulled_is_named() -> None:
    talk = Talk({"chat_1": Cursor(1, 4), "chat_2": Cursor(1, 0)})
    talk.session.on_head("chat_1", Cursor(1, 4), talk.now)
    talk.session.on_head("chat_2", Cursor(1, 0), talk.now)
    assert beats(stay(talk, 5)) == [Heartbeat({"chat_1": (1, 4)})]


def test_heads_of_chats_that_are_not_ours_or_of_an_older_epoch_say_nothing() -> None:
    talk = Talk({"chat_1": Cursor(3, 0)})
    talk.session.on_head("chat_9", Cursor(1, 9), talk.now)
    talk.session.on_head("chat_1", Cursor(2, 9), talk.now)
    assert beats(stay(talk, 30)) == [Heartbeat({})]


def test_heartbeats_of_clients_that_connect_together_are_spread() -> None:
    first = {round(Talk(rng=random.Random(seed)).session.next_tick) for seed in range(50)}
    assert len(first) > 8
    assert all(15 <= time <= 30 for time in first)


@pytest.mark.covers("000 connection older than 24 h")
def test_a_connection_is_rotated_after_24_hours() -> None:
    day = 24 * 3600
    talk = Talk(
        limits=SessionSettings(timeouts=TimeoutSettings(heartbeat_interval_seconds=2 * day))
    )
    talk.wait(day - 1)
    assert talk.closing is None
    talk.wait(1)
    assert talk.closing is CloseReason.ROTATION


def test_rotation_is_spread_over_an_hour_or_so_and_never_early() -> None:
    limits = SessionSettings(timeouts=TimeoutSettings(heartbeat_interval_seconds=10**6))
    times = [Talk(limits=limits, rng=random.Random(seed)).session.next_tick for seed in range(50)]
    assert min(times) >= 24 * 3600
    assert max(times) <= 24 * 3600 * 1.05
    assert max(times) - min(times) > 1800


def test_an_expired_token_closes_and_lets_the_client_come_back() -> None:
    talk = Talk(expires_at=20)
    talk.wait(20)
    assert talk.closing is CloseReason.TOKEN_EXPIRED
    words = talk.read()[-1]
    assert isinstance(words, ConnectionClosing)
    assert words.reconnect_allowed


def busy(talk: Talk, count: int, share: int) -> None:
    """Sends over half a minute, every ``share``-th of which is refused as busy."""
    for number in range(count):
        talk.receive(send(f"c{number}"))
        outcome = ServerBusy("full") if number % share == 0 else acked(1)
        talk.do(talk.session.on_send_result(talk.last(Submit).token, outcome, talk.now))
        stay(talk, 1)


@pytest.mark.covers("000 contract 4: system-wide overload")
def test_busy_for_more_than_half_of_thirty_seconds_of_requests_closes_as_overloaded() -> None:
    talk = Talk()
    busy(talk, 29, share=1)
    assert talk.closing is None
    stay(talk, 2)
    assert talk.closing is CloseReason.OVERLOADED


def test_busy_for_half_of_them_does_not() -> None:
    talk = Talk()
    busy(talk, 120, share=2)
    assert talk.closing is None


def test_a_few_requests_that_met_a_busy_moment_do_not() -> None:
    talk = Talk()
    busy(talk, 5, share=1)
    stay(talk, 60)
    assert talk.closing is None


def test_pulls_that_waited_too_long_count_as_busy() -> None:
    talk = Talk()
    talk.receive(sync(0))
    for number in range(12):
        talk.receive(sync(number + 1))
        stay(talk, 2)
    stay(talk, 10)
    assert talk.closing is CloseReason.OVERLOADED


@pytest.mark.covers("000 contract 4: clients with stale state")
def test_acks_that_stay_behind_for_sixty_seconds_get_one_resync_then_a_close() -> None:
    talk = Talk().live(0)
    talk.deliver(run(1, 3))
    payloads = stay(talk, 30)
    assert not [p for p in payloads if isinstance(p, Resync)]
    payloads = stay(talk, 89)
    assert [p for p in payloads if isinstance(p, Resync)] == [Resync([ChatHead("chat_1", 3)])]
    assert talk.effects.count(Emit(SessionEvent.ACKS_STALE)) == 1
    assert talk.closing is None
    stay(talk, 40)
    assert talk.closing is CloseReason.STATE_DIVERGED


def test_a_client_that_acks_after_the_resync_stays() -> None:
    talk = Talk().live(0)
    talk.deliver(run(1, 3))
    stay(talk, 100)
    assert talk.count(Emit) == 1
    talk.receive(sync(3))
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(3, 3), talk.now))
    stay(talk, 300)
    assert talk.closing is None
    talk.deliver(run(4))
    assert [p for p in talk.read() if isinstance(p, Message)], "live again"


def test_a_client_whose_acks_move_is_not_stale() -> None:
    talk = Talk().live(0)
    for number in range(1, 20):
        talk.deliver(run(number * 2 - 1, number * 2))
        stay(talk, 30)
        talk.receive(Ack(payload=AckBody("chat_1", 1, number)))
    assert talk.closing is None
    assert talk.count(Emit) == 0


def test_messages_still_in_the_buffer_do_not_make_acks_stale() -> None:
    talk = Talk().live(0)
    talk.deliver(run(1, 3))
    for _ in range(20):
        talk.wait(15)
        talk.session._outbound.lanes.control.clear()
        talk.receive(HeartbeatAck())
    assert talk.closing is None


@pytest.mark.parametrize("early", [0.0, 0.5, 3.0])
def test_calling_tick_early_is_harmless(early: float) -> None:
    talk = Talk()
    for _ in range(5):
        assert talk.tick(early) == []


def test_a_closed_session_needs_no_tick() -> None:
    talk = Talk()
    talk.do(talk.session.close(CloseReason.ROTATION))
    assert talk.session.next_tick == float("inf")
    assert talk.tick(1000) == []


def state_of(*things: ChatProgress | Beats) -> list[object]:
    return [deepcopy(getattr(thing, name)) for thing in things for name in thing.__slots__]


@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("through", range(4))
@pytest.mark.parametrize("heard", range(4))
def test_a_head_is_known_exactly_if_it_would_change_nothing(
    lagged: bool, through: int, heard: int
) -> None:
    for head in (Cursor(epoch, sequence) for epoch in (1, 2) for sequence in range(5)):
        place, heartbeat = ChatProgress(Cursor(1, 0)), Beats(TimeoutSettings(), first=30)
        if lagged:
            heartbeat.compare("chat", place, Cursor(1, 3), now=0)
        place.raise_head(heard)
        place.settle(Page("chat", 1, (), through, has_more=False, head=through))
        known, before = heartbeat.knows("chat", place, head), state_of(place, heartbeat)
        heartbeat.compare("chat", place, head, now=1)
        assert known == (state_of(place, heartbeat) == before), (head, before)
