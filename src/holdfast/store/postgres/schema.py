"""Creates the schema ``holdfast_chats`` and brings it up to date, while nodes of the
release before run on it.

Migrations only add. Routines carry a version in their names and are never dropped by
the release that replaces them: nodes of two releases each call their own. A kind of log
entry is written by the release after the one that reads it.

Nodes of three releases never run together: each connection names the version it knows
(``application_name``), and none migrates past the next one of any that is connected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import asyncpg

from holdfast.drivers.postgres_schema import VERSIONS_AHEAD_MAX
from holdfast.drivers.statements import functions, migrations, statements
from holdfast.errors import BadSetting, StateCorrupted
from holdfast.store.postgres.identity import ServerIdentity

SQL = statements("holdfast.store.postgres")
_SCHEMA_LOCK = 0x686F6C64_63687401


class SchemaScripts(NamedTuple):
    """The schema of a release: the n-th migration leads to version n."""

    migrations: Sequence[str]
    functions: Sequence[str]

    @property
    def version(self) -> int:
        return len(self.migrations)


SCHEMA = SchemaScripts(migrations("holdfast.store.postgres"), functions("holdfast.store.postgres"))
CONNECTION_NAME = f"holdfast chats {SCHEMA.version}"
"""``oldest_connection`` reads it."""


async def migrate(
    connection: Any, shards: int, server: ServerIdentity, schema: SchemaScripts = SCHEMA
) -> None:
    """Bring the schema to this version, in one transaction and by one node at a time.

    ``shards``: of a new schema; later nodes read how many there are. Raises what
    asyncpg raises, StateCorrupted for a schema that is too new, and BadSetting: also
    while a node is connected that is too old for this one.
    """
    async with connection.transaction():
        await connection.execute(
            "SET LOCAL lock_timeout = '30s'; SET LOCAL statement_timeout = '60s'"
        )
        await connection.execute(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})")
        present = 0
        if await connection.fetchval(SQL["schema_version"]):
            present = await connection.fetchval(SQL["present_version"])
        if present > schema.version + VERSIONS_AHEAD_MAX:
            raise StateCorrupted(
                f"the schema holdfast_chats has version {present}; this program knows up to"
                f" {schema.version}: upgrade it"
            )
        if present >= schema.version:
            return
        await _refuse_old_nodes(connection, schema.version)
        try:
            for script in (*schema.migrations[present:], *schema.functions):
                await connection.execute(script)
        except asyncpg.DuplicateSchemaError:
            raise BadSetting(
                "cluster.postgres has a schema holdfast_chats that is not Holdfast's: name another"
                " database, or rename that schema"
            ) from None
        except asyncpg.InsufficientPrivilegeError as error:
            raise BadSetting(
                f"PostgreSQL: {error}: the user of cluster.postgres must own the schema"
                " holdfast_chats or be allowed to create it (GRANT CREATE ON DATABASE …)"
            ) from None
        await connection.execute(
            "INSERT INTO holdfast_chats.schema_version VALUES ($1)", schema.version
        )
        if present == 0:
            await connection.execute(
                "SELECT holdfast_chats.create_shards_1($1, $2, $3)",
                shards,
                server.system,
                server.timeline,
            )
    # Not the tables that are still empty: of a table that was never analysed the
    # planner expects some rows, of one that is known to be empty none, and then any
    # plan seems good.
    await connection.execute("ANALYZE holdfast_chats.cluster, holdfast_chats.shard")


async def _refuse_old_nodes(connection: Any, version: int) -> None:
    oldest = await connection.fetchval(SQL["oldest_connection"])
    if oldest is not None and oldest + VERSIONS_AHEAD_MAX < version:
        raise BadSetting(
            f"a node is connected that knows the schema holdfast_chats up to version {oldest} and"
            f" would not run on version {version}: upgrade all nodes to the release before this"
            " one first, or stop them"
        )
