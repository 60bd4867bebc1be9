"""The rules by which fragments become messages, one test each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire.assembler import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    Assembler,
    BrokenProtocol,
    control,
)

KIB = 1024


def assembler() -> Assembler:
    return Assembler(bytes_max=64 * KIB, fragments_max=16)


def feed(to: Assembler, opcode: int, payload: bytes, *, final: bool = True) -> bytes | None:
    return to.feed(opcode, final, False, payload)


def test_a_single_frame_is_a_message() -> None:
    assert feed(assembler(), TEXT, b"{}") == b"{}"


def test_fragments_are_joined_in_order_and_the_next_message_is_separate() -> None:
    to = assembler()
    assert feed(to, TEXT, b"a", final=False) is None
    assert feed(to, CONTINUATION, b"b", final=False) is None
    assert feed(to, CONTINUATION, b"c") == b"abc"
    assert feed(to, TEXT, b"d") == b"d"


@pytest.mark.parametrize("opcode", [PING, PONG, CLOSE])
def test_a_control_frame_is_answered_with_what_it_carried(opcode: int) -> None:
    assert control(opcode, True, False, b"") == b""
    assert control(opcode, True, False, b"\x03\xe8bye") == b"\x03\xe8bye"


def test_a_fragmented_long_or_reserved_control_frame_breaks_the_protocol() -> None:
    with pytest.raises(BrokenProtocol, match="fragmented"):
        control(PING, False, False, b"")
    with pytest.raises(BrokenProtocol, match="125"):
        control(PING, True, False, b"x" * 126)
    with pytest.raises(BrokenProtocol, match="reserved"):
        control(PING, True, True, b"")
    with pytest.raises(BrokenProtocol, match="opcode 11"):
        control(0xB, True, False, b"")
    assert control(PING, True, False, b"x" * 125)


@pytest.mark.parametrize("code", [0, 999, 1004, 1005, 1006, 1015, 2999, 5000])
def test_a_close_code_that_must_not_be_sent_breaks_the_protocol(code: int) -> None:
    with pytest.raises(BrokenProtocol, match="must not be sent"):
        control(CLOSE, True, False, code.to_bytes(2, "big"))


@pytest.mark.parametrize("payload", [b"\x03", b"\x03\xe8\xff"])
def test_half_a_close_code_or_a_reason_that_is_no_text_breaks_the_protocol(payload: bytes) -> None:
    with pytest.raises(BrokenProtocol):
        control(CLOSE, True, False, payload)


def test_sixteen_fragments_are_allowed_and_seventeen_are_not() -> None:
    to = assembler()
    feed(to, TEXT, b"0", final=False)
    for _ in range(14):
        feed(to, CONTINUATION, b"0", final=False)
    assert feed(to, CONTINUATION, b"0") == b"0" * 16
    feed(to, TEXT, b"0", final=False)
    for _ in range(15):
        feed(to, CONTINUATION, b"", final=False)
    with pytest.raises(BrokenProtocol, match="16 fragments"):
        feed(to, CONTINUATION, b"")


def test_a_message_has_64_kib_in_all_and_no_more() -> None:
    assert feed(assembler(), TEXT, b"x" * 64 * KIB) == b"x" * 64 * KIB
    with pytest.raises(BrokenProtocol, match="larger"):
        feed(assembler(), TEXT, b"x" * (64 * KIB + 1))
    to = assembler()
    feed(to, TEXT, b"x" * 40 * KIB, final=False)
    with pytest.raises(BrokenProtocol, match="larger"):
        feed(to, CONTINUATION, b"x" * 40 * KIB, final=False)


def test_the_size_of_one_message_does_not_count_against_the_next() -> None:
    to = assembler()
    for _ in range(3):
        feed(to, TEXT, b"x" * 40 * KIB, final=False)
        assert feed(to, CONTINUATION, b"x" * 24 * KIB) is not None


def test_a_continuation_needs_a_beginning() -> None:
    with pytest.raises(BrokenProtocol, match="continuation"):
        feed(assembler(), CONTINUATION, b"x")


def test_a_message_must_end_before_the_next_begins() -> None:
    to = assembler()
    feed(to, TEXT, b"a", final=False)
    with pytest.raises(BrokenProtocol, match="before the last"):
        feed(to, TEXT, b"b")


def test_only_text_is_spoken() -> None:
    with pytest.raises(BrokenProtocol, match="binary"):
        feed(assembler(), BINARY, b"x")
    with pytest.raises(BrokenProtocol, match="opcode 3"):
        feed(assembler(), 3, b"x")


def test_reserved_bits_must_be_zero() -> None:
    with pytest.raises(BrokenProtocol, match="reserved"):
        assembler().feed(TEXT, True, True, b"x")


def test_text_must_be_utf8_over_its_fragments_not_within_each() -> None:
    with pytest.raises(BrokenProtocol, match="UTF-8"):
        feed(assembler(), TEXT, b"\xff")
    to = assembler()
    both = "é".encode()
    feed(to, TEXT, both[:1], final=False)
    assert feed(to, CONTINUATION, both[1:]) == both


@given(
    st.lists(
        st.tuples(st.integers(0, 15), st.booleans(), st.booleans(), st.binary(max_size=200)),
        max_size=60,
    )
)
def test_any_fragments_end_in_a_message_or_a_broken_protocol(
    frames: list[tuple[int, bool, bool, bytes]],
) -> None:
    to = assembler()
    for frame in frames:
        try:
            message = to.feed(*frame)
        except BrokenProtocol:
            return
        assert message is None or len(message) <= 64 * KIB
