"""The bounded rows that predict reads, whatever their kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import fsspec
import pyarrow.parquet as pq

from tidemill.config.pipeline import PipelineConfig
from tidemill.data.source import Source
from tidemill.data.sources.parquet import ParquetConfig, ParquetSource
from tidemill.errors import ConfigError
from tidemill.features.feature_set import FeatureSet


@dataclass(frozen=True, slots=True)
class Input:
    """Rows at an address. `columns`: the names of all; `source`: what reads some of them."""

    columns: Callable[[], list[str]]
    source: Callable[[Sequence[str]], Source]


def open_input(kind: str, path: str, config: Callable[[], PipelineConfig], features: FeatureSet) -> Input:
    """The rows at an address. `config`: where settings of the kind come from. Raises ConfigError for a kind that never ends."""
    if kind not in _INPUTS:
        raise ConfigError(f"predict reads what has an end ({', '.join(sorted(_INPUTS))}), and {path} is {kind}")
    return _INPUTS[kind](path, config, features)


def _parquet(path: str, config: Callable[[], PipelineConfig], features: FeatureSet) -> Input:
    def columns() -> list[str]:
        first = ParquetSource(ParquetConfig(paths=path), []).discover()[0]
        with fsspec.open(first.id.name, "rb") as file:
            return list(pq.read_schema(file).names)

    return Input(columns, lambda names: ParquetSource(ParquetConfig(paths=path), list(names)))


_INPUTS: dict[str, Callable[[str, Callable[[], PipelineConfig], FeatureSet], Input]] = {"parquet": _parquet}
