"""A folder of parts that appears as a whole: parts under a hidden name, then their own, then `_SUCCESS`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from tidemill.contracts import layout
from tidemill.contracts.files import FileEntry
from tidemill.contracts.output import OutputManifest
from tidemill.data.writers.output import Columns, Json
from tidemill.errors import ConfigError
from tidemill.storage.base import ObjectInfo, Storage
from tidemill.storage.commit import copy_object
from tidemill.storage.files import write_file

PART_BYTES = 128 << 20
"""Size in memory after which a part is full."""


class Folder:
    """One rank's parts of a folder, in one format: what outputs of files are made of.

    Until `commit` everything lies under a hidden name and an earlier run's output stays as it is. A commit that dies on the way
    leaves no `_SUCCESS`, so nobody takes the folder for whole, and the next commit clears what it left. One run writes a folder at
    a time.
    """

    def __init__(
        self,
        storage: Storage,
        kind: str,
        suffix: str,
        encode: Callable[[pa.Table], pa.Buffer],
        *,
        overwrite: bool,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """`encode`: rows to the bytes of a part; `suffix`: how the parts' names end."""
        self._storage = storage
        self._suffix = suffix
        self._encode = encode
        self._overwrite = overwrite
        self._part_bytes = part_bytes
        self._hidden = f"{layout.UNFINISHED_OUTPUT}/{uuid.uuid4().hex[:12]}"
        self._columns = Columns(kind)
        self._gathered: list[pa.Table] = []
        self._bytes = 0
        self._rows = 0
        self._parts: list[FileEntry] = []

    def check_free(self) -> None:
        """Raise ConfigError if the folder holds an output, whole or not, that isn't to be replaced."""
        if self._overwrite:
            return
        found = [info.key for info in [*self._storage.list(layout.SUCCESS), *self._stale()]]
        if found:
            raise ConfigError(
                f"{self._storage.url} holds an output already ({found[0]}): name another folder, or pass --overwrite to replace it"
            )

    def write(self, table: pa.Table) -> None:
        """Add rows; a part that is full goes to the store."""
        table = self._columns.conform(table)
        self._gathered.append(table)
        self._bytes += table.nbytes
        self._rows += table.num_rows
        if self._bytes >= self._part_bytes:
            self._write_part()

    def deliver(self) -> Json:
        """The receipt of all parts, the last one included."""
        if self._rows and self._gathered:
            self._write_part()
        return {"rows": self._rows, "files": [entry.model_dump() for entry in self._parts]}

    def commit(self, receipts: Sequence[Json]) -> OutputManifest:
        """Replace what the folder holds by the parts of all receipts, numbered in their order."""
        parts = [FileEntry.model_validate(file) for receipt in receipts for file in receipt["files"]]
        names = [layout.output_part(number, self._suffix) for number in range(len(parts))]
        manifest = OutputManifest(
            rows=sum(int(receipt["rows"]) for receipt in receipts),
            files=[part.model_copy(update={"key": name}) for part, name in zip(parts, names, strict=True)],
        )
        self._storage.delete(layout.SUCCESS)
        for stale in self._stale():
            self._storage.delete(stale.key)
        for part, name in zip(parts, names, strict=True):
            copy_object(self._storage, part.key, self._storage, name)
        self._storage.write(layout.SUCCESS, manifest.to_bytes())
        # What runs that were killed have left goes too.
        self._clear(layout.UNFINISHED_OUTPUT)
        return manifest

    def abort(self) -> None:
        """Drop this rank's hidden parts."""
        self._clear(self._hidden)

    def _stale(self) -> list[ObjectInfo]:
        return [info for info in self._storage.list("part-") if layout.output_part_number(info.key) is not None]

    def _clear(self, folder: str) -> None:
        for info in self._storage.list(f"{folder}/"):
            self._storage.delete(info.key)
        here = self._storage.local_path(layout.UNFINISHED_OUTPUT)
        if here is not None:
            _remove_empty_folders(here)

    def _write_part(self) -> None:
        data = self._encode(pa.concat_tables(self._gathered))
        key = f"{self._hidden}/{layout.output_part(len(self._parts), self._suffix)}"
        self._parts.append(write_file(self._storage, key, memoryview(data)))
        self._gathered, self._bytes = [], 0


def _remove_empty_folders(folder: Path) -> None:
    """Remove a folder and those below it if they hold no file; another rank's stay."""
    for path, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(path)
