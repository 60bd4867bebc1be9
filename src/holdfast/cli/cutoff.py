"""The commands that cut users off: ``revoke``, ``ban``, ``mute``, ``disconnect``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.context import (
    ASKED,
    CliContext,
    ReasonOption,
    TenantOption,
    chat_id_of,
    group,
    local_command,
    remote_command,
)
from holdfast.errors import InvalidMessage, NotFound

revoke = group("Make tokens worthless: one, a user's, a device's, a tenant's.")

UserArgument = Annotated[str, typer.Argument(metavar="USER", help="A user's id.")]
ChatOption = Annotated[str | None, typer.Option("--chat", help="In this chat (its id) only.")]
BeforeOption = Annotated[
    str | None,
    typer.Option(
        "--before", help="Tokens issued before this moment, such as 2026-01-31T12:00:00Z."
    ),
]
PAGE = 500


@revoke.command("token")
@remote_command
def revoke_token(
    context: CliContext,
    jti: Annotated[str | None, typer.Option("--jti", help="The token's id.")] = None,
    file: Annotated[
        typer.FileText | None, typer.Option("--file", help="A file with the token; - is stdin.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="The tenant of a --jti.  [default: default]")
    ] = None,
    reason: ReasonOption = ASKED,
) -> None:
    """Revoke one token, by its id (the claim jti) or by itself. A token is a secret: it
    is read from a file or stdin.

    Examples:

    \b
      holdfast revoke token --jti tok_01J9ZK --reason "found in a log"
      holdfast revoke token --file stolen.txt
    """
    if (jti is None) is (file is None):
        raise InvalidMessage("give the token's id with --jti, or a file that holds it with --file")
    body = {
        "kind": "token",
        "jti": jti,
        "token": file.read().strip() if file else None,
        "tenant": tenant,
    }
    made = _add(context, body, reason)
    _report_revocation(context, made, f"token {made['token_id']} is revoked")


@revoke.command("user")
@remote_command
def revoke_user(
    context: CliContext,
    user: UserArgument,
    tenant: TenantOption = "default",
    before: BeforeOption = None,
    reason: ReasonOption = ASKED,
) -> None:
    """Revoke every token that a user has. New ones are good: to keep the user out, see
    `holdfast ban`.

    Examples:

    \b
      holdfast revoke user alice --reason "lost her laptop"
      holdfast revoke user alice --before 2026-01-31T12:00:00Z
    """
    body = {"kind": "user", "user_id": user, "tenant": tenant, "issued_before": before}
    made = _add(context, body, reason)
    _report_revocation(
        context,
        made,
        f"tokens of {user} ({tenant}) issued before {made['issued_before']} are revoked",
    )


@revoke.command("device")
@remote_command
def revoke_device(
    context: CliContext,
    user: UserArgument,
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="A device's id.")],
    tenant: TenantOption = "default",
    before: BeforeOption = None,
    reason: ReasonOption = ASKED,
) -> None:
    """Refuse the tokens a user has when this device shows them, until it shows a new
    one.

    A device names itself: whoever holds the token can give another name. Of a stolen
    device revoke the user's tokens.

    Example:

    \b
      holdfast revoke device alice alices-phone
    """
    body = {
        "kind": "device",
        "user_id": user,
        "device_id": device,
        "tenant": tenant,
        "issued_before": before,
    }
    made = _add(context, body, reason)
    _report_revocation(
        context, made, f"device {device} of {user} ({tenant}) is cut off until it has a new token"
    )


@revoke.command("tenant")
@remote_command
def revoke_tenant(
    context: CliContext,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="A tenant's name.")],
    before: BeforeOption = None,
    reason: ReasonOption = ASKED,
) -> None:
    """Revoke every token that the users of a tenant have, whoever made it. New ones are
    good.

    For when a tenant key got out: revoke the key first, or new tokens are made with it.

    Examples:

    \b
      holdfast revoke tenant acme --reason "key leaked, ticket 4711"
      holdfast revoke tenant acme --before 2026-01-31T12:00:00Z
    """
    made = _add(context, {"kind": "tenant", "tenant": tenant, "issued_before": before}, reason)
    _report_revocation(
        context,
        made,
        f"tokens of the tenant {tenant} issued before {made['issued_before']} are revoked",
    )


@revoke.command("ls")
@remote_command
def list_revocations(
    context: CliContext,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Of this tenant only.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="Of this user only.")] = None,
) -> None:
    """List who is cut off: tokens, users, devices and tenants, and users banned or
    muted in a whole tenant.

    Example:

    \b
      holdfast revoke ls --user alice
    """
    found = _all(context, tenant=tenant, user_id=user)
    output.report_rows(
        context, found,
        ("id", "kind", "tenant", "user", "token or device", "issued before", "ends"),
        (
            (
                e["number"], e["kind"], e["tenant"], e["user_id"] or "–",
                e["token_id"] or e["device_id"] or "–",
                (e["issued_before"] or "–")[:16], (e["ends_at"] or "when lifted")[:16],
            )
            for e in found
        ),
        empty="Nobody is cut off.",
    )  # fmt: skip


@revoke.command("undo")
@remote_command
def undo_revocation(
    context: CliContext,
    number: Annotated[int, typer.Argument(metavar="ID", help="As `holdfast revoke ls` shows it.")],
    reason: ReasonOption = ASKED,
) -> None:
    """Lift one entry of the list: what it refused is good again, unless it has expired.

    Example:

    \b
      holdfast revoke undo 17 --reason "the wrong Alice"
    """
    lifted = context.as_operator().delete("/admin/revocations", str(number), reason=reason)
    output.report(context, lifted, f"{lifted['kind']} {number} is lifted")


@revoke.command("reset")
@local_command
def reset_revocations(context: CliContext, reason: ReasonOption = ASKED) -> None:
    """Begin again without revocations where their file, access.db, is lost: nobody is
    cut off then.

    On the state directory of a stopped server. A server that has had revocations does
    not start without the file: put it back if you can.

    Example:

    \b
      holdfast revoke reset --reason "disk lost, ticket 4711"
    """
    from holdfast.node.recovery import reset_revocations

    reset_revocations(context.state_path, reason)
    output.report(
        context,
        {"reset": True},
        "nobody is cut off by revocations, bans and mutes of tenants any more",
    )


@remote_command
def ban(
    context: CliContext,
    user: UserArgument,
    chat: ChatOption = None,
    tenant: TenantOption = "default",
    reason: ReasonOption = ASKED,
) -> None:
    """Keep a user out: of one chat, or of the whole tenant. Undo it with
    `holdfast unban`.

    In a chat: removed, and nobody can add them; its owners cannot lift it. In the
    tenant: every token is refused, new ones too.

    Examples:

    \b
      holdfast ban mallory --reason "spam, ticket 4711"
      holdfast ban mallory --chat chat_01J9ZK
    """
    _restrict(context, "ban", user, chat, tenant, reason)


@remote_command
def unban(
    context: CliContext,
    user: UserArgument,
    chat: ChatOption = None,
    tenant: TenantOption = "default",
    reason: ReasonOption = ASKED,
) -> None:
    """Lift a ban. It adds the user to no chat.

    Example:

    \b
      holdfast unban mallory --chat chat_01J9ZK
    """
    _lift(context, "ban", user, chat, tenant, reason)


@remote_command
def mute(
    context: CliContext,
    user: UserArgument,
    chat: ChatOption = None,
    tenant: TenantOption = "default",
    reason: ReasonOption = ASKED,
) -> None:
    """Let a user read and not send: in one chat, or in the whole tenant. Undo it with
    `holdfast unmute`.

    They rename no chat and add nobody either; in the tenant they also create no chat.

    Examples:

    \b
      holdfast mute mallory --reason "shouting"
      holdfast mute mallory --chat chat_01J9ZK
    """
    _restrict(context, "mute", user, chat, tenant, reason)


@remote_command
def unmute(
    context: CliContext,
    user: UserArgument,
    chat: ChatOption = None,
    tenant: TenantOption = "default",
    reason: ReasonOption = ASKED,
) -> None:
    """Lift a mute.

    Example:

    \b
      holdfast unmute mallory
    """
    _lift(context, "mute", user, chat, tenant, reason)


@remote_command
def disconnect(
    context: CliContext,
    user: UserArgument,
    device: Annotated[
        str | None, typer.Option("--device", help="This device's connections only.")
    ] = None,
    tenant: TenantOption = "default",
    reason: ReasonOption = ASKED,
) -> None:
    """Close a user's connections now. They may come back at once; to keep them out,
    revoke or ban first.

    Example:

    \b
      holdfast disconnect alice --device alices-phone
    """
    body = {
        "user_id": user,
        "tenant": tenant,
        "reason": reason,
        **({"device_id": device} if device else {}),
    }
    answer = context.as_operator().post("/admin/disconnect", body=body)
    closed, what = answer["closed"], f"device {device} of {user}" if device else user
    none = f"nobody matched: {what} ({tenant}) has no connection"
    output.report(
        context, answer, f"{closed} connections of {what} ({tenant}) are closed" if closed else none
    )


def _add(context: CliContext, body: Mapping[str, Any], reason: str) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if value is not None}
    made: dict[str, Any] = context.as_operator().post(
        "/admin/revocations", body={**given, "reason": reason}
    )
    return made


def _report_revocation(context: CliContext, made: Mapping[str, Any], sentence: str) -> None:
    output.report(context, made, f"{sentence}; undo it with: holdfast revoke undo {made['number']}")


def _restrict(
    context: CliContext, kind: str, user: str, chat: str | None, tenant: str, reason: str
) -> None:
    done = "banned" if kind == "ban" else "muted"
    if chat is None:
        made = _add(context, {"kind": kind, "user_id": user, "tenant": tenant}, reason)
        output.report(
            context,
            made,
            f"{user} is {done} in the tenant {tenant} until `holdfast un{kind} {user}`",
        )
        return
    changed = context.as_operator().post(
        "/admin/chats", chat_id_of(chat), kind, body={"user_id": user, "reason": reason}
    )
    output.report(
        context,
        changed,
        f"{user} is {done} in {chat} until `holdfast un{kind} {user} --chat {chat}`",
    )


def _lift(
    context: CliContext, kind: str, user: str, chat: str | None, tenant: str, reason: str
) -> None:
    done = "banned" if kind == "ban" else "muted"
    if chat is not None:
        changed = context.as_operator().post(
            "/admin/chats", chat_id_of(chat), f"un{kind}", body={"user_id": user, "reason": reason}
        )
        output.report(context, changed, f"{user} is no longer {done} in {chat}")
        return
    found = _all(context, kind=kind, tenant=tenant, user_id=user)
    if not found:
        raise NotFound(f"{user} is not {done} in the tenant {tenant}: nothing was changed")
    lifted = context.as_operator().delete(
        "/admin/revocations", str(found[0]["number"]), reason=reason
    )
    output.report(context, lifted, f"{user} is no longer {done} in the tenant {tenant}")


def _all(context: CliContext, **filters: str | None) -> list[dict[str, Any]]:
    rest, found = context.as_operator(), list[dict[str, Any]]()
    after: int | None = 0
    while after is not None:
        page = rest.get("/admin/revocations", limit=PAGE, after=after, **filters)
        found += page["revocations"]
        after = page["next"]
    return found
