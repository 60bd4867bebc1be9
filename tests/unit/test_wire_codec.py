"""Bytes to frames and back: strict towards clients, tolerant of newer servers, and
never any other error.
"""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import (
    HoldfastError,
    InternalError,
    InvalidMessage,
    OutcomeUnknown,
    RateLimited,
    StateDirectory,
    UnreadableEvent,
)
from holdfast.message import Message, Page
from holdfast.wire.codec import (
    EncodedRun,
    decode_client_frame,
    decode_server_frame,
    encode_client_frame,
    encode_frame,
    encode_payload,
    error_payload,
    request_id_of,
    text_header,
)
from holdfast.wire.frames import (
    CLIENT_FRAMES,
    SERVER_PAYLOADS,
    Ack,
    AckBody,
    AnyClientFrame,
    Authenticate,
    AuthenticateBody,
    Authenticated,
    ChatBody,
    ChatHead,
    ConnectionClosing,
    ConnectionEstablished,
    CursorClaim,
    Error,
    Heartbeat,
    HeartbeatAck,
    MessageAck,
    Presence,
    Read,
    ReadBody,
    Receipt,
    ReplyTextDelta,
    ReplyTextState,
    Resume,
    ResumeBody,
    Resumed,
    ResumedChat,
    Resync,
    Sendable,
    SendBody,
    SendMessage,
    SyncBody,
    SyncRequest,
    Typing,
    TypingStart,
    TypingStop,
)

AT = "2026-01-01T00:00:00.000Z"


def message(sequence: int = 1, content: str = "hé\u2028llo") -> Message:
    return Message("msg_1", "chat_1", sequence, "text", "ann", "c1", content, "text/plain", AT)


CLIENT: list[AnyClientFrame] = [
    Authenticate(payload=AuthenticateBody("t", "phone")),
    SendMessage(request_id="r1", payload=SendBody("c1", "chat_1", "hello", "text/markdown")),
    Ack(payload=AckBody("chat_1", 1, 7)),
    Resume(
        request_id="r2",
        payload=ResumeBody({"a": CursorClaim(1, 7), "b": CursorClaim(1, 7, "00ff")}, more=True),
    ),
    SyncRequest(request_id="r3", payload=SyncBody("chat_1", 1, 7, 50)),
    HeartbeatAck(),
    TypingStart(payload=ChatBody("chat_1")),
    TypingStop(payload=ChatBody("chat_1")),
    Read(payload=ReadBody("chat_1", 7)),
]
SERVER: list[Sendable] = [
    message(),
    Page("chat_1", 1, [message()], 1, False, 1),
    ConnectionEstablished("conn_1", "ann", "phone", AT, 30000, 1, {"max_frame_bytes": 65536}),
    Authenticated(1000),
    MessageAck("c1", "msg_1", "chat_1", 1, AT, False),
    Resumed([ResumedChat("chat_1", 1, 1, [message()], 1, False, False)], ["chat_2"], ["chat_3"]),
    Resync([ChatHead("chat_1", 9)]),
    Heartbeat({"chat_1": (1, 9)}),
    Typing("chat_1", "ann", True),
    Presence("ann", "online", AT),
    Receipt("chat_1", "ann", 4, 3),
    ReplyTextDelta("chat_1", "r1", 5, 1, 3, "hel"),
    ReplyTextState("chat_1", "r1", "bot", 5, 0, 4, "hello", "done"),
    error_payload(RateLimited("slower", retry_after_seconds=1.5)),
    ConnectionClosing("rotation", "old", True, 0, {"chat_1": 4}),
]


def name_of(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("frame", CLIENT, ids=name_of)
def test_a_client_frame_survives_the_way(frame: AnyClientFrame) -> None:
    assert decode_client_frame(encode_client_frame(frame)) == frame


@pytest.mark.parametrize("payload", SERVER, ids=name_of)
def test_a_server_frame_survives_the_way_with_and_without_a_request(payload: Sendable) -> None:
    for request_id in (None, 'r"1'):
        frame = decode_server_frame(encode_payload(payload, request_id))
        assert frame is not None
        assert frame.payload == payload
        assert frame.request_id == request_id


def test_these_are_all_frames() -> None:
    assert {type(frame) for frame in CLIENT} == set(CLIENT_FRAMES.values())
    assert {type(payload) for payload in SERVER} == set(SERVER_PAYLOADS.values())


def test_every_frame_says_what_it_is_for() -> None:
    """The protocol reference is generated from these."""
    for kind in [*CLIENT_FRAMES.values(), *SERVER_PAYLOADS.values()]:
        assert (vars(kind)["__doc__"] or "").strip().endswith("."), kind


def test_a_frame_is_an_envelope_of_type_request_and_payload() -> None:
    assert json.loads(encode_payload(Typing("chat_1", "ann", True), "r1")) == {
        "type": "typing",
        "request_id": "r1",
        "payload": {"chat_id": "chat_1", "user_id": "ann", "active": True},
    }
    assert "request_id" not in json.loads(encode_payload(message()))


@pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536])
def test_header_of_a_text_frame_holds_its_size(size: int) -> None:
    header = text_header(size)
    assert header[0] == 0x81
    if size < 126:
        assert header[1:] == bytes([size])
    elif size < 65536:
        assert header[1:] == b"\x7e" + size.to_bytes(2, "big")
    else:
        assert header[1:] == b"\x7f" + size.to_bytes(8, "big")


def test_a_run_is_the_frames_of_its_messages_one_after_the_other() -> None:
    run = EncodedRun([message(4), message(5), message(6)], 1)
    assert (run.chat_id, run.first, run.last, run.count, run.size) == (
        "chat_1",
        4,
        6,
        3,
        len(run.data),
    )
    assert run.data == encode_frame(message(4)) + encode_frame(message(5)) + encode_frame(
        message(6)
    )
    rest = run.after(4)
    assert (rest.first, rest.last, rest.data) == (
        5,
        6,
        encode_frame(message(5)) + encode_frame(message(6)),
    )


def test_an_unknown_type_or_field_of_a_newer_server_is_passed_over() -> None:
    assert decode_server_frame(b'{"type":"song","payload":{"x":[1]}}') is None
    frame = decode_server_frame(
        b'{"type":"heartbeat","new":1,"payload":{"heads":{},"mood":"fine"}}'
    )
    assert frame is not None
    assert frame.payload == Heartbeat({})


@pytest.mark.parametrize(
    "data",
    [
        b'{"type":"nonsense","payload":{}}',
        b'{"type":"ack","payload":{"chat_id":"c","epoch":1,"sequence":1,"extra":1}}',
        b'{"type":"ack","extra":1,"payload":{"chat_id":"c","epoch":1,"sequence":1}}',
        b'{"type":"ack","payload":{"chat_id":"c","epoch":1,"sequence":"1"}}',
        b'{"type":"ack","payload":{"chat_id":"c","epoch":1,"sequence":1.5}}',
        b'{"type":"ack","payload":{"chat_id":"c","epoch":1,"sequence":1e999}}',
        b'{"type":"ack","payload":{"chat_id":"c","epoch":1}}',
        b'{"type":"ack"}',
        b'{"type":"resume","payload":{"cursors":{"c":[1]}}}',
        b'{"type":"resume","payload":{"cursors":{"c":[1,2,3]}}}',
        b'{"type":"resume","payload":{"cursors":{"c":[1,2,"00ff",4]}}}',
        b'{"type":"sync_request","payload":{"chat_id":"c","epoch":1,"after_sequence":1,"proof":2}}',
        b'{"payload":{}}',
        b"[]",
        b"",
        b"null",
        b'{"type":"typing_start","payload":{"chat_id":"\\ud800"}}',
        b'{"type":"typing_start","payload":{"chat_id":"\xff"}}',
        b'{"type":"typing_start","payload":{"chat_id":"\xed\xa0\x80"}}',
        b'{"type":"typing_start","payload":{"chat_id":"c"}} trailing',
    ],
)
def test_a_client_frame_that_is_not_exactly_right_is_invalid(data: bytes) -> None:
    with pytest.raises(InvalidMessage) as caught:
        decode_client_frame(data)
    encode_payload(error_payload(caught.value))


def test_the_request_of_a_bad_frame_is_still_named() -> None:
    assert request_id_of(b'{"type":"nonsense","request_id":"r7","payload":[1,2]}') == "r7"
    assert request_id_of(b'{"type":"nonsense","request_id":7}') is None
    assert request_id_of(b"nonsense") is None


def test_an_error_of_a_send_says_which_send_and_whether_it_may_have_happened() -> None:
    error = error_payload(
        OutcomeUnknown("no answer", stored=True), of_send=True, client_message_id="c1"
    )
    assert (error.code, error.retryable, error.outcome) == ("SERVICE_UNAVAILABLE", True, "unknown")
    assert error.details == {"stored": True, "client_message_id": "c1"}
    assert error_payload(RateLimited("x"), of_send=True).outcome == "rejected"
    assert error_payload(RateLimited("x")).outcome is None
    assert isinstance(error, Error)


def only_invalid(data: bytes) -> None:
    """Decoding ends in a frame or an InvalidMessage; naming the request never fails."""
    for decode in (decode_client_frame, decode_server_frame):
        try:
            decode(data)
        except InvalidMessage as error:
            encode_payload(error_payload(error))
    request_id = request_id_of(data)
    assert request_id is None or isinstance(request_id, str)


@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    only_invalid(data)


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20)
)
trees = st.recursive(
    scalars | st.just(10**400) | st.just(-(2**63) - 1) | st.just(2**64),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.sampled_from([*CLIENT_FRAMES, *SERVER_PAYLOADS, "other"]), trees, trees)
def test_random_json_never_raises_anything_else(
    kind: str, request_id: object, payload: object
) -> None:
    only_invalid(json.dumps({"type": kind, "request_id": request_id, "payload": payload}).encode())


@given(st.sampled_from([*CLIENT, *SERVER]), st.randoms(use_true_random=False))
def test_a_damaged_frame_never_raises_anything_else(
    frame: AnyClientFrame | Sendable, rng: random.Random
) -> None:
    whole = (
        encode_client_frame(frame)
        if type(frame) in CLIENT_FRAMES.values()
        else encode_payload(frame)
    )  # type: ignore[arg-type]
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    only_invalid(bytes(data[: rng.randint(1, len(data))]))


@pytest.mark.parametrize(
    "bomb",
    [
        b"[" * 60_000,
        b'{"a":' * 12_000,
        b'{"type":"send_message","payload":' + b"[" * 60_000,
        b'{"type":"resume","payload":{"cursors":' + b'{"a":' * 10_000,
        b'{"request_id":' + b"[" * 60_000,
        b'{"type":"ack","payload":{"chat_id":"c","epoch":' + b"9" * 60_000 + b',"sequence":1}}',
        b'{"type":"ack","payload":{"chat_id":"c","epoch":1,"sequence":1' + b"0" * 4_200 + b"}}",
        b'{"type":"ack","payload":{"chat_id":"c","epoch":1,"sequence":1e' + b"9" * 60_000 + b"}}",
        b'{"type":"send_message","payload":{"content":"' + b"\\ud800" * 10_000 + b'"}}',
    ],
    ids=lambda bomb: bomb[:24].decode(),
)
def test_a_json_bomb_is_an_invalid_message(bomb: bytes) -> None:
    with pytest.raises(InvalidMessage):
        decode_client_frame(bomb)
    only_invalid(bomb)


@pytest.mark.covers("001 64-bit unsigned sequences")
@pytest.mark.parametrize("number", [-1, 2**53, 2**64, 10**300])
def test_an_epoch_or_sequence_stays_below_two_to_the_53rd(number: int) -> None:
    def frame(number: int) -> bytes:
        return b'{"type":"ack","payload":{"chat_id":"c","epoch":1,"sequence":%d}}' % number

    assert decode_client_frame(frame(2**53 - 1)) is not None
    with pytest.raises(InvalidMessage):
        decode_client_frame(frame(number))


@pytest.mark.parametrize(
    "error",
    [
        InternalError("UnicodeDecodeError: byte 0xff in position 175", file="/srv/chats.db"),
        StateDirectory("/srv/holdfast is read-only"),
        UnreadableEvent("no such kind", 0, 7, b"secret"),
    ],
)
def test_internal_errors_are_logged_and_not_sent_to_clients(error: HoldfastError) -> None:
    payload = error_payload(error, of_send=True, client_message_id="c1")
    assert (payload.code, payload.outcome, payload.details) == (
        "INTERNAL_ERROR",
        "unknown",
        {"client_message_id": "c1"},
    )
    assert payload.message == "something went wrong here; it is logged"


@pytest.mark.parametrize("content", [r"\ud83d", r"\uD83D and so on", r"\ude00", r"\ud83d\ud83d"])
def test_half_of_a_surrogate_pair_is_called_that(content: str) -> None:
    payload = f'{{"client_message_id": "c", "chat_id": "a", "content": "{content}"}}'
    with pytest.raises(InvalidMessage, match="one half of a surrogate pair"):
        decode_client_frame(f'{{"type": "send_message", "payload": {payload}}}'.encode())
    with pytest.raises(InvalidMessage, match="truncated"):
        decode_client_frame(b'{"type": "send_message", "payload": {')


@pytest.mark.parametrize("length", range(15))
def test_half_of_a_surrogate_pair_is_found_wherever_it_stands(length: int) -> None:
    for content in (rf"\ud83d{'x' * length}", rf"\ud83d\ude00{'x' * length}\uDE00"):
        with pytest.raises(InvalidMessage, match="one half of a surrogate pair"):
            decode_client_frame(f'{{"type": "heartbeat_ack", "request_id": "{content}"}}'.encode())
    for rest in (r"\q", "\n", ""):
        with pytest.raises(InvalidMessage, match="malformed"):
            decode_client_frame(
                rf'{{"type": "x", "request_id": "\ud83d\ude00{"x" * length}{rest}'.encode()
            )


def test_last_value_of_a_repeated_json_key_counts() -> None:
    frame = decode_client_frame(
        b'{"type": "typing_start", "payload": {"chat_id": "a", "chat_id": "b"}}'
    )
    assert isinstance(frame, TypingStart) and frame.payload.chat_id == "b"
