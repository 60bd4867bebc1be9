"""Proof that this server once sent a chat up to a sequence. (Pure.)

A store that was rolled back does not know what it lost; a client with a message beyond
the head does. But a cursor is only a client's claim, and trusting it makes every member
of the chat drop its copy. So each pushed message and each page carries a proof of its
(tenant, chat, epoch, sequence): 64 bits of a keyed BLAKE2b. The key is derived from the
token secret, which is not in the store and is not rolled back with it.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

from holdfast.message import Cursor

PROOF_BYTES = 8


class CursorProofs:
    """Makes and checks proofs.

    The first token secret makes them, all check them. A secret that is gone voids its
    proofs; a client without a proof is only reset itself.
    """

    def __init__(self, *secrets: bytes) -> None:
        self._makes, *self._checks = (
            blake2b(
                key=blake2b(secret, digest_size=32, person=b"holdfast.cursor").digest(),
                digest_size=PROOF_BYTES,
            )
            for secret in secrets
        )

    def of(self, tenant: str, chat_id: str, cursor: Cursor) -> str:
        return _proof(self._makes, tenant, chat_id, cursor)

    def proves(self, proof: str | None, tenant: str, chat_id: str, cursor: Cursor) -> bool:
        """Whether ``proof`` was made by this server for exactly this cursor."""
        return proof is not None and any(
            hmac.compare_digest(proof.encode(), _proof(keyed, tenant, chat_id, cursor).encode())
            for keyed in (self._makes, *self._checks)
        )


def _proof(keyed: blake2b, tenant: str, chat_id: str, cursor: Cursor) -> str:
    copy = keyed.copy()
    copy.update(f"{tenant}\0{chat_id}\0{cursor.epoch}\0{cursor.sequence}".encode())
    return copy.hexdigest()
