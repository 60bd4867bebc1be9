"""The bytes of request bodies that a node holds."""

from __future__ import annotations

import pytest

from holdfast.errors import RateLimited, Unavailable
from holdfast.streaming.body_bytes import BodyBytes
from holdfast.streaming.reply import Owner
from holdfast.streaming.settings import QueueFailoverSettings

ALICE, BOB, KEY = (
    Owner("acme", "user", "alice"),
    Owner("acme", "user", "bob"),
    Owner("acme", "key", "alice"),
)
SETTINGS = QueueFailoverSettings(bytes_max=100, bytes_per_user_max=40, bytes_per_key_max=80)


def test_user_and_key_have_bounds_of_their_own() -> None:
    bodies = BodyBytes(SETTINGS)
    bodies.reserve(ALICE, 40).grow(40)
    with pytest.raises(RateLimited):
        bodies.reserve(ALICE, 1)
    bodies.reserve(BOB, 10).grow(10)
    bodies.reserve(KEY, 50).grow(50)
    assert bodies.total == 100


@pytest.mark.covers("002 pending Futures take memory")
def test_full_node_is_unavailable_to_everybody() -> None:
    bodies = BodyBytes(SETTINGS)
    held = bodies.reserve(KEY, 80)
    held.grow(80)
    with pytest.raises(Unavailable) as full:
        bodies.reserve(BOB, 30)
    assert full.value.retry_after_seconds
    held.free()
    bodies.reserve(BOB, 30)


def test_announced_body_counts_as_it_arrives_and_is_freed_once() -> None:
    bodies = BodyBytes(SETTINGS)
    held = bodies.reserve(ALICE, 40)
    assert bodies.total == 0
    held.grow(7)
    held.grow(9)
    assert bodies.total == 16
    held.free()
    held.free()
    assert bodies.total == 0 and not bodies._by_owner


@pytest.mark.parametrize(("others", "refusal"), [(ALICE, RateLimited), (KEY, Unavailable)])
def test_body_that_was_announced_grows_only_where_there_is_room(
    others: Owner, refusal: type[Exception]
) -> None:
    bodies = BodyBytes(SETTINGS)
    held = bodies.reserve(ALICE, 40)
    held.grow(21)
    other = bodies.reserve(others, 10)
    other.grow(19 if others == ALICE else 79)
    with pytest.raises(refusal):
        held.grow(1)
    assert bodies.total == 21 + (19 if others == ALICE else 79)
