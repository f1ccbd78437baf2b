"""Tables on disk: FOLDER/<project>/<schema>/<table>/<pt=a/hr=1>/*.parquet beside table.json.

table.json says which files hold a table's rows. Data files are immutable and are written first; replacing table.json makes
them visible, all partitions of one change at once. A process killed at any moment leaves the old table or the new one.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.clock import Clock
from tidemill.errors import DataError
from tidemill.testing.maxcompute.documents import (
    Column,
    DataFile,
    PartitionDocument,
    TableDocument,
    TableName,
    arrow_schema,
    normal_spec,
    spec_pairs,
)
from tidemill.testing.maxcompute.files import write_whole
from tidemill.testing.maxcompute.replies import ApiError, invalid_argument, new_id, no_such_object, no_such_partition, no_such_table
from tidemill.testing.maxcompute.types import column_type

_DOCUMENT = "table.json"
# Decoded files are kept up to this size, so that range after range of one file doesn't decode it again and again.
_CACHE_BYTES = 1 << 30


class Tables:
    """The tables below one folder. Thread-safe; documents are read from disk at each call. Raises ApiError."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder = folder
        self.clock = clock
        self._change = threading.RLock()
        self._cache = _DecodedFiles(_CACHE_BYTES)

    def names(self) -> list[TableName]:
        found = [path.parent.relative_to(self.folder).parts for path in self.folder.glob(f"[!.]*/*/*/{_DOCUMENT}")]
        return [TableName(project=project, schema_name=schema, table=table) for project, schema, table in sorted(found)]

    def document(self, name: TableName) -> TableDocument:
        try:
            return TableDocument.model_validate_json((self.path(name) / _DOCUMENT).read_bytes())
        except FileNotFoundError:
            raise no_such_table(name.project, name.schema_name, name.table) from None

    def path(self, name: TableName) -> Path:
        parts = (name.project, name.schema_name, name.table)
        if any(not part or part.startswith(".") or "/" in part for part in parts):
            raise invalid_argument(f"not a table name: {name}")
        return self.folder.joinpath(*parts)

    def create(self, name: TableName, document: TableDocument, if_not_exists: bool = False) -> None:
        """Make a table. Raises ApiError if it is there already, unless `if_not_exists`."""
        arrow_schema([*document.columns, *document.partition_columns])
        with self._change:
            if (self.path(name) / _DOCUMENT).exists():
                if if_not_exists:
                    return
                raise ApiError(409, "ObjectAlreadyExists", f"table {name} already exists")
            if not document.partition_columns:
                now = self.clock.time()
                document = document.model_copy(update={"partitions": {"": PartitionDocument(created_at=now, modified_at=now)}})
            self._write(name, document)

    def drop(self, name: TableName) -> None:
        """Remove a table: one rename, then the files."""
        with self._change:
            self.document(name)
            grave = self.folder / ".emulator" / "dropped" / new_id()
            grave.parent.mkdir(parents=True, exist_ok=True)
            os.rename(self.path(name), grave)
        shutil.rmtree(grave)

    def add_partition(self, name: TableName, text: str, if_not_exists: bool = False) -> None:
        """Make an empty partition. Raises ApiError if it is there already, unless `if_not_exists`."""
        with self._change:
            document = self.document(name)
            spec = self._spec(document, text)
            if spec in document.partitions:
                if if_not_exists:
                    return
                raise ApiError(409, "ObjectAlreadyExists", f"partition {spec} of {name} already exists")
            now = self.clock.time()
            added = {spec: PartitionDocument(created_at=now, modified_at=now)}
            self._write(name, document.model_copy(update={"partitions": {**document.partitions, **added}}))

    def drop_partition(self, name: TableName, text: str, if_exists: bool = False) -> None:
        with self._change:
            document = self.document(name)
            spec = self._spec(document, text)
            if spec not in document.partitions:
                if if_exists:
                    return
                raise no_such_partition(str(name), spec)
            left = {key: partition for key, partition in document.partitions.items() if key != spec}
            gone = tuple(file.path for file in document.partitions[spec].files)
            self._write(name, document.model_copy(update={"partitions": left, "replaced": document.replaced + gone}))

    def partition(self, name: TableName, text: str) -> tuple[str, PartitionDocument]:
        """A partition's spec in normal form, and its document."""
        document = self.document(name)
        spec = self._spec(document, text)
        if spec not in document.partitions:
            raise no_such_partition(str(name), spec)
        return spec, document.partitions[spec]

    def write_file(self, name: TableName, spec: str, stem: str, rows: pa.Table) -> DataFile:
        """Write rows where `publish` can make them visible. The same stem replaces what was written before."""
        path = self.path(name) / spec / f"{stem}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{new_id()}")
        pq.write_table(rows, temporary)
        os.replace(temporary, path)
        return DataFile(path=str(path.relative_to(self.path(name))), rows=rows.num_rows, bytes=path.stat().st_size)

    def publish(self, name: TableName, files: Mapping[str, Sequence[DataFile]], overwrite: bool) -> None:
        """Make files the rows of their partitions (`overwrite`), or add them to theirs; all partitions in one step.

        Idempotent: files that a partition holds already aren't added twice. Partitions that aren't there are made.
        """
        now = self.clock.time()
        with self._change:
            document = self.document(name)
            partitions, replaced = dict(document.partitions), list(document.replaced)
            for spec, new in files.items():
                old = partitions.get(spec) or PartitionDocument(created_at=now, modified_at=now)
                paths = {file.path for file in new}
                kept = [file for file in old.files if file.path not in paths]
                if overwrite:
                    replaced += [file.path for file in kept]
                    kept = []
                partitions[spec] = PartitionDocument(files=(*kept, *new), created_at=old.created_at, modified_at=now)
            changes = {"partitions": partitions, "replaced": tuple(replaced), "modified_at": now}
            self._write(name, document.model_copy(update=changes))

    def must_hold(self, name: TableName, file: DataFile) -> None:
        """Raises ApiError if the file has gone, as it does when its table is dropped."""
        if not (self.path(name) / file.path).exists():
            raise no_such_object(f"the data behind this session, of table {name}, which was dropped,")

    def read_file(self, name: TableName, file: DataFile) -> pa.Table:
        """A file's rows, decoded; the newest ones are kept in memory."""
        return self._cache.get(self.path(name) / file.path)

    def adopt(self) -> list[TableName]:
        """Write the document of every folder of Parquet files that has none; the tables that were taken up this way.

        Raises DataError that names the folder if its files don't make one table.
        """
        adopted = []
        for path in sorted(self.folder.glob("[!.]*/*/*/")):
            project, schema, table = path.relative_to(self.folder).parts
            name = TableName(project=project, schema_name=schema, table=table)
            if not (path / _DOCUMENT).exists() and any(path.rglob("[!.]*.parquet")):
                try:
                    self._write(name, _adopted(path, self.clock.time()))
                except ApiError as error:
                    raise DataError(f"{path}: not a table of this emulator: {error.message}") from error
                adopted.append(name)
        return adopted

    def sweep(self, in_use: set[tuple[str, str]]) -> None:
        """Delete replaced files but those in use, given as (table name, path)."""
        with self._change:
            for name in self.names():
                document = self.document(name)
                kept = tuple(path for path in document.replaced if (str(name), path) in in_use)
                for path in set(document.replaced) - set(kept):
                    (self.path(name) / path).unlink(missing_ok=True)
                if kept != document.replaced:
                    self._write(name, document.model_copy(update={"replaced": kept}))

    def _spec(self, document: TableDocument, text: str) -> str:
        return normal_spec(text, document.partition_columns)

    def _write(self, name: TableName, document: TableDocument) -> None:
        write_whole(self.path(name) / _DOCUMENT, document.model_dump_json(indent=1).encode())


class _DecodedFiles:
    """Decoded Parquet files, the least recently used dropped beyond `limit_bytes`. Thread-safe; files never change."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._tables: OrderedDict[Path, pa.Table] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, path: Path) -> pa.Table:
        with self._lock:
            if path in self._tables:
                self._tables.move_to_end(path)
                return self._tables[path]
            # Read under the lock: two readers of one file would decode it twice at the same time.
            table = pq.ParquetFile(path).read()
            self._tables[path] = table
            self._bytes += table.nbytes
            while self._bytes > self._limit_bytes and len(self._tables) > 1:
                _, dropped = self._tables.popitem(last=False)
                self._bytes -= dropped.nbytes
            return table


def columns_of(schema: pa.Schema) -> tuple[Column, ...]:
    """Columns that hold the values of an Arrow schema."""
    return tuple(Column(name=field.name, type=column_type(field.type)) for field in schema)


def _adopted(path: Path, now: float) -> TableDocument:
    files = sorted(path.rglob("[!.]*.parquet"))
    partitions: dict[str, list[DataFile]] = {}
    columns = columns_of(pq.read_schema(files[0]))
    for file in files:
        if columns_of(pq.read_schema(file)) != columns:
            raise invalid_argument(f"{file.relative_to(path)} and {files[0].relative_to(path)} have different columns")
        spec = "/".join(file.parent.relative_to(path).parts)
        rows = pq.read_metadata(file).num_rows
        partitions.setdefault(spec, []).append(DataFile(path=str(file.relative_to(path)), rows=rows, bytes=file.stat().st_size))
    partition_columns = tuple(Column(name=name, type="string") for name, _ in spec_pairs(next(iter(partitions))))
    documents = {
        normal_spec(spec, partition_columns): PartitionDocument(files=tuple(held), created_at=now, modified_at=now)
        for spec, held in partitions.items()
    }
    return TableDocument(
        columns=columns,
        partition_columns=partition_columns,
        created_at=now,
        modified_at=now,
        partitions=documents,
    )
