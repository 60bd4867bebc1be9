"""What a node admits when the shared counters are away: its share, bounded, and what it owes them after.

Per rule ``on_store_failure``:

- ``local_share``: limit ÷ live nodes, beginning with the share of what was seen to remain. The number of nodes is
  the last one known. The bound therefore depends on what membership saw: n nodes of which each sees m admit at
  most n ÷ m times the limit (5 seen of 10: twice the limit), and never less than 1 each.
- ``open``: ten times the limit on each node, so still a bound.
- ``closed``: nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from holdfast.limits.algorithms import Reading, Terms, terms_of
from holdfast.limits.counters.contract import Adjustment, Ask, Key
from holdfast.limits.counters.table import CounterTable
from holdfast.limits.rules import Rule
from holdfast.limits.shortcuts import Bounded, Known

OPEN_FACTOR = 10
CLOSED_RETRY_MS = 1000.0


class LocalShare:
    """The node's own counters while the shared ones are away. Milliseconds are the caller's clock."""

    def __init__(self, keys_max: int) -> None:
        self._table = CounterTable(keys_max)
        self._spent: Bounded[tuple[Terms, int]] = Bounded(keys_max)
        self._seeded: Bounded[float] = Bounded(keys_max)
        self.nodes = 1

    def decide(
        self, rules: Sequence[Rule], asks: Sequence[Ask], known: Sequence[Known | None], now: float
    ) -> tuple[Reading, ...]:
        """One entry, all or none; ``known`` is what the shared counters last said of each key.

        Everybody asks for himself here, also who asked the counters together with others.
        """
        if any(rule.on_store_failure == "closed" for rule in rules):
            return tuple(_closed(rule) for rule in rules)
        scaled = [
            structs.replace(ask, terms=terms_of(self._scaled(rule)), times=1, want=0)
            for rule, ask in zip(rules, asks, strict=True)
        ]
        for rule, ask, last in zip(rules, scaled, known, strict=True):
            if last is not None and rule.on_store_failure == "local_share" and not ask.hold:
                self._seed(ask, last, now)
        readings = self._table.decide(scaled, now)
        for ask, own, reading in zip(asks, scaled, readings, strict=True):
            if reading.admitted and not ask.hold:
                self._remember(ask, own.cost * reading.admitted)
        return readings

    def debts(self, now: float) -> list[Adjustment]:
        """What was admitted here and has not drained yet; asking takes it off the books.

        Our own counters stay: counters that come and go do not get a new share each time.
        """
        owed = [
            Adjustment(key, terms, charged=int(min(amount, self._table.used(key, now))))
            for key, (terms, amount) in self._spent.items()
        ]
        self._spent.clear()
        return [each for each in owed if each.charged > 0]

    @property
    def owes(self) -> bool:
        return len(self._spent) > 0

    def release(self, key: Key, terms: Terms, hold: str, now: float) -> None:
        self._table.adjust(Adjustment(key, terms, released=hold), now)

    def _scaled(self, rule: Rule) -> Rule:
        return rule.scaled(OPEN_FACTOR, 1) if rule.on_store_failure == "open" else rule.scaled(1, self.nodes)

    def _seed(self, ask: Ask, last: Known, now: float) -> None:
        """Begin with our part of what was left, once per word of the counters, unless all has drained since."""
        if now >= last.at * 1000 + last.reading.reset_ms or self._seeded.get(ask.key) == last.at:
            return
        self._seeded.put(ask.key, last.at)
        used = ask.terms.capacity - last.reading.remaining // self.nodes - int(self._table.used(ask.key, now))
        if used > 0:
            self._table.adjust(Adjustment(ask.key, ask.terms, charged=used), now)

    def _remember(self, ask: Ask, amount: int) -> None:
        known = self._spent.get(ask.key)
        self._spent.put(ask.key, (ask.terms, amount + (known[1] if known else 0)))


def _closed(rule: Rule) -> Reading:
    return Reading(0, 0, CLOSED_RETRY_MS, CLOSED_RETRY_MS, 0, rule.limit, rule.stamp)
