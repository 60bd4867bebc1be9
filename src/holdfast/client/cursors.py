"""How far this device has one chat. (Pure.)

Four marks, each at most the one before: ``received`` (in the application's buffer; nothing is missing below),
``consumed`` (the application has moved past it), ``kept`` (that is on disk) and ``acked`` (the server knows).
So an ack never promises what a crash of this device could take back.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from holdfast.message import Message
from holdfast.wire.frames import CursorClaim

UNKNOWN_EPOCH = -1


class ChatCopy:
    """One chat as this device has it, within one epoch; a reset makes a new one.

    ``waiting`` counts its messages in the application's buffer; ``heard`` is the highest sequence we know exists.
    ``proof`` is the server's for ``received``, ``consumed_proof`` that for ``consumed``; None where none came.
    """

    __slots__ = ("acked", "consumed", "consumed_proof", "epoch", "heard", "kept", "proof", "received", "waiting")

    def __init__(self, epoch: int = UNKNOWN_EPOCH, sequence: int = 0, proof: str | None = None) -> None:
        self.epoch = epoch
        self.proof = self.consumed_proof = proof
        self.received = self.consumed = self.kept = self.acked = sequence
        self.heard = 0
        self.waiting = 0

    @property
    def known(self) -> bool:
        """Whether a page has told us the chat's epoch; before that a push cannot be placed."""
        return self.epoch != UNKNOWN_EPOCH

    @property
    def received_claim(self) -> CursorClaim:
        """What to ask the server with."""
        return CursorClaim(self.epoch, self.received, self.proof)

    @property
    def cursor(self) -> CursorClaim:
        """What may be kept on disk."""
        return CursorClaim(self.epoch, self.consumed, self.consumed_proof)

    def take(
        self, messages: Sequence[Message], through: int, room: int, proof: str | UnsetType = UNSET
    ) -> list[Message]:
        """Take in a stretch that starts at or below ``received + 1`` and is whole up to ``through``.

        What we have already is left out. Of the rest at most ``room`` are taken; the mark moves no further than
        what was taken, so that the remainder is pulled again. ``proof`` is that of ``through``.
        """
        fresh = [message for message in messages if message.sequence > self.received]
        taken = fresh[:room]
        if len(taken) == len(fresh):
            self._receive(through, proof or None)
        elif taken:
            self._receive(taken[-1].sequence, None)
        self.heard = max(self.heard, through)
        self.waiting += len(taken)
        if not self.waiting:
            self.consumed, self.consumed_proof = self.received, self.proof
        return taken

    def _receive(self, sequence: int, proof: str | None) -> None:
        if sequence > self.received or (sequence == self.received and proof):
            self.received, self.proof = sequence, proof

    def skip_to(self, sequence: int) -> None:
        """Pass over everything up to ``sequence`` unseen."""
        self._receive(sequence, None)
        self.consumed, self.consumed_proof = self.received, self.proof
        self.heard = max(self.heard, self.received)

    def move_past(self, sequence: int, proof: str | UnsetType = UNSET) -> None:
        """The application is done with ``sequence``; a hole behind it that a page settled is passed with it."""
        self.waiting -= 1
        if not self.waiting:
            self.consumed, self.consumed_proof = self.received, self.proof
        elif sequence > self.consumed:
            self.consumed, self.consumed_proof = sequence, proof or None
