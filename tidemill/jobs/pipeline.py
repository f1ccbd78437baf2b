"""From a checked pipeline config to the objects that jobs are made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from tidemill import registry
from tidemill.config.base import Config
from tidemill.config.load import Loaded, load_pipeline
from tidemill.config.pipeline import PipelineConfig
from tidemill.data.source import Source
from tidemill.data.sources.kafka import KafkaSource
from tidemill.data.sources.parquet import ParquetConfig, ParquetSource
from tidemill.errors import ConfigError
from tidemill.features.batch import Batch
from tidemill.features.feature_set import FeatureSet
from tidemill.logs import log


def component_config(family: str, kind: str) -> type[Config]:
    """The config class of a registered kind: what the config language asks for by name."""
    return registry.resolve(family, kind).Config


def load(path: str | Path, *, overrides: Mapping[str, object] | None = None, edits: str | None = None) -> Loaded:
    """A checked config; its warnings go to the log. Raises ConfigError with one line for each mistake."""
    loaded = load_pipeline(path, component_config, overrides=overrides, edits=edits)
    for warning in loaded.warnings:
        log.warning("%s", warning)
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
        extras=[column for column in (data.id_column, *data.log_columns) if column],
        fg_mode=data.mode,
        multival_separator=data.fg_encoded_multival_sep,
        hash_function=data.hash.function,
    )


def is_stream(config: PipelineConfig) -> bool:
    """Whether training reads an unbounded source."""
    return config.data_config.source_kind == "kafka"


def make_source(config: PipelineConfig, features: FeatureSet, *, path: str, boundary: float | None = None) -> Source:
    """The source of `path` (train or eval input). `boundary`: where a stream begins, less the margin."""
    event_time = config.data_config.event_time.column or None
    columns = [column.name for column in features.input_columns]
    if not is_stream(config) or not path.startswith("kafka://") and path != config.train_input_path:
        return ParquetSource(ParquetConfig(paths=path, event_time_column=event_time), columns)
    raise ConfigError(f"{path}: not a source")


def empty_batch(features: FeatureSet, size: int) -> Batch:
    """A batch of `size` rows of padding."""
    columns = {column.name: pa.array([], _some_type(column.accepts)) for column in features.input_columns}
    return features.transform(pa.table(columns), size=size)


def latest_event_time(config: PipelineConfig) -> float:
    """How far ahead of the clock an event time may be."""
    return config.data_config.event_time.max_future_s or math.inf


def _some_type(accepts: tuple[str, ...]) -> pa.DataType:
    return pa.string() if not accepts else pa.type_for_alias(accepts[0])
