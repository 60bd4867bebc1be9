"""How much of one chat this device has. (Pure.)

A copy has four marks, each at most the one before it:

- ``received``  in the application's buffer, with nothing missing below
- ``consumed``  the application asked for the event after it
- ``kept``      the state file has it
- ``acked``     the server has been sent an ack for it

So an ack never promises anything that a crash of this device could take back.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from holdfast.message import Message
from holdfast.wire.frames import CursorClaim

UNKNOWN_EPOCH = -1


class ChatCopy:
    """One chat on this device, within one epoch; a reset replaces the copy.

    ``waiting`` counts its messages in the application's buffer; ``known_head`` is the
    highest sequence known to exist. ``proof`` is the server's for ``received``,
    ``consumed_proof`` the one for ``consumed``; None if the server sent none.
    """

    __slots__ = (
        "acked",
        "consumed",
        "consumed_proof",
        "epoch",
        "kept",
        "known_head",
        "proof",
        "received",
        "waiting",
    )

    def __init__(
        self, epoch: int = UNKNOWN_EPOCH, sequence: int = 0, proof: str | None = None
    ) -> None:
        self.epoch = epoch
        self.proof = self.consumed_proof = proof
        self.received = self.consumed = self.kept = self.acked = sequence
        self.known_head = 0
        self.waiting = 0

    @property
    def known(self) -> bool:
        """Whether a page has set the epoch; before that a push cannot be ordered."""
        return self.epoch != UNKNOWN_EPOCH

    @property
    def received_claim(self) -> CursorClaim:
        """The cursor to resume and pull from."""
        return CursorClaim(self.epoch, self.received, self.proof)

    @property
    def cursor(self) -> CursorClaim:
        """The cursor that may be kept on disk."""
        return CursorClaim(self.epoch, self.consumed, self.consumed_proof)

    def take(
        self, messages: Sequence[Message], through: int, room: int, proof: str | UnsetType = UNSET
    ) -> list[Message]:
        """Take messages from at most ``received + 1`` on, complete to ``through``.

        Returns the new ones, at most ``room``. ``received`` moves no further than
        these, so that the remainder is pulled again. ``proof`` belongs to ``through``.
        """
        fresh = [message for message in messages if message.sequence > self.received]
        taken = fresh[:room]
        if len(taken) == len(fresh):
            self._receive(through, proof or None)
        elif taken:
            self._receive(taken[-1].sequence, None)
        self.known_head = max(self.known_head, through)
        self.waiting += len(taken)
        if not self.waiting:
            self.consumed, self.consumed_proof = self.received, self.proof
        return taken

    def _receive(self, sequence: int, proof: str | None) -> None:
        if sequence > self.received or (sequence == self.received and proof):
            self.received, self.proof = sequence, proof

    def skip_to(self, sequence: int) -> None:
        """Skip everything up to ``sequence`` without delivering it."""
        self._receive(sequence, None)
        self.consumed, self.consumed_proof = self.received, self.proof
        self.known_head = max(self.known_head, self.received)

    def move_past(self, sequence: int, proof: str | UnsetType = UNSET) -> None:
        """The application is done with ``sequence`` and a settled hole behind it."""
        self.waiting -= 1
        if not self.waiting:
            self.consumed, self.consumed_proof = self.received, self.proof
        elif sequence > self.consumed:
            self.consumed, self.consumed_proof = sequence, proof or None
