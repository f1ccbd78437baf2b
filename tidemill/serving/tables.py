"""Embedding tables of one generation: base rows mapped from the snapshot's files, changed rows beside them.

A changed row lies in an arena; `slots[id]` says where (-1: the base row, 0: the default row). An arena only grows behind what
any table refers to, and slots are copied before they change, so a lookup in flight reads its own generation's rows to the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tidemill.contracts.files import TableSpec
from tidemill.errors import CorruptError

_BASE, _DEFAULT = -1, 0
_SMALLEST_ARENA = 1024


@dataclass(frozen=True, slots=True, eq=False)
class BaseRows:
    """Rows [start, stop) of a table, as the snapshot holds them: (stop - start, dim), never written."""

    start: int
    stop: int
    rows: np.ndarray


class Arena:
    """Rows that grow at the end only; row 0 is the default row (zeros).

    Threading: `append` may be called from any thread; rows below a table's own end never change.
    """

    def __init__(self, capacity: int, dim: int, dtype: np.dtype) -> None:
        self.rows = np.empty((capacity, dim), dtype)
        self.rows[0] = 0
        self._used = 1
        self._lock = threading.Lock()

    def append(self, end: int, rows: np.ndarray) -> bool:
        """Put rows behind `end`, the caller's own end. False if there is no room, or another build has already grown from there."""
        with self._lock:
            if self._used != end or end + len(rows) > len(self.rows):
                return False
            self.rows[end : end + len(rows)] = rows
            self._used += len(rows)
            return True


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """One table as one generation sees it. Immutable; any thread may look up."""

    spec: TableSpec
    base: tuple[BaseRows, ...]
    """Sorted, without gaps, covering all rows."""
    slots: np.ndarray | None = None
    """(num_embeddings,) int32; None: no row differs from the base."""
    arena: Arena | None = None
    end: int = 1
    """Arena rows that this table may refer to."""

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """Rows of `ids` (int64): (len(ids), dim). Raises IndexError for an id outside the table."""
        rows = self._base_rows(ids)
        if self.slots is not None and self.arena is not None:
            slots = self.slots.take(ids)
            changed = np.flatnonzero(slots >= 0)
            if len(changed):
                rows[changed] = self.arena.rows.take(slots[changed], axis=0)
        return rows

    def rows(self) -> np.ndarray:
        """All rows as served now, as a new array (num_embeddings, dim)."""
        return self.lookup(np.arange(self.spec.num_embeddings, dtype=np.int64))

    def num_changed(self) -> int:
        """Rows that differ from the snapshot's, deleted ones included."""
        return 0 if self.slots is None else int(np.count_nonzero(self.slots != _BASE))

    def _base_rows(self, ids: np.ndarray) -> np.ndarray:
        if len(self.base) == 1:
            return self.base[0].rows.take(ids, axis=0)
        stops = np.array([part.stop for part in self.base])
        owner = np.searchsorted(stops, ids, side="right")
        if len(ids) and (ids.min() < 0 or owner.max() == len(self.base)):
            raise IndexError(f"table {self.spec.name!r} has rows 0 to {self.spec.num_embeddings - 1}")
        rows = np.empty((len(ids), self.spec.embedding_dim), self.base[0].rows.dtype)
        for number, part in enumerate(self.base):
            mine = np.flatnonzero(owner == number)
            rows[mine] = part.rows.take(ids[mine] - part.start, axis=0)
        return rows


class TableEdit:
    """Changes to one table on the way to the next generation; the table itself stays as it is. For one thread."""

    def __init__(self, table: Table) -> None:
        self._table = table
        spec = table.spec
        self._slots = np.full(spec.num_embeddings, _BASE, np.int32) if table.slots is None else table.slots.copy()
        self._arena = table.arena
        self._end = table.end

    def upsert(self, ids: np.ndarray, rows: np.ndarray) -> None:
        """Replace the rows of `ids`; later calls win. Raises CorruptError if ids or rows don't fit the table."""
        spec = self._table.spec
        self._check_ids(ids)
        if rows.shape != (len(ids), spec.embedding_dim):
            raise CorruptError(f"table {spec.name!r}: rows of shape {rows.shape} for {len(ids)} ids of dim {spec.embedding_dim}")
        if len(ids) == 0:
            return
        if self._arena is None or not self._arena.append(self._end, rows):
            self._arena, self._end = self._moved(len(ids))
            self._arena.append(self._end, rows)
        self._slots[ids] = np.arange(self._end, self._end + len(ids), dtype=np.int32)
        self._end += len(ids)

    def delete(self, ids: np.ndarray) -> None:
        """Let `ids` have the default row (zeros)."""
        self._check_ids(ids)
        if self._arena is None:
            self._arena, self._end = self._moved(0)
        self._slots[ids] = _DEFAULT

    def table(self) -> Table:
        """The changed table. The edit must not be used afterwards."""
        return replace(self._table, slots=self._slots, arena=self._arena, end=self._end)

    def _moved(self, room: int) -> tuple[Arena, int]:
        """A new arena and its end: the rows still referred to, and as much room again, so that growth costs O(1) a row."""
        live = np.flatnonzero(self._slots > _DEFAULT)
        spec = self._table.spec
        arena = Arena(max(_SMALLEST_ARENA, 2 * (1 + len(live) + room)), spec.embedding_dim, np.dtype(spec.dtype))
        if self._arena is not None and len(live):
            arena.append(1, self._arena.rows.take(self._slots[live], axis=0))
        self._slots[live] = np.arange(1, 1 + len(live), dtype=np.int32)
        return arena, 1 + len(live)

    def _check_ids(self, ids: np.ndarray) -> None:
        spec = self._table.spec
        if ids.ndim != 1 or ids.dtype != np.int64:
            raise CorruptError(f"table {spec.name!r}: ids must be int64 in one dimension, not {ids.dtype} {ids.shape}")
        if len(ids) and not (ids.min() >= 0 and ids.max() < spec.num_embeddings):
            raise CorruptError(
                f"table {spec.name!r}: ids {ids.min()} to {ids.max()}, but its rows are 0 to {spec.num_embeddings - 1}"
            )


class Tables(Mapping[str, Table]):
    """All tables of one generation, by name. Immutable."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = {table.spec.name: table for table in tables}

    def __getitem__(self, name: str) -> Table:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def rows(self, name: str) -> np.ndarray:
        """All rows of a table as served now, for verification: a new array (num_embeddings, dim)."""
        return self[name].rows()

    def edit(self) -> TablesEdit:
        return TablesEdit(self)


class TablesEdit:
    """Changes to some of a generation's tables; those that aren't touched are shared, not copied. For one thread."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._edits: dict[str, TableEdit] = {}

    def __getitem__(self, name: str) -> TableEdit:
        """The edit of a table, begun now if it hasn't been. Raises CorruptError for an unknown table."""
        if name not in self._tables:
            raise CorruptError(
                f"changed rows of table {name!r}, which the snapshot doesn't have (it has {', '.join(self._tables)})"
            )
        if name not in self._edits:
            self._edits[name] = TableEdit(self._tables[name])
        return self._edits[name]

    def tables(self) -> Tables:
        """The tables with all changes. The edit must not be used afterwards."""
        return Tables([self._edits[name].table() if name in self._edits else table for name, table in self._tables.items()])


def base_table(spec: TableSpec, parts: Sequence[BaseRows]) -> Table:
    """A table from the parts that the snapshot's files hold. Raises CorruptError unless they cover every row exactly once."""
    at = 0
    parts = tuple(sorted(parts, key=lambda part: part.start))
    for part in parts:
        if part.start != at or part.rows.shape != (part.stop - part.start, spec.embedding_dim):
            raise CorruptError(
                f"table {spec.name!r}: rows {part.start} to {part.stop} of shape {part.rows.shape} don't follow row {at}"
            )
        if part.rows.dtype != np.dtype(spec.dtype):
            raise CorruptError(f"table {spec.name!r}: rows are {part.rows.dtype}, the snapshot says {spec.dtype}")
        at = part.stop
    if at != spec.num_embeddings:
        raise CorruptError(f"table {spec.name!r}: files hold {at} rows of {spec.num_embeddings}")
    return Table(spec, parts)
