"""Rows of one Arrow IPC file (what Feather is)."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pyarrow as pa

from tidemill.data.intervals import IntervalSet
from tidemill.data.sources.file_rows import Piece, cut, overlap, plain
from tidemill.data.sources.files import Place, reading
from tidemill.errors import DataError

# What Arrow says if bytes couldn't be had; of bytes that can't be decoded it says something else.
_NOT_READ = ", error IOError: "


class IpcRows:
    """An open file. Raises DataError if it isn't one. Its rows are counted by reading it, column by needed column."""

    def __init__(self, place: Place, path: str, columns: list[str]) -> None:
        self._path = path
        self._columns = columns
        self._stream = place.open(path)
        try:
            with reading(path):
                self._file = pa.ipc.open_file(self._stream)
                # Only the columns that are needed are read from where they lie.
                fields = [index for index, name in enumerate(self._file.schema.names) if name in columns]
                self.schema: pa.Schema = self._file.schema
                self._file = pa.ipc.open_file(self._stream, options=pa.ipc.IpcReadOptions(included_fields=fields))
                self._sizes = [self._batch(index).num_rows for index in range(self._file.num_record_batches)]
        except (OSError, pa.ArrowException) as error:
            self._stream.close()
            raise DataError(f"{path}: not an Arrow file ({error})") from None
        self.num_rows = sum(self._sizes)

    def pieces(self, wanted: IntervalSet) -> Iterator[Piece]:
        """The wanted rows, in order. Raises DataError for what can't be decoded."""
        first = 0
        for index, size in enumerate(self._sizes):
            runs = overlap(wanted, first, first + size)
            if runs:
                yield cut(self._table(index), first, runs)
            first += size

    def close(self) -> None:
        self._stream.close()

    def _batch(self, index: int) -> pa.RecordBatch:
        try:
            return self._file.get_batch(index)
        except OSError as error:
            # Of what the file's store raised Arrow keeps the words alone.
            if error.errno is None and _NOT_READ in str(error):
                raise OSError(errno.EIO, str(error).partition(" Detail: Python exception")[0]) from error
            raise

    def _table(self, index: int) -> pa.Table:
        try:
            with reading(self._path):
                table = pa.Table.from_batches([self._batch(index)])
                # Offsets that point outside would crash the process when the rows are used, not here.
                table.validate(full=True)
                return plain(table.select(self._columns))
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self._path}: its rows can't be read; it is damaged, or has changed ({error})") from error
