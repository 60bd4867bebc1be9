"""What a store of usage promises.

A *run* is one generation of a reply: an assistant's job that runs again is another run
of the same reply. A run counts once, at its end, whatever that end is. While it runs,
its counts so far are noted each second; a run that the next start of the node finds
noted but not ended counts with these.

A row sums the runs of one day, tenant, user, model and provider. An erased user's rows
lose the name: their counts move to the rows of the user "".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

COUNTED_SECONDS = 3600.0
"""How long a store remembers that a run has counted."""


class UsageKey(NamedTuple):
    """What a row is about. ``day``: ``YYYY-MM-DD`` in UTC, when the run began."""

    day: str
    tenant: str
    user: str
    model: str
    provider: str


class RunUsage(NamedTuple):
    """The counts of one run. ``run_id``: unique over all runs of all nodes.
    ``estimated``: the provider named no numbers.
    """

    run_id: str
    key: UsageKey
    prompt_tokens: int
    completion_tokens: int
    estimated: bool


class UsageRow(NamedTuple):
    """``estimated``: how many of the replies have estimated counts."""

    key: UsageKey
    replies: int
    prompt_tokens: int
    completion_tokens: int
    estimated: int


class UsageQuery(NamedTuple):
    """Rows of these days, both included. An empty tenant or user means all.

    ``after``: the last row of the page before.
    """

    first_day: str
    last_day: str
    tenant: str = ""
    user: str = ""
    after: UsageKey | None = None
    rows_max: int = 1000


class UsageStore(Protocol):
    """Every method raises Unavailable (nothing was done) or OutcomeUnknown.

    Each call is one commit, and each may be repeated.
    """

    async def note(self, running: Sequence[RunUsage]) -> None:
        """The counts so far of runs that have not ended. A run that has counted is not
        noted again.
        """
        ...

    async def count(self, ended: Sequence[RunUsage]) -> None:
        """Add runs to their rows, except those that have counted before."""
        ...

    async def rows(self, query: UsageQuery) -> Sequence[UsageRow]:
        """In the order of their keys."""
        ...

    async def forget_user(self, tenant: str, user: str) -> None:
        """Take a user's name from rows and noted runs; the sums stay."""
        ...

    async def close(self) -> None: ...
