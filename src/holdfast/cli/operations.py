"""The commands about the server: tokens, status, backup, restore, erasure, keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from holdfast.cli import output
from holdfast.cli.alerts import problem_lines, show_objectives
from holdfast.cli.cluster import show_cluster
from holdfast.cli.context import (
    ASKED,
    TOKEN_HOURS,
    CliContext,
    ReasonOption,
    TenantOption,
    group,
    local_command,
    remote_command,
)
from holdfast.errors import InvalidMessage, Unavailable

key = group("API keys of tenants and operators.")

BACKUP_SECONDS_MAX = 3600.0
SHOWN_AS_LINES = {"ok", "alerts", "pending", "unknown", "halted_chats", "dead_by_reason", "disk"}


class KeyKindChoice(StrEnum):
    tenant = "tenant"
    admin = "admin"


@local_command
def token(
    context: CliContext,
    user: Annotated[str, typer.Option("--user", "-u", help="Whom the token speaks for.")],
    tenant: TenantOption = "default",
    hours: Annotated[
        float, typer.Option(min=0.01, max=720, help="How long it is valid.")
    ] = TOKEN_HOURS,
    scopes: Annotated[
        list[str] | None,
        typer.Option("--scope", help="What it may do; repeatable.  [default: everything]"),
    ] = None,
    chats: Annotated[
        list[str] | None,
        typer.Option("--chat", help="The only chats it is good for; repeatable.  [default: all]"),
    ] = None,
) -> None:
    """Make a user token, offline, with the secret in the state directory.

    Examples:

    \b
      holdfast token --user alice
      holdfast token --user display --scope chats:read
      printf 'Authorization: Bearer %s' "$(holdfast token --user alice)" |
        curl -H @- http://127.0.0.1:8080/v1/chats
    """
    made = context.mint(user, tenant, hours, scopes or (), chats or ())
    if context.as_json:
        from holdfast.client.connection import claims_of

        claims = claims_of(made)
        expires = datetime.fromtimestamp(claims.exp or 0, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        output.as_json(
            {
                "token": made,
                "user_id": user,
                "tenant": tenant,
                "expires_at": expires,
                "jti": claims.jti,
            }
        )
    else:
        output.line(made)


@remote_command
def status(
    context: CliContext,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Show all nodes and what they share instead.")
    ] = False,
    slo: Annotated[
        bool, typer.Option("--slo", help="Show the objectives over the node's last hour instead.")
    ] = False,
) -> None:
    """Show how a running server is: first what is wrong and which page to open, else
    one line. Exit code 1 if it is not ready.

    With --cluster: every node, PostgreSQL, the registry and the leases; exit
    code 1 if something needs a look. With --slo: exit code 1 if one is not met.

    Examples:

    \b
      holdfast status
      holdfast status --json --url http://127.0.0.1:9000
      holdfast status --cluster
      holdfast status --slo
    """
    if cluster:
        show_cluster(context)
        return
    if slo:
        show_objectives(context)
        return
    found: dict[str, Any] = context.as_operator().get("/admin/status")
    if not context.as_json:
        problems = [*problem_lines(found), *(f"alarm: {each}" for each in alarms(found))]
        for problem in problems or ["ok: ready, and no alert fires"]:
            output.line(problem)
    shown = {name: value for name, value in found.items() if name not in SHOWN_AS_LINES}
    output.report_object(context, found, {"server": context.address, **shown})
    if found.get("ready") is False:
        raise typer.Exit(1)


@remote_command
def backup(
    context: CliContext,
    reason: ReasonOption = ASKED,
) -> None:
    """Copy everything the running server keeps, but secrets.json, into a folder of its
    state directory.

    The server goes on serving. Copy the folder to another machine, and keep it secret:
    it holds every message, the secrets with which webhooks are signed and the hashes of
    the API keys. The secret that signs tokens and the first admin key are in
    secrets.json, which is not in it: keep a copy of that file elsewhere. A node of a
    cluster refuses: back up its PostgreSQL instead.

    Example:

    \b
      holdfast backup --reason "before the upgrade"
    """
    rest, watch = context.as_operator(BACKUP_SECONDS_MAX), context.as_operator()

    def step() -> tuple[str, int, int] | None:
        found = watch.get("/admin/backup")["step"]
        return (found["doing"], found["done_bytes"], found["total_bytes"]) if found else None

    with output.progress(context, of_bytes=True) as moved, output.watching(step, moved):
        taken = rest.post("/admin/backup", body={"reason": reason})
    output.report(
        context,
        taken,
        f"{taken['path']} ({taken['size_bytes']:,} bytes: {_contents(taken['files'])})",
    )


@local_command
def restore(
    context: CliContext,
    folder: Annotated[
        Path, typer.Argument(metavar="BACKUP", help="A backup that `holdfast backup` made.")
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Move aside what is there.")
    ] = False,
    reason: ReasonOption = ASKED,
) -> None:
    """Put a backup in place of a stopped server's state. Every client then reads its
    chats again, from the beginning.

    All of it or nothing, also when it is killed. What it replaces is moved aside, not
    deleted. Secrets and keys that are there stay. Refused for a node of a cluster.

    Example:

    \b
      holdfast restore ~/.local/state/holdfast/backups/backup-01J9ZK… --overwrite
    """
    from holdfast.drivers.cluster import backups_are_those_of_postgres
    from holdfast.node.backup import restore_backup

    if context.cluster is not None:
        raise backups_are_those_of_postgres()
    with output.progress(context, of_bytes=True) as moved:
        manifest = restore_backup(
            context.state_path, folder, overwrite=overwrite, reason=reason, progress=moved
        )
    files = [{"name": f.name, "counts": f.counts} for f in manifest.files]
    if context.as_json:
        output.as_json(
            {"state_dir": str(context.state_path), "taken_at": manifest.taken_at, "files": files}
        )
        return
    output.line(
        f"{_contents(files)}: in place in {context.state_path}; start the server with `holdfast"
        " serve`"
    )
    if not (context.state_path / "secrets.json").exists():
        typer.echo(
            "There is no secrets.json: put a copy of the old server's there, or the next start"
            " makes new ones and every token made so far is void.",
            err=True,
        )


def _contents(files: Iterable[Mapping[str, Any]]) -> str:
    """The counts of a backup, as a phrase."""
    named = ("chats", "messages", "jobs", "rules", "endpoints")
    counts = {name: count for file in files for name, count in file["counts"].items()}
    return ", ".join(f"{counts[name]:,} {name}" for name in named if name in counts)


@remote_command
def erase(
    context: CliContext,
    user: Annotated[str, typer.Option("--user", "-u", help="Whom to erase.")],
    reason: ReasonOption,
    tenant: TenantOption = "default",
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Erase a person: the content of all their messages, their memberships of groups,
    their devices. It cannot be undone.

    Safe to repeat, also after it was interrupted. Their id stays where it is a sender,
    and bans and mutes stay. It does not cut them off: for that, `holdfast revoke user`
    or `holdfast ban` first.

    Example:

    \b
      holdfast erase --user alice --reason "asked us to, ticket 4711"
    """
    if not sure:
        typer.confirm(
            f"Erase everything {user} ({tenant}) wrote? Only a backup brings it back",
            abort=True,
            err=True,
        )
    rest = context.as_operator()
    messages, chats, after = 0, 0, None
    with output.progress(context) as moved:
        while True:
            body = {"tenant": tenant, "user_id": user, "reason": reason, "after": after}
            step = rest.post("/admin/erase", body=body)
            messages, chats, after = (
                messages + step["messages"],
                chats + step["chats_left"],
                step["next"],
            )
            moved(f"{messages:,} messages erased", 0, None)
            if step["done"]:
                break
    erased = {"messages": messages, "chats_left": chats, "kept": step["kept"]}
    kept = f"; still in {len(step['kept'])} direct or halted chats" if step["kept"] else ""
    output.report(
        context, erased, f"{messages:,} messages of {user} are erased, {chats:,} chats left{kept}"
    )


@key.command("create")
@remote_command
def create_key(
    context: CliContext,
    kind: Annotated[
        KeyKindChoice,
        typer.Argument(help="tenant: a backend that acts for its users; admin: an operator."),
    ],
    label: Annotated[str, typer.Option(help="What it is for.")],
    reason: ReasonOption = ASKED,
    tenant: Annotated[
        str | None, typer.Option(help="Whose; for tenant keys.  [default: default]")
    ] = None,
    scopes: Annotated[
        list[str] | None, typer.Option("--scope", help="What it may do; repeatable.")
    ] = None,
) -> None:
    """Make an API key. It is shown once.

    Without --url and --token, an admin key is made in the state directory itself if its
    server is stopped: the way back when no admin key works any more. Tokens and other
    keys go on.

    Examples:

    \b
      holdfast key create tenant --label "shop backend" --tenant acme
      holdfast key create admin --label monitoring --scope status:read
    """
    if kind is KeyKindChoice.admin and tenant:
        raise InvalidMessage("an admin key belongs to no tenant: leave --tenant out")
    body: dict[str, Any] = {"kind": kind.value, "label": label, "reason": reason}
    if kind is KeyKindChoice.tenant:
        body["tenant"] = tenant or "default"
    if scopes:
        body["scopes"] = scopes
    stopped = context.stopped_state if kind is KeyKindChoice.admin else None
    if stopped is not None and not context.names_a_server:
        made = _made_offline(context, stopped, body)
    else:
        made = _made_by_server(context, body, stopped)
    output.secret(context, made, made["key"]["key_id"])


def _made_by_server(
    context: CliContext, body: Mapping[str, Any], stopped: Path | None
) -> dict[str, Any]:
    """``stopped``: a stopped server's state, where the key could be made."""
    try:
        return dict(context.as_operator().post("/admin/keys", body=body))
    except Unavailable as error:
        if stopped is None:
            raise
        named = " and ".join(
            way
            for given, way in (
                (context.url, "--url and unset HOLDFAST_URL"),
                (context.token, "--token and unset HOLDFAST_TOKEN and HOLDFAST_TOKEN_FILE"),
            )
            if given
        )
        raise Unavailable(
            f"{error.message}. Here the server of {stopped} is stopped: to make the key there,"
            f" leave out {named}"
        ) from None


def _made_offline(context: CliContext, state: Path, body: Mapping[str, Any]) -> dict[str, Any]:
    """Make the key in a stopped server's state; return the server's response."""
    from holdfast.api.admin import key_view
    from holdfast.api.schemas import IssuedKey
    from holdfast.node.recovery import create_admin_key

    label, scopes, reason = body["label"], body.get("scopes"), body["reason"]
    made, secret = create_admin_key(state, label, scopes, reason, context.cluster)
    typer.echo(
        "This node is stopped: the key was made in the database of its cluster, and is good at"
        " the others in a few seconds."
        if context.cluster
        else f"The server of {state} is stopped: the key was made there, and is good from the"
        " next start on.",
        err=True,
    )
    return dict(msgspec.to_builtins(IssuedKey(key_view(made), secret)))


@key.command("ls")
@remote_command
def list_keys(context: CliContext) -> None:
    """List the API keys, without their secrets.

    Example:

    \b
      holdfast key ls
    """
    keys = context.as_operator().get("/admin/keys")["keys"]
    output.report_rows(
        context, keys,
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
@remote_command
def revoke_key(
    context: CliContext,
    key_id: Annotated[
        str, typer.Argument(metavar="KEY", help="A key's id (key_…), as `key ls` shows it.")
    ],
    reason: ReasonOption = ASKED,
    force: Annotated[
        bool, typer.Option("--force", help="Also the last key that can make keys.")
    ] = False,
) -> None:
    """Make an API key worthless from now on.

    The last key that can make keys is refused unless you say --force. Tokens that were
    made with a tenant key go on: if it got out, see `holdfast revoke tenant`.

    Example:

    \b
      holdfast key revoke key_3f2a90 --reason "left the company"
    """
    asked = {"reason": reason, **({"force": "true"} if force else {})}
    revoked = context.as_operator().delete("/admin/keys", key_id, **asked)
    output.report(context, revoked, f"{key_id} ({revoked['label']}) is revoked")
    if not context.as_json and "tokens:write" in revoked["scopes"]:
        end = f"holdfast revoke tenant {revoked['tenant']} --reason REASON"
        typer.echo(
            "tokens that were made with it are good until they expire; if it got out, end them:"
            f" {end}",
            err=True,
        )


def alarms(status: Mapping[str, Any]) -> list[str]:
    """The parts of a server's status that need attention now."""
    limits = status.get("limits") or {}
    found = []
    for name, why in status.get("trouble", {}).items():
        page = "replies-not-resumable" if name in ("replies", "usage") else "breaker-open"
        found.append(f"{name}: {why} (docs/guides/runbooks/{page}.md)")
    if limits.get("stale"):
        age = limits["staleness_seconds"]
        what = (
            "this node has never known them"
            if age is None
            else f"nobody knows of changes for {age:.0f} s"
        )
        found.append(f"the rules here are stale: {what} (docs/guides/runbooks/rules-stale.md)")
    if (counters := limits.get("counters", "up")) != "up":
        why = (
            f" ({limits.get('counters_reason') or 'no reason yet'}:"
            f" {limits.get('counters_detail') or 'no answer'})"
        )
        part = (
            f"{limits.get('degraded_ratio', 1):.0%} of checks are answered without them, by each"
            " node's share"
        )
        found.append(
            f"the counters are {counters}{why}: {part} (docs/guides/runbooks/limits-redis.md)"
        )
    if (notifications := limits.get("notifications", "up")) != "up":
        found.append(
            f"changes of rules do not come by Redis ({notifications})"
            " (docs/guides/runbooks/limits-redis.md)"
        )
    for name, issuer in (status.get("issuers") or {}).items():
        if issuer["trouble"]:
            keys = (
                f"{issuer['keys']} known keys go on"
                if issuer["keys"]
                else "its tokens are answered 503"
            )
            found.append(
                f"issuer {name}: {issuer['trouble']}; {keys} (docs/guides/runbooks/issuer-keys.md)"
            )
    if parked := (status.get("webhooks") or {}).get("parked"):
        jobs = (
            f"{sum(parked.values()):,} of its jobs are"
            if len(parked) == 1
            else f"{sum(parked.values()):,} jobs are"
        )
        found.append(
            f"webhooks disabled: {', '.join(parked)}; {jobs} parked (docs/guides/webhooks.md)"
        )
    found += _reply_alarms(status.get("replies") or {})
    return found


def _reply_alarms(replies: Mapping[str, Any]) -> list[str]:
    found = []
    if replies.get("shared_pool", "up") != "up":
        found.append(
            "Redis of replies does not answer: this node goes on with its share"
            " (docs/guides/runbooks/replies-redis-down.md)"
        )
    for name, pool in replies.get("pools", {}).items():
        if pool["state"] == "exhausted":
            found.append(
                f"the pool {name} of replies is exhausted, {pool['waiting']:,} wait"
                " (docs/guides/runbooks/replies-queue-full.md)"
            )
    for provider in replies.get("providers", ()):
        if provider["breaker"] == "open":
            why = provider["trouble"] or "no reason yet"
            found.append(
                f"the provider {provider['name']} does not answer: {why}"
                " (docs/guides/runbooks/reply-provider-down.md)"
            )
    if uncounted := replies.get("uncounted_runs"):
        found.append(
            f"what {uncounted:,} replies used was not counted: replies.db failed for too long"
            " (docs/guides/runbooks/replies-not-resumable.md)"
        )
    return found
