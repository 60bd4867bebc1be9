"""What ``holdfast chat ls`` shows."""

from __future__ import annotations

from holdfast.cli.chats import _busiest, _unread


def test_the_busiest_chat_comes_first() -> None:
    assert _busiest({"chat_b": 120, "chat_a": 120, "chat_c": 900}) == [
        ("chat_c", 900),
        ("chat_a", 120),
        ("chat_b", 120),
    ]


def test_a_count_that_may_be_higher_says_so() -> None:
    assert [_unread({"unread": 40, "unread_capped": capped}) for capped in (False, True)] == [
        "40",
        "40+",
    ]
