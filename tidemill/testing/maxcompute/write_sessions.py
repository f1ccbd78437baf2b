"""Write sessions: blocks gathered aside, made visible by one commit, or never."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidemill.clock import Clock
from tidemill.testing.maxcompute.documents import (
    Column,
    DataFile,
    Document,
    TableName,
    normal_spec,
    spec_pairs,
)
from tidemill.testing.maxcompute.faults import Fault
from tidemill.testing.maxcompute.files import write_whole
from tidemill.testing.maxcompute.replies import ApiError, invalid_argument, new_id, no_such_object
from tidemill.testing.maxcompute.requests import WriteSessionRequest
from tidemill.testing.maxcompute.rows import in_columns
from tidemill.testing.maxcompute.tables import Tables

logger = logging.getLogger(__name__)

WriteStatus = Literal["NORMAL", "COMMITTING", "COMMITTED", "CRITICAL", "EXPIRED"]
MAX_BLOCKS = 20_000
_MESSAGE = re.compile(r"(\d+)-(\d+)-[0-9a-f]{32}")


class WriteSession(Document):
    """A write session. `spec` "" in a partitioned table: each row's partition stands in its last columns.

    While it is COMMITTING, `settles_at` says when (None: never) and `succeeds` how that ends. Times are Unix seconds.
    """

    id: str
    table: TableName
    columns: tuple[Column, ...]
    partition_columns: tuple[Column, ...]
    spec: str
    overwrite: bool
    max_partitions: int
    expires_at: float
    status: WriteStatus = "NORMAL"
    messages: tuple[str, ...] = ()
    settles_at: float | None = None
    succeeds: bool = True

    @property
    def dynamic(self) -> bool:
        return bool(self.partition_columns) and not self.spec

    @property
    def block_columns(self) -> tuple[Column, ...]:
        """What each block holds."""
        return self.columns + self.partition_columns if self.dynamic else self.columns


class WriteSessions:
    """All write sessions of one emulator; documents and blocks are below `folder`. Thread-safe. Raises ApiError."""

    def __init__(self, folder: Path, tables: Tables, clock: Clock, lifetime_s: float) -> None:
        self._folder = folder
        self._tables = tables
        self._clock = clock
        self._lifetime_s = lifetime_s
        self._lock = threading.RLock()
        self._sessions = {path.stem: WriteSession.model_validate_json(path.read_bytes()) for path in folder.glob("[!.]*.json")}

    def create(self, name: TableName, request: WriteSessionRequest) -> WriteSession:
        document = self._tables.document(name)
        spec = normal_spec(request.partition_spec, document.partition_columns) if request.partition_spec else ""
        session = WriteSession(
            id=new_id(),
            table=name,
            columns=document.columns,
            partition_columns=document.partition_columns,
            spec=spec,
            overwrite=request.overwrite,
            max_partitions=request.dynamic_partition_options.dynamic_partition_limit,
            expires_at=self._clock.time() + self._lifetime_s,
        )
        self._keep(session)
        return session

    def get(self, session_id: str, name: TableName) -> WriteSession:
        """A session, its commit settled if its time has come."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or session.table != name:
                raise no_such_object(f"write session {session_id}")
            return self._settled(session)

    def status(self, session: WriteSession) -> WriteStatus:
        expired = session.status == "NORMAL" and self._clock.time() >= session.expires_at
        return "EXPIRED" if expired else session.status

    def settle(self) -> None:
        """Finish every commit whose time has come."""
        with self._lock:
            for session in list(self._sessions.values()):
                self._settled(session)

    def add_block(self, session: WriteSession, block: int, attempt: int, rows: pa.Table) -> str:
        """Keep one attempt at a block; the message that a commit names it by. The same attempt again replaces nothing."""
        self._must_be_open(session)
        if not 0 <= block < MAX_BLOCKS or attempt < 0:
            raise invalid_argument(f"block {block}, attempt {attempt}: blocks are numbered from 0 to {MAX_BLOCKS - 1}")
        rows = in_columns(rows, session.block_columns)
        digest = hashlib.md5(f"{session.id}/{block}/{attempt}/{new_id()}".encode(), usedforsecurity=False).hexdigest()
        message = f"{block}-{attempt}-{digest}"
        path = self._block_path(session, message)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, path)
        return message

    def commit(self, session: WriteSession, messages: Sequence[str], ending: Fault | None) -> WriteSession:
        """Begin a commit, and end it at once unless `ending` delays it.

        A commit again with the same messages does nothing more and tells how the first one stands.
        """
        with self._lock:
            if session.status != "NORMAL":
                if tuple(messages) != session.messages:
                    raise ApiError(400, "StatusConflict", f"write session {session.id} is {session.status} with other messages")
                return session
            self._must_be_open(session)
            self._check_messages(session, messages)
            now = self._clock.time()
            delay = 0.0 if ending is None else ending.seconds
            changes = {
                "status": "COMMITTING",
                "messages": tuple(messages),
                "settles_at": None if delay is None else now + delay,
                "succeeds": ending is None or ending.succeeds,
            }
            session = session.model_copy(update=changes)
            self._keep(session)
            return self._settled(session)

    def _settled(self, session: WriteSession) -> WriteSession:
        due = session.settles_at is not None and self._clock.time() >= session.settles_at
        if session.status != "COMMITTING" or not due:
            return session
        status = self._ended(session)
        session = session.model_copy(update={"status": status})
        self._keep(session)
        shutil.rmtree(self._folder / session.id, ignore_errors=True)
        return session

    def _ended(self, session: WriteSession) -> WriteStatus:
        """Carry a commit out; CRITICAL if it was made to fail, or can't be done any more (the table was dropped, say)."""
        if not session.succeeds:
            return "CRITICAL"
        try:
            self._publish(session)
        except ApiError as error:
            logger.warning("the commit of write session %s failed: %s", session.id, error)
            return "CRITICAL"
        return "COMMITTED"

    def _publish(self, session: WriteSession) -> None:
        """Write the blocks' rows as files of their partitions, then show them all at once.

        A crash in between repeats this under the same file names, which `Tables.publish` doesn't add twice.
        """
        self._tables.document(session.table)
        rows = [(message, pq.read_table(self._block_path(session, message), partitioning=None)) for message in session.messages]
        rows.sort(key=lambda entry: int(entry[0].split("-")[0]))
        parts = [(message, spec, part) for message, block in rows for spec, part in _by_partition(session, block)]
        files: dict[str, list[DataFile]] = {} if session.dynamic else {session.spec: []}
        if len({spec for _, spec, _ in parts}) > session.max_partitions:
            raise invalid_argument(f"rows of more partitions than DynamicPartitionLimit, which is {session.max_partitions}")
        for message, spec, part in parts:
            file = self._tables.write_file(session.table, spec, f"{session.id}-{message.split('-')[0]}", part)
            files.setdefault(spec, []).append(file)
        self._tables.publish(session.table, files, session.overwrite)

    def _must_be_open(self, session: WriteSession) -> None:
        status = self.status(session)
        if status != "NORMAL":
            raise ApiError(400, "StatusConflict", f"write session {session.id} is {status}")

    def _check_messages(self, session: WriteSession, messages: Sequence[str]) -> None:
        blocks: set[str] = set()
        for message in messages:
            match = _MESSAGE.fullmatch(message)
            if match is None or not self._block_path(session, message).exists():
                raise invalid_argument(f"commit message {message!r} isn't of a block of write session {session.id}")
            if match[1] in blocks:
                raise invalid_argument(f"two commit messages of block {match[1]}: commit one attempt of each")
            blocks.add(match[1])

    def _block_path(self, session: WriteSession, message: str) -> Path:
        return self._folder / session.id / f"{message}.parquet"

    def _keep(self, session: WriteSession) -> None:
        with self._lock:
            write_whole(self._folder / f"{session.id}.json", session.model_dump_json().encode())
            self._sessions[session.id] = session


def _by_partition(session: WriteSession, rows: pa.Table) -> list[tuple[str, pa.Table]]:
    """Rows by partition, without partition columns; one partition unless the session is dynamic."""
    if not session.dynamic:
        return [(session.spec, rows)]
    names = [column.name for column in session.partition_columns]
    groups = []
    for key in rows.select(names).group_by(names).aggregate([]).to_pylist():
        spec = "/".join(f"{name}={key[name]}" for name in names)
        spec_pairs(spec)
        mask = pa.array([True] * rows.num_rows)
        for name in names:
            mask = pc.and_(mask, pc.equal(rows[name], pa.scalar(key[name], rows.schema.field(name).type)))
        groups.append((spec, rows.filter(mask).drop_columns(names)))
    return groups
