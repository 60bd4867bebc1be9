"""Credentials in memory, and the admin key of a running node."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.access.contract import ApiKey, Credentials
from holdfast.access.keys import KeyRing
from holdfast.access.secrets import read_secrets
from holdfast.errors import VersionConflict
from holdfast.node.node import Node

SECRET = b"a secret of at least thirty-two bytes"


class MemoryCredentials:
    """A CredentialStore. ``failure`` is raised instead of saving."""

    read_only = ""
    follow_seconds = 5.0

    def __init__(self, keys: Sequence[ApiKey] = (), failure: Exception | None = None) -> None:
        self._keys, self._version = list(keys), 0
        self._failure = failure

    async def load(self) -> Credentials:
        return Credentials([SECRET], list(self._keys), str(self._version))

    async def save(self, keys: Sequence[ApiKey], version: str) -> str:
        if self._failure is not None:
            raise self._failure
        if version != str(self._version):
            raise VersionConflict("the keys were changed meanwhile")
        self._keys, self._version = list(keys), self._version + 1
        return str(self._version)


def key_ring(keys: Sequence[ApiKey] = (), failure: Exception | None = None) -> KeyRing:
    """A ring in memory; ``failure``: none of its changes can be saved."""
    return KeyRing(MemoryCredentials(keys, failure), Credentials([SECRET], keys, "0"))


def admin_key_of(node: Node) -> str:
    return read_secrets(node.settings.server.state_path).admin_key
