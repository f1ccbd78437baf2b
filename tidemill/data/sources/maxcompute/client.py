"""pyodps behind the calls that we make. Needs the extra `maxcompute`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from odps import ODPS
from odps.accounts import CloudAccount, CredentialProviderAccount
from odps.apis.storage_api import (
    Compression,
    ReadRowsRequest,
    SessionRequest,
    SplitOptions,
    StorageApiArrowClient,
    TableBatchScanRequest,
)

from tidemill.config.env import OdpsCredentials
from tidemill.config.odps_uri import OdpsTable
from tidemill.data.sources.maxcompute.session import Session, TableColumns
from tidemill.errors import MissingExtraError


class Connection:
    """Clients of tables under one set of credentials; each table, in its project and schema, has its own.

    Threading: all methods may be called from any thread.
    """

    def __init__(
        self, credentials: OdpsCredentials, *, quota: str, compression: str, tunnel_endpoint: str = "", rows_per_batch: int = 20_000
    ) -> None:
        self._credentials = credentials
        self._quota = quota
        self._compression = Compression[compression]
        self._tunnel_endpoint = tunnel_endpoint or None
        self._rows_per_batch = rows_per_batch
        self._lock = threading.Lock()
        self._services: dict[str, ODPS] = {}
        self._clients: dict[OdpsTable, ArrowTableClient] = {}

    def service(self, project: str) -> ODPS:
        """pyodps's entry object of a project."""
        with self._lock:
            return self._service(project)

    def table(self, table: OdpsTable) -> ArrowTableClient:
        """The client of a table; nothing is asked of the service yet."""
        with self._lock:
            if table not in self._clients:
                self._clients[table] = ArrowTableClient(partial(self._open, table), self._compression, self._rows_per_batch)
            return self._clients[table]

    def handle(self, table: OdpsTable) -> Any:
        """pyodps's object of a table. The service may be asked whether the project has schemas, so this can fail as any call."""
        with self._lock:
            return self._handle(table)

    def _open(self, table: OdpsTable) -> StorageApiArrowClient:
        with self._lock:
            return StorageApiArrowClient(
                self._service(table.project), self._handle(table), self._tunnel_endpoint, quota_name=self._quota or None
            )

    def _handle(self, table: OdpsTable) -> Any:
        service = self._service(table.project)
        # ODPS.get_table would ask the tenant's settings whether there are schemas; the address says so.
        parent = service.get_schema(table.schema) if table.schema else service.get_project(table.project)
        return parent.tables[table.name]

    def _service(self, project: str) -> ODPS:
        if project not in self._services:
            account = _account(self._credentials)
            self._services[project] = ODPS(
                account, project=project, endpoint=self._credentials.endpoint, tunnel_endpoint=self._tunnel_endpoint,
                overwrite_global=False,
            )  # fmt: skip
        return self._services[project]


class ArrowTableClient:
    """One table through the Storage API (`session.TableClient`). `open_client`: what the first call begins with; it asks the
    service, so it is tried again as the call is."""

    def __init__(self, open_client: Callable[[], StorageApiArrowClient], compression: Compression, rows_per_batch: int) -> None:
        self._open_client = open_client
        self._opened: StorageApiArrowClient | None = None
        self._compression = compression
        self._rows_per_batch = rows_per_batch

    @property
    def _client(self) -> StorageApiArrowClient:
        if self._opened is None:
            self._opened = self._open_client()
        return self._opened

    def columns(self) -> TableColumns:
        schema = self._client.table.table_schema
        partition = {column.name: str(column.type) for column in schema.partitions or []}
        data = {column.name: str(column.type) for column in schema.columns if column.name not in partition}
        return TableColumns(data, partition)

    def create(self, partitions: Sequence[str], columns: Sequence[str], partition_columns: Sequence[str]) -> Session:
        request = TableBatchScanRequest(
            required_partitions=list(partitions),
            required_data_columns=list(columns),
            required_partition_columns=list(partition_columns),
            # Made by hand the options would keep 256 MiB as the number of splits.
            split_options=SplitOptions.get_default_options(SplitOptions.SplitMode.ROW_OFFSET),
        )
        return _session(self._client.create_read_session(request))

    def describe(self, session_id: str, *, refresh: bool) -> Session:
        return _session(self._client.get_read_session(SessionRequest(session_id, refresh=refresh)))

    def read(self, session_id: str, start: int, count: int) -> Generator[pa.RecordBatch, None, None]:
        stream = self._client.read_rows_stream(
            ReadRowsRequest(
                session_id, row_index=start, row_count=count, max_batch_rows=self._rows_per_batch, compression=self._compression
            )
        )
        try:
            yield from pa.ipc.open_stream(_body(stream))
        finally:
            _hang_up(stream)


def _session(response: Any) -> Session:
    rows, expires = response.record_count, response.expiration_time
    return Session(
        id=response.session_id,
        status=response.session_status.value,
        rows=int(rows) if rows is not None and int(rows) >= 0 else None,
        expires_at=float(expires) / 1000 if expires else None,
    )


def _body(stream: Any) -> Any:
    """What the answer's bytes are read from: the response itself, which gives a column in one piece. The client's stream puts it
    together from 64 KiB each, which costs as much again as all else."""
    response = _response(stream)
    return stream if response is None else response.raw


def _hang_up(stream: Any) -> None:
    """Give the connection back. The client's own `close` only marks the stream, and leaves the rest of the answer unread."""
    stream.close()
    response = _response(stream)
    if response is not None:
        response.close()


def _response(stream: Any) -> Any:
    """The response inside the client's stream; None if this version of the client keeps it elsewhere."""
    return getattr(stream, "_raw_reader", None)


def _account(credentials: OdpsCredentials) -> Any:
    if not credentials.uses_chain:
        return CloudAccount(credentials.access_id, credentials.access_key)
    try:
        from alibabacloud_credentials.client import Client
    except ImportError:
        raise MissingExtraError(
            f"{credentials.found_in} is set, so Alibaba Cloud's chain of credentials is used: pip install alibabacloud-credentials"
        ) from None
    return CredentialProviderAccount(Client())
