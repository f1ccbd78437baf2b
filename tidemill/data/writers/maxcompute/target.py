"""The one table or partition that rows are written to: the calls, tried again while their faults can pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import pyarrow as pa
from odps import errors
from odps.apis.storage_api import (
    Compression,
    SessionRequest,
    StorageApiArrowClient,
    TableBatchWriteRequest,
    WriteRowsRequest,
)
from odps.models import TableSchema

from tidemill.clock import Clock
from tidemill.config.odps_uri import OdpsTable
from tidemill.data.sources.maxcompute.client import Connection
from tidemill.data.sources.maxcompute.faults import is_transient, shown
from tidemill.data.sources.outage import pause_s
from tidemill.errors import DeadlineError, StorageError
from tidemill.logs import log

T = TypeVar("T")

COMMITTED, COMMITTING, NORMAL = "COMMITTED", "COMMITTING", "NORMAL"
# Types that MaxCompute had not from its beginning (INT, FLOAT, ...) need this where a project hasn't switched them on.
_NEW_TYPES = {"odps.sql.type.system.odps2": "true"}
_BATCH_ROWS = 20_000


@dataclass(frozen=True, slots=True)
class Target:
    """What is written to. `partition`: its columns and values in order, empty for a table without partitions."""

    table: OdpsTable
    partition: tuple[tuple[str, str], ...]

    @property
    def spec(self) -> str:
        return "/".join(f"{name}={value}" for name, value in self.partition)

    def __str__(self) -> str:
        return f"odps://{self.table}" + (f", partition {self.spec}" if self.partition else "")


@dataclass(frozen=True, slots=True)
class Found:
    """An existing table: name -> type of its columns, names of its partition columns."""

    columns: dict[str, str]
    partition: tuple[str, ...]


class TargetClient:
    """The calls on a target. Every wait ends after `timeout_s`. Threading: one at a time.

    Raises StorageError naming the target for what the service refuses, DeadlineError if it doesn't answer in time.
    """

    def __init__(
        self, target: Target, connection: Connection, *, quota: str, compression: str, tunnel_endpoint: str, timeout_s: float,
        clock: Clock,
    ) -> None:  # fmt: skip
        self._target = target
        self._connection = connection
        self._quota = quota
        self._tunnel_endpoint = tunnel_endpoint
        self._compression = Compression[compression]
        self._timeout_s = timeout_s
        self._clock = clock

    # Making these asks the service, so it happens in the calls that are tried again.
    @cached_property
    def _handle(self) -> Any:
        return self._connection.handle(self._target.table)

    @cached_property
    def _client(self) -> StorageApiArrowClient:
        service = self._connection.service(self._target.table.project)
        return StorageApiArrowClient(service, self._handle, self._tunnel_endpoint or None, quota_name=self._quota or None)

    def find(self) -> Found | None:
        """The table as it is; None if it isn't there."""

        def look() -> Found | None:
            try:
                self._handle.reload()
            except errors.NoSuchObject:
                return None
            schema = self._handle.table_schema
            partition = tuple(column.name for column in schema.partitions or ())
            return Found({c.name: str(c.type) for c in schema.columns if c.name not in partition}, partition)

        return self._patiently("looking at the table", look)

    def num_bytes(self) -> int | None:
        """How many bytes the target holds; None if there is no such partition."""

        def look() -> int | None:
            if not self._target.partition:
                self._handle.reload()
                return int(self._handle.size or 0)
            partition = self._partition()
            try:
                partition.reload()
            except errors.NoSuchObject:
                return None
            return max(int(partition.size or 0), int(partition.record_num or 0))

        return self._patiently("looking at what it holds", look)

    def holds_rows(self) -> bool | None:
        """Whether there are rows in the target, by the service's own figures; None if there is no such table or partition.

        The number of rows decides where the service knows it (it says -1 where it doesn't), else the size.
        """

        def look() -> bool | None:
            held = self._partition() if self._target.partition else self._handle
            try:
                held.reload()
            except errors.NoSuchObject:
                return None
            num_rows = -1 if held.record_num is None else int(held.record_num)
            return num_rows > 0 if num_rows >= 0 else int(held.size or 0) > 0

        return self._patiently("looking at what it holds", look)

    def create_table(self, columns: Mapping[str, str], lifecycle: int | None) -> None:
        """Make the table unless it is there, with partition columns of type STRING. `lifecycle`: days."""
        partition = [name for name, _ in self._target.partition]
        schema = TableSchema.from_lists(list(columns), list(columns.values()), partition, ["string"] * len(partition))

        def create() -> Any:
            return self._handle.parent.create(
                self._target.table.name, schema, if_not_exists=True, lifecycle=lifecycle, hints=dict(_NEW_TYPES), async_=True
            )

        self._run("creating the table", create)

    def create_partition(self) -> None:
        """Make the partition unless it is there."""
        spec = self._target.spec.replace("/", ",")
        self._run("creating the partition", lambda: self._handle.create_partition(spec, if_not_exists=True, async_=True))

    def drop_partition(self) -> None:
        """Take the partition away."""
        spec = self._target.spec.replace("/", ",")
        self._run("dropping the partition", lambda: self._handle.delete_partition(spec, if_exists=True, async_=True))

    def open_session(self) -> str:
        """A new write session, whose commit replaces what the target holds; its id."""
        # The service doesn't know what a failed answer meant; a session that nobody commits expires.
        request = TableBatchWriteRequest(partition_spec=self._target.spec, overwrite=True)
        return str(self._patiently("opening a write session", lambda: self._client.create_write_session(request).session_id))

    def write_block(self, session: str, block: int, batches: Callable[[], Iterable[pa.RecordBatch]]) -> str:
        """Upload a block, from the first row again under a new attempt number after a fault; its commit message."""
        attempt = -1

        def upload() -> str:
            nonlocal attempt
            attempt += 1
            writer = self._client.write_rows_arrow(WriteRowsRequest(session, block, attempt, compression=self._compression))
            for batch in batches():
                for start in range(0, max(batch.num_rows, 1), _BATCH_ROWS):
                    writer.write(batch.slice(start, _BATCH_ROWS))
            message, ok = writer.finish()
            if not ok:
                raise ConnectionError(f"block {block} was not taken")
            return str(message)

        return self._patiently(f"uploading block {block}", upload)

    def commit(self, session: str, messages: list[str]) -> None:
        """Commit a session, and wait until it is. Whatever an answer was, the session's own status decides.

        Raises StorageError if it ends otherwise, DeadlineError if it isn't known in time.
        """
        deadline = self._clock.monotonic() + self._timeout_s
        failures = 0
        while True:
            status = self._patiently("looking at the write session", lambda: self._status(session))
            if status == COMMITTED:
                return
            if status not in (NORMAL, COMMITTING):
                raise StorageError(f"{self._target}: write session {session} is {status}; nothing was written, try again")
            if status == NORMAL:
                try:
                    self._client.commit_write_session(SessionRequest(session), messages)
                    continue
                except Exception as error:
                    if not is_transient(error):
                        raise self._refusal("committing", error) from error
                    log.warning("%s: committing: %s; looking whether it took place", self._target, shown(error))
            failures += 1
            pause = min(pause_s(failures), 5.0)
            if self._clock.monotonic() + pause > deadline:
                raise DeadlineError(
                    f"{self._target}: write session {session} is {status} {self._timeout_s:g} s after its commit; whether its rows"
                    " will appear isn't known: look before you write again"
                )
            self._clock.sleep(pause)

    def _status(self, session: str) -> str:
        return str(self._client.get_write_session(SessionRequest(session)).session_status.value)

    def _partition(self) -> Any:
        return self._handle.partitions[self._target.spec.replace("/", ",")]

    def _run(self, what: str, start: Callable[[], Any]) -> None:
        """Start a statement that may be started again, and wait until it has succeeded."""
        self._patiently(what, lambda: start().wait_for_success(timeout=self._timeout_s))

    def _refusal(self, what: str, error: Exception) -> Exception:
        """What the service refuses is told with its target; whatever else it is, it stays as it is."""
        return StorageError(f"{self._target}: {what}: {shown(error)}") if isinstance(error, errors.BaseODPSError) else error

    def _patiently(self, what: str, call: Callable[[], T]) -> T:
        """What the call gives, tried again after faults that can pass."""
        deadline = self._clock.monotonic() + self._timeout_s
        failures = 0
        while True:
            try:
                return call()
            except Exception as error:
                # The client asserts that an upload still runs, which it doesn't once the service has hung up.
                if not is_transient(error) and not isinstance(error, AssertionError):
                    raise self._refusal(what, error) from error
                failures += 1
                pause = pause_s(failures)
                if self._clock.monotonic() + pause > deadline:
                    raise DeadlineError(
                        f"{self._target}: {what}: no success within {self._timeout_s:g} s: {shown(error)}"
                    ) from error
                log.warning("%s: %s: %s; trying again", self._target, what, shown(error))
                self._clock.sleep(pause)
