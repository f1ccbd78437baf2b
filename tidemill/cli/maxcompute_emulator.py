"""`tidemill maxcompute-emulator`: run the MaxCompute emulator in the foreground."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer


def maxcompute_emulator(
    directory: Annotated[Path, typer.Option("--dir", help="Folder of tables, as project/schema/table/pt=a/*.parquet.")],
    port: Annotated[int, typer.Option(help="Port on loopback; 0 picks a free one.")] = 28080,
) -> None:
    """Run a MaxCompute emulator (Storage API, tables, partitions) on Parquet files until Ctrl-C."""
    from tidemill.testing.maxcompute import run_emulator

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    run_emulator(directory, port)
