"""A status asks its parts, and does not wait for those that do not answer."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.errors import Unavailable
from holdfast.node.status import PART_SECONDS_MAX, soon


async def part(seconds: float, error: Exception | None = None) -> int:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error
    return 7


async def test_part_that_answers_in_time_is_shown() -> None:
    assert await soon(part(PART_SECONDS_MAX / 2)) == 7


@pytest.mark.parametrize(
    ("seconds", "error"), [(60.0, None), (0.0, Unavailable("the store is down"))]
)
async def test_part_that_fails_or_hangs_is_unknown_in_time(
    seconds: float, error: Exception | None
) -> None:
    before = asyncio.get_running_loop().time()
    assert await soon(part(seconds, error)) is None
    assert asyncio.get_running_loop().time() - before <= PART_SECONDS_MAX


async def test_defect_of_a_part_is_not_hidden() -> None:
    with pytest.raises(KeyError):
        await soon(part(0.0, KeyError("a defect")))
