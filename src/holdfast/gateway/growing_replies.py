"""Shows assistants' replies to the members of their chats while they are written.

A reply is published at most ten times per second, to all sessions of its chat in one
step. A session that opens later gets the text so far at once; a user who joins the chat
gets it with the next publication. Only the sessions of this node: those of other nodes
get the message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

from holdfast.gateway.connection import Connection
from holdfast.session.growing_reply import GrowingReply
from holdfast.session.roster import Roster

INTERVAL_SECONDS = 0.1
"""Between two publications of one reply, its end apart."""
SILENT_SECONDS_MAX = 900.0
"""A reply that has not grown for this time is over: none takes ten minutes."""


class GrowingReplies:
    """The growing replies of this node."""

    def __init__(
        self, roster: Roster[Connection], give_up: Callable[[Connection, BaseException], None]
    ) -> None:
        """``give_up`` ends a connection that met a defect."""
        self._roster = roster
        self._give_up = give_up
        self._by_chat: dict[str, dict[str, GrowingReply]] = {}
        self._published_at: dict[GrowingReply, float] = {}
        self._timers: dict[GrowingReply, asyncio.TimerHandle] = {}

    def begin(self, chat_id: str, reply_id: str, sender_id: str, epoch: int) -> GrowingReply:
        """Begin an epoch of a reply; it replaces the last one, whose text is void."""
        self._forget_silent()
        if (last := self._by_chat.get(chat_id, {}).get(reply_id)) is not None:
            last.is_void = True
            self._forget(last)
        reply = GrowingReply(chat_id, reply_id, sender_id, epoch)
        self._by_chat.setdefault(chat_id, {})[reply_id] = reply
        self._publish(reply)
        return reply

    def on_grown(self, reply: GrowingReply) -> None:
        """Entries were appended: publish them, now or when the interval is over."""
        if reply in self._timers or reply not in self._published_at:
            return
        loop = asyncio.get_running_loop()
        at = self._published_at[reply] + INTERVAL_SECONDS
        if loop.time() >= at:
            self._publish(reply)
        else:
            self._timers[reply] = loop.call_at(at, self._publish, reply)

    def end(self, chat_id: str, reply_id: str, state: Literal["done", "failed"]) -> None:
        """The reply has ended; harmless if it had before, or was never shown."""
        if (reply := self._by_chat.get(chat_id, {}).get(reply_id)) is not None:
            self._forget(reply)
            reply.end(state)
            self._show(reply)

    def on_established(self, connection: Connection) -> None:
        """A session opened: show it what grows in its chats."""
        for chat_id in self._by_chat.keys() & connection.chats:
            for reply in self._by_chat[chat_id].values():
                connection.do(connection.session.on_reply_grown(reply))

    def _publish(self, reply: GrowingReply) -> None:
        self._timers.pop(reply, None)
        self._published_at[reply] = asyncio.get_running_loop().time()
        reply.publish()
        self._show(reply)

    def _show(self, reply: GrowingReply) -> None:
        for connection in self._roster.in_chat(reply.chat_id):
            try:
                connection.do(connection.session.on_reply_grown(reply))
            except Exception as error:
                self._give_up(connection, error)

    def _forget_silent(self) -> None:
        """Forget replies whose job was given back, perhaps to another node."""
        oldest = asyncio.get_running_loop().time() - SILENT_SECONDS_MAX
        for reply in [r for r, at in self._published_at.items() if at < oldest]:
            self._forget(reply)

    def _forget(self, reply: GrowingReply) -> None:
        if (timer := self._timers.pop(reply, None)) is not None:
            timer.cancel()
        del self._published_at[reply]
        here = self._by_chat[reply.chat_id]
        del here[reply.reply_id]
        if not here:
            del self._by_chat[reply.chat_id]
