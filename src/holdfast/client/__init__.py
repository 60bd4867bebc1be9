"""The Python client: connect, resume, send once, receive in order; whatever happens in between.

    async with Client("http://127.0.0.1:8080", token, state="alice.db") as client:
        await client.send("chat_01…", "hello")
        async for event in client.events():
            match event:
                case Message():
                    print(event.sender_id, event.content)

``machine`` is the protocol as a pure core (with ``chats``, ``outbox``, ``inbox``, ``reconnect`` as its parts);
``client`` is the thin shell around it, ``state`` the file that outlives the process.
"""

from holdfast.client.client import Client
from holdfast.client.connection import TokenProvider
from holdfast.client.events import (
    ChatGone,
    ChatJoined,
    ChatReset,
    ClientEvent,
    ConnectionChanged,
    SendRefused,
    Sent,
    Warned,
)
from holdfast.client.settings import ClientSettings
from holdfast.message import Message
from holdfast.wire.frames import Presence, Receipt, Typing

__all__ = [
    "ChatGone",
    "ChatJoined",
    "ChatReset",
    "Client",
    "ClientEvent",
    "ClientSettings",
    "ConnectionChanged",
    "Message",
    "Presence",
    "Receipt",
    "SendRefused",
    "Sent",
    "TokenProvider",
    "Typing",
    "Warned",
]
