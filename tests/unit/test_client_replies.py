"""Growing replies in the client: from frames to events, and their messages."""

from __future__ import annotations

from holdfast.client import ReplyProgress
from holdfast.client.inbox import Inbox
from holdfast.client.replies import REPLIES_MAX, TEXT_MAX, GrowingTexts
from holdfast.message import Message
from holdfast.wire.frames import ReplyTextDelta, ReplyTextState, ReplyTextStatus


def state(
    text: str, to: int, status: ReplyTextStatus = "running", *, epoch: int = 1, reply: str = "r"
) -> ReplyTextState:
    return ReplyTextState("c", reply, "bot", epoch, 0, to, text, status)


def delta(first: int, to: int, text: str, *, epoch: int = 1) -> ReplyTextDelta:
    return ReplyTextDelta("c", "r", epoch, first, to, text)


def message(key: str | None = "r", sender_id: str = "bot") -> Message:
    return Message("m", "c", 1, "text", sender_id, key, "final", "text/plain", "")


def progress(text: str, status: ReplyTextStatus = "running") -> ReplyProgress:
    return ReplyProgress("c", "r", "bot", text, status)


def taken(inbox: Inbox) -> list[object]:
    events = []
    while (found := inbox.take()) is not None:
        events.append(found[0])
    return events


def test_events_carry_the_whole_text_so_far() -> None:
    texts = GrowingTexts()
    assert texts.on_frame(state("", 1)) == progress("")
    assert texts.on_frame(delta(1, 3, "hel")) == progress("hel")
    assert texts.on_frame(delta(3, 4, "lo")) == progress("hello")
    assert texts.on_frame(state("hello!", 5, "done")) == progress("hello!", "done")


def test_a_delta_that_does_not_continue_the_text_changes_nothing() -> None:
    texts = GrowingTexts()
    assert texts.on_frame(delta(1, 2, "unknown")) is None
    texts.on_frame(state("a", 2))
    for wrong in (delta(3, 4, "gap"), delta(1, 2, "again"), delta(2, 3, "old", epoch=0)):
        assert texts.on_frame(wrong) is None
    assert texts.on_frame(delta(2, 3, "b")) == progress("ab")


def test_a_newer_epoch_replaces_the_text_and_an_older_one_is_late() -> None:
    texts = GrowingTexts()
    texts.on_frame(state("first", 9, epoch=2))
    assert texts.on_frame(state("late", 3, epoch=1)) is None
    assert texts.on_frame(state("", 1, epoch=3)) == progress("")


def test_an_end_of_a_reply_that_is_not_shown_is_ignored() -> None:
    texts = GrowingTexts()
    assert texts.on_frame(state("x", 2, "done")) is None
    assert texts.on_frame(state("x", 2, "failed")) is None


def test_a_failed_reply_is_shown_as_failed_once() -> None:
    texts = GrowingTexts()
    texts.on_frame(state("x", 2))
    assert texts.on_frame(state("x", 2, "failed")) == progress("x", "failed")
    assert texts.on_frame(state("x", 2, "failed")) is None


def test_the_message_takes_the_place_of_the_waiting_progress() -> None:
    inbox = Inbox(10)
    inbox.put_reply(state("x", 2))
    assert taken(inbox) == [progress("x")]
    inbox.put_reply(delta(2, 3, "y"))
    inbox.put(message())
    inbox.put_reply(state("xy", 3, "done"))
    assert taken(inbox) == [message()], "the last frame may come behind the message"


def test_only_the_assistants_own_message_replaces_its_reply() -> None:
    inbox = Inbox(10)
    inbox.put_reply(state("x", 2))
    inbox.put(message(sender_id="mallory"))
    inbox.put(message(None))
    inbox.put_reply(delta(2, 3, "y"))
    assert progress("xy") in taken(inbox)


def test_of_waiting_progress_the_newest_wins() -> None:
    inbox = Inbox(10)
    inbox.put_reply(state("", 1))
    inbox.put_reply(delta(1, 2, "a"))
    inbox.put_reply(delta(2, 3, "b"))
    assert taken(inbox) == [progress("ab")]


def test_a_lost_connection_voids_what_grew_on_it() -> None:
    inbox = Inbox(10)
    inbox.put_reply(state("x", 2))
    inbox.on_disconnected()
    inbox.put_reply(delta(2, 3, "y"))
    assert taken(inbox) == []


def test_the_number_of_replies_and_their_text_are_bounded() -> None:
    texts = GrowingTexts()
    for n in range(REPLIES_MAX + 1):
        texts.on_frame(state("", 1, reply=f"r{n}"))
    assert texts.on_frame(state("x", 2, "done", reply="r0")) is None, "the oldest is forgotten"
    texts.on_frame(state("", 1))
    event = None
    for n in range(1, 5):
        event = texts.on_frame(delta(n, n + 1, str(n) * (TEXT_MAX // 2)))
    assert event is not None
    assert event.text == "3" * (TEXT_MAX // 2) + "4" * (TEXT_MAX // 2)
