"""``holdfast alerts``, and the lines about what is wrong in ``holdfast status``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from holdfast.bounds import size_text
from holdfast.cli import output
from holdfast.cli.context import ASKED, CliContext, ReasonOption, group, remote_command
from holdfast.errors import InvalidMessage

alerts = group("What is wrong, and who hears of it.")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
DISK_LEFT_MIN = 0.1
REASONS_SHOWN = 10
TEST_SECONDS_MAX = 120.0
SILENCE_SECONDS_MAX = 30 * _UNITS["d"]
"""As the server has it."""


@alerts.command("ls")
@remote_command
def list_alerts(context: CliContext) -> None:
    """List the alerts that fire or are about to, silences, and how the sinks are.

    Example:

    \b
      holdfast alerts ls
    """
    found = context.as_operator().get("/admin/alerts")
    if context.as_json:
        output.as_json(found)
        return
    rows = (
        (_name(each), each["severity"], _state(each), each["since"], each["means"], each["runbook"])
        for each in found["alerts"]
    )
    columns: tuple[str, ...] = ("alert", "severity", "state", "since", "what", "runbook")
    output.table(columns, rows, empty="No alert fires.")
    if found["silences"]:
        output.line("")
        columns = ("alert", "until", "by", "reason")
        silences = (tuple(each[name] for name in columns) for each in found["silences"])
        output.table(("silenced", *columns[1:]), list(silences), empty="")
    output.line("")
    sinks = (
        (each["name"], each["kind"], each["severity"], each["last"] or "never", _trouble(each))
        for each in found["sinks"]
    )
    columns = ("sink", "kind", "from", "last taken", "trouble")
    output.table(columns, sinks, empty="No sinks: alerts are only here and in `holdfast status`.")


@alerts.command("test")
@remote_command
def check_sinks(
    context: CliContext,
    sinks: Annotated[
        list[str] | None, typer.Argument(help="Which sinks.  [default: all]", show_default=False)
    ] = None,
    reason: ReasonOption = ASKED,
) -> None:
    """Send a test to the sinks; exit code 1 if one does not take it.

    Examples:

    \b
      holdfast alerts test
      holdfast alerts test pager
    """
    body = {"sinks": sinks or [], "reason": reason}
    found = context.as_operator(TEST_SECONDS_MAX).post("/admin/alerts/test", body=body)
    results: dict[str, str] = found["results"]
    rows = ((name, error or "took it") for name, error in results.items())
    output.report_rows(context, results, ("sink", "what"), rows, empty="There are no sinks.")
    if any(results.values()):
        raise typer.Exit(1)


_AlertArgument = Annotated[str, typer.Argument(help="Its name, as `holdfast alerts ls` has it.")]
_AuditedReason = Annotated[str, typer.Option("--reason", help="Why; it goes into the audit log.")]


@alerts.command("silence")
@remote_command
def silence_alert(
    context: CliContext,
    alert: _AlertArgument,
    duration: Annotated[str, typer.Option("--for", help="How long: 30m, 2h, 1d.")],
    reason: _AuditedReason,
) -> None:
    """Let no node report an alert for a while, at most 30 days. It stays visible.

    Example:

    \b
      holdfast alerts silence HoldfastJobsOld --for 2h --reason "import is running"
    """
    body = {"alert": alert, "seconds": seconds_of(duration), "reason": reason}
    made = context.as_operator().post("/admin/alerts/silence", body=body)
    output.report(context, made, f"{alert} is not reported until {made['until']}")


@alerts.command("unsilence")
@remote_command
def end_silence(context: CliContext, alert: _AlertArgument, reason: _AuditedReason) -> None:
    """End a silence before its time.

    Example:

    \b
      holdfast alerts unsilence HoldfastJobsOld --reason "import is done"
    """
    body = {"alert": alert, "reason": reason}
    ended = context.as_operator().post("/admin/alerts/unsilence", body=body)
    output.report(context, ended, f"{alert} is reported again")


def seconds_of(text: str) -> int:
    """The seconds of 90s, 30m, 2h or 1d; InvalidMessage for anything else."""
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if (match and not seconds) or re.fullmatch(r"0|-[0-9]+[smhd]?", text):
        raise InvalidMessage(
            f"--for must be longer than nothing, as in 30m, not {text};"
            " `holdfast alerts unsilence` ends a silence"
        )
    if match is None:
        raise InvalidMessage(f"--for is a number with s, m, h or d, as in 30m, not {text!r}")
    if seconds > SILENCE_SECONDS_MAX:
        raise InvalidMessage(f"--for is at most 30d, not {text}")
    return seconds


def problem_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a server, the worst first; nothing if all is well."""
    for alert in status.get("alerts", ()):
        silenced = f", silenced until {alert['silenced_until']}" if alert["silenced_until"] else ""
        cause = alert.get("explained_by", "")
        under, follows = ("  ", f", which follows from {cause}") if cause else ("", "")
        yield (
            f"{under}{alert['severity']} {_name(alert)}{follows}: {alert['means']} Since"
            f" {alert['since']}{silenced}. Open {alert['runbook']}"
        )
    for alert in status.get("pending", ()):
        yield f"pending {_name(alert)}: {alert['means']} Open {alert['runbook']}"
    if unknown := status.get("unknown"):
        yield f"unknown, because the store did not say in time: {', '.join(unknown)}"
    halted = status.get("halted_chats") or {"count": 0, "chats": []}
    if halted["count"]:
        shown = ", ".join(f"{chat['chat_id']} ({chat['why']})" for chat in halted["chats"][:3])
        yield f"{halted['count']} halted chats: {shown}; `holdfast chat ls --halted` lists them"
    for kind, counts in status.get("dead_by_reason", {}).items():
        if counts:
            reasons = ", ".join(_reasons(counts))
            yield f"dead letters of {kind}: {reasons}; `holdfast dead ls --of {kind}` lists them"
    disk = status.get("disk") or {"bytes": 0, "free_bytes": 0}
    if disk["bytes"] and disk["free_bytes"] < DISK_LEFT_MIN * disk["bytes"]:
        left, size = size_text(disk["free_bytes"]), size_text(disk["bytes"])
        yield f"disk: {left} of {size} are left"


def _reasons(counts: Mapping[str, int]) -> Iterator[str]:
    """The most frequent first; those beyond ``REASONS_SHOWN`` as one number."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    for reason, count in ordered[:REASONS_SHOWN]:
        yield f"{count} {reason}"
    if others := sum(count for _, count in ordered[REASONS_SHOWN:]):
        yield f"{others} of other reasons"


def _name(alert: Mapping[str, Any]) -> str:
    labels = ", ".join(f"{name}={value}" for name, value in alert["labels"].items())
    return f"{alert['name']} ({labels})" if labels else str(alert["name"])


def _trouble(sink: Mapping[str, Any]) -> str:
    if not sink["failures"]:
        return str(sink["error"])  # of a test
    return (
        f"failed {sink['failures']} in a row, again at {sink['next_try']},"
        f" alerts that wait: {sink['waiting']}: {sink['error']}"
    )


def _state(alert: Mapping[str, Any]) -> str:
    silenced = ", silenced" if alert["silenced_until"] else ""
    cause = alert.get("explained_by", "")
    return f"{alert['state']}{silenced}" + (f", follows from {cause}" if cause else "")


def show_objectives(context: CliContext) -> None:
    """The objectives over the last hour; exit code 1 if one is not met."""
    found = context.as_operator().get("/admin/objectives")
    measured = found["objectives"]
    rows = (
        (o["name"], _amount(o), o["target"], _MET[o["met"]], round(o["seconds"] / 60), o["means"])
        for o in measured
    )
    if context.as_json:
        output.as_json(found)
    else:
        output.table(
            ("objective", "value", "target", "met", "minutes", "what"), rows, empty="None."
        )
    if any(objective["met"] is False for objective in measured):
        raise typer.Exit(1)


_MET = {True: "yes", False: "NO", None: "–"}


def _amount(objective: dict[str, Any]) -> str:
    value = objective["value"]
    if value is None:
        return "–"
    return {"share": f"{value:.4%}", "seconds": f"{value:.3f} s"}.get(
        objective["unit"], f"{value:g}"
    )
