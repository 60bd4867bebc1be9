"""The position check: what is queued to a connection has no hole, whatever fanout
skips, repeats or reorders.
"""

from __future__ import annotations

import pytest
from session_driver import Talk, message, page, run, sync

from holdfast.errors import NotAMember, Unavailable
from holdfast.message import Cursor, Message, Page, ResumeRead
from holdfast.session.effects import (
    Delivered,
    Emit,
    Fetch,
    FetchResume,
    SessionEvent,
    Wake,
    WasRead,
)
from holdfast.session.progress import ChatProgress
from holdfast.wire.frames import (
    Ack,
    AckBody,
    ChatHead,
    CursorClaim,
    Error,
    Heartbeat,
    Read,
    ReadBody,
    Resume,
    ResumeBody,
    Resumed,
    Resync,
    SyncBody,
    SyncRequest,
)


def sequences(payloads: list[object]) -> list[int]:
    return [payload.sequence for payload in payloads if isinstance(payload, Message)]


def resyncs(payloads: list[object]) -> list[Resync]:
    return [payload for payload in payloads if isinstance(payload, Resync)]


def test_a_chat_starts_behind_and_nothing_is_pushed() -> None:
    talk = Talk({"chat_1": Cursor(1, 4)})
    assert talk.deliver(run(5)) == []
    assert talk.read() == []


def test_the_next_sequence_is_sent() -> None:
    talk = Talk().live(4)
    assert talk.deliver(run(5)) == [Wake()]
    assert talk.deliver(run(6, 8)) == []
    assert sequences(talk.read()) == [5, 6, 7, 8]


def test_a_cursor_s_proof_is_handed_on() -> None:
    talk = Talk({"chat_1": Cursor(1, 4)})
    talk.receive(SyncRequest(payload=SyncBody("chat_1", 1, 9, proof="ab")))
    assert talk.last(Fetch).proofs == {"chat_1": "ab"}
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(0, 4), talk.now))
    talk.read()
    cursors = {"chat_1": CursorClaim(1, 9, "cd"), "chat_2": CursorClaim(1, 9)}
    talk.receive(Resume(payload=ResumeBody(cursors)))
    assert talk.last(FetchResume).proofs == {"chat_1": "cd"}


def test_wake_is_said_once_until_the_next_take() -> None:
    talk = Talk().live(0)
    assert [talk.deliver(run(n)) for n in (1, 2, 3)] == [[Wake()], [], []]
    talk.read()
    assert talk.deliver(run(4)) == [Wake()]


def test_run_that_was_sent_before_is_dropped_silently() -> None:
    talk = Talk().live(4)
    talk.deliver(run(5, 6))
    talk.read()
    assert talk.deliver(run(5)) == []
    assert talk.deliver(run(4, 6)) == []
    assert talk.read() == []


def test_run_that_overlaps_is_sent_without_its_beginning() -> None:
    talk = Talk().live(4)
    talk.deliver(run(5, 6))
    talk.deliver(run(5, 8))
    assert sequences(talk.read()) == [5, 6, 7, 8]


@pytest.mark.covers("000 contract 6, what was skipped in the middle")
def test_a_gap_makes_the_chat_behind_with_one_resync_and_nothing_more_pushed() -> None:
    talk = Talk().live(4)
    assert Emit(SessionEvent.FELL_BEHIND) in talk.deliver(run(6))
    talk.deliver(run(7))
    talk.deliver(run(9))
    payloads = talk.read()
    assert resyncs(payloads) == [Resync([ChatHead("chat_1", 9)])]
    assert sequences(payloads) == []
    talk.deliver(run(10))
    assert talk.read() == []


def test_a_resync_stands_behind_what_was_queued_before_it() -> None:
    talk = Talk().live(0)
    talk.deliver(run(1, 2))
    talk.deliver(run(5))
    payloads = talk.read()
    assert sequences(payloads[:2]) == [1, 2]
    assert isinstance(payloads[2], Resync)


def test_one_resync_names_all_chats_that_fell_behind() -> None:
    talk = Talk({"chat_1": Cursor(1, 0), "chat_2": Cursor(1, 0)}).live(0).live(0, "chat_2")
    talk.deliver(run(3))
    talk.deliver(run(4, chat_id="chat_2"))
    assert resyncs(talk.read()) == [Resync([ChatHead("chat_1", 3), ChatHead("chat_2", 4)])]


def test_the_page_that_reaches_the_newest_heard_of_makes_it_live_again() -> None:
    talk = Talk().live(4)
    talk.deliver(run(8))
    talk.read()
    assert sequences(talk.pull(4, page(4, 6, head=8))) == []
    talk.deliver(run(9))
    assert talk.read() == []
    talk.pull(6, page(6, 9))
    talk.deliver(run(10))
    assert sequences(talk.read()) == [10]


def test_a_push_while_the_page_is_read_is_not_lost() -> None:
    """The page ends before what was pushed meanwhile: it says that there is more, and
    the chat stays behind.
    """
    talk = Talk({"chat_1": Cursor(1, 4)})
    talk.receive(sync(0))
    talk.deliver(run(5))
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(0, 4), talk.now))
    (sent,) = talk.read()
    assert isinstance(sent, Page)
    assert (sent.through, sent.has_more, sent.head) == (4, True, 5)
    talk.pull(4, page(4, 5))
    talk.deliver(run(6))
    assert sequences(talk.read()) == [6]


def test_a_push_right_behind_the_page_follows_it_on_the_wire() -> None:
    talk = Talk({"chat_1": Cursor(1, 4)})
    talk.receive(sync(0))
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(0, 4), talk.now))
    talk.deliver(run(5))
    first, second = talk.read()
    assert isinstance(first, Page)
    assert isinstance(second, Message)


def test_a_page_that_could_not_be_read_leaves_the_chat_behind() -> None:
    talk = Talk({"chat_1": Cursor(1, 4)})
    talk.receive(sync(0))
    talk.do(talk.session.on_page(talk.last(Fetch).token, Unavailable("down"), talk.now))
    assert talk.errors() == ["SERVICE_UNAVAILABLE"]
    assert talk.deliver(run(5)) == []


def test_deliveries_of_a_chat_that_is_not_ours_are_ignored() -> None:
    talk = Talk().live(0)
    assert talk.deliver(run(1, chat_id="chat_9")) == []
    assert talk.read() == []


def test_joined_chat_is_behind_at_its_head_and_gets_a_resync() -> None:
    talk = Talk({})
    assert talk.do(talk.session.on_membership("chat_1", Cursor(1, 7))) == [Wake()]
    assert resyncs(talk.read()) == [Resync([ChatHead("chat_1", 7)])]
    assert list(talk.session.chats) == ["chat_1"]
    talk.pull(0, page(0, 7))
    talk.deliver(run(8))
    assert sequences(talk.read()) == [8]


def test_chat_that_was_left_gets_nothing_more() -> None:
    talk = Talk().live(0)
    talk.do(talk.session.on_membership("chat_1", None))
    assert talk.deliver(run(1)) == []
    assert talk.read() == []
    assert list(talk.session.chats) == []


def test_a_page_read_before_the_user_left_is_not_shown() -> None:
    talk = Talk()
    talk.receive(sync(0))
    talk.do(talk.session.on_membership("chat_1", None))
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(0, 4), talk.now))
    assert talk.errors() == ["NOT_A_MEMBER"]


def test_chat_left_while_behind_gets_a_resync_and_refuses_the_sync() -> None:
    talk = Talk().live(0)
    talk.deliver(run(2))
    talk.do(talk.session.on_membership("chat_1", None))
    assert resyncs(talk.read()) == [Resync([ChatHead("chat_1", 2)])]


def test_chat_left_while_another_is_pulled_gets_a_resync() -> None:
    talk = Talk({"chat_1": Cursor(1, 4), "chat_2": Cursor(1, 4)})
    talk.receive(sync(0, chat_id="chat_2"))
    talk.do(talk.session.on_membership("chat_1", None))
    assert resyncs(talk.read()) == [Resync([ChatHead("chat_1", 4)])]


def test_chat_left_during_its_own_pull_gets_no_resync() -> None:
    for frame in (
        sync(0),
        Resume(request_id="r", payload=ResumeBody({"chat_1": CursorClaim(1, 2)})),
    ):
        talk = Talk({"chat_1": Cursor(1, 4)})
        talk.receive(frame)
        talk.do(talk.session.on_membership("chat_1", None))
        assert resyncs(talk.read()) == []


def test_a_resume_read_before_the_user_left_does_not_show_the_chat() -> None:
    talk = Talk({"chat_1": Cursor(1, 4), "chat_2": Cursor(1, 4)})
    talk.receive(
        Resume(
            request_id="r",
            payload=ResumeBody({"chat_1": CursorClaim(1, 2), "chat_2": CursorClaim(1, 2)}),
        )
    )
    talk.do(talk.session.on_membership("chat_1", None))
    pages = [page(2, 4), page(2, 4, chat_id="chat_2")]
    talk.do(
        talk.session.on_page(talk.last(FetchResume).token, ResumeRead(pages, [], [], {}), talk.now)
    )
    (answer,) = talk.read()
    assert isinstance(answer, Resumed)
    assert [chat.chat_id for chat in answer.chats] == ["chat_2"]
    assert answer.gone == ["chat_1"]


def test_chat_joined_again_during_a_resume_is_not_named_gone() -> None:
    talk = Talk({})
    talk.receive(Resume(request_id="r", payload=ResumeBody({"chat_1": CursorClaim(1, 2)})))
    talk.do(talk.session.on_membership("chat_1", Cursor(1, 4)))
    assert resyncs(talk.read()) == [Resync([ChatHead("chat_1", 4)])]
    read = ResumeRead([], [], ["chat_1", "chat_2"], {})
    talk.do(talk.session.on_page(talk.last(FetchResume).token, read, talk.now))
    (answer,) = talk.read()
    assert isinstance(answer, Resumed)
    assert answer.gone == ["chat_2"]


def test_resumed_chats_are_live_or_listed_with_their_heads() -> None:
    heads = {
        "chat_1": Cursor(1, 4),
        "chat_2": Cursor(1, 9),
        "chat_3": Cursor(1, 5),
        "chat_4": Cursor(1, 2),
    }
    talk = Talk(heads)
    (answer,) = talk.resume(
        {"chat_1": (1, 2), "chat_2": (1, 3), "chat_3": (1, 5), "chat_9": (1, 1)},
        ResumeRead(
            pages=[page(2, 4)],
            joined=["chat_4"],
            gone=["chat_9"],
            heads={chat_id: heads[chat_id] for chat_id in ("chat_2", "chat_3", "chat_4")},
        ),
    )
    assert isinstance(answer, Resumed)
    listed = {
        chat.chat_id: (len(chat.messages), chat.through, chat.has_more, chat.head)
        for chat in answer.chats
    }
    assert listed == {
        "chat_1": (2, 4, False, 4),
        "chat_2": (0, 3, True, 9),
        "chat_4": (0, 0, True, 2),
    }, "only chats that moved"
    assert (answer.joined, answer.gone) == (["chat_4"], ["chat_9"])
    for chat_id, head in heads.items():
        talk.deliver(run(head.sequence + 1, chat_id=chat_id))
    assert [m.chat_id for m in talk.read() if isinstance(m, Message)] == ["chat_1", "chat_3"]


def test_a_push_while_a_resume_is_read_lists_the_chat_that_seemed_not_to_have_moved() -> None:
    talk = Talk({"chat_1": Cursor(1, 4)})
    talk.receive(Resume(request_id="r", payload=ResumeBody({"chat_1": CursorClaim(1, 4)})))
    talk.deliver(run(5))
    read = ResumeRead([], [], [], {"chat_1": Cursor(1, 4)})
    talk.do(talk.session.on_page(talk.last(FetchResume).token, read, talk.now))
    (answer,) = talk.read()
    assert isinstance(answer, Resumed)
    assert [(chat.through, chat.has_more, chat.head) for chat in answer.chats] == [(4, True, 5)]


def test_a_resume_of_another_epoch_is_reset() -> None:
    talk = Talk({"chat_1": Cursor(2, 4)})
    read = ResumeRead([], [], [], {"chat_1": Cursor(2, 4)})
    (answer,) = talk.resume({"chat_1": (1, 9)}, read)
    assert isinstance(answer, Resumed)
    assert [(chat.reset, chat.through, chat.has_more, chat.epoch) for chat in answer.chats] == [
        (True, 0, True, 2)
    ]


def test_cursors_over_several_frames_are_answered_once_with_the_last_request() -> None:
    talk = Talk({f"chat_{n}": Cursor(1, 0) for n in range(3)})
    for n in range(3):
        body = ResumeBody({f"chat_{n}": CursorClaim(1, 0)}, more=n < 2)
        talk.receive(Resume(request_id=f"r{n}", payload=body))
    assert talk.count(FetchResume) == 1
    fetch = talk.last(FetchResume)
    assert fetch.cursors == {f"chat_{n}": Cursor(1, 0) for n in range(3)}
    talk.do(talk.session.on_page(fetch.token, ResumeRead([], [], [], {}), talk.now))
    assert [frame.request_id for frame in talk.take()] == ["r2"]


def test_a_newer_epoch_from_the_store_restarts_the_chat_and_a_heartbeat_names_it() -> None:
    talk = Talk().live(4)
    talk.session.on_head("chat_1", Cursor(2, 4), talk.now)
    assert talk.deliver(run(5, epoch=2)) == []
    talk.wait(6)
    assert Heartbeat({"chat_1": (2, 5)}) in talk.read()
    (sent,) = talk.pull(0, page(0, 5, epoch=2, reset=True))
    assert isinstance(sent, Page)
    assert not sent.has_more
    talk.deliver(run(6, epoch=2))
    assert sequences(talk.read()) == [6]


def test_run_of_an_older_epoch_is_dropped_and_one_of_a_newer_makes_the_chat_behind() -> None:
    talk = Talk({"chat_1": Cursor(2, 4)})
    talk.pull(4, page(4, 4, epoch=2))
    assert talk.deliver(run(5, epoch=1)) == []
    assert not talk.session.deliver_at_once(run(5, epoch=1))
    assert talk.session.chats["chat_1"].head == 4, "nor is it heard of"
    talk.deliver(run(3, 5, epoch=3))
    assert resyncs(talk.read()) == [Resync([ChatHead("chat_1", 5)])]
    talk.pull(0, page(0, 5, epoch=3, reset=True))
    talk.deliver(run(6, epoch=3))
    assert sequences(talk.read()) == [6]


def test_membership_event_counts_only_after_where_the_membership_was_read() -> None:
    progress = ChatProgress(Cursor(2, 10))
    assert progress.reflects(Cursor(2, 10)) and not progress.reflects(Cursor(2, 11))
    assert progress.reflects(Cursor(1, 99)), "of an epoch that is over"
    assert progress.reflects(Cursor(3, 10)), "read late: it has the chat's present epoch"
    progress.on_epoch_raised(Cursor(2, 4))
    assert progress.reflects(Cursor(2, 10)), "known before"
    progress.on_epoch_raised(Cursor(3, 4))
    assert progress.reflects(Cursor(3, 4)) and not progress.reflects(Cursor(3, 5))


def test_chat_is_live_after_a_loss_only_when_its_membership_was_read() -> None:
    progress = ChatProgress(Cursor(1, 4))
    progress.settle(page(0, 4))
    progress.on_log_lost()
    assert not progress.settle(page(4, 6)).has_more
    assert not progress.live and not progress.reflects(Cursor(1, 1))
    assert not progress.on_membership_read(Cursor(1, 6)), "nothing was missed"
    assert progress.live and progress.through == 6


@pytest.mark.parametrize("read", [Cursor(1, 5), Cursor(2, 4)], ids=["missed", "epoch"])
def test_chat_that_missed_something_in_a_loss_must_be_pulled(read: Cursor) -> None:
    progress = ChatProgress(Cursor(1, 4))
    progress.settle(page(0, 4))
    progress.on_log_lost()
    assert progress.on_membership_read(read) and not progress.live
    progress.settle(page(0, read.sequence, epoch=read.epoch, reset=read.epoch > 1))
    assert progress.live


def test_chat_that_was_never_pulled_is_not_live_after_a_loss() -> None:
    progress = ChatProgress(Cursor(1, 0))
    progress.on_log_lost()
    assert progress.on_membership_read(Cursor(1, 0)) and not progress.live


def test_after_a_reset_only_what_its_page_holds_was_sent() -> None:
    talk = Talk({"chat_1": Cursor(2, 4)})
    talk.pull(4, page(4, 4, epoch=2))
    talk.receive(sync(9, epoch=1))
    talk.do(
        talk.session.on_page(
            talk.last(Fetch).token, page(0, 2, head=4, epoch=2, reset=True), talk.now
        )
    )
    talk.read()
    talk.receive(Ack(payload=AckBody("chat_1", 2, 3)))
    assert talk.errors() == ["INVALID_MESSAGE"]
    assert talk.receive(Ack(payload=AckBody("chat_1", 2, 2))) == [Delivered("chat_1", 2, 2)]


def test_a_chat_that_caught_up_by_itself_is_not_named_in_a_resync() -> None:
    talk = Talk({"chat_1": Cursor(1, 0), "chat_2": Cursor(1, 0)}).live(0).live(0, "chat_2")
    talk.deliver(run(2))
    talk.deliver(run(3, chat_id="chat_2"))
    talk.receive(sync(0))
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(0, 2), talk.now))
    assert resyncs(talk.read()) == [Resync([ChatHead("chat_2", 3)])]


def test_a_late_page_of_an_older_epoch_says_there_is_more() -> None:
    talk = Talk()
    talk.receive(sync(0))
    talk.session.on_head("chat_1", Cursor(2, 1), talk.now)
    talk.do(talk.session.on_page(talk.last(Fetch).token, page(0, 4), talk.now))
    assert [p.has_more for p in talk.read() if isinstance(p, Page)] == [True]


def test_an_ack_is_a_watermark_once() -> None:
    talk = Talk().live(4)
    talk.deliver(run(5, 6))
    ack = Ack(payload=AckBody("chat_1", 1, 6))
    assert talk.receive(ack) == [Delivered("chat_1", 1, 6)]
    assert talk.receive(ack) == []
    assert talk.receive(Ack(payload=AckBody("chat_1", 1, 5))) == []


def test_an_ack_beyond_what_was_sent_is_an_error_and_never_a_close() -> None:
    talk = Talk().live(4)
    for _ in range(20):
        assert not [
            effect
            for effect in talk.receive(Ack(payload=AckBody("chat_1", 1, 5)))
            if effect != Wake()
        ]
    assert talk.errors() == ["INVALID_MESSAGE"] * 20
    assert talk.closing is None


def test_an_ack_of_an_older_epoch_is_passed_over_and_of_a_newer_refused() -> None:
    talk = Talk({"chat_1": Cursor(3, 4)})
    assert talk.receive(Ack(payload=AckBody("chat_1", 2, 9))) == []
    talk.receive(Ack(payload=AckBody("chat_1", 4, 0)))
    assert talk.errors() == ["INVALID_MESSAGE"]


def test_a_read_mark_goes_up_to_the_end_of_the_chat() -> None:
    """It may have been read on another device or over REST."""
    talk = Talk({"chat_1": Cursor(1, 4)})
    assert talk.receive(Read(payload=ReadBody("chat_1", 4))) == [WasRead("chat_1", 1, 4)]
    talk.receive(Read(payload=ReadBody("chat_1", 5)))
    assert talk.errors() == ["INVALID_MESSAGE"]


def test_notes_about_a_chat_of_others_are_refused() -> None:
    talk = Talk()
    talk.receive(Ack(payload=AckBody("chat_9", 1, 1)))
    talk.receive(Read(payload=ReadBody("chat_9", 1)))
    assert talk.errors() == [NotAMember.code] * 2


def test_the_frames_of_a_run_are_the_same_bytes_for_every_session() -> None:
    one, two, shared = Talk().live(0), Talk().live(0), run(1, 3)
    one.deliver(shared)
    two.deliver(shared)
    assert one.session.take(1 << 20)[0] is two.session.take(1 << 20)[0] is shared.data


def test_an_error_for_a_pull_names_its_request() -> None:
    talk = Talk()
    talk.receive(sync(0))
    talk.do(talk.session.on_page(talk.last(Fetch).token, NotAMember("no"), talk.now))
    (frame,) = talk.take()
    assert frame.request_id == "r-chat_1-0"
    assert isinstance(frame.payload, Error)
    assert frame.payload.outcome is None


def test_messages_arrive_as_they_were_stored() -> None:
    talk = Talk().live(0)
    talk.deliver(run(1))
    assert talk.read() == [message(1)]


@pytest.mark.parametrize("limit", [1, 5, 10])
def test_pulling_an_old_page_on_a_live_connection_changes_nothing(limit: int) -> None:
    talk = Talk().live(10)
    talk.pull(2, page(2, min(2 + limit, 10), head=10))
    assert talk.deliver(run(11)) == [Wake()]
    assert sequences(talk.read()) == [11]
    assert resyncs(talk.read()) == []


def test_client_that_pulls_while_more_is_pushed_ends_complete() -> None:
    talk = Talk().live(10)
    (first,) = talk.pull(2, page(2, 6, head=10))
    talk.deliver(run(11))
    assert sequences(talk.read()) == [11], (
        "the client does not store it: it is beyond its cursor + 1"
    )
    (second,) = talk.pull(6, page(6, 10, head=10))
    assert isinstance(first, Page) and isinstance(second, Page)
    assert first.has_more and second.has_more, (
        "11 was pushed, and dropped: the client must pull once more"
    )
    (third,) = talk.pull(10, page(10, 11, head=11))
    assert isinstance(third, Page) and not third.has_more
    talk.deliver(run(12))
    assert sequences(talk.read()) == [12]


def test_pull_from_another_epoch_stops_pushes_until_the_page_has_reset_the_copy() -> None:
    place = ChatProgress(Cursor(2, 10))
    place.settle(page(0, 10, epoch=2))
    place.pull(Cursor(2, 9))
    assert place.live
    place.pull(Cursor(1, 10))
    assert not place.live and place.head == 10


def test_page_that_ends_one_short_of_the_head_has_more() -> None:
    place = ChatProgress(Cursor(1, 10))
    place.raise_head(11)
    sent = place.settle(page(0, 10))
    assert sent.has_more and sent.head == 11
    assert not place.live, "the next push would be behind a hole"
