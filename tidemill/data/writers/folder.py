"""A folder of parts that appears as a whole: parts under a hidden name, then their own, then `_SUCCESS`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from tidemill.clock import Clock
from tidemill.contracts import layout
from tidemill.contracts.files import FileEntry
from tidemill.contracts.output import OutputManifest
from tidemill.data.writers.claim import Claim
from tidemill.data.writers.output import Columns, Json
from tidemill.errors import AlreadyExistsError, ConfigError, NotFoundError, StorageError
from tidemill.storage.base import ObjectInfo, Storage
from tidemill.storage.commit import copy_object, create_once
from tidemill.storage.files import write_file

PART_BYTES = 128 << 20
"""Size in memory after which a part is full."""

ABANDONED_S = 7 * 86400.0
"""Age after which hidden parts are taken for those of a run that was killed."""

_CLAIMS = f"{layout.UNFINISHED_OUTPUT}/terms"


class Folder:
    """One rank's parts of a folder, in one format: what outputs of files are made of.

    Until `commit` everything lies under a hidden name of its own and an earlier run's output stays as it is. A commit that dies on
    the way leaves no `_SUCCESS`, so nobody takes the folder for whole, and the next commit clears what it left. Of several jobs
    that write one folder each commits all of its output or is refused, see `Claim`.
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
        clock: Clock | None = None,
    ) -> None:
        """`encode`: rows to the bytes of a part; `suffix`: how the parts' names end."""
        self._storage = storage
        self._suffix = suffix
        self._encode = encode
        self._overwrite = overwrite
        self._part_bytes = part_bytes
        run_id = uuid.uuid4().hex[:12]
        self._hidden = f"{layout.UNFINISHED_OUTPUT}/{run_id}"
        self._claim = Claim(storage, run_id, clock)
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
            raise self._taken(found[0])

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
        """Replace what the folder holds by the parts of all receipts, numbered in their order.

        Raises FencedError if another job commits into the folder at the same time, ConfigError if one has committed meanwhile
        and isn't to be replaced.
        """
        parts = [FileEntry.model_validate(file) for receipt in receipts for file in receipt["files"]]
        names = [layout.output_part(number, self._suffix) for number in range(len(parts))]
        manifest = OutputManifest(
            rows=sum(int(receipt["rows"]) for receipt in receipts),
            files=[part.model_copy(update={"key": name}) for part, name in zip(parts, names, strict=True)],
        )
        self._require_parts(parts)
        self._take_claim()
        self._replace(parts, manifest)
        self._end({_folder_of(part.key) for part in parts})
        return manifest

    def abort(self) -> None:
        """Drop this rank's hidden parts, and its claim."""
        self._end({self._hidden})

    def _require_parts(self, parts: Sequence[FileEntry]) -> None:
        found = {info.key for info in self._storage.list(f"{layout.UNFINISHED_OUTPUT}/")}
        for part in parts:
            if part.key not in found:
                raise StorageError(f"{self._storage.url}: {part.key}, a part of this job, has been deleted: run the job again")

    def _take_claim(self) -> None:
        seen = self._claim.newest()
        # After a look at the claims: what a job with an older one puts here later is stale.
        self.check_free()
        self._claim.take(seen)
        # One that has committed whole before its claim was taken over, or between the two looks.
        if not self._overwrite and self._storage.list(layout.SUCCESS):
            raise self._taken(layout.SUCCESS)

    def _replace(self, parts: Sequence[FileEntry], manifest: OutputManifest) -> None:
        for key in [layout.SUCCESS, *(info.key for info in self._stale())]:
            self._claim.require()
            self._storage.delete(key)
        for part, entry in zip(parts, manifest.files, strict=True):
            self._claim.require()
            try:
                copy_object(self._storage, part.key, self._storage, entry.key)
            except (AlreadyExistsError, NotFoundError):
                self._claim.require()
                raise
        found = {info.key: info.size for info in self._stale()}
        self._claim.require()
        if found != {entry.key: entry.size for entry in manifest.files} or not create_once(
            self._storage, layout.SUCCESS, manifest.to_bytes()
        ):
            raise StorageError(f"{self._storage.url} holds parts that another job wrote meanwhile: run one job at a time")

    def _taken(self, key: str) -> ConfigError:
        return ConfigError(
            f"{self._storage.url} holds an output already ({key}): name another folder, or pass --overwrite to replace it"
        )

    def _stale(self) -> list[ObjectInfo]:
        return [info for info in self._storage.list("part-") if layout.output_part_number(info.key) is not None]

    def _end(self, folders: set[str]) -> None:
        """Delete what lies in these hidden folders or has been abandoned in others, and give the claim back."""
        held = self._storage.list(f"{layout.UNFINISHED_OUTPUT}/")
        newest: dict[str, float] = {}
        for info in held:
            newest[_folder_of(info.key)] = max(newest.get(_folder_of(info.key), 0.0), info.modified_at)
        # By the store's clock.
        now = max(newest.values(), default=0.0)
        gone = {folder for folder, at in newest.items() if now - at > ABANDONED_S} - {_CLAIMS} | folders
        for info in held:
            if _folder_of(info.key) in gone:
                self._storage.delete(info.key)
        self._claim.release()
        here = self._storage.local_path(layout.UNFINISHED_OUTPUT)
        if here is not None:
            _remove_empty_folders(here, {*gone, _CLAIMS}, now - ABANDONED_S)

    def _write_part(self) -> None:
        data = self._encode(pa.concat_tables(self._gathered))
        key = f"{self._hidden}/{layout.output_part(len(self._parts), self._suffix)}"
        self._parts.append(write_file(self._storage, key, memoryview(data)))
        self._gathered, self._bytes = [], 0


def _folder_of(key: str) -> str:
    return key.rpartition("/")[0]


def _remove_empty_folders(hidden: Path, ended: set[str], before: float) -> None:
    """Remove the folders in `hidden` that have ended, or were last changed `before` then, and `hidden` itself, if they are empty.

    Another job may be about to write into its own.
    """
    with suppress(OSError):
        for folder in hidden.iterdir():
            if f"{hidden.name}/{folder.name}" in ended or folder.stat().st_mtime < before:
                with suppress(OSError):
                    folder.rmdir()
        hidden.rmdir()
