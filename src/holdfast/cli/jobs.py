"""``holdfast jobs``: what waits, why, and the acts that repair it; ``holdfast webhooks``: where messages are sent."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli import show
from holdfast.cli.reach import Reach, reaching
from holdfast.errors import InvalidMessage

jobs = typer.Typer(no_args_is_help=True, help="Jobs that wait, failed or died.", rich_markup_mode=None)
webhooks = typer.Typer(no_args_is_help=True, help="Where a tenant's messages are sent.", rich_markup_mode=None)

ReasonOption = Annotated[str, typer.Option("--reason", help="Why; it is recorded with the act.")]
LimitOption = Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")]
TypeOption = Annotated[str | None, typer.Option("--type", help="Only this job type.")]
StreamOption = Annotated[str | None, typer.Option("--stream", help="Only this stream.")]
FailedOption = Annotated[str | None, typer.Option("--failed-with", help="Only this failure reason, e.g. throttled.")]
Seqs = Annotated[list[int], typer.Argument(metavar="JOB...", help="Jobs by their numbers.")]
Endpoint = Annotated[str, typer.Argument(metavar="ENDPOINT", help="An endpoint's id (ep_…).")]
ASKED = "asked for on the command line"
COLUMNS = ("job", "type", "stream", "state", "attempt", "reason", "due", "error")


def _rows(found: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (
            j["seq"],
            j["type"],
            j["stream"] or "–",
            j["state"],
            j["attempt"],
            j["reason"] or "–",
            (j["due_at"] or j["dead_at"] or "–")[:19],
            (j["error"] or "")[:60],
        )
        for j in found
    ]


@jobs.command("ls")
@reaching
def list_jobs(
    reach: Reach,
    state: Annotated[str | None, typer.Option(help="ready, retry, held or parked.")] = None,
    type: TypeOption = None,
    stream: StreamOption = None,
    failed_with: FailedOption = None,
    limit: LimitOption = 100,
) -> None:
    """List jobs that are not done.

    Examples:

    \b
      holdfast jobs ls --state retry
      holdfast jobs ls --stream order-17
    """
    query = {"state": state, "type": type, "stream": stream, "reason": failed_with, "limit": limit}
    found = reach.as_operator().get("/admin/jobs", **query)["jobs"]
    if reach.as_json:
        show.as_json(found)
    else:
        show.table(COLUMNS, _rows(found), empty="No such jobs.")


@jobs.command("show")
@reaching
def show_job(reach: Reach, job: Annotated[int, typer.Argument(help="A job's number.")]) -> None:
    """Show one job or dead letter with its payload and the trace of its last failure.

    Example:

    \b
      holdfast jobs show 4711
    """
    found = reach.as_operator().get("/admin/jobs", str(job))
    if reach.as_json:
        show.as_json(found)
    else:
        show.fields({name.replace("_", " "): value for name, value in found.items() if value not in (None, "")})


@jobs.command("stats")
@reaching
def job_stats(reach: Reach) -> None:
    """Count jobs by state, reason and attempt; exit code 1 if there are poison candidates.

    Example:

    \b
      holdfast jobs stats
    """
    found = reach.as_operator().get("/admin/jobs/stats")
    if reach.as_json:
        show.as_json(found)
    else:
        flat = {name: _flat(value) for name, value in found.items()}
        show.fields({name.replace("_", " "): value for name, value in flat.items()})
    if found["poison_candidates"]:
        raise typer.Exit(1)


def _flat(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {count}" for name, count in value.items()) or "none"
    return "–" if value is None else value


@jobs.command("streams")
@reaching
def blocked_streams(reach: Reach, limit: LimitOption = 100) -> None:
    """List blocked streams: who blocks them, why, and how many wait.

    Example:

    \b
      holdfast jobs streams
    """
    found = reach.as_operator().get("/admin/jobs/streams", limit=limit)["streams"]
    if reach.as_json:
        show.as_json(found)
        return
    show.table(
        ("stream", "head", "type", "attempt", "waiting", "reason", "due", "since", "error"),
        (
            (
                s["stream"], s["head"], s["head_type"], s["head_attempt"], s["waiting"],
                s["head_reason"] or s["policy"], (s["head_due_at"] or "–")[:19], s["since"][:19], s["head_error"][:50],
            )
            for s in found
        ),
        empty="No stream is blocked.",
    )  # fmt: skip


@jobs.command("breakers")
@reaching
def open_breakers(reach: Reach) -> None:
    """List job types whose breaker is open.

    Example:

    \b
      holdfast jobs breakers
    """
    found = reach.as_operator().get("/admin/jobs/breakers")["breakers"]
    if reach.as_json:
        show.as_json(found)
    else:
        rows = ((b["type"], b["open_until"][:19], b["by"]) for b in found)
        show.table(("type", "open until", "by"), rows, empty="No breaker is open.")


@jobs.command("retry")
@reaching
def retry_jobs(
    reach: Reach,
    seqs: Seqs,
    now: Annotated[bool, typer.Option("--now", help="Due now; there is no other time.", hidden=True)] = True,
    reset: Annotated[bool, typer.Option("--reset", help="Also forget attempts, strikes and crashes.")] = False,
    reason: ReasonOption = ASKED,
) -> None:
    """Run waiting or parked jobs now.

    Examples:

    \b
      holdfast jobs retry 4711 --now
      holdfast jobs retry 4711 --now --reset --reason "the carrier is back"
    """
    _act(reach, "retry", {"seqs": seqs, "reset": reset, "reason": reason}, "due now")


@jobs.command("release")
@reaching
def release_jobs(
    reach: Reach,
    stream: Annotated[str, typer.Argument(help="A blocked stream.")],
    seqs: Annotated[list[int] | None, typer.Option("--job", help="Let this job pass; repeatable.")] = None,
    type: Annotated[str, typer.Option("--type", help="Let jobs of this type pass, later ones too.")] = "",
    through: Annotated[int, typer.Option(min=0, help="Let everything up to this job pass.")] = 0,
    reason: ReasonOption = ASKED,
) -> None:
    """Let jobs pass their stream's failed head; the head keeps its own retry.

    Examples:

    \b
      holdfast jobs release order-17 --job 4712 --job 4713
      holdfast jobs release order-17 --type SendMail --reason "mails are independent"
    """
    if not (seqs or type or through):
        raise InvalidMessage("say what may pass: --job, --type or --through")
    body = {"stream": stream, "seqs": seqs or [], "type": type, "through": through, "reason": reason}
    _act(reach, "release", body, "blocks opened for them")


@jobs.command("park")
@reaching
def park_jobs(reach: Reach, seqs: Seqs, reason: ReasonOption = ASKED) -> None:
    """Stop jobs, and the streams behind them, until somebody acts.

    Example:

    \b
      holdfast jobs park 4711 --reason "look at it tomorrow"
    """
    _act(reach, "park", {"seqs": seqs, "reason": reason}, "parked")


@jobs.command("bury")
@reaching
def bury_jobs(reach: Reach, seqs: Seqs, reason: ReasonOption = ASKED) -> None:
    """Move jobs to the dead letters and let their streams go on.

    Example:

    \b
      holdfast jobs bury 4711 --reason "will never succeed"
    """
    _act(reach, "bury", {"seqs": seqs, "reason": reason}, "moved to the dead letters")


@jobs.command("dead")
@reaching
def list_dead(
    reach: Reach,
    type: TypeOption = None,
    stream: StreamOption = None,
    failed_with: FailedOption = None,
    limit: LimitOption = 100,
) -> None:
    """List dead letters, newest first.

    Example:

    \b
      holdfast jobs dead --type SendMail
    """
    query = {"type": type, "stream": stream, "reason": failed_with, "limit": limit}
    found = reach.as_operator().get("/admin/jobs/dead", **query)["jobs"]
    if reach.as_json:
        show.as_json(found)
    else:
        show.table(COLUMNS, _rows(found), empty="No dead letters.")


@jobs.command("replay")
@reaching
def replay_jobs(
    reach: Reach,
    seqs: Annotated[list[int] | None, typer.Argument(metavar="[JOB...]", help="Only these.")] = None,
    type: TypeOption = None,
    stream: StreamOption = None,
    failed_with: FailedOption = None,
    rate: Annotated[int, typer.Option(min=1, max=1000, help="At most so many a second.")] = 100,
    reason: ReasonOption = ASKED,
) -> None:
    """Enqueue dead letters again, oldest first, in the order of their streams.

    Examples:

    \b
      holdfast jobs replay 4711
      holdfast jobs replay --type SendMail --rate 50 --reason "the relay is back"
    """
    from holdfast.clock import SystemClock

    rest, clock, total = reach.as_operator(), SystemClock(), 0
    body = {"seqs": seqs or [], "type": type, "stream": stream, "failed_with": failed_with, "reason": reason}
    given = {name: value for name, value in body.items() if value}
    while True:
        started = clock.monotonic()
        waiting = bool(rest.get("/admin/jobs/dead", **_asked(type, stream, failed_with))["jobs"])
        if total and (seqs or not waiting):
            break
        total += rest.post("/admin/jobs/replay", body={**given, "limit": min(rate, 1000)})["count"]
        _rest_of_the_second(started, clock.monotonic())
    if reach.as_json:
        show.as_json({"count": total})
    else:
        show.line(f"{total} enqueued again")


def _asked(type: str | None, stream: str | None, failed_with: str | None) -> dict[str, Any]:
    return {"type": type, "stream": stream, "reason": failed_with, "limit": 1}


def _rest_of_the_second(started: float, now: float) -> None:
    import time

    time.sleep(max(0.0, 1.0 - (now - started)))


def _act(reach: Reach, verb: str, body: dict[str, Any], done: str) -> None:
    answer = reach.as_operator().post(f"/admin/jobs/{verb}", body=body)
    if reach.as_json:
        show.as_json(answer)
    else:
        show.line(f"{answer['count']} {done}")


@webhooks.command("add")
@reaching
def add_webhook(
    reach: Reach,
    address: Annotated[str, typer.Argument(metavar="URL", help="Where to; https, on a public address.")],
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
    made = reach.as_operator().post("/admin/webhooks", body=body)
    if reach.as_json:
        show.as_json(made)
    else:
        show.line(made["secret"])
        typer.echo(f"{made['endpoint_id']}: keep the line above; it cannot be shown again", err=True)


@webhooks.command("ls")
@reaching
def list_webhooks(reach: Reach) -> None:
    """List the endpoints.

    Example:

    \b
      holdfast webhooks ls
    """
    found = reach.as_operator().get("/admin/webhooks")["endpoints"]
    if reach.as_json:
        show.as_json(found)
    else:
        rows = ((e["endpoint_id"], e["tenant"], e["url"], e["disabled"] or "enabled", e["description"]) for e in found)
        show.table(("endpoint", "tenant", "url", "state", "for"), rows, empty="No endpoints.")


@webhooks.command("rm")
@reaching
def remove_webhook(reach: Reach, endpoint: Endpoint, reason: ReasonOption = ASKED) -> None:
    """Remove an endpoint and the log of its deliveries.

    Example:

    \b
      holdfast webhooks rm ep_01J9ZK
    """
    removed = reach.as_operator().delete("/admin/webhooks", endpoint, reason=reason)
    if reach.as_json:
        show.as_json(removed)
    else:
        show.line(f"{endpoint} ({removed['url']}) is removed")


@webhooks.command("test")
@reaching
def check_webhook(reach: Reach, endpoint: Endpoint, reason: ReasonOption = ASKED) -> None:
    """Send a test delivery; see how it went with `holdfast webhooks log`.

    Example:

    \b
      holdfast webhooks test ep_01J9ZK
    """
    reach.as_operator().post("/admin/webhooks", endpoint, "test", body={"reason": reason})
    show.line(f"a test is on its way; see holdfast webhooks log {endpoint}")


@webhooks.command("enable")
@reaching
def enable_webhook(reach: Reach, endpoint: Endpoint, reason: ReasonOption = ASKED) -> None:
    """Enable an endpoint that was disabled because it answered 410.

    Example:

    \b
      holdfast webhooks enable ep_01J9ZK
    """
    reach.as_operator().post("/admin/webhooks", endpoint, "enable", body={"reason": reason})
    show.line(f"{endpoint} is enabled")


@webhooks.command("log")
@reaching
def webhook_log(reach: Reach, endpoint: Endpoint, limit: LimitOption = 20) -> None:
    """Show the last deliveries to an endpoint.

    Example:

    \b
      holdfast webhooks log ep_01J9ZK
    """
    found = reach.as_operator().get("/admin/webhooks", endpoint, "deliveries", limit=limit)["deliveries"]
    if reach.as_json:
        show.as_json(found)
        return
    show.table(
        ("at", "chat", "sequence", "attempt", "status", "seconds", "error"),
        (
            (
                d["at"][:19], d["chat_id"] or "test", d["sequence"], d["attempt"], d["status"] or "none", d["seconds"],
                d["error"][:60],
            )
            for d in found
        ),
        empty="Nothing was delivered yet.",
    )  # fmt: skip
