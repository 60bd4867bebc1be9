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
