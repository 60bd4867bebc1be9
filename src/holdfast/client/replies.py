"""The assistants' replies that grow on this connection. (Pure.)

A ``reply_state`` sets the text, a ``reply_delta`` that continues it is appended, and
the message of the reply replaces it. Nothing here is kept over connections: what still
grows, the server shows again.
"""

from __future__ import annotations

from holdfast.client.events import ReplyProgress
from holdfast.message import Message
from holdfast.wire.frames import ReplyTextDelta, ReplyTextState

REPLIES_MAX = 64
"""Growing replies that are followed at once; beyond it the oldest is forgotten."""
TEXT_MAX = 256 * 1024
"""Characters kept of one reply: the last ones."""


class _Text:
    """What this connection has of one reply, up to the entry ``to_entry``."""

    __slots__ = ("epoch", "sender_id", "text", "to_entry")

    def __init__(self, state: ReplyTextState) -> None:
        self.epoch = state.epoch
        self.sender_id = state.sender_id
        self.text = state.text
        self.to_entry = state.to_entry


class GrowingTexts:
    """Turns frames into events; the key of a reply is its chat and its id."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str], _Text] = {}

    def on_frame(self, frame: ReplyTextDelta | ReplyTextState) -> ReplyProgress | None:
        """The event of a frame; None if it changes nothing."""
        if isinstance(frame, ReplyTextDelta):
            return self._on_delta(frame)
        key = (frame.chat_id, frame.reply_id)
        held = self._texts.get(key)
        if held is None and frame.state != "running":
            return None  # its message came first, or it was never shown
        if held is not None and frame.epoch < held.epoch:
            return None
        if frame.state == "failed":
            del self._texts[key]
        else:
            if held is None and len(self._texts) >= REPLIES_MAX:
                del self._texts[next(iter(self._texts))]
            self._texts[key] = _Text(frame)
        return ReplyProgress(*key, frame.sender_id, frame.text, frame.state)

    def _on_delta(self, frame: ReplyTextDelta) -> ReplyProgress | None:
        held = self._texts.get((frame.chat_id, frame.reply_id))
        if held is None or (held.epoch, held.to_entry) != (frame.epoch, frame.from_entry):
            return None
        held.text = (held.text + frame.text)[-TEXT_MAX:]
        held.to_entry = frame.to_entry
        return ReplyProgress(frame.chat_id, frame.reply_id, held.sender_id, held.text, "running")

    def on_message(self, message: Message) -> bool:
        """Whether the message takes the place of a growing reply."""
        key = (message.chat_id, message.client_message_id or "")
        held = self._texts.get(key)
        if held is None or held.sender_id != message.sender_id:
            return False
        del self._texts[key]
        return True

    def clear(self) -> None:
        self._texts.clear()
