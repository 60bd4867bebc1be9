"""What replies use: token rules before, counts after.

*Rules.* ``tokens:user`` and ``tokens:tenant`` limit prompt and output tokens; there are
none by default. What a reply will use is unknown while it can still be refused. So a
request is refused if nothing is left, on arrival and again when it is granted. At the
grant an estimate is charged: the prompt's bytes / 4 and ``max_output_tokens``. At the
end the charge is corrected to what was used. So a rule can be overdrawn by what the
active replies generate beyond their estimates, and by one estimate; nothing more passes
until that has drained.

*Counts.* Every granted run counts once, however it ends: with the provider's numbers,
else with an estimate that is marked as one, bytes / 4. A key that names no user is
``key:<id>`` in the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from holdfast import telemetry
from holdfast.clock import Clock, Ids, timestamp
from holdfast.limits.entry_points import EntryPoints
from holdfast.limits.http import refusal
from holdfast.message import User
from holdfast.streaming.reply import Payer, ReplyUsage
from holdfast.streaming.usage_store.buffer import UsageBuffer
from holdfast.streaming.usage_store.contract import (
    RunUsage,
    UsageKey,
    UsageQuery,
    UsageRow,
    UsageStore,
)

BYTES_PER_TOKEN = 4
OUTPUT_TOKENS = 1_000
"""Charged at the grant for the output of a request without ``max_output_tokens``."""
OUTPUT_TOKENS_MAX = 100_000
"""The most that is charged at the grant for output: a request with a huge
``max_output_tokens`` must not use up its tenant's rule while it runs."""
DAY_SECONDS = 86_400
STORED_SECONDS = 1.0
"""How long the end of a reply waits for its count, as it does for the log."""


class CountedRequest(Protocol):
    """What accounts need of a request."""

    @property
    def payer(self) -> Payer: ...
    @property
    def model(self) -> str: ...
    @property
    def fields(self) -> Mapping[str, bytes]: ...
    @property
    def max_output_tokens(self) -> int | None: ...


class ReplyAccounts:
    """The token rules and the counts of one node's replies. ``run`` must run."""

    def __init__(
        self, entry_points: EntryPoints, store: UsageStore, clock: Clock, ids: Ids
    ) -> None:
        self._entry_points = entry_points
        self._store = store
        self._clock = clock
        self._ids = ids
        self._runs: dict[str, UsageRun] = {}
        self._buffer = UsageBuffer(store, self._running)

    async def check(self, payer: Payer) -> None:
        """RateLimited if the payer has no tokens left. Takes nothing."""
        await self._take(payer, 0)

    def begin(self, request: CountedRequest) -> UsageRun:
        """A run of this request. It counts nothing before ``on_granted``."""
        return UsageRun(self, request)

    async def run(self) -> None:
        """Bring the counts to the store until cancelled."""
        await self._buffer.run()

    async def flush(self) -> None:
        """Count what has ended; before the store is closed, when ``run`` is over."""
        await self._buffer.flush()

    async def stored(self) -> None:
        """Wait until what has ended so far is in the store, a second at most: a reply
        whose end somebody saw has been counted, even if the node is killed then.
        """
        await self._buffer.stored(STORED_SECONDS)

    async def rows(self, query: UsageQuery) -> Sequence[UsageRow]:
        """What this node's replies used; raises as the store does."""
        return await self._store.rows(query)

    @property
    def lost(self) -> int:
        """Runs that were not counted because the store failed for too long."""
        return self._buffer.lost

    @property
    def trouble(self) -> str | None:
        """Why the store failed last; None if it works."""
        return self._buffer.trouble

    async def grant(self, run: UsageRun, payer: Payer, tokens: int) -> tuple[str, str]:
        """Charge the estimate; the id and the day of the run. RateLimited: it must not
        run.
        """
        await self._take(payer, tokens)
        run_id = self._ids.new("use_")
        self._runs[run_id] = run
        return run_id, _day_of(int(self._clock.now() // DAY_SECONDS))

    def end(self, ended: RunUsage, payer: Payer, tokens: int) -> None:
        """Count a run that has ended and correct its charge by ``tokens``."""
        del self._runs[ended.run_id]
        self._charge(payer, tokens)
        self._buffer.count(ended)
        telemetry.reply_tokens(ended.prompt_tokens, ended.completion_tokens)

    def _charge(self, payer: Payer, tokens: int) -> None:
        if self._entry_points.has_rule("tokens", who := _user_of(payer)):
            self._entry_points.charge("tokens", who, tokens)

    async def _take(self, payer: Payer, tokens: int) -> None:
        """RateLimited if none is left, however many are to be taken."""
        if not self._entry_points.has_rule("tokens", who := _user_of(payer)):
            return
        decisions = await self._entry_points.decide("tokens", who)
        if (refused := refusal(decisions)) is not None:
            telemetry.reply_refused("tokens")
            raise refused
        self._entry_points.charge("tokens", who, tokens - 1)  # one was taken to ask

    def _running(self) -> Sequence[RunUsage]:
        return [run.so_far() for run in self._runs.values()]


class UsageRun:
    """One generation of a reply: granted, growing, ended. An ungranted one counts
    nothing.
    """

    def __init__(self, accounts: ReplyAccounts, request: CountedRequest) -> None:
        self._accounts = accounts
        self._payer = request.payer
        self._model = request.model
        prompt_bytes = sum(len(value) for value in request.fields.values())
        self._prompt_tokens = _tokens(prompt_bytes)
        output = request.max_output_tokens
        output = OUTPUT_TOKENS if output is None else min(output, OUTPUT_TOKENS_MAX)
        self._charged = self._prompt_tokens + output
        self.text_bytes = 0
        """How much text the provider generated; grows with every token."""
        self.provider = ""
        """Who accepted the request."""
        self._granted: tuple[str, str] | None = None
        self._usage: ReplyUsage | None = None

    async def on_granted(self) -> None:
        """It is about to run. RateLimited: it must not, no tokens are left."""
        self._granted = await self._accounts.grant(self, self._payer, self._charged)

    def so_far(self) -> RunUsage:
        """Its counts if it ended now."""
        return self._counted(self.provider, self._estimate(self.provider))

    def end(self, provider: str, usage: ReplyUsage | None) -> ReplyUsage:
        """Count the run, once; what it used, for the reply's own usage entry.

        ``provider``: who accepted the request; "" if nobody did, which used nothing.
        ``usage``: the provider's numbers, if it named any.
        """
        if self._usage is None:
            self._usage = usage or self._estimate(provider)
            if self._granted is not None:
                used = self._usage.prompt_tokens + self._usage.completion_tokens
                ended = self._counted(provider, self._usage)
                self._accounts.end(ended, self._payer, used - self._charged)
        return self._usage

    async def stored(self) -> None:
        """Wait until its count is in the store, a second at most."""
        if self._granted is not None:
            await self._accounts.stored()

    def _estimate(self, provider: str) -> ReplyUsage:
        if not provider:
            return ReplyUsage(0, 0)
        return ReplyUsage(self._prompt_tokens, _tokens(self.text_bytes), estimated=True)

    def _counted(self, provider: str, usage: ReplyUsage) -> RunUsage:
        assert self._granted is not None
        run_id, day = self._granted
        key = UsageKey(day, self._payer.tenant, _name_of(self._payer), self._model, provider)
        return RunUsage(run_id, key, usage.prompt_tokens, usage.completion_tokens, usage.estimated)


@lru_cache(2)
def _day_of(number: int) -> str:
    """A day of UTC, counted from the epoch, as the rows name it."""
    return timestamp(number * DAY_SECONDS)[:10]


def _tokens(size_bytes: int) -> int:
    """An estimate: at least 1 for any text."""
    return -(-size_bytes // BYTES_PER_TOKEN)


def _user_of(payer: Payer) -> User:
    """A person's rule does not count a key."""
    return User(payer.tenant, "" if payer.is_key else payer.user)


def _name_of(payer: Payer) -> str:
    return f"key:{payer.user}" if payer.is_key else payer.user
