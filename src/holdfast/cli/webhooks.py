"""``holdfast webhooks``: the endpoints that get messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.context import ASKED, CliContext, ReasonOption, group, remote_command
from holdfast.cli.jobs import LimitOption

webhooks = group("Where a tenant's messages are sent.")

_EndpointArgument = Annotated[
    str, typer.Argument(metavar="ENDPOINT", help="An endpoint's id (ep_…).")
]


@webhooks.command("add")
@remote_command
def add_webhook(
    context: CliContext,
    address: Annotated[
        str, typer.Argument(metavar="URL", help="Where to; https, on a public address.")
    ],
    tenant: Annotated[str, typer.Option(help="Whose messages.")] = "default",
    description: Annotated[str, typer.Option(help="What it is for.")] = "",
    reason: ReasonOption = ASKED,
) -> None:
    """Add an endpoint; its signing secret is shown once.

    Example:

    \b
      holdfast webhooks add https://example.com/hooks/chat --tenant acme
    """
    body = {"url": address, "tenant": tenant, "description": description, "reason": reason}
    made = context.as_operator().post("/admin/webhooks", body=body)
    output.secret(context, made, made["endpoint_id"])


@webhooks.command("ls")
@remote_command
def list_webhooks(context: CliContext) -> None:
    """List the endpoints, and how many of their jobs wait; those of a disabled one are
    parked.

    Example:

    \b
      holdfast webhooks ls
    """
    found = context.as_operator().get("/admin/webhooks")["endpoints"]
    columns = ("endpoint", "tenant", "url", "state", "waiting", "for")
    rows = (
        (e["endpoint_id"], e["tenant"], e["url"], _state(e), _waiting(e), e["description"])
        for e in found
    )
    output.report_rows(context, found, columns, rows, empty="No endpoints.")


def _waiting(endpoint: Mapping[str, Any]) -> str:
    return "?" if endpoint["waiting"] is None else f"{endpoint['waiting']:,}"


def _state(endpoint: Mapping[str, Any]) -> str:
    if not endpoint["disabled"]:
        return "enabled"
    return f"disabled since {endpoint['disabled_at'][:19]}: {endpoint['disabled']}"


@webhooks.command("rm")
@remote_command
def remove_webhook(
    context: CliContext, endpoint: _EndpointArgument, reason: ReasonOption = ASKED
) -> None:
    """Remove an endpoint and the log of its deliveries.

    Example:

    \b
      holdfast webhooks rm ep_01J9ZK
    """
    removed = context.as_operator().delete("/admin/webhooks", endpoint, reason=reason)
    output.report(context, removed, f"{endpoint} ({removed['url']}) is removed")


@webhooks.command("test")
@remote_command
def check_webhook(
    context: CliContext, endpoint: _EndpointArgument, reason: ReasonOption = ASKED
) -> None:
    """Send a test delivery; see how it went with `holdfast webhooks log`.

    Example:

    \b
      holdfast webhooks test ep_01J9ZK
    """
    answer = context.as_operator().post(
        "/admin/webhooks", endpoint, "test", body={"reason": reason}
    )
    output.report(context, answer, f"a test is on its way; see holdfast webhooks log {endpoint}")


@webhooks.command("enable")
@remote_command
def enable_webhook(
    context: CliContext, endpoint: _EndpointArgument, reason: ReasonOption = ASKED
) -> None:
    """Enable an endpoint that an operator or its own answer 410 disabled; what was
    parked is sent, in order.

    Example:

    \b
      holdfast webhooks enable ep_01J9ZK
    """
    enabled = context.as_operator().post(
        "/admin/webhooks", endpoint, "enable", body={"reason": reason}
    )
    output.report(context, enabled, f"{endpoint} is enabled")


@webhooks.command("disable")
@remote_command
def disable_webhook(
    context: CliContext, endpoint: _EndpointArgument, reason: ReasonOption = ASKED
) -> None:
    """Send nothing to an endpoint until it is enabled; its jobs are parked, at most
    100,000 and for 7 days.

    Example:

    \b
      holdfast webhooks disable ep_01J9ZK --reason "their maintenance"
    """
    disabled = context.as_operator().post(
        "/admin/webhooks", endpoint, "disable", body={"reason": reason}
    )
    output.report(context, disabled, f"{endpoint} is disabled")


@webhooks.command("log")
@remote_command
def webhook_log(context: CliContext, endpoint: _EndpointArgument, limit: LimitOption = 20) -> None:
    """Show the last deliveries to an endpoint.

    Example:

    \b
      holdfast webhooks log ep_01J9ZK
    """
    found = context.as_operator().get("/admin/webhooks", endpoint, "deliveries", limit=limit)[
        "deliveries"
    ]
    output.report_rows(
        context, found,
        ("at", "chat", "sequence", "attempt", "status", "seconds", "error"),
        (
            (
                d["at"][:19], d["chat_id"] or "test", d["sequence"], d["attempt"],
                d["status"] or "none", d["seconds"], d["error"][:60],
            )
            for d in found
        ),
        empty="Nothing was delivered yet.",
    )  # fmt: skip
