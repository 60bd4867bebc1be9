"""Limits by address for requests without a good credential. (Pure.)

Such a request has no user or tenant that a rule could charge.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from ipaddress import ip_address

from holdfast.access.network import ADDRESSES_MAX, Network, address_group
from holdfast.api.deps import ApiSettings
from holdfast.clock import Clock
from holdfast.limits.http import rate_limited
from holdfast.resilience import Buckets

HEALTH = "/health/"


class AddressLimit:
    """How often an address may do one thing. ``policy`` names it in a refusal."""

    def __init__(self, policy: str, text: str, per_minute: int, burst: int, clock: Clock) -> None:
        self._policy = policy
        self._text = text
        self._per_minute = per_minute
        self._buckets = Buckets(per_minute / 60, burst)
        self._clock = clock

    def count(self, address: str) -> None:
        """RateLimited if this address has done it too often."""
        if wait := self._buckets.take(address_group(address), self._clock.monotonic()):
            raise rate_limited(self._text, wait, self._policy, self._per_minute, 60)


class AddressLimits:
    """Limits requests without a credential, and bad credentials, per address."""

    def __init__(self, settings: ApiSettings, clock: Clock, proxies: Collection[Network]) -> None:
        per_minute = settings.unauthenticated_per_minute
        text = "too many requests without a credential from this address"
        self._requests = AddressLimit(
            "unauthenticated", text, per_minute, settings.unauthenticated_burst, clock
        )
        failures = settings.failed_logins_per_minute
        text = "too many failed logins from this address"
        self._failed_logins = AddressLimit("failed-logins", text, failures, failures, clock)
        self._is_ours = lru_cache(ADDRESSES_MAX)(lambda address: _is_ours(address, proxies))

    def count_request(self, address: str, path: str = "") -> None:
        """Count a request without a credential; RateLimited if it is one too many.

        Health checks from this machine or a declared proxy are never refused.
        """
        if not (path.startswith(HEALTH) and self._is_ours(address)):
            self._requests.count(address)

    def count_failed_login(self, address: str) -> None:
        """Count a bad credential; RateLimited if it is one too many."""
        self._failed_logins.count(address)


def _is_ours(address: str, proxies: Collection[Network]) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return parsed.is_loopback or any(parsed in network for network in proxies)
