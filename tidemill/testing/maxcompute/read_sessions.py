"""Read sessions: a snapshot of partitions' files, kept on disk, with a life of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Literal

import pyarrow as pa

from tidemill.clock import Clock
from tidemill.testing.maxcompute.documents import (
    Column,
    DataFile,
    Document,
    TableDocument,
    TableName,
    arrow_schema,
    normal_spec,
    spec_pairs,
)
from tidemill.testing.maxcompute.faults import Fault
from tidemill.testing.maxcompute.files import write_whole
from tidemill.testing.maxcompute.replies import ApiError, invalid_argument, new_id, no_such_object, no_such_partition
from tidemill.testing.maxcompute.requests import ReadSessionRequest
from tidemill.testing.maxcompute.splits import Ranges, SplitMode, by_bucket, by_parallelism, by_size
from tidemill.testing.maxcompute.tables import Tables
from tidemill.testing.maxcompute.types import TimeUnits, time_units

ReadStatus = Literal["INIT", "NORMAL", "CRITICAL", "EXPIRED"]


class Segment(Document):
    """One file of one partition, as the session numbers its rows: from `first_row`."""

    spec: str
    file: DataFile
    first_row: int


class ReadSession(Document):
    """A read session. Times are Unix seconds of the emulator's clock; `ready_at` None: never.

    `forced` overrides what the clock says, once the session was made to fail or to expire. `told_rows` is its RecordCount.
    """

    id: str
    table: TableName
    columns: tuple[Column, ...]
    partition_columns: tuple[Column, ...]
    timestamp_unit: str
    datetime_unit: str
    segments: tuple[Segment, ...]
    mode: SplitMode
    splits: tuple[Ranges, ...]
    told_rows: int
    with_estimates: bool
    ready_at: float | None
    expires_at: float
    fails_at: float | None = None
    forced: Literal["CRITICAL", "EXPIRED"] | None = None

    @property
    def rows(self) -> int:
        return sum(segment.file.rows for segment in self.segments)

    @property
    def bytes(self) -> int:
        return sum(segment.file.bytes for segment in self.segments)

    @property
    def schema(self) -> pa.Schema:
        units = TimeUnits(self.timestamp_unit, self.datetime_unit)
        return arrow_schema([*self.columns, *self.partition_columns], units)

    def status(self, now: float) -> ReadStatus:
        if self.forced is not None:
            return self.forced
        if now >= self.expires_at:
            return "EXPIRED"
        if self.fails_at is not None and now >= self.fails_at:
            return "CRITICAL"
        return "NORMAL" if self.ready_at is not None and now >= self.ready_at else "INIT"


class ReadSessions:
    """All read sessions of one emulator, one file each in `folder`. Thread-safe. Raises ApiError."""

    def __init__(self, folder: Path, tables: Tables, clock: Clock, lifetime_s: float) -> None:
        self._folder = folder
        self._tables = tables
        self._clock = clock
        self._lifetime_s = lifetime_s
        self._lock = threading.Lock()
        self._sessions = {path.stem: ReadSession.model_validate_json(path.read_bytes()) for path in folder.glob("[!.]*.json")}

    def create(self, name: TableName, request: ReadSessionRequest, init: Fault | None, wrong_by: int) -> ReadSession:
        document = self._tables.document(name)
        if request.filter_predicate:
            raise ApiError(400, "NotImplemented", "the emulator evaluates no FilterPredicate")
        segments = _segments(name, document, request.required_partitions)
        columns = _chosen(document.columns, request.required_data_columns)
        partition_columns = _chosen(document.partition_columns, request.required_partition_columns)
        units = time_units(request.arrow_options.timestamp_unit, request.arrow_options.datetime_unit)
        rows = sum(segment.file.rows for segment in segments)
        now = self._clock.time()
        ready_at, fails_at = _beginning(init, now)
        session = ReadSession(
            id=new_id(),
            table=name,
            columns=columns,
            partition_columns=partition_columns,
            timestamp_unit=units.timestamp,
            datetime_unit=units.datetime,
            segments=segments,
            mode=request.split_options.split_mode,
            splits=tuple(_splits(document, segments, request)),
            told_rows=rows + wrong_by,
            with_estimates=request.enable_estimate_stats,
            expires_at=now + self._lifetime_s,
            ready_at=ready_at,
            fails_at=fails_at,
        )
        self._keep(session)
        return session

    def get(self, session_id: str, name: TableName | None = None) -> ReadSession:
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None or name not in (None, session.table):
            raise no_such_object(f"read session {session_id}")
        return session

    def status(self, session: ReadSession) -> ReadStatus:
        return session.status(self._clock.time())

    def refresh(self, session: ReadSession) -> ReadSession:
        """Let the session live a whole lifetime from now, unless it is over."""
        if self.status(session) not in ("INIT", "NORMAL"):
            return session
        refreshed = session.model_copy(update={"expires_at": self._clock.time() + self._lifetime_s})
        self._keep(refreshed)
        return refreshed

    def force(self, session_id: str, status: Literal["CRITICAL", "EXPIRED"]) -> None:
        """End a session before its time."""
        self._keep(self.get(session_id).model_copy(update={"forced": status}))

    def files_in_use(self) -> set[tuple[str, str]]:
        """(table, path) of the files that living sessions read."""
        with self._lock:
            living = [session for session in self._sessions.values() if self.status(session) in ("INIT", "NORMAL")]
        return {(str(session.table), segment.file.path) for session in living for segment in session.segments}

    def batches(self, session: ReadSession, ranges: Ranges, max_rows: int) -> Iterator[pa.RecordBatch]:
        """The rows of these ranges, in batches of at most `max_rows`; none spans two files.

        Raises ApiError at once, not on the way, if the session's data has gone with its table.
        """
        spans = [
            (segment, max(start, segment.first_row), min(stop, segment.first_row + segment.file.rows))
            for segment in session.segments
            for start, stop in ranges
        ]
        spans = [span for span in spans if span[1] < span[2]]
        for segment, _, _ in spans:
            self._tables.must_hold(session.table, segment.file)
        return self._read(session, spans, max_rows)

    def _read(self, session: ReadSession, spans: list[tuple[Segment, int, int]], max_rows: int) -> Iterator[pa.RecordBatch]:
        schema = session.schema
        names = [column.name for column in session.columns]
        for segment, first, last in spans:
            held = self._tables.read_file(session.table, segment.file).select(names)
            rows = held.slice(first - segment.first_row, last - first)
            yield from _whole_rows(rows, dict(spec_pairs(segment.spec)), schema).to_batches(max_chunksize=max_rows)

    def _keep(self, session: ReadSession) -> None:
        with self._lock:
            write_whole(self._folder / f"{session.id}.json", session.model_dump_json().encode())
            self._sessions[session.id] = session


def _beginning(init: Fault | None, now: float) -> tuple[float | None, float | None]:
    """When the session is ready, and when it fails (None: never); without a fault it is ready at once."""
    if init is None:
        return now, None
    if not init.succeeds:
        return None, now + (init.seconds or 0.0)
    return (None if init.seconds is None else now + init.seconds), None


def _segments(name: TableName, document: TableDocument, required: list[str]) -> tuple[Segment, ...]:
    """The files of the required partitions, in the order of the request; of all partitions, in order, if none is required."""
    specs = [normal_spec(text, document.partition_columns) for text in required] or sorted(document.partitions)
    for spec in specs:
        if spec not in document.partitions:
            raise no_such_partition(str(name), spec)
    if len(set(specs)) < len(specs):
        raise invalid_argument(f"RequiredPartitions names a partition twice: {required}")
    files = [(spec, file) for spec in specs for file in document.partitions[spec].files]
    first_rows = accumulate((file.rows for _, file in files), initial=0)
    return tuple(Segment(spec=spec, file=file, first_row=row) for (spec, file), row in zip(files, first_rows, strict=False))


def _chosen(columns: tuple[Column, ...], required: list[str]) -> tuple[Column, ...]:
    """The required columns, in the order of the request; all of them if none is required."""
    known = {column.name: column for column in columns}
    unknown = [name for name in required if name not in known]
    if unknown:
        raise invalid_argument(f"no such columns: {unknown}; the table has {sorted(known)}")
    return tuple(known[name] for name in required) or columns


def _splits(document: TableDocument, segments: tuple[Segment, ...], request: ReadSessionRequest) -> list[Ranges]:
    rows: dict[str, int] = {}
    for segment in segments:
        rows[segment.spec] = rows.get(segment.spec, 0) + segment.file.rows
    partition_rows, options = list(rows.values()), request.split_options
    match options.split_mode:
        case SplitMode.SIZE:
            num_bytes = sum(segment.file.bytes for segment in segments)
            return by_size(partition_rows, num_bytes, options.split_number or 0, options.cross_partition)
        case SplitMode.PARALLELISM:
            return by_parallelism(partition_rows, options.split_number or 0, options.cross_partition)
        case SplitMode.BUCKET:
            return by_bucket(partition_rows, document.buckets, request.required_bucket_ids)
        case SplitMode.ROW_OFFSET:
            return []


def _whole_rows(rows: pa.Table, values: dict[str, str], schema: pa.Schema) -> pa.Table:
    """Rows with their partition's values behind them, in the types of `schema`."""
    for name in schema.names[rows.num_columns :]:
        value = pa.scalar(values[name]).cast(schema.field(name).type)
        rows = rows.append_column(name, pa.repeat(value, rows.num_rows))
    # Not safe: times are cut to the unit that was asked for.
    return rows if rows.schema.equals(schema) else rows.cast(schema, safe=False)
