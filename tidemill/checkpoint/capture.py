"""A copy of everything that a checkpoint saves of one rank, taken on the training thread between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tidemill.contracts.progress import SplitState
from tidemill.storage.shards import TableShard

if TYPE_CHECKING:
    from tidemill.distributed.sharding import LocalShard

_ROWS = "/rows"
"""Ends the names of buffers for touched rows; no tensor's name has a "/"."""


@dataclass(frozen=True, slots=True)
class TableCapture:
    """Rows [row_start, row_stop) of a table and their optimizer state, copied; with `ids` (sorted, int64) only those of them."""

    table: str
    row_start: int
    row_stop: int
    weight: np.ndarray
    optimizer: dict[str, np.ndarray]
    ids: np.ndarray | None = None

    def shard(self, tensors: Mapping[str, np.ndarray]) -> TableShard:
        """Some of its tensors, as they are stored."""
        return TableShard(self.table, self.row_start, self.row_stop, self.ids, dict(tensors))


@dataclass(frozen=True, slots=True)
class Capture:
    """One rank's share of a checkpoint.

    `full`: the tables hold all rows, not only those touched since the last committed checkpoint; the same on all ranks.
    `dense_files`: arrays by file ("dense", "dense_optimizer", ...), on rank 0 only, since all ranks hold the same.
    `rank_state`: by owner, what `Stateful.state` gave; `shared_state`: JSON that is the same on all ranks. `blocked_s`: how long
    training was held up for it.
    """

    step: int
    examples: int
    watermark: float | None
    full: bool
    tables: list[TableCapture]
    dense_files: dict[str, dict[str, np.ndarray]]
    splits: list[SplitState]
    rank_state: dict[str, dict[str, Any]]
    shared_state: dict[str, Any]
    blocked_s: float = 0.0


class Staging:
    """Buffers for copies of the tables, kept from save to save: touching fresh pages costs five times the copy itself.

    The copies of one call are valid until the next call.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, str], np.ndarray] = {}

    def copy(self, shards: Sequence[LocalShard]) -> list[TableCapture]:
        """Copy the shards' live weights and optimizer state."""
        return [
            TableCapture(
                table=shard.table,
                row_start=shard.row_start,
                row_stop=shard.row_stop,
                weight=self._copied(shard, "weight", _array(shard.weight)),
                optimizer={name: self._copied(shard, name, _array(tensor)) for name, tensor in shard.optimizer.items()},
            )
            for shard in shards
        ]

    def copy_rows(self, shards: Sequence[LocalShard], touched: Mapping[str, np.ndarray]) -> list[TableCapture]:
        """Copy some rows only; `touched`: by table, sorted rows counted from the shard's first (int64); no entry: no row."""
        nothing = np.empty(0, np.int64)
        # Full copies are seldom, and as large as the tables: between them their memory is of better use elsewhere.
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key[2].endswith(_ROWS)}
        return [self._rows_of(shard, touched.get(shard.table, nothing)) for shard in shards]

    def _rows_of(self, shard: LocalShard, rows: np.ndarray) -> TableCapture:
        return TableCapture(
            table=shard.table,
            row_start=shard.row_start,
            row_stop=shard.row_stop,
            weight=self._gathered(shard, "weight", _array(shard.weight), rows),
            optimizer={name: self._gathered(shard, name, _array(tensor), rows) for name, tensor in shard.optimizer.items()},
            ids=rows + shard.row_start,
        )

    def _copied(self, shard: LocalShard, name: str, live: np.ndarray) -> np.ndarray:
        key = (shard.table, shard.row_start, name)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != live.shape or buffer.dtype != live.dtype:
            buffer = self._buffers[key] = np.empty_like(live)
        np.copyto(buffer, live)
        return buffer

    def _gathered(self, shard: LocalShard, name: str, live: np.ndarray, rows: np.ndarray) -> np.ndarray:
        key = (shard.table, shard.row_start, name + _ROWS)
        buffer = self._buffers.get(key)
        if buffer is None or len(buffer) < len(rows):
            # An eighth more: otherwise each save that is a little larger than the last would take fresh pages.
            room = min(len(rows) + len(rows) // 8, len(live))
            buffer = self._buffers[key] = np.empty((room, *live.shape[1:]), live.dtype)
        # Rows are in range; with the default mode NumPy would gather into a hidden buffer first.
        return np.take(live, rows, axis=0, out=buffer[: len(rows)], mode="clip")


def _array(tensor: Any) -> np.ndarray:
    array: np.ndarray = tensor.detach().cpu().numpy()
    return array
