"""What a node admits without the shared counters, and what it charges them later.

Each rule chooses by ``on_store_failure``:

- ``local_share``: limit ÷ live nodes, rounded down, starting from this node's share of
  what was last seen to remain. The remainder goes one each to the nodes that rank first
  for this rule and subject (rendezvous hashing of node names). So the shares add up to
  the limit, and most nodes admit nothing of a limit smaller than the number of nodes.
- ``open``: ten times the limit on each node, which is still a bound.
- ``closed``: nothing.

The bound depends on which nodes each node sees, now or in the file from its last run: n
nodes of which each sees m admit at most n ÷ m times the limit (ten nodes that each see
five: twice the limit). A node that does not know all names gives itself no remainder.

Up to ``keys_max`` subjects in use have a counter each. All others share one counter per
rule, so a node admits at most (``keys_max`` + 1) shares of a rule, however many ask.

``FallbackLimiter`` decides, and keeps account of what to charge to the shared counters
when they answer again. ``NodeMembership`` determines the live nodes that divide the
limit. (Pure.)
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
PARAMS_MAX = 1024
"""Scaled rules that are kept; when full, all are dropped and computed again."""


class FallbackLimiter:
    """This node's own counters for an outage. Times are the caller's, in ms."""

    def __init__(self, keys_max: int, node: str = "node", params_max: int = PARAMS_MAX) -> None:
        self._params_max = params_max
        self._node = node
        self._table = CounterTable(keys_max, overflows=True)
        self._spent: LruDict[tuple[LimitParams, int]] = LruDict(keys_max)
        self._held: LruDict[tuple[CounterKey, LimitParams]] = LruDict(keys_max)
        """By rule and hold: granted here, and unknown to the shared counters."""
        self._unconfirmed: LruDict[float] = LruDict(keys_max)
        """Keys charged for uncounted checks and not reported on since; and when."""
        self._seeded: LruDict[float] = LruDict(keys_max)
        self._scaled_params: dict[tuple[int, int, int], tuple[LimitParams, LimitParams]] = {}
        """This node's share of a rule's parameters, by their identity (which they are
        kept alive for) and by the size of the share."""
        self._nodes = 1
        self._names: tuple[str, ...] = ()
        self._ranks: LruDict[int] = LruDict(keys_max)

    @property
    def nodes(self) -> int:
        """The number of live nodes, as last known, that divide the limit."""
        return self._nodes

    def share_among(self, nodes: int, names: Sequence[str] = ()) -> None:
        """Divide by ``nodes`` from now on; ``names`` lists all of them, or is empty."""
        if (nodes, tuple(names)) != (self._nodes, self._names):
            self._nodes, self._names = nodes, tuple(names)
            self._scaled_params.clear()
            self._ranks.clear()

    def decide_one(
        self,
        rule: Rule,
        request: CounterRequest,
        last: CacheEntry | None,
        now: float,
        times: int = 1,
    ) -> CounterReading:
        """Decide ``times`` equal requests on one key.

        ``last`` is what the shared counters last said of the key.
        """
        if self._admits_nothing(rule, request.key):
            return _closed(request)
        own = CounterRequest(
            request.key, self._scaled(rule, request), request.cost, times, hold=request.hold
        )
        self._seed(rule, own, last, now)
        reading = self._table.take(own, now)
        if reading.admitted:
            self._remember(request, reading.admitted)
        return reading

    def decide(
        self,
        rules: Sequence[Rule],
        requests: Sequence[CounterRequest],
        known: Sequence[CacheEntry | None],
        now: float,
    ) -> tuple[CounterReading, ...]:
        """Decide one entry of several keys, all or none.

        ``known`` is what the shared counters last said of each key. Each caller is
        decided by itself, even if its check had been merged with others.
        """
        scaled = [
            CounterRequest(
                request.key, self._scaled(rule, request), request.cost, hold=request.hold
            )
            for rule, request in zip(rules, requests, strict=True)
        ]
        for rule, own, last in zip(rules, scaled, known, strict=True):
            self._seed(rule, own, last, now)
        closed = [
            self._admits_nothing(rule, request.key)
            for rule, request in zip(rules, requests, strict=True)
        ]
        if any(closed):
            each = zip(requests, closed, scaled, strict=True)
            return tuple(
                _closed(request) if is_closed else self._table.refuse(own, now)
                for request, is_closed, own in each
            )
        readings = self._table.decide(scaled, now)
        for request, reading in zip(requests, readings, strict=True):
            if reading.admitted:
                self._remember(request)
        return readings

    def spend(
        self, rule: Rule, request: CounterRequest, last: CacheEntry | None, now: float
    ) -> None:
        """Charge what passed before it was counted, even beyond the share."""
        if rule.on_store_failure != "closed":
            own = CounterRequest(
                request.key,
                self._scaled(rule, request),
                request.cost,
                request.spent,
                0,
                request.hold,
                request.spent,
            )
            self._seed(rule, own, last, now)
            self._table.take(own, now)
            self._remember(request, request.spent)
            self._unconfirmed.put(request.key, now)

    def exhausted(self, key: CounterKey, now: float) -> bool:
        """Whether uncounted checks used up our share, without a report since."""
        return self._unconfirmed.get(key) is not None and self._table.full(key, now)

    def on_counted(self, key: CounterKey) -> None:
        """The shared counters reported on this key."""
        if len(self._unconfirmed):
            self._unconfirmed.drop(key)

    def take_pending(self, now: float, most: int) -> list[Adjustment]:
        """Remove and return up to ``most`` charges that are neither drained nor ended.

        This node's own counters stay, so counters that come and go do not get a fresh
        share each time.
        """
        pending: list[Adjustment] = []
        while len(pending) < most and (spent := self._spent.pop_first()) is not None:
            key, (params, amount) = spent
            charged = math.ceil(min(amount, self._table.used(key, now)) - EPSILON)
            if charged:
                pending.append(Adjustment(key, params, charged=charged))
        while len(pending) < most and (held := self._held.pop_first()) is not None:
            (_, hold), (key, params) = held
            if (left_ms := self._table.held_ms(key, hold, now)) > 0:
                pending.append(Adjustment(key, params, held=hold, held_ms=left_ms))
        return pending

    def put_back(self, charges: Sequence[Adjustment]) -> None:
        """Take back charges that the counters did not accept."""
        for charge in charges:
            self._write(charge.key, charge.params, charge.charged, charge.held)

    @property
    def has_pending(self) -> bool:
        return len(self._spent) > 0 or len(self._held) > 0

    def forget(self, key: CounterKey) -> None:
        """The counter of this key was reset: nothing is used or pending.

        That includes its holds: ``take_pending`` returns only what is in the table.
        """
        self._table.reset(key)
        for memory in (self._spent, self._unconfirmed, self._seeded):
            memory.drop(key)

    def release(self, key: CounterKey, params: LimitParams, hold: str, now: float) -> bool:
        """End a hold. True if only this node knew it; else the counters must end it."""
        found = self._table.adjust(Adjustment(key, params, released=hold), now)
        return self._held.drop((key[0], hold)) and found

    def _admits_nothing(self, rule: Rule, key: CounterKey) -> bool:
        """Whether nothing is admitted: the rule is ``closed``, or our share is zero."""
        if rule.on_store_failure == "open":
            return False
        return rule.on_store_failure == "closed" or self._part(rule.capacity, key) == 0

    def _part(self, amount: int, key: CounterKey) -> int:
        """This node's share of ``amount``."""
        each, rest = divmod(amount, self._nodes)
        return each + (rest > 0 and self._rank(key) < rest)

    def _rank(self, key: CounterKey) -> int:
        """How many nodes rank before this one; all, if their names are unknown."""
        rank = self._ranks.get(key)
        if rank is None:
            rank = self._nodes
            if len(self._names) == self._nodes:
                ours = _weight(key, self._node)
                rank = sum(_weight(key, name) < ours for name in self._names)
            self._ranks.put(key, rank)
        return rank

    def _scaled(self, rule: Rule, request: CounterRequest) -> LimitParams:
        """This node's share of a rule's parameters.

        At least 1, because checks that already passed must be counted somewhere.
        """
        params, times = request.params, OPEN_FACTOR if rule.on_store_failure == "open" else 0
        limit = rule.limit * times or max(1, self._part(rule.limit, request.key))
        capacity = rule.capacity * times or max(1, self._part(rule.capacity, request.key))
        remembered = self._scaled_params.get((id(params), limit, capacity))
        if remembered is not None:
            return remembered[1]
        if len(self._scaled_params) >= self._params_max:
            self._scaled_params.clear()
        window_ms = params.window_ms
        if not times and params.algorithm == "token_bucket" and limit * self._nodes != rule.limit:
            # so that all nodes together drain at the rule's rate
            window_ms *= limit * self._nodes / rule.limit
        own = structs.replace(params, limit=limit, capacity=capacity, window_ms=window_ms)
        self._scaled_params[id(params), limit, capacity] = (params, own)
        return own

    def _seed(
        self, rule: Rule, request: CounterRequest, last: CacheEntry | None, now: float
    ) -> None:
        """Start from our share of what was left, once per reading, unless it drained.

        The reading may stem from another version of the rule, so only its used amount
        counts.
        """
        if last is None or request.hold or rule.on_store_failure != "local_share":
            return
        if (
            now >= last.at * 1000 + last.reading.reset_ms
            or self._seeded.get(request.key) == last.at
        ):
            return
        self._table.counter(request.key, request.params, now)
        # it shares the overflow counter, which says nothing about one key
        if request.key not in self._table:
            return
        self._seeded.put(request.key, last.at)
        left = max(0, rule.capacity - (last.reading.capacity - last.reading.remaining))
        used = (
            request.params.capacity
            - self._part(left, request.key)
            - int(self._table.used(request.key, now))
        )
        if used > 0:
            self._table.adjust(Adjustment(request.key, request.params, charged=used), now)

    def _remember(self, request: CounterRequest, times: int = 1) -> None:
        self._write(request.key, request.params, request.cost * times, request.hold)

    def _write(self, key: CounterKey, params: LimitParams, amount: int, hold: str) -> None:
        if hold:
            self._held.put((key[0], hold), (key, params))
        else:
            known = self._spent.get(key)
            self._spent.put(key, (params, amount + (known[1] if known else 0)))


def _weight(key: CounterKey, node: str) -> tuple[bytes, str]:
    """Orders the nodes differently per rule and subject, but equally on every node."""
    named = "\0".join((*key, node)).encode(errors="surrogatepass")
    return hashlib.blake2b(named, digest_size=8).digest(), node


def _closed(request: CounterRequest) -> CounterReading:
    params = request.params
    return CounterReading(
        0, 0, CLOSED_RETRY_MS, CLOSED_RETRY_MS, 0, params.limit, params.stamp, params.capacity
    )


class NodeMembership:
    """The live nodes as last known: more count at once, fewer only after a TTL.

    Counters that were restarted, emptied or unreachable know no node at first, and
    relearn them all within a TTL as nodes announce themselves. Therefore a dead node
    counts for up to two TTLs.
    """

    def __init__(
        self, ttl_seconds: float, node: str, count: int = 1, names: Iterable[str] = ()
    ) -> None:
        """``node`` is this one; ``count`` and ``names`` are from its last run."""
        self._ttl_seconds = ttl_seconds
        self._count = count
        self._most = 0
        """The highest count seen since ``_since``, while it is below ours."""
        self._since = 0.0
        self._missing_since: dict[str, float | None] = dict.fromkeys((*names, node))
        """By name; None if the node was alive at the last answer."""

    @property
    def count(self) -> int:
        return max(self._count, len(self._missing_since))

    @property
    def names(self) -> tuple[str, ...]:
        """All names in order, or none if some are unknown."""
        return tuple(sorted(self._missing_since)) if len(self._missing_since) == self.count else ()

    def on_answer(self, count: int, names: Iterable[str], now: float) -> None:
        """The counters reported these live nodes at ``now`` (monotonic seconds)."""
        self._update_names(set(names), now)
        if count >= self._count:
            self._count, self._most = count, 0
        elif not self._most:
            self._most, self._since = count, now
        else:
            self._most = max(self._most, count)
            if now - self._since >= self._ttl_seconds:
                self._count, self._most = self._most, 0

    def _update_names(self, alive: set[str], now: float) -> None:
        missing = {
            name: since if since is not None else now for name, since in self._missing_since.items()
        }
        gone = {name for name, since in missing.items() if now - since >= self._ttl_seconds}
        kept = {name: since for name, since in missing.items() if name not in alive | gone}
        self._missing_since = {**kept, **dict.fromkeys(alive)}

    def on_no_answer(self) -> None:
        """The counters did not answer, so earlier observations of absence prove
        nothing."""
        self._most = 0
        self._missing_since = dict.fromkeys(self._missing_since)
