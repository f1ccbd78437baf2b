"""`tidemill cycle run|plan|status CYCLE --date D`: the daily cycle on this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from tidemill import logs
from tidemill.contracts import layout
from tidemill.errors import TidemillError
from tidemill.lineage import cycle as cycles
from tidemill.lineage.orchestrators.local import LocalCycle, read_records
from tidemill.lineage.overview import deployment_line, server_lines
from tidemill.storage.open import open_storage

app = typer.Typer(help="The daily cycle: train, export, stream, deploy, hand over.", no_args_is_help=True)

CyclePath = Annotated[Path, typer.Argument(metavar="CYCLE", help="The cycle's config (cycle.yaml).")]
Date = Annotated[str, typer.Option("--date", help="Business date, YYYYMMDD.")]


@app.command()
def run(
    path: CyclePath,
    date: Date,
    once: Annotated[bool, typer.Option("--once", help="End when the date is done, instead of keeping its stream running.")] = False,
) -> None:
    """Run what is left of a date, then keep its stream running until Ctrl-C or SIGTERM."""
    logs.set_up()
    with _errors_as_exit_codes(), LocalCycle(cycles.load_cycle(path)) as cycle:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: cycle.request_stop())
        logs.send_events_to(logs.EventLog(cycle.logs / layout.EVENTS))
        result = cycle.run_date(date)
        if result is None:
            typer.echo(f"{date}: stopped on request; run it again to go on")
            return
        retired = f"; {result.predecessor} {'has retired' if result.retired else 'has not retired'}" if result.predecessor else ""
        typer.echo(f"{date}: deployment {result.deployment.number} serves {result.deployment.lineage}{retired}")
        if not once:
            cycle.wait()


@app.command()
def plan(path: CyclePath, date: Date) -> None:
    """Print a date's steps, how they stand, and the commands of those that are left."""
    with _errors_as_exit_codes():
        config = cycles.load_cycle(path)
        records = read_records(open_storage(config.root), date)
        argv = cycles.commands(config, date, records.parent)
        for step in cycles.plan(date, records):
            typer.echo(f"{step.name:<13} {step.state:<8} {step.detail}".rstrip())
            if step.state != "done" and step.name in argv:
                typer.echo(f"{'':13} $ {cycles.shell_line(argv[step.name])}")


@app.command()
def status(path: CyclePath) -> None:
    """Print what is deployed, and what every server says it serves."""
    with _errors_as_exit_codes():
        root = open_storage(cycles.load_cycle(path).root)
        typer.echo(deployment_line(root))
        for line in server_lines(root):
            typer.echo(line)


@contextmanager
def _errors_as_exit_codes() -> Iterator[None]:
    try:
        yield
    except TidemillError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from None
