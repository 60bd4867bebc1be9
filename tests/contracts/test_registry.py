"""What every registry promises. A new adapter is one more line in ADAPTERS."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scripted_durability import ANNA, BELA, CLEO

from holdfast.fanout.contract import Registry
from holdfast.fanout.memory import MemoryRegistry
from holdfast.message import User

ADAPTERS: dict[str, Callable[[], Registry]] = {"memory": MemoryRegistry}


@pytest.fixture(params=ADAPTERS)
def registry(request: pytest.FixtureRequest) -> Registry:
    return ADAPTERS[request.param]()


async def test_nobody_is_online_at_first(registry: Registry) -> None:
    assert await registry.gateways_of([ANNA]) == {}


async def test_a_user_is_found_at_each_of_its_gateways(registry: Registry) -> None:
    await registry.announce("east", [ANNA, BELA])
    await registry.announce("west", [ANNA])
    assert await registry.gateways_of([ANNA, BELA, CLEO]) == {"east": {ANNA, BELA}, "west": {ANNA}}
    assert await registry.gateways_of([BELA]) == {"east": {BELA}}
    assert await registry.gateways_of([]) == {}


async def test_announcing_again_changes_nothing(registry: Registry) -> None:
    await registry.announce("east", [ANNA])
    await registry.announce("east", [ANNA])
    await registry.withdraw("east", [ANNA])
    assert await registry.gateways_of([ANNA]) == {}


async def test_withdrawing_concerns_one_gateway_and_the_unknown_is_harmless(
    registry: Registry,
) -> None:
    await registry.announce("east", [ANNA])
    await registry.announce("west", [ANNA])
    await registry.withdraw("east", [ANNA, CLEO])
    await registry.withdraw("nowhere", [ANNA])
    assert await registry.gateways_of([ANNA]) == {"west": {ANNA}}


async def test_users_of_the_same_name_in_two_tenants_are_two(registry: Registry) -> None:
    await registry.announce("east", [ANNA])
    assert await registry.gateways_of([User("other", ANNA.user_id)]) == {}


async def test_an_answer_does_not_change_afterwards(registry: Registry) -> None:
    await registry.announce("east", [ANNA, BELA])
    answer = await registry.gateways_of([ANNA, BELA])
    await registry.withdraw("east", [ANNA])
    assert answer == {"east": {ANNA, BELA}}


async def test_any_iterable_of_users_will_do(registry: Registry) -> None:
    await registry.announce("east", (user for user in (ANNA, BELA)))
    assert await registry.gateways_of(user for user in (ANNA, CLEO)) == {"east": {ANNA}}
