"""Offline scores: a bounded source scored by a lineage's newest release, or by a checkpoint, into any output."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from tidemill import logs
from tidemill.config.env import odps_table_lifecycle
from tidemill.config.pipeline import PipelineConfig
from tidemill.config.train import RuntimeConfig
from tidemill.contracts.output import OutputManifest
from tidemill.data.assignment import assign
from tidemill.data.loader import Loader
from tidemill.data.split import Split
from tidemill.distributed.agreement import Agreement
from tidemill.distributed.runtime import Runtime, start_runtime
from tidemill.errors import ConfigError, DataError
from tidemill.jobs import pipeline
from tidemill.jobs.addresses import input_kind, make_output, output_kind, require_apart
from tidemill.jobs.discovery import discover
from tidemill.jobs.display import RowCount
from tidemill.jobs.inputs import Address, Columns, input_of
from tidemill.jobs.ranks import Ranks, lead
from tidemill.jobs.scorers import Scorer, ServedScorer, TrainedScorer
from tidemill.jobs.scores import Rows, score_all
from tidemill.logs import log

ALL_COLUMNS = "ALL_COLUMNS"
ALL_EFFECTIVE_COLUMNS = "ALL_EFFECTIVE_COLUMNS"


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """What the command line asks for: a lineage's folder (`scripted_model`), or a config (`pipeline`).

    `reserved`: input columns that go to the output, or ALL_COLUMNS, or ALL_EFFECTIVE_COLUMNS (those that features read). `outputs`:
    the model's outputs to keep, empty: all. `overwrite`: replace an output that is there. `dataset_type`, `writer_type`: kinds of
    input and output, where the address alone doesn't say. `csv_header`: whether CSV files begin with names; None: input as the
    config says, output yes.
    """

    input_path: str
    output_path: str
    scripted_model: str | None = None
    pipeline: str | None = None
    checkpoint: str | None = None
    edits: str | None = None
    reserved: Sequence[str] = ()
    outputs: Sequence[str] = ()
    batch_rows: int | None = None
    overwrite: bool = False
    dataset_type: str | None = None
    writer_type: str | None = None
    csv_header: bool | None = None


def predict(request: PredictRequest) -> OutputManifest | None:
    """Score all rows and write them beside the columns asked for; None above rank 0. Collective.

    The ranks share the rows evenly, and the output has them in input order. Nothing is visible before all ranks have written all.
    Raises ConfigError for a column or output that isn't there (it names the nearest), DataError for values that can't be read.
    """
    if (request.scripted_model is None) == (request.pipeline is None):
        raise ConfigError("name what is to score: either --scripted_model_path FOLDER, or a pipeline config")
    config = None if request.pipeline is None else pipeline.load(request.pipeline, edits=request.edits).config
    settings = config.train_config.runtime if config else RuntimeConfig()
    with ExitStack() as resources:
        runtime = start_runtime(settings.timeout_s, num_threads=settings.threads)
        resources.callback(runtime.close)
        logs.set_up(rank=runtime.rank)
        manifest = _predict(request, config, runtime, resources)
    return manifest if runtime.rank == 0 else None


def _predict(request: PredictRequest, config: PipelineConfig | None, runtime: Runtime, resources: ExitStack) -> OutputManifest:
    agreement = Agreement(runtime)
    ranks = Ranks(runtime.rank, runtime.world_size, agreement)
    kind = input_kind(request.input_path, request.dataset_type)
    rows = input_of(kind)
    target = output_kind(request.output_path, request.writer_type)
    scorer: Scorer[Any] = (
        ServedScorer(request.scripted_model or "", ranks, request.batch_rows, request.edits)
        if config is None
        else TrainedScorer(config, ranks, runtime, request.checkpoint, request.batch_rows)
    )
    output = make_output(
        target, request.output_path, overwrite=request.overwrite, settings=_settings(request, target, scorer.config)
    )
    address = Address(request.input_path, scorer.config, scorer.features, request.csv_header)
    needed = [column.name for column in scorer.features.input_columns if column.role == "feature"]
    reserved = lead(ranks, lambda: _reserved(request, needed, rows.columns(address))) if request.reserved else []
    source = rows.source(address, list(dict.fromkeys([*needed, *reserved])))
    resources.callback(source.close)
    splits = discover(source, agreement, ranks.rank)
    require_apart(request.input_path, splits, target, request.output_path, output.place)
    # Registered first, so that it happens last: what still writes has ended by then.
    resources.callback(output.abort)
    loader: Loader[Rows[Any]] = Loader(
        source,
        assign(splits, {}, ranks.world_size, ranks.rank),
        batch_size=scorer.batch_rows,
        transform=lambda table, size: Rows(table, scorer.prepare(table.select(needed))),
    )
    resources.callback(loader.close)
    progress = resources.enter_context(RowCount("scored", _total(splits), Console(stderr=True) if ranks.rank == 0 else None))

    def columns(table: pa.Table, scores: Mapping[str, np.ndarray]) -> pa.Table:
        return _scored(table.select(reserved), scores, request.outputs)

    manifest = score_all(ranks, loader.take, scorer, columns, output, progress.update)
    log.info("%s scored %d rows of %s into %s", scorer.name, manifest.rows, request.input_path, output.place)
    return manifest


def _total(splits: Sequence[Split]) -> int:
    return sum(split.num_rows or 0 for split in splits)


def _settings(request: PredictRequest, kind: str, config: Callable[[], PipelineConfig]) -> dict[str, Any]:
    """What the output's address doesn't say."""
    if kind == "maxcompute":
        data = config().data_config
        return {
            "lifecycle": odps_table_lifecycle(),
            "quota": data.odps_data_quota_name,
            "compression": data.odps_data_compression,
            "tunnel_endpoint": data.maxcompute.tunnel_endpoint,
        }
    return {"header": request.csv_header} if kind == "csv" else {}


def _reserved(request: PredictRequest, needed: Sequence[str], columns: Columns) -> list[str]:
    there = [*columns.all, *columns.further]
    if ALL_COLUMNS in request.reserved:
        return columns.all
    wanted = [name for name in request.reserved if name != ALL_EFFECTIVE_COLUMNS]
    if ALL_EFFECTIVE_COLUMNS in request.reserved:
        wanted += needed
    for name in wanted:
        if name not in there:
            raise ConfigError(f"reserved_columns: {request.input_path} has no column {name!r}{_hint(name, there)}")
    return list(dict.fromkeys(wanted))


def _scored(reserved: pa.Table, scores: Mapping[str, np.ndarray], outputs: Sequence[str]) -> pa.Table:
    """Reserved columns, then outputs."""
    for name in outputs:
        if name not in scores:
            raise ConfigError(f"output_columns: the model has no output {name!r}{_hint(name, list(scores))}")
    kept = list(outputs) or sorted(scores)
    taken = [name for name in kept if name in reserved.column_names]
    if taken:
        raise ConfigError(f"reserved_columns: the input's column {taken[0]!r} has the name of an output of the model")
    bad = [name for name in kept if len(scores[name]) != reserved.num_rows]
    if bad:
        raise DataError(f"output {bad[0]!r} has {len(scores[bad[0]])} rows for {reserved.num_rows}")
    for name in kept:
        reserved = reserved.append_column(name, pa.array(scores[name]))
    return reserved


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"
