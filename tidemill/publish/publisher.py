"""Commits releases in the background: every rank's segments, then the gate, then one exclusive create (D6)."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from tidemill import logs
from tidemill.clock import Clock, SystemClock
from tidemill.contracts import layout
from tidemill.contracts.files import FileEntry
from tidemill.contracts.release import CurrentHint, CutPart, ReleaseManifest, SegmentEntry, Stages
from tidemill.data.progress import merge_states
from tidemill.errors import DeadlineError, FencedError, LineageError, PublishError, StorageError
from tidemill.lineage.terms import Writer, require_unfenced
from tidemill.publish.cut import Cut, Cutter, Moment
from tidemill.publish.gate import Candidate, Gate
from tidemill.publish.recovery import PublishCursor, read_release
from tidemill.storage.arrays import read_arrays, write_arrays
from tidemill.storage.base import Storage
from tidemill.storage.commit import create_once
from tidemill.storage.parts import await_parts, write_part
from tidemill.workers import BackgroundWorker

log = logging.getLogger(__name__)

_SUBMIT_WAIT_S = 0.25
"""How long training waits for the worker: it may report a cut as settled a moment before it is free for the next."""

_MAX_OWN_RELEASES = 64


@dataclass(frozen=True, slots=True)
class PublishSettings:
    """`part_timeout_s`: how long rank 0 waits for the other ranks' segments before it gives a cut up."""

    gate: Gate = field(default_factory=Gate)
    part_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class PublishCounts:
    """Cuts of this run by what became of them; on ranks above 0, "committed" means that the rank's part is durable."""

    committed: int = 0
    failed: int = 0
    last_failure: str | None = None


class Publisher:
    """Publishes this rank's cuts on its own thread; rank 0's also gathers the parts, gates and commits the release.

    A cut that fails (store, deadline, gate) is counted, logged and reported by `settled`; its rows are put back and training goes
    on. A fenced run, or a bug, raises from `check`. At most one cut is under way: the next one waits for `on_settled`.
    `sequence`: what `open_releases` returned to rank 0. Threading: all methods belong to the training thread.
    """

    def __init__(
        self,
        storage: Storage,
        writer: Writer,
        cutter: Cutter,
        cursor: PublishCursor,
        *,
        sequence: int,
        settings: PublishSettings | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._storage = storage
        self._writer = writer
        self._cutter = cutter
        self._cursor = cursor
        self._sequence = sequence
        self._settings = settings or PublishSettings()
        self._clock = clock or SystemClock()
        self._settled = (0, False)
        self._newest: ReleaseManifest | None = None
        self._counts = PublishCounts()
        self._worker: BackgroundWorker[Cut] = BackgroundWorker("publish", self._publish, clock=self._clock)

    @property
    def ready(self) -> bool:
        """Whether a cut could be handed over at once; for the rank's report."""
        return self._worker.ready

    @property
    def settled(self) -> tuple[int, bool]:
        """The newest cut that has ended, and whether it was committed. On ranks above 0: whether this rank's part is durable."""
        return self._settled

    @property
    def newest(self) -> ReleaseManifest | None:
        """The newest release that this run committed; rank 0 only."""
        return self._newest

    @property
    def counts(self) -> PublishCounts:
        return self._counts

    def cut(self, moment: Moment) -> int:
        """Copy what has changed and hand it over; returns the cut's number. Every rank must call it at the same SyncPoint.

        A rank whose worker is still busy with an earlier cut doesn't wait: the cut fails there, and so it fails as a whole.
        """
        self._worker.check()
        cut = self._cutter.cut(moment, self._clock.time())
        try:
            self._worker.submit(cut, deadline_s=_SUBMIT_WAIT_S)
        except DeadlineError as error:
            self._fail(cut, error)
        return cut.number

    def on_settled(self, number: int, committed: bool) -> None:
        """Rank 0's word for the cut under way, at the same SyncPoint on every rank: clear its rows' marks, or put them back."""
        self._cutter.settle(committed)
        if committed and self._newest is not None and self._newest.cut == number:
            self._cursor.sequence = self._newest.sequence

    def check(self) -> None:
        """Raise FencedError, or the error of a bug, if publishing has stopped for good."""
        self._worker.check()

    def drain(self, *, deadline_s: float) -> None:
        """Wait until the cut under way has ended, whatever its outcome. Raises what `check` raises, or DeadlineError."""
        self._worker.drain(deadline_s=deadline_s)

    def close(self, *, deadline_s: float) -> None:
        """Finish the cut under way and stop."""
        self._worker.close(deadline_s=deadline_s)

    def abort(self) -> None:
        """Stop without waiting; a cut under way may or may not be committed."""
        self._worker.abort()

    def _publish(self, cut: Cut) -> None:
        try:
            self._write_part(cut)
            manifest = self._release(cut) if self._writer.rank == 0 else None
        except (StorageError, DeadlineError, PublishError) as error:
            self._fail(cut, error)
            return
        if manifest is not None:
            self._newest = manifest
            self._announce(manifest)
        self._counts = PublishCounts(self._counts.committed + 1, self._counts.failed, self._counts.last_failure)
        self._settled = (cut.number, True)

    def _fail(self, cut: Cut, error: Exception) -> None:
        log.error("cut %d at step %d wasn't released: %s", cut.number, cut.moment.step, error)
        logs.event("release.failed", term=self._writer.term, cut=cut.number, step=cut.moment.step, error=str(error))
        self._counts = PublishCounts(self._counts.committed, self._counts.failed + 1, str(error))
        self._settled = (cut.number, False)

    def _folder(self, cut: Cut) -> str:
        return layout.segments(self._writer.term, cut.number)

    def _write_part(self, cut: Cut) -> None:
        folder, rank, moment = self._folder(cut), self._writer.rank, cut.moment
        key = f"{folder}/rank-{rank:05d}.safetensors"
        arrays, segments = _segments(cut, key)
        files = [write_arrays(self._storage, key, arrays)] if arrays else []
        dense = None
        if cut.dense is not None:
            dense = write_arrays(self._storage, f"{folder}/dense.safetensors", cut.dense)
        part = CutPart(
            rank=rank,
            term=self._writer.term,
            cut=cut.number,
            step=moment.step,
            segments=segments,
            files=files,
            splits=moment.splits,
            event_time=moment.event_time,
            dense=dense,
            probe_scores=_finite_scores(moment),
            newest_event_at=moment.newest_event_at,
        )
        write_part(self._storage, folder, rank, part.to_bytes())

    def _release(self, cut: Cut) -> ReleaseManifest:
        folder = self._folder(cut)
        documents = await_parts(self._storage, folder, self._writer.world_size, self._settings.part_timeout_s, self._clock)
        parts = [CutPart.parse(document, where=f"{folder} part {rank}") for rank, document in enumerate(documents)]
        odd = [part.rank for part in parts if (part.term, part.cut, part.step) != (self._writer.term, cut.number, cut.moment.step)]
        if odd:
            raise PublishError(f"{folder}: the parts of ranks {odd} are of another term, cut or step")
        written_at = self._clock.time()
        self._settings.gate.check(self._candidate(cut, parts), cut.moment.probe_scores)
        return self._commit(cut, parts, written_at, self._clock.time())

    def _candidate(self, cut: Cut, parts: list[CutPart]) -> Candidate:
        dense = parts[0].dense
        return Candidate(
            term=self._writer.term,
            sequence=self._sequence + 1,
            step=cut.moment.step,
            watermark=cut.moment.watermark,
            segments=[self._read_back(entry) for part in parts for entry in part.files],
            dense=None if dense is None else self._read_back(dense),
        )

    def _read_back(self, entry: FileEntry) -> dict[str, np.ndarray]:
        return read_arrays(self._storage, entry.key, sha256=entry.sha256, size=entry.size)

    def _commit(self, cut: Cut, parts: list[CutPart], written_at: float, gated_at: float) -> ReleaseManifest:
        for _ in range(_MAX_OWN_RELEASES):
            manifest = self._manifest(cut, parts, written_at, gated_at)
            # The sequence is chosen before the look for newer terms, so that no release of one can lie below it.
            require_unfenced(self._storage, self._writer.term)
            created = create_once(self._storage, layout.release(manifest.sequence), manifest.to_bytes(), clock=self._clock)
            if not created:
                self._require_own(manifest.sequence)
            self._sequence = manifest.sequence
            if created:
                return manifest
        raise PublishError(f"{self._storage.url}: {_MAX_OWN_RELEASES} sequences in a row were taken by this run's earlier cuts")

    def _require_own(self, sequence: int) -> None:
        """The sequence is taken: fine if an earlier cut of this run has it, whose unknown outcome counted as failed.

        Its rows were put back, so the cut at hand holds them all. Raises FencedError if a newer term has it.
        """
        winner = read_release(self._storage, sequence)
        if winner.term > self._writer.term:
            raise FencedError(f"{self._storage.url}: release {sequence} is of term {winner.term}; term {self._writer.term} is over")
        if winner.run_id != self._writer.run_id:
            # open_releases shuts out all earlier terms, so this run was started without it.
            raise LineageError(
                f"{self._storage.url}: release {sequence} is of run {winner.run_id}, term {winner.term}, although term"
                f" {self._writer.term} is open; start this run again, so that it takes up the keys of that release"
            )

    def _manifest(self, cut: Cut, parts: list[CutPart], written_at: float, gated_at: float) -> ReleaseManifest:
        dense = parts[0].dense
        arrivals = [part.newest_event_at for part in parts if part.newest_event_at is not None]
        return ReleaseManifest(
            sequence=self._sequence + 1,
            term=self._writer.term,
            cut=cut.number,
            run_id=self._writer.run_id,
            nonce=uuid.uuid4().hex,
            snapshot_digest=self._cursor.snapshot_digest,
            step=cut.moment.step,
            examples=cut.moment.examples,
            watermark=cut.moment.watermark,
            segments=[segment for part in parts for segment in part.segments],
            files=[entry for part in parts for entry in part.files] + ([] if dense is None else [dense]),
            dense=dense,
            splits=merge_states(part.splits for part in parts),
            stages=Stages(
                newest_event_at=max(arrivals, default=None),
                cut_at=cut.cut_at,
                written_at=written_at,
                gated_at=gated_at,
                committed_at=self._clock.time(),
            ),
        )

    def _announce(self, manifest: ReleaseManifest) -> None:
        """Write the hint for pollers, and say what was released. The release stands whatever happens here."""
        hint = CurrentHint(
            version=f"{manifest.sequence:08d}",
            checkpoint_step=manifest.step,
            data_timestamp=manifest.watermark,
            created_at=datetime.fromtimestamp(manifest.stages.committed_at, UTC).isoformat(),
            sequence=manifest.sequence,
            term=manifest.term,
        )
        try:
            self._storage.write(layout.CURRENT, hint.to_bytes())
        except StorageError as error:
            log.warning("release %d is committed, but its hint %s isn't: %s", manifest.sequence, layout.CURRENT, error)
        logs.event(
            "release.committed",
            sequence=manifest.sequence,
            term=manifest.term,
            cut=manifest.cut,
            step=manifest.step,
            watermark=manifest.watermark,
            upserts=sum(segment.upserts for segment in manifest.segments),
            deletes=sum(segment.deletes for segment in manifest.segments),
            dense=manifest.dense is not None,
            bytes=sum(entry.size for entry in manifest.files),
            **manifest.stages.model_dump(),
        )


def _segments(cut: Cut, key: str) -> tuple[dict[str, np.ndarray], list[SegmentEntry]]:
    """All tables' arrays for one file, and what it holds of each table."""
    changed = {rows.table: rows for rows in cut.rows}
    arrays: dict[str, np.ndarray] = {}
    segments = []
    for table in sorted(changed.keys() | cut.deletes.keys()):
        upserts = deletes = 0
        if table in changed:
            arrays[f"{table}/ids"], arrays[f"{table}/rows"] = changed[table].ids, changed[table].rows
            upserts = len(changed[table].ids)
        if table in cut.deletes:
            arrays[f"{table}/deleted"] = cut.deletes[table]
            deletes = len(cut.deletes[table])
        segments.append(SegmentEntry(table=table, file=key, upserts=upserts, deletes=deletes))
    return arrays, segments


def _finite_scores(moment: Moment) -> dict[str, list[float]] | None:
    """Scores for the document, which can't hold NaN: the gate, which sees them all, says so."""
    scores = moment.probe_scores
    if scores is None or not all(np.isfinite(values).all() for values in scores.values()):
        return None
    return {output: [float(value) for value in np.ravel(values)] for output, values in scores.items()}
