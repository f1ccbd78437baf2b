"""Which rows of this rank's table shards have been touched since the last release, and since the last checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from tidemill.distributed.sharding import LocalShard

UNRELEASED, UNSAVED = 0, 1
"""Bit numbers: of a row that was touched after the last cut, and after the last checkpoint."""
_BOTH = np.uint8(1 << UNRELEASED | 1 << UNSAVED)


class TouchedRows:
    """One byte a row of each local shard, a bit for each consumer; what the last cut took is kept beside it until it is settled.

    So marking is a plain assignment of all bits, the cheapest thing that NumPy can do with a batch of ids: a bit for rows in flight
    would have to be read before each write. `Stateful`: its state is all ids touched since the last acknowledged release, in flight
    included. Threading: all methods belong to the training thread.
    """

    def __init__(self, shards: Sequence[LocalShard]) -> None:
        self._starts = {shard.table: shard.row_start for shard in shards}
        if len(self._starts) != len(shards):
            raise ValueError(f"a rank holds one row range of a table, but has {[shard.table for shard in shards]}")
        self._marks = {shard.table: np.zeros(shard.row_stop - shard.row_start, np.uint8) for shard in shards}
        self._in_flight: dict[str, np.ndarray] | None = None

    def mark(self, table: str, local_rows: np.ndarray | torch.Tensor) -> None:
        """Rows of this rank's shard (counted from its first row, repeats allowed) are about to change."""
        rows = local_rows if isinstance(local_rows, np.ndarray) else local_rows.cpu().numpy()
        self._marks[table][rows] = _BOTH

    def mark_global(self, table: str, ids: np.ndarray) -> None:
        """Rows by id, as unreleased only; those of other ranks and other tables are ignored."""
        marks = self._marks.get(table)
        if marks is not None:
            local = ids - self._starts[table]
            marks[local[(local >= 0) & (local < len(marks))]] |= np.uint8(1 << UNRELEASED)

    def take(self) -> dict[str, np.ndarray]:
        """Move all touched rows in flight; by table, sorted local rows (int64), tables without any left out.

        Raises RuntimeError if the rows taken before haven't been acknowledged or put back.
        """
        if self._in_flight is not None:
            raise RuntimeError("the rows of the last cut are still in flight")
        self._in_flight = self._take(UNRELEASED)
        return dict(self._in_flight)

    def take_unsaved(self) -> dict[str, np.ndarray]:
        """The rows touched since the last call, like `take`; nothing has to be acknowledged."""
        return self._take(UNSAVED)

    def acknowledge(self) -> None:
        """The rows in flight are committed. Without any in flight: nothing happens."""
        self._in_flight = None

    def put_back(self) -> None:
        """The rows in flight weren't committed: they are touched again."""
        for table, rows in (self._in_flight or {}).items():
            self._marks[table][rows] |= np.uint8(1 << UNRELEASED)
        self._in_flight = None

    def count(self) -> int:
        """Rows touched since the last cut."""
        return sum(int(np.count_nonzero(_bit(marks, UNRELEASED))) for marks in self._marks.values())

    def state(self) -> dict[str, Any]:
        """Ids (sorted, int64) by table."""
        local = self._rows(UNRELEASED)
        for table, rows in (self._in_flight or {}).items():
            local[table] = np.union1d(local[table], rows) if table in local else rows
        return {table: rows + self._starts[table] for table, rows in local.items()}

    def load_state(self, states: list[dict[str, Any]]) -> None:
        """Mark what lies in this rank's row ranges."""
        for state in states:
            for table, ids in state.items():
                self.mark_global(table, np.asarray(ids, np.int64))

    def _take(self, bit: int) -> dict[str, np.ndarray]:
        rows = self._rows(bit)
        for table in rows:
            self._marks[table] &= np.uint8(_BOTH ^ (1 << bit))
        return rows

    def _rows(self, bit: int) -> dict[str, np.ndarray]:
        rows = {table: np.flatnonzero(_bit(marks, bit)) for table, marks in self._marks.items()}
        return {table: found for table, found in rows.items() if len(found)}


def _bit(marks: np.ndarray, bit: int) -> np.ndarray:
    # As bools: NumPy finds those five times faster than nonzero bytes.
    return ((marks >> np.uint8(bit)) & np.uint8(1)).view(np.bool_)
