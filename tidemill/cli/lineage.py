"""`tidemill lineage show|promote|rollback|retire ROOT`: look at a root's lineages, and change by hand what is served."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.contracts.lineage import Deployment
from tidemill.errors import ConfigError, LineageError
from tidemill.lineage import by_hand
from tidemill.lineage.cycle import is_date
from tidemill.lineage.overview import deployment_line, lineage_lines, server_lines
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage

app = typer.Typer(help="A root's lineages: show, promote, roll back, retire.", no_args_is_help=True)

Root = Annotated[str, typer.Argument(metavar="ROOT", help="The root folder or URL.")]
Date = Annotated[str, typer.Option("--date", help="The lineage's business date, YYYYMMDD.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; stands in the deployment for good.")]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait until all live servers serve it; 0: don't wait.")]


@app.command()
def show(
    root: Root,
    date: Annotated[str | None, typer.Option("--date", help="Only this date's lineage.", show_default=False)] = None,
    require_retired: Annotated[
        bool, typer.Option("--require-retired", help="Exit with 73 unless the lineage of --date has retired.")
    ] = False,
) -> None:
    """Print the lineages, what is deployed, and what every server says it serves."""
    storage = open_storage(root)
    if require_retired and date is None:
        raise ConfigError("--require-retired needs --date")
    for line in lineage_lines(storage, None if date is None else _date(date)):
        typer.echo(line)
    if require_retired and date is not None and not by_hand.has_retired(storage, date):
        raise LineageError(f"{root}: the lineage of {date} has not retired")
    typer.echo(deployment_line(storage))
    for line in server_lines(storage):
        typer.echo(line)


@app.command()
def promote(root: Root, date: Date, reason: Reason = "promoted by hand", wait: Wait = 0.0) -> None:
    """Serve a lineage and follow its releases. An older date than the deployed one is refused: roll back to it."""
    storage = open_storage(root)
    _tell(storage, by_hand.promote(storage, _date(date), reason), wait)


@app.command()
def rollback(
    root: Root,
    date: Annotated[
        str | None, typer.Option("--date", help="Lineage to serve; default: the one served before.", show_default=False)
    ] = None,
    release: Annotated[
        int | None,
        typer.Option(
            "--release",
            min=0,
            help="Last release to serve, 0: the snapshot alone; default: the newest good one.",
            show_default=False,
        ),
    ] = None,
    reason: Reason = "rolled back by hand",
    wait: Wait = 0.0,
) -> None:
    """Serve an earlier state, frozen, until the next deployment."""
    storage = open_storage(root)
    _tell(storage, by_hand.roll_back(storage, reason, date=None if date is None else _date(date), sequence=release), wait)


@app.command()
def retire(root: Root, date: Date) -> None:
    """Retire a lineage that nobody trains any more; it never starts again."""
    record = by_hand.retire_by_hand(open_storage(root), _date(date))
    successor = f" in favour of {record.successor}" if record.successor else ""
    last = f", last release {record.last_sequence}" if record.last_sequence else ""
    typer.echo(f"lineages/{date} has retired{successor}{last}")


def _tell(root: Storage, deployment: Deployment, wait_s: float) -> None:
    typer.echo(deployment_line(root))
    if wait_s:
        served = by_hand.wait_until_served(root, deployment.number, wait_s)
        typer.echo(f"served by {', '.join(served)}")


def _date(text: str) -> str:
    if not is_date(text):
        raise ConfigError(f"--date: {text!r} isn't a business date: write YYYYMMDD")
    return text
