"""The Python client: connects and resumes, sends once, receives in order.

    async with Client("http://127.0.0.1:8080", token, state="alice.db") as client:
        await client.send("chat_01…", "hello")
        async for event in client.events():
            match event:
                case Message():
                    print(event.sender_id, event.content)

A pure core decides, a thin shell does the I/O:

- ``client``      the shell: runs the machine over a socket and a state file
- ``machine``     the protocol: frames, time and calls in, actions out (pure)
- ``session``     state that ends with its connection: deadlines, pace, resume (pure)
- ``chats``       all chats: which are behind, which acks and reads to send (pure)
- ``chat_copy``   how much of one chat this device has (pure)
- ``events``      the application's events, and the machine's actions (pure)
- ``inbox``       events that the application has not taken yet, bounded (pure)
- ``replies``     assistants' replies that grow before they are messages (pure)
- ``outbox``      messages that the server has not acknowledged yet (pure)
- ``reconnect``   when to reconnect, when to stop, and why a send was refused (pure)
- ``waiters``     the callers that wait for the outcome of a message
- ``connection``  one WebSocket, and the token it is opened with
- ``state``       the state file: unsent messages, cursors, identity
- ``settings``    the client's bounds and timeouts (pure)
"""

from holdfast.client.client import Client
from holdfast.client.connection import TokenProvider
from holdfast.client.events import (
    ChatGone,
    ChatJoined,
    ChatReset,
    ClientEvent,
    ConnectionChanged,
    ReplyProgress,
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
    "ReplyProgress",
    "SendRefused",
    "Sent",
    "TokenProvider",
    "Typing",
    "Warned",
]
