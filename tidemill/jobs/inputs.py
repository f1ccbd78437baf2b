"""The bounded rows that predict reads, whatever their kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidemill import registry
from tidemill.config.pipeline import PipelineConfig
from tidemill.data.source import Source
from tidemill.data.sources.csv import CsvConfig, CsvSource
from tidemill.data.sources.parquet import ParquetConfig, ParquetSource
from tidemill.errors import ConfigError
from tidemill.features.feature_set import FeatureSet
from tidemill.jobs.pipeline import column_types


@dataclass(frozen=True, slots=True)
class Address:
    """Rows to read. `config`: of the model, for what the address doesn't say; `header`: instead of data_config.with_header."""

    path: str
    config: Callable[[], PipelineConfig]
    features: FeatureSet
    header: bool | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """What can be read. `further`: beside the columns that "all" means (a table's partition columns)."""

    all: list[str]
    further: list[str]


@dataclass(frozen=True, slots=True)
class Input:
    """How rows of one kind are read."""

    columns: Callable[[Address], Columns]
    source: Callable[[Address, Sequence[str]], Source]


def input_of(kind: str) -> Input:
    """How rows of a kind are read. Raises ConfigError for a kind that never ends."""
    try:
        return _INPUTS[kind]
    except KeyError:
        raise ConfigError(f"predict reads what has an end ({', '.join(sorted(_INPUTS))}), and not {kind}") from None


def _parquet(address: Address, names: Sequence[str]) -> ParquetSource:
    return ParquetSource(ParquetConfig(paths=address.path), list(names))


def _csv(address: Address, names: Sequence[str]) -> CsvSource:
    """Columns that neither a feature nor the config says anything of are text, as they stand in the file."""
    config = address.config()
    data = config.data_config
    types = column_types(config, address.features)
    header = data.with_header if address.header is None else address.header
    settings = CsvConfig(paths=address.path, delimiter=data.delimiter, with_header=header, names=tuple(data.columns))
    return CsvSource(settings, {name: types.get(name, pa.string()) for name in names})


def _maxcompute(address: Address, names: Sequence[str]) -> Any:
    data = address.config().data_config
    source: Any = registry.resolve("source", "maxcompute")
    config = source.Config(
        paths=(address.path,),
        is_orderby_partition=data.is_orderby_partition,
        quota=data.odps_data_quota_name,
        compression=data.odps_data_compression,
        reading=data.maxcompute,
    )
    return source(config, list(names))


def _maxcompute_columns(address: Address) -> Columns:
    found = _maxcompute(address, ()).columns()
    return Columns(list(found.data), list(found.partition))


_INPUTS: dict[str, Input] = {
    "parquet": Input(lambda address: Columns(_parquet(address, ()).columns(), []), _parquet),
    "csv": Input(lambda address: Columns(_csv(address, ()).columns(), []), _csv),
    "maxcompute": Input(_maxcompute_columns, _maxcompute),
}
