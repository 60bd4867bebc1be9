"""``conformance``: check how a client, in any language, survives failures."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from holdfast.cli import output
from holdfast.cli.context import CliContext, local_command
from holdfast.errors import BadSetting, InvalidMessage

if TYPE_CHECKING:
    from holdfast.verify.conformance.scenarios import Scenario
    from holdfast.verify.conformance.suite import Result


@local_command
def conformance(
    context: CliContext,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND…]", help="The program that drives your client."),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run only this one; may be given several times."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the scenarios and run none.")] = False,
    patience_seconds: Annotated[
        float,
        typer.Option(
            "--patience", min=1, max=600, help="How long to wait for what a client must do."
        ),
    ] = 30,
) -> None:
    """See whether a client of yours survives every failure that the protocol allows;
    exit code 0 only if it does.

    Your program drives the client under test: it reads commands from its standard input
    and writes events to its standard output, one JSON object a line. The suite is the
    server, on a loopback port of its own; each scenario starts the program again, with
    an empty state file. docs/guides/client-conformance.md has the lines and the
    scenarios; examples/conformance has the program of the Python client.

    Examples:

    \b
      holdfast conformance -- python examples/conformance/python_client.py
      holdfast conformance --scenario gap --scenario reset -- node my_client_driver.js
      holdfast conformance --list
    """
    from holdfast.verify.conformance.suite import run_suite

    chosen = _chosen(scenario)
    if list_:
        found = [{"scenario": name, "what": text} for name, text in chosen.items()]
        output.report_rows(context, found, ("scenario", "what"), chosen.items(), empty="")
        return
    if not command:
        raise InvalidMessage(
            "name the program that drives your client: holdfast conformance -- node driver.js"
        )
    if shutil.which(command[0]) is None:
        raise BadSetting(
            f"there is no program {command[0]!r} to start: check the path and that it is executable"
        )
    on_result = _ignore if context.as_json else _print_result
    results = asyncio.run(run_suite(command, _scenarios(chosen), patience_seconds, on_result))
    failed = [result.scenario for result in results if not result.passed]
    if context.as_json:
        output.as_json({"conforms": not failed, "scenarios": msgspec.to_builtins(results)})
    else:
        output.line(f"\n{len(results) - len(failed)} of {len(results)} scenarios passed")
    if failed:
        raise typer.Exit(1)


def _print_result(result: Result) -> None:
    state = "ok    " if result.passed else "FAILED"
    output.line(f"{state} {result.scenario}  ({result.seconds:.1f} s)")
    for text in (result.why, *result.log):
        if text:
            output.line(f"         {text}")


def _ignore(result: Result) -> None:
    pass


def _chosen(names: Sequence[str] | None) -> dict[str, str]:
    """The scenarios by name, with what they check; all of them if none is named."""
    from holdfast.verify.conformance.suite import SCENARIOS, name_of

    known = {name_of(each): each.__doc__ or "" for each in SCENARIOS}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise InvalidMessage(
            f"there is no scenario {', '.join(unknown)}; holdfast conformance --list names them all"
        )
    return {name: known[name] for name in names or known}


def _scenarios(chosen: dict[str, str]) -> list[Scenario]:
    from holdfast.verify.conformance.suite import SCENARIOS, name_of

    return [each for each in SCENARIOS if name_of(each) in chosen]
