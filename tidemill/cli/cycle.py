"""`tidemill cycle run|plan|step|render|status CYCLE`: the daily cycle on this machine, or for another scheduler."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tidemill import logs
from tidemill.clock import SystemClock
from tidemill.contracts import layout
from tidemill.errors import ConfigError, TidemillError
from tidemill.lineage import cycle as cycles
from tidemill.lineage.completeness import wait_for_table
from tidemill.lineage.dates import BIZDATE
from tidemill.lineage.eas import read_template, render_service, service_text
from tidemill.lineage.on_record import read_records, standings
from tidemill.lineage.orchestrators import dataworks
from tidemill.lineage.orchestrators.local import LocalCycle
from tidemill.lineage.overview import deployment_line, server_lines
from tidemill.lineage.schedule import actions, due_dates
from tidemill.storage.open import open_storage

app = typer.Typer(help="The daily cycle: train, export, stream, deploy, hand over.", no_args_is_help=True)

CyclePath = Annotated[Path, typer.Argument(metavar="CYCLE", help="The cycle's config (cycle.yaml).")]
Date = Annotated[str, typer.Option("--date", help="Business date, YYYYMMDD.")]


class JobName(StrEnum):
    """The steps that are jobs."""

    TRAIN_DAILY = "train_daily"
    FULL_EXPORT = "full_export"
    TRAIN_STREAM = "train_stream"


class Target(StrEnum):
    """What `render` writes for."""

    DATAWORKS = "dataworks"
    EAS = "eas"


@app.command()
def run(
    path: CyclePath,
    date: Annotated[
        str | None,
        typer.Option("--date", help="Business date, YYYYMMDD; default: each date when the schedule says so.", show_default=False),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End when the date is done, instead of keeping its stream running.")] = False,
) -> None:
    """Run what is left of a date, or every date that is due; keep the stream running until Ctrl-C or SIGTERM."""
    logs.set_up()
    with _errors_as_exit_codes(), LocalCycle(cycles.load_cycle(path)) as cycle:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: cycle.request_stop())
        logs.send_events_to(logs.EventLog(cycle.logs / layout.EVENTS))
        if date is None:
            cycle.run_schedule()
        else:
            _run_date(cycle, date, once)


def _run_date(cycle: LocalCycle, date: str, once: bool) -> None:
    result = cycle.run_date(date)
    if result is None:
        typer.echo(f"{date}: stopped on request; run it again to go on")
        return
    retired = f"; {result.predecessor} {'has retired' if result.retired else 'has not retired'}" if result.predecessor else ""
    typer.echo(f"{date}: deployment {result.deployment.number} serves {result.deployment.lineage}{retired}")
    if not once:
        cycle.wait()


@app.command()
def plan(
    path: CyclePath,
    date: Annotated[
        str | None,
        typer.Option("--date", help="Business date, YYYYMMDD; default: what the schedule makes due now.", show_default=False),
    ] = None,
) -> None:
    """Print a date's steps, how they stand, and the commands of those that are left; or the dates that are due."""
    with _errors_as_exit_codes():
        config = cycles.load_cycle(path)
        root = open_storage(config.root)
        if date is None:
            due = due_dates(config, SystemClock().time())
            left = actions(due, standings(root, due))
            for action in left:
                typer.echo(f"{action.date} {action.kind}")
            if not left:
                typer.echo("nothing is due")
            return
        records = read_records(root, date)
        argv = cycles.commands(config, date, records.parent)
        for step in cycles.plan(date, records):
            typer.echo(f"{step.name:<13} {step.state:<8} {step.detail}".rstrip())
            if step.state != "done" and step.name in argv:
                typer.echo(f"{'':13} $ {cycles.shell_line(argv[step.name])}")


@app.command()
def step(
    path: CyclePath,
    date: Date,
    name: Annotated[JobName, typer.Option("--step", help="The job to run.", show_default=False)],
) -> None:
    """Become one job of a date, for a scheduler of your own; does nothing if it is done, refuses what must wait."""
    with _errors_as_exit_codes():
        config = cycles.load_cycle(path)
        records = read_records(open_storage(config.root), date)
        wanted = cycles.StepName(name.value)
        if not cycles.must_run(wanted, date, records):
            typer.echo(f"{date}: {wanted} is done already")
            return
        if wanted is cycles.StepName.TRAIN_DAILY:
            wait_for_table(config.daily, date, _pause, SystemClock())
        argv = cycles.commands(config, date, records.parent)[wanted]
        typer.echo(f"$ {cycles.shell_line(argv)}")
        sys.stdout.flush()
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            raise ConfigError(f"launcher: {argv[0]} can't be run: {error.strerror}") from None


def _pause(seconds: float) -> bool:
    SystemClock().sleep(seconds)
    return False


@app.command()
def render(
    path: CyclePath,
    target: Annotated[Target, typer.Option("--target", help="What to write for.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", help="Folder that the files are written to.", show_default=False)],
    date: Annotated[
        str | None,
        typer.Option("--date", help="For this date alone; default: the scheduler gives the date.", show_default=False),
    ] = None,
) -> None:
    """Write the nodes of another scheduler, or a service's JSON."""
    with _errors_as_exit_codes():
        config = cycles.load_cycle(path)
        if date is not None and not cycles.is_date(date):
            raise ConfigError(f"--date: {date!r} isn't a business date: write YYYYMMDD")
        for name, text in _rendered(config, target, date).items():
            output.mkdir(parents=True, exist_ok=True)
            (output / name).write_text(text, encoding="utf-8")
            typer.echo(output / name)


def _rendered(config: cycles.CycleConfig, target: Target, date: str | None) -> dict[str, str]:
    eas = config.serving.eas
    if eas is None:
        raise ConfigError(f"serving.eas: the cycle's config needs this section for {target.value}")
    template = read_template(eas.template)
    if target is Target.DATAWORKS:
        return dataworks.render(config, template, date)
    return {"service.json": service_text(render_service(eas, template, config.root, date or BIZDATE))}


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
