"""`tidemill inspect`: shows and verifies any document or folder."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tidemill.jobs.inspect import Inspection


def inspect(
    path: Annotated[str, typer.Argument(help="A document, checkpoint, run, daily job, lineage, output or root; a path or URL.")],
) -> None:
    """Show a document or folder, and check sizes and hashes of all that it lists; exit code 1 if anything is wrong."""
    from tidemill.jobs.inspect import inspect

    found = inspect(path)
    if sys.stdout.isatty():
        _print_rich(found)
    else:
        _print_plain(found)
    typer.echo(f"{found.path}: {found.kind}, {found.files_checked} files checked, {len(found.faults)} faults")
    for fault in found.faults:
        typer.echo(f"fault: {fault}")
    if found.faults:
        raise typer.Exit(1)


def _print_plain(found: Inspection) -> None:
    for section in found.sections:
        typer.echo(section.title)
        rows = section.rows if section.columns == ("field", "value") else [section.columns, *section.rows]
        widths = [max(len(row[at]) for row in rows) for at in range(len(section.columns))] if rows else []
        for row in rows:
            typer.echo("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_rich(found: Inspection) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for section in found.sections:
        is_fields = section.columns == ("field", "value")
        table = Table(title=section.title, title_justify="left", show_header=not is_fields)
        for column in section.columns:
            table.add_column(column)
        for row in section.rows:
            # Text, not markup: a path may hold brackets.
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
