"""The holds of concurrency rules that were asked for here: of which counter each is.

A rule may be changed, switched off or overtaken by a more specific one while somebody holds; what was granted is given
back, and renewed, where it was granted. (Pure.)
"""

from __future__ import annotations

from holdfast.clock import Ids
from holdfast.limits.algorithms import LimitParams
from holdfast.limits.counters.contract import CounterKey
from holdfast.limits.rules import Check
from holdfast.limits.shortcuts import LruDict


class Holds:
    """At most ``size_max``; of one that was forgotten today's rule is asked."""

    def __init__(self, ids: Ids, size_max: int) -> None:
        self._ids = ids
        self._places: LruDict[tuple[CounterKey, LimitParams]] = LruDict(size_max)

    def ask(self, key: CounterKey, terms: LimitParams) -> str:
        """The name of a hold that is about to be asked for."""
        hold = self._ids.new("hld_")
        self._places.put(("", hold), (key, terms))
        return hold

    def place(self, check: Check, hold: str) -> tuple[CounterKey, LimitParams] | None:
        """Where it was asked for; None if it is not known here, or not this subject's."""
        found = self._places.get(("", hold))
        if found is None:
            return None
        prefix, subject = found[0]
        return found if subject == check.subject and prefix.startswith(f"{{{check.tenant}}}:") else None

    def end(self, hold: str) -> tuple[CounterKey, LimitParams] | None:
        """It is given back; where it was asked for, if that is known here."""
        found = self._places.get(("", hold))
        self._places.drop(("", hold))
        return found
