"""Thousands of chats: every frame is bounded and no chat is forgotten."""

from __future__ import annotations

from collections.abc import Mapping

from session_driver import Talk, decoded, message, page, run

from holdfast.message import Cursor, Message, Page, ResumeRead
from holdfast.session.effects import FetchResume
from holdfast.wire.frames import (
    CursorClaim,
    Heartbeat,
    HeartbeatAck,
    Resume,
    ResumeBody,
    Resumed,
    Resync,
)

LONG = [f"chat_{n:059}" for n in range(5000)]  # ids as long as ids may be


def bounded(frames: list[bytes]) -> list[object]:
    """The frames' payloads; none of the frames is longer than a page may be."""
    assert max(map(len, frames), default=0) <= 256 * 1024
    return [frame.payload for frame in decoded(frames)]


def take_resumed(
    talk: Talk, read: ResumeRead, cursors: Mapping[str, tuple[int, int]]
) -> tuple[Resumed, list[str]]:
    """What a resume over many frames is answered with: the one answer, and the chats
    named in resyncs behind it.
    """
    names = list(cursors)
    for at in range(0, max(len(names), 1), 500):
        body = ResumeBody(
            {name: CursorClaim(*cursors[name]) for name in names[at : at + 500]},
            more=at + 500 < len(names),
        )
        talk.receive(Resume(request_id="r", payload=body))
    talk.do(talk.session.on_page(talk.last(FetchResume).token, read, talk.now))
    answer, *resyncs = bounded(talk.session.take(1 << 30))
    assert isinstance(answer, Resumed)
    return answer, [
        chat.chat_id for frame in resyncs if isinstance(frame, Resync) for chat in frame.chats
    ]


def test_moved_chats_that_do_not_fit_a_resumed_frame_get_resyncs() -> None:
    heads = {chat_id: Cursor(1, 9) for chat_id in LONG}
    talk = Talk(heads)
    answer, later = take_resumed(talk, ResumeRead([], [], [], heads), dict.fromkeys(LONG, (1, 3)))
    listed = [chat.chat_id for chat in answer.chats]
    assert len(listed) > 1000
    assert listed + later == LONG


def test_joined_chats_that_do_not_fit_a_resumed_frame_get_resyncs() -> None:
    heads = {chat_id: Cursor(1, n % 2) for n, chat_id in enumerate(LONG)}
    answer, later = take_resumed(Talk(heads), ResumeRead([], LONG, [], heads), {})
    assert [*answer.joined, *later] == LONG


def test_gone_chats_that_do_not_fit_a_resumed_frame_get_resyncs() -> None:
    answer, later = take_resumed(
        Talk({}), ResumeRead([], [], LONG, {}), dict.fromkeys(LONG, (1, 3))
    )
    assert [*answer.gone, *later] == LONG


def test_many_small_pages_and_names_with_the_longest_numbers_fit_together() -> None:
    far = 2**53 - 1
    heads = {chat_id: Cursor(far, far) for chat_id in LONG}
    pages = [Page(name, far, [message(far, chat_id=name)], far, True, far) for name in LONG[:300]]
    answer, later = take_resumed(Talk(heads), ResumeRead(pages, LONG, [], heads), {})
    assert len(answer.chats) > 500
    assert {chat.chat_id for chat in answer.chats} | set(later) == set(LONG)


def test_a_full_page_leaves_no_room_for_names() -> None:
    heads = {chat_id: Cursor(1, 9) for chat_id in LONG}
    first = Page("chat_1", 1, [message(n, content="x" * 4000) for n in range(1, 61)], 60, True, 99)
    talk = Talk({"chat_1": Cursor(1, 99), **heads})
    answer, later = take_resumed(
        talk, ResumeRead([first], [], [], heads), dict.fromkeys(LONG, (1, 3))
    )
    assert len(answer.chats[0].messages) == 60
    assert len(answer.chats) + len(later) == 5001


def test_a_chat_named_in_a_resync_is_live_after_its_page() -> None:
    heads = {f"chat_{n}": Cursor(1, 0) for n in range(5000)}
    talk = Talk(heads)
    _, later = take_resumed(talk, ResumeRead([], list(heads), [], heads), {})
    talk.deliver(run(1, chat_id=later[0]))
    assert [m for m in talk.read() if isinstance(m, Message)] == [], (
        "the client does not know the chat yet"
    )
    talk.pull(0, page(0, 1, chat_id=later[0]))
    talk.deliver(run(2, chat_id=later[0]))
    assert [m.sequence for m in talk.read() if isinstance(m, Message)] == [2]


def test_heartbeats_name_every_chat_that_is_behind_in_turn() -> None:
    """Each heartbeat is bounded; the next one comes soon with further chats."""
    talk = Talk({chat_id: Cursor(1, 1) for chat_id in LONG})
    for chat_id in LONG:
        talk.session.on_head(chat_id, Cursor(1, 1), talk.now)
    named: dict[str, tuple[int, int]] = {}
    for _ in range(60):
        talk.wait(1)
        for beat in bounded(talk.session.take(1 << 30)):
            assert isinstance(beat, Heartbeat)
            talk.receive(HeartbeatAck())
            named.update(beat.heads)
    assert list(named) == LONG
    assert talk.closing is None
