"""``holdfast jobs``: which jobs wait or died, why, and the acts that repair them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.context import ASKED, CliContext, ReasonOption, group, remote_command
from holdfast.cli.rest import RestClient
from holdfast.errors import InvalidMessage, NotFound

jobs = group("Jobs that wait, failed or died.")

LimitOption = Annotated[int, typer.Option(min=1, max=1000, help="The most to show.")]
TypeOption = Annotated[str | None, typer.Option("--type", help="Only this job type.")]
StreamOption = Annotated[str | None, typer.Option("--stream", help="Only this stream.")]
FailedOption = Annotated[
    str | None, typer.Option("--failed-with", help="Only this failure reason, e.g. throttled.")
]
DISCARDED_PER_SECOND = 1000
_OnProgress = Callable[[int, int | None], None]
"""Called after each step with the number of jobs done, and the total if known."""
SeqsArgument = Annotated[list[int], typer.Argument(metavar="JOB...", help="Jobs by their numbers.")]


def report_jobs(context: CliContext, path: str, asked: dict[str, Any], *, empty: str) -> None:
    """List the jobs or dead letters at ``path``."""
    found = context.as_operator().get(path, **asked)["jobs"]
    columns = ("job", "type", "stream", "state", "attempt", "reason", "due", "error")
    output.report_rows(context, found, columns, (_row(job) for job in found), empty=empty)


def _row(job: dict[str, Any]) -> tuple[Any, ...]:
    due = (job["due_at"] or job["dead_at"] or "–")[:19]
    reasons = " > ".join(job["reasons"]) or job["reason"] or ("buried" if job["dead_at"] else "–")
    named = (job["seq"], job["type"], job["stream"] or "–", job["state"], job["attempt"], reasons)
    return (*named, due, (job["error"] or "")[:60])


@jobs.command("ls")
@remote_command
def list_jobs(
    context: CliContext,
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
    asked = {"state": state, "type": type, "stream": stream, "reason": failed_with, "limit": limit}
    report_jobs(context, "/admin/jobs", asked, empty="No such jobs.")


@jobs.command("show")
@remote_command
def show_job(
    context: CliContext, job: Annotated[int, typer.Argument(help="A job's number.")]
) -> None:
    """Show one job or dead letter with its payload and the trace of its last failure.

    Example:

    \b
      holdfast jobs show 4711
    """
    found = context.as_operator().get("/admin/jobs", str(job))
    output.report_object(
        context, found, {name: value for name, value in found.items() if value not in (None, "")}
    )


@jobs.command("stats")
@remote_command
def job_stats(context: CliContext) -> None:
    """Count jobs by state, reason and attempt; exit code 1 if there are poison
    candidates.

    Example:

    \b
      holdfast jobs stats
    """
    found = context.as_operator().get("/admin/jobs/stats")
    output.report_object(context, found)
    if found["poison_candidates"]:
        raise typer.Exit(1)


@jobs.command("streams")
@remote_command
def blocked_streams(context: CliContext, limit: LimitOption = 100) -> None:
    """List blocked streams: who blocks them, why, and how many wait.

    Example:

    \b
      holdfast jobs streams
    """
    found = context.as_operator().get("/admin/jobs/streams", limit=limit)["streams"]
    output.report_rows(
        context, found,
        ("stream", "head", "type", "attempt", "waiting", "reason", "due", "since", "error"),
        (
            (
                s["stream"], s["head"], s["head_type"], s["head_attempt"], s["waiting"],
                s["head_reason"] or s["policy"], (s["head_due_at"] or "–")[:19],
                s["since"][:19], s["head_error"][:50],
            )
            for s in found
        ),
        empty="No stream is blocked.",
    )  # fmt: skip


@jobs.command("breakers")
@remote_command
def open_breakers(context: CliContext) -> None:
    """List job types whose breaker is open.

    Example:

    \b
      holdfast jobs breakers
    """
    found = context.as_operator().get("/admin/jobs/breakers")["breakers"]
    rows = ((b["type"], b["open_until"][:19], b["by"]) for b in found)
    output.report_rows(
        context, found, ("type", "open until", "by"), rows, empty="No breaker is open."
    )


@jobs.command("acts")
@remote_command
def list_acts(
    context: CliContext,
    before: Annotated[
        int | None, typer.Option(min=1, help="Those before this number: the next page.")
    ] = None,
    limit: LimitOption = 100,
) -> None:
    """List what operators did to jobs, newest first: who, what, why and to how many.

    Examples:

    \b
      holdfast jobs acts
      holdfast jobs acts --before 4711 --limit 20 --json
    """
    _show_acts(context, context.as_operator().get("/admin/jobs/acts", limit=limit, before=before))


def _show_acts(context: CliContext, found: dict[str, Any]) -> None:
    if context.as_json:
        output.as_json(found)
        return
    columns = ("act", "at", "who", "what", "jobs", "target", "why")
    rows = (
        (a["number"], a["at"][:19], a["by"], a["verb"], a["count"], a["target"], a["why"])
        for a in found["acts"]
    )
    output.table(columns, rows, empty="No acts.")
    if found["next_before"] is not None:
        output.line(f"… more: --before {found['next_before']}")


@jobs.command("retry")
@remote_command
def retry_jobs(
    context: CliContext,
    seqs: SeqsArgument,
    now: Annotated[bool, typer.Option("--now", help="At once, which is also the default.")] = False,
    reset: Annotated[
        bool, typer.Option("--reset", help="Also forget attempts, strikes and crashes.")
    ] = False,
    reason: ReasonOption = ASKED,
) -> None:
    """Run waiting or parked jobs now.

    Examples:

    \b
      holdfast jobs retry 4711 --now
      holdfast jobs retry 4711 --now --reset --reason "the carrier is back"
    """
    _act(context, "retry", {"seqs": seqs, "reset": reset, "reason": reason}, "due now")


@jobs.command("release")
@remote_command
def release_jobs(
    context: CliContext,
    stream: Annotated[str, typer.Argument(help="A blocked stream.")],
    seqs: Annotated[
        list[int] | None, typer.Option("--job", help="Let this job pass; repeatable.")
    ] = None,
    type: Annotated[
        str, typer.Option("--type", help="Let jobs of this type pass, later ones too.")
    ] = "",
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
    body = {
        "stream": stream,
        "seqs": seqs or [],
        "type": type,
        "through": through,
        "reason": reason,
    }
    _act(context, "release", body, "blocks opened for them")


@jobs.command("park")
@remote_command
def park_jobs(context: CliContext, seqs: SeqsArgument, reason: ReasonOption = ASKED) -> None:
    """Stop jobs, and the streams behind them, until somebody acts.

    Example:

    \b
      holdfast jobs park 4711 --reason "look at it tomorrow"
    """
    _act(context, "park", {"seqs": seqs, "reason": reason}, "parked")


@jobs.command("bury")
@remote_command
def bury_jobs(context: CliContext, seqs: SeqsArgument, reason: ReasonOption = ASKED) -> None:
    """Move jobs to the dead letters and let their streams go on.

    Example:

    \b
      holdfast jobs bury 4711 --reason "will never succeed"
    """
    _act(context, "bury", {"seqs": seqs, "reason": reason}, "moved to the dead letters")


@jobs.command("dead")
@remote_command
def list_dead(
    context: CliContext,
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
    asked = {"type": type, "stream": stream, "reason": failed_with, "limit": limit}
    report_jobs(context, "/admin/jobs/dead", asked, empty="No dead letters.")


@jobs.command("replay")
@remote_command
def replay_jobs(
    context: CliContext,
    seqs: Annotated[
        list[int] | None, typer.Argument(metavar="[JOB...]", help="Only these.")
    ] = None,
    type: TypeOption = None,
    stream: StreamOption = None,
    failed_with: FailedOption = None,
    rate: Annotated[int, typer.Option(min=1, max=1000, help="The most per second.")] = 100,
    reason: ReasonOption = ASKED,
) -> None:
    """Enqueue dead letters again, oldest first, in the order of their streams; exit
    code 1 if one named is gone.

    Examples:

    \b
      holdfast jobs replay 4711
      holdfast jobs replay --type SendMail --rate 50 --reason "the relay is back"
    """
    body = {"reason": reason, **_chosen(type, stream, failed_with)}
    move_dead(context, "replay", body, seqs, rate, "enqueued again")


@jobs.command("discard")
@remote_command
def discard_jobs(
    context: CliContext,
    seqs: Annotated[
        list[int] | None, typer.Argument(metavar="[JOB...]", help="Only these.")
    ] = None,
    type: TypeOption = None,
    stream: StreamOption = None,
    failed_with: FailedOption = None,
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: ReasonOption = ASKED,
) -> None:
    """Forget dead letters for good, oldest first.

    Examples:

    \b
      holdfast jobs discard 4711
      holdfast jobs discard --type SendMail --yes --reason "customers were called"
    """
    chosen = _chosen(type, stream, failed_with)
    if not (seqs or chosen):
        raise InvalidMessage("say which: jobs by their numbers, --type, --stream or --failed-with")
    if not sure:
        which = " ".join(map(str, seqs or chosen.values()))
        typer.confirm(
            f"Forget the dead letters of {which}? Only a backup brings them back",
            abort=True,
            err=True,
        )
    move_dead(
        context, "discard", {"reason": reason, **chosen}, seqs, DISCARDED_PER_SECOND, "forgotten"
    )


def _chosen(type: str | None, stream: str | None, failed_with: str | None) -> dict[str, Any]:
    asked = {"type": type, "stream": stream, "failed_with": failed_with}
    return {name: value for name, value in asked.items() if value}


def move_dead(
    context: CliContext,
    verb: str,
    body: dict[str, Any],
    seqs: list[int] | None,
    rate: int,
    done: str,
) -> None:
    """Apply ``verb`` to the named dead letters, or to all that ``body`` selects.

    The exit code is 1 if a named one does not exist.
    """
    rest, missing = context.as_operator(), list[int]()
    with output.progress(context) as moved:

        def on_progress(count: int, in_all: int | None) -> None:
            moved(f"{count:,} {done}", count, in_all)

        if seqs:
            count, missing = _one_by_one(rest, verb, body, seqs, rate, on_progress)
        else:
            count = _in_portions(rest, verb, body, rate, on_progress)
    gone = f"; no such dead letter: {', '.join(map(str, missing))}" if missing else ""
    output.report(context, {"count": count, "missing": missing}, f"{count} {done}{gone}")
    if missing:
        raise typer.Exit(1)


def _in_portions(
    rest: RestClient, verb: str, body: dict[str, Any], rate: int, on_progress: _OnProgress
) -> int:
    """Apply ``verb`` to all selected, ``rate`` a second; return the count."""
    total, dead = 0, rest.get("/admin/jobs/stats")["dead"]
    for limit in _portions(rate, dead):
        if total:
            time.sleep(1.0)
        try:
            total += rest.post(f"/admin/jobs/{verb}", body={**body, "limit": limit})["count"]
        except NotFound:
            if not total:
                raise
            break
        on_progress(total, dead if body.keys() == {"reason"} else None)
    return total


def _one_by_one(
    rest: RestClient,
    verb: str,
    body: dict[str, Any],
    seqs: list[int],
    rate: int,
    on_progress: _OnProgress,
) -> tuple[int, list[int]]:
    """Apply ``verb`` to each, oldest first; return the count and those missing."""
    done, missing, chosen = 0, list[int](), sorted(set(seqs))
    for number, seq in enumerate(chosen):
        if number and number % rate == 0:
            time.sleep(1.0)
        try:
            done += rest.post(f"/admin/jobs/{verb}", body={**body, "seqs": [seq]})["count"]
        except NotFound:
            missing.append(seq)
        on_progress(done, len(chosen))
    return done, missing


def _portions(rate: int, dead: int) -> Iterator[int]:
    """The number for each second; in total no more than are dead now.

    So a job that dies again is not replayed without end.
    """
    yield from (min(rate, dead - start) for start in range(0, dead, rate))
    if not dead:
        yield rate


def _act(context: CliContext, verb: str, body: dict[str, Any], done: str) -> None:
    answer = context.as_operator().post(f"/admin/jobs/{verb}", body=body)
    output.report(context, answer, f"{answer['count']} {done}")
