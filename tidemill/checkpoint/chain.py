"""What the tables of a checkpoint are restored from: full shards, then touched rows from the oldest to the newest (D12)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidemill.contracts.checkpoint import CheckpointManifest, CheckpointPart, FoldPart
from tidemill.contracts.files import FileEntry, TableFile, TableSpec
from tidemill.errors import CheckpointError, CorruptError
from tidemill.storage.base import Storage
from tidemill.storage.shards import TableShard, read_shards


@dataclass(frozen=True, slots=True)
class Chain:
    """Files in the order in which they are applied. `increments`: how many sets of touched rows follow the full shards."""

    tables: list[TableFile]
    optimizer: list[TableFile]
    increments: int = 0

    @property
    def files(self) -> list[TableFile]:
        return [*self.tables, *self.optimizer]


def chain_of(manifest: CheckpointManifest) -> Chain:
    """The files that a checkpoint lists."""
    return Chain(manifest.table_files, manifest.optimizer_files, manifest.increments)


def extend(below: Chain | None, parts: Sequence[CheckpointPart]) -> Chain:
    """What all ranks wrote, on top of the chain `below`; None: what they wrote is full."""
    tables = [file for part in parts for file in part.table_files]
    optimizer = [file for part in parts for file in part.optimizer_files]
    if below is None:
        return Chain(tables, optimizer)
    return Chain([*below.tables, *tables], [*below.optimizer, *optimizer], below.increments + 1)


def replace(chain: Chain, folded: Chain, parts: Sequence[FoldPart]) -> Chain:
    """`chain`, with the full shards of `parts` in the place of `folded`, the older chain that they were made of.

    What `chain` has beyond `folded` stays behind them, in its order.
    """
    gone = {file.file.key for file in folded.files}

    def behind(files: Sequence[TableFile]) -> list[TableFile]:
        return [file for file in files if file.file.key not in gone]

    return Chain(
        [*(file for part in parts for file in part.table_files), *behind(chain.tables)],
        [*(file for part in parts for file in part.optimizer_files), *behind(chain.optimizer)],
        chain.increments - folded.increments,
    )


def require_all_rows(tables: Sequence[TableSpec], files: Sequence[TableFile]) -> None:
    """Raises CheckpointError if full shards don't hold every row of every table exactly once: they could never be restored."""
    for table in tables:
        full = (file for file in files if file.table == table.name and not file.subset)
        held = [(start, stop) for start, stop in sorted((file.row_start or 0, file.row_stop or 0) for file in full) if start < stop]
        edges = [0, *(stop for _, stop in held)]
        if edges[:-1] != [start for start, _ in held] or edges[-1] != table.num_embeddings:
            raise CheckpointError(f"table {table.name!r}: the ranks hold rows {held}, not [0, {table.num_embeddings})")


def require_present(chain: Chain, found: Mapping[str, int]) -> None:
    """Raises CorruptError if a file of the chain is gone or has another size; `found`: size by key."""
    for file in chain.files:
        if found.get(file.file.key) != file.file.size:
            raise CorruptError(f"{file.file.key} is gone or has another size, so nothing can be saved on top of it")


def overlapping(storage: Storage, files: Iterable[TableFile], table: str, start: int, stop: int) -> list[TableShard]:
    """The shards of the files that may hold rows [start, stop) of a table, in the files' order; each checked against its hash."""
    return [shard for file in files if _overlaps(file, table, start, stop) for shard in _read(storage, file.file)]


def _overlaps(file: TableFile, table: str, start: int, stop: int) -> bool:
    if file.table != table:
        return False
    return file.row_start is None or file.row_stop is None or (file.row_start < stop and file.row_stop > start)


def _read(storage: Storage, entry: FileEntry) -> list[TableShard]:
    return read_shards(storage, entry.key, sha256=entry.sha256, size=entry.size)
