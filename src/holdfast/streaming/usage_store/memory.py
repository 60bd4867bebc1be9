"""A store of usage in memory, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.streaming.usage_store.contract import RunUsage, UsageKey, UsageQuery, UsageRow


class MemoryUsage:
    """See ``contract.UsageStore``. It remembers every run that has counted."""

    def __init__(self) -> None:
        self._rows: dict[UsageKey, UsageRow] = {}
        self._running: dict[str, RunUsage] = {}
        self._counted: set[str] = set()

    async def note(self, running: Sequence[RunUsage]) -> None:
        self._running |= {run.run_id: run for run in running if run.run_id not in self._counted}

    async def count(self, ended: Sequence[RunUsage]) -> None:
        for run in ended:
            if run.run_id not in self._counted:
                self._counted.add(run.run_id)
                self._running.pop(run.run_id, None)
                self._add(
                    UsageRow(run.key, 1, run.prompt_tokens, run.completion_tokens, run.estimated)
                )

    async def rows(self, query: UsageQuery) -> Sequence[UsageRow]:
        return [
            row
            for key, row in sorted(self._rows.items())
            if query.first_day <= key.day <= query.last_day
            and query.tenant in ("", key.tenant)
            and query.user in ("", key.user)
            and (query.after is None or key > query.after)
        ][: query.rows_max]

    async def forget_user(self, tenant: str, user: str) -> None:
        for run in list(self._running.values()):
            if (run.key.tenant, run.key.user) == (tenant, user):
                self._running[run.run_id] = run._replace(key=run.key._replace(user=""))
        for key in [key for key in self._rows if (key.tenant, key.user) == (tenant, user)]:
            self._add(self._rows.pop(key)._replace(key=key._replace(user="")))

    async def close(self) -> None:
        pass

    def _add(self, more: UsageRow) -> None:
        so_far = self._rows.get(more.key, UsageRow(more.key, 0, 0, 0, 0))
        sums = (a + b for a, b in zip(so_far[1:], more[1:], strict=True))
        self._rows[more.key] = UsageRow(more.key, *sums)
