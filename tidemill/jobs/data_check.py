"""Whether the local data files that a config names have the columns that it names."""

from __future__ import annotations

import glob

from tidemill.config.columns import check_present
from tidemill.config.data import DataConfig
from tidemill.config.load import Loaded
from tidemill.config.tree import Finding
from tidemill.data.sources.csv import CsvConfig, CsvSource
from tidemill.data.sources.parquet import ParquetConfig, ParquetSource
from tidemill.errors import ConfigError


def check_data(loaded: Loaded) -> None:
    """Compares the config with the first of the training files. Raises ConfigError with a line for each column that isn't there.

    What isn't on this machine yet (the day's table may come later), and streams, aren't looked at.
    """
    file = _first_file(loaded.config.train_input_path)
    columns = None if file is None else _columns(loaded.config.data_config, file)
    if file is None or columns is None:
        return
    findings: list[Finding] = check_present(loaded.config, loaded.root, columns, file)
    findings.sort(key=lambda finding: finding.origin.line or 0)
    if findings:
        raise ConfigError("\n".join(map(str, findings)))


def _first_file(paths: str) -> str | None:
    for path in paths.split(","):
        found = sorted(glob.glob(path.strip(), recursive=True)) if "://" not in path else []
        if found:
            return found[0]
    return None


def _columns(data: DataConfig, file: str) -> list[str] | None:
    """The names in a file; None if it has none, or isn't read as a file."""
    if data.dataset_type == "ParquetDataset":
        return ParquetSource(ParquetConfig(paths=file)).columns()
    if data.dataset_type == "CsvDataset" and data.with_header:
        return CsvSource(CsvConfig(paths=file, delimiter=data.delimiter, with_header=True), {}).columns()
    return None
