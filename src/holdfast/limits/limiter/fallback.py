"""What a node admits when the shared counters are away: its share, bounded, and what it owes them after. (Pure.)

Per rule ``on_store_failure``:

- ``local_share``: limit ÷ live nodes, rounded down, beginning with the share of what was seen to remain. The
  remainder goes, one each, to the nodes that come first for this rule and subject (rendezvous hashing of their names).
  So the shares add up to the limit, and a limit below the number of nodes is nothing on most of them. The nodes are
  those last known, from disk if nobody has answered since the start. The bound therefore depends on what membership
  saw: n nodes of which each sees m admit at most n ÷ m times the limit (5 seen of 10: twice the limit). Where not all
  names are known, nobody has the remainder.
- ``open``: ten times the limit on each node, so still a bound.
- ``closed``: nothing.

Subjects are counted apart up to ``keys_max`` that are in use at a time. All beyond that share one counter per rule, so
that each node admits at most (``keys_max`` + 1) shares of a rule, however many ask.

Among which nodes limits are shared while the counters are away. (Pure.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

from msgspec import structs

from holdfast.limits.algorithms import EPSILON, CounterReading, LimitParams
from holdfast.limits.counters.contract import Adjustment, CounterKey, CounterRequest
from holdfast.limits.counters.table import CounterTable
from holdfast.limits.limiter.cache import CacheEntry, LruDict
from holdfast.limits.rules import Rule

OPEN_FACTOR = 10
CLOSED_RETRY_MS = 1000.0
TERMS_MAX = 1024
"""Rules whose share is remembered; when full they are forgotten and worked out again."""


class FallbackLimiter:
    """The node's own counters while the shared ones are away. Milliseconds are the caller's clock."""

    def __init__(self, keys_max: int, node: str = "node") -> None:
        self._node = node
        self._table = CounterTable(keys_max, overflows=True)
        self._spent: LruDict[tuple[LimitParams, int]] = LruDict(keys_max)
        self._held: LruDict[tuple[CounterKey, LimitParams]] = LruDict(keys_max)
        """By rule and hold: granted here, and unknown to the shared counters."""
        self._unheard: LruDict[float] = LruDict(keys_max)
        """Of what was let through, and when, the shared counters did not tell how it stands."""
        self._seeded: LruDict[float] = LruDict(keys_max)
        self._terms: dict[tuple[int, int, int], tuple[LimitParams, LimitParams]] = {}
        """Our share of a rule's terms, by their identity, for which they are kept, and by our parts of them."""
        self._nodes = 1
        self._names: tuple[str, ...] = ()
        self._ranks: LruDict[int] = LruDict(keys_max)

    @property
    def nodes(self) -> int:
        """Live nodes as last known: among so many the limit is shared."""
        return self._nodes

    def share_among(self, nodes: int, names: Sequence[str] = ()) -> None:
        """From now on among so many nodes; ``names`` are those of all of them, or nothing is known of some."""
        if (nodes, tuple(names)) != (self._nodes, self._names):
            self._nodes, self._names = nodes, tuple(names)
            self._terms.clear()
            self._ranks.clear()

    def decide_one(
        self, rule: Rule, ask: CounterRequest, last: CacheEntry | None, now: float, times: int = 1
    ) -> CounterReading:
        """One ask, for so many alike; ``last`` is what the shared counters last said of its key."""
        if self._is_shut(rule, ask.key):
            return _closed(ask)
        own = CounterRequest(ask.key, self._scaled(rule, ask), ask.cost, times, hold=ask.hold)
        self._seed(rule, own, last, now)
        reading = self._table.take(own, now)
        if reading.admitted:
            self._remember(ask, reading.admitted)
        return reading

    def decide(
        self, rules: Sequence[Rule], asks: Sequence[CounterRequest], known: Sequence[CacheEntry | None], now: float
    ) -> tuple[CounterReading, ...]:
        """One entry, all or none; ``known`` is what the shared counters last said of each key.

        Everybody asks for himself here, also who asked the counters together with others.
        """
        scaled = [
            CounterRequest(ask.key, self._scaled(rule, ask), ask.cost, hold=ask.hold)
            for rule, ask in zip(rules, asks, strict=True)
        ]
        for rule, own, last in zip(rules, scaled, known, strict=True):
            self._seed(rule, own, last, now)
        closed = [self._is_shut(rule, ask.key) for rule, ask in zip(rules, asks, strict=True)]
        if any(closed):
            each = zip(asks, closed, scaled, strict=True)
            return tuple(_closed(ask) if shut else self._table.refuse(own, now) for ask, shut, own in each)
        readings = self._table.decide(scaled, now)
        for ask, reading in zip(asks, readings, strict=True):
            if reading.admitted:
                self._remember(ask)
        return readings

    def spend(self, rule: Rule, ask: CounterRequest, last: CacheEntry | None, now: float) -> None:
        """What was let through before it was counted, and never was, is used here whether it fits or not."""
        if rule.on_store_failure != "closed":
            own = CounterRequest(ask.key, self._scaled(rule, ask), ask.cost, ask.spent, 0, ask.hold, ask.spent)
            self._seed(rule, own, last, now)
            self._table.take(own, now)
            self._remember(ask, ask.spent)
            self._unheard.put(ask.key, now)

    def exhausted(self, key: CounterKey, now: float) -> bool:
        """Whether our share of this key is used up by what was let through, and nobody has told how it stands since."""
        return self._unheard.get(key) is not None and self._table.full(key, now)

    def heard(self, key: CounterKey) -> None:
        """The shared counters told how this key stands."""
        if len(self._unheard):
            self._unheard.drop(key)

    def pending(self, now: float, most: int) -> list[Adjustment]:
        """At most so many of what was admitted here and has neither drained nor ended; they are off the books.

        Our own counters stay: counters that come and go do not get a new share each time.
        """
        owed: list[Adjustment] = []
        while len(owed) < most and (spent := self._spent.pop_first()) is not None:
            key, (terms, amount) = spent
            charged = math.ceil(min(amount, self._table.used(key, now)) - EPSILON)
            if charged > 0:
                owed.append(Adjustment(key, terms, charged=charged))
        while len(owed) < most and (held := self._held.pop_first()) is not None:
            (_, hold), (key, terms) = held
            if (left_ms := self._table.held_ms(key, hold, now)) > 0:
                owed.append(Adjustment(key, terms, held=hold, held_ms=left_ms))
        return owed

    def owe(self, debts: Sequence[Adjustment]) -> None:
        """Nobody took these: they are on the books again."""
        for debt in debts:
            self._write(debt.key, debt.terms, debt.charged, debt.held)

    @property
    def owes(self) -> bool:
        return len(self._spent) > 0 or len(self._held) > 0

    def forget(self, key: CounterKey) -> None:
        """The counter of this key was reset: nothing was admitted here, and nothing is owed, holds included: what is
        not in the table is not charged."""
        self._table.reset(key)
        for memory in (self._spent, self._unheard, self._seeded):
            memory.drop(key)

    def release(self, key: CounterKey, terms: LimitParams, hold: str, now: float) -> bool:
        """Whether it was ours alone; what the shared counters know of they must be told."""
        found = self._table.adjust(Adjustment(key, terms, released=hold), now)
        return self._held.drop((key[0], hold)) and found

    def _is_shut(self, rule: Rule, key: CounterKey) -> bool:
        """Nothing is admitted here: the rule says so, or our part of it is nothing."""
        if rule.on_store_failure == "open":
            return False
        return rule.on_store_failure == "closed" or self._part(rule.capacity, key) == 0

    def _part(self, amount: int, key: CounterKey) -> int:
        """Ours of so many, among all nodes."""
        each, rest = divmod(amount, self._nodes)
        return each + (rest > 0 and self._rank(key) < rest)

    def _rank(self, key: CounterKey) -> int:
        """How many nodes come before us for this rule and subject; all, if we do not know who they are."""
        rank = self._ranks.get(key)
        if rank is None:
            rank = self._nodes
            if len(self._names) == self._nodes:
                ours = _weight(key, self._node)
                rank = sum(_weight(key, name) < ours for name in self._names)
            self._ranks.put(key, rank)
        return rank

    def _scaled(self, rule: Rule, ask: CounterRequest) -> LimitParams:
        """Our part of the terms: at least 1, for what was let through already must be counted somewhere."""
        terms, times = ask.terms, OPEN_FACTOR if rule.on_store_failure == "open" else 0
        limit = rule.limit * times or max(1, self._part(rule.limit, ask.key))
        capacity = rule.capacity * times or max(1, self._part(rule.capacity, ask.key))
        remembered = self._terms.get((id(terms), limit, capacity))
        if remembered is not None:
            return remembered[1]
        if len(self._terms) >= TERMS_MAX:
            self._terms.clear()
        window_ms = terms.window_ms
        if not times and terms.algorithm == "token_bucket" and limit * self._nodes != rule.limit:
            window_ms *= limit * self._nodes / rule.limit  # what drains on all nodes together is what the rule says
        own = structs.replace(terms, limit=limit, capacity=capacity, window_ms=window_ms)
        self._terms[id(terms), limit, capacity] = (terms, own)
        return own

    def _seed(self, rule: Rule, ask: CounterRequest, last: CacheEntry | None, now: float) -> None:
        """Begin with our part of what is left, once per word of the counters, unless all has drained since.

        They said what was used, perhaps under another version of the rule.
        """
        if last is None or ask.hold or rule.on_store_failure != "local_share":
            return
        if now >= last.at * 1000 + last.reading.reset_ms or self._seeded.get(ask.key) == last.at:
            return
        self._table.counter(ask.key, ask.terms, now)
        if ask.key not in self._table:  # one of many in an overflowing table, whose use says nothing of the others'
            return
        self._seeded.put(ask.key, last.at)
        left = max(0, rule.capacity - (last.reading.capacity - last.reading.remaining))
        used = ask.terms.capacity - self._part(left, ask.key) - int(self._table.used(ask.key, now))
        if used > 0:
            self._table.adjust(Adjustment(ask.key, ask.terms, charged=used), now)

    def _remember(self, ask: CounterRequest, times: int = 1) -> None:
        self._write(ask.key, ask.terms, ask.cost * times, ask.hold)

    def _write(self, key: CounterKey, terms: LimitParams, amount: int, hold: str) -> None:
        if hold:
            self._held.put((key[0], hold), (key, terms))
        else:
            known = self._spent.get(key)
            self._spent.put(key, (terms, amount + (known[1] if known else 0)))


def _weight(key: CounterKey, node: str) -> tuple[bytes, str]:
    """Nodes are in another order for each rule and subject, and every node knows it."""
    named = "\0".join((*key, node)).encode(errors="surrogatepass")
    return hashlib.blake2b(named, digest_size=8).digest(), node


def _closed(ask: CounterRequest) -> CounterReading:
    terms = ask.terms
    return CounterReading(0, 0, CLOSED_RETRY_MS, CLOSED_RETRY_MS, 0, terms.limit, terms.stamp, terms.capacity)


class NodeMembership:
    """Live nodes as last known: more are believed at once, fewer only after no more were seen for a whole TTL.

    Counters that were restarted, emptied or away for long know nobody, and count up again as nodes announce
    themselves; within a TTL every node that lives has. So a node that died is counted for up to two TTLs.
    """

    def __init__(self, ttl_seconds: float, node: str, count: int = 1, names: Iterable[str] = ()) -> None:
        """``node`` is this one; ``count`` and ``names`` are what was known before."""
        self._ttl_seconds = ttl_seconds
        self._count = count
        self._most = 0
        """The most seen since ``_since``, all of them fewer than we count."""
        self._since = 0.0
        self._missing_since: dict[str, float | None] = dict.fromkeys((*names, node))
        """By name; None: seen when the counters last answered."""

    @property
    def count(self) -> int:
        return max(self._count, len(self._missing_since))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all of them, in order; none if not all are known."""
        return tuple(sorted(self._missing_since)) if len(self._missing_since) == self.count else ()

    def seen(self, count: int, names: Iterable[str], now: float) -> None:
        """So many were alive when we announced ourselves, and these. ``now`` is in monotonic seconds."""
        self._see_names(set(names), now)
        if count >= self._count:
            self._count, self._most = count, 0
        elif not self._most:
            self._most, self._since = count, now
        else:
            self._most = max(self._most, count)
            if now - self._since >= self._ttl_seconds:
                self._count, self._most = self._most, 0

    def _see_names(self, alive: set[str], now: float) -> None:
        missing = {name: since if since is not None else now for name, since in self._missing_since.items()}
        gone = {name for name, since in missing.items() if now - since >= self._ttl_seconds}
        kept = {name: since for name, since in missing.items() if name not in alive | gone}
        self._missing_since = {**kept, **dict.fromkeys(alive)}

    def unseen(self) -> None:
        """Nobody answered: what was seen before proves nothing of what comes after."""
        self._most = 0
        self._missing_since = dict.fromkeys(self._missing_since)
