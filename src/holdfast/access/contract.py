"""API keys as they are stored, and the store of a server's credentials."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from holdfast.access.principal import CHATS_WRITE, AnyScope, KeyScope, Principal

KeyKind = Literal["tenant", "admin"]


class ApiKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A stored key: everything but the secret. ``tenant`` is "" for an admin key."""

    key_id: str
    kind: KeyKind
    tenant: str
    label: str
    scopes: tuple[KeyScope, ...]
    created_at: str
    digest: str
    last_four: str

    @property
    def makes_keys(self) -> bool:
        return self.kind == "admin" and "keys:write" in self.scopes

    def principal(self, act_as: str | None = None) -> Principal:
        """The principal: the user a tenant key acts for, or an operator (the key's
        id)."""
        scopes = _granted(self.kind, self.scopes)
        if self.kind == "admin":
            return Principal("", self.key_id, scopes, "admin_key", key_id=self.key_id)
        return Principal(self.tenant, act_as or "", scopes, "tenant_key", key_id=self.key_id)


class _StoredKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A key as another release may have written it: with scopes of its own."""

    key_id: str
    kind: KeyKind
    tenant: str
    label: str
    scopes: tuple[str, ...]
    created_at: str
    digest: str
    last_four: str


def decode_keys(data: bytes | str) -> list[ApiKey]:
    """The stored keys. MsgspecError or UnicodeDecodeError if they are none.

    A scope that this release does not know grants nothing here, and is kept for nodes
    of the release that knows it. A field may limit a key, so an unknown one is an
    error.
    """
    return [ApiKey(**asdict(stored)) for stored in msgspec.json.decode(data, type=list[_StoredKey])]


def encode_keys(keys: Sequence[ApiKey]) -> bytes:
    return msgspec.json.encode(list(keys))


@lru_cache(256)
def _granted(kind: KeyKind, scopes: tuple[KeyScope, ...]) -> frozenset[AnyScope]:
    """What a key's scopes allow; one set for all its requests, which may wait long."""
    granted: frozenset[AnyScope] = frozenset(scopes)
    return granted | CHATS_WRITE if kind == "tenant" and "chats:write" in granted else granted


class Credentials(NamedTuple):
    """The credentials of a server at one version."""

    token_keys: Sequence[bytes]
    """The secrets of user tokens: the first signs, all verify."""
    keys: Sequence[ApiKey]
    version: str
    """Opaque. It changes with every change of the keys."""

    def __repr__(self) -> str:
        return "Credentials(…)"


class CredentialStore(Protocol):
    """Stores the credentials that all nodes of a server share.

    ``read_only``: why this node cannot change the keys; "" if it can.
    ``follow_seconds``: how often to look for changes of others; None: there are none.
    """

    read_only: str

    @property
    def follow_seconds(self) -> float | None: ...

    async def load(self) -> Credentials:
        """The credentials; StateDirectory or StateCorrupted says what to do."""

    async def save(self, keys: Sequence[ApiKey], version: str) -> str:
        """Replace all API keys; returns the new version. Durable at return.

        ``version`` is the one that ``keys`` were derived from. VersionConflict if it is
        not the stored one any more. After any error but OutcomeUnknown nothing has
        changed.
        """
