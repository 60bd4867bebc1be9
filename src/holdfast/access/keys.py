"""API keys: a tenant's backend (``hf_tenant_…``) and operators (``hf_admin_…``).

A key is shown once, when it is issued; only its SHA-256 is kept. A slow, salted hash
protects secrets that people choose, because those can be guessed. Ours have 256 random
bits, so guessing is hopeless with any hash, and with a fast one a flood of wrong keys
cannot occupy the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence

from msgspec.structs import replace

from holdfast import telemetry
from holdfast.access.contract import ApiKey, Credentials, CredentialStore, KeyKind
from holdfast.access.principal import ADMIN_SCOPES, TENANT_SCOPES, KeyScope
from holdfast.clock import wait_at_most
from holdfast.errors import (
    Forbidden,
    HoldfastError,
    InvalidMessage,
    NotFound,
    Unauthorized,
    Unavailable,
    VersionConflict,
)
from holdfast.message import check_tenant

KEYS_MAX = 1000
LABEL_CHARACTERS_MAX = 100
_UNNAMEABLE = frozenset("*{}")
"""Characters that a tenant cannot have, because names of rules use them."""
_PREFIX: dict[KeyKind, str] = {"tenant": "hf_tenant_", "admin": "hf_admin_"}
_ALLOWED: dict[KeyKind, frozenset[KeyScope]] = {"tenant": TENANT_SCOPES, "admin": ADMIN_SCOPES}


Record = Callable[[ApiKey], Awaitable[None]]
_Keys = dict[str, ApiKey]
"""By digest."""
SAVES_MAX = 5
"""How often a change is made again when another node changed the keys meanwhile."""


async def _unrecorded(_: ApiKey) -> None:
    """For changes that no audit log has to know."""


class KeyRing:
    """The keys in force. A change is saved before it takes effect; if saving fails,
    nothing has changed.

    The ring's lock makes changes run one after the other. A change is completed even
    if its caller is cancelled: what is saved and what is in force never differ.
    """

    def __init__(self, store: CredentialStore, loaded: Credentials) -> None:
        self._store = store
        self._change = asyncio.Lock()
        self._woken = asyncio.Event()
        self.on_stored: Callable[[], None] = lambda: None
        """Called after each change made here, so that other nodes can be woken."""
        self.use(loaded)

    @property
    def read_only(self) -> str:
        """Why keys cannot be changed here; "" if they can."""
        return self._store.read_only

    @property
    def is_shared(self) -> bool:
        """Whether others change the keys, too: then ``follow`` must run."""
        return self._store.follow_seconds is not None

    @classmethod
    async def load(cls, store: CredentialStore) -> KeyRing:
        return cls(store, await store.load())

    def use(self, loaded: Credentials) -> None:
        """Put the keys in force that the store has now."""
        self._put_in_force({key.digest: key for key in loaded.keys})
        self._version = loaded.version

    def _put_in_force(self, keys: _Keys) -> None:
        self._keys = keys
        self._ids = frozenset(key.key_id for key in keys.values())

    async def follow(self) -> None:
        """Use what the store has, until cancelled; keep what is in force while it
        cannot be read.
        """
        pace, failing = self._store.follow_seconds, False
        assert pace is not None, "nobody else changes these keys"
        while True:
            await wait_at_most(self._woken, pace)
            self._woken.clear()
            try:
                async with self._change:  # else it may put back what a change replaces
                    loaded = await self._store.load()
                    if loaded.version != self._version:
                        self.use(loaded)
                failing = False
            except HoldfastError as error:
                if not failing:
                    telemetry.log.warning("access.keys_unread", error=error.message)
                failing = True

    def wake(self) -> None:
        """Read the keys now: another node changed them."""
        self._woken.set()

    def list(self) -> Sequence[ApiKey]:
        return _in_order(self._keys)

    async def issue(
        self,
        kind: KeyKind,
        label: str,
        at: str,
        *,
        tenant: str = "",
        scopes: Iterable[KeyScope] | None = None,
        bounded: bool = True,
        record: Record = _unrecorded,
    ) -> tuple[ApiKey, str]:
        """Issue a key; returns it and its secret, which cannot be shown again.

        ``bounded`` False ignores ``KEYS_MAX``: a full ring must not lock its operator
        out. If ``record`` fails, the key is revoked: no unrecorded key is in use.
        InvalidMessage names what is wrong; Forbidden if keys cannot be changed here.
        """
        self._require_changeable()
        key, secret = new_key(kind, label, at, tenant=tenant, scopes=scopes)

        def added(keys: _Keys) -> _Keys:
            if bounded and len(keys) >= KEYS_MAX:
                raise InvalidMessage(
                    f"there are {KEYS_MAX} keys already; revoke one first", limit=KEYS_MAX
                )
            return {**keys, key.digest: key}

        async def change() -> None:
            async with self._change:
                await self._replace(added)
                try:
                    await record(key)
                except BaseException:
                    await self._replace(lambda keys: _without(keys, key))
                    raise

        await asyncio.shield(change())
        return key, secret

    def revocable(self, key_id: str, *, force: bool = False) -> ApiKey:
        """The key of that id, if it may be revoked.

        NotFound if there is none. Forbidden if keys cannot be changed here, or if it is
        the last key that can make keys, unless ``force``.
        """
        self._require_changeable()
        return _revocable(self._keys, key_id, force)

    async def revoke(
        self, key_id: str, *, force: bool = False, record: Record = _unrecorded
    ) -> ApiKey:
        """Record the revocation and revoke the key, if it is ``revocable``."""

        async def change() -> ApiKey:
            async with self._change:
                key = self.revocable(key_id, force=force)
                await record(key)
                await self._replace(lambda keys: _without(keys, _revocable(keys, key_id, force)))
            return key

        return await asyncio.shield(change())

    def find(self, secret: str) -> ApiKey:
        """The key with this secret; Unauthorized if there is none."""
        digest = digest_of(secret)
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

    def _require_changeable(self) -> None:
        if self.read_only:
            raise Forbidden(self.read_only)

    def has(self, key_id: str) -> bool:
        """Whether a key of this id is in force."""
        return key_id in self._ids

    async def _replace(self, change: Callable[[_Keys], _Keys]) -> None:
        for _ in range(SAVES_MAX):
            keys = change(self._keys)
            try:
                self._version = await self._store.save(_in_order(keys), self._version)
            except VersionConflict:
                self.use(await self._store.load())
                continue
            self._put_in_force(keys)
            self.on_stored()
            return
        raise Unavailable("the keys change too often; try again", retry_after_seconds=1.0)


def new_key(
    kind: KeyKind,
    label: str,
    at: str,
    *,
    tenant: str = "",
    scopes: Iterable[KeyScope] | None = None,
) -> tuple[ApiKey, str]:
    """A key that is not in force yet, and its secret; ``scopes`` None: all."""
    granted = tuple(sorted(_ALLOWED[kind] if scopes is None else frozenset(scopes)))
    _check(kind, label, tenant, granted)
    secret = _PREFIX[kind] + secrets.token_urlsafe(32)
    key = ApiKey(
        key_id="key_" + secrets.token_hex(8),
        kind=kind,
        tenant=tenant,
        label=label,
        scopes=granted,
        created_at=at,
        digest=digest_of(secret),
        last_four=secret[-4:],
    )
    return key, secret


def with_every_scope(key: ApiKey) -> ApiKey:
    """The key with every scope its kind can have."""
    return replace(key, scopes=tuple(sorted(_ALLOWED[key.kind] | set(key.scopes))))


def is_api_key(credential: str) -> bool:
    """Whether a bearer credential looks like an API key; otherwise it is a token."""
    return credential.startswith(tuple(_PREFIX.values()))


def digest_of(secret: str) -> str:
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


def _revocable(keys: _Keys, key_id: str, force: bool) -> ApiKey:
    key = next((k for k in keys.values() if k.key_id == key_id), None)
    if key is None:
        raise NotFound(f"there is no key {key_id}")
    if (
        not force
        and key.makes_keys
        and not any(k.makes_keys and k is not key for k in keys.values())
    ):
        raise Forbidden(
            f"{key_id} is the last key that can make keys: make another one first (`holdfast"
            " key create admin --label LABEL`), or revoke it by force (--force, `force=true`);"
            " then only a key that is made on the server's machine while it is stopped leads"
            " back"
        )
    return key


def _without(keys: _Keys, key: ApiKey) -> _Keys:
    return {digest: each for digest, each in keys.items() if digest != key.digest}


def _in_order(keys: _Keys) -> Sequence[ApiKey]:
    return sorted(keys.values(), key=lambda key: (key.created_at, key.key_id))
