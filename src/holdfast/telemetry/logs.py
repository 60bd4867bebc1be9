"""Every log line, ours and our libraries': where it goes, and what must never stand in one."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

import structlog

log: structlog.stdlib.BoundLogger = structlog.get_logger("holdfast")


LOG_VALUE_CHARACTERS_MAX = 2000
_SECRET = re.compile(
    r"hf_(?:tenant|admin)_[\w-]+"
    r"|eyJ[\w-]+\.[\w-]+\.[\w-]*"
    r"|(?i:bearer[ .])[\w.~+/=-]{8,}"
    r"|(?<=://)[^/\s]+(?=@)"  # who and by which password, in the URL of an engine
    r"|(?i:(?<=password=)[^&\s]+)"
)


def safe_text(value: str) -> str:
    """A text as it may stand in a log: without secrets, without control characters, not too long."""
    value = _SECRET.sub("[secret]", value)
    if len(value) > LOG_VALUE_CHARACTERS_MAX:
        value = value[:LOG_VALUE_CHARACTERS_MAX] + f"… ({len(value)} characters)"
    return value


def _safe(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if not isinstance(value, int | float | None):
            event[name] = safe_text(value if isinstance(value, str) else repr(value))
    return event


def _escaped(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """For people's terminals, which obey control characters; JSON escapes them by itself."""
    for name, value in event.items():
        if isinstance(value, str) and name != "exception":
            event[name] = "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)
    return event


if not structlog.is_configured():
    # In somebody else's process (the client, the work library) our lines are lines of its own logging: structlog
    # alone would print them to its standard output, tracebacks with every local variable.
    structlog.configure(
        processors=[
            structlog.processors.format_exc_info,
            _safe,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def configure_logging(json: bool, level: str = "info", stream: TextIO | None = None) -> None:
    """Every log line, ours and our libraries', to ``stream`` (stderr): JSON for machines or text for people."""
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _safe,
    ]
    last = (
        [structlog.processors.JSONRenderer()]
        if json
        else [_escaped, structlog.dev.ConsoleRenderer(colors=(stream or sys.stderr).isatty())]
    )
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(stream or sys.stderr),
    )
    output = logging.StreamHandler(stream or sys.stderr)
    remove = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    output.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[remove, *last])
    )  # fmt: skip
    logging.basicConfig(handlers=[output], level=max(number, logging.INFO), force=True)
