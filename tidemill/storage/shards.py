"""Table shards: rows of an embedding table (or of its optimizer state) in a file; resharding is slicing.

A file holds at most one shard of a table: its tensors are named "<table>/weight", "<table>/momentum1", ..., its row range is the
metadata "<table>/rows" = "start:stop", and "<table>/ids", if there, says which rows of the range it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.contracts.files import FileEntry
from tidemill.errors import CorruptError
from tidemill.storage.arrays import read_arrays, read_arrays_and_metadata, read_metadata, write_arrays
from tidemill.storage.base import Storage

__all__ = [
    "TableShard",
    "assemble",
    "overlap",
    "read_arrays",
    "read_metadata",
    "read_shards",
    "split_tensor_name",
    "tensor_name",
    "write_arrays",
    "write_shards",
]

_IDS, _ROWS = "ids", "rows"


@dataclass(frozen=True, slots=True, eq=False)
class TableShard:
    """Rows [row_start, row_stop) of a table, or, with `ids`, those rows of the range (sorted, without repeats, int64).

    Each tensor's first dimension is the rows held. Raises ValueError if the parts don't fit together.
    """

    table: str
    row_start: int
    row_stop: int
    ids: np.ndarray | None
    tensors: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        if not 0 <= self.row_start <= self.row_stop:
            raise ValueError(f"table {self.table!r}: [{self.row_start}, {self.row_stop}) isn't a row range")
        if self.ids is not None:
            _check_ids(self.table, self.ids, self.row_start, self.row_stop)
        for name, tensor in self.tensors.items():
            if not name or "/" in name or name == _IDS:
                raise ValueError(f"table {self.table!r}: {name!r} can't name a tensor")
            if tensor.ndim == 0 or len(tensor) != self.num_rows:
                raise ValueError(f"table {self.table!r}: {name} has shape {tensor.shape}, for {self.num_rows} rows")

    @property
    def num_rows(self) -> int:
        """How many rows the shard holds."""
        return self.row_stop - self.row_start if self.ids is None else len(self.ids)


def tensor_name(table: str, tensor: str) -> str:
    """The name of a table's tensor inside a file: "user/emb" and "weight" -> "user/emb/weight"."""
    return f"{table}/{tensor}"


def split_tensor_name(name: str) -> tuple[str, str]:
    """The table and the tensor of a name inside a file. Raises ValueError if there is no table in it."""
    table, separator, tensor = name.rpartition("/")
    if not separator or not table or not tensor:
        raise ValueError(f"{name!r} doesn't name a table's tensor")
    return table, tensor


def write_shards(storage: Storage, key: str, shards: Sequence[TableShard], metadata: Mapping[str, str] | None = None) -> FileEntry:
    """Write shards of different tables into one file. Raises ValueError if two are of the same table."""
    arrays: dict[str, np.ndarray] = {}
    rows: dict[str, str] = {}
    for shard in shards:
        if (name := tensor_name(shard.table, _ROWS)) in rows:
            raise ValueError(f"{key!r}: two shards of table {shard.table!r} in one file")
        rows[name] = f"{shard.row_start}:{shard.row_stop}"
        if shard.ids is not None:
            arrays[tensor_name(shard.table, _IDS)] = shard.ids
        arrays |= {tensor_name(shard.table, name): tensor for name, tensor in shard.tensors.items()}
    return write_arrays(storage, key, arrays, {**(metadata or {}), **rows})


def read_shards(storage: Storage, key: str, *, sha256: str | None = None, size: int | None = None) -> list[TableShard]:
    """All shards of a file, sorted by table; arrays and errors are those of `read_arrays`."""
    arrays, metadata = read_arrays_and_metadata(storage, key, sha256=sha256, size=size)
    try:
        tensors: dict[str, dict[str, np.ndarray]] = {}
        for name, array in arrays.items():
            table, tensor = split_tensor_name(name)
            tensors.setdefault(table, {})[tensor] = array
        ranges = {split_tensor_name(name)[0]: text for name, text in metadata.items() if name.endswith(f"/{_ROWS}")}
        if missing := sorted(tensors.keys() - ranges.keys()):
            raise ValueError(f"no row range for table {missing[0]!r}")
        return [_shard(table, text, tensors.get(table, {})) for table, text in sorted(ranges.items())]
    except ValueError as error:
        raise CorruptError(f"{key!r} in {storage.url} isn't a file of table shards: {error}") from error


def overlap(shards: Iterable[TableShard], start: int, stop: int) -> list[TableShard]:
    """The parts of the shards that lie in rows [start, stop), in the same order; views, not copies. Empty parts are left out."""
    parts = (_restricted(shard, start, stop) for shard in shards)
    return [part for part in parts if part.num_rows > 0]


def assemble(shards: Sequence[TableShard], table: str, tensor: str, row_start: int, row_stop: int) -> np.ndarray:
    """Rows [row_start, row_stop) of a table's tensor, as a new array; shards of other tables or without the tensor are ignored.

    Later shards overwrite earlier ones: give full shards first, then touched rows from the oldest to the newest. Raises
    CorruptError that names the table and the rows that no shard holds, or a shard of another dtype or row shape.
    """
    chosen = [shard for shard in shards if shard.table == table and tensor in shard.tensors]
    if not chosen:
        raise CorruptError(f"table {table!r}: no shard holds {tensor!r}")
    pattern = chosen[0].tensors[tensor]
    result = np.empty((row_stop - row_start, *pattern.shape[1:]), pattern.dtype)
    covered = np.zeros(row_stop - row_start, np.bool_)
    for shard in overlap(chosen, row_start, row_stop):
        rows = shard.tensors[tensor]
        if rows.dtype != pattern.dtype or rows.shape[1:] != pattern.shape[1:]:
            raise CorruptError(
                f"table {table!r}: {tensor} of rows [{shard.row_start}, {shard.row_stop}) is {rows.dtype} {rows.shape[1:]},"
                f" elsewhere {pattern.dtype} {pattern.shape[1:]}"
            )
        held = slice(shard.row_start - row_start, shard.row_stop - row_start) if shard.ids is None else shard.ids - row_start
        result[held] = rows
        covered[held] = True
    if not covered.all():
        raise CorruptError(f"table {table!r}: no shard holds {tensor} of {_missing_rows(covered, row_start)}")
    return result


def _check_ids(table: str, ids: np.ndarray, row_start: int, row_stop: int) -> None:
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError(f"table {table!r}: ids are {ids.dtype} of shape {ids.shape}, not a vector of int64")
    if len(ids) and not (row_start <= ids[0] and ids[-1] < row_stop and bool((ids[1:] > ids[:-1]).all())):
        raise ValueError(f"table {table!r}: ids aren't sorted, repeat, or leave rows [{row_start}, {row_stop})")


def _shard(table: str, row_range: str, tensors: dict[str, np.ndarray]) -> TableShard:
    start, separator, stop = row_range.partition(":")
    if not (separator and start.isdecimal() and stop.isdecimal()):
        raise ValueError(f"table {table!r}: {row_range!r} isn't a row range")
    values = {name: array for name, array in tensors.items() if name != _IDS}
    return TableShard(table, int(start), int(stop), tensors.get(_IDS), values)


def _restricted(shard: TableShard, start: int, stop: int) -> TableShard:
    first, last = max(start, shard.row_start), min(stop, shard.row_stop)
    if (first, last) == (shard.row_start, shard.row_stop):
        return shard
    last = max(first, last)
    if shard.ids is None:
        held = slice(first - shard.row_start, last - shard.row_start)
        ids = None
    else:
        held = slice(*np.searchsorted(shard.ids, [first, last]).tolist())
        ids = shard.ids[held]
    return TableShard(shard.table, first, last, ids, {name: tensor[held] for name, tensor in shard.tensors.items()})


def _missing_rows(covered: np.ndarray, row_start: int) -> str:
    """ "3 rows: 10..12" for up to three runs of missing rows."""
    edges = np.flatnonzero(np.diff(covered, prepend=True, append=True)).reshape(-1, 2) + row_start
    runs = ", ".join(f"{first}..{stop - 1}" for first, stop in edges[:3].tolist())
    more = ", ..." if len(edges) > 3 else ""
    return f"{len(covered) - int(covered.sum())} rows: {runs}{more}"
