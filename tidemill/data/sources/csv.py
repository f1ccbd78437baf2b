"""Rows from CSV files, local or behind a URL, plain or compressed. One split a file; positions are row numbers.

Two parsers agree on what a row is: `csv_scan` says where rows end (to count them, and to skip those that aren't wanted), Arrow
makes columns of the blocks that hold wanted ones.
"""

from __future__ import annotations

import bisect
import hashlib
import re
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from tidemill.config.base import Config, Seconds
from tidemill.data.intervals import IntervalSet
from tidemill.data.source import Source, SplitReader
from tidemill.data.sources.csv_scan import Scan, scan
from tidemill.data.sources.file_rows import Piece, cut, overlap, raw_batch, times_of
from tidemill.data.sources.files import FileSet, FoundFile, Place, compare, in_parallel, reading
from tidemill.data.sources.outage import OUTAGE_TIMEOUT_S, PersistentReader
from tidemill.data.split import RawBatch, Split, SplitId
from tidemill.errors import ConfigError, DataError, SchemaError, SourceChangedError

# Text parsed at once: large enough that the cost of a call vanishes, small enough to stay in a core's cache.
_BLOCK = 1 << 20
# Blocks parsed at once, while rows of earlier ones are given: one thread parses less than a disk gives.
_PARSERS = 2
# A quote that is never closed would otherwise take the whole file into memory.
_MAX_RECORD = 64 << 20
# A file is entered at one of at most so many marks; nearer ones than this aren't worth it.
_MARKS = 32
_MARK_EVERY = 16 << 20
_CODECS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
_BOM = b"\xef\xbb\xbf"
_NOTHING = memoryview(b"")
_SAME = ("size", "rows", "digest", "etag")
_ARROW_COLUMN = re.compile(r"In CSV column #\d+: (?:Row #(\d+): )?(.*)", re.DOTALL)


class CsvConfig(Config):
    """CSV files."""

    paths: str
    """Files or glob patterns, separated by commas; each a local path or a URL (s3://..., hdfs://...)."""
    delimiter: str = ","
    """Separator of columns: one ASCII character."""
    with_header: bool = False
    """The first line of each file names its columns."""
    names: tuple[str, ...] = ()
    """Names of the columns in files without a header, in their order."""
    event_time_column: str | None = None
    """Event time: a number of Unix seconds. Absent: rows have no event time."""
    outage_timeout_s: Seconds = OUTAGE_TIMEOUT_S
    """How long a file is tried again whose store fails."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Whole rows of a file. `first`: the number of the first; `line`: the line it begins on, from 1; `stop`: the offset of what
    comes next in the text; `may_be_empty`: whether a value may be."""

    text: memoryview
    first: int
    rows: int
    line: int
    stop: int
    next_line: int
    may_be_empty: bool = True


@dataclass(frozen=True, slots=True)
class _FirstRow:
    """A file's first row. `size`, `lines`: how many bytes and lines it takes, with blank ones before it; `line`: its number."""

    values: list[str]
    size: int
    lines: int
    line: int


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where a block begins: its offset in the text, the number of its first row, and its line."""

    offset: int
    row: int
    line: int


class CsvSource(Source):
    """Files in the order of their names; a file matched twice is read once. What ends in .gz, .zst, .bz2 or .lz4 is decompressed.

    `types`: the columns to read, with the type that each has in all files. Empty values are null; in columns of numbers, so are
    the usual words for it (NULL, NaN, N/A). Quotes are as in RFC 4180; blank lines are nothing.
    Discovering reads all of every file, once: only that tells how many rows there are, and that they are still the same.
    """

    kind = "csv"
    bounded = True
    Config = CsvConfig

    def __init__(self, config: CsvConfig, types: Mapping[str, pa.DataType]) -> None:
        self._check(config, types)
        self._config = config
        self._types = dict(types)
        self._delimiter = ord(config.delimiter)
        self._conversion = _conversion(self._types)
        self._files = FileSet(config.paths, "CSV file", "*.csv")

    def discover(self) -> list[Split]:
        """All files. Raises DataError if a pattern matches none, or for a row with too many or too few values (naming file and
        line), SchemaError for a column that is missing."""
        return in_parallel(self._read_through, self._files.find())

    def columns(self) -> list[str]:
        """Names of the first file's columns."""
        path = self._files.find()[0].path
        text = _Text(self._files.place(path), path)
        try:
            return self.begin(text)[0]
        finally:
            text.close()

    def open(self, split: Split, remaining: IntervalSet | None, done: IntervalSet) -> SplitReader:
        wanted = IntervalSet.of([(0, split.num_rows or 0)]) if remaining is None else remaining
        return PersistentReader(split.id, wanted, lambda left: self._open(split, left), timeout_s=self._config.outage_timeout_s)

    def _open(self, split: Split, wanted: IntervalSet) -> SplitReader:
        place = self._files.place(split.id.name)
        # Whether the content is still the same was found out when it was discovered; reading it all again here would cost as much.
        compare(split.id, split.fingerprint, place.stat(split.id.name).fingerprint(), _SAME)
        return _FileReader(self, split, _Text(place, split.id.name), wanted)

    def verify(self, split: Split, fingerprint: dict[str, Any]) -> None:
        compare(split.id, fingerprint, split.fingerprint, _SAME)

    @property
    def time_column(self) -> str | None:
        return self._config.event_time_column

    def begin(self, text: _Text) -> tuple[list[str], _Mark]:
        """The file's columns, and where its rows begin. Raises SchemaError if one that is needed isn't among them."""
        at = text.skip_bom()
        first, names = self._first_row(text, at), list(self._config.names)
        if not self._config.with_header:
            self._refuse_header(text.path, first)
            self._require(text.path, names, names)
            return names, _Mark(at, 0, 1)
        if first is None:
            raise SchemaError(f"{text.path}: no header in its first line; the file is empty: remove it, or write the header")
        names = [value.strip() for value in first.values]
        self._require(f"{text.path}, line {first.line}", names, first.values)
        twice = [name for name in self._types if names.count(name) > 1]
        if twice:
            raise SchemaError(f"{text.path}: its header names column {twice[0]!r} twice")
        return names, _Mark(at + first.size, 0, 1 + first.lines)

    def blocks(self, text: _Text, num_values: int, mark: _Mark) -> Iterator[_Block]:
        """The rows from a mark on. Raises DataError naming the line of a row with another number of values."""
        text.go_to(mark.offset)
        row, line, offset = mark.row, mark.line, mark.offset
        kept = _NOTHING
        while True:
            chunk = text.read(_BLOCK, behind=kept)
            is_end = len(chunk) == len(kept)
            found = scan(np.frombuffer(chunk, np.uint8), self._delimiter, num_values, is_end=is_end)
            self._check_scan(text.path, found, line, num_values, size=len(chunk), is_end=is_end)
            offset, next_line = offset + found.size, line + found.lines
            if found.rows:
                yield _Block(chunk[: found.size], row, found.rows, line, offset, next_line, found.may_be_empty)
            row, line, kept = row + found.rows, next_line, chunk[found.size :]
            if is_end:
                return

    def parse(self, path: str, names: list[str], block: _Block) -> pa.Table:
        """A block's columns. Raises DataError naming line and column of a value that isn't of its type."""
        try:
            table = self._arrow(block, names, self._conversion)
        except pa.ArrowException as error:
            raise self._value_error(path, names, block, error) from None
        if table.num_rows != block.rows:
            raise DataError(f"{path}, line {block.line}: {table.num_rows} rows were read where {block.rows} were counted")
        if not block.may_be_empty:
            return table
        columns = [_empty_as_null(column) if pa.types.is_string(column.type) else column for column in table.columns]
        return pa.Table.from_arrays(columns, schema=table.schema)

    def _arrow(self, block: _Block, names: list[str], conversion: pyarrow.csv.ConvertOptions) -> pa.Table:
        return pyarrow.csv.read_csv(
            pa.BufferReader(pa.py_buffer(block.text)),
            read_options=pyarrow.csv.ReadOptions(
                column_names=names, use_threads=False, block_size=max(len(block.text) + 1, 1 << 16)
            ),
            parse_options=pyarrow.csv.ParseOptions(delimiter=self._config.delimiter, newlines_in_values=True),
            convert_options=conversion,
        )

    def _read_through(self, file: FoundFile) -> Split:
        """A file as a split: its rows counted, its content digested."""
        text = _Text(self._files.place(file.path), file.path)
        marks: list[_Mark] = []
        step = max(_MARK_EVERY, file.size // _MARKS)
        try:
            names, start = self.begin(text)
            rows, offset = 0, start.offset
            text.start_digest(names if self._config.with_header else [])
            for block in self.blocks(text, len(names), start):
                rows += block.rows
                if not text.is_compressed and block.stop - offset >= step:
                    offset = block.stop
                    marks.append(_Mark(offset, rows, block.next_line))
            digest = text.digest
        finally:
            text.close()
        fingerprint = {**file.fingerprint(), "rows": rows, "digest": digest}
        if marks:
            fingerprint["marks"] = [[mark.offset, mark.row, mark.line] for mark in marks]
        return Split(SplitId(self.kind, file.path), rows, fingerprint)

    def _first_row(self, text: _Text, at: int) -> _FirstRow | None:
        """The values of the first row; None if there is none. Raises SchemaError for a header that isn't text."""
        text.go_to(at)
        start = _NOTHING
        while True:
            known, start = len(start), text.read(_BLOCK, behind=start)
            is_end = len(start) - known < _BLOCK
            found = scan(np.frombuffer(start, np.uint8), self._delimiter, 0, is_end=is_end, max_rows=1)
            self._check_scan(text.path, replace(found, odd_line=-1), 1, 0, size=len(start), is_end=is_end)
            if found.rows:
                break
            if is_end:
                return None
        block = _Block(start[: found.size], 0, 1, 1, 0, 1)
        plain = [str(number) for number in range(found.odd_values)]
        row = self._arrow(block, plain, _conversion(dict.fromkeys(plain, pa.binary()))).to_pylist()[0]
        try:
            # In a row that is none of names, columns that aren't read may be anything.
            values = [row[name].decode("utf-8", "strict" if self._config.with_header else "replace") for name in plain]
        except UnicodeDecodeError as error:
            raise SchemaError(f"{text.path}, line 1: no header that can be read, which has to be UTF-8 text ({error})") from None
        return _FirstRow(values, found.size, found.lines, 1 + found.odd_line)

    def _require(self, where: str, names: list[str], values: list[str]) -> None:
        """Raise SchemaError for a column that is needed and not there."""
        missing = [name for name in self._types if name not in names]
        if missing:
            hint = "; if this line is a row, set with_header: false and list the columns" if self._config.with_header else ""
            raise SchemaError(f"{where}: no column {missing[0]!r}; it has {', '.join(map(repr, values))}{hint}")

    def _refuse_header(self, path: str, first: _FirstRow | None) -> None:
        """Raise SchemaError if a file that should have no header has one: two names where they belong, or nothing but names."""
        if first is None:
            return
        names = [name.casefold() for name in self._config.names]
        values = [value.strip().casefold() for value in first.values]
        at_home = sum(value == name for value, name in zip(values, names, strict=False))
        if at_home >= 2 or set(values) == set(names):
            raise SchemaError(
                f"{path}, line {first.line}: the columns' names stand where the first row should be; set with_header: true, for"
                " all files of the list, or remove the line"
            )

    def _check_scan(self, path: str, found: Scan, line: int, num_values: int, *, size: int, is_end: bool) -> None:
        if found.stray_line >= 0 and not 0 <= found.odd_line < found.stray_line:
            raise DataError(
                f"{path}, line {line + found.stray_line}: text follows a closing quote in this row; close the quote that was left"
                " open, or write quotes within a value twice"
            )
        if found.odd_line >= 0:
            raise DataError(
                f"{path}, line {line + found.odd_line}: {found.odd_values} values, where {num_values} columns are expected"
                f" (separated by {self._config.delimiter!r})"
            )
        if found.open_line >= 0 and found.in_quotes and (is_end or size - found.size > _MAX_RECORD):
            raise DataError(f"{path}, line {line + found.open_line}: a quoted value begins in this row and never ends")
        if size - found.size > _MAX_RECORD:
            raise DataError(f"{path}, line {line + found.open_line}: this row is longer than {_MAX_RECORD >> 20} MiB")

    def _value_error(self, path: str, names: list[str], block: _Block, error: pa.ArrowException) -> DataError:
        """The error that names what Arrow couldn't convert."""
        for name, kind in self._types.items():
            try:
                self._arrow(block, names, _conversion({name: kind}))
            except pa.ArrowException as own:
                match = _ARROW_COLUMN.match(str(own))
                row = int(match[1]) - 1 if match and match[1] else 0
                before = scan(np.frombuffer(block.text, np.uint8), self._delimiter, len(names), is_end=True, max_rows=row)
                why = match[2] if match else str(own)
                where = f"{path}, line {block.line + before.lines}, column {name!r}"
                hint = self._header_hint(name, why, is_first=block.first + row == 0)
                return DataError(f"{where}: {why}; it is declared as {kind}{hint}")
        return DataError(f"{path}, line {block.line} or later: {error}")

    def _header_hint(self, name: str, why: str, *, is_first: bool) -> str:
        """What to do about a value that may be a column's name."""
        if f"'{name}'" in why:
            return ": it is the column's name, so this line is a header; set with_header, or remove it"
        return "; if this line is a header, set with_header: true" if is_first and not self._config.with_header else ""

    def _check(self, config: CsvConfig, types: Mapping[str, pa.DataType]) -> None:
        if len(config.delimiter) != 1 or not config.delimiter.isascii() or config.delimiter in '"\r\n':
            raise ConfigError(f"delimiter must be one ASCII character, no quote or line end; got {config.delimiter!r}")
        if not config.with_header and not config.names:
            raise ConfigError("CSV files without a header: list all their columns in input_fields, or set with_header")
        for name, kind in types.items():
            if pa.types.is_nested(kind):
                raise ConfigError(f"CSV: column {name!r} is declared as {kind}, but a value is one text: declare STRING")
        if config.event_time_column and config.event_time_column not in types:
            raise ConfigError(f"the event time's column {config.event_time_column!r} isn't among the columns to read")


def _conversion(types: Mapping[str, pa.DataType]) -> pyarrow.csv.ConvertOptions:
    return pyarrow.csv.ConvertOptions(include_columns=list(types), column_types=dict(types))


def _empty_as_null(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of text without nulls; only its validity is made anew, and only if there is an empty one."""
    chunks = column.chunks
    valid = [_is_given(text) for text in chunks]
    if all(given is None for given in valid):
        return column
    return pa.chunked_array([_with_validity(text, given) for text, given in zip(chunks, valid, strict=True)], column.type)


def _is_given(texts: pa.StringArray) -> np.ndarray | None:
    """(n,) bool: which texts have characters; None: all."""
    ends = _ends(texts)
    given = ends[1:] != ends[:-1]
    return None if given.all() else given


def _with_validity(texts: pa.StringArray, given: np.ndarray | None) -> pa.StringArray:
    if given is None:
        return texts
    return pa.StringArray.from_buffers(len(texts), pa.py_buffer(_ends(texts)), texts.buffers()[2], pa.array(given).buffers()[1])


def _ends(texts: pa.StringArray) -> np.ndarray:
    return np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]


class _Text:
    """The text of a file, decompressed by its suffix. Not thread-safe."""

    def __init__(self, place: Place, path: str) -> None:
        self.path = path
        self._place = place
        self._codec = next((codec for suffix, codec in _CODECS.items() if path.endswith(suffix)), None)
        self._stream, self._text = self._open()
        self._at = 0
        self._digest: Any = None

    @property
    def is_compressed(self) -> bool:
        return self._codec is not None

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def start_digest(self, header: list[str]) -> None:
        """Digest a header, and what is read from here on."""
        self._digest = hashlib.sha256("\n".join(header).encode())

    def skip_bom(self) -> int:
        """The offset of the text behind a byte order mark."""
        self.go_to(0)
        return len(_BOM) if self.read(len(_BOM)) == _BOM else 0

    def go_to(self, offset: int) -> None:
        """Continue at an offset; compressed text is read through up to there."""
        if not self.is_compressed:
            self._stream.seek(offset)
        else:
            if offset < self._at:
                self.close()
                self._stream, self._text = self._open()
                self._at = 0
            while self._at < offset:
                if not self.read(min(_BLOCK, offset - self._at)):
                    raise SourceChangedError(f"{self.path}: it ends before byte {offset}, where rows were read before")
        self._at = offset

    def read(self, size: int, behind: memoryview = _NOTHING) -> memoryview:
        """What is behind `behind`, together with it: as many bytes more as asked for, if there are as many. Raises DataError for
        what can't be decompressed."""
        # Arrow's memory comes again and again; new pages for each block would cost as much as reading it.
        data = memoryview(pa.allocate_buffer(len(behind) + size)).cast("B")
        data[: len(behind)] = behind
        stop = len(behind)
        try:
            with reading(self.path):
                while stop < len(data) and (count := self._text.readinto(data[stop:])):
                    stop += count
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path}: can't be read; it is damaged, or has changed ({error})") from error
        self._at += stop - len(behind)
        if self._digest is not None:
            self._digest.update(data[len(behind) : stop])
        return data[:stop]

    def close(self) -> None:
        self._text.close()
        self._stream.close()

    def _open(self) -> tuple[pa.NativeFile, pa.NativeFile]:
        with reading(self.path):
            stream = self._place.open(self.path)
            return stream, stream if self._codec is None else pa.CompressedInputStream(stream, self._codec)


class _FileReader(SplitReader):
    def __init__(self, source: CsvSource, split: Split, text: _Text, wanted: IntervalSet) -> None:
        self._source = source
        self._split = split
        self._text = text
        self._pieces = self._read(wanted)

    def read(self, timeout_s: float) -> RawBatch | None:
        piece = next(self._pieces, None)
        if piece is None:
            raise EOFError
        return raw_batch(self._split.id, piece, times_of(piece.table, self._source.time_column, self._split.id.name))

    def close(self) -> None:
        self._pieces.close()
        self._text.close()

    def _read(self, wanted: IntervalSet) -> Generator[Piece, None, None]:
        """The wanted rows, in order."""
        if not wanted:
            return
        names, start = self._source.begin(self._text)
        parsing: deque[tuple[_Block, Future[pa.Table]]] = deque()
        with ThreadPoolExecutor(_PARSERS, "csv-parse") as pool:
            for block in self._blocks(wanted, names, start):
                parsing.append((block, pool.submit(self._source.parse, self._text.path, names, block)))
                if len(parsing) > _PARSERS:
                    yield _piece(*parsing.popleft(), wanted)
            while parsing:
                yield _piece(*parsing.popleft(), wanted)

    def _blocks(self, wanted: IntervalSet, names: list[str], start: _Mark) -> Iterator[_Block]:
        """The blocks that hold wanted rows; others are scanned only."""
        mark = self._mark_before(wanted.intervals[0][0]) or start
        stop = wanted.intervals[-1][1]
        row = mark.row
        for block in self._source.blocks(self._text, len(names), mark):
            row = block.first + block.rows
            if overlap(wanted, block.first, row):
                yield block
            if row >= stop:
                return
        raise SourceChangedError(f"{self._split.id}: it has {row} rows, {self._split.num_rows} when it was first read")

    def _mark_before(self, row: int) -> _Mark | None:
        """The last mark that isn't behind a row."""
        marks = [_Mark(*entry) for entry in self._split.fingerprint.get("marks", ())]
        place = bisect.bisect_right(marks, row, key=lambda mark: mark.row)
        return marks[place - 1] if place else None


def _piece(block: _Block, parsed: Future[pa.Table], wanted: IntervalSet) -> Piece:
    """The wanted rows of a block. Raises what parsing it raised."""
    return cut(parsed.result(), block.first, overlap(wanted, block.first, block.first + block.rows))
