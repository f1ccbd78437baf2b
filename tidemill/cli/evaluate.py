"""`tidemill eval`: metrics of a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.cli.options import PIPELINE, EditConfigJson, PipelineConfigPath, pipeline_path


def evaluate(
    config: Annotated[str | None, PIPELINE] = None,
    pipeline_config_path: PipelineConfigPath = None,
    checkpoint_path: Annotated[
        str | None,
        typer.Option("--checkpoint_path", help="Checkpoint, or folder of them; default: model_dir's newest."),
    ] = None,
    eval_input_path: Annotated[str | None, typer.Option("--eval_input_path", help="Overrides eval_input_path.")] = None,
    eval_result_filename: Annotated[
        str,
        typer.Option("--eval_result_filename", help="File in model_dir that the result is appended to."),
    ] = "eval_result.txt",
    edit_config_json: EditConfigJson = None,
) -> None:
    """Evaluate a checkpoint on the evaluation data; one process, or every rank of torchrun."""
    from tidemill.jobs.evaluate import EvaluateRequest, evaluate

    evaluation = evaluate(
        EvaluateRequest(
            pipeline=pipeline_path(config, pipeline_config_path),
            overrides={"eval_input_path": eval_input_path},
            edits=edit_config_json,
            checkpoint=checkpoint_path,
            result_filename=eval_result_filename,
        )
    )
    if evaluation is None:
        return
    width = max(map(len, evaluation.metrics), default=0)
    typer.echo(f"step {evaluation.step}")
    for name, value in sorted(evaluation.metrics.items()):
        typer.echo(f"  {name:<{width}}  {value:.6f}")
