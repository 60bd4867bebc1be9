"""Other token issuers: whose public keys are trusted, for which tenants, kept fresh.

A node fetches an issuer's keys at startup, once per ``refresh_seconds``, and when a
token names an unknown key: at most once per issuer and ``REFETCH_SECONDS``, however
many such tokens come. Until a fetch has shown whether the key exists, the answer is
*unavailable*; after a good fetch without the key, the token is refused. If a fetch
fails, the known keys stay in use, also over a restart: the state directory keeps the
last good set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from holdfast import telemetry
from holdfast.access.jwks import BadJwks, KeySet, read_jwks
from holdfast.access.tokens import TAKEN_CLAIMS, IssuerTerms, TokenKey
from holdfast.clock import Clock, timestamp, wait_at_most
from holdfast.drivers.files import replace_file
from holdfast.errors import BadSetting, HoldfastError, Unauthorized, Unavailable
from holdfast.message import check_tenant

FETCH_SECONDS = 5.0
"""A key set that takes longer to arrive counts as unreachable."""
REFETCH_SECONDS = 30.0
"""From one fetch's start to the next's, per issuer, unless ``refresh_seconds`` is
less."""
FETCHING_SECONDS = 1.0
"""The Retry-After while a key set is being fetched."""
ISSUERS_FILE = "issuers.json"
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}

_Fetch = Callable[[str], Awaitable[bytes]]
"""Reads a key set from an address or a file, at most one byte more than allowed.

BadJwks if it cannot."""


@dataclass(frozen=True, slots=True)
class IssuerSettings:
    """A sign-in of your own whose tokens are accepted: RS256, ES256 or EdDSA."""

    issuer: str
    """The ``iss`` of its tokens, exactly."""
    jwks: str
    """Where its public keys are: an ``https://`` address (``http://`` only on loopback)
    or an absolute path. At most 256 KiB, within 5 s, no redirect.
    """
    tenants: tuple[str, ...]
    """The tenants it speaks for. With one, a token need not name it; with several, the
    claim ``tenant`` chooses among them. Any other: 401.
    """
    audience: str = "holdfast"
    """A token of another ``aud`` is refused (401)."""
    scope_claim: str = "holdfast_scopes"
    """As ``access.tokens.scope_claim``, for tokens of this issuer."""
    refresh_seconds: float = 600
    """How often the keys are fetched when nothing else asks for it: after so long a key
    that was taken back counts no more.
    """

    def __post_init__(self) -> None:
        if not self.issuer or not self.audience:
            raise BadSetting("access.issuers: issuer and audience must not be empty")
        if not self.tenants:
            raise BadSetting(
                f"access.issuers: {self.issuer} speaks for no tenant; name one in tenants"
            )
        for tenant in self.tenants:
            if problem := check_tenant(tenant, "tenants"):
                raise BadSetting(f"access.issuers: {problem}")
        if not self.scope_claim or self.scope_claim in TAKEN_CLAIMS:
            raise BadSetting(
                f"access.issuers: scope_claim must be a claim of its own, not {self.scope_claim!r}"
            )
        if not 1 <= self.refresh_seconds <= 86400:
            raise BadSetting("access.issuers: refresh_seconds must be between 1 and 86400")
        if problem := _bad_address(self.jwks):
            raise BadSetting(f"access.issuers: jwks of {self.issuer} {problem}")


def check_issuers(issuers: Sequence[IssuerSettings], own: str) -> None:
    """BadSetting if two issuers share an ``iss``, or one has this server's own."""
    names = [own, *(issuer.issuer for issuer in issuers)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadSetting(
            f"access.issuers: two issuers are called {twice!r}; this server's own is"
            " access.tokens.issuer"
        )


def _bad_address(jwks: str) -> str | None:
    if "://" not in jwks:
        return (
            None if Path(jwks).is_absolute() else "must be an https:// address or an absolute path"
        )
    try:
        parts = urlsplit(jwks)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "is malformed"
    if not host or parts.username is not None or parts.fragment:
        return "needs a host, and carries no credentials and no fragment"
    if parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK):
        return None
    return "must begin with https:// (http:// is taken on loopback only)"


class Issuer:
    """One issuer and its known keys.

    ``run`` must be running; only cancellation ends it.
    """

    def __init__(self, settings: IssuerSettings, fetch: _Fetch, clock: Clock) -> None:
        self.settings = settings
        self.terms = IssuerTerms(
            settings.issuer, settings.audience, settings.scope_claim, settings.tenants
        )
        self._fetch = fetch
        self._clock = clock
        self._keys: KeySet = {}
        self._began: float | None = None
        self._fetching = False
        self._wanted = asyncio.Event()
        self._fetched_at: float | None = None
        self.trouble: str | None = "its keys have not been fetched yet"

    def start_with(self, keys: KeySet) -> None:
        """Use the keys from before a restart until the first good fetch."""
        self._keys = keys

    def key(self, kid: str | None) -> TokenKey:
        """The key that a token names.

        Unavailable until a fetch has shown whether it exists; Unauthorized if it does
        not.
        """
        keys = self._keys
        if kid in keys:
            return keys[kid]
        if kid is None and keys:
            if len(keys) == 1:
                return next(iter(keys.values()))
            raise Unauthorized(
                "the token names no key (kid), and its issuer has several: get a new one"
            )
        raise self._unknown()

    def _unknown(self) -> HoldfastError:
        """The error for an unknown key.

        A flood costs one comparison of times per token.
        """
        since = None if self._began is None else self._clock.monotonic() - self._began
        if self._fetching or since is None or since >= REFETCH_SECONDS:
            self._wanted.set()
            return Unavailable(
                "the keys of the token's issuer are being fetched; try again",
                retry_after_seconds=FETCHING_SECONDS,
            )
        if self.trouble is None:
            return Unauthorized(
                "the token's key (kid) is none that its issuer publishes: get a new one"
            )
        return Unavailable(
            "the keys of the token's issuer cannot be fetched now; try again later",
            retry_after_seconds=max(round(REFETCH_SECONDS - since, 1), FETCHING_SECONDS),
        )

    async def run(self, changed: Callable[[IssuerSettings, bytes], Awaitable[None]]) -> None:
        """Fetch now, on schedule and on demand; ``changed`` gets every new good set."""
        while True:
            self._began, self._fetching = self._clock.monotonic(), True
            try:
                await self._refresh(changed)
            finally:
                self._fetching = False
                self._wanted.clear()
            await wait_at_most(
                self._wanted, REFETCH_SECONDS if self.trouble else self.settings.refresh_seconds
            )

    async def _refresh(self, changed: Callable[[IssuerSettings, bytes], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                data = await self._fetch(self.settings.jwks)
            keys = await asyncio.to_thread(read_jwks, data)
        except TimeoutError:
            self._failed("timeout", f"no answer within {FETCH_SECONDS:g} s")
        except BadJwks as bad:
            self._failed(bad.reason, str(bad))
        else:
            new = keys.keys() != self._keys.keys() or self.trouble is not None
            self._keys, self.trouble, self._fetched_at = keys, None, self._clock.now()
            telemetry.jwks_fetched(self.settings.issuer, len(keys), new=new)
            await changed(self.settings, data)

    def _failed(self, reason: str, why: str) -> None:
        telemetry.jwks_failed(
            self.settings.issuer, reason, why, len(self._keys), new=why != self.trouble
        )
        self.trouble = why

    def status(self) -> Mapping[str, Any]:
        return {
            "keys": len(self._keys),
            "fetched_at": None if self._fetched_at is None else timestamp(self._fetched_at),
            "trouble": self.trouble,
        }


class _Kept(Struct, frozen=True):
    """The last good key set of an issuer, valid only for the same address."""

    issuer: str
    jwks: str
    document: str


class Issuers(Mapping[str, Issuer]):
    """The issuers of a node by ``iss``, and the file with their last good key sets."""

    def __init__(
        self, settings: Sequence[IssuerSettings], fetch: _Fetch, clock: Clock, file: Path | None
    ) -> None:
        self._issuers = {each.issuer: Issuer(each, fetch, clock) for each in settings}
        self._file = file
        self._kept: dict[str, _Kept] = {}
        self._saving = asyncio.Lock()
        for kept in self._load():
            issuer = self._issuers.get(kept.issuer)
            if issuer is not None and issuer.settings.jwks == kept.jwks:
                self._kept[kept.issuer] = kept
                issuer.start_with(read_jwks(kept.document.encode()))

    def __getitem__(self, issuer: str) -> Issuer:
        return self._issuers[issuer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._issuers)

    def __len__(self) -> int:
        return len(self._issuers)

    def _load(self) -> list[_Kept]:
        """The saved key sets.

        Empty if unreadable, because they can be fetched again.
        """
        if self._file is None or not self._issuers:
            return []
        try:
            kept = msgspec.json.decode(self._file.read_bytes(), type=list[_Kept])
            for each in kept:
                read_jwks(each.document.encode())
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, BadJwks) as error:
            telemetry.kept_keys_unreadable(str(self._file), str(error))
            return []
        return kept

    async def run(self) -> None:
        """Keep every issuer's keys fresh; only cancellation ends it."""
        if not self._issuers:
            await asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            for issuer in self._issuers.values():
                group.create_task(issuer.run(self._keep))

    async def _keep(self, settings: IssuerSettings, data: bytes) -> None:
        """Save all key sets if this one is new.

        A failed write matters only at a restart.
        """
        kept = _Kept(settings.issuer, settings.jwks, data.decode())
        if self._file is None or self._kept.get(settings.issuer) == kept:
            return
        async with self._saving:
            self._kept[settings.issuer] = kept
            text = msgspec.json.encode(list(self._kept.values()))
            try:
                await asyncio.to_thread(replace_file, self._file, text)
            except OSError as error:
                telemetry.kept_keys_unwritten(str(self._file), str(error))

    def status(self) -> Mapping[str, Any]:
        return {name: issuer.status() for name, issuer in self._issuers.items()}
