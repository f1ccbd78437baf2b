"""Folds a chain of checkpoint files into full shards, in the background (D12).

Each rank folds its own row ranges from the store, not from live memory, so training isn't held up. What it writes counts only
once a later checkpoint's manifest lists it; until then the chain stays as it is, and what dies in between leaves files that nobody
lists.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tidemill import logs
from tidemill.checkpoint.chain import Chain, chain_of, overlapping
from tidemill.checkpoint.parts import OPTIMIZER, WEIGHTS, write_rows
from tidemill.clock import Clock
from tidemill.contracts.checkpoint import CheckpointManifest, FoldPart
from tidemill.contracts.files import TableFile
from tidemill.errors import CorruptError, NotFoundError, StorageError
from tidemill.lineage.terms import Writer
from tidemill.storage.base import Storage
from tidemill.storage.parts import part_key, write_part
from tidemill.storage.shards import TableShard, assemble
from tidemill.workers import BackgroundWorker

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 20
"""Size of a folded file: what one rank holds in memory while it folds a table of a local store."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows [start, stop) of a table, which this rank holds."""

    table: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """Which checkpoint is folded, and where to. `chain`: its files; None: its manifest (a key) says."""

    step: int
    manifest: str
    folder: str
    ranges: tuple[RowRange, ...]
    chain: Chain | None


class Folder:
    """This rank's share of folding, on a thread of its own; one fold at a time.

    `damage`: why what was to be folded can't be read; None while nothing is known to be wrong. Threading: `begin`, `check` and
    `abort` belong to the training thread, `finished` to the checkpoint thread; `drop` to either, while the other waits.
    """

    def __init__(self, storage: Storage, writer: Writer, *, clock: Clock) -> None:
        self._storage = storage
        self._writer = writer
        self._clock = clock
        self._stopped = False
        self._pending: Fold | None = None
        self.damage: str | None = None
        self._worker: BackgroundWorker[Fold] = BackgroundWorker("checkpoint-fold", self._fold, clock=clock)

    @property
    def pending(self) -> Fold | None:
        """What was begun, and neither adopted nor forgotten."""
        return self._pending

    @property
    def busy(self) -> bool:
        """Whether a fold runs."""
        return self._worker.busy

    @property
    def pending_folder(self) -> str | None:
        """Where files may lie that no manifest lists yet."""
        return self._pending.folder if self._pending else None

    def begin(self, step: int, saved: tuple[str, str], ranges: Sequence[RowRange], chain: Chain | None) -> None:
        """Fold this run's checkpoint of a step, which is committed. If the last fold still runs, this one is left out.

        `saved`: the key of its manifest, and the folder of its files. `chain`: the files that it lists, as rank 0 knows them.
        """
        if self.busy:
            log.info("the checkpoint of step %d isn't folded: the last fold still runs", step)
            return
        manifest, folder = saved
        self._pending = Fold(step, manifest, f"{folder}/fold", tuple(ranges), chain)
        self._worker.submit(self._pending)

    def finished(self) -> tuple[Fold, list[FoldPart]] | None:
        """The pending fold and all ranks' parts of it; None while one is missing. Raises StorageError."""
        fold = self._pending
        if fold is None:
            return None
        keys = [part_key(fold.folder, rank) for rank in range(self._writer.world_size)]
        if not set(keys) <= {info.key for info in self._storage.list(f"{fold.folder}/part-")}:
            return None
        return fold, [FoldPart.parse(self._storage.read(key), where=f"{self._storage.url}/{key}") for key in keys]

    def drop(self) -> None:
        """The pending fold is of no more use: a committed checkpoint lists it, or doesn't build on what was folded."""
        self._pending = None
        self.damage = None

    def check(self) -> None:
        """Raise the error of a bug."""
        self._worker.check()

    def abort(self) -> None:
        """Stop after the file that is being written. Doesn't wait."""
        self._stopped = True
        self._worker.abort()

    def _fold(self, fold: Fold) -> None:
        started = self._clock.monotonic()
        try:
            part = self._fold_tables(fold, fold.chain or self._read_chain(fold))
            if self._stopped:
                return
            write_part(self._storage, fold.folder, self._writer.rank, part.to_bytes())
        except StorageError as error:
            log.error("the checkpoint of step %d wasn't folded: %s", fold.step, error)
            logs.event("checkpoint.fold_failed", step=fold.step, error=str(error))
            return
        logs.event("checkpoint.folded", step=fold.step, seconds=self._clock.monotonic() - started)

    def _read_chain(self, fold: Fold) -> Chain:
        key = fold.manifest
        return chain_of(CheckpointManifest.parse(self._storage.read(key), where=f"{self._storage.url}/{key}"))

    def _fold_tables(self, fold: Fold, chain: Chain) -> FoldPart:
        try:
            return FoldPart(
                table_files=self._fold_files(fold, WEIGHTS, chain.tables),
                optimizer_files=self._fold_files(fold, OPTIMIZER, chain.optimizer),
            )
        except (CorruptError, NotFoundError) as error:
            # A fold that was dropped meanwhile may find its files deleted: nothing is wrong then.
            if self._pending is fold:
                self.damage = f"the checkpoint of step {fold.step} can't be read back: {error}"
            raise

    def _fold_files(self, fold: Fold, kind: str, files: Sequence[TableFile]) -> list[TableFile]:
        return [
            write_rows(self._storage, fold.folder, kind, shard)
            for rows in fold.ranges
            if rows.start < rows.stop
            for shard in self._fold_rows(rows, overlapping(self._storage, files, rows.table, rows.start, rows.stop))
        ]

    def _fold_rows(self, rows: RowRange, saved: Sequence[TableShard]) -> Iterator[TableShard]:
        tensors = sorted({name for shard in saved for name in shard.tensors})
        if not tensors:
            return
        row_bytes = sum(_row_bytes(next(shard.tensors[name] for shard in saved if name in shard.tensors)) for name in tensors)
        step = max(CHUNK_BYTES // max(row_bytes, 1), 1)
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            if self._stopped:
                return
            merged = {name: assemble(saved, rows.table, name, start, stop) for name in tensors}
            yield TableShard(rows.table, start, stop, None, merged)


def _row_bytes(array: np.ndarray) -> int:
    return array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
