"""Names that other programs, stored data and dashboards depend on: a change of one
needs a decision, not a refactoring.

``golden/names.txt`` lists them. After an intended change write it again with
``python tests/unit/test_stable_names.py``, and read the diff of what it wrote.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import click
import msgspec
import typer.main

from holdfast import telemetry
from holdfast.access.issuers import ISSUERS_FILE, IssuerSettings
from holdfast.access.secrets import KEYS_FILE, SECRETS_FILE
from holdfast.api.openapi import plain_path
from holdfast.api.responses import STATUS
from holdfast.api.routes import ENDPOINTS
from holdfast.cli.app import app
from holdfast.drivers.sqlite.backup import MANIFEST
from holdfast.drivers.sqlite.restore import PLAN
from holdfast.errors import HoldfastError
from holdfast.limits.composition import NODES_NAME, RULES_NAME
from holdfast.limits.counters.contract import key_prefix
from holdfast.limits.counters.redis import RedisCounters, RedisSettings
from holdfast.limits.rules import Rule
from holdfast.limits.rulestore.contract import CHANNEL
from holdfast.limits.rulestore.postgres.connection import HEARTBEAT_LOCK, SCHEMA_LOCK, WRITERS_LOCK
from holdfast.limits.rulestore.postgres.notifications import region_lock
from holdfast.limits.snapshot_file import NODE_NAME_FILE
from holdfast.resilience import BreakerState
from holdfast.session.effects import SessionEvent
from holdfast.settings import paths
from holdfast.store.sqlite.database import CHATS
from holdfast.telemetry.alert import rules
from holdfast.telemetry.alerts import ALERTS
from holdfast.verify import history
from holdfast.wire.close_codes import CloseReason
from holdfast.wire.frames import CLIENT_FRAMES, PROTOCOL_VERSION, SERVER_PAYLOADS, SUBPROTOCOL
from holdfast.work.job import FailureAction, OnFailure, State
from holdfast.work.postgres.session import _CHANNEL
from holdfast.work.postgres.store import _MIGRATION_LOCK

GOLDEN = Path(__file__).parent / "golden" / "names.txt"
SOURCE = Path(__file__).resolve().parents[2] / "src" / "holdfast"


def errors(root: type[HoldfastError] = HoldfastError) -> Iterator[str]:
    for kind in root.__subclasses__():
        yield from errors(kind)
    if not root.__subclasses__():
        yield (
            f"{root.code} retryable={root.retryable} outcome={root.outcome}"
            f" status={STATUS[root.code]}"
        )


def closings() -> Iterator[str]:
    for closing in CloseReason:
        yield (
            f"{closing.code} {closing.reason} reconnect={closing.reconnect_allowed}"
            f" spread={closing.spread} forces_resync={closing.forces_resync}"
        )


def frames() -> Iterator[str]:
    yield f"version {PROTOCOL_VERSION}, subprotocol {SUBPROTOCOL}"
    for tag, frame in CLIENT_FRAMES.items():
        yield f"client {tag}: {fields_of(get_type_hints(frame)['payload'])}"
    for tag, payload in SERVER_PAYLOADS.items():
        yield f"server {tag}: {fields_of(payload)}"


def enums() -> Iterator[str]:
    for numbered in (State, OnFailure, FailureAction):
        yield f"job {' '.join(f'{each.name}={each.value}' for each in numbered)}"
    yield f"session {' '.join(sign.value for sign in SessionEvent)}"
    yield f"breaker {' '.join(state.value for state in BreakerState)}"


def metrics() -> Iterator[str]:
    for metric in set(telemetry.REGISTRY._names_to_collectors.values()):
        yield f"{metric._name} {metric._type} {' '.join(metric._labelnames)}".rstrip()  # type: ignore[attr-defined]


def alerts() -> Iterator[str]:
    for rule in rules(ALERTS):
        yield f"{rule.alert.name} {rule.severity}"


def label_values() -> Iterator[str]:
    """Every word on the lines that call a function of ``telemetry``; log lines and
    marks apart.
    """
    for path in SOURCE.rglob("*.py"):
        for arguments in re.findall(
            r"\btelemetry\.(?!log\b|mark\b)\w+\(([^\n]*)", path.read_text()
        ):
            yield from re.findall(r'"(\w+)"', arguments)


def endpoints() -> Iterator[str]:
    for each in ENDPOINTS:
        yield (
            f"{each.method} {plain_path(each)} {each.name} {each.caller} {each.scope}"
            f" key={each.key} {each.status}"
        )
        for what in ("query", "body", "answer"):
            if (shape := getattr(each, what)) is not None:
                yield f"{each.method} {plain_path(each)} {what}: {fields_of(shape)}"


def shapes() -> Iterator[str]:
    """The objects within bodies and frames, by their fields alone: what a class is
    called is nobody's business.
    """
    bodies = [
        shape
        for each in ENDPOINTS
        for shape in (each.query, each.body, each.answer)
        if shape is not None
    ]
    _, components = msgspec.json.schema_components(
        [*bodies, *CLIENT_FRAMES.values(), *SERVER_PAYLOADS.values()]
    )
    return (fields_in(schema) for schema in components.values())


def fields_of(shape: Any) -> str:
    schema = msgspec.json.schema(shape)
    return fields_in(
        schema["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    )


def fields_in(schema: dict[str, Any]) -> str:
    """The names in its JSON, each with the words that it allows."""
    words = {name: _words_of(inner) for name, inner in schema.get("properties", {}).items()}
    return " ".join(
        name + (f"={'|'.join(map(str, allowed))}" if allowed else "")
        for name, allowed in words.items()
    )


def _words_of(schema: dict[str, Any]) -> list[Any]:
    within = [
        *schema.get("anyOf", ()),
        *([schema["items"]] if isinstance(schema.get("items"), dict) else ()),
    ]
    return [*schema.get("enum", ()), *(word for inner in within for word in _words_of(inner))]


def commands(command: click.Command | None = None, words: str = "holdfast") -> Iterator[str]:
    command = command or typer.main.get_command(app)
    options = [
        word
        for each in command.params
        for word in (*each.opts, *each.secondary_opts)
        if word.startswith("-")
    ]
    yield f"{words}: {' '.join(options)}"
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{words} {name}")


def shared_names() -> Iterator[str]:
    """What nodes of different versions meet by in Redis and PostgreSQL."""
    counters = RedisCounters(RedisSettings())
    rule = Rule("*", "send:user", "fixed_window", 10, 60.0)
    yield f"redis key {counters.name((key_prefix('acme', rule), 'ann')).decode()}"
    yield f"redis keys {counters._nodes.decode()} {counters._resets.decode()}"
    yield f"channels {CHANNEL} {_CHANNEL}"
    limits = (WRITERS_LOCK, HEARTBEAT_LOCK, SCHEMA_LOCK, region_lock("local"))
    yield f"advisory locks {' '.join(map(str, limits))} {_MIGRATION_LOCK}"


def schemas() -> Iterator[str]:
    """Migrations and functions by their content: what was applied once is never edited."""
    for path in SOURCE.rglob("*.sql"):
        if path.stem != "statements":
            yield f"{path.relative_to(SOURCE)} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def history_tags() -> Iterator[str]:
    for kind in vars(history).values():
        if (
            isinstance(kind, type)
            and issubclass(kind, history.HistoryEvent)
            and kind is not history.HistoryEvent
        ):
            yield f"{kind.__struct_config__.tag}: {' '.join(kind.__struct_encode_fields__)}"


def files() -> Iterator[str]:
    """In a state directory and a backup; what a server makes by itself is checked where
    one is started.
    """
    yield from (
        CHATS.name,
        RULES_NAME,
        NODES_NAME,
        NODE_NAME_FILE,
        SECRETS_FILE,
        KEYS_FILE,
        ISSUERS_FILE,
    )
    yield from (MANIFEST, PLAN)


def settings() -> Iterator[str]:
    yield from (path for path, _ in paths())
    yield from (f"access.issuers.{each.name}" for each in dataclasses.fields(IssuerSettings))


SECTIONS = {
    "errors": errors,
    "closings": closings,
    "frames": frames,
    "enums": enums,
    "metrics": metrics,
    "alerts": alerts,
    "values of labels": label_values,
    "endpoints": endpoints,
    "shapes": shapes,
    "commands": commands,
    "names in Redis and PostgreSQL": shared_names,
    "schemas": schemas,
    "events of a history": history_tags,
    "files": files,
    "settings": settings,
}


def today() -> str:
    parts = (
        f"[{title}]\n" + "\n".join(sorted({line.rstrip() for line in lines()}))
        for title, lines in SECTIONS.items()
    )
    return "\n\n".join(parts) + "\n"


def test_no_name_that_others_depend_on_has_changed() -> None:
    changed = difflib.unified_diff(
        GOLDEN.read_text().splitlines(), today().splitlines(), "golden", "now", "", "", 0
    )
    assert not (shown := "\n".join(changed)), f"meant to change? {__doc__}\n{shown}"


if __name__ == "__main__":
    GOLDEN.write_text(today())
