"""`tidemill train`: one process, or every rank of `torchrun -m tidemill train`."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.options import PIPELINE, EditConfigJson, PipelineConfigPath, pipeline_path


def train(
    config: Annotated[str | None, PIPELINE] = None,
    pipeline_config_path: PipelineConfigPath = None,
    model_dir: Annotated[str | None, typer.Option("--model_dir", help="Overrides model_dir.")] = None,
    train_input_path: Annotated[str | None, typer.Option("--train_input_path", help="Overrides train_input_path.")] = None,
    eval_input_path: Annotated[str | None, typer.Option("--eval_input_path", help="Overrides eval_input_path.")] = None,
    continue_train: Annotated[
        bool, typer.Option("--continue_train", help="Go on from the newest checkpoint in model_dir, if any.")
    ] = False,
    fine_tune_checkpoint: Annotated[
        str | None,
        typer.Option("--fine_tune_checkpoint", help="Checkpoint, or folder of them, to start from."),
    ] = None,
    edit_config_json: EditConfigJson = None,
) -> None:
    """Train a model: a day's table from start to end, or a stream until it is stopped or hands over."""
    from tidemill.jobs.train import TrainRequest, train

    overrides = {
        "model_dir": model_dir,
        "train_input_path": train_input_path,
        "eval_input_path": eval_input_path,
        "train_config.fine_tune_checkpoint": fine_tune_checkpoint,
    }
    request = TrainRequest(pipeline_path(config, pipeline_config_path), overrides, edit_config_json, continue_train)
    raise typer.Exit(train(request))
