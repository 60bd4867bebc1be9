"""The marks of a client's copy and the order of its outbox, decision by decision."""

from __future__ import annotations

import random

from session_driver import message

from holdfast.client.chat_copy import ChatCopy
from holdfast.client.outbox import Outbox, OutboxEntry
from holdfast.resilience import Backoff
from holdfast.wire.frames import CursorClaim


def test_message_that_found_no_room_is_not_marked_as_received() -> None:
    copy = ChatCopy(1, 0)
    assert [each.sequence for each in copy.take([message(n) for n in range(1, 6)], 7, room=2)] == [
        1,
        2,
    ]
    assert copy.received == 2 and copy.known_head == 7
    assert [each.sequence for each in copy.take([message(n) for n in range(1, 6)], 7, room=9)] == [
        3,
        4,
        5,
    ]
    assert copy.received == 7, "6 and 7 do not exist: the page was whole"


def test_the_cursor_on_disk_waits_for_the_application() -> None:
    copy = ChatCopy(1, 0)
    copy.take([message(1), message(2)], 3, room=9)
    assert copy.cursor == CursorClaim(1, 0)
    copy.move_past(1)
    assert copy.cursor == CursorClaim(1, 1)
    copy.move_past(2)
    assert copy.cursor == CursorClaim(1, 3), "with the last message the hole behind it is passed"


def test_entry_in_flight_is_sent_first_on_the_next_connection() -> None:
    entries = [
        OutboxEntry(f"k{n}", chat, "x", "text/plain") for n, chat in enumerate(["a", "b", "a"])
    ]
    outbox = Outbox(entries, 1, Backoff(1, 16), random.Random(0))
    first = outbox.start(0.0, "r1")
    assert first == entries[0] and outbox.start(0.0, "r2") is None, "one at a time"
    outbox.on_disconnected()
    assert outbox.start(0.0, "r3") == entries[0]
    assert outbox.settle("a", "k0") == entries[0]
    assert [outbox.start(0.0, "r4"), len(outbox)] == [entries[1], 2], (
        "who had a turn waits for the others"
    )
