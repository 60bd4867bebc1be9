"""Where a connection is in each of its chats: ``live`` or ``behind``. (Pure.)

``through`` is the sequence up to which everything was queued to this connection, by
push or by page. A live chat takes ``through + 1`` next and nothing else; anything later
makes it behind. A chat that is behind gets no pushes: its client pulls, and the page
that reaches the chat's *head*, its newest known sequence, makes it live again, in the
same step. A chat starts behind. The head is remembered while behind, so a push that
arrives while a page is being read is never lost: the page is then sent with
``has_more``.

A membership counts from where it was read, ``known``: events up to there are reflected
in it. After a loss of log entries it must be read again, and until then the chat stays
behind, whatever the client pulls.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast.message import Cursor, Page

_UNREAD = -1
"""Instead of the epoch in which a membership was read: it must be read again."""


class ChatProgress:
    """One chat of one connection. ``expects`` is the next sequence to push while live,
    and 0 while behind.
    """

    __slots__ = (
        "_head",
        "_known_epoch",
        "_known_sequence",
        "_reached",
        "acked",
        "epoch",
        "expects",
    )

    def __init__(self, head: Cursor) -> None:
        # Two integers, not a Cursor: 129 bytes for each chat instead of 185.
        self._known_epoch, self._known_sequence = head
        self.epoch = head.epoch
        self.expects = 0
        self.acked = 0
        self._head = head.sequence
        self._reached = 0

    @property
    def live(self) -> bool:
        return self.expects > 0

    @property
    def through(self) -> int:
        return self.expects - 1 if self.expects else self._reached

    @property
    def head(self) -> int:
        """The newest sequence that is known to exist."""
        return max(self._head, self.through)

    @property
    def known(self) -> Cursor | None:
        """The chat's (epoch, head) when the membership was read; None: it must be read
        again.
        """
        if self._known_epoch == _UNREAD:
            return None
        return Cursor(self._known_epoch, self._known_sequence)

    def raise_head(self, sequence: int) -> None:
        if sequence > self._head:
            self._head = sequence

    def fall_behind(self) -> None:
        """From now on the client must pull."""
        self._head = self.head
        self._reached = self.through
        self.expects = 0

    def on_head(self, head: Cursor) -> None:
        """Compare with the chat's head in the store.

        A newer epoch starts its numbering again; an older one is late.
        """
        if head.epoch > self.epoch:
            self._restart(head.epoch)
            self._head = 0
        if head.epoch == self.epoch:
            self.raise_head(head.sequence)

    def reflects(self, event: Cursor) -> bool:
        """Whether the membership was read after this membership event of the chat."""
        return event.epoch < self._known_epoch or (
            self._known_epoch != _UNREAD and event.sequence <= self._known_sequence
        )

    def on_membership_read(self, read: Cursor) -> bool:
        """The membership was read (again). Returns whether the client must pull.

        After a loss a chat whose every message was queued is live again at once.
        """
        known, restarts = self.known, read.epoch > self.epoch
        if known is None or read > known:
            self._known_epoch, self._known_sequence = read
        self.on_head(read)
        if known is not None or self.expects:
            return restarts
        if restarts or not 0 < self._reached >= self.head:
            return True
        self.expects = self._reached + 1
        return False

    def on_epoch_raised(self, raised: Cursor) -> None:
        """The log says that the chat continues after ``raised`` in a new epoch."""
        if self._known_epoch != _UNREAD and raised.epoch > self._known_epoch:
            self._known_epoch, self._known_sequence = raised

    def on_log_lost(self) -> None:
        """Log entries are lost, perhaps the end of this membership."""
        self.fall_behind()
        self._known_epoch = _UNREAD

    def pull(self, cursor: Cursor) -> None:
        """The client asks for what follows ``cursor``, and has all before it.

        Reading an old page changes nothing: pushes go on. A client that lacks more than
        one page pulls until ``has_more`` is false, which ``settle`` says only when the
        page reaches everything that was pushed.
        """
        if cursor.epoch != self.epoch:
            self.fall_behind()
        else:
            self.acked = max(self.acked, min(cursor.sequence, self.head))

    def settle(self, page: Page) -> Page:
        """A page is about to be queued to the client; returns it as it must be sent."""
        self.on_head(Cursor(page.epoch, page.head))
        if page.epoch < self.epoch:
            return replace(page, has_more=True)
        if page.reset:
            self._restart(page.epoch)
        if page.through >= self.head and self._known_epoch != _UNREAD:
            self.expects = page.through + 1
        elif not self.expects:
            self._reached = max(self._reached, page.through)
        if page.has_more or page.through >= self.head:
            return page
        return replace(page, has_more=True, head=self.head)

    def _restart(self, epoch: int) -> None:
        """The client drops its copy and starts at 0."""
        self._head = self.head
        self.epoch = epoch
        self.expects = self._reached = self.acked = 0
