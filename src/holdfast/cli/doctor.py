"""``holdfast doctor``: grades a deployment."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from holdfast.cli import output
from holdfast.cli.context import CliContext, remote_command, settings_of
from holdfast.cli.rest import RestClient
from holdfast.errors import HoldfastError

PATIENCE_SECONDS = 10.0


@remote_command
def doctor(context: CliContext) -> None:
    """Grade the deployment on the server's own machine, and say what to change.

    It looks at the running server and the sinks of its alerts, the state directory,
    disk and fsync, open files, the clock, proxy and TLS, tokens, keys, backups and
    engines, and changes nothing. Give it the settings file of the server. Exit code 0
    if all is good, 10 if something deserves a look, 20 if something is bad.

    Examples:

    \b
      holdfast doctor
      holdfast doctor -c /etc/holdfast.toml --state-dir /var/lib/holdfast
    """
    from holdfast.node.doctor import Deployment, grade

    settings = settings_of(context.config)
    status, trouble = _status(context)
    now, sinks = time.time(), None if trouble else _sinks(context)
    deployment = Deployment(settings, context.state_path, status, now, trouble, sinks)
    findings = grade(deployment)
    found = [
        {**each._asdict(), "grade": each.grade.name}
        for each in sorted(findings, key=lambda each: -each.grade)
    ]
    rows = ((each["grade"], each["check"], each["what"], each["advice"]) for each in found)
    output.report_rows(context, found, ("grade", "check", "what", "advice"), rows, empty="")
    worst = max(each.grade for each in findings)
    if worst:
        raise typer.Exit(int(worst))


def _status(context: CliContext) -> tuple[Mapping[str, Any] | None, str]:
    """The status, and what is in the way of it: without a key only the readiness is
    seen.
    """
    try:
        return context.as_operator(PATIENCE_SECONDS).get("/admin/status"), ""
    except HoldfastError as error:
        trouble = error.message
    try:
        RestClient(context.address, "", PATIENCE_SECONDS).get("/health/ready")
    except HoldfastError as error:
        return None, error.message
    return {"ready": True}, trouble


def _sinks(context: CliContext) -> Sequence[Mapping[str, str]] | None:
    """Where the server reports alerts; None if it does not say."""
    try:
        found: Sequence[Mapping[str, str]]
        found = context.as_operator(PATIENCE_SECONDS).get("/admin/alerts")["sinks"]
    except HoldfastError:
        return None
    return found
