"""`tidemill export`: a checkpoint becomes a snapshot that servers and streams start from."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.options import PIPELINE, EditConfigJson, PipelineConfigPath, pipeline_path


def export(
    config: Annotated[str | None, PIPELINE] = None,
    export_dir: Annotated[str, typer.Option("--export_dir", help="Folder to export into.")] = ...,  # type: ignore[assignment]
    pipeline_config_path: PipelineConfigPath = None,
    model_dir: Annotated[str | None, typer.Option("--model_dir", help="Overrides model_dir.")] = None,
    checkpoint_path: Annotated[
        str | None,
        typer.Option("--checkpoint_path", help="Checkpoint, or folder of them; default: model_dir's newest."),
    ] = None,
    edit_config_json: EditConfigJson = None,
) -> None:
    """Export a checkpoint in full: tables, dense program, features. Doing it again changes nothing."""
    from tidemill.jobs.export import ExportRequest, export

    export(
        ExportRequest(
            pipeline=pipeline_path(config, pipeline_config_path),
            export_dir=export_dir,
            checkpoint=checkpoint_path,
            overrides={"model_dir": model_dir},
            edits=edit_config_json,
        )
    )
