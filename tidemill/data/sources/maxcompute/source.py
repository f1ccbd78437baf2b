"""Rows of MaxCompute tables, through read sessions of the Storage API. One split a session; positions are its row numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from tidemill.clock import Clock, SystemClock
from tidemill.config.base import Config
from tidemill.config.env import OdpsCredentials, odps_credentials
from tidemill.config.maxcompute import MaxComputeConfig
from tidemill.config.odps_uri import OdpsTable, parse_odps_path, parse_odps_paths
from tidemill.contracts.positions import MAXCOMPUTE
from tidemill.contracts.progress import SplitState
from tidemill.data.assignment import Assigned
from tidemill.data.intervals import IntervalSet
from tidemill.data.source import Source, SplitReader
from tidemill.data.sources.maxcompute.client import Connection
from tidemill.data.sources.maxcompute.columns import Projection, project, require_agreement
from tidemill.data.sources.maxcompute.ranges import Range, RangeReader, RangeRows, cut_ranges
from tidemill.data.sources.maxcompute.resume import Place, decide, is_finished, places
from tidemill.data.sources.maxcompute.session import Session, TableClient, TableColumns
from tidemill.data.sources.maxcompute.sessions import SessionKeeper, Wanted, create_session, describe_table, validate_session
from tidemill.data.split import Split, SplitId
from tidemill.errors import ConfigError, SourceChangedError
from tidemill.logs import log

# Sessions that are made or validated at once.
_SESSIONS_AT_ONCE = 8


class MaxComputeSourceConfig(Config):
    """MaxCompute tables."""

    paths: tuple[str, ...]
    """Addresses, `odps://project/tables/[schema.]table/pt=a&pt=b`."""
    is_orderby_partition: bool = False
    """One session a partition, read one after the other; else one over all partitions of an address."""
    quota: str = "pay-as-you-go"
    """What reading is charged to."""
    compression: str = "LZ4_FRAME"
    """LZ4_FRAME, ZSTD or UNCOMPRESSED."""
    event_time_column: str | None = None
    """Event time: a timestamp, or a number of Unix seconds. Absent: rows have no event time."""
    reading: MaxComputeConfig = MaxComputeConfig()
    """How tables are read."""


class MaxComputeSource(Source):
    """Tables in the order of their addresses, partitions in theirs, as written.

    A split is what one read session gives: a partition with `is_orderby_partition`, else all partitions of an address. Its
    fingerprint names the session, since row numbers mean something within that session only: `session`, `rows`, `input_path`,
    `sess_idx`. Rank 0 makes the sessions in `discover` or `resume` and shares the splits; which of a checkpoint's positions go
    on, start afresh or are refused is in `maxcompute.resume`.
    `columns`: what to read (the event time's column is added); None: all. `credentials`: from the environment if not given.
    """

    kind = MAXCOMPUTE
    bounded = True
    continues_parent = True
    Config = MaxComputeSourceConfig

    def __init__(
        self,
        config: MaxComputeSourceConfig,
        columns: Collection[str] | None = None,
        *,
        credentials: OdpsCredentials | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        try:
            self._paths = parse_odps_paths(config.paths)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._columns = None if columns is None else list(columns)
        if self._columns is not None and config.event_time_column and config.event_time_column not in self._columns:
            self._columns.append(config.event_time_column)
        self._credentials = credentials
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._projections: dict[OdpsTable, Projection] = {}
        # Splits whose sessions weren't asked for, since all their rows were read. Rank 0 only.
        self._unheld: set[SplitId] = set()
        reading = config.reading
        self._keeper = SessionKeeper(interval_s=reading.refresh_interval_s, alarm_after_s=reading.alarm_after_s, clock=self._clock)

    @property
    def refreshed_sessions(self) -> list[str]:
        """The sessions that are kept alive."""
        return self._keeper.sessions

    def discover(self) -> list[Split]:
        """A fresh session for each place. Raises DataError for a table or partition that isn't there, SchemaError for a column."""
        return self.resume(())

    def columns(self) -> TableColumns:
        """The columns of the first table. Raises DataError if it isn't there."""
        return self._describe(self._paths[0].table)

    def resume(self, saved: Sequence[SplitState]) -> list[Split]:
        """Splits in the order of the input path: those that go on with their sessions, validated; fresh ones for the others.

        Raises SourceChangedError by the rules of `maxcompute.resume`, before any session is made.
        """
        found = places(self._paths, ordered=self._config.is_orderby_partition)
        decision = decide(saved, found)
        for note in decision.notes:
            log.warning("%s", note)
        self._check_columns()
        with ThreadPoolExecutor(_SESSIONS_AT_ONCE, "maxcompute-session") as pool:
            return list(pool.map(lambda place: self._split(place, decision.kept.get(place)), found))

    def renew(self, splits: Sequence[Split]) -> list[Split]:
        """Splits that an earlier run had read to their end get a new session: nobody has kept their old one alive."""
        return [self._renewed(split) if split.id in self._unheld else split for split in splits]

    def open(self, split: Split, remaining: IntervalSet | None, done: IntervalSet) -> SplitReader:
        rows = IntervalSet.of([(0, split.num_rows or 0)]) - done if remaining is None else remaining
        return self._read([self._open(split, rows)])

    def open_all(self, assigned: Sequence[Assigned], mine: Callable[[SplitId], bool] | None = None) -> SplitReader:
        """One reader over all ranges in order; the next ones are read ahead while one is given."""
        return self._read([self._open(part.split, part.remaining or IntervalSet()) for part in assigned])

    def verify(self, split: Split, fingerprint: dict[str, Any]) -> None:
        for name in ("session", "rows"):
            if fingerprint.get(name) != split.fingerprint.get(name):
                raise SourceChangedError(
                    f"{split.id}: {name} was {fingerprint.get(name)}, is {split.fingerprint.get(name)};"
                    " positions belong to the session that they were read from"
                )

    def close(self) -> None:
        self._keeper.close()

    def _split(self, place: Place, saved: SplitState | None) -> Split:
        """The split of a place, new or restored. Its session is shared by all ranks."""
        where = {"input_path": place.path.text, "sess_idx": place.index}
        if saved is None:
            session = self._new_session(place)
            fingerprint = {**where, "session": session.id, "rows": session.rows}
            return Split(SplitId(self.kind, place.name), session.rows, fingerprint, in_turn=True)
        session_id, rows = str(saved.fingerprint["session"]), saved.num_rows or 0
        if is_finished(saved):
            self._unheld.add(SplitId(self.kind, saved.split))
        else:
            client, timeout_s = self._client(place.path.table), self._config.reading.session_timeout_s
            validate_session(client, saved.split, session_id, rows, timeout_s=timeout_s, clock=self._clock)
        fingerprint = {**where, "session": session_id, "rows": rows}
        return Split(SplitId(self.kind, saved.split), rows, fingerprint, in_turn=True)

    def _renewed(self, split: Split) -> Split:
        path, index = parse_odps_path(split.fingerprint["input_path"]), split.fingerprint["sess_idx"]
        found = places([path], ordered=self._config.is_orderby_partition)
        session = self._new_session(found[index])
        if session.rows != split.num_rows:
            raise SourceChangedError(f"{split.id} had {split.num_rows} rows in the first pass, and has {session.rows} now")
        self._unheld.discard(split.id)
        return replace(split, fingerprint={**split.fingerprint, "session": session.id})

    def _new_session(self, place: Place) -> Session:
        projection = self._projection(place.path.table)
        return create_session(
            self._client(place.path.table),
            place.name,
            Wanted(place.partitions, projection.data, projection.partition),
            timeout_s=self._config.reading.session_timeout_s,
            clock=self._clock,
        )

    def _open(self, split: Split, rows: IntervalSet) -> Iterator[Range]:
        """Ranges of a split; from here on its session is kept alive. The one way to open a split, new or restored."""
        client = self._client(parse_odps_path(split.fingerprint["input_path"]).table)
        whole = Range(split.id, client, split.fingerprint["session"], 0, split.num_rows or 0)
        self._keeper.hold(whole.session, split.id.name, client)
        self._keeper.start()
        return cut_ranges(whole, rows, self._config.reading.rows_per_request)

    def _read(self, parts: Sequence[Iterator[Range]]) -> SplitReader:
        return RangeReader(
            chain.from_iterable(parts),
            partial(RangeRows, outage_timeout_s=self._config.reading.outage_timeout_s, clock=self._clock),
            readers=self._config.reading.readers,
            columns=self._columns,
            time_column=self._config.event_time_column,
        )

    def _check_columns(self) -> None:
        first = self._paths[0].table
        for path in self._paths:
            types = self._projection(path.table).types
            require_agreement(str(path.table), types, str(first), self._projection(first).types)

    def _projection(self, table: OdpsTable) -> Projection:
        with self._lock:
            known = self._projections.get(table)
        if known is None:
            known = project(str(table), self._describe(table), self._columns)
            with self._lock:
                self._projections[table] = known
        return known

    def _describe(self, table: OdpsTable) -> TableColumns:
        deadline = self._clock.monotonic() + self._config.reading.session_timeout_s
        return describe_table(self._client(table), str(table), deadline, self._clock)

    def _client(self, table: OdpsTable) -> TableClient:
        with self._lock:
            if self._connection is None:
                self._connection = Connection(
                    self._credentials or odps_credentials(),
                    quota=self._config.quota,
                    compression=self._config.compression,
                    tunnel_endpoint=self._config.reading.tunnel_endpoint,
                    rows_per_batch=self._config.reading.rows_per_batch,
                )
            return self._connection.table(table)
