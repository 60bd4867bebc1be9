"""A run: consecutive messages of one chat, encoded once for all the connections that get it. (Pure.)"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from holdfast.message import Message
from holdfast.wire.codec import encode_frame


class EncodedRun:
    """Messages ``first``..``last`` of a chat as WebSocket frames, ready to be written as they are."""

    __slots__ = ("chat_id", "count", "data", "first", "last", "messages", "next", "size")

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.chat_id = sys.intern(messages[0].chat_id)
        self.first = messages[0].sequence
        self.last = messages[-1].sequence
        self.next = self.last + 1
        self.count = len(messages)
        self.data = b"".join([encode_frame(message) for message in messages])
        self.size = len(self.data)

    def after(self, sequence: int) -> EncodedRun:
        """The rest of the run behind ``sequence``; only where a client already has its beginning."""
        return EncodedRun(self.messages[sequence - self.first + 1 :])
