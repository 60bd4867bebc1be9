"""An assistant's reply while it is written, as the members of its chat see it. (Pure.)

The text comes in numbered entries. ``publish`` decides when sessions may send what is
new: at most ten times per second, for all sessions at once. Each session keeps one
integer, the next entry that its client lacks, and asks for a frame when it writes. So a
session that cannot write holds no text, and its next frame has all that it missed.

Only the last 48 KiB of the text are kept: no frame carries more. A session that lacks
an entry before them gets a ``reply_state``, which replaces the client's text.
"""

from __future__ import annotations

import sys
from collections import deque

from holdfast.bounds import KIB
from holdfast.wire.codec import encode_frame
from holdfast.wire.frames import ReplyTextDelta, ReplyTextState, ReplyTextStatus

TEXT_BYTES_MAX = 48 * KIB
"""Text of one frame, so that the frame stays below 64 KiB unless much is escaped."""
FRAMES_KEPT_MAX = 4
"""Encoded frames kept until the next entry; slow clients, which differ, share none."""
ENDED = sys.maxsize
"""What is published of a reply that has ended: more than any session has."""


class GrowingReply:
    """One epoch of a reply.

    ``published``: the entry up to which sessions may send now. ``is_void``: a newer
    epoch has replaced it, so nothing more of it is sent.
    """

    __slots__ = (
        "_first",
        "_frames",
        "_parts",
        "_size",
        "chat_id",
        "epoch",
        "is_void",
        "next_entry",
        "published",
        "reply_id",
        "sender_id",
        "state",
    )

    def __init__(self, chat_id: str, reply_id: str, sender_id: str, epoch: int) -> None:
        self.chat_id = sys.intern(chat_id)
        self.reply_id = reply_id
        self.sender_id = sender_id
        self.epoch = epoch
        self.state: ReplyTextStatus = "running"
        self.is_void = False
        self.next_entry = 1
        self.published = 0
        self._first = 0
        """The first entry that is kept whole; 0 while nothing is left out."""
        self._parts: deque[tuple[int, str, int]] = deque()
        self._size = 0
        self._frames: dict[int, bytes] = {}

    def append(self, entry: int, text: str) -> None:
        """The next entry came; ``text`` may be empty."""
        self._frames.clear()
        self.next_entry = entry + 1
        if not text:
            return
        size = len(text.encode())
        self._parts.append((entry, text, size))
        self._size += size
        while self._size > TEXT_BYTES_MAX and len(self._parts) > 1:
            left_out, _, size = self._parts.popleft()
            self._size -= size
            self._first = left_out + 1
        if self._size > TEXT_BYTES_MAX:  # one entry alone: its end is kept
            kept = text.encode()[-TEXT_BYTES_MAX:].decode(errors="ignore")
            self._size = len(kept.encode())
            self._parts[0] = (entry, kept, self._size)
            self._first = entry + 1

    def publish(self) -> None:
        self.published = max(self.published, self.next_entry)

    def end(self, state: ReplyTextStatus) -> None:
        self._frames.clear()
        self.state = state
        self.published = ENDED

    def frame(self, after: int) -> bytes:
        """The frame for a client that lacks the entries from ``after`` on.

        It carries everything up to ``next_entry``. Most clients lack the same entries,
        so the frame is encoded once for all of them.
        """
        if (frame := self._frames.get(after)) is None:
            frame = encode_frame(self._payload(after))
            if len(self._frames) < FRAMES_KEPT_MAX:
                self._frames[after] = frame
        return frame

    def _payload(self, after: int) -> ReplyTextDelta | ReplyTextState:
        if self.state == "running" and after > 0 and self._first <= after:
            text = "".join(text for entry, text, _ in self._parts if entry >= after)
            return ReplyTextDelta(
                self.chat_id, self.reply_id, self.epoch, after, self.next_entry, text
            )
        return ReplyTextState(
            self.chat_id,
            self.reply_id,
            self.sender_id,
            self.epoch,
            self._first,
            self.next_entry,
            "".join(text for _, text, _ in self._parts),
            self.state,
        )
