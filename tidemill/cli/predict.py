"""`tidemill predict`: scores of a table."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.options import PIPELINE, EditConfigJson, PipelineConfigPath, pipeline_path
from tidemill.errors import ConfigError

ModelPath = Annotated[
    str | None,
    typer.Option("--scripted_model_path", help="Snapshot's or lineage's folder; its newest release scores."),
]
CheckpointPath = Annotated[
    str | None,
    typer.Option("--checkpoint_path", help="Checkpoint, or folder of them; default: model_dir's newest."),
]
InputPath = Annotated[
    str | None,
    typer.Option("--predict_input_path", help="Rows to score: Parquet or CSV files (paths, globs), or odps://."),
]
OutputPath = Annotated[
    str | None,
    typer.Option(
        "--predict_output_path",
        help="Where scores go: FOLDER (Parquet), FOLDER/*.csv (.csv.gz, .csv.zst), odps:// or kafka://.",
    ),
]
ReservedColumns = Annotated[
    str,
    typer.Option(
        "--reserved_columns",
        help="Input columns to keep, by commas; ALL_COLUMNS; ALL_EFFECTIVE_COLUMNS: those that features read.",
    ),
]
OutputColumns = Annotated[str, typer.Option("--output_columns", help="Outputs of the model to keep, by commas; default: all.")]
BatchSize = Annotated[int | None, typer.Option("--batch_size", min=1, help="Rows scored at once.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the rows that the folder or partition holds.")]
DatasetType = Annotated[str | None, typer.Option("--dataset_type", help="Kind of input: CsvDataset, ...; default: by its path.")]
WriterType = Annotated[str | None, typer.Option("--writer_type", help="Kind of output: CsvWriter, ...; default: by its path.")]
CsvHeader = Annotated[bool, typer.Option("--csv_header", help="CSV files begin with names.")]
NoCsvHeader = Annotated[bool, typer.Option("--no_csv_header", help="They don't. Default: as the config says; in output they do.")]


def predict(
    config: Annotated[str | None, PIPELINE] = None,
    scripted_model_path: ModelPath = None,
    pipeline_config_path: PipelineConfigPath = None,
    checkpoint_path: CheckpointPath = None,
    predict_input_path: InputPath = None,
    predict_output_path: OutputPath = None,
    reserved_columns: ReservedColumns = "",
    output_columns: OutputColumns = "",
    batch_size: BatchSize = None,
    overwrite: Overwrite = False,
    dataset_type: DatasetType = None,
    writer_type: WriterType = None,
    csv_header: CsvHeader = False,
    no_csv_header: NoCsvHeader = False,
    edit_config_json: EditConfigJson = None,
) -> None:
    """Score a table, with a snapshot and its releases as a server would, or with a checkpoint of a config."""
    if not predict_input_path or not predict_output_path:
        raise ConfigError("name the rows and where the scores go: --predict_input_path FILES --predict_output_path FOLDER")
    if csv_header and no_csv_header:
        raise ConfigError("--csv_header and --no_csv_header: give one of them")
    given = bool(config or pipeline_config_path)
    path = pipeline_path(config, pipeline_config_path) if given or not scripted_model_path else None

    from tidemill.jobs.predict import PredictRequest, predict

    written = predict(
        PredictRequest(
            input_path=predict_input_path,
            output_path=predict_output_path,
            scripted_model=scripted_model_path,
            pipeline=path,
            checkpoint=checkpoint_path,
            edits=edit_config_json,
            reserved=_names(reserved_columns),
            outputs=_names(output_columns),
            batch_rows=batch_size,
            overwrite=overwrite,
            dataset_type=dataset_type,
            writer_type=writer_type,
            csv_header=csv_header if csv_header or no_csv_header else None,
        )
    )
    if written is not None:  # rank 0 speaks for all
        parts = f" in {len(written.files)} parts" if written.files else ""
        # What follows a question mark may hold passwords.
        typer.echo(f"{written.rows} rows{parts}: {predict_output_path.partition('?')[0]}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
