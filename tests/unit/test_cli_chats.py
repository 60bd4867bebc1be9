"""What ``holdfast chat list --hot`` shows first."""

from __future__ import annotations

from holdfast.cli.chats import _busiest


def test_the_busiest_chat_comes_first() -> None:
    assert _busiest({"chat_b": 120, "chat_a": 120, "chat_c": 900}) == [
        ("chat_c", 900),
        ("chat_a", 120),
        ("chat_b", 120),
    ]
