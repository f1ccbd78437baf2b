"""The model of a simulated trainer: a table with a row for each id, that says how often and when last it was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.checkpoint.capture import TableCapture
from tidemill.checkpoint.chain import overlapping
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.contracts.files import TableSpec
from tidemill.publish.tracker import TouchedRows
from tidemill.storage.base import Storage
from tidemill.storage.shards import assemble
from tidemill.testing.rank_threads import ThreadGroup
from tidemill.testing.simulation.scheduler import Scheduler
from tidemill.testing.validating.trainer import CountingStep, Ids

TABLE = "counts"
LAST_STEP = "last_step"


@dataclass(frozen=True, slots=True, eq=False)
class CountShard:
    """Rows [row_start, row_stop) of the table: `weight` (n, 1) float32, how often; `last_step` (n,) int64, the newest step."""

    table: str
    row_start: int
    row_stop: int
    weight: np.ndarray
    last_step: np.ndarray

    @classmethod
    def of_rank(cls, num_ids: int, rank: int, world_size: int) -> CountShard:
        """A rank's share of the rows, untrained."""
        start, stop = num_ids * rank // world_size, num_ids * (rank + 1) // world_size
        return cls(TABLE, start, stop, np.zeros((stop - start, 1), np.float32), np.full(stop - start, -1, np.int64))

    def restore(self, storage: Storage, manifest: CheckpointManifest) -> None:
        """Take this share's rows from a checkpoint."""
        if self.row_start < self.row_stop:
            self.weight[:] = _rows(storage, manifest, "weight", self.row_start, self.row_stop)
            self.last_step[:] = _rows(storage, manifest, LAST_STEP, self.row_start, self.row_stop)

    def capture(self, rows: np.ndarray | None) -> TableCapture:
        """A copy of all rows, or of some, counted from the first."""
        taken: Any = slice(None) if rows is None else rows
        ids = None if rows is None else rows + self.row_start
        optimizer = {LAST_STEP: self.last_step[taken].copy()}
        return TableCapture(self.table, self.row_start, self.row_stop, self.weight[taken].copy(), optimizer, ids)


def table_spec(num_ids: int) -> TableSpec:
    """The table, as manifests name it."""
    return TableSpec(name=TABLE, num_embeddings=num_ids, embedding_dim=1)


def read_counts(storage: Storage, manifest: CheckpointManifest) -> tuple[np.ndarray, np.ndarray]:
    """The whole table of a checkpoint: ((num_ids,) how often, (num_ids,) the newest step)."""
    size = manifest.tables[0].num_embeddings
    return _rows(storage, manifest, "weight", 0, size)[:, 0], _rows(storage, manifest, LAST_STEP, 0, size)


def _rows(storage: Storage, manifest: CheckpointManifest, tensor: str, start: int, stop: int) -> np.ndarray:
    files = manifest.table_files if tensor == "weight" else manifest.optimizer_files
    return assemble(overlapping(storage, files, TABLE, start, stop), TABLE, tensor, start, stop)


class CountingModel:
    """One rank's step: gathers the ids of all ranks, as a collective does, and counts those of its own rows.

    The ranks must be at the same step, and mean the same global weight by it.
    """

    def __init__(self, shard: CountShard, group: ThreadGroup, rank: int, step: int, scheduler: Scheduler) -> None:
        self.shard = shard
        self.ids = CountingStep(0.0)
        self.touched = TouchedRows([shard])  # type: ignore[list-item]
        self._group = group
        self._rank = rank
        self.step = step
        self._scheduler = scheduler

    def __call__(self, batch: Any, global_weight: float) -> dict[str, np.ndarray]:
        self._scheduler.pause()
        step = self.step
        parts = self._group.gather("steps", self._rank, (step, global_weight, batch.ids))
        ids = np.concatenate([part[2] for part in parts])
        assert {part[:2] for part in parts} == {(step, float(len(ids)))}, f"ranks aren't at the same step: {parts}"
        self.ids(batch, global_weight)
        shard = self.shard
        mine = ids[(ids >= shard.row_start) & (ids < shard.row_stop)] - shard.row_start
        np.add.at(shard.weight, mine, np.float32(1.0))
        shard.last_step[mine] = step
        self.touched.mark(TABLE, mine)
        self.step += 1
        return {}

    def padding(self) -> Any:
        return self.ids.padding()


def take_ids(rows: pa.Table) -> Ids:
    """What a loader makes of a batch's rows."""
    ids = rows.column("id").to_numpy()
    return Ids(ids, np.ones(len(ids), np.float32))


def trained_ids(counts: Sequence[float] | np.ndarray) -> set[int]:
    """The ids that a table has counted."""
    return set(np.flatnonzero(np.asarray(counts)).tolist())
