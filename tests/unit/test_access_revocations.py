"""What the revocations in force refuse, and how they change."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.access.principal import USER_SCOPES, Principal
from holdfast.access.revocations.contract import Revocation, RevocationKind
from holdfast.access.revocations.in_force import RevocationsInForce
from holdfast.access.revocations.memory import MemoryRevocations
from holdfast.clock import ManualClock
from holdfast.errors import NotFound, OutcomeUnknown, Unauthorized
from holdfast.message import User

START = 1_000_000.0


def principal(user_id: str = "alice", issued_at: float = START, **fields: Any) -> Principal:
    given = {"tenant": "acme", "scopes": USER_SCOPES, "kind": "user", "token_id": "jti-1", **fields}
    return Principal(user_id=user_id, issued_at=issued_at, **given)


def entry(
    kind: RevocationKind, user_id: str = "alice", item: str = "", **fields: Any
) -> Revocation:
    return Revocation(
        kind,
        "acme",
        user_id,
        item,
        **{"issued_before": 0, "made_at": "t", "ends_at": None, **fields},
    )


async def in_force() -> tuple[RevocationsInForce, MemoryRevocations, ManualClock]:
    clock = ManualClock(START)
    store = MemoryRevocations(clock)
    held = RevocationsInForce(store, clock)
    await held.refresh()
    return held, store, clock


def refused(held: RevocationsInForce, who: Principal, device_id: str = "") -> str | None:
    refusal = held.refusal(who, device_id)
    return None if refusal is None else refusal.details["revoked"]


async def test_revoked_token_is_refused_and_no_other() -> None:
    held, _, _ = await in_force()
    await held.add(entry("token", "", "jti-1"))
    assert refused(held, principal()) == "token"
    assert refused(held, principal(token_id="jti-2")) is None
    assert refused(held, principal(tenant="other")) is None, "ids are a tenant's own"
    assert refused(held, principal(kind="tenant_key")) is None, "a key is revoked by removing it"


async def test_tokens_of_a_user_issued_before_a_moment_are_refused() -> None:
    held, _, _ = await in_force()
    await held.add(entry("user", issued_before=START + 1))
    assert refused(held, principal()) == "user"
    assert refused(held, principal(issued_at=0)) == "user", "a token that does not say when is old"
    assert refused(held, principal(issued_at=START + 1)) is None
    assert refused(held, principal("bob")) is None


async def test_tokens_of_a_whole_tenant_issued_before_a_moment_are_refused() -> None:
    held, _, _ = await in_force()
    made = await held.add(entry("tenant", "", issued_before=START + 1))
    assert refused(held, principal()) == refused(held, principal("bob", issued_at=0)) == "tenant"
    assert refused(held, principal(issued_at=START + 1)) is None
    assert refused(held, principal(tenant="other")) is None
    await held.remove(made.number)
    assert refused(held, principal()) is None


async def test_device_is_refused_with_old_tokens_only() -> None:
    held, _, _ = await in_force()
    await held.add(entry("device", item="phone", issued_before=START + 1))
    assert refused(held, principal(), "phone") == "device"
    assert refused(held, principal(), "tablet") is None and refused(held, principal()) is None
    assert refused(held, principal(issued_at=START + 1), "phone") is None


async def test_banned_user_is_refused_with_every_token_until_the_ban_is_lifted() -> None:
    held, _, clock = await in_force()
    made = await held.add(entry("ban"))
    clock.advance(1e9)
    assert refused(held, principal(issued_at=START + 1e9)) == "ban"
    with pytest.raises(Unauthorized, match="banned"):
        held.check(principal())
    await held.remove(made.number)
    assert refused(held, principal()) is None
    with pytest.raises(NotFound):
        await held.remove(made.number)


async def test_muted_user_is_refused_no_token() -> None:
    held, _, _ = await in_force()
    assert not held.is_muted(User("acme", "alice"))
    await held.add(entry("mute"))
    assert held.is_muted(User("acme", "alice")) and not held.is_muted(User("other", "alice"))
    assert refused(held, principal()) is None


async def test_entry_that_has_ended_refuses_nothing() -> None:
    held, _, clock = await in_force()
    await held.add(entry("user", issued_before=START + 1, ends_at=START + 60))
    clock.advance(59)
    assert refused(held, principal(issued_at=0)) == "user"
    clock.advance(1)
    assert refused(held, principal(issued_at=0)) is None
    assert held.page(0, 10, lambda one: True) == []


async def test_listener_hears_of_new_entries_after_they_count() -> None:
    held, _, _ = await in_force()
    heard: list[tuple[str, str | None]] = []
    held.on_added = lambda entries: heard.extend(
        (one.kind, refused(held, principal())) for one in entries
    )
    made = await held.add(entry("ban"))
    await held.remove(made.number)
    assert heard == [("ban", "ban")]


async def test_change_by_another_node_or_of_unknown_outcome_is_found_by_its_version() -> None:
    held, store, _ = await in_force()
    heard: list[str] = []
    held.on_added = lambda entries: heard.extend(one.kind for one in entries)
    await store.add(entry("ban"))
    await held.add(entry("mute", "bob"))
    assert refused(held, principal()) is None
    await held.refresh()
    assert refused(held, principal()) == "ban" and held.is_muted(User("acme", "bob"))
    assert heard == ["mute", "ban"], "each is reported once"
    committed = store.add

    async def unsure(one: Revocation) -> Revocation:
        await committed(one)
        raise OutcomeUnknown("the disk did not answer")

    store.add = unsure  # type: ignore[method-assign]
    with pytest.raises(OutcomeUnknown):
        await held.add(entry("token", "", "jti-9"))
    await held.refresh()
    assert refused(held, principal("carl", token_id="jti-9")) == "token"


async def test_list_is_read_in_pages_by_number() -> None:
    held, _, _ = await in_force()
    for n in range(7):
        await held.add(entry("ban" if n % 2 else "mute", f"user-{n}"))
    await held.add(entry("ban", "user-1"))
    everybody = held.page(0, 3, lambda one: True)
    assert [one.number for one in everybody] == [1, 2, 3]
    assert [one.number for one in held.page(3, 10, lambda one: one.kind == "ban")] == [4, 6]
    assert held.page(7, 10, lambda one: True) == []
