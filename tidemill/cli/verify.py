"""`tidemill verify`: served tables and weights against the trainer's checkpoint, key by key."""

from __future__ import annotations

from typing import Annotated

import typer


def verify(
    lineage: Annotated[str, typer.Argument(metavar="LINEAGE", help="A stream lineage's folder.")],
    checkpoint: Annotated[int | None, typer.Option(help="Step of the checkpoint; default: the newest.")] = None,
) -> None:
    """Compare what a lineage serves with its trainer's checkpoint; exit code 1 if anything differs."""
    from tidemill.jobs.verify import verify

    found = verify(lineage, step=checkpoint)
    typer.echo(f"compared {found.scope()}")
    typer.echo(f"keys compared {found.keys_compared}, different {found.keys_different}")
    typer.echo(f"dense weights compared {found.dense_compared}, different {found.dense_different}")
    for difference in found.differences:
        typer.echo(f"  differs: {difference}")
    if not found.is_equal:
        raise typer.Exit(1)
