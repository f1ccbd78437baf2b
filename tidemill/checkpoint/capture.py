"""A copy of everything that a checkpoint saves of one rank, taken on the training thread between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tidemill.contracts.progress import SplitState

if TYPE_CHECKING:
    from tidemill.distributed.sharding import LocalShard


@dataclass(frozen=True, slots=True)
class TableCapture:
    """Rows [row_start, row_stop) of a table and their optimizer state, copied."""

    table: str
    row_start: int
    row_stop: int
    weight: np.ndarray
    optimizer: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Capture:
    """One rank's share of a checkpoint. `dense` and `dense_optimizer` are None on ranks above 0, which hold the same values.

    `rank_state`: by owner, what `Stateful.state` gave; `shared_state`: JSON that is the same on all ranks.
    """

    step: int
    examples: int
    watermark: float | None
    tables: list[TableCapture]
    dense: dict[str, np.ndarray] | None
    dense_optimizer: dict[str, np.ndarray] | None
    splits: list[SplitState]
    rank_state: dict[str, dict[str, Any]]
    shared_state: dict[str, Any]


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
                weight=self._copied(shard, "weight", shard.weight.detach().cpu().numpy()),
                optimizer={
                    name: self._copied(shard, name, tensor.detach().cpu().numpy()) for name, tensor in shard.optimizer.items()
                },
            )
            for shard in shards
        ]

    def _copied(self, shard: LocalShard, name: str, live: np.ndarray) -> np.ndarray:
        key = (shard.table, shard.row_start, name)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != live.shape or buffer.dtype != live.dtype:
            buffer = self._buffers[key] = np.empty_like(live)
        np.copyto(buffer, live)
        return buffer
