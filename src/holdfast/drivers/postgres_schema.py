"""The schema ``holdfast_cluster``: the small state that all nodes of a cluster share.

Each adapter has its own tables there, its own migrations, and a row with their version.
Migrations of every schema in PostgreSQL only add, and a release brings at most one for
each adapter: so a node of the release before still runs, and starts, on the tables, as
it must while nodes are replaced one by one.
"""

from __future__ import annotations

from typing import Any

import asyncpg

from holdfast.drivers.postgres_database import (
    CheckConnection,
    Database,
    DatabaseUse,
    PostgresSettings,
)
from holdfast.drivers.statements import migrations
from holdfast.errors import BadSetting, StateCorrupted

SCHEMA = "holdfast_cluster"
_LOCK = 0x686F6C64_636C7501
VERSIONS_AHEAD_MAX = 1
"""How many versions newer than this program's a schema may be."""


def cluster_database(settings: PostgresSettings, check: CheckConnection) -> Database:
    """The database of a cluster, whose commits are durable whatever its default is.

    ``check`` refuses a server that is not, or no longer, the cluster's primary.
    """
    use = DatabaseUse("node", "cluster")
    return Database(settings, use, session={"synchronous_commit": "on"}, check=check)


async def migrate(database: Database, part: str, package: str) -> None:
    """Bring the tables of ``part`` to the version of the migrations in ``package``.

    Nodes that start together wait for each other. StateCorrupted if the tables are of a
    release that is too new, BadSetting if rights are missing; nothing has changed then.
    """
    scripts = migrations(package)
    async with database.committing("be prepared") as db:
        await db.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
        present = await _present(db, part)
        if present > len(scripts) + VERSIONS_AHEAD_MAX:
            raise StateCorrupted(
                f"the tables of {part} in {SCHEMA} have version {present}, this release knows"
                f" {len(scripts)}: run a newer Holdfast"
            )
        try:
            for version, script in list(enumerate(scripts, 1))[present:]:
                if version == 1:
                    await _create_schema(db)
                await db.execute(script)
                await db.execute(
                    f"INSERT INTO {SCHEMA}.version VALUES ($1, $2)"
                    " ON CONFLICT (part) DO UPDATE SET number = excluded.number",
                    part,
                    version,
                )
        except asyncpg.InsufficientPrivilegeError as error:
            raise BadSetting(
                f"PostgreSQL: {error}: the user of cluster.postgres must own the schema"
                f" {SCHEMA} or be allowed to create it (GRANT CREATE ON DATABASE …)"
            ) from None


async def _present(db: Any, part: str) -> int:
    if await db.fetchval("SELECT to_regclass($1) IS NULL", f"{SCHEMA}.version"):
        return 0
    found = await db.fetchval(f"SELECT number FROM {SCHEMA}.version WHERE part = $1", part)
    return int(found or 0)


async def _create_schema(db: Any) -> None:
    if await db.fetchval("SELECT to_regnamespace($1) IS NULL", SCHEMA):
        await db.execute(f"CREATE SCHEMA {SCHEMA}")
    await db.execute(
        f"CREATE TABLE IF NOT EXISTS {SCHEMA}.version"
        " (part text PRIMARY KEY, number integer NOT NULL)"
    )
