"""A folder of Parquet parts that appears as a whole: readers see the old rows until the new ones are committed."""

from __future__ import annotations

import uuid

import pyarrow as pa
import pyarrow.parquet as pq

from tidemill.contracts import layout
from tidemill.contracts.files import FileEntry
from tidemill.contracts.output import OutputManifest
from tidemill.storage.base import Storage
from tidemill.storage.commit import copy_object
from tidemill.storage.files import write_file

PART_BYTES = 128 << 20


class ParquetOutput:
    """Writes tables, in order, as `part-<number>.parquet` and commits them with `_SUCCESS`, written last.

    Until `commit` everything lies under a hidden name and an earlier run's output stays as it is; a commit that dies on the way
    leaves no `_SUCCESS`, and the next one clears what it left. One run writes a folder at a time. Threading: one thread.
    """

    def __init__(self, storage: Storage, *, part_bytes: int = PART_BYTES) -> None:
        """`part_bytes`: size in memory after which a part is full."""
        self._storage = storage
        self._part_bytes = part_bytes
        self._folder = f"{layout.UNFINISHED_OUTPUT}/{uuid.uuid4().hex[:12]}"
        self._gathered: list[pa.Table] = []
        self._bytes = 0
        self._parts: list[FileEntry] = []
        self._rows = 0
        self._schema: pa.Schema | None = None

    def write(self, table: pa.Table) -> None:
        """Add rows. Raises pa.ArrowInvalid if their schema isn't that of the rows before."""
        self._schema = self._schema or table.schema
        self._gathered.append(table.cast(self._schema))
        self._bytes += table.nbytes
        self._rows += table.num_rows
        if self._bytes >= self._part_bytes:
            self._write_part()

    def commit(self) -> OutputManifest:
        """Replace what the folder holds by the rows written. Nothing may be written afterwards."""
        if self._gathered:
            self._write_part()
        manifest = OutputManifest(rows=self._rows, files=[entry.model_copy(update={"key": _name(entry)}) for entry in self._parts])
        self._storage.delete(layout.SUCCESS)
        for info in self._storage.list("part-"):
            if layout.output_part_number(info.key) is not None:
                self._storage.delete(info.key)
        for entry in self._parts:
            copy_object(self._storage, entry.key, self._storage, _name(entry))
        self._storage.write(layout.SUCCESS, manifest.to_bytes())
        # What runs that were killed have left goes too.
        self._delete(f"{layout.UNFINISHED_OUTPUT}/")
        return manifest

    def abort(self) -> None:
        """Drop what isn't committed. Idempotent."""
        self._delete(f"{self._folder}/")

    def _delete(self, prefix: str) -> None:
        for info in self._storage.list(prefix):
            self._storage.delete(info.key)

    def _write_part(self) -> None:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.concat_tables(self._gathered), sink)
        data = sink.getvalue()
        key = f"{self._folder}/{layout.output_part(len(self._parts))}"
        self._parts.append(write_file(self._storage, key, memoryview(data)))
        self._gathered, self._bytes = [], 0


def _name(entry: FileEntry) -> str:
    return entry.key.rpartition("/")[2]
