"""Full export: from a checkpoint to the snapshot that starts a lineage."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from tidemill import logs
from tidemill.clock import Clock, SystemClock
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.contracts.files import FileEntry, TableFile
from tidemill.contracts.snapshot import ProbeRows, SnapshotManifest
from tidemill.errors import NotFoundError, PublishError, StorageError
from tidemill.features.feature_set import FeatureSet
from tidemill.models.model import RecModel
from tidemill.publish.gate import TOLERANCE, compare_scores
from tidemill.publish.program import program_archive, with_dense
from tidemill.storage.arrays import read_arrays
from tidemill.storage.base import Chunk, ObjectInfo, Storage
from tidemill.storage.commit import copy_object, create_once
from tidemill.storage.files import write_file

log = logging.getLogger(__name__)

NUM_PROBE_ROWS = 64


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint's manifest, and the store that its keys are relative to. `dense`: which of its files has the dense weights."""

    storage: Storage
    manifest: CheckpointManifest
    dense: str = "dense"


@dataclass(frozen=True, slots=True)
class Probes:
    """Raw rows (the first 64 are stored), and the trainer's way to score them: table -> outputs by name."""

    rows: pa.Table
    score: Callable[[pa.Table], Mapping[str, np.ndarray]]


@dataclass(frozen=True, slots=True)
class SnapshotOptions:
    """What a snapshot says beside the checkpoint's content.

    `model_name`: the model's name in requests. `boundary`: the event time at which the day's table ends. `verify`: scores the probe
    rows as a server would, from a read-only store that shows the snapshot as if it were committed.
    """

    model_name: str
    boundary: float | None = None
    probes: Probes | None = None
    verify: Callable[[Storage], Mapping[str, np.ndarray]] | None = None


def export_snapshot(
    checkpoint: StoredCheckpoint,
    target: Storage,
    model: RecModel,
    features: FeatureSet,
    options: SnapshotOptions,
    *,
    clock: Clock | None = None,
) -> SnapshotManifest:
    """Write the checkpoint's snapshot into a lineage's folder; snapshot.json comes last, created exclusively.

    `model` gives the program's structure only: tables and dense weights are the checkpoint's files, linked or copied. A folder that
    holds this checkpoint's snapshot already is left as it is. Raises PublishError if it holds another one, or if the exported
    program doesn't score the probe rows as the trainer does.
    """
    digest = checkpoint.manifest.digest()
    existing = _existing(target, digest)
    if existing is not None:
        return existing
    manifest = _write_files(checkpoint, target, model, features, options, (clock or SystemClock()).time())
    _verify(manifest, target, options)
    if not create_once(target, layout.SNAPSHOT, manifest.to_bytes(), clock=clock):
        winner = _existing(target, digest)
        if winner is None:
            raise StorageError(f"{target.url}/{layout.SNAPSHOT} was there a moment ago, and now isn't")
        return winner
    log.info("snapshot of step %d in %s", manifest.checkpoint_step, target.url)
    logs.event("snapshot.exported", step=manifest.checkpoint_step, digest=manifest.digest(), model=manifest.model)
    return manifest


def _existing(target: Storage, checkpoint_digest: str) -> SnapshotManifest | None:
    where = f"{target.url}/{layout.SNAPSHOT}"
    try:
        found = SnapshotManifest.parse(target.read(layout.SNAPSHOT), where=where)
    except NotFoundError:
        return None
    if found.checkpoint_digest != checkpoint_digest:
        raise PublishError(
            f"{where} is the snapshot of another checkpoint (step {found.checkpoint_step}, {found.checkpoint_digest[:12]}, not"
            f" {checkpoint_digest[:12]}): export into another folder"
        )
    return found


def _write_files(
    checkpoint: StoredCheckpoint, target: Storage, model: RecModel, features: FeatureSet, options: SnapshotOptions, now: float
) -> SnapshotManifest:
    source, manifest = checkpoint.storage, checkpoint.manifest
    if sorted(manifest.tables, key=lambda spec: spec.name) != sorted(model.plan.tables, key=lambda spec: spec.name):
        names = [sorted(spec.name for spec in specs) for specs in (manifest.tables, model.plan.tables)]
        raise PublishError(
            f"step {manifest.step} of {source.url} holds tables {names[0]}, the model has {names[1]}, or other sizes"
        )
    # A folder of its own: of two exports at a time, the one whose snapshot.json loses must not touch the other's files.
    folder = f"{layout.SNAPSHOT_FILES}/{uuid.uuid4().hex[:12]}"
    dense = manifest.files[checkpoint.dense]
    program = with_dense(model, read_arrays(source, dense.key, sha256=dense.sha256, size=dense.size))
    archive, outputs = program_archive(program, model)
    return SnapshotManifest(
        model=options.model_name,
        checkpoint_step=manifest.step,
        checkpoint_term=manifest.term,
        checkpoint_digest=manifest.digest(),
        examples=manifest.examples,
        created_at=now,
        watermark=manifest.watermark,
        boundary=options.boundary,
        features=features.spec(),
        inputs=model.plan.inputs,
        outputs=outputs,
        tables=manifest.tables,
        table_files=[_copy_table(source, file, target, folder, number) for number, file in enumerate(manifest.table_files)],
        dense=_copy(source, dense, target, f"{folder}/dense.safetensors"),
        program=write_file(target, f"{folder}/program.pt2", archive),
        pipeline=_copy(source, manifest.files["pipeline"], target, f"{folder}/{layout.PIPELINE}"),
        probes=None if options.probes is None else _write_probes(target, f"{folder}/probes.arrow", options.probes, outputs),
    )


def _copy_table(source: Storage, file: TableFile, target: Storage, folder: str, number: int) -> TableFile:
    # The number keeps several sets of rows of one table apart; their order is kept.
    key = f"{folder}/tables/{file.table}-{number:05d}.safetensors"
    return file.model_copy(update={"file": _copy(source, file.file, target, key)})


def _copy(source: Storage, entry: FileEntry, target: Storage, key: str) -> FileEntry:
    copy_object(source, entry.key, target, key)
    return entry.model_copy(update={"key": key})


def _write_probes(target: Storage, key: str, probes: Probes, outputs: list[str]) -> ProbeRows:
    rows = probes.rows.slice(0, NUM_PROBE_ROWS).combine_chunks()
    scores = probes.score(rows)
    missing = sorted(set(outputs) - scores.keys())
    if missing:
        raise PublishError(f"the trainer gives no scores {missing} for the probe rows")
    bad = [output for output in outputs if not np.isfinite(scores[output]).all()]
    if bad:
        raise PublishError(f"the checkpoint scores a probe row with a number that isn't finite (output {bad[0]!r})")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as writer:
        writer.write_table(rows)
    entry = write_file(target, key, sink.getvalue().to_pybytes())
    return ProbeRows(rows=entry, scores={output: [float(score) for score in scores[output]] for output in outputs})


def _verify(manifest: SnapshotManifest, target: Storage, options: SnapshotOptions) -> None:
    if options.verify is None or manifest.probes is None:
        return
    scores = options.verify(_Uncommitted(target, manifest.to_bytes()))
    compare_scores(scores, {output: np.array(values) for output, values in manifest.probes.scores.items()}, TOLERANCE)


class _Uncommitted(Storage):
    """A lineage's folder as it will be once snapshot.json is there; read-only."""

    def __init__(self, inner: Storage, snapshot: bytes) -> None:
        self.url = inner.url
        self._inner = inner
        self._snapshot = snapshot

    def read(self, key: str) -> bytes:
        return self._snapshot if key == layout.SNAPSHOT else self._inner.read(key)

    def write(self, key: str, *chunks: Chunk) -> None:
        raise StorageError(f"{key!r}: a snapshot under verification is read-only")

    def create(self, key: str, *chunks: Chunk) -> None:
        self.write(key, *chunks)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self.write(key)

    def local_path(self, key: str) -> Path | None:
        return None if key == layout.SNAPSHOT else self._inner.local_path(key)
