"""A folder as a stream: files that appear in it are read once each, in the order of their names.

A file belongs to a split by a hash of its name, so that ranks share a folder without a word between them. A split gives each file
that it takes a number; a position is `number << FILE_ROW_BITS | row`. The numbers are kept in checkpoints beside the positions.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Protocol

import pyarrow as pa

from tidemill.config.data import FolderConfig
from tidemill.contracts.progress import FILE_ROW_BITS, SplitState
from tidemill.data.assignment import Assigned
from tidemill.data.dead_letters import DeadLetters
from tidemill.data.intervals import IntervalSet
from tidemill.data.messages.columns import Fitting
from tidemill.data.messages.decoder import ColumnError, Columns
from tidemill.data.source import Source, SplitReader
from tidemill.data.sources.file_rows import Piece, raw_batch, times_of
from tidemill.data.sources.files import FoundFile, locate, reading, require_text
from tidemill.data.sources.ipc import IpcRows
from tidemill.data.sources.outage import Outage
from tidemill.data.sources.parquet import ParquetRows
from tidemill.data.sources.taken import TakenFile, TakenFiles
from tidemill.data.split import RawBatch, Run, Split, SplitId
from tidemill.errors import DataError, SchemaError, SourceChangedError, StorageError
from tidemill.logs import log

_IPC = (".arrow", ".ipc", ".feather")
# Writers' own files: what isn't finished, and notes beside the data.
_HIDDEN = (".", "_")
_LISTING_SHARE = 10


class Rows(Protocol):
    """An open file of rows."""

    num_rows: int
    schema: pa.Schema

    def pieces(self, wanted: IntervalSet) -> Iterator[Piece]:
        """The wanted rows, in order."""
        ...

    def close(self) -> None: ...


class FolderSource(Source):
    """The files below a folder (a path or URL) whose names match the config's pattern: Arrow files by their suffix, else Parquet.

    `columns`: what to read, as which type; None: that of the first file. The event time's column is added. Files that begin with
    "." or "_", or lie in such a folder, are left alone: writers must write under such a name, and rename. A file that can't be
    read yet is tried again for `incomplete_timeout_s`. One that appears late is read all the same; one that changes is an error.
    `dead_letters`: is told how many rows are read.
    """

    kind = "folder"
    bounded = False
    Config = FolderConfig

    def __init__(
        self,
        config: FolderConfig,
        path: str,
        columns: Columns,
        *,
        event_time_column: str | None = None,
        dead_letters: DeadLetters | None = None,
    ) -> None:
        self.config = config
        self.dead_letters = dead_letters
        self.place, self.root = locate(path)
        self.time_column = event_time_column
        self.columns: Columns = {**columns, **({event_time_column: columns.get(event_time_column)} if event_time_column else {})}
        self._taken: dict[SplitId, TakenFiles] = {}

    def discover(self) -> list[Split]:
        """The splits: as many as the config says, whatever the folder holds. Raises DataError if it isn't a folder."""
        if not self.place.files.isdir(self.root):
            raise DataError(f"{self.url}: no such folder; make it before the stream starts")
        number = self.config.num_splits
        return [Split(SplitId(self.kind, f"{self.url}:{index}"), None, {"num_splits": number}) for index in range(number)]

    def open(self, split: Split, remaining: IntervalSet | None, done: IntervalSet) -> SplitReader:
        return self.open_all([Assigned(split, remaining, done)])

    def open_all(self, assigned: Sequence[Assigned], mine: Callable[[SplitId], bool] | None = None) -> SplitReader:
        """One reader of all the rank's splits, in the order of their files' names."""
        parts = []
        for part in assigned:
            taken = self._taken[part.split.id] = TakenFiles(part.split.fingerprint)
            parts.append(_Part(part.split.id, int(part.split.id.name.rpartition(":")[2]), taken, part.done))
        return _FolderReader(self, parts)

    def verify(self, split: Split, fingerprint: dict[str, Any]) -> None:
        was, found = fingerprint.get("num_splits", self.config.num_splits), self.config.num_splits
        if was != found:
            raise SourceChangedError(f"{split.id}: the folder was read as {was} splits; set data_config.folder.num_splits to {was}")

    def resumed(self, splits: Sequence[Split], states: Mapping[SplitId, SplitState]) -> list[Split]:
        return [Split(s.id, None, states[s.id].fingerprint or s.fingerprint) if s.id in states else s for s in splits]

    def describe(self, split: Split, done: IntervalSet) -> dict[str, Any]:
        taken = self._taken.get(split.id)
        if taken is None:
            return split.fingerprint
        return {"num_splits": self.config.num_splits, **taken.describe(done, time.monotonic())}

    def place_of(self, split: SplitId, position: int) -> dict[str, Any]:
        taken = self._taken.get(split)
        name = taken.name(position >> FILE_ROW_BITS) if taken else None
        return {"split": split.name, "file": name, "row": position & ((1 << FILE_ROW_BITS) - 1)}

    @property
    def url(self) -> str:
        """The folder's name: the same however its path was worded."""
        return self.place.identity(self.root).rstrip("/")

    def path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def listing(self) -> dict[str, FoundFile]:
        """All files that count, by their names below the folder. Raises StorageError."""
        try:
            with reading(self.url):
                found = self.place.tree(self.root)
        except OSError as error:
            raise StorageError(f"{self.url}: {type(error).__name__}: {error}") from error
        # In an object store a folder is nothing but its files. A local one that is gone isn't an empty one: what it held would be
        # forgotten, and read again once it is back.
        if not found and self.place.is_local and not self.place.files.isdir(self.root):
            raise StorageError(f"{self.url}: the folder is gone")
        require_text(file.path for file in found)
        files = {file.path.removeprefix(self.url).lstrip("/"): file for file in found}
        return {name: file for name, file in files.items() if self._counts(name)}

    def split_of(self, name: str) -> int:
        """The number of the split that a file belongs to."""
        return zlib.crc32(name.encode()) % self.config.num_splits

    def rows(self, name: str) -> Rows:
        """A file, opened. Raises DataError if it can't be read, SchemaError naming a column that it lacks, or has twice."""
        path = self.path(name)
        rows: Rows = (IpcRows if name.endswith(_IPC) else ParquetRows)(self.place, path, list(self.columns))
        names = rows.schema.names
        wrong = [column for column in self.columns if names.count(column) != 1]
        if wrong or rows.num_rows >> FILE_ROW_BITS:
            rows.close()
            if wrong and wrong[0] in names:
                raise SchemaError(f"{path}: it has column {wrong[0]!r} twice")
            if wrong:
                raise SchemaError(f"{path}: no column {wrong[0]!r}; it has {', '.join(names)}")
            raise DataError(f"{path}: {rows.num_rows} rows are too many for one file")
        return rows

    def _counts(self, name: str) -> bool:
        *folders, own = name.split("/")
        return fnmatchcase(own, self.config.pattern) and not any(part.startswith(_HIDDEN) for part in (*folders, own))


@dataclass(frozen=True, slots=True)
class _Part:
    """One of the rank's splits."""

    id: SplitId
    number: int
    taken: TakenFiles
    done: IntervalSet


@dataclass(slots=True)
class _OpenFile:
    """`given`: positions of the file up to here were given, or aren't wanted."""

    part: _Part
    file: TakenFile
    rows: Rows
    pieces: Iterator[Piece]
    given: int


class _FolderReader(SplitReader):
    """First what an earlier run had taken and not finished, then new files in the order of their names."""

    def __init__(self, source: FolderSource, parts: Sequence[_Part]) -> None:
        self._source = source
        self._parts = {part.number: part for part in parts}
        left = [(file, part) for part in parts for file in part.taken.left(part.done)]
        self._left = deque(sorted(left, key=lambda pair: (pair[0].name, pair[1].number)))
        self._open: _OpenFile | None = None
        self._pending: deque[str] = deque()
        self._waiting: frozenset[int] = frozenset(self._parts)
        self._incomplete: dict[str, float] = {}
        self._next_listing = 0.0
        self._outage = Outage(source.config.outage_timeout_s)
        self._failing_since: float | None = None
        self._fitting = Fitting(source.columns, f"folder {source.url}")
        self._first: str | None = None
        self._pause = threading.Event()

    def read(self, timeout_s: float) -> RawBatch | None:
        until = time.monotonic() + timeout_s
        while True:
            if self._outage.again_at > time.monotonic():
                if self._pause.wait(max(0.0, min(until, self._outage.again_at) - time.monotonic())):
                    return None
            elif self._open is not None:
                raw = self._try_rows(self._open)
                if raw is not None:
                    return raw
            elif not self._try_open_next() and self._pause.wait(max(0.0, min(until, self._next_listing) - time.monotonic())):
                return None
            if self._open is None and time.monotonic() >= until:
                return None

    def is_caught_up(self, split: SplitId) -> bool:
        """Whether the newest listing shows no file of the split that is still to be read."""
        return int(split.name.rpartition(":")[2]) not in self._waiting

    def close(self) -> None:
        self._pause.set()
        if self._open is not None:
            self._open.rows.close()
            self._open = None

    def _try_rows(self, opened: _OpenFile) -> RawBatch | None:
        """The same as `_next_rows`; if the store fails, the file is opened again where its unread rows begin."""
        try:
            raw = self._next_rows(opened)
        except StorageError as error:
            opened.rows.close()
            self._open = None
            given = IntervalSet.of([(opened.file.start, opened.given)])
            self._left.appendleft((opened.file, replace(opened.part, done=opened.part.done | given)))
            where = f"{self._source.path(opened.file.name)}, row {opened.given - opened.file.start}"
            self._outage.failed(error, where)
            return None
        if raw is not None:
            opened.given = raw.runs[-1].stop
            self._outage.over()
        return raw

    def _try_open_next(self) -> bool:
        """Look what is new if it is time to, then the same as `_open_next`; a store that fails is tried again."""
        if not self._left and (not self._pending or time.monotonic() >= self._next_listing):
            self._list()
        try:
            return self._open_next()
        except StorageError as error:
            self._outage.failed(error, self._next_place())
            return False

    def _next_place(self) -> str:
        """What is to be read next, for errors."""
        if not self._left:
            return self._source.path(self._pending[0])
        file, part = self._left[0]
        return f"{self._source.path(file.name)}, row {part.done.first_gap(file.start) - file.start}"

    def _next_rows(self, opened: _OpenFile) -> RawBatch | None:
        """The next rows of the open file; None, and it is closed, if there are no more."""
        file, num_rows = opened.file, opened.rows.num_rows
        piece = next(opened.pieces, None)
        is_end = piece is None or piece.runs[-1][1] == num_rows
        if is_end:
            opened.rows.close()
            self._open = None
        if piece is None:
            if num_rows:
                return None
            # Its positions are done with once a later row is trained.
            run = Run(opened.part.id, file.start, file.stop, 0, gap=file.stop - file.start)
            return RawBatch(self._fitting.empty(), (run,))
        path = self._source.path(file.name)
        piece = Piece(piece.runs, self._fit(piece.table, path))
        if self._source.dead_letters is not None:
            self._source.dead_letters.passed(piece.table.num_rows)
        raw = raw_batch(opened.part.id, piece, times_of(piece.table, self._source.time_column, path), shift=file.start)
        if not is_end:
            return raw
        # The file's last row is done with all positions up to the next file's.
        *runs, last = raw.runs
        return replace(raw, runs=(*runs, replace(last, stop=file.stop)))

    def _open_next(self) -> bool:
        """Open what is to be read next; False if there is nothing."""
        if self._left:
            file, part = self._left[0]
            self._check_same(file, self._source.place.stat(self._source.path(file.name)))
            self._opened(part, file, self._source.rows(file.name))
            self._left.popleft()
            return True
        while self._pending:
            is_taken = self._take(self._pending[0])
            self._pending.popleft()
            if is_taken:
                return True
        return False

    def _take(self, name: str) -> bool:
        """Open a new file and give it its number; False if it isn't finished, or gone again."""
        part = self._parts[self._source.split_of(name)]
        try:
            rows, found = self._finished(name)
        except SchemaError:
            raise
        except SourceChangedError:
            log.warning("%s appeared and is gone again; it wasn't read", self._source.path(name))
            return False
        except DataError as error:
            since = self._incomplete.setdefault(name, time.monotonic())
            timeout_s = self._source.config.incomplete_timeout_s
            if time.monotonic() - since >= timeout_s:
                raise DataError(
                    f"{error}, for {timeout_s:g} s now. Remove it, or finish it; writers must write under a name that begins"
                    " with '.' or '_', and rename the file once it is complete"
                ) from None
            return False
        self._opened(part, part.taken.take(name, found.size, found.etag), rows)
        return True

    def _finished(self, name: str) -> tuple[Rows, FoundFile]:
        """A file, opened, and what it is now that it can be read: the listing may have seen half of it."""
        rows = self._source.rows(name)
        try:
            return rows, self._source.place.stat(self._source.path(name))
        except BaseException:
            rows.close()
            raise

    def _opened(self, part: _Part, file: TakenFile, rows: Rows) -> None:
        self._check(rows, self._source.path(file.name))
        wanted = IntervalSet.of([(file.start, file.start + rows.num_rows)]) - part.done
        own = IntervalSet.of((start - file.start, stop - file.start) for start, stop in wanted)
        self._open = _OpenFile(part, file, rows, rows.pieces(own), given=file.start)

    def _check(self, rows: Rows, path: str) -> None:
        """All files are read with the types of the first, narrower ones widened. Raises SchemaError naming both files."""
        try:
            self._fitting.check(rows.schema)
        except ColumnError as error:
            rows.close()
            schema, name = self._fitting.schema, error.column
            if schema is None:
                raise SchemaError(f"{path}: {error}") from None
            types = f"{rows.schema.field(name).type}, but {schema.field(name).type} in {self._first or 'the config'}"
            raise SchemaError(f"{path}: column {name!r} is {types}; all files of a stream must agree") from None
        self._first = self._first or path

    def _fit(self, table: pa.Table, path: str) -> pa.Table:
        try:
            return self._fitting.fit(table)
        except pa.ArrowInvalid as error:
            raise DataError(f"{path}: {error}") from None

    def _list(self) -> None:
        """Look what the folder holds. A store that can't be reached is tried again until `outage_timeout_s` is over."""
        config, began = self._source.config, time.monotonic()
        try:
            files = self._source.listing()
        except StorageError as error:
            if self._failing_since is None:
                self._failing_since = began
                log.warning("%s; trying again", error)
            if began - self._failing_since >= config.outage_timeout_s:
                raise
            self._next_listing = time.monotonic() + config.poll_s
            return
        self._failing_since = None
        now = time.monotonic()
        # A folder of very many files is looked at less often, so that most of the time is left for reading.
        self._next_listing = now + max(config.poll_s, _LISTING_SHARE * (now - began))
        own = {name: file for name, file in sorted(files.items()) if self._source.split_of(name) in self._parts}
        for part in self._parts.values():
            part.taken.listed(own.keys(), now)
        new = []
        for name, found in own.items():
            taken = self._parts[self._source.split_of(name)].taken.get(name)
            if taken is None:
                new.append(name)
            else:
                self._check_same(taken, found)
        # One that is gone, and comes again under the same name, has all its time again.
        self._incomplete = {name: self._incomplete[name] for name in new if name in self._incomplete}
        self._pending = deque(new)
        self._waiting = frozenset(self._source.split_of(name) for name in new)

    def _check_same(self, file: TakenFile, found: FoundFile) -> None:
        if found.size != file.size:
            change = f"it had {file.size} bytes when it was taken, and has {found.size}"
        elif file.etag and found.etag and found.etag != file.etag:
            change = f"its tag was {file.etag} when it was taken, and is {found.etag}"
        else:
            return
        raise SourceChangedError(
            f"{self._source.path(file.name)}: {change}: files of a stream must not change."
            " Put it back; new rows belong in a new file"
        )
