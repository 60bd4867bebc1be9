"""``holdfast audit``: what operators did, and whether the log is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.context import CliContext, group, remote_command
from holdfast.errors import StateCorrupted

if TYPE_CHECKING:
    from holdfast.cli.rest import RestClient
    from holdfast.store.contract import AuditRecord

audit = group("What operators did.")

PAGE_RECORDS = 500


@audit.command("ls")
@remote_command
def list_audit(
    context: CliContext,
    after: Annotated[int, typer.Option(min=0, help="Only those behind this number.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=PAGE_RECORDS, help="How many at most.")] = 100,
) -> None:
    """List who did what, when and why, oldest first.

    Example:

    \b
      holdfast audit ls --after 100
    """
    found = context.as_operator().get("/admin/audit", after=after, limit=limit)["records"]
    columns = ("number", "at", "actor", "action", "target", "reason")
    rows = (tuple(record[column] for column in columns) for record in found)
    output.report_rows(context, found, columns, rows, empty="No records.")


@audit.command("check")
@remote_command
def check_audit(
    context: CliContext,
    seen: Annotated[
        list[str] | None,
        typer.Option(
            "--seen", help="A hash that an earlier check printed, or its beginning; repeatable."
        ),
    ] = None,
) -> None:
    """Read the whole audit log and follow the hash chain of each node; exit code 1 if a
    record was changed, removed or added.

    Somebody who can write the database can make a chain again from some record on. So
    keep the printed hashes elsewhere, and name them with --seen the next time.

    Examples:

    \b
      holdfast audit check
      holdfast audit check --seen 9f86d081884c7d659a2feaa0c55ad015
    """
    records, last = follow(_pages(context.as_operator()), seen or ())
    found = {"records": records, "last": last}
    shown = {"records": f"{records:,}, and no chain is broken"}
    output.report_object(
        context, found, shown | {f"last of {node or 'no node'}": last[node] for node in last}
    )


def follow(
    pages: Iterable[Sequence[AuditRecord]], seen: Sequence[str]
) -> tuple[int, Mapping[str, str]]:
    """How many records there are, and each node's last hash. StateCorrupted names the
    first record that breaks a chain, or a hash of ``seen`` that is gone.
    """
    from holdfast.store.audit_chain import AuditChains

    chains, records = AuditChains(), 0
    for page in pages:
        if (broken := chains.first_break(page)) is not None:
            raise StateCorrupted(
                f"record {broken.number} of the audit log ({broken.action} of {broken.target})"
                f" does not continue the chain of {broken.node or 'no node'}: it or the one before"
                " it was changed, removed or added"
            )
        records += len(page)
    gone = [each for each in seen if not any(known.startswith(each) for known in chains.hashes)]
    if gone:
        raise StateCorrupted(
            f"no record of the audit log has the hash {gone[0]}: records were removed or replaced"
        )
    return records, chains.last


def _pages(rest: RestClient) -> Iterator[Sequence[AuditRecord]]:
    import msgspec

    from holdfast.store.contract import AuditPage

    after: str | None = None
    while True:
        found: Any = rest.get("/admin/audit", after=after, limit=PAGE_RECORDS)
        page = msgspec.convert(found, AuditPage)
        yield page.records
        if (after := page.next) is None:
            return
