"""Rows from Parquet files, local or behind a URL. One split a file; positions are row numbers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.config.base import Config
from tidemill.data.event_times import column_times
from tidemill.data.intervals import IntervalSet
from tidemill.data.source import Source, SplitReader
from tidemill.data.split import RawBatch, Run, Split, SplitId, largest
from tidemill.errors import DataError, SchemaError, SourceChangedError

# Rows decoded at once: large enough that the cost of a call vanishes, small enough (tens of megabytes) to start at once.
_ROWS_PER_READ = 32768
# The magic bytes and the length that end every Parquet file.
_TAIL = 8
_FOOTER_READERS = 8


class ParquetConfig(Config):
    """Parquet files."""

    paths: str
    """Files or glob patterns, separated by commas; each a local path or a URL (s3://..., hdfs://...)."""
    event_time_column: str | None = None
    """Event time: a timestamp, or a number of Unix seconds. Absent: rows have no event time."""


@dataclass(frozen=True, slots=True)
class _Footer:
    size: int
    rows: int
    digest: str
    schema: pa.Schema

    def fingerprint(self) -> dict[str, Any]:
        return {"size": self.size, "rows": self.rows, "footer": self.digest}


class ParquetSource(Source):
    """Files in the order of their names, whatever order a store lists them in; a file matched twice is read once.

    `columns`: what to read (the event time's column is added); None: all.
    """

    kind = "parquet"
    bounded = True
    Config = ParquetConfig

    def __init__(self, config: ParquetConfig, columns: Collection[str] | None = None) -> None:
        self._config = config
        self._columns = None if columns is None else list(columns)
        if self._columns is not None and config.event_time_column and config.event_time_column not in self._columns:
            self._columns.append(config.event_time_column)

    def discover(self) -> list[Split]:
        """All files. Raises DataError if a pattern matches none, SchemaError for a column that is missing or whose type differs
        between files."""
        paths = sorted({path for pattern in self._patterns() for path in _matches(pattern)})
        with ThreadPoolExecutor(_FOOTER_READERS, "parquet-footer") as pool:
            footers = list(pool.map(_read_footer, paths))
        for path, footer in zip(paths, footers, strict=True):
            self._check_schema(path, footer.schema, paths[0], footers[0].schema)
        return [
            Split(SplitId(self.kind, path), footer.rows, footer.fingerprint()) for path, footer in zip(paths, footers, strict=True)
        ]

    def open(self, split: Split, remaining: IntervalSet | None, done: IntervalSet) -> SplitReader:
        footer = _read_footer(split.id.name)
        _compare(split.id, split.fingerprint, footer.fingerprint())
        self._check_schema(split.id.name, footer.schema, split.id.name, footer.schema)
        wanted = IntervalSet.of([(0, footer.rows)]) if remaining is None else remaining
        return _FileReader(split.id, wanted, self._needed(footer.schema), self._config.event_time_column)

    def verify(self, split: Split, fingerprint: dict[str, Any]) -> None:
        _compare(split.id, fingerprint, split.fingerprint)

    def _patterns(self) -> list[str]:
        patterns = [pattern.strip() for pattern in self._config.paths.split(",")]
        return [pattern for pattern in patterns if pattern]

    def _needed(self, schema: pa.Schema) -> list[str]:
        return schema.names if self._columns is None else self._columns

    def _check_schema(self, path: str, schema: pa.Schema, first_path: str, first: pa.Schema) -> None:
        for name in self._needed(first):
            if name not in schema.names:
                raise SchemaError(f"{path}: no column {name!r}; it has {', '.join(schema.names)}")
            if name in first.names and schema.field(name).type != first.field(name).type:
                types = f"{schema.field(name).type}, but {first.field(name).type} in {first_path}"
                raise SchemaError(f"{path}: column {name!r} is {types}; all files must agree")


class _FileReader(SplitReader):
    def __init__(self, split: SplitId, wanted: IntervalSet, columns: list[str], time_column: str | None) -> None:
        self._split = split
        self._time_column = time_column
        self._stream, local = _open(split.name)
        # Memory maps need no read-ahead; remote column chunks are better fetched in few large requests.
        self._file = pq.ParquetFile(self._stream, pre_buffer=not local)
        self._pieces = self._read_pieces(wanted, columns)

    def read(self, timeout_s: float) -> RawBatch | None:
        try:
            first, table = next(self._pieces, (0, None))
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self._split.name}: its rows can't be read; it is damaged, or has changed ({error})") from error
        if table is None:
            raise EOFError
        times = None
        if self._time_column is not None:
            times = column_times(table.column(self._time_column), where=f"{self._split.name}: column {self._time_column!r}")
        run = Run(self._split, first, first + table.num_rows, table.num_rows, event_time=largest(times, 0, table.num_rows))
        return RawBatch(table, (run,), times)

    def close(self) -> None:
        self._pieces.close()
        self._file.close()
        self._stream.close()

    def _read_pieces(self, wanted: IntervalSet, columns: list[str]) -> Generator[tuple[int, pa.Table], None, None]:
        """(number of the first row, rows), without reading row groups that hold none of the wanted rows."""
        sizes = [self._file.metadata.row_group(group).num_rows for group in range(self._file.metadata.num_row_groups)]
        ends = np.cumsum(sizes, dtype=np.int64)
        for start, stop in wanted:
            first_group = int(np.searchsorted(ends, start, side="right"))
            last_group = int(np.searchsorted(ends, stop, side="left"))
            at = int(ends[first_group]) - sizes[first_group]
            groups = list(range(first_group, last_group + 1))
            for batch in self._file.iter_batches(_ROWS_PER_READ, row_groups=groups, columns=columns):
                low, high = max(start - at, 0), min(stop - at, batch.num_rows)
                if low < high:
                    yield at + low, pa.Table.from_batches([batch.slice(low, high - low)])
                at += batch.num_rows
                if at >= stop:
                    break


def _compare(split: SplitId, saved: dict[str, Any], found: dict[str, Any]) -> None:
    differences = [f"{key} was {value}, is {found.get(key)}" for key, value in saved.items() if found.get(key) != value]
    if differences:
        raise SourceChangedError(
            f"{split} changed since it was first read ({'; '.join(differences)}); restore it, or start a new run"
        )


def _matches(pattern: str) -> list[str]:
    """Absolute paths, or URLs, of the files that a pattern names."""
    files, path = fsspec.core.url_to_fs(pattern)
    found = [name for name in files.glob(path) if not files.isdir(name)]
    if not found:
        hint = f"; it is a folder: write {pattern.rstrip('/')}/*.parquet" if files.isdir(path) else ""
        raise DataError(f"no Parquet file matches {pattern!r}{hint}")
    if "file" in files.protocol:
        return [os.path.abspath(name) for name in found]
    return [files.unstrip_protocol(name) for name in found]


def _open(path: str) -> tuple[pa.NativeFile, bool]:
    """An open file, and whether it is local."""
    try:
        if "://" not in path:
            return pa.memory_map(path), True
        files, name = fsspec.core.url_to_fs(path)
        return pa.PythonFile(files.open(name, "rb"), mode="r"), False
    except FileNotFoundError:
        raise SourceChangedError(f"{path}: the file is gone; put it back to go on") from None


def _read_footer(path: str) -> _Footer:
    stream, _ = _open(path)
    with stream:
        size = stream.size()
        if size < _TAIL:
            raise DataError(f"{path}: not a Parquet file ({size} bytes)")
        stream.seek(size - _TAIL)
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(max(0, size - _TAIL - length))
        digest = hashlib.sha256(stream.read(length)).hexdigest()
        try:
            file = pq.ParquetFile(stream)
        except pa.ArrowInvalid as error:
            raise DataError(f"{path}: not a Parquet file ({error})") from None
        return _Footer(size, file.metadata.num_rows, digest, file.schema_arrow)
