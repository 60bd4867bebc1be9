"""Log lines, ours and our libraries': where they go, and what is removed from them."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
from collections.abc import MutableMapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, TextIO

import msgspec
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


_MARKS = ("hf_tenant_", "hf_admin_", "eyj", "bearer", "://", "password=")
"""In lower case. A text with none of them cannot match ``_SECRET``; this check is
cheaper and comes first."""


def safe_text(value: str) -> str:
    """A text that is safe to log: no secrets, no control characters, bounded length."""
    value = _SECRET.sub("[secret]", value)
    if len(value) > LOG_VALUE_CHARACTERS_MAX:
        value = value[:LOG_VALUE_CHARACTERS_MAX] + f"… ({len(value)} characters)"
    return value


def _stamped(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """The time as structlog's own processor writes it, which took half of a line."""
    now = time.time_ns() // 1000
    event["timestamp"] = f"{_second(now // 1_000_000)}.{now % 1_000_000:06d}Z"
    return event


@lru_cache(1)
def _second(number: int) -> str:
    """Of UTC, counted from the epoch."""
    return datetime.fromtimestamp(number, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _safe(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    texts = []
    for name, value in event.items():
        if isinstance(value, str):
            texts.append(value)
        elif not isinstance(value, int | float | None):
            event[name] = text = repr(value)
            texts.append(text)
    together = "\n".join(texts).lower()
    if len(together) > LOG_VALUE_CHARACTERS_MAX or any(mark in together for mark in _MARKS):
        for name, value in event.items():
            if isinstance(value, str):
                event[name] = safe_text(value)
    return event


def _as_json(event: MutableMapping[str, Any], **_: Any) -> str:
    """JSON in ASCII, so that no character can drive a terminal; the rest is escaped."""
    try:
        line = msgspec.json.encode(event)
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate, or a huge number
        return json.dumps(event)
    return line.decode("ascii") if line.isascii() else json.dumps(event)


def _escaped(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Escape control characters, which terminals obey; JSON output needs no help."""
    for name, value in event.items():
        if isinstance(value, str) and name != "exception":
            event[name] = "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)
    return event


if not structlog.is_configured():
    # In somebody else's process (the client, the work library) our lines are lines of
    # its own logging: structlog alone would print them to its standard output,
    # tracebacks with every local variable.
    structlog.configure(
        processors=[
            structlog.processors.format_exc_info,
            _safe,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def configure_logging(json: bool, level: str = "info", stream: TextIO | None = None) -> None:
    """Every log line, ours and our libraries', to ``stream`` (stderr): JSON for
    machines or text for people.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.processors.add_log_level,
        _stamped,
        structlog.processors.format_exc_info,
        _safe,
    ]
    last = (
        [structlog.processors.JSONRenderer(_as_json)]
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


THROTTLE_SECONDS = 60.0
THROTTLE_LINES = 20


class ThrottledLog:
    """For lines that a stranger can cause: writes the first ``lines`` of each event.

    The others are counted, and one line reports the count ``seconds`` after the first.
    Events are a closed set, so memory is bounded.
    """

    def __init__(self, lines: int = THROTTLE_LINES, seconds: float = THROTTLE_SECONDS) -> None:
        self._lines = lines
        self._seconds = seconds
        self._counts: dict[str, int] = {}

    def info(self, event: str, **facts: Any) -> None:
        """Write or count a line. Needs a running event loop, for the timer."""
        count = self._counts[event] = self._counts.get(event, 0) + 1
        if count == 1:
            asyncio.get_running_loop().call_later(self._seconds, self._summarise, event)
        if count <= self._lines:
            log.info(event, **facts)

    def _summarise(self, event: str) -> None:
        if (left_out := self._counts.pop(event) - self._lines) > 0:
            log.info(event, left_out=left_out, within_seconds=self._seconds)
