"""The commands about the server itself: tokens, status, backup, restore, keys."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from holdfast.cli import show
from holdfast.cli.reach import Reach, TenantOption, at_home, reaching
from holdfast.errors import InvalidMessage

key = typer.Typer(no_args_is_help=True, help="API keys of tenants and operators.", rich_markup_mode=None)

BACKUP_SECONDS_MAX = 3600.0


class Kind(StrEnum):
    tenant = "tenant"
    admin = "admin"


@at_home
def token(
    reach: Reach,
    user: Annotated[str, typer.Option("--user", "-u", help="Whom the token speaks for.")],
    tenant: TenantOption = "default",
    hours: Annotated[float, typer.Option(min=0.01, max=720, help="How long it is valid.")] = 24,
) -> None:
    """Make a user token, offline, with the secret in the state directory.

    Examples:

    \b
      holdfast token --user alice
      curl -H "Authorization: Bearer $(holdfast token --user alice)" http://127.0.0.1:8080/v1/chats
    """
    made = reach.mint(user, tenant, hours)
    if reach.as_json:
        from holdfast.client.tokens import claims_of

        expires = datetime.fromtimestamp(claims_of(made).exp or 0, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        show.as_json({"token": made, "user_id": user, "tenant": tenant, "expires_at": expires})
    else:
        show.line(made)


@reaching
def status(reach: Reach) -> None:
    """Show how a running server is; exit code 1 if it is not ready.

    Examples:

    \b
      holdfast status
      holdfast status --json --url http://127.0.0.1:9000
    """
    found: dict[str, Any] = reach.as_operator().get("/admin/status")
    if reach.as_json:
        show.as_json(found)
    else:
        show.fields({"server": reach.address, **{name.replace("_", " "): _flat(v) for name, v in found.items()}})
    if found.get("ready") is False:
        raise typer.Exit(1)


@reaching
def backup(
    reach: Reach,
    reason: Annotated[str, typer.Option(help="Why; it goes into the audit log.")] = "asked for on the command line",
) -> None:
    """Copy the running server's chats into its state directory, without stopping it.

    Example:

    \b
      holdfast backup --reason "before the upgrade"
    """
    rest = reach.as_operator(BACKUP_SECONDS_MAX)
    columns = (SpinnerColumn(), TextColumn("copying and checking"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task("backup", total=None)
        taken = rest.post("/admin/backup", body={"reason": reason})
    if reach.as_json:
        show.as_json(taken)
    else:
        show.line(f"{taken['path']} ({taken['size_bytes']:,} bytes)")


@at_home
def restore(
    reach: Reach,
    file: Annotated[Path, typer.Argument(help="A backup that `holdfast backup` made.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the chats that are there.")] = False,
) -> None:
    """Put a backup in place of a stopped server's chats. Every client then reads its chats anew.

    Example:

    \b
      holdfast restore ~/.local/state/holdfast/backups/chats-01J9ZK….db --overwrite
    """
    from holdfast.node.backup import restore_backup

    with Console(stderr=True).status("checking and copying"):
        chats = restore_backup(reach.state_path, file, overwrite=overwrite)
    if reach.as_json:
        show.as_json({"chats": chats, "state_dir": str(reach.state_path)})
    else:
        show.line(f"{chats} chats are in place in {reach.state_path}; start the server with `holdfast serve`")


@key.command("create")
@reaching
def create_key(
    reach: Reach,
    kind: Annotated[Kind, typer.Argument(help="tenant: a backend that acts for its users; admin: an operator.")],
    label: Annotated[str, typer.Option(help="What it is for.")],
    reason: Annotated[str, typer.Option(help="Why; it goes into the audit log.")] = "asked for on the command line",
    tenant: Annotated[str | None, typer.Option(help="Whose; for tenant keys.  [default: default]")] = None,
    scopes: Annotated[list[str] | None, typer.Option("--scope", help="What it may do; repeatable.")] = None,
) -> None:
    """Make an API key. It is shown once.

    Examples:

    \b
      holdfast key create tenant --label "shop backend" --tenant acme
      holdfast key create admin --label monitoring --scope status:read
    """
    if kind is Kind.admin and tenant:
        raise InvalidMessage("an admin key belongs to no tenant: leave --tenant out")
    body: dict[str, Any] = {"kind": kind.value, "label": label, "reason": reason}
    if kind is Kind.tenant:
        body["tenant"] = tenant or "default"
    if scopes:
        body["scopes"] = scopes
    made = reach.as_operator().post("/admin/keys", body=body)
    if reach.as_json:
        show.as_json(made)
    else:
        show.line(made["secret"])
        typer.echo(f"{made['key']['key_id']}: keep the line above; it cannot be shown again", err=True)


@key.command("list")
@reaching
def list_keys(reach: Reach) -> None:
    """List the API keys, without their secrets.

    Example:

    \b
      holdfast key list
    """
    keys = reach.as_operator().get("/admin/keys")["keys"]
    if reach.as_json:
        show.as_json(keys)
        return
    show.table(
        ("key", "kind", "tenant", "label", "scopes", "created", "ends with"),
        (
            (
                k["key_id"],
                k["kind"],
                k["tenant"],
                k["label"],
                " ".join(k["scopes"]),
                k["created_at"][:16],
                k["last_four"],
            )
            for k in keys
        ),
        empty="No keys. Make one: holdfast key create tenant --label LABEL",
    )  # fmt: skip


@key.command("revoke")
@reaching
def revoke_key(
    reach: Reach,
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="A key's id (key_…), as `key list` shows it.")],
    reason: Annotated[str, typer.Option(help="Why; it goes into the audit log.")] = "asked for on the command line",
) -> None:
    """Make an API key worthless from now on.

    Example:

    \b
      holdfast key revoke key_3f2a90 --reason "left the company"
    """
    revoked = reach.as_operator().delete("/admin/keys", key_id, reason=reason)
    if reach.as_json:
        show.as_json(revoked)
    else:
        show.line(f"{key_id} ({revoked['label']}) is revoked")


def _flat(value: Any) -> Any:
    match value:
        case dict():
            return ", ".join(f"{name}: {_flat(inner)}" for name, inner in value.items()) or "none"
        case list():
            return ", ".join(str(_flat(inner)) for inner in value) or "none"
        case bool():
            return "yes" if value else "no"
        case _:
            return value
