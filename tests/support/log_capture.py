"""Everything that is logged, ours and our libraries', as an operator sees it."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from holdfast import telemetry


@contextmanager
def logging_to(output: io.StringIO, *, as_json: bool = True) -> Iterator[None]:
    before, handlers, level = structlog.get_config(), logging.root.handlers[:], logging.root.level
    logging.root.handlers.clear()  # or configure_logging would close pytest's
    telemetry.configure_logging(json=as_json, stream=output)
    try:
        yield
    finally:
        structlog.configure(**before)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
