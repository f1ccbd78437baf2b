"""Cuts: what one rank contributes to a release, copied on the training thread between two steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tidemill.contracts.progress import SplitState
from tidemill.publish.tracker import TouchedRows

if TYPE_CHECKING:
    import torch

    from tidemill.distributed.sharding import LocalShard


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """Where training stands at a SyncPoint, as one rank sees it."""

    step: int
    examples: int
    """Cumulative, the parents' included."""
    watermark: float | None
    """The quorum's."""
    event_time: float | None
    """This rank's."""
    splits: list[SplitState]
    """This rank's trained positions."""
    probe_scores: Mapping[str, np.ndarray] | None = None
    """Rank 0: the trainer's scores of the snapshot's probe rows, by output, computed in eval mode; None without probe rows."""
    newest_event_at: float | None = None
    """Largest arrival time (broker timestamp) among the rows trained since the last cut."""


@dataclass(frozen=True, slots=True, eq=False)
class ChangedRows:
    """Rows of one table as they are at the cut. `ids`: global, sorted, int64; `rows`: (len(ids), dim), a copy."""

    table: str
    ids: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """One rank's share of a release."""

    number: int
    """From 1 on, never used twice in a term."""
    moment: Moment
    cut_at: float
    rows: list[ChangedRows]
    deletes: dict[str, np.ndarray]
    """By table: ids (sorted, int64) that no rank has any more. Rank 0 only."""
    dense: dict[str, np.ndarray] | None
    """All weights of the program, copied, if their bytes differ from those last committed. Rank 0 only."""


@dataclass(slots=True)
class _DenseMemory:
    """Hashes of the dense weights: as last committed, and as of the cut in flight. None: unknown, so they travel again."""

    committed: str | None = None
    in_flight: str | None = None


@dataclass(slots=True)
class Cutter:
    """Makes one rank's cuts. `dense` gives the program's live weights on rank 0 and is None elsewhere.

    The first cut holds the dense weights whatever they are, and so does the first after one that failed: whether a failed one was
    committed after all may be unknown. Threading: belongs to the training thread.
    """

    shards: Sequence[LocalShard]
    touched: TouchedRows
    dense: Callable[[], Mapping[str, torch.Tensor]] | None = None
    deletes: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Still to be released."""
    _memory: _DenseMemory = field(default_factory=_DenseMemory, init=False)
    _number: int = field(default=0, init=False)

    def cut(self, moment: Moment, cut_at: float) -> Cut:
        """Copy what has changed since the last committed cut. The cut before must have been settled."""
        taken = self.touched.take()
        self._number += 1
        shards = {shard.table: shard for shard in self.shards}
        return Cut(
            number=self._number,
            moment=moment,
            cut_at=cut_at,
            rows=[_changed(shards[table], rows) for table, rows in taken.items()],
            deletes={table: ids for table, ids in self.deletes.items() if len(ids)},
            dense=self._changed_dense(),
        )

    def settle(self, committed: bool) -> None:
        """Take the word of rank 0 for the cut in flight. Collective in effect: every rank does it at the same SyncPoint."""
        if committed:
            self.touched.acknowledge()
            self.deletes = {}
            self._memory.committed = self._memory.in_flight
        else:
            self.touched.put_back()
            self._memory.committed = None

    def _changed_dense(self) -> dict[str, np.ndarray] | None:
        if self.dense is None:
            return None
        weights = {name: np.array(tensor.detach().cpu().numpy()) for name, tensor in self.dense().items()}
        self._memory.in_flight = digest_of(weights)
        return weights if self._memory.in_flight != self._memory.committed else None


def digest_of(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _changed(shard: LocalShard, local_rows: np.ndarray) -> ChangedRows:
    weight = shard.weight.detach().cpu().numpy()
    return ChangedRows(shard.table, local_rows + shard.row_start, weight.take(local_rows, axis=0))
