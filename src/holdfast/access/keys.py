"""API keys: a tenant's backend (``hf_tenant_…``) and operators (``hf_admin_…``).

A key is shown once, when it is issued; only its SHA-256 is kept. A slow, salted hash
protects secrets that people choose, because those can be guessed. Ours have 256 random
bits, so guessing is hopeless with any hash, and with a fast one a flood of wrong keys
cannot occupy the server.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.access.principal import (
    ADMIN_SCOPES,
    CHATS_WRITE,
    TENANT_SCOPES,
    AnyScope,
    KeyScope,
    Principal,
)
from holdfast.drivers.files import replace_file
from holdfast.errors import (
    Forbidden,
    InvalidMessage,
    NotFound,
    StateCorrupted,
    StateDirectory,
    Unauthorized,
)
from holdfast.message import check_tenant

KeyKind = Literal["tenant", "admin"]

KEYS_MAX = 1000
LABEL_CHARACTERS_MAX = 100
_UNNAMEABLE = frozenset("*{}")
"""Characters that a tenant cannot have, because names of rules use them."""
_PREFIX: dict[KeyKind, str] = {"tenant": "hf_tenant_", "admin": "hf_admin_"}
_ALLOWED: dict[KeyKind, frozenset[KeyScope]] = {"tenant": TENANT_SCOPES, "admin": ADMIN_SCOPES}


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
        if self.kind == "admin":
            return Principal("", self.key_id, frozenset(self.scopes), "admin_key")
        scopes: frozenset[AnyScope] = frozenset(self.scopes)
        if "chats:write" in scopes:
            scopes |= CHATS_WRITE
        return Principal(self.tenant, act_as or "", scopes, "tenant_key")


Save = Callable[[Sequence[ApiKey]], None]


def _unsaved(_: Sequence[ApiKey]) -> None:
    """For a ring in memory only."""


class KeyRing:
    """The keys in force. A change is saved before it takes effect; if saving fails,
    nothing has changed.

    Not safe for concurrent changes: the caller makes one after the other.
    """

    def __init__(self, keys: Iterable[ApiKey] = (), save: Save = _unsaved) -> None:
        self._keys = {key.digest: key for key in keys}
        self._save = save

    def list(self) -> Sequence[ApiKey]:
        return sorted(self._keys.values(), key=lambda key: (key.created_at, key.key_id))

    def issue(
        self,
        kind: KeyKind,
        label: str,
        at: str,
        *,
        tenant: str = "",
        scopes: Iterable[KeyScope] | None = None,
        bounded: bool = True,
    ) -> tuple[ApiKey, str]:
        """Issue a key; returns it and its secret, which cannot be shown again.

        ``bounded`` False ignores ``KEYS_MAX``: a full ring must not lock its operator
        out. InvalidMessage names what is wrong.
        """
        granted = tuple(sorted(_ALLOWED[kind] if scopes is None else frozenset(scopes)))
        _check(kind, label, tenant, granted)
        if bounded and len(self._keys) >= KEYS_MAX:
            raise InvalidMessage(
                f"there are {KEYS_MAX} keys already; revoke one first", limit=KEYS_MAX
            )
        secret = _PREFIX[kind] + secrets.token_urlsafe(32)
        key = ApiKey(
            key_id="key_" + secrets.token_hex(8),
            kind=kind,
            tenant=tenant,
            label=label,
            scopes=granted,
            created_at=at,
            digest=_digest(secret),
            last_four=secret[-4:],
        )
        self._replace({**self._keys, key.digest: key})
        return key, secret

    def complete(self, secret: str) -> None:
        """Give the key with this secret, if it exists, every scope its kind can
        have."""
        key = self._keys.get(_digest(secret))
        if key is not None and _ALLOWED[key.kind] > set(key.scopes):
            self._replace(
                {**self._keys, key.digest: replace(key, scopes=tuple(sorted(_ALLOWED[key.kind])))}
            )

    def revocable(self, key_id: str, *, force: bool = False) -> ApiKey:
        """The key of that id, if it may be revoked.

        NotFound if there is none. Forbidden if it is the last key that can make keys,
        unless ``force``.
        """
        key = next((k for k in self._keys.values() if k.key_id == key_id), None)
        if key is None:
            raise NotFound(f"there is no key {key_id}")
        if (
            not force
            and key.makes_keys
            and not any(k.makes_keys and k is not key for k in self._keys.values())
        ):
            raise Forbidden(
                f"{key_id} is the last key that can make keys: make another one first (`holdfast"
                " key create admin --label LABEL`), or revoke it by force (--force, `force=true`);"
                " then only a key that is made on the server's machine while it is stopped leads"
                " back"
            )
        return key

    def revoke(self, key_id: str, *, force: bool = False) -> ApiKey:
        """Revoke the key, if it is ``revocable``."""
        key = self.revocable(key_id, force=force)
        self._replace({digest: k for digest, k in self._keys.items() if digest != key.digest})
        return key

    def find(self, secret: str) -> ApiKey:
        """The key with this secret; Unauthorized if there is none."""
        digest = _digest(secret)
        key = self._keys.get(digest)
        # The timing of the lookup by digest helps no attacker, who cannot choose a
        # guess's digest. The comparison takes constant time all the same.
        if (
            key is None
            or not hmac.compare_digest(key.digest, digest)
            or (key.tenant and check_tenant(key.tenant))
        ):
            raise Unauthorized("the API key is not known here: it may have been revoked")
        return key

    def _replace(self, keys: dict[str, ApiKey]) -> None:
        self._save(sorted(keys.values(), key=lambda key: (key.created_at, key.key_id)))
        self._keys = keys


def is_api_key(credential: str) -> bool:
    """Whether a bearer credential looks like an API key; otherwise it is a token."""
    return credential.startswith(tuple(_PREFIX.values()))


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _check(kind: KeyKind, label: str, tenant: str, scopes: tuple[KeyScope, ...]) -> None:
    if not label or len(label) > LABEL_CHARACTERS_MAX or not label.isprintable():
        raise InvalidMessage(
            f"label must be 1 to {LABEL_CHARACTERS_MAX} printable characters", field="label"
        )
    if kind == "admin" and tenant:
        raise InvalidMessage("an admin key belongs to no tenant", field="tenant")
    if kind == "tenant" and (problem := check_tenant(tenant)):
        raise InvalidMessage(problem, field="tenant")
    if kind == "tenant" and not _UNNAMEABLE.isdisjoint(tenant):
        raise InvalidMessage(
            "tenant must not have * or braces in it: no rule of limits could name it",
            field="tenant",
        )
    beyond = sorted(set(scopes) - _ALLOWED[kind])
    if beyond or not scopes:
        raise InvalidMessage(
            f"a key of kind {kind} carries one or more of {', '.join(sorted(_ALLOWED[kind]))}",
            field="scopes",
        )


def load_keys(path: Path) -> KeyRing:
    """The ring saved in ``path``, empty if there is no file.

    It saves every change there.
    """
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=list[ApiKey])
    except FileNotFoundError:
        keys = []
    except OSError as error:
        raise StateDirectory(
            f"{path} cannot be read: {error.strerror}; run as the user who owns it"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StateCorrupted(
            f"{path} is not a key file ({error}): restore it, or remove it and issue new keys"
        ) from error
    return KeyRing(keys, lambda changed: save_keys(path, changed))


def save_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    write_private(path, msgspec.json.format(msgspec.json.encode(list(keys)), indent=2))


def write_private(path: Path, data: bytes) -> None:
    """``replace_file``; StateDirectory if it fails."""
    try:
        replace_file(path, data)
    except OSError as error:
        raise StateDirectory(
            f"{path} cannot be written: {error.strerror}; make room or give write access"
        ) from error
