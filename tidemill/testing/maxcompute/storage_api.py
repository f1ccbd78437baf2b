"""The Storage API's calls (v1): read sessions and their rows, write sessions and their blocks."""

from __future__ import annotations

from tidemill.testing.maxcompute.documents import Column, TableName
from tidemill.testing.maxcompute.exchange import Exchange
from tidemill.testing.maxcompute.faults import FaultBook, Operation
from tidemill.testing.maxcompute.read_sessions import ReadSession, ReadSessions
from tidemill.testing.maxcompute.replies import ApiError, Reply, invalid_argument, json_reply
from tidemill.testing.maxcompute.requests import CommitRequest, ReadSessionRequest, WriteSessionRequest, parse_body
from tidemill.testing.maxcompute.splits import Ranges, SplitMode
from tidemill.testing.maxcompute.streams import codec, read_stream, stream_pieces
from tidemill.testing.maxcompute.write_sessions import MAX_BLOCKS, WriteSession, WriteSessions

_DEFAULT_BATCH_ROWS = 4096
# The client's users ask for at most this; larger ones are answered with batches of this size.
_MAX_BATCH_ROWS = 20_000
_FORMATS = [{"Type": "ARROW", "Version": "V5"}]


class StorageApi:
    """Answers the Storage API's requests. Thread-safe. Raises ApiError."""

    def __init__(self, reads: ReadSessions, writes: WriteSessions, faults: FaultBook) -> None:
        self._reads = reads
        self._writes = writes
        self._faults = faults

    def create_read_session(self, exchange: Exchange) -> Reply:
        request = parse_body(ReadSessionRequest, exchange.body)
        init = self._faults.take(Operation.CREATE_READ_SESSION, "init")
        wrong = self._faults.take(Operation.CREATE_READ_SESSION, "row_count")
        session = self._reads.create(table_name(exchange), request, init, wrong.amount if wrong else 0)
        # 201: ready to read; any other success tells the client to wait.
        return self._read_reply(session, 202 if self._reads.status(session) == "INIT" else 201)

    def get_read_session(self, exchange: Exchange) -> Reply:
        session = self._reads.get(exchange.parts["session"], table_name(exchange))
        return self._read_reply(session, 200)

    def refresh_read_session(self, exchange: Exchange) -> Reply:
        session = self._reads.get(exchange.parts["session"], table_name(exchange))
        return self._read_reply(self._reads.refresh(session), 200)

    def read_rows(self, exchange: Exchange) -> Reply:
        session = self._reads.get(exchange.needed("session_id"), table_name(exchange))
        status = self._reads.status(session)
        if status != "NORMAL":
            raise ApiError(400, "StatusConflict", f"read session {session.id} is {status}")
        max_rows = exchange.number("max_batch_rows", _DEFAULT_BATCH_ROWS)
        if max_rows < 1:
            raise invalid_argument(f"max_batch_rows must be positive, not {max_rows}")
        batches = self._reads.batches(session, _ranges(session, exchange), min(max_rows, _MAX_BATCH_ROWS))
        pieces = stream_pieces(session.schema, batches, codec(exchange.headers.get("accept-encoding")))
        return Reply(200, content_type="application/octet-stream", stream=pieces)

    def create_write_session(self, exchange: Exchange) -> Reply:
        request = parse_body(WriteSessionRequest, exchange.body)
        return self._write_reply(self._writes.create(table_name(exchange), request), 201)

    def get_write_session(self, exchange: Exchange) -> Reply:
        return self._write_reply(self._writes.get(exchange.parts["session"], table_name(exchange)), 200)

    def write_rows(self, exchange: Exchange) -> Reply:
        session = self._writes.get(exchange.parts["session"], table_name(exchange))
        block, attempt = exchange.number("block_number", 0), exchange.number("attempt_number", 0)
        message = self._writes.add_block(session, block, attempt, read_stream(exchange.body))
        return json_reply({"CommitMessage": message})

    def commit_write_session(self, exchange: Exchange) -> Reply:
        session = self._writes.get(exchange.needed("session_id"), table_name(exchange))
        request = parse_body(CommitRequest, exchange.body)
        ending = None
        if session.status == "NORMAL":
            ending = self._faults.take(Operation.COMMIT_WRITE_SESSION, "commit")
        session = self._writes.commit(session, request.commit_messages, ending)
        return self._write_reply(session, 202 if session.status == "COMMITTING" else 201)

    def _read_reply(self, session: ReadSession, status: int) -> Reply:
        by_rows = session.mode is SplitMode.ROW_OFFSET
        document: dict[str, object] = {
            **_session_fields(session.id, "BATCH_READ", self._reads.status(session), session.expires_at),
            "SplitsCount": -1 if by_rows else len(session.splits),
            "RecordCount": session.told_rows if by_rows else -1,
            "DataSchema": _schema(session.columns, session.partition_columns),
        }
        if session.with_estimates:
            document["SessionStats"] = {"EstimatedSize": session.bytes, "EstimatedRowCount": session.told_rows}
        return json_reply(document, status)

    def _write_reply(self, session: WriteSession, status: int) -> Reply:
        document: dict[str, object] = {
            **_session_fields(session.id, "BATCH_WRITE", self._writes.status(session), session.expires_at),
            "MaxBlockNumber": MAX_BLOCKS,
            "DataSchema": _schema(session.columns, session.partition_columns),
        }
        return json_reply(document, status)


def table_name(exchange: Exchange) -> TableName:
    """The table that a path names; a path without a schema takes it from the query, else `default`."""
    parts = exchange.parts
    schema = parts.get("schema") or exchange.query.get("curr_schema") or "default"
    return TableName(project=parts["project"], schema_name=schema, table=parts["table"])


def _session_fields(session_id: str, kind: str, status: str, expires_at: float) -> dict[str, object]:
    return {
        "SessionId": session_id,
        "SessionType": kind,
        "SessionStatus": status,
        "ExpirationTime": int(expires_at * 1000),
        "SupportedDataFormat": _FORMATS,
    }


def _schema(columns: tuple[Column, ...], partition_columns: tuple[Column, ...]) -> dict[str, object]:
    return {
        "DataColumns": [_column(column) for column in columns],
        "PartitionColumns": [_column(column) for column in partition_columns],
    }


def _column(column: Column) -> dict[str, object]:
    return {"Name": column.name, "Type": column.type, "Comment": column.comment, "Nullable": column.nullable}


def _ranges(session: ReadSession, exchange: Exchange) -> Ranges:
    """The rows that a read asks for: a range of row numbers, or a split."""
    if session.mode is SplitMode.ROW_OFFSET:
        start, count = exchange.number("row_index", 0), exchange.number("row_count", 0)
        # By the count that was told: a session that told too many rows ends early instead of refusing.
        if start < 0 or count < 0 or start + count > session.told_rows:
            raise invalid_argument(f"rows {start} to {start + count} aren't all among the session's {session.told_rows}")
        return ((start, start + count),)
    split = exchange.number("split_index", 0)
    if not 0 <= split < len(session.splits):
        raise invalid_argument(f"split_index {split}: the session has {len(session.splits)} splits")
    return session.splits[split]
