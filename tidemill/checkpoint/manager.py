"""Writes checkpoints in the background: data first, the manifest last, fenced by term (D4, D5)."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill import logs
from tidemill.checkpoint.capture import Capture, TableCapture
from tidemill.checkpoint.retention import prune
from tidemill.clock import Clock, SystemClock
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest, CheckpointPart, ParentCheckpoint, RankState
from tidemill.contracts.files import FileEntry, TableFile, TableSpec
from tidemill.contracts.progress import DataloaderState
from tidemill.data.progress import merge_states
from tidemill.errors import CheckpointError, DeadlineError, StorageError
from tidemill.lineage.terms import Writer, require_unfenced
from tidemill.storage.arrays import write_arrays
from tidemill.storage.base import Storage
from tidemill.storage.commit import create_once
from tidemill.storage.files import write_file
from tidemill.storage.parts import await_parts, write_part
from tidemill.storage.shards import TableShard, write_shards
from tidemill.workers import BackgroundWorker

log = logging.getLogger(__name__)


_TRIES = 3
"""How often a rank tries to write its part; the others would wait for it in vain."""
_RETRY_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    capture: Capture


class CheckpointManager:
    """Saves this rank's share of each checkpoint on its own thread; rank 0's also gathers the parts and commits the manifest.

    A save that fails for the store's sake is reported by `settled` and logged; training goes on. A fenced run, or a bug, raises
    from `check`. Threading: all methods belong to the training thread.
    """

    def __init__(
        self,
        storage: Storage,
        writer: Writer,
        *,
        tables: list[TableSpec],
        parent: ParentCheckpoint | None = None,
        pipeline: str = "",
        keep: int = 0,
        part_timeout_s: float = 180.0,
        clock: Clock | None = None,
    ) -> None:
        self._storage = storage
        self._writer = writer
        self._tables = tables
        self._parent = parent
        self._pipeline = pipeline.encode()
        self._keep = keep
        self._part_timeout_s = part_timeout_s
        self._clock = clock or SystemClock()
        self._number = 0
        self._settled = (0, False)
        self._newest: tuple[str, CheckpointManifest] | None = None
        self._worker: BackgroundWorker[_Job] = BackgroundWorker("checkpoint", self._save, clock=self._clock)

    @property
    def settled(self) -> tuple[int, bool]:
        """The newest save that has ended, counted from 1, and whether it was committed (above rank 0: its part is durable)."""
        return self._settled

    @property
    def newest(self) -> tuple[str, CheckpointManifest] | None:
        """Key and manifest of the newest checkpoint that this run committed; rank 0 only."""
        return self._newest

    @property
    def ready(self) -> bool:
        """Whether `save` would return at once."""
        return self._worker.ready

    def save(self, capture: Capture) -> int:
        """Hand over a capture; its arrays must not change until the save is settled. Returns the save's number."""
        self._number += 1
        self._worker.submit(_Job(self._number, capture))
        return self._number

    def check(self) -> None:
        """Raise FencedError, or the error of a bug, if saving has stopped for good."""
        self._worker.check()

    def close(self, *, deadline_s: float) -> None:
        """Finish the running save and stop."""
        self._worker.close(deadline_s=deadline_s)

    def abort(self) -> None:
        """Stop without waiting; a save under way may or may not be committed."""
        self._worker.abort()

    def _save(self, job: _Job) -> None:
        started = self._clock.monotonic()
        step = job.capture.step
        try:
            self._write_part_patiently(job)
            if self._writer.rank == 0:
                self._commit(job)
        except (StorageError, DeadlineError) as error:
            log.error("checkpoint at step %d wasn't saved: %s", step, error)
            logs.event("checkpoint.failed", step=step, error=str(error))
            self._settled = (job.number, False)
            return
        self._settled = (job.number, True)
        if self._writer.rank == 0:
            logs.event("checkpoint.saved", step=step, term=self._writer.term, seconds=self._clock.monotonic() - started)
            prune(self._storage, keep=self._keep)

    def _folder(self, job: _Job) -> str:
        # The number keeps a second save at the same step away from the parts of the first.
        return f"{layout.checkpoint_files(job.capture.step, self._writer.term)}/{job.number:06d}"

    def _write_part_patiently(self, job: _Job) -> None:
        for attempt in range(1, _TRIES + 1):
            try:
                return self._write_part(job)
            except StorageError as error:
                if attempt == _TRIES or not error.retryable:
                    raise
                log.warning("checkpoint at step %d: rank %d tries again: %s", job.capture.step, self._writer.rank, error)
            # The same keys and bytes again, so a write whose outcome is unknown does no harm.
            self._clock.sleep(_RETRY_PAUSE_S)
        raise AssertionError("the last try returns or raises")

    def _write_part(self, job: _Job) -> None:
        capture, rank = job.capture, self._writer.rank
        folder = self._folder(job)
        files: dict[str, FileEntry] = {}
        if capture.dense is not None:
            files["dense"] = write_arrays(self._storage, f"{folder}/dense.safetensors", capture.dense)
        if capture.dense_optimizer is not None:
            files["dense_optimizer"] = write_arrays(self._storage, f"{folder}/dense_optimizer.safetensors", capture.dense_optimizer)
        part = CheckpointPart(
            table_files=[self._write_table(folder, table, {"weight": table.weight}, "tables") for table in capture.tables],
            optimizer_files=[
                self._write_table(folder, table, table.optimizer, "optimizer") for table in capture.tables if table.optimizer
            ],
            files=files,
            splits=capture.splits,
            state=self._write_rank_state(f"{folder}/state-{rank:05d}.safetensors", capture.rank_state),
        )
        write_part(self._storage, folder, rank, part.to_bytes())

    def _write_table(self, folder: str, table: TableCapture, tensors: Mapping[str, np.ndarray], kind: str) -> TableFile:
        key = f"{folder}/{kind}/{table.table}-{table.row_start:012d}.safetensors"
        shard = TableShard(table.table, table.row_start, table.row_stop, None, dict(tensors))
        return TableFile(
            table=table.table,
            file=write_shards(self._storage, key, [shard]),
            row_start=table.row_start,
            row_stop=table.row_stop,
        )

    def _write_rank_state(self, key: str, state: Mapping[str, Mapping[str, Any]]) -> RankState:
        arrays: dict[str, np.ndarray] = {}
        values: dict[str, Any] = {}
        for owner, fields in state.items():
            if "/" in owner:
                raise ValueError(f"state owner {owner!r}: '/' separates owner and array in the file")
            arrays |= {f"{owner}/{name}": value for name, value in fields.items() if isinstance(value, np.ndarray)}
            values[owner] = {name: value for name, value in fields.items() if not isinstance(value, np.ndarray)}
        stored = write_arrays(self._storage, key, arrays) if arrays else None
        return RankState(rank=self._writer.rank, arrays=stored, values=values)

    def _commit(self, job: _Job) -> None:
        capture, writer = job.capture, self._writer
        folder = self._folder(job)
        documents = await_parts(self._storage, folder, writer.world_size, self._part_timeout_s, self._clock)
        parts = [CheckpointPart.parse(document, where=f"{folder} part {n}") for n, document in enumerate(documents)]
        _require_all_rows(self._tables, [file for part in parts for file in part.table_files])
        dataloader_state = DataloaderState(
            passes_completed=int(capture.shared_state.get("passes_completed", 0)),
            splits=merge_states(part.splits for part in parts),
            watermark=capture.watermark,
        )
        files = {
            **parts[0].files,
            "dataloader_state": write_file(self._storage, f"{folder}/{layout.DATALOADER_STATE}", dataloader_state.to_bytes()),
            "pipeline": write_file(self._storage, f"{folder}/{layout.PIPELINE}", self._pipeline),
        }
        manifest = CheckpointManifest(
            step=capture.step,
            term=writer.term,
            run_id=writer.run_id,
            nonce=uuid.uuid4().hex,
            created_at=self._clock.time(),
            world_size=writer.world_size,
            examples=capture.examples,
            tables=self._tables,
            table_files=[file for part in parts for file in part.table_files],
            optimizer_files=[file for part in parts for file in part.optimizer_files],
            files=files,
            rank_states=[part.state for part in parts],
            watermark=capture.watermark,
            parent=self._parent,
            state=capture.shared_state,
        )
        key = layout.checkpoint_manifest(capture.step, writer.term)
        require_unfenced(self._storage, writer.term)
        if not create_once(self._storage, key, manifest.to_bytes(), clock=self._clock):
            manifest = self._own_earlier(key)
        self._newest = (key, manifest)

    def _own_earlier(self, key: str) -> CheckpointManifest:
        """What holds the key: this run's earlier save of the same step, of which the store had said that it failed, is as good."""
        earlier = CheckpointManifest.parse(self._storage.read(key), where=f"{self._storage.url}/{key}")
        if earlier.run_id != self._writer.run_id:
            raise StorageError(f"{self._storage.url}/{key} is of run {earlier.run_id}; nothing was replaced")
        return earlier


def _require_all_rows(tables: Sequence[TableSpec], files: Sequence[TableFile]) -> None:
    """Raises CheckpointError if the parts don't hold every row of every table exactly once: they could never be restored."""
    for table in tables:
        ranges = sorted((file.row_start or 0, file.row_stop or 0) for file in files if file.table == table.name)
        held = [(start, stop) for start, stop in ranges if start < stop]
        edges = [0, *(stop for _, stop in held)]
        if edges[:-1] != [start for start, _ in held] or edges[-1] != table.num_embeddings:
            raise CheckpointError(f"table {table.name!r}: the ranks hold rows {held}, not [0, {table.num_embeddings})")
