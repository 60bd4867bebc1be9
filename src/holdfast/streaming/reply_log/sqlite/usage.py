"""Usage rows in ``replies.db``."""

from __future__ import annotations

from collections.abc import Sequence

import apsw

from holdfast.streaming.reply_log.sqlite.file import SQL, RepliesFile, count_run
from holdfast.streaming.usage_store.contract import RunUsage, UsageKey, UsageQuery, UsageRow


class SqliteUsage:
    """See ``usage_store.contract.UsageStore``. Whoever opened the file closes it."""

    def __init__(self, file: RepliesFile) -> None:
        self._file = file

    async def note(self, running: Sequence[RunUsage]) -> None:
        runs = [_values(run) for run in running]

        def work(db: apsw.Connection) -> None:
            db.executemany(SQL["note"], runs)

        await self._file.transact(work)

    async def count(self, ended: Sequence[RunUsage]) -> None:
        now = self._file.now()

        def work(db: apsw.Connection) -> None:
            for run in ended:
                count_run(db, _values(run), now)

        await self._file.transact(work)

    async def rows(self, query: UsageQuery) -> Sequence[UsageRow]:
        after = query.after or UsageKey("", "", "", "", "")
        values = (*query[:4], *after, query.rows_max)
        return await self._file.transact(
            lambda db: [_row(found) for found in db.execute(SQL["usage"], values)]
        )

    async def forget_user(self, tenant: str, user: str) -> None:
        def work(db: apsw.Connection) -> None:
            rows = db.execute(SQL["usage_of"], (tenant, user)).fetchall()
            db.execute(SQL["forget_usage"], (tenant, user))
            for day, _, _, *rest in rows:
                db.execute(SQL["add_usage"], (day, tenant, "", *rest))
            db.execute(SQL["forget_runs"], (tenant, user))

        await self._file.transact(work)

    async def close(self) -> None:
        pass


def _values(run: RunUsage) -> tuple[object, ...]:
    return (run.run_id, *run.key, run.prompt_tokens, run.completion_tokens, int(run.estimated))


def _row(found: tuple[object, ...]) -> UsageRow:
    return UsageRow(UsageKey(*found[:5]), *found[5:])  # type: ignore[arg-type]
