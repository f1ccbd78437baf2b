"""Rows from Parquet files, local or behind a URL. One split a file; positions are row numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.config.base import Config, Seconds
from tidemill.data.intervals import IntervalSet
from tidemill.data.source import Source, SplitReader
from tidemill.data.sources.file_rows import Piece, cut, overlap, plain, plain_type, raw_batch, times_of
from tidemill.data.sources.files import FileSet, FoundFile, Place, compare, in_parallel, reading
from tidemill.data.sources.outage import OUTAGE_TIMEOUT_S, PersistentReader
from tidemill.data.split import RawBatch, Split, SplitId
from tidemill.errors import DataError, SchemaError

# Rows decoded at once: large enough that the cost of a call vanishes, small enough (tens of megabytes) to start at once.
_ROWS_PER_READ = 32768
# The magic bytes and the length that end every Parquet file.
_TAIL = 8
_SAME = ("size", "rows", "footer", "etag")


class ParquetConfig(Config):
    """Parquet files."""

    paths: str
    """Files or glob patterns, separated by commas; each a local path or a URL (s3://..., hdfs://...)."""
    event_time_column: str | None = None
    """Event time: a timestamp, or a number of Unix seconds. Absent: rows have no event time."""
    outage_timeout_s: Seconds = OUTAGE_TIMEOUT_S
    """How long a file is tried again whose store fails."""


@dataclass(frozen=True, slots=True)
class Footer:
    """What the end of a file says. `digest`: of its bytes, which hold sizes and statistics of all columns."""

    rows: int
    digest: str
    schema: pa.Schema

    def fingerprint(self, file: FoundFile) -> dict[str, Any]:
        return {**file.fingerprint(), "rows": self.rows, "footer": self.digest}


class ParquetSource(Source):
    """Files in the order of their names, whatever order a store lists them in; a file matched twice is read once.

    `columns`: what to read (the event time's column is added); None: all.
    """

    kind = "parquet"
    bounded = True
    Config = ParquetConfig

    def __init__(self, config: ParquetConfig, columns: Collection[str] | None = None) -> None:
        self._files = FileSet(config.paths, "Parquet file", "*.parquet")
        self._time_column = config.event_time_column
        self._outage_timeout_s = config.outage_timeout_s
        self._columns = None if columns is None else list(columns)
        if self._columns is not None and config.event_time_column and config.event_time_column not in self._columns:
            self._columns.append(config.event_time_column)
        self._types: dict[str, pa.DataType | None] = {}

    def discover(self) -> list[Split]:
        """All files. Raises DataError if a pattern matches none, SchemaError for a column that is missing or whose type differs
        between files."""
        files = self._files.find()
        footers = in_parallel(lambda file: read_footer(self._files.place(file.path), file), files)
        known: dict[str, tuple[pa.DataType, str]] = {}
        for file, footer in zip(files, footers, strict=True):
            self._check_schema(file.path, footer.schema, known)
        return [
            Split(SplitId(self.kind, file.path), footer.rows, footer.fingerprint(file))
            for file, footer in zip(files, footers, strict=True)
        ]

    def columns(self) -> list[str]:
        """Names of the first file's columns."""
        file = self._files.find()[0]
        return list(read_footer(self._files.place(file.path), file).schema.names)

    def open(self, split: Split, remaining: IntervalSet | None, done: IntervalSet) -> SplitReader:
        wanted = IntervalSet.of([(0, split.num_rows or 0)]) if remaining is None else remaining
        return PersistentReader(split.id, wanted, lambda left: self._open(split, left), timeout_s=self._outage_timeout_s)

    def _open(self, split: Split, wanted: IntervalSet) -> SplitReader:
        place = self._files.place(split.id.name)
        file = place.stat(split.id.name)
        footer = read_footer(place, file)
        compare(split.id, split.fingerprint, footer.fingerprint(file), _SAME)
        self._check_schema(file.path, footer.schema, {})
        names = self._needed(footer.schema)
        empty = [name for name in names if pa.types.is_null(footer.schema.field(name).type)]
        types = {name: kind for name in empty if (kind := self._type_elsewhere(name)) is not None}
        return _FileReader(split.id, ParquetRows(place, file.path, names, types), wanted, self._time_column)

    def verify(self, split: Split, fingerprint: dict[str, Any]) -> None:
        compare(split.id, fingerprint, split.fingerprint, _SAME)

    def _needed(self, schema: pa.Schema) -> list[str]:
        return schema.names if self._columns is None else self._columns

    def _check_schema(self, path: str, schema: pa.Schema, known: dict[str, tuple[pa.DataType, str]]) -> None:
        """Compare a file's columns with those of the files before it, and add them. One that holds nothing but nulls may have no
        type of its own."""
        for name in self._needed(schema):
            if name not in schema.names:
                raise SchemaError(f"{path}: no column {name!r}; it has {', '.join(schema.names)}")
            if schema.names.count(name) > 1:
                raise SchemaError(f"{path}: it has column {name!r} twice")
            found = schema.field(name).type
            if pa.types.is_null(found):
                continue
            first, first_path = known.setdefault(name, (found, path))
            if plain_type(found) != plain_type(first):
                types = f"{found}, but {first} in {first_path}"
                raise SchemaError(f"{path}: column {name!r} is {types}; all files must agree")

    def _type_elsewhere(self, name: str) -> pa.DataType | None:
        """The type that a column has in the first file in which it has one."""
        if name not in self._types:
            self._types[name] = None
            for file in self._files.find():
                schema = read_footer(self._files.place(file.path), file).schema
                if name in schema.names and not pa.types.is_null(schema.field(name).type):
                    self._types[name] = plain_type(schema.field(name).type)
                    break
        return self._types[name]


class ParquetRows:
    """An open file. Raises DataError if it isn't Parquet's. Rows come as plain types: text isn't large, values aren't encoded by a
    dictionary. `types`: of columns that are read as another type than their own."""

    def __init__(self, place: Place, path: str, columns: list[str], types: Mapping[str, pa.DataType] | None = None) -> None:
        self._path = path
        self._types = types or {}
        self._columns = columns
        self._stream = place.open(path)
        # Local files need no read-ahead; remote column chunks are better fetched in few large requests.
        try:
            with reading(path):
                self._file = pq.ParquetFile(self._stream, pre_buffer=not place.is_local)
        except (OSError, pa.ArrowException) as error:
            self._stream.close()
            raise DataError(f"{path}: not a Parquet file ({error})") from None
        self.num_rows: int = self._file.metadata.num_rows
        self.schema: pa.Schema = self._file.schema_arrow

    def pieces(self, wanted: IntervalSet) -> Generator[Piece, None, None]:
        """The wanted rows, in order, without reading row groups that hold none of them.

        Raises DataError for what can't be decoded.
        """
        try:
            with reading(self._path):
                yield from self._pieces(wanted)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self._path}: its rows can't be read; it is damaged, or has changed ({error})") from error

    def close(self) -> None:
        self._file.close()
        self._stream.close()

    def _pieces(self, wanted: IntervalSet) -> Generator[Piece, None, None]:
        first = 0
        # One group at a time: what is read ahead of a remote file is never more than that.
        for group in range(self._file.metadata.num_row_groups):
            stop = first + self._file.metadata.row_group(group).num_rows
            here = overlap(wanted, first, stop)
            if here:
                yield from self._group(group, first, IntervalSet(here))
            first = stop

    def _group(self, group: int, first: int, wanted: IntervalSet) -> Generator[Piece, None, None]:
        for batch in self._file.iter_batches(_ROWS_PER_READ, row_groups=[group], columns=self._columns):
            runs = overlap(wanted, first, first + batch.num_rows)
            if runs:
                piece = cut(pa.Table.from_batches([batch]), first, runs)
                yield Piece(piece.runs, plain(piece.table, self._types))
            first += batch.num_rows
            if first >= wanted.intervals[-1][1]:
                return


class _FileReader(SplitReader):
    def __init__(self, split: SplitId, rows: ParquetRows, wanted: IntervalSet, time_column: str | None) -> None:
        self._split = split
        self._time_column = time_column
        self._rows = rows
        self._pieces = rows.pieces(wanted)

    def read(self, timeout_s: float) -> RawBatch | None:
        piece = next(self._pieces, None)
        if piece is None:
            raise EOFError
        return raw_batch(self._split, piece, times_of(piece.table, self._time_column, self._split.name))

    def close(self) -> None:
        self._pieces.close()
        self._rows.close()


def read_footer(place: Place, file: FoundFile) -> Footer:
    """What the end of a file says. Raises DataError if it isn't Parquet's."""
    if file.size < _TAIL:
        raise DataError(f"{file.path}: not a Parquet file ({file.size} bytes)")
    with place.open(file.path) as stream:
        try:
            with reading(file.path):
                stream.seek(file.size - _TAIL)
                length = int.from_bytes(stream.read(4), "little")
                stream.seek(max(0, file.size - _TAIL - length))
                digest = hashlib.sha256(stream.read(length)).hexdigest()
                found = pq.ParquetFile(stream)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file.path}: not a Parquet file ({error})") from None
        return Footer(found.metadata.num_rows, digest, found.schema_arrow)
