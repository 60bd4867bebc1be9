"""A line typed at a terminal."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.line_editor import Ended, Entered, LineEditor
from holdfast.cli.output import message_line, printable


def typed(data: bytes) -> tuple[list[object], str]:
    editor = LineEditor()
    return list(editor.feed(data)), editor.text


def test_a_line_ends_with_enter() -> None:
    assert typed("grüße\rnext".encode()) == ([Entered("grüße")], "next")


def test_backspace_control_u_and_control_w_take_back() -> None:
    assert typed(b"abc\x7f\x08") == ([], "a")
    assert typed(b"abc\x15d") == ([], "d")
    assert typed(b"one two  \x17") == ([], "one ")
    assert typed(b"one\x17") == ([], "")


def test_control_d_leaves_only_from_an_empty_line() -> None:
    assert typed(b"\x04") == ([Ended()], "")
    assert typed(b"a\x04") == ([], "a")
    assert typed(b"a\x03") == ([Ended()], "a")


def test_escape_sequences_leave_no_trace() -> None:
    assert typed(b"a\x1b[A\x1b[1;5C\x1bOPb\x1b[3~c") == ([], "abc")


def test_characters_split_over_reads_are_put_together() -> None:
    editor = LineEditor()
    for byte in "ü€😀".encode():
        editor.feed(bytes([byte]))
    assert editor.text == "ü€😀"


@given(st.binary(max_size=200))
def test_no_input_makes_the_line_unprintable(data: bytes) -> None:
    editor = LineEditor()
    keys = editor.feed(data)
    assert editor.text.isprintable()
    assert all(key.text.isprintable() for key in keys if isinstance(key, Entered))


@given(st.text())
def test_text_of_others_cannot_drive_the_terminal(text: str) -> None:
    assert printable(text).isprintable()


def test_events_are_shown_in_words() -> None:
    def event(content: str) -> str:
        message = {
            "created_at": "2026-01-01T12:34:56.000Z",
            "kind": "event",
            "sender_id": "ann",
            "content": content,
        }
        return message_line(message)

    assert event('{"event":"member_added","user_id":"bob"}') == "12:34 — ann added bob"
    assert (
        event('{"event":"member_added","user_id":"bob","muted":true}')
        == "12:34 — ann added bob, still muted"
    )
    assert event('{"event":"member_removed","user_id":"ann"}') == "12:34 — ann left"
    assert event('{"event":"member_removed","user_id":"bob"}') == "12:34 — ann removed bob"
    assert (
        event('{"event":"member_removed","user_id":"bob","banned":true}')
        == "12:34 — ann banned bob"
    )
    assert event('{"event":"user_unbanned","user_id":"bob"}') == "12:34 — ann unbanned bob"
    assert event('{"event":"member_muted","user_id":"bob"}') == "12:34 — ann muted bob"
    assert (
        event('{"event":"role_changed","user_id":"bob","role":"admin"}')
        == "12:34 — ann made bob admin"
    )
    assert event('{"event":"chat_renamed","name":"den"}') == "12:34 — ann named the chat den"
    assert event("not json") == "12:34 — ann changed the chat"
