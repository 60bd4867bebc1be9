"""The rules commands. A rule is named by its tenant (``*``: every one) and resource."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec
import typer

from holdfast.cli import output
from holdfast.cli.context import (
    ASKED,
    CliContext,
    group,
    local_command,
    remote_command,
    settings_of,
)
from holdfast.cli.rules.desired import FIELDS, assigned, portable, read
from holdfast.cli.rules.requests import (
    PAGE,
    amount,
    besides,
    compared,
    every,
    history_of,
    imported,
    put,
    sure,
)
from holdfast.errors import Deferred, NotFound, OutcomeUnknown
from holdfast.limits.rule_import import field_differences
from holdfast.limits.rules import reserved_beside
from holdfast.resilience import Backoff

rules = group("Rate limits, changed live.")

TenantArgument = Annotated[str, typer.Argument(help="Whose rule; * for every tenant.")]
ResourceArgument = Annotated[str, typer.Argument(help="For what; a * at its end matches the rest.")]
SubjectArgument = Annotated[
    str, typer.Argument(help="Who is counted: a user, an address, or what your checks name.")
]
VersionOption = Annotated[
    int | None, typer.Option(help="The version you saw.  [default: the one there now]")
]
_ReasonOption = Annotated[str, typer.Option(help="Why; it is kept with the change.")]
WATCH_SECONDS = 1.0
RETRY = Backoff(WATCH_SECONDS, 10.0)
"""How long a watch waits while the server is unavailable."""


@rules.command("ls")
@remote_command
def list_rules(
    context: CliContext,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
) -> None:
    """List the rules.

    Examples:

    \b
      holdfast rules ls
      holdfast rules ls --tenant acme --json
    """
    found = every(context.as_operator(), tenant)
    output.report_rows(
        context,
        found,
        ("tenant", "resource", "algorithm", "limit", "burst", "besides", "version"),
        (
            (
                r["tenantID"],
                r["resource"],
                r["algorithm"],
                amount(r),
                r.get("burstSize", ""),
                besides(r),
                r["version"],
            )
            for r in found
        ),
        empty=(
            "No rules. Make one: holdfast rules set acme /api/search algorithm=token_bucket"
            " limit=100 window=60s"
        ),
    )


@rules.command("get")
@remote_command
def get_rule(context: CliContext, tenant: TenantArgument, resource: ResourceArgument) -> None:
    """Show one rule.

    Example:

    \b
      holdfast rules get acme /api/search
    """
    output.report_object(
        context, context.as_operator().get("/admin/rules", tenantID=tenant, resource=resource)
    )


@rules.command("set")
@remote_command
def set_rule(
    context: CliContext,
    tenant: TenantArgument,
    resource: ResourceArgument,
    fields: Annotated[
        list[str], typer.Argument(metavar="FIELD=VALUE...", help=f"Of {', '.join(FIELDS)}.")
    ],
    version: VersionOption = None,
    reason: _ReasonOption = ASKED,
) -> None:
    """Create a rule, or change the fields you name. It is in force everywhere within
    moments.

    Examples:

    \b
      holdfast rules set acme /api/search algorithm=token_bucket limit=100 window=60s
      holdfast rules set acme /api/search limit=500 --reason "the sale" --version 7
      holdfast rules set acme /api/search burstSize=none
      holdfast rules set "*" send:user mode=shadow
    """
    body = {"tenantID": tenant, "resource": resource, **assigned(fields), "reason": reason}
    output.report_object(context, put(context.as_operator(), body, version))
    if beside := reserved_beside(resource):
        own = ", ".join(f"{word}*" for word in beside)
        typer.echo(
            f"note: {resource} does not apply to Holdfast's own entry points; for those set {own}",
            err=True,
        )


@rules.command("delete")
@remote_command
def delete_rule(
    context: CliContext,
    tenant: TenantArgument,
    resource: ResourceArgument,
    version: VersionOption = None,
    reason: _ReasonOption = ASKED,
) -> None:
    """Delete a rule; its history stays, and `rollback` brings it back.

    Example:

    \b
      holdfast rules delete acme /api/search --reason "moved to the wildcard"
    """
    rest = context.as_operator()
    name = {"tenantID": tenant, "resource": resource}
    seen = version if version is not None else rest.get("/admin/rules", **name)["version"]
    query = urlencode({**name, "expectedVersion": seen, "reason": reason})
    output.report_object(context, sure(rest, "DELETE", f"/admin/rules?{query}"))


@rules.command("history")
@remote_command
def history(context: CliContext, tenant: TenantArgument, resource: ResourceArgument) -> None:
    """Who changed a rule, when and why; newest first.

    Example:

    \b
      holdfast rules history acme /api/search
    """
    changes = history_of(context.as_operator(), tenant, resource)
    output.report_rows(
        context,
        changes,
        ("version", "at", "who", "what", "limit", "besides", "reason"),
        (
            (
                c["version"],
                c["at"][:19],
                c["actor"],
                c["action"],
                amount(c["rule"]),
                besides(c["rule"]),
                c["reason"],
            )
            for c in changes
        ),
        empty="This rule has no history.",
    )


@rules.command("diff")
@remote_command
def diff(
    context: CliContext,
    tenant: TenantArgument,
    resource: ResourceArgument,
    old: Annotated[
        int | None, typer.Argument(help="A version.  [default: the last but one]")
    ] = None,
    new: Annotated[int | None, typer.Argument(help="A later version.  [default: the last]")] = None,
) -> None:
    """Show what changed between two versions of a rule.

    Examples:

    \b
      holdfast rules diff acme /api/search
      holdfast rules diff acme /api/search 3 7
    """
    past = {c["version"]: c["rule"] for c in history_of(context.as_operator(), tenant, resource)}
    if not past:
        raise NotFound("the log of changes does not reach back to this rule's last change")
    after = new if new is not None else max(past)
    before = old if old is not None else max(1, after - 1)
    for wanted in (before, after):
        if wanted not in past:
            raise NotFound(
                f"there is no version {wanted} of this rule, or the log does not reach back to it"
            )
    changed = field_differences(past[before], past[after], (*FIELDS, "deleted"))
    if context.as_json:
        output.as_json({"old": before, "new": after, "changed": changed})
    elif not changed:
        output.line(f"versions {before} and {after} are the same")
    else:
        output.fields({name: f"{was} → {now}" for name, (was, now) in changed.items()})


@rules.command("rollback")
@remote_command
def rollback(
    context: CliContext,
    tenant: TenantArgument,
    resource: ResourceArgument,
    version: Annotated[int, typer.Argument(help="What it shall be again.")],
    reason: _ReasonOption = ASKED,
) -> None:
    """Make a rule what it was, as a new version. A deleted rule comes back.

    Example:

    \b
      holdfast rules rollback acme /api/search 6 --reason "500 was too much"
    """
    body = {"tenantID": tenant, "resource": resource, "version": version, "reason": reason}
    output.report_object(
        context, sure(context.as_operator(), "POST", "/admin/rules/rollback", body)
    )


@rules.command("peek")
@remote_command
def peek(
    context: CliContext,
    tenant: TenantArgument,
    resource: ResourceArgument,
    subject: SubjectArgument,
) -> None:
    """Show how much of its limit a subject has used. Nothing is taken.

    Examples:

    \b
      holdfast rules peek acme /api/search user-7
      holdfast rules peek acme send:user ann
    """
    name = {"tenantID": tenant, "resource": resource, "subject": subject}
    output.report_object(context, context.as_operator().get("/admin/limits/subject", **name))


@rules.command("reset")
@remote_command
def reset(
    context: CliContext,
    tenant: TenantArgument,
    resource: ResourceArgument,
    subject: SubjectArgument,
    reason: _ReasonOption = ASKED,
) -> None:
    """Forget how much of its limit a subject has used. It is recorded in the audit log.

    Example:

    \b
      holdfast rules reset acme /api/search user-7 --reason "their import ran twice"
    """
    body = {"tenantID": tenant, "resource": resource, "subject": subject, "reason": reason}
    output.report_object(
        context, context.as_operator().post("/admin/limits/subject/reset", body=body)
    )


@rules.command("watch")
@remote_command
def watch(
    context: CliContext,
    seconds: Annotated[
        float | None, typer.Option(help="Stop after this time.  [default: at Ctrl-C]")
    ] = None,
) -> None:
    """Print changes as they are made, until Ctrl-C. While the server is unavailable it
    waits, and then prints what it missed.

    Examples:

    \b
      holdfast rules watch
      holdfast rules watch --json | jq .rule.limit
    """
    rest, end = context.as_operator(), None if seconds is None else time.monotonic() + seconds
    cursor, failures = rest.get("/admin/rules/changes", limit=1)["head"], 0
    while True:
        over = end is not None and time.monotonic() >= end
        try:
            page = rest.get("/admin/rules/changes", after=cursor, limit=PAGE)
        except (Deferred, OutcomeUnknown) as error:
            if over:
                raise
            failures += 1
            if failures == 1:
                typer.echo(f"still watching: {error.message}", err=True)
        else:
            # a restored log may be shorter than it was
            failures, cursor = 0, min(cursor, page["head"])
            for change in page["changes"]:
                cursor = change["seq"]
                _print_change(context, change)
        if over:
            return
        pause = RETRY.bound(failures) if failures else WATCH_SECONDS
        time.sleep(pause if end is None else min(pause, max(0.0, end - time.monotonic())))


@rules.command("export")
@remote_command
def export(
    context: CliContext,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
) -> None:
    """Print the rules as JSON that `import` takes.

    Example:

    \b
      holdfast rules export > rules.json
    """
    output.as_json([portable(rule) for rule in every(context.as_operator(), tenant)])


@rules.command("import")
@remote_command
def import_rules(
    context: CliContext,
    file: Annotated[Path, typer.Argument(help="What `export` printed.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    reason: _ReasonOption = ASKED,
) -> None:
    """Make the rules of the file what it says, all of them or none. Rules that are not
    in it stay.

    The whole file is judged and compared first, and then imported in one change: if
    anybody changed a rule meanwhile, nothing is changed (409). What a rule leaves out
    is what a new rule would have.

    Examples:

    \b
      holdfast rules import rules.json --dry-run
      holdfast rules import rules.json --reason "from git"
    """
    rest, wanted = context.as_operator(), read(file)
    plan, change_id = compared(rest, wanted), ""
    if plan["changes"] and not dry_run:
        change_id = imported(rest, wanted, plan["digest"], reason)["changeID"]
    _print_import(context, plan["changes"], change_id, dry_run=dry_run)


@rules.command("raise-epoch")
@local_command
def raise_epoch(context: CliContext) -> None:
    """After you put back your own copy of the rules: let nobody take them for older
    ones.

    For limits.db, with the server stopped; for PostgreSQL (`limits.rules_url`), also
    while nodes run. `holdfast restore` does this by itself, and so does a failover or a
    point-in-time recovery of PostgreSQL.

    Example:

    \b
      holdfast rules raise-epoch
    """
    from holdfast.node.backup import renew_rules, renew_shared_rules

    limits = settings_of(context.config).limits
    if not limits.is_embedded:
        epoch = asyncio.run(renew_shared_rules(limits.rules_url))
        if context.as_json:
            output.as_json({"epoch": epoch})
        else:
            output.line(
                f"the rules in PostgreSQL: under epoch {epoch}; every node takes them with its next"
                " sync"
            )
        return
    file = renew_rules(context.state_path)
    output.report(
        context,
        {"file": str(file)},
        f"{file}: under a new epoch; start the server with `holdfast serve`",
    )


def _print_change(context: CliContext, change: Mapping[str, Any]) -> None:
    if context.as_json:
        output.line(msgspec.json.encode(change).decode())
        return
    rule = change["rule"]
    what = f"{change['action']} {rule['tenantID']} {rule['resource']} v{change['version']}"
    limit = f"limit {rule['limit']} in {rule['window']} ({rule['mode']})"
    text = f"{change['at'][11:19]} {change['actor']}: {what} {limit} {change['reason']}"
    output.line(output.printable(text))


def _print_import(
    context: CliContext, changes: Sequence[Mapping[str, Any]], change_id: str, *, dry_run: bool
) -> None:
    if context.as_json:
        output.as_json({"dry_run": dry_run, "change_id": change_id, "rules": changes})
        return
    if not changes:
        output.line("Nothing to change: the rules are as in the file.")
        return
    rows = (
        (
            f"{c['tenantID']} {c['resource']}",
            "new" if c["new"] else ", ".join(_said(*d) for d in c["changed"].items()),
        )
        for c in changes
    )
    output.table(("rule", "what"), rows, empty="")
    many = f"{len(changes)} rule{'s' if len(changes) > 1 else ''}"
    output.line(
        f"{many} would change; this is a dry run."
        if dry_run
        else f"{many} changed, as {change_id}."
    )


def _said(field: str, values: Sequence[Any]) -> str:
    return "{}: {} → {}".format(field, *("none" if value is None else value for value in values))
