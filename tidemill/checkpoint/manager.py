"""Writes checkpoints in the background: data first, the manifest last, fenced by term (D4, D5)."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from tidemill import logs
from tidemill.checkpoint.capture import Capture
from tidemill.checkpoint.chain import Chain, chain_of, extend, replace, require_all_rows, require_present
from tidemill.checkpoint.discovery import list_checkpoints
from tidemill.checkpoint.fold import Fold, Folder, RowRange
from tidemill.checkpoint.parts import write_capture
from tidemill.checkpoint.retention import BestStep, prune, sweep
from tidemill.clock import Clock, SystemClock
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest, CheckpointPart, ParentCheckpoint
from tidemill.contracts.files import FileEntry, TableSpec
from tidemill.contracts.progress import DataloaderState
from tidemill.data.progress import merge_states
from tidemill.errors import CorruptError, DeadlineError, StorageError
from tidemill.lineage.terms import Writer, require_unfenced
from tidemill.storage.base import Storage
from tidemill.storage.commit import create_once
from tidemill.storage.files import write_file
from tidemill.storage.parts import await_parts, write_part
from tidemill.workers import BackgroundWorker

log = logging.getLogger(__name__)

_TRIES = 3
"""How often a rank tries to write its part; the others would wait for it in vain."""
_RETRY_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class _Job:
    """One save. `again`: this run had begun one at the same step before."""

    number: int
    capture: Capture
    again: bool

    @property
    def save(self) -> int:
        """What its names say."""
        return self.number if self.again else 0


@dataclass(frozen=True, slots=True)
class Increments:
    """Incremental checkpoints: `base`: the checkpoint that the live tables were restored from, if it is of this folder.

    `fold_after`: after so many of them their chain is folded into full shards.
    """

    base: CheckpointManifest | None
    fold_after: int


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
        best: BestStep = lambda steps: None,
        increments: Increments | None = None,
        part_timeout_s: float = 180.0,
        clock: Clock | None = None,
    ) -> None:
        """`increments`: None: every checkpoint is full. `keep`, `best`: see `retention.prune`."""
        self._storage = storage
        self._writer = writer
        self._tables = tables
        self._parent = parent
        self._pipeline = pipeline.encode()
        self._keep = keep
        self._best = best
        self._increments = increments
        self._part_timeout_s = part_timeout_s
        self._clock = clock or SystemClock()
        self._number = 0
        self._settled = (0, False)
        self._newest: tuple[str, CheckpointManifest] | None = None
        self._base = increments.base if increments else None
        """Rank 0: what the next incremental checkpoint builds on."""
        self._has_base = self._base is not None
        self._since_fold = self._base.increments if self._base else 0
        self._saving: _Job | None = None
        self._last_step = -1
        self._swept = False
        self._fold = Folder(storage, writer, clock=self._clock)
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

    @property
    def folding(self) -> bool:
        """Whether this rank's share of a fold is under way."""
        return self._fold.busy

    @property
    def wants_full(self) -> bool:
        """Whether the next capture must be full; the same on all ranks, once they know how the last save ended.

        It is whenever the last save wasn't committed: so nobody need know which rows that one held.
        """
        return self._increments is None or not self._has_base

    def save(self, capture: Capture) -> int:
        """Hand over a capture; its arrays must not change until the save is settled. Returns the save's number.

        A second one of the same step gets a manifest of its own, and counts instead of the first: rows may have been done with, or
        a pass, though no step followed.
        """
        self._number += 1
        self._saving = _Job(self._number, capture, again=capture.step == self._last_step)
        self._last_step = capture.step
        self._worker.submit(self._saving)
        return self._number

    def on_settled(self, number: int, committed: bool) -> None:
        """Rank 0's word on the last save. Every rank takes it at the same SyncPoint, and folds at the same checkpoints."""
        job, increments = self._saving, self._increments
        self._has_base, self._saving = committed, None
        if job is None or increments is None or not committed:
            return
        capture = job.capture
        if capture.full:
            self._since_fold = 0
            self._fold.drop()
            return
        self._since_fold += 1
        if self._since_fold >= increments.fold_after:
            self._since_fold = 0
            ranges = [RowRange(table.table, table.row_start, table.row_stop) for table in capture.tables]
            chain = chain_of(self._base) if self._writer.rank == 0 and self._base else None
            self._fold.begin(capture.step, (self._key(job), self._folder(job)), ranges, chain)

    def check(self) -> None:
        """Raise FencedError, or the error of a bug, if saving has stopped for good."""
        self._worker.check()
        self._fold.check()

    def close(self, *, deadline_s: float) -> None:
        """Finish the running save and stop. A fold under way is given up."""
        self._fold.abort()
        self._worker.close(deadline_s=deadline_s)

    def abort(self) -> None:
        """Stop without waiting; a save under way may or may not be committed."""
        self._fold.abort()
        self._worker.abort()

    def _save(self, job: _Job) -> None:
        started = self._clock.monotonic()
        step = job.capture.step
        try:
            self._write_part_patiently(job)
            manifest = self._commit(job) if self._writer.rank == 0 else None
        except (StorageError, DeadlineError) as error:
            log.error("checkpoint at step %d wasn't saved: %s", step, error)
            logs.event("checkpoint.failed", step=step, error=str(error))
            self._settled = (job.number, False)
            return
        self._settled = (job.number, True)
        if manifest is not None:
            logs.event(
                "checkpoint.saved",
                step=step,
                term=self._writer.term,
                seconds=self._clock.monotonic() - started,
                blocked_s=job.capture.blocked_s,
                increments=manifest.increments,
            )
            self._tidy(self._key(job))

    def _tidy(self, newest: str) -> None:
        """Delete old checkpoints and what died, unless another run has taken over: it may build on them."""
        if self._keep <= 0 and self._swept:
            return
        try:
            require_unfenced(self._storage, self._writer.term)
        except StorageError as error:
            log.warning("old checkpoints not deleted: %s", error)
            return
        if not self._swept:
            self._swept = True
            sweep(self._storage, newest)
        prune(self._storage, keep=self._keep, spare=self._fold.pending_folder, best=self._best)

    def _key(self, job: _Job) -> str:
        return layout.checkpoint_manifest(job.capture.step, self._writer.term, job.save)

    def _folder(self, job: _Job) -> str:
        return layout.checkpoint_files(job.capture.step, self._writer.term, job.save)

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
        rank, folder = self._writer.rank, self._folder(job)
        # A full save builds on nothing, so what is wrong with earlier files is no matter.
        damage = None if job.capture.full else self._fold.damage
        part = write_capture(self._storage, folder, rank, job.capture, damage)
        write_part(self._storage, folder, rank, part.to_bytes())

    def _commit(self, job: _Job) -> CheckpointManifest:
        capture, writer = job.capture, self._writer
        folder = self._folder(job)
        documents = await_parts(self._storage, folder, writer.world_size, self._part_timeout_s, self._clock)
        parts = [CheckpointPart.parse(document, where=f"{folder} part {n}") for n, document in enumerate(documents)]
        adopted, below = (None, None) if capture.full else self._below(parts)
        chain = extend(below, parts)
        require_all_rows(self._tables, chain.tables)
        manifest = self._manifest(capture, parts, chain, self._write_shared_files(capture, parts, folder))
        key = self._key(job)
        require_unfenced(self._storage, writer.term)
        if not create_once(self._storage, key, manifest.to_bytes(), clock=self._clock):
            raise StorageError(f"{self._storage.url}/{key} is another run's; nothing was replaced")
        self._newest = (key, manifest)
        self._base = manifest
        if capture.full or adopted:
            self._fold.drop()
        return manifest

    def _below(self, parts: Sequence[CheckpointPart]) -> tuple[Fold | None, Chain]:
        """What an incremental checkpoint builds on, and the fold in it, if one has been finished.

        Raises CorruptError if files of it are damaged, as far as any rank knows.
        """
        assert self._base is not None
        for rank, part in enumerate(parts):
            if part.damage:
                raise CorruptError(f"rank {rank}: {part.damage}")
        chain = chain_of(self._base)
        finished = self._fold.finished()
        fold = None
        if finished is not None:
            fold, fold_parts = finished
            chain = replace(chain, fold.chain or Chain([], []), fold_parts)
        require_present(chain, list_checkpoints(self._storage))
        return fold, chain

    def _write_shared_files(self, capture: Capture, parts: Sequence[CheckpointPart], folder: str) -> dict[str, FileEntry]:
        dataloader_state = DataloaderState(
            passes_completed=int(capture.shared_state.get("passes_completed", 0)),
            splits=merge_states(part.splits for part in parts),
            watermark=capture.watermark,
        )
        return {
            **parts[0].files,
            "dataloader_state": write_file(self._storage, f"{folder}/{layout.DATALOADER_STATE}", dataloader_state.to_bytes()),
            "pipeline": write_file(self._storage, f"{folder}/{layout.PIPELINE}", self._pipeline),
        }

    def _manifest(
        self, capture: Capture, parts: Sequence[CheckpointPart], chain: Chain, files: dict[str, FileEntry]
    ) -> CheckpointManifest:
        writer = self._writer
        return CheckpointManifest(
            step=capture.step,
            term=writer.term,
            run_id=writer.run_id,
            nonce=uuid.uuid4().hex,
            created_at=self._clock.time(),
            world_size=writer.world_size,
            examples=capture.examples,
            tables=self._tables,
            table_files=chain.tables,
            optimizer_files=chain.optimizer,
            increments=chain.increments,
            files=files,
            rank_states=[part.state for part in parts],
            watermark=capture.watermark,
            parent=self._parent,
            state=capture.shared_state,
        )
