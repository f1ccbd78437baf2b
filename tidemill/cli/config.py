"""`tidemill config check CONFIG` and `tidemill config explain KEY`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.options import EditConfigJson
from tidemill.config.explain import explain as explain_key
from tidemill.config.load import load_pipeline
from tidemill.errors import ConfigError
from tidemill.registry import component_config

app = typer.Typer(help="Check a pipeline config, or explain one of its fields.", no_args_is_help=True)


@app.command()
def check(
    path: Annotated[Path, typer.Argument(help="The pipeline config: YAML, JSON or protobuf text.")],
    edit_config_json: EditConfigJson = None,
) -> None:
    """Report everything wrong with a config; exit code 0 if it can be used, 2 if not."""
    try:
        loaded = load_pipeline(path, component_config, edits=edit_config_json)
        if loaded.config.kafka is not None:
            # Here: nothing else of this command needs the client.
            from tidemill.data.sources.kafka_client import check_client

            check_client(loaded.config.kafka)
        # Here: data files need Arrow.
        from tidemill.jobs.data_check import check_data

        check_data(loaded)
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from None
    for warning in loaded.warnings:
        typer.echo(f"warning: {warning}", err=True)
    entries = len(loaded.config.feature_configs)
    typer.echo(f"{path}: fine ({entries} features, {loaded.config.model.kind}, {len(loaded.warnings)} warnings)")


@app.command()
def explain(key: Annotated[str, typer.Argument(help="Dotted path, e.g. train_config.publish.interval_s")]) -> None:
    """Print a field's type, default and meaning; all fields of a section."""
    try:
        typer.echo(explain_key(key, component_config))
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from None
