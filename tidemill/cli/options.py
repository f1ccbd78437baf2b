"""Options that several commands share, under tzrec's names, and how options are spelt."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemill.errors import ConfigError

PIPELINE = typer.Argument(metavar="CONFIG", help="Pipeline config: YAML, JSON or protobuf text.", show_default=False)

PipelineConfigPath = Annotated[
    str | None,
    typer.Option("--pipeline_config_path", help="The same as CONFIG.", show_default=False),
]
EditConfigJson = Annotated[
    str | None,
    typer.Option(
        "--edit_config_json",
        help='Changes to the config, applied last: {"train_config.num_steps": 100}.',
        show_default=False,
    ),
]


EITHER_SPELLING = "Options may be written with hyphens or underscores: --model-dir is --model_dir."


def hyphens(option: str) -> str:
    """The one spelling by which options are told apart; help shows the one that they are declared with."""
    return option.replace("_", "-")


def pipeline_path(argument: str | None, option: str | None) -> str:
    """The config's path, given once. Raises ConfigError if it is missing or given twice."""
    if argument and option and argument != option:
        raise ConfigError(f"the config is given twice: CONFIG {argument} and --pipeline_config_path {option}")
    path = argument or option
    if not path:
        raise ConfigError("name the pipeline config: tidemill COMMAND CONFIG (or --pipeline_config_path CONFIG)")
    return path
