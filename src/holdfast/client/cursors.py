"""How far this device has one chat. (Pure.)

Four marks, each at most the one before: ``received`` (in the application's buffer; nothing is missing below),
``consumed`` (the application has moved past it), ``kept`` (that is on disk) and ``acked`` (the server knows).
So an ack never promises what a crash of this device could take back.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.message import Cursor, Message

UNKNOWN_EPOCH = -1


class Copy:
    """One chat as this device has it, within one epoch; a reset makes a new one.

    ``waiting`` counts its messages in the application's buffer; ``heard`` is the highest sequence we know exists.
    """

    __slots__ = ("acked", "consumed", "epoch", "heard", "kept", "received", "waiting")

    def __init__(self, epoch: int = UNKNOWN_EPOCH, sequence: int = 0) -> None:
        self.epoch = epoch
        self.received = self.consumed = self.kept = self.acked = sequence
        self.heard = 0
        self.waiting = 0

    @property
    def known(self) -> bool:
        """Whether a page has told us the chat's epoch; before that a push cannot be placed."""
        return self.epoch != UNKNOWN_EPOCH

    @property
    def cursor(self) -> Cursor:
        """What may be kept on disk."""
        return Cursor(self.epoch, self.consumed)

    def take(self, messages: Sequence[Message], through: int, room: int) -> list[Message]:
        """Take in a stretch that starts at or below ``received + 1`` and is whole up to ``through``.

        What we have already is left out. Of the rest at most ``room`` are taken; the mark moves no further than
        what was taken, so that the remainder is pulled again.
        """
        fresh = [message for message in messages if message.sequence > self.received]
        taken = fresh[:room]
        if len(taken) == len(fresh):
            self.received = max(self.received, through)
        elif taken:
            self.received = taken[-1].sequence
        self.heard = max(self.heard, through)
        self.waiting += len(taken)
        if not self.waiting:
            self.consumed = self.received
        return taken

    def skip_to(self, sequence: int) -> None:
        """Pass over everything up to ``sequence`` unseen."""
        self.received = self.consumed = max(self.received, sequence)
        self.heard = max(self.heard, self.received)

    def move_past(self, sequence: int) -> None:
        """The application is done with ``sequence``; a hole behind it that a page settled is passed with it."""
        self.waiting -= 1
        self.consumed = max(self.consumed, sequence if self.waiting else self.received)
