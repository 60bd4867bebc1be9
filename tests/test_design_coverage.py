"""The coverage pages are true: each row has a state, and what it names exists.

A page has a table per section of a design document, and each row has one state. A test
that proves a row has ``@pytest.mark.covers("000 …")``: the document and the row's name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast import telemetry

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    page.stem.removeprefix("design-coverage-"): page
    for page in sorted((ROOT / "docs" / "project").glob("design-coverage-*.md"))
}
HEADING = re.compile(r"## (\d{3}): .+")
STATE = re.compile(r"as written(: .+)?|(stronger|changed|partly): .+|not built(: .+)?")
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
NOTHING = "-"

# Every name of a metric in the documents.
METRICS = [
    "gateway.connection.timeout",
    "gateway.slow_consumer.disconnects",
    "gateway.redis.connection_errors",
    "gateway.redis.available",
    "gateway.instances.healthy",
    "gateway.circuit_breaker.open",
    "gateway.connections.active",
    "gateway.connections.rate",
    "durability.dynamodb.throttle_count",
    "durability.dynamodb.available",
    "durability.transaction.conflict_rate",
    "durability.kafka.produce_latency_p99",
    "durability.kafka.available",
    "durability.counter.corruption",
    "durability.duplicate.sequence",
    "durability.idempotency.hit_rate",
    "durability.persist.latency_p99",
    "durability.messages.persisted_rate",
    "fanout.kafka.consumer_lag",
    "fanout.delivery.skip_rate",
    "fanout.messages.delivered_rate",
    "fanout.retry.count",
    "fanout.dlq.depth",
    "fanout.consumer.restarts",
    "client.resync.forced_rate",
    "sequence_allocation_latency_p99",
    "sequence_allocation_errors",
    "counter_missing_errors",
    "idempotency_hit_rate",
    "sequence_gap_rate",
    "transaction_conflict_rate",
    "messages_per_chat_per_minute",
    "admin_errors_total",
]


# The rows of every table of the documents, as the pages name them: how each begins.
# (Tables that compare options which were not chosen have none.)
TABLES = {
    "000 contract 1": ["contract 1, persisted", "contract 1, rejected",
                       "contract 1, persistence failed", "contract 1, connection lost"],
    "000 contract 2": ["outbound buffer 1000", "inbound queue 100", "send rate 10/s"],
    "000 contract 3": ["contract 3: backpressure", "contract 3, rate limit", "contract 3, overload",
                       "contract 3, disconnect due to upstream"],
    "000 contract 5": ["contract 5: a write", "contract 5: a publish",
                       "contract 5: the server retries"],
    "000 contract 6": ["contract 6: recipient", "contract 6: gateway", "contract 6: Redis"],
    "000 taxonomy": ["network timeout", "slow consumer", "DynamoDB throttling",
                     "DynamoDB transaction conflict", "DynamoDB unavailable",
                     "Kafka broker failover", "Kafka cluster down", "Redis connection reset",
                     "Redis cluster unavailable", "gateway crash", "counter corruption",
                     "idempotency collision"],
    "000 strategies": ["message persistence", "Kafka publish", "real-time fanout",
                       "WebSocket slow consumer", "gateway to durability: fail-fast",
                       "fanout to gateway", "Redis lookup: graceful", "DynamoDB read (history)"],
    "000 under pressure": ["outbound buffer above 95", "inbound rate exceeded",
                           "request queue full", "upstream slow", "Kafka consumer lag high"],
    "000 limits": ["outbound buffer 1000", "inbound queue 100", "send rate 10/s", "send burst 20",
                   "message size 4 KB", "gateway to durability 5 s", "breaker 5 failures in 30 s",
                   "slow-consumer grace 5 s"],
    "000 reconnection": ["slow consumer exceeds", "gateway under memory", "client state diverged",
                         "connection older than 24 h", "gateway graceful shutdown"],
    "000 tier 1": ["`durability.counter.corruption`", "`durability.duplicate.sequence`",
                   "`durability.dynamodb.available`", "`durability.kafka.available`"],
    "000 tier 2": ["`gateway.slow_consumer.disconnects`", "`gateway.circuit_breaker.open`",
                   "`durability.persist.latency_p99`", "`durability.transaction.conflict_rate`",
                   "`fanout.kafka.consumer_lag`", "`fanout.delivery.skip_rate`"],
    "000 tier 3": ["`gateway.connections.active`", "`gateway.connections.rate`",
                   "`durability.messages.persisted_rate`", "`fanout.messages.delivered_rate`",
                   "`client.resync.forced_rate`", "`durability.idempotency.hit_rate`"],
    "000 objectives": ["availability 99.9", "durability 99.999", "persist latency P99",
                       "delivery lag P99", "forced resync rate < 1 %"],
    "000 1.3": ["1.3 closed", "1.3 open", "1.3 half-open"],
    "000 2.1": ["2.1 ProvisionedThroughputExceeded", "2.1 TransactionConflict",
                "2.1 ConditionalCheckFailed", "2.1 ServiceUnavailable", "2.1 ValidationException"],
    "000 3.1": ["3.1 transient", "3.1 poison pill", "3.1 fatal"],
    "000 3.2": ["3.2 recipient offline", "3.2 gateway unreachable", "3.2 Redis lookup",
                "3.2 send timeout"],
    "000 isolation": ["connection (slow client)", "connection (gateway crash)",
                      "durability (DynamoDB down)", "durability (Kafka down)",
                      "durability (any failure)", "fanout (consumer lag)",
                      "fanout (delivery fails)"],
    "001 boundary": ["before ACK", "after ACK", "on retry"],
    "001 guarantees": ["strict monotonicity", "uniqueness (persistence)", "two-phase",
                       "gap safety", "idempotency integration", "read-after-write"],
    "001 failures": ["crash before step 3", "crash after step 3", "crash during step 4",
                     "crash after step 4", "crash during step 5", "DynamoDB unavailable",
                     "Kafka unavailable", "counter item missing"],
    "001 performance": ["step 1: idempotency check 2-5", "step 2: membership check 5-10",
                        "step 3: counter increment", "step 4: transaction", "step 5: Kafka produce",
                        "total 25-63 ms", "total with an idempotency hit"],
    "001 monitoring": ["`sequence_allocation_latency_p99`", "`sequence_allocation_errors`",
                       "`counter_missing_errors`", "`idempotency_hit_rate`", "`sequence_gap_rate`",
                       "`transaction_conflict_rate`", "`messages_per_chat_per_minute`"],
    "001 capacity": ["idempotency check: 0.5", "membership check: 1", "counter increment: 1",
                     "TransactWriteItems: 4", "total per message"],
    "001 gap density": ["gap density: normal", "gap density: network", "gap density: high",
                        "gap density: throttling"],
    "002 components": ["Queue Request Handler", "Queue Consumer Worker", "Redis Client"],
    "002 success metrics": ["429 errors", "P50 latency", "P99 latency about", "success rate",
                            "queue timeout rate"],
    "003 cascade matrix": ["matrix: failed and scheduled, not", "matrix: failed and scheduled, rel",
                           "matrix: failed, not scheduled", "matrix: processing",
                           "matrix: completed"],
    "003 ordering": ["financial transactions", "audit logs", "notifications", "analytics events"],
}  # fmt: skip


class Row(NamedTuple):
    document: str
    name: str
    module: str
    tests: str
    state: str


def rows_of(page: Path) -> Iterator[Row]:
    document = ""
    for line in page.read_text().splitlines():
        if found := HEADING.match(line):
            document = found.group(1)
        if line.startswith("|") and not line.startswith(("|---", "| row |")):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 4, f"{page.name} needs four cells: {line}"
            yield Row(document, *cells)


@cache
def covered_by(path: Path) -> dict[str, list[str]]:
    """The tests of a file, each with the rows it covers."""
    return {
        node.name: list(_covers(node))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def _covers(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for mark in node.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.covers":
            yield ast.literal_eval(mark.args[0])


ROWS = [(name, row) for name, page in PAGES.items() for row in rows_of(page)]


@pytest.mark.parametrize(
    ("page", "row"), ROWS, ids=[f"{page}-{row.document}-{row.name[:60]}" for page, row in ROWS]
)
def test_row_has_a_state_and_names_what_exists(page: str, row: Row) -> None:
    assert row.document, f"{row.name} is under no heading like '## 000: contracts'"
    assert STATE.fullmatch(row.state), f"{row.state!r} is no state"
    if row.state.startswith("not built"):
        assert (row.module, row.tests) == (NOTHING, NOTHING), "a row not built names no code"
        return
    module = row.module.strip("`")
    folder = ROOT if module.startswith(("tests/", "docs/")) else ROOT / "src" / "holdfast"
    assert (folder / module).is_file(), f"there is no {module}"
    named = NAMED_TEST.findall(row.tests)
    assert named, f"{row.name} is proven by no test"
    for path, test in named:
        assert test in covered_by(ROOT / path), f"there is no {path}::{test}"


@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_a_documents_table_is_listed(table: str) -> None:
    document = table[:3]
    names = [row.name for _, row in ROWS if row.document == document]
    missing = [row for row in TABLES[table] if not any(name.startswith(row) for name in names)]
    assert not missing, f"{table}: no row begins with {missing}"


def test_mark_names_a_row_that_names_its_test() -> None:
    """And every test of a row has a mark of the row's document."""
    tests_of: dict[str, set[tuple[str, str]]] = {}
    for _, row in ROWS:
        named = tests_of.setdefault(f"{row.document} {row.name}", set())
        named.update(NAMED_TEST.findall(row.tests))
    unmarked = {(test, row.split()[0]) for row, tests in tests_of.items() for test in tests}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for test, covered in covered_by(path).items():
            place = (path.relative_to(ROOT).as_posix(), test)
            for row in covered:
                assert place in tests_of.get(row, set()), f"{place} covers {row!r}"
                unmarked.discard((place, row.split()[0]))
    assert not unmarked, f"these tests prove a row and have no mark: {unmarked}"


@pytest.mark.covers("000 `gateway.slow_consumer.disconnects`, > 50/min for 5 min: SEV-3")
@pytest.mark.covers("001 `counter_missing_errors`, > 0")
@pytest.mark.parametrize("name", METRICS)
def test_metric_of_a_document_is_mapped_to_the_metric_whose_help_names_it(name: str) -> None:
    rows = [row for _, row in ROWS if re.match(rf"`{re.escape(name)}\b", row.name)]
    assert rows, f"{name} has no row"
    helps = {metric.name: metric.documentation for metric in telemetry.REGISTRY.collect()}
    carriers = {metric for metric, text in helps.items() if f"[{name}]" in text}
    assert len(carriers) <= 1, f"{name} is in several HELP texts: {carriers}"
    for row in rows:
        named = {found.removesuffix("_total") for found in re.findall(r"holdfast_\w+", row.state)}
        assert row.state.startswith("not built") or carriers & named, f"{row}: {carriers}"
