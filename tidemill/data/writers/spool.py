"""Rows on this machine's disk until all ranks have theirs: what is sent is sent in one go, again if need be."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import IO

import pyarrow as pa

from tidemill.data.writers.output import Columns


class Spool:
    """Rows in a temporary file (in the folder that TMPDIR names), which is gone with the process. Not thread-safe."""

    def __init__(self, kind: str) -> None:
        self._columns = Columns(kind)
        self._file: IO[bytes] | None = None
        self._writer: pa.RecordBatchStreamWriter | None = None
        self.rows = 0

    def write(self, table: pa.Table) -> None:
        """Add rows. Raises SchemaError if their columns aren't those of the rows before."""
        table = self._columns.conform(table)
        if self._writer is None:
            self._file = tempfile.TemporaryFile(prefix="tidemill-output-")  # noqa: SIM115 - closed by `close`
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writer = pa.ipc.new_stream(self._file, table.schema, options=options)
        self._writer.write_table(table)
        self.rows += table.num_rows

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, from the first; may be asked for again. Nothing may be written afterwards."""
        if self._writer is None or self._file is None:
            return
        self._writer.close()
        self._file.seek(0)
        yield from pa.ipc.open_stream(self._file)

    def close(self) -> None:
        """Drop the rows. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._file = self._writer = None
