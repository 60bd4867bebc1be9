"""API keys in PostgreSQL, for all nodes of a cluster.

The node that starts first makes the admin key and has it in its ``secrets.json``, from
which commands on that machine take it. Every start compares the token keys of its file
with the fingerprints of those that the last start had: a node that shares none would
refuse every token of the others.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.access.contract import ApiKey, Credentials, decode_keys, encode_keys
from holdfast.access.secret_file import read_token_keys
from holdfast.access.secrets import make_cluster_key, with_own_key_completed
from holdfast.drivers.postgres_database import Database
from holdfast.drivers.postgres_schema import SCHEMA, migrate
from holdfast.drivers.statements import statements
from holdfast.errors import BadSetting, StateCorrupted, VersionConflict

PACKAGE = "holdfast.access.postgres"
SQL = statements(PACKAGE)
FOLLOW_SECONDS = 5.0


class PostgresCredentials:
    """See ``contract.CredentialStore``. ``open`` makes one."""

    read_only = ""

    def __init__(
        self,
        database: Database,
        token_keys: Sequence[bytes],
        follow_seconds: float = FOLLOW_SECONDS,
    ) -> None:
        self.follow_seconds: float | None = follow_seconds
        self._database = database
        self._loaded = Credentials(token_keys, (), "")

    @classmethod
    async def open(
        cls, database: Database, secret_file: Path, state_dir: Path, at: str
    ) -> PostgresCredentials:
        """The credentials of a node that starts at ``at``.

        BadSetting if its token keys are another cluster's. If the cluster has no keys
        yet, it gets an admin key, whose secret is in ``state_dir`` before it is stored.
        """
        token_keys = await asyncio.to_thread(read_token_keys, secret_file)
        await migrate(database, "credentials", PACKAGE)
        async with database.committing("be opened") as db:
            version, text = await db.fetchrow(SQL["lock"])
            await _compare_fingerprints(db, token_keys, secret_file)
            if not version:
                first = await asyncio.to_thread(make_cluster_key, state_dir, at)
                await _save(db, version, [first])
            else:
                keys = _decode(text)
                completed = await asyncio.to_thread(with_own_key_completed, state_dir, keys)
                if completed != keys:
                    await _save(db, version, completed)
        return cls(database, token_keys)

    async def load(self) -> Credentials:
        held = self._loaded
        async with self._database.connection("be read") as db:
            version, text = await db.fetchrow(SQL["load"], held.version)
        if text is not None:
            self._loaded = held = Credentials(held.token_keys, _decode(text), version)
        return held

    async def save(self, keys: Sequence[ApiKey], version: str) -> str:
        async with self._database.committing("be changed") as db:
            return await _save(db, version, keys)


async def _save(db: Any, version: str, keys: Sequence[ApiKey]) -> str:
    data = encode_keys(keys)
    new = hashlib.blake2b(data, digest_size=16).hexdigest()
    if await db.fetchval(SQL["save"], version, new, data.decode()) is None:
        raise VersionConflict("the keys were changed meanwhile")
    return new


def _decode(text: str) -> list[ApiKey]:
    try:
        return decode_keys(text)
    except msgspec.MsgspecError as error:
        raise StateCorrupted(
            f"{SCHEMA}.credentials has no keys in it that this release can read ({error}):"
            " restore the database, or run the release that wrote them"
        ) from error


async def _compare_fingerprints(db: Any, token_keys: Sequence[bytes], file: Path) -> None:
    """Store the fingerprints of a node that starts; BadSetting if it shares none."""
    own = [fingerprint(key) for key in token_keys]
    stored = {row[0] for row in await db.fetch(SQL["fingerprints"])}
    if stored and stored.isdisjoint(own):
        raise BadSetting(
            f"access.tokens.secret_file: no key in {file} is one of this cluster: copy the file"
            " from a node that runs. To replace keys, add the new one as a second line on every"
            " node first. To void all tokens instead, stop every node and run DELETE FROM"
            f" {SCHEMA}.token_key"
        )
    await db.execute(SQL["forget_fingerprints"], own)
    await db.execute(SQL["put_fingerprints"], own)


def fingerprint(token_key: bytes) -> str:
    """Identifies a token key, and does not give it away."""
    return hashlib.blake2b(token_key, digest_size=16, person=b"holdfast.token").hexdigest()
