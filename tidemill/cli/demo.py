"""`tidemill demo`: two business days in the life of a model, on this machine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer


def demo(
    fast: Annotated[bool, typer.Option("--fast", help="Less data and shorter days: under 3 minutes on 2 cores.")] = False,
    chaos: Annotated[bool, typer.Option("--chaos", help="SIGKILL the stream trainer three times at random.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the click world, its users and the chaos.")] = 1,
    data: Annotated[
        str, typer.Option(help="`movielens` plays MovieLens-100k from an installed recbole, `movielens:FOLDER` from a folder.")
    ] = "",
    directory: Annotated[
        Path, typer.Option("--dir", help="Folder that everything is written to; emptied first if a demo has made it.")
    ] = Path("demo-run"),
    report: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("demo-report"),
) -> None:
    """Play two days and the start of a third: train, export, serve, stream, hand over; then prove that nothing was lost."""
    from tidemill import logs
    from tidemill.demo.main import DemoSettings, run_demo

    logs.set_up(logging.WARNING)
    raise typer.Exit(run_demo(DemoSettings(fast, chaos, seed, data, directory, report), say=typer.echo))
