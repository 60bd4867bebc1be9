"""Tickets of replies: who gets in with one, and what voids it."""

from __future__ import annotations

import pytest
from api_rig import Rest, serving

from holdfast.access.principal import Principal
from holdfast.access.tickets import TICKET_SECONDS, ReplyTickets
from holdfast.errors import Unauthorized
from holdfast.message import User


def alice(rest: Rest) -> Principal:
    return rest.deps.tokens.verify(rest.token("alice"))


def is_void(tickets: ReplyTickets, ticket: str) -> bool:
    try:
        tickets.verify(ticket)
    except Unauthorized:
        return True
    return False


async def test_ticket_names_its_reply_and_its_owner() -> None:
    async with serving() as rest:
        tickets = rest.deps.tickets
        found = tickets.verify(tickets.mint("reply_1", alice(rest)))
        assert found.reply_id == "reply_1" and found.principal.user == User("acme", "alice")
        assert found.principal.scopes == {"replies:write"}


async def test_ticket_of_a_key_is_the_keys_own() -> None:
    async with serving() as rest:
        tickets = rest.deps.tickets
        key = rest.deps.keys.find(rest.tenant_key())
        found = tickets.verify(tickets.mint("reply_1", key.principal())).principal
        assert (found.key_id, found.user_id, found.kind) == (key.key_id, "", "tenant_key")
        await rest.deps.keys.revoke(key.key_id)
        assert not tickets.is_allowed(found)


async def test_ticket_expires_after_its_time() -> None:
    async with serving() as rest:
        tickets = rest.deps.tickets
        ticket = tickets.mint("reply_1", alice(rest))
        rest.clock.advance(TICKET_SECONDS - 1)
        assert not is_void(tickets, ticket)
        rest.clock.advance(1)
        assert is_void(tickets, ticket)


@pytest.mark.parametrize("kind", ["user", "ban", "token"])
async def test_ticket_of_a_revoked_owner_is_void(kind: str) -> None:
    async with serving() as rest:
        tickets, principal = rest.deps.tickets, alice(rest)
        ticket = tickets.mint("reply_1", principal)
        body = {"kind": kind, "tenant": "acme", "reason": "gone"}
        who = {"jti": principal.token_id} if kind == "token" else {"user_id": "alice"}
        rest.clock.advance(1)
        answer = await rest.ask("POST", "/admin/revocations", rest.admin_key(), {**body, **who})
        assert answer.status_code in (200, 201), answer.text
        assert is_void(tickets, ticket)


async def test_ticket_is_no_token_and_a_token_is_no_ticket() -> None:
    async with serving() as rest:
        tickets = rest.deps.tickets
        ticket = tickets.mint("reply_1", alice(rest))
        assert is_void(tickets, rest.token("alice"))
        assert (await rest.ask("GET", "/v1/chats", ticket)).status_code == 401
        claims = rest.deps.tokens.signed_claims(ticket)
        assert not is_void(tickets, rest.deps.tokens.sign(claims))
        assert is_void(tickets, rest.deps.tokens.sign({**claims, "aud": "holdfast"}))
        for wrong in ("", "x", ticket[:-2], ticket + "A", "a" * 7000, "a.b.c"):
            assert is_void(tickets, wrong), wrong
