"""Requests: validation, then rate, then queue; every one is answered."""

from __future__ import annotations

import pytest
from session_driver import Talk, acked, page, run, send, sync

from holdfast.errors import (
    ChatHalted,
    HoldfastError,
    InvalidMessage,
    OutcomeUnknown,
    ServerBusy,
    Unauthorized,
    Unavailable,
)
from holdfast.message import Cursor, Page, ResumeRead
from holdfast.session.effects import Close, Effect, Fetch, FetchResume, IsTyping, Submit, Verify
from holdfast.session.settings import BackpressureSettings, InboundSettings, SessionSettings
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.frames import (
    Ack,
    AckBody,
    AnyClientFrame,
    Authenticate,
    AuthenticateBody,
    Authenticated,
    ChatBody,
    ConnectionClosing,
    ConnectionEstablished,
    CursorClaim,
    Error,
    HeartbeatAck,
    MessageAck,
    Read,
    ReadBody,
    Resume,
    ResumeBody,
    SendMessage,
    SyncBody,
    SyncRequest,
    TypingStart,
    TypingStop,
)

BAD_IDS = ["", "x" * 65, "with space", "é", "new\nline"]


def test_hello_names_the_connection_and_its_limits() -> None:
    talk = Talk(established=False)
    talk.do(talk.session.establish({}, "2026-01-01T00:00:00.000Z"))
    (hello,) = talk.read()
    assert isinstance(hello, ConnectionEstablished)
    assert (hello.connection_id, hello.user_id, hello.device_id) == ("conn_1", "ann", "phone")
    assert (hello.heartbeat_interval_ms, hello.protocol_version) == (30_000, 1)
    assert hello.limits["max_message_size_bytes"] == 4096


def test_a_send_is_submitted_and_acked_when_it_is_stored() -> None:
    talk = Talk()
    (submit,) = talk.receive(send("c7"))
    assert isinstance(submit, Submit)
    assert submit.body == send("c7").payload
    assert talk.read() == [], "no ack before the outcome"
    talk.do(talk.session.on_send_result(submit.token, acked(7), talk.now))
    (frame,) = talk.take()
    assert frame.request_id == "r-c7"
    assert isinstance(frame.payload, MessageAck)
    assert (frame.payload.sequence, frame.payload.client_message_id) == (7, "c7")
    assert talk.do(talk.session.on_send_result(submit.token, acked(7), talk.now)) == [], (
        "answered once"
    )


def test_a_retry_is_acked_as_deduplicated() -> None:
    talk = Talk()
    talk.receive(send())
    talk.do(
        talk.session.on_send_result(talk.last(Submit).token, acked(7, deduplicated=True), talk.now)
    )
    (ack,) = talk.read()
    assert isinstance(ack, MessageAck)
    assert ack.deduplicated


@pytest.mark.covers("000 contract 1, rejected: `error` with a code")
@pytest.mark.parametrize(
    ("frame", "code"),
    [
        *[(send(bad), "INVALID_MESSAGE") for bad in BAD_IDS],
        *[(send(chat_id=bad), "INVALID_MESSAGE") for bad in BAD_IDS],
        (send(content=""), "INVALID_MESSAGE"),
        (send(content="x" * 4097), "MESSAGE_TOO_LARGE"),
        (send(content="é" * 2049), "MESSAGE_TOO_LARGE"),
        (send(kind="text/html"), "INVALID_CONTENT_TYPE"),
        (sync(0, chat_id=""), "INVALID_MESSAGE"),
        (sync(0, limit=501), "INVALID_MESSAGE"),
        (Ack(payload=AckBody("", 1, 1)), "INVALID_MESSAGE"),
        (Read(payload=ReadBody("a b", 1)), "INVALID_MESSAGE"),
        (TypingStart(payload=ChatBody("")), "INVALID_MESSAGE"),
        (TypingStop(payload=ChatBody("")), "INVALID_MESSAGE"),
        (Resume(payload=ResumeBody({"": CursorClaim(1, 1)})), "INVALID_MESSAGE"),
        (
            Resume(payload=ResumeBody({f"c{n}": CursorClaim(1, 1) for n in range(501)})),
            "INVALID_MESSAGE",
        ),
        (Authenticate(payload=AuthenticateBody("t", "")), "INVALID_MESSAGE"),
        (Authenticate(payload=AuthenticateBody("t", "laptop")), "INVALID_MESSAGE"),
        (TypingStart(payload=ChatBody("chat_9")), "NOT_A_MEMBER"),
    ],
)
def test_invalid_frame_is_refused_and_goes_no_further(frame: AnyClientFrame, code: str) -> None:
    talk = Talk()
    effects = talk.receive(frame)
    assert not [
        e for e in effects if isinstance(e, Submit | Fetch | FetchResume | Verify | IsTyping)
    ]
    assert talk.errors() == [code]
    assert talk.session.open_requests == 0


@pytest.mark.covers("000 message size 4 KB")
@pytest.mark.parametrize("content", ["x", "x" * 4096, "é" * 2048, "𝄞" * 1024])
def test_content_of_1_to_4096_bytes_is_taken(content: str) -> None:
    talk = Talk()
    talk.receive(send(content=content))
    assert talk.count(Submit) == 1


def test_a_bad_request_id_is_refused_and_not_echoed() -> None:
    talk = Talk()
    talk.receive(SendMessage(request_id="x" * 5000, payload=send().payload))
    (frame,) = talk.take()
    assert frame.request_id is None
    assert isinstance(frame.payload, Error)
    assert frame.payload.code == "INVALID_MESSAGE"


@pytest.mark.covers("000 exceed rate limit: RATE_LIMITED")
def test_exceed_rate_limit_verify_rate_limited_response() -> None:
    talk = Talk()
    for number in range(20):
        talk.receive(send(f"c{number}"))
    assert talk.count(Submit) == 20
    talk.receive(send("c20"))
    (frame,) = talk.take()
    assert isinstance(frame.payload, Error)
    assert (frame.payload.code, frame.payload.retryable, frame.payload.outcome) == (
        "RATE_LIMITED",
        True,
        "rejected",
    )
    assert frame.request_id == "r-c20"
    assert frame.payload.details == {"client_message_id": "c20"}
    wait = frame.payload.retry_after_seconds
    assert wait is not None
    talk.now += wait
    talk.receive(send("c20"))
    assert talk.count(Submit) == 21, "waiting for retry_after_seconds is enough"


@pytest.mark.covers("000 send rate 10/s")
def test_ten_sends_a_second_are_sustained() -> None:
    talk = Talk()
    for number in range(200):
        talk.receive(send(f"c{number}"))
        talk.do(talk.session.on_send_result(talk.last(Submit).token, acked(1), talk.now))
        talk.now += 0.1
    assert talk.count(Submit) == 200


def test_other_frames_have_a_rate_of_their_own() -> None:
    talk = Talk()
    for _ in range(100):
        talk.receive(TypingStart(payload=ChatBody("chat_1")))
    assert talk.count(IsTyping) == 100
    talk.receive(sync(0))
    assert talk.errors() == ["RATE_LIMITED"]
    talk.receive(send())
    assert talk.count(Submit) == 1


def test_flood_of_frames_without_response_gets_one_error_a_second() -> None:
    talk = Talk()
    for _ in range(1000):
        talk.receive(TypingStart(payload=ChatBody("chat_1")))
    assert talk.errors() == ["RATE_LIMITED"]
    talk.now += 1
    for _ in range(1000):
        talk.receive(TypingStart(payload=ChatBody("chat_1")))
    assert talk.errors() == ["RATE_LIMITED"]


def test_pings_count_and_get_a_rate_error() -> None:
    talk = Talk()
    assert [talk.session.on_ping(talk.now) for _ in range(101)] == [True] * 100 + [False]
    assert talk.session.next_tick <= talk.now
    talk.tick()
    assert talk.errors() == ["RATE_LIMITED"]
    talk.now += 1
    assert talk.session.on_ping(talk.now)


def test_the_answer_to_a_heartbeat_is_never_refused() -> None:
    talk = Talk()
    for _ in range(200):
        talk.receive(TypingStart(payload=ChatBody("chat_1")))
    talk.tick(30)
    for _ in range(200):
        talk.receive(TypingStart(payload=ChatBody("chat_1")))
    talk.receive(HeartbeatAck())
    talk.wait(29)
    assert talk.closing is None


@pytest.mark.parametrize(
    ("error", "code"), [(Unavailable, "SERVICE_UNAVAILABLE"), (ServerBusy, "SERVER_BUSY")]
)
def test_send_that_must_wait_is_told_how_long(error: type[HoldfastError], code: str) -> None:
    talk = Talk()
    talk.receive(send("one"))
    refusal = error("not now", retry_after_seconds=7.5)
    talk.do(talk.session.on_send_result(talk.last(Submit).token, refusal, talk.now))
    (frame,) = talk.take()
    assert isinstance(frame.payload, Error)
    assert (frame.payload.code, frame.payload.retry_after_seconds) == (code, 7.5)


def hold(talk: Talk, count: int) -> None:
    """Sends that ingest does not answer; slowly enough for the rate."""
    for number in range(count):
        talk.receive(send(f"held{number}"))
        talk.now += 0.1


@pytest.mark.covers("000 fill request queue: SERVER_BUSY")
def test_fill_request_queue_verify_server_busy_response() -> None:
    talk = Talk()
    hold(talk, 100)
    assert talk.count(Submit) == 100
    assert talk.errors() == []
    talk.receive(send("one-more"))
    (frame,) = talk.take()
    assert isinstance(frame.payload, Error)
    assert (frame.payload.code, frame.payload.retry_after_seconds) == ("SERVER_BUSY", 1)
    assert talk.session.open_requests == 100
    talk.do(talk.session.on_send_result(talk.last(Submit).token, acked(1), talk.now))
    talk.now += 1
    talk.receive(send("again"))
    assert talk.count(Submit) == 101


@pytest.mark.covers("000 1.1 order of refusals")
def test_refusals_come_in_order_validation_rate_queue() -> None:
    talk = Talk()
    hold(talk, 100)
    for number in range(20):
        talk.receive(send(f"c{number}"))
    talk.read()
    talk.receive(send(kind="text/html"))
    talk.receive(send())
    talk.now += 1
    talk.receive(send())
    assert talk.errors() == ["INVALID_CONTENT_TYPE", "RATE_LIMITED", "SERVER_BUSY"]


def test_pulls_are_done_one_at_a_time_in_order() -> None:
    talk = Talk({"chat_1": Cursor(1, 2), "chat_2": Cursor(1, 2)})
    talk.receive(sync(0))
    talk.receive(sync(0, chat_id="chat_2"))
    talk.receive(Resume(payload=ResumeBody({})))
    assert talk.count(Fetch) == 1
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(0, 2), talk.now))
    assert talk.count(Fetch) == 1, "a page counts until it is taken"
    assert isinstance(talk.read()[0], Page)
    assert talk.last(Fetch).chat_id == "chat_2"
    assert talk.count(FetchResume) == 0
    talk.do(talk.session.on_page(talk.last(Fetch).token, ServerBusy("no"), talk.now))
    assert talk.count(FetchResume) == 1, "an error occupies no page lane"


@pytest.mark.covers("000 inbound queue, age")
def test_a_pull_waits_two_seconds_at_most() -> None:
    talk = Talk()
    talk.receive(sync(0))
    talk.now += 1
    talk.receive(sync(1))
    talk.wait(1.9)
    assert talk.errors() == []
    talk.wait(0.1)
    (frame,) = talk.take()
    assert isinstance(frame.payload, Error)
    assert (frame.payload.code, frame.request_id) == ("SERVER_BUSY", "r-chat_1-1")
    assert frame.payload.retry_after_seconds == 1
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(0, 0), talk.now))
    assert len(talk.read()) == 1, "the one under way is not touched"
    assert talk.session.open_requests == 0


def test_a_page_nobody_takes_holds_back_only_pulls() -> None:
    talk = Talk()
    talk.receive(sync(0))
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(0, 0), talk.now))
    talk.receive(sync(0))
    talk.receive(send())
    assert talk.count(Submit) == 1
    assert talk.count(Fetch) == 1


def test_a_sync_asks_for_100_messages_unless_it_says_otherwise() -> None:
    talk = Talk()
    talk.receive(SyncRequest(payload=SyncBody("chat_1", 1, 7)))
    assert (talk.last(Fetch).limit, talk.last(Fetch).cursor) == (100, Cursor(1, 7))
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(7, 7), talk.now))
    talk.read()
    talk.receive(sync(7, limit=500))
    assert talk.last(Fetch).limit == 500


def test_a_resume_has_at_most_5000_cursors_over_all_its_frames() -> None:
    talk = Talk()
    for frame in range(11):
        talk.now += 1
        body = ResumeBody({f"chat_{frame}_{n}": CursorClaim(1, 0) for n in range(500)}, more=True)
        talk.receive(Resume(request_id=f"r{frame}", payload=body))
    (refusal,) = talk.take()
    assert isinstance(refusal.payload, Error)
    assert (refusal.payload.code, refusal.request_id) == ("INVALID_MESSAGE", "r10")


def test_resume_with_a_refused_frame_is_refused_to_its_end() -> None:
    """A partial answer would name chats as joined that the client has."""
    talk = Talk()
    talk.receive(
        Resume(request_id="r1", payload=ResumeBody({"chat_1": CursorClaim(1, 0)}, more=True))
    )
    talk.receive(Resume(request_id="r2", payload=ResumeBody({"": CursorClaim(1, 0)}, more=True)))
    talk.receive(
        Resume(request_id="r3", payload=ResumeBody({"chat_2": CursorClaim(1, 0)}, more=True))
    )
    talk.receive(Resume(request_id="r4", payload=ResumeBody({"chat_3": CursorClaim(1, 0)})))
    refused = [(f.request_id, f.payload.code) for f in talk.take() if isinstance(f.payload, Error)]
    assert refused == [
        ("r2", "INVALID_MESSAGE"),
        ("r3", "SERVICE_UNAVAILABLE"),
        ("r4", "SERVICE_UNAVAILABLE"),
    ]
    assert talk.count(FetchResume) == 0
    talk.receive(Resume(payload=ResumeBody({"chat_1": CursorClaim(1, 0)})))
    assert talk.last(FetchResume).cursors == {"chat_1": Cursor(1, 0)}


def test_a_refreshed_token_moves_the_expiry() -> None:
    talk = Talk(expires_at=10)
    talk.receive(Authenticate(request_id="r", payload=AuthenticateBody("new", "phone")))
    verify = talk.last(Verify)
    assert verify.credential == "new"
    talk.do(talk.session.on_token_checked(verify.token, 20.0, talk.now))
    assert talk.read() == [Authenticated(20_000)]
    talk.wait(15)
    assert talk.closing is None
    talk.wait(5)
    assert talk.closing is CloseReason.TOKEN_EXPIRED


def test_a_refused_token_leaves_the_old_one() -> None:
    talk = Talk(expires_at=10)
    talk.receive(Authenticate(payload=AuthenticateBody("of bob")))
    talk.do(
        talk.session.on_token_checked(
            talk.last(Verify).token, Unauthorized("another user"), talk.now
        )
    )
    assert talk.errors() == ["UNAUTHORIZED"]
    talk.wait(9.9)
    assert talk.closing is None
    talk.wait(0.1)
    assert talk.closing is CloseReason.TOKEN_EXPIRED


def test_typing_is_passed_on() -> None:
    talk = Talk()
    assert talk.receive(TypingStart(payload=ChatBody("chat_1"))) == [IsTyping("chat_1", True)]
    assert talk.receive(TypingStop(payload=ChatBody("chat_1"))) == [IsTyping("chat_1", False)]


def test_ten_invalid_frames_in_sixty_seconds_close() -> None:
    talk = Talk()
    for _ in range(9):
        talk.do(talk.session.on_invalid_frame(InvalidMessage("what?"), "r1", talk.now))
        talk.now += 6
    assert talk.closing is None
    assert talk.errors() == ["INVALID_MESSAGE"] * 9
    talk.do(talk.session.on_invalid_frame(InvalidMessage("what?"), None, talk.now))
    assert talk.closing is CloseReason.PROTOCOL_ERROR
    assert talk.errors() == ["INVALID_MESSAGE"], "the tenth is answered too"


def test_invalid_frames_that_are_far_apart_do_not_close() -> None:
    talk = Talk()
    for _ in range(50):
        talk.do(talk.session.on_invalid_frame(InvalidMessage("what?"), None, talk.now))
        talk.now += 6.7
    assert talk.closing is None


def test_content_that_is_too_large_is_no_reason_to_close() -> None:
    talk = Talk()
    for number in range(50):
        talk.receive(send(f"c{number}", content="x" * 5000))
    assert talk.closing is None


@pytest.mark.covers("000 no_silent_message_loss")
def test_no_silent_message_loss() -> None:
    """Every send gets an ack or an error: refused, stored, failed, unknown, or open
    when the connection closes.
    """
    talk = Talk()
    asked = [send(f"c{n}", content="x" * (5000 if n % 7 == 0 else 1)) for n in range(40)]
    tokens = []
    for frame in asked:
        tokens += [effect.token for effect in talk.receive(frame) if isinstance(effect, Submit)]
    outcomes = [acked(1), ChatHalted("halted"), OutcomeUnknown("who knows")]
    for token, outcome in zip(tokens[:9], outcomes * 3, strict=True):
        talk.do(talk.session.on_send_result(token, outcome, talk.now))
    talk.do(talk.session.close(CloseReason.SERVER_SHUTDOWN, 700))
    frames = talk.take()
    assert isinstance(frames[-1].payload, ConnectionClosing)
    answered = [frame.request_id for frame in frames[:-1]]
    assert sorted(answered, key=str) == sorted((frame.request_id for frame in asked), key=str)
    for frame in frames[:-1]:
        assert isinstance(frame.payload, MessageAck | Error)
    late = [
        f.payload
        for f in frames[:-1]
        if isinstance(f.payload, Error) and "closes" in f.payload.message
    ]
    assert {(error.code, error.outcome, error.retryable) for error in late} == {
        ("SERVICE_UNAVAILABLE", "unknown", True)
    }
    assert len(late) == len(tokens) - 9
    for token in tokens:
        assert talk.do(talk.session.on_send_result(token, acked(1), talk.now)) == [], (
            "a late outcome goes nowhere"
        )


def test_before_a_close_pulls_and_refreshes_are_answered_too() -> None:
    talk = Talk()
    talk.receive(sync(0))
    talk.receive(sync(1))
    talk.receive(Authenticate(request_id="r-auth", payload=AuthenticateBody("t")))
    fetch, verify = talk.last(Fetch), talk.last(Verify)
    talk.do(talk.session.close(CloseReason.ROTATION))
    frames = talk.take()
    assert [frame.request_id for frame in frames] == ["r-chat_1-0", "r-chat_1-1", "r-auth", None]
    assert {f.payload.code for f in frames[:-1] if isinstance(f.payload, Error)} == {
        "SERVICE_UNAVAILABLE"
    }
    late: list[Effect] = [
        *talk.do(talk.session.on_page(fetch.token, page(0, 3), talk.now)),
        *talk.do(talk.session.on_page(fetch.token, ResumeRead([], [], [], {}), talk.now)),
        *talk.do(talk.session.on_token_checked(verify.token, 5.0, talk.now)),
        *talk.receive(send()),
        *talk.do(talk.session.on_invalid_frame(InvalidMessage("x"), None, talk.now)),
        *talk.do(talk.session.on_membership("chat_2", Cursor(1, 1))),
        *talk.do(talk.session.ephemeral("key", b"x")),
        *talk.deliver(run(1)),
    ]
    assert late == []
    assert talk.take() == []


def test_a_second_close_does_nothing() -> None:
    talk = Talk()
    assert talk.do(talk.session.close(CloseReason.SERVER_SHUTDOWN, 100, "bye"))[-1] == Close(
        CloseReason.SERVER_SHUTDOWN
    )
    assert talk.do(talk.session.close(CloseReason.ROTATION)) == []
    (words,) = talk.read()
    assert words == ConnectionClosing("server_shutdown", "bye", True, 100, {})


def test_the_queue_is_bounded_by_its_setting() -> None:
    talk = Talk(
        limits=SessionSettings(BackpressureSettings(inbound=InboundSettings(max_queue_depth=3)))
    )
    for number in range(5):
        talk.receive(send(f"c{number}"))
    assert talk.count(Submit) == 3
    assert talk.errors() == ["SERVER_BUSY"] * 2
