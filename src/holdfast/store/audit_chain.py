"""The hash chains of the audit log: a changed, removed or added record shows. (Pure.)

Every node has a chain of its own, so that nodes need not wait for each other: a
record's hash covers its fields and the hash of the record that its node wrote before.
Records without a hash are older than the chains.

Somebody who can write the database can make the rest of a chain again. So note the
last hash of each node elsewhere: a hash that was there once must be found again.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from msgspec.structs import replace

from holdfast.store.commands import CommandContext
from holdfast.store.contract import AuditRecord

RECORD_PREFIX = "aud_"


def audit_id(act: CommandContext) -> str:
    """The id of an act's record: the ULID of its message."""
    return RECORD_PREFIX + act.message_id.rpartition("_")[2]


def chained_record(
    number: int, act: CommandContext, action: str, target: str, details: str, previous: str
) -> AuditRecord:
    """The record of an act, behind the hash ``previous`` of its node."""
    record = AuditRecord(
        number=number,
        at=act.at,
        actor=act.actor.user_id,
        action=action,
        target=target,
        reason=act.reason,
        details=details,
        record_id=audit_id(act),
        node=act.node,
        hash="",
    )
    return replace(record, hash=hash_of(record, previous))


def hash_of(record: AuditRecord, previous: str) -> str:
    """The hash over all fields but the number, each with its length in bytes in front
    of it, behind the hash ``previous``.
    """
    act = (record.at, record.actor, record.action, record.target, record.reason, record.details)
    texts = (previous, record.node, record.record_id, *act)
    return sha256("".join(f"{len(t.encode())}:{t}" for t in texts).encode()).hexdigest()


class AuditChains:
    """Follows the chains through the log, page by page."""

    def __init__(self) -> None:
        self.last: dict[str, str] = {}
        """The last hash of each node."""
        self.hashes: set[str] = set()

    def first_break(self, records: Iterable[AuditRecord]) -> AuditRecord | None:
        """The first of the next records that does not continue its node's chain."""
        for each in records:
            previous = self.last.get(each.node, "")
            if each.hash == "" == previous:
                continue
            if each.hash != hash_of(each, previous):
                return each
            self.last[each.node] = each.hash
            self.hashes.add(each.hash)
        return None
