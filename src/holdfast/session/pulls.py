"""Pulls: the pages that a client asks for by ``sync_request`` and ``resume``. (Pure.)

One is read at a time; the others wait in order, each at most ``max_queue_age_seconds``.
Chats that the user joins or leaves during a read are remembered, because the page may
be older than that, and is corrected before it is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from holdfast.errors import HoldfastError, InvalidMessage, NotAMember, Unavailable
from holdfast.message import Cursor, Page, ResumeRead
from holdfast.session.effects import NO_PROOFS, Fetch, FetchResume
from holdfast.session.progress import ChatProgress
from holdfast.session.responses import brought_up_to_date
from holdfast.session.settings import SessionSettings
from holdfast.wire.frames import ResumeBody, SyncBody


class Pull(Struct, frozen=True):
    """A page to read: of one chat (``sync_request``), or of all chats (``resume``)."""

    token: int
    at: float
    cursors: Mapping[str, Cursor]
    chat_id: str | None = None
    limit: int = 0
    proofs: Mapping[str, str] = NO_PROOFS

    def effect(self) -> Fetch | FetchResume:
        if self.chat_id is None:
            return FetchResume(self.token, self.cursors, self.at, self.proofs)
        return Fetch(
            self.token, self.chat_id, self.cursors[self.chat_id], self.limit, self.at, self.proofs
        )


class Pulls:
    """The pulls of one connection. ``under_way``: the one that is being read."""

    __slots__ = ("_cursors", "_moved", "_proofs", "_settings", "_spoilt", "_waiting", "under_way")

    def __init__(self, settings: SessionSettings) -> None:
        self._settings = settings
        self._cursors: dict[str, Cursor] | None = None
        """Collected from the frames of an incomplete resume, like ``_proofs``."""
        self._proofs: dict[str, str] = {}
        self._spoilt = False
        self._waiting: list[Pull] | None = None
        self._moved: dict[str, bool] | None = None
        """Chats joined (True) or left (False) since the pull under way began."""
        self.under_way: Pull | None = None

    def gather(self, body: ResumeBody) -> HoldfastError | None:
        """Collect the cursors of one frame of a resume, or refuse it.

        After a refused frame the rest of the resume is refused too, and the client
        begins again: an answer from only some of the cursors would name chats as joined
        that the client has.
        """
        if self._spoilt:
            return Unavailable("an earlier frame of this resume was refused: begin again")
        cursors = self._cursors = self._cursors or {}
        for chat_id, (epoch, sequence, proof) in body.cursors.items():
            cursors[chat_id] = Cursor(epoch, sequence)
            if proof is not None:
                self._proofs[chat_id] = proof
        limit = self._settings.pages.resume_chats_max
        if len(cursors) <= limit:
            return None
        return InvalidMessage(f"a resume has at most {limit} cursors", field="cursors", limit=limit)

    def spoil(self, body: ResumeBody) -> None:
        """A frame of a resume was refused."""
        self._cursors, self._proofs = None, {}
        self._spoilt = body.more

    def resume(self, token: int, now: float) -> None:
        """Queue the collected resume."""
        cursors, self._cursors = self._cursors or {}, None
        proofs, self._proofs = self._proofs, {}
        self._wait(Pull(token, now, cursors, proofs=proofs))

    def sync(self, token: int, body: SyncBody, now: float) -> None:
        limit = body.limit or self._settings.pages.default_messages
        cursors = {body.chat_id: Cursor(body.epoch, body.after_sequence)}
        proofs = NO_PROOFS if body.proof is None else {body.chat_id: body.proof}
        self._wait(Pull(token, now, cursors, body.chat_id, limit, proofs))

    def _wait(self, pull: Pull) -> None:
        if self._waiting is None:
            self._waiting = []
        self._waiting.append(pull)

    @property
    def waits(self) -> bool:
        return self._waiting is not None

    @property
    def ready(self) -> bool:
        """Whether a pull waits and none is under way."""
        return self._waiting is not None and self.under_way is None

    def begin(self, chats: Mapping[str, ChatProgress]) -> Pull | None:
        """Start the oldest waiting pull, if none is under way."""
        if self._waiting is None or self.under_way is not None:
            return None
        self._moved = None
        self.under_way = self._waiting.pop(0)
        self._waiting = self._waiting or None
        for chat_id, cursor in self.under_way.cursors.items():
            if (progress := chats.get(chat_id)) is not None:
                progress.pull(cursor)
        return self.under_way

    def end(self, pull: Pull, read: Page | ResumeRead) -> Page | ResumeRead | HoldfastError:
        """The result of a read, corrected by joins and leaves during it."""
        moved = self._moved or {}
        if isinstance(read, ResumeRead):
            return brought_up_to_date(read, pull.cursors, moved) if moved else read
        return (
            read
            if moved.get(read.chat_id, True)
            else NotAMember("not a member of this chat", chat_id=read.chat_id)
        )

    def concerns(self, chat_id: str, joined: bool) -> bool:
        """The user joined or left: whether the pull under way will show it."""
        if self.under_way is None or self.under_way.chat_id not in (None, chat_id):
            return False
        self._moved = self._moved or {}
        self._moved[chat_id] = joined
        return True

    def too_old(self, now: float) -> list[Pull]:
        """Remove and return the pulls that have waited too long."""
        if self._waiting is None:
            return []
        oldest = now - self._settings.backpressure.inbound.max_queue_age_seconds
        late = [pull for pull in self._waiting if pull.at <= oldest]
        self._waiting = self._waiting[len(late) :] or None
        return late

    @property
    def next_too_old(self) -> float | None:
        if self._waiting is None:
            return None
        return self._waiting[0].at + self._settings.backpressure.inbound.max_queue_age_seconds

    def close(self) -> None:
        self._waiting = self.under_way = None
