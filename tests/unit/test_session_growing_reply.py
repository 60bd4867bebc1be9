"""A reply that grows, from its entries to the frames of one session."""

from __future__ import annotations

import random

from session_driver import Talk, run

from holdfast.client.events import ReplyProgress
from holdfast.client.replies import GrowingTexts
from holdfast.message import Cursor
from holdfast.session.effects import Emit, Wake
from holdfast.session.growing_reply import TEXT_BYTES_MAX, GrowingReply
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.codec import encode_frame
from holdfast.wire.frames import ReplyTextDelta, ReplyTextState


def reply(chat_id: str = "chat_1", epoch: int = 7) -> GrowingReply:
    return GrowingReply(chat_id, "reply_1", "bot", epoch)


def show(talk: Talk, growing: GrowingReply) -> None:
    growing.publish()
    talk.do(talk.session.on_reply_grown(growing))


def state(text: str, to: int, status: str = "running", *, first: int = 0) -> ReplyTextState:
    return ReplyTextState("chat_1", "reply_1", "bot", 7, first, to, text, status)  # type: ignore[arg-type]


def delta(first: int, to: int, text: str) -> ReplyTextDelta:
    return ReplyTextDelta("chat_1", "reply_1", 7, first, to, text)


def test_reply_begins_with_its_state_grows_by_deltas_and_ends_with_its_state() -> None:
    talk, growing = Talk(), reply()
    show(talk, growing)
    assert talk.read() == [state("", 1)]
    growing.append(1, "")
    growing.append(2, "hel")
    show(talk, growing)
    growing.append(3, "lo")
    assert talk.read() == [delta(1, 4, "hello")], "encoded when it is taken, with the newest"
    assert talk.read() == []
    growing.end("done")
    talk.do(talk.session.on_reply_grown(growing))
    assert talk.read() == [state("hello", 4, "done")]
    assert talk.session._outbound.lanes.replies is None


def test_text_that_is_not_published_waits() -> None:
    talk, growing = Talk(), reply()
    show(talk, growing)
    talk.read()
    growing.append(1, "a")
    talk.do(talk.session.ephemeral("typing", encode_frame(delta(0, 0, "other"))))
    assert talk.read() == [delta(0, 0, "other")]


def test_a_late_session_gets_the_text_so_far() -> None:
    growing = reply()
    growing.append(1, "so far")
    talk = Talk()
    show(talk, growing)
    assert talk.read() == [state("so far", 2)]


def test_text_beyond_the_bound_leaves_out_whole_entries_from_the_beginning() -> None:
    talk, growing, third = Talk(), reply(), TEXT_BYTES_MAX // 3
    show(talk, growing)
    talk.read()
    for entry in range(1, 6):
        growing.append(entry, str(entry) * third)
    show(talk, growing)
    expected = state("".join(str(n) * third for n in (3, 4, 5)), 6, first=3)
    assert talk.read() == [expected], "a gap: it lacks entries that are not kept"
    growing.append(6, "6")
    show(talk, growing)
    assert talk.read() == [delta(6, 7, "6")]


def test_one_entry_beyond_the_bound_is_cut_between_two_characters() -> None:
    talk, growing = Talk(), reply()
    show(talk, growing)
    talk.read()
    growing.append(1, "x" + "é" * TEXT_BYTES_MAX)
    show(talk, growing)
    (shown,) = talk.read()
    assert shown == state("é" * (TEXT_BYTES_MAX // 2), 2, first=2)


def test_a_new_epoch_replaces_the_last_one() -> None:
    talk, first, second = Talk(), reply(), reply(epoch=8)
    first.append(1, "lost")
    show(talk, first)
    first.is_void = True
    show(talk, second)
    (shown,) = talk.read()
    assert isinstance(shown, ReplyTextState)
    assert (shown.epoch, shown.text) == (8, "")
    assert list(talk.session._outbound.lanes.replies or ()) == [second]


def test_above_half_of_the_buffer_only_the_end_is_queued() -> None:
    talk, growing = Talk().live(0), reply()
    talk.deliver(run(1, 501))
    talk.session.take_single()
    talk.deliver(run(502, 1002))
    growing.append(1, "a")
    growing.publish()
    effects = talk.session.on_reply_grown(growing)
    assert not effects
    assert not talk.session._outbound.lanes.mixed
    growing.append(2, "b")
    growing.end("failed")
    talk.do(talk.session.on_reply_grown(growing))
    assert talk.read()[501:] == [state("ab", 3, "failed")], "behind the deliveries"


def test_growing_replies_hold_no_bytes_and_never_make_a_client_slow() -> None:
    talk = Talk({f"chat_{n}": Cursor(1, 0) for n in range(300)})
    for n in range(300):
        growing = reply(f"chat_{n}")
        growing.append(1, "x" * TEXT_BYTES_MAX)
        show(talk, growing)
    assert talk.count(Emit) == 0
    assert talk.session.waiting_bytes == 0
    assert len(talk.session._outbound.lanes.replies or ()) == 256, "the oldest are dropped"
    taken = [len(frames) for _ in range(300) if (frames := talk.session.take(64 * 1024))]
    assert sum(taken) == 256
    assert max(taken) == 2, "about 64 KiB at once"


def test_a_session_that_left_the_chat_gets_nothing_more_of_it() -> None:
    talk, growing = Talk(), reply()
    show(talk, growing)
    talk.read()
    growing.append(1, "secret")
    show(talk, growing)
    talk.do(talk.session.on_membership("chat_1", None))
    show(talk, growing)
    assert not any(isinstance(frame, ReplyTextDelta | ReplyTextState) for frame in talk.read())


def test_a_session_of_another_chat_gets_nothing() -> None:
    talk = Talk()
    show(talk, reply("chat_9"))
    assert talk.read() == []


def test_a_closed_session_gets_nothing() -> None:
    talk, growing = Talk(), reply()
    show(talk, growing)
    talk.do(talk.session.close(CloseReason.ROTATION))
    show(talk, growing)
    assert len(talk.read()) == 1, "the closing frame"


def test_a_waiting_reply_wakes_the_connection_once() -> None:
    talk, growing = Talk(), reply()
    show(talk, growing)
    growing.append(1, "a")
    show(talk, growing)
    assert talk.count(Wake) == 2, "one for the establishment, one for the reply"
    talk.read()
    growing.append(2, "b")
    show(talk, growing)
    assert talk.count(Wake) == 3


def test_sessions_that_lack_the_same_share_one_encoded_frame() -> None:
    growing = reply()
    talks = [Talk(), Talk()]
    for talk in talks:
        show(talk, growing)
    one, two = (talk.session.take(1 << 20) for talk in talks)
    assert one[0] is two[0]


def test_whatever_is_skipped_clients_end_with_the_text_or_its_last_part() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        talk, growing, texts = Talk(), reply(), GrowingTexts()
        whole, seen = "", list[ReplyProgress]()

        def take(talk: Talk, texts: GrowingTexts, seen: list[ReplyProgress]) -> None:
            for frame in talk.read():
                assert isinstance(frame, ReplyTextDelta | ReplyTextState)
                assert len(frame.text.encode()) <= TEXT_BYTES_MAX
                if (event := texts.on_frame(frame)) is not None:
                    seen.append(event)

        show(talk, growing)
        for entry in range(1, 60):
            text = rng.choice("aäß€🙂") * rng.choice((0, 1, 5, 20_000, 60_000))
            whole += text
            growing.append(entry, text)
            if rng.random() < 0.5:
                show(talk, growing)
            if rng.random() < 0.5:
                take(talk, texts, seen)
        growing.end("done")
        talk.do(talk.session.on_reply_grown(growing))
        take(talk, texts, seen)
        assert [event.state for event in seen] == ["running"] * (len(seen) - 1) + ["done"]
        assert all(event.text in whole for event in seen), seed
        assert whole.endswith(seen[-1].text)
        assert seen[-1].text
