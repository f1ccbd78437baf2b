"""From a checked pipeline config to the objects that jobs are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from tidemill.config.load import Loaded, load_pipeline
from tidemill.config.odps_uri import SCHEME
from tidemill.config.pipeline import PipelineConfig
from tidemill.data.assignment import assign
from tidemill.data.dead_letters import DeadLetters
from tidemill.data.loader import Loader
from tidemill.data.messages.decoder import Columns
from tidemill.data.source import Source
from tidemill.data.sources.csv import CsvConfig, CsvSource
from tidemill.data.sources.folder import FolderSource
from tidemill.data.sources.kafka import KafkaSource
from tidemill.data.sources.kafka_client import check_client
from tidemill.data.sources.parquet import ParquetConfig, ParquetSource
from tidemill.distributed.agreement import Agreement
from tidemill.distributed.runtime import Runtime
from tidemill.errors import ConfigError, DataError, MissingExtraError
from tidemill.features.batch import Batch
from tidemill.features.feature_set import FeatureSet
from tidemill.jobs.batching import batch_rule
from tidemill.jobs.discovery import discover
from tidemill.logs import log
from tidemill.models.metrics import build_metrics, grouping_keys
from tidemill.registry import component_config
from tidemill.training.evaluate import evaluate
from tidemill.training.step import padding_batch


def load(path: str | Path, *, overrides: Mapping[str, object] | None = None, edits: str | None = None) -> Loaded:
    """A checked config; its warnings go to the log. Raises ConfigError with one line for each mistake."""
    loaded = load_pipeline(path, component_config, overrides=overrides, edits=edits)
    for warning in loaded.warnings:
        log.warning("%s", warning)
    if loaded.config.kafka is not None:
        check_client(loaded.config.kafka)
    return loaded


def label_of(config: PipelineConfig) -> str:
    """The label of a single-task model: the first label field."""
    if not config.data_config.label_fields:
        raise ConfigError("data_config.label_fields: name the label's column")
    return config.data_config.label_fields[0]


def feature_set(config: PipelineConfig) -> FeatureSet:
    """The features of a config, compiled."""
    data = config.data_config
    return FeatureSet.compile(
        [(entry.kind, entry.config) for entry in config.feature_configs],
        labels=data.label_fields,
        sample_weight=data.sample_weight_fields[0] if data.sample_weight_fields else None,
        extras=[column for column in (data.id_column, *data.log_columns) if column],
        fg_mode=data.mode,
        multival_separator=data.fg_encoded_multival_sep,
        hash_function=data.hash.function,
    )


def labelled(features: FeatureSet, label: str) -> Callable[[pa.Table, int], Batch]:
    """(rows, size) -> a batch with labels. It raises DataError for a label outside of 0..1: cross entropy has no minimum there."""

    def transform(rows: pa.Table, size: int) -> Batch:
        batch = features.transform(rows, size=size)
        values = batch.labels[label]
        bad = torch.nonzero((values < 0) | (values > 1))
        if len(bad):
            row = int(bad[0])
            raise DataError(
                f"label column {label!r}, row {row}: value {values[row]:g} isn't in 0..1, as binary_cross_entropy needs"
            )
        return batch

    return transform


def is_stream(config: PipelineConfig) -> bool:
    """Whether training reads an unbounded source."""
    return config.stream is not None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a job wants to read. `path`: the train or the eval input; `boundary`: event time at which a stream begins."""

    config: PipelineConfig
    features: FeatureSet
    path: str
    boundary: float | None = None
    dead_letters: DeadLetters | None = None

    @property
    def columns(self) -> list[str]:
        """The columns that the features read, and the cost of a row."""
        cost = batch_rule(self.config).cost_column
        return list(dict.fromkeys([*(column.name for column in self.features.input_columns), *([cost] if cost else [])]))

    @property
    def event_time_column(self) -> str | None:
        return self.config.data_config.event_time.column or None


def make_source(
    config: PipelineConfig,
    features: FeatureSet,
    *,
    path: str,
    boundary: float | None = None,
    dead_letters: DeadLetters | None = None,
) -> Source:
    """The source of `path` (the train or the eval input): a table if it is an `odps://` address, else what dataset_type says.

    A stream is evaluated on Parquet files, or on a table. `boundary`: event time at which a stream begins.
    """
    kind = config.data_config.source_kind
    if is_stream(config) and path != config.train_input_path:
        kind = "parquet"
    if path.startswith(SCHEME):
        kind = "maxcompute"
    return _SOURCES[kind](Wanted(config, features, path, boundary, dead_letters))


def _parquet_source(wanted: Wanted) -> Source:
    return ParquetSource(ParquetConfig(paths=wanted.path, event_time_column=wanted.event_time_column), wanted.columns)


def _csv_source(wanted: Wanted) -> Source:
    data = wanted.config.data_config
    config = CsvConfig(
        paths=wanted.path,
        delimiter=data.delimiter,
        with_header=data.with_header,
        names=tuple(data.columns),
        event_time_column=wanted.event_time_column,
    )
    return CsvSource(config, column_types(wanted.config, wanted.features))


def _kafka_source(wanted: Wanted) -> Source:
    config = wanted.config
    assert config.kafka is not None
    start_at = None if wanted.boundary is None else wanted.boundary - config.start_margin_s
    types: Columns = column_types(config, wanted.features)
    if config.kafka.message_format != "json":
        types = _declared(config, types)
    event_time, dead_letters = wanted.event_time_column, wanted.dead_letters
    return KafkaSource(config.kafka, types, event_time_column=event_time, start_at=start_at, dead_letters=dead_letters)


def _folder_source(wanted: Wanted) -> Source:
    settings, types = wanted.config.data_config.folder, column_types(wanted.config, wanted.features)
    columns, event_time, dead_letters = _declared(wanted.config, types), wanted.event_time_column, wanted.dead_letters
    return FolderSource(settings, wanted.path, columns, event_time_column=event_time, dead_letters=dead_letters)


def _declared(config: PipelineConfig, types: Columns) -> Columns:
    """For data that tell their types: what isn't declared is taken as it comes."""
    return {name: kind if config.data_config.columns.get(name) else None for name, kind in types.items()}


def _maxcompute_source(wanted: Wanted) -> Source:
    data = wanted.config.data_config
    try:
        from tidemill.data.sources.maxcompute.source import MaxComputeSource, MaxComputeSourceConfig
    except ModuleNotFoundError as error:
        if error.name != "odps":
            raise
        raise MissingExtraError("MaxCompute tables need pyodps: pip install 'tidemill[maxcompute]'") from None
    config = MaxComputeSourceConfig(
        paths=(wanted.path,) if wanted.path else data.maxcompute.tables,
        is_orderby_partition=data.is_orderby_partition,
        quota=data.odps_data_quota_name,
        compression=data.odps_data_compression,
        event_time_column=wanted.event_time_column,
        reading=data.maxcompute,
    )
    return MaxComputeSource(config, wanted.columns)


_SOURCES: dict[str, Callable[[Wanted], Source]] = {
    "parquet": _parquet_source,
    "csv": _csv_source,
    "kafka": _kafka_source,
    "maxcompute": _maxcompute_source,
    "folder": _folder_source,
}
"""Kind of source (config.data.SOURCE_KINDS) -> what makes it."""


def column_types(config: PipelineConfig, features: FeatureSet) -> dict[str, pa.DataType]:
    """Name and type of every column that is read: as declared in data_config, else what suits the feature that uses it."""
    declared = config.data_config.columns
    types: dict[str, pa.DataType] = {}
    for column in features.input_columns:
        field_type = declared.get(column.name)
        types[column.name] = _arrow_type(field_type) if field_type else _some_type(column.accepts)
    for name in filter(None, (config.data_config.event_time.column, batch_rule(config).cost_column)):
        field_type = declared.get(name)
        types.setdefault(name, _arrow_type(field_type) if field_type else pa.float64())
    return types


def evaluate_source(
    source: Source,
    config: PipelineConfig,
    features: FeatureSet,
    *,
    scores: Callable[[Batch], dict[str, np.ndarray]],
    agreement: Agreement,
    runtime: Runtime,
) -> dict[str, float]:
    """Metrics of the config over all of a bounded source, which is closed then. Collective."""
    data = config.data_config
    size = data.eval_batch_size or data.batch_size
    with closing(source):
        loader: Loader[Batch] = Loader(
            source,
            assign(discover(source, agreement, runtime.rank), {}, runtime.world_size, runtime.rank),
            batch_size=size,
            transform=labelled(features, label_of(config)),
        )
        with closing(loader):
            return evaluate(
                loader.take,
                scores,
                agreement=agreement,
                padding=padding_batch(features, config.data_config.label_fields, size),
                metrics=build_metrics(config.model.metrics),
                label=label_of(config),
                keys=grouping_keys(config.model.metrics),
                max_steps=config.eval_config.num_steps,
            )


def latest_event_time(config: PipelineConfig) -> float:
    """How far ahead of the clock an event time may be."""
    return config.data_config.event_time.max_future_s or math.inf


_SCALARS = {
    "INT32": pa.int32(),
    "INT64": pa.int64(),
    "STRING": pa.string(),
    "FLOAT": pa.float32(),
    "DOUBLE": pa.float64(),
}


def _arrow_type(field_type: str) -> pa.DataType:
    """The Arrow type of a declared column ("INT64", "ARRAY_STRING", "MAP_STRING_FLOAT")."""
    if field_type.startswith("ARRAY_"):
        return pa.list_(_arrow_type(field_type.removeprefix("ARRAY_")))
    if field_type.startswith("MAP_"):
        _, key, value = field_type.split("_")
        return pa.map_(_SCALARS[key], _SCALARS[value])
    return _SCALARS[field_type]


def _some_type(accepts: tuple[str, ...]) -> pa.DataType:
    """The widest of the types that a feature accepts: text for ids, double for numbers."""
    for name in ("string", "float64", "int64"):
        if not accepts or name in accepts:
            return pa.type_for_alias(name)
    return pa.type_for_alias(accepts[0])
