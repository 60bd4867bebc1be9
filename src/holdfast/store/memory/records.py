"""The audit log and the answers under idempotency keys."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from holdfast.message import PageToken, User
from holdfast.store.audit_chain import chained_record
from holdfast.store.commands import CommandContext, CommandResult
from holdfast.store.contract import AuditPage, AuditRecord
from holdfast.store.pages import check_end, number_of, number_token
from holdfast.store.plan import AuditNote, check_not_running, check_same, check_text, end_of_run


class KeptAnswer(NamedTuple):
    """What a key stands for. ``answer`` is "" and the last two are set while a request
    runs.
    """

    fingerprint: str
    answer: CommandResult | str
    at: str
    node: str = ""
    until: str = ""


class MemoryRecords:
    """See ``Records`` of ``holdfast.store.contract``."""

    def __init__(self) -> None:
        self._answers: dict[tuple[User, str], KeptAnswer] = {}
        self._audit: list[AuditRecord] = []

    async def record(
        self, act: CommandContext, action: str, target: str, details: str = ""
    ) -> None:
        check_text("reason", act.reason + details)
        self._put_audit(act, action, target, details)

    async def audit(self, after: PageToken | None, limit: int) -> AuditPage:
        found = self._audit[number_of("audit", after) :]
        if not found:
            check_end(after, len(self._audit))
        records = found[:limit]
        return AuditPage(
            records, number_token("audit", records[-1].number) if len(found) > limit else None
        )

    async def begin(self, act: CommandContext, node: str, seconds: float) -> str | None:
        key = (act.actor, act.key or "")
        if (earlier := self._answers.get(key)) is not None:
            check_same(act, earlier.fingerprint)
            assert isinstance(earlier.answer, str), "the fingerprint of a command is no request's"
            if not earlier.answer:
                check_not_running(act, node, earlier.node, earlier.until)
            return earlier.answer
        until = end_of_run(act, seconds)
        self._answers[key] = KeptAnswer(act.fingerprint, "", act.at, node, until)
        return None

    async def keep(self, act: CommandContext, answer: str | None) -> None:
        check_text("answer", answer or "")
        key = (act.actor, act.key or "")
        if answer is None:
            self._answers.pop(key, None)
        else:
            self._answers[key] = KeptAnswer(act.fingerprint, answer, act.at)

    async def forget_answers(self, before: str, limit: int) -> int:
        old = sorted((kept.at, key) for key, kept in self._answers.items() if kept.at < before)
        for _, key in old[:limit]:
            del self._answers[key]
        return len(old[:limit])

    async def forget_answers_of(self, user: User) -> None:
        self._answers = {key: answer for key, answer in self._answers.items() if key[0] != user}

    def _note(self, act: CommandContext, record: AuditNote) -> None:
        details = msgspec.json.encode(record.details).decode()
        self._put_audit(act, record.action, record.target, details)

    def _put_audit(self, act: CommandContext, action: str, target: str, details: str) -> None:
        previous = next((r.hash for r in reversed(self._audit) if r.node == act.node), "")
        number = len(self._audit) + 1
        self._audit.append(chained_record(number, act, action, target, details, previous))
