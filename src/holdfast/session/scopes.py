"""Which scopes of the credential each frame needs: the one table. (Pure.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.access.principal import Principal, UserScope
from holdfast.errors import Forbidden
from holdfast.wire.frames import (
    Ack,
    AnyClientFrame,
    Authenticate,
    HeartbeatAck,
    Read,
    Resume,
    SendMessage,
    SyncRequest,
    TypingStart,
    TypingStop,
)

FRAME_SCOPES: Mapping[type[AnyClientFrame], Sequence[UserScope]] = {
    SendMessage: ("chats:send",),
    SyncRequest: ("chats:read",),
    Resume: ("chats:read",),
    Ack: ("chats:read",),
    Read: ("chats:read",),
    TypingStart: ("chats:read", "chats:send"),
    TypingStop: ("chats:read", "chats:send"),
    Authenticate: (),
    HeartbeatAck: (),
}
"""Typing is shown to others, so it needs both. A ``resume`` names many chats; its
response leaves out those that the token does not allow."""


def forbidden(frame: AnyClientFrame, principal: Principal) -> Forbidden | None:
    """Why the credential does not allow the frame; None if it does."""
    chat_id = getattr(frame.payload, "chat_id", None)
    for scope in FRAME_SCOPES[type(frame)]:
        if (refusal := principal.refusal(scope, chat_id)) is not None:
            return refusal
    return None
