"""Events that wait for the application, bounded. (Pure.)

There are two parts. Messages and chat events keep their order; messages are bounded by
``room``, chat events by the protocol (each comes once per chat). Ephemeral events have
a key: the newest replaces the one before, and a full part drops its oldest, since a
lost one needs no repair. A message withdraws the progress of its own reply. The
connection state ``ready`` is ephemeral too, but waits until the application has taken
the events before it.
"""

from __future__ import annotations

from collections import deque

from holdfast.client.chat_copy import ChatCopy
from holdfast.client.events import (
    ChatGone,
    ChatJoined,
    ChatReset,
    ClientEvent,
    ConnectionChanged,
    ReplyProgress,
    SendRefused,
    Warned,
)
from holdfast.client.replies import GrowingTexts
from holdfast.message import Message
from holdfast.wire.frames import Presence, Receipt, ReplyTextDelta, ReplyTextState, Typing

EPHEMERAL_MAX = 256
_CONNECTION = ("connection",)

_Numbered = Message | ChatJoined | ChatGone | ChatReset | SendRefused
_Ephemeral = Typing | Presence | Receipt | ReplyProgress | ConnectionChanged | Warned


class Inbox:
    """Events on their way to the application."""

    def __init__(self, messages_max: int) -> None:
        self._messages_max = messages_max
        self._messages = 0
        self._numbered: deque[tuple[_Numbered, ChatCopy | None]] = deque()
        self._ephemeral: dict[tuple[str, ...], _Ephemeral] = {}
        self._replies = GrowingTexts()
        self._before_ready = 0
        """How many events the application takes before it gets ``ready``."""

    def __len__(self) -> int:
        return len(self._numbered) + len(self._ephemeral)

    @property
    def room(self) -> int:
        """How many more messages fit."""
        return self._messages_max - self._messages

    def put(self, event: _Numbered, copy: ChatCopy | None = None) -> None:
        """``copy`` is the message's, even if a reset replaces it meanwhile."""
        if isinstance(event, Message):
            self._messages += 1
            if self._replies.on_message(event):
                self._ephemeral.pop(("reply", event.chat_id, event.client_message_id or ""), None)
        self._numbered.append((event, copy))

    def put_ephemeral(self, event: _Ephemeral) -> None:
        key = _key(event)
        if isinstance(event, ConnectionChanged):
            self._before_ready = len(self._numbered) if event.state == "ready" else 0
        self._ephemeral.pop(key, None)
        if len(self._ephemeral) >= EPHEMERAL_MAX:
            del self._ephemeral[next(iter(self._ephemeral))]
        self._ephemeral[key] = event

    def put_reply(self, frame: ReplyTextDelta | ReplyTextState) -> None:
        """A reply grew, began again or ended."""
        if (event := self._replies.on_frame(frame)) is not None:
            self.put_ephemeral(event)

    def on_disconnected(self) -> None:
        """What grew on the connection is void."""
        self._replies.clear()
        for key in [key for key in self._ephemeral if key[0] == "reply"]:
            del self._ephemeral[key]

    def take(self) -> tuple[ClientEvent, ChatCopy | None] | None:
        """The next event and its copy; ephemeral events first, because they age."""
        for key in self._ephemeral:
            if key != _CONNECTION or not self._before_ready:
                return self._ephemeral.pop(key), None
        if not self._numbered:
            return None
        event, copy = self._numbered.popleft()
        self._before_ready = max(self._before_ready - 1, 0)
        if isinstance(event, Message):
            self._messages -= 1
        return event, copy


def _key(event: _Ephemeral) -> tuple[str, ...]:
    match event:
        case Typing(chat_id=chat_id, user_id=user_id):
            return ("typing", chat_id, user_id)
        case Receipt(chat_id=chat_id, user_id=user_id):
            return ("receipt", chat_id, user_id)
        case ReplyProgress(chat_id=chat_id, reply_id=reply_id):
            return ("reply", chat_id, reply_id)
        case Presence(user_id=user_id):
            return ("presence", user_id)
        case Warned(code=code):
            return ("warned", code)
        case ConnectionChanged():
            return _CONNECTION
