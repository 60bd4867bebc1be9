"""Creates the schema ``holdfast_chats`` and brings it up to date.

Migrations only add, so that the release before still runs on the schema of this one.
Routines carry a version in their names: nodes of two releases each call their own.
"""

from __future__ import annotations

from typing import Any

from holdfast.drivers.statements import functions, migrations, statements
from holdfast.errors import StateCorrupted
from holdfast.store.postgres.identity import ServerIdentity

SQL = statements("holdfast.store.postgres")
MIGRATIONS = migrations("holdfast.store.postgres")
FUNCTIONS = functions("holdfast.store.postgres")
SCHEMA_VERSION = len(MIGRATIONS)
_SCHEMA_LOCK = 0x686F6C64_63687401


async def migrate(connection: Any, shards: int, server: ServerIdentity) -> None:
    """Bring the schema to this version, in one transaction and by one node at a time.

    ``shards``: of a new schema; later nodes read how many there are. Raises what
    asyncpg raises, and StateCorrupted for a schema that is too new.
    """
    async with connection.transaction():
        await connection.execute(
            "SET LOCAL lock_timeout = '30s'; SET LOCAL statement_timeout = '60s'"
        )
        await connection.execute(f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})")
        present = 0
        if await connection.fetchval(SQL["schema_version"]):
            present = await connection.fetchval(SQL["present_version"])
        if present > SCHEMA_VERSION + 1:
            raise StateCorrupted(
                f"the schema holdfast_chats has version {present}; this program knows up to"
                f" {SCHEMA_VERSION}: upgrade it"
            )
        if present >= SCHEMA_VERSION:
            return
        for script in (*MIGRATIONS[present:], *FUNCTIONS):
            await connection.execute(script)
        await connection.execute(
            "INSERT INTO holdfast_chats.schema_version VALUES ($1)", SCHEMA_VERSION
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
