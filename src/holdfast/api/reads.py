"""Reads with a deadline: a store that does not answer in time is unavailable, not a hanging request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from holdfast.api.deps import Deps
from holdfast.errors import Unavailable

T = TypeVar("T")


async def in_time(deps: Deps, read: Awaitable[T]) -> T:
    """What ``read`` gives, or Unavailable when the request's time is over."""
    try:
        async with asyncio.timeout(deps.settings.request_seconds_max):
            return await read
    except TimeoutError:
        raise Unavailable("the read took too long", retry_after_seconds=1.0) from None
