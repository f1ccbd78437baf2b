"""Offline scores: a bounded source scored by a lineage's newest release, or by a checkpoint, into Parquet parts (one process)."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill import logs
from tidemill.checkpoint.restore import read_checkpoint
from tidemill.contracts.output import OutputManifest
from tidemill.data.intervals import NOTHING
from tidemill.data.source import Source
from tidemill.data.sources.parquet import ParquetConfig, ParquetSource
from tidemill.data.writers.parquet import ParquetOutput
from tidemill.distributed.runtime import start_runtime
from tidemill.errors import ConfigError, DataError
from tidemill.features.feature_set import FeatureSet
from tidemill.jobs import pipeline
from tidemill.jobs.place import checkpoint_path
from tidemill.jobs.scoring import restored_step
from tidemill.serving.loader import load_generation
from tidemill.serving.predictor import Predictor
from tidemill.storage.open import open_storage

log = logging.getLogger(__name__)

BATCH_ROWS = 4096
ALL_COLUMNS = "ALL_COLUMNS"
ALL_EFFECTIVE_COLUMNS = "ALL_EFFECTIVE_COLUMNS"

_READ_TIMEOUT_S = 60.0

Score = Callable[[pa.Table], Mapping[str, np.ndarray]]


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """What the command line asks for: a lineage's folder (`scripted_model`), or a config (`pipeline`).

    `reserved`: input columns that go to the output, or ALL_COLUMNS, or ALL_EFFECTIVE_COLUMNS (those that features read). `outputs`:
    the model's outputs to keep, empty: all.
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


@dataclass(frozen=True, slots=True)
class _Scorer:
    """Who scores. `batch_rows`: how many rows at once."""

    name: str
    features: FeatureSet
    score: Score
    batch_rows: int


def predict(request: PredictRequest) -> OutputManifest:
    """Score all rows and write them, in input order, beside the columns asked for. Nothing is visible before all is written.

    Raises ConfigError for a column or output that isn't there (it names the nearest), DataError for values that can't be read.
    """
    if (request.scripted_model is None) == (request.pipeline is None):
        raise ConfigError("name what is to score: either --scripted_model_path FOLDER, or a pipeline config")
    with ExitStack() as resources:
        scorer = _served(request) if request.scripted_model else _trained(request, resources)
        needed = [column.name for column in scorer.features.input_columns if column.role == "feature"]
        reserved = _reserved(request, needed)
        source = ParquetSource(ParquetConfig(paths=request.input_path), list(dict.fromkeys([*needed, *reserved])))
        output = ParquetOutput(open_storage(request.output_path))
        resources.callback(output.abort)
        for rows in _blocks(source, scorer.batch_rows):
            output.write(_scored(rows, needed, reserved, scorer.score(rows.select(needed)), request.outputs))
        manifest = output.commit()
    log.info("%s scored %d rows of %s into %s", scorer.name, manifest.rows, request.input_path, request.output_path)
    return manifest


def _served(request: PredictRequest) -> _Scorer:
    generation = load_generation(open_storage(request.scripted_model or ""), "")
    predictor = Predictor(generation)
    name = f"{generation.lineage}, release {generation.sequence}" if generation.sequence else f"{generation.lineage}, the snapshot"
    return _Scorer(name, generation.model.features, predictor.score_table, request.batch_rows or BATCH_ROWS)


def _trained(request: PredictRequest, resources: ExitStack) -> _Scorer:
    config = pipeline.load(request.pipeline or "", edits=request.edits).config
    runtime = start_runtime(config.train_config.runtime.timeout_s, num_threads=config.train_config.runtime.threads)
    resources.callback(runtime.close)
    logs.set_up(rank=runtime.rank)
    if runtime.world_size > 1:
        raise ConfigError("predict runs in one process: call it without torchrun")
    folder, step = checkpoint_path(request.checkpoint or config.model_dir)
    storage = open_storage(folder)
    _, manifest = read_checkpoint(storage, step)
    features = pipeline.feature_set(config)
    model = restored_step(config, features, runtime, storage, manifest)
    size = request.batch_rows or config.data_config.eval_batch_size or config.data_config.batch_size

    def score(rows: pa.Table) -> Mapping[str, np.ndarray]:
        return model.scores(features.transform(rows.combine_chunks(), with_labels=False))

    return _Scorer(f"{storage.url}, step {manifest.step}", features, score, size)


def _reserved(request: PredictRequest, needed: Sequence[str]) -> list[str]:
    if not request.reserved:
        return []
    there = _columns(request.input_path)
    if ALL_COLUMNS in request.reserved:
        return there
    wanted = [name for name in request.reserved if name != ALL_EFFECTIVE_COLUMNS]
    if ALL_EFFECTIVE_COLUMNS in request.reserved:
        wanted += needed
    for name in wanted:
        if name not in there:
            raise ConfigError(f"reserved_columns: {request.input_path} has no column {name!r}{_hint(name, there)}")
    return list(dict.fromkeys(wanted))


def _columns(input_path: str) -> list[str]:
    """Columns of the input's first file."""
    first = ParquetSource(ParquetConfig(paths=input_path), []).discover()[0]
    with fsspec.open(first.id.name, "rb") as file:
        return list(pq.read_schema(file).names)


def _blocks(source: Source, rows: int) -> Iterator[pa.Table]:
    """All rows in order, at most `rows` at once."""
    for split in source.discover():
        reader = source.open(split, None, NOTHING)
        try:
            while True:
                try:
                    raw = reader.read(_READ_TIMEOUT_S)
                except EOFError:
                    break
                if raw is not None:
                    yield from (raw.table.slice(at, rows) for at in range(0, raw.num_rows, rows))
        finally:
            reader.close()


def _scored(
    rows: pa.Table, needed: Sequence[str], reserved: Sequence[str], scores: Mapping[str, np.ndarray], outputs: Sequence[str]
) -> pa.Table:
    """Reserved columns, then outputs."""
    for name in outputs:
        if name not in scores:
            raise ConfigError(f"output_columns: the model has no output {name!r}{_hint(name, list(scores))}")
    kept = list(outputs) or sorted(scores)
    taken = [name for name in kept if name in reserved]
    if taken:
        raise ConfigError(f"reserved_columns: the input's column {taken[0]!r} has the name of an output of the model")
    bad = [name for name in kept if len(scores[name]) != rows.num_rows]
    if bad:
        raise DataError(f"output {bad[0]!r} has {len(scores[bad[0]])} rows for {rows.num_rows}")
    table = rows.select(list(reserved))
    for name in kept:
        table = table.append_column(name, pa.array(scores[name]))
    return table


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"
