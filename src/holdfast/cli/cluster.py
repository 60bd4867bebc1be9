"""``status --cluster``: all nodes, and what they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from holdfast.cli import output
from holdfast.cli.context import CliContext


def show_cluster(context: CliContext) -> None:
    """Exit code 1 if the server names a problem."""
    found: dict[str, Any] = context.as_operator().get("/admin/cluster")
    if context.as_json:
        output.as_json(found)
    else:
        _show(found)
    for problem in found["problems"]:
        typer.echo(f"problem: {problem}", err=True)
    if found["problems"]:
        raise typer.Exit(1)


def _show(found: Mapping[str, Any]) -> None:
    gone = (
        (node["name"], node["version"], "gone", node["address"], "", "", "",
         f"{node['age_seconds']:.0f} s ago", "")
        for node in found["gone"]
    )  # fmt: skip
    living = (
        (
            node["name"],
            node["version"],
            ",".join(node["roles"]),
            node["address"],
            f"{node['clients']:,}",
            f"{node['lag']:,}",
            node["connections"],
            f"{node['age_seconds']:.0f} s ago",
            node["settings_digest"][:8],
        )
        for node in found["nodes"]
    )
    output.table(
        ("node", "version", "roles", "address", "clients", "lag", "connections", "renewed",
         "settings"),
        (*living, *gone),
        "No node is known.",
    )  # fmt: skip
    registry = found["registry"]
    facts = {"asked": found["node_id"], "postgres": _database(found["database"])}
    facts["registry"] = f"{registry['engine']}, {registry['state']}"
    for lease in found["leases"]:
        facts[f"lease {lease['name']}"] = f"{lease['holder']}, {lease['seconds_left']:.1f} s left"
    for path, values in found["differing_settings"].items():
        facts[path] = ", ".join(
            f"{node}: {'(default)' if value is None else value}" for node, value in values.items()
        )
    output.line("")
    output.fields(facts)


def _database(database: Mapping[str, Any] | None) -> str:
    if database is None:
        return "none, or it does not answer"
    wanted, available = database["connections"]
    return (
        f"{database['version']}, system {database['system']}, timeline {database['timeline']},"
        f" epoch base {database['epoch_base']}, failover {database['failover']},"
        f" synchronous standbys {database['standbys'] or 'none'},"
        f" {wanted} of {available} connections"
    )
