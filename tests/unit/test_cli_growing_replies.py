"""``chat open`` shows an assistant's reply while it grows, then its message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.rest import RestClient
from holdfast.cli.screen import GROWING_LINES_MAX, _last_lines
from holdfast.cli.terminal_chat import Room, TerminalChat
from holdfast.client import ClientEvent, ConnectionChanged, Message, ReplyProgress


class FakeScreen:
    """Records what is shown, and what grows after each change."""

    is_pipe = False

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.below: list[list[str]] = []

    def show(self, text: str) -> None:
        self.shown.append(text)

    def status(self, state: str, waiting: Sequence[str]) -> None:
        pass

    def growing(self, texts: Sequence[str]) -> None:
        self.below.append(list(texts))

    async def lines(self) -> AsyncIterator[str]:
        for line in ():
            yield line

    def close(self) -> None:
        pass


async def shown_for(*events: ClientEvent) -> FakeScreen:
    class FakeClient:
        async def events(self) -> AsyncIterator[ClientEvent]:
            for event in events:
                yield event

    client: Any = FakeClient()
    screen = FakeScreen()
    rest = RestClient("http://127.0.0.1:1", "token")
    room = Room(rest, lambda: "token", False, "c", 20, Path("unused"), as_json=False)
    chat = TerminalChat(room, screen, client, [])
    chat.begin({"messages": [], "epoch": 1, "head": 0})
    await chat.receive()
    return screen


def progress(text: str, state: Any = "running", reply_id: str = "r") -> ReplyProgress:
    return ReplyProgress("c", reply_id, "bot", text, state)


def message(key: str) -> Message:
    at = "2026-01-01T10:20:00.000Z"
    return Message("m", "c", 1, "text", "bot", key, "hello", "text/plain", at)


async def test_growing_text_is_replaced_by_its_message() -> None:
    screen = await shown_for(progress("hel"), progress("hello", "done"), message("r"))
    assert screen.below == [["bot: hel…"], ["bot: hello…"], []]
    assert screen.shown == ["10:20 bot: hello"]


async def test_another_message_leaves_the_growing_text() -> None:
    screen = await shown_for(progress("a"), progress("b", reply_id="r2"), message("other"))
    assert screen.below[-1] == ["bot: a…", "bot: b…"]


async def test_a_failed_reply_is_taken_away_and_named() -> None:
    screen = await shown_for(progress("a"), progress("a", "failed"))
    assert screen.below[-1] == []
    assert screen.shown == ["— bot could not reply —"]


async def test_a_lost_connection_takes_the_growing_text_away() -> None:
    screen = await shown_for(progress("a"), ConnectionChanged("disconnected"))
    assert screen.below[-1] == []


@pytest.mark.parametrize("text", ["", "x" * 19, "x" * 20, "漢" * 50, "a\nb\x1b[2J" * 20])
def test_growing_text_is_wrapped_to_the_terminal_and_shows_its_end(text: str) -> None:
    lines = _last_lines(text, 20)
    assert 1 <= len(lines) <= GROWING_LINES_MAX
    assert all(line.isprintable() for line in lines)
    assert all(sum(2 if c == "漢" else 1 for c in line) < 20 for line in lines)
    assert not text or lines[-1]
