"""From a lineage's folder to generations: the snapshot, then its releases in order, every byte checked against a manifest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidemill.contracts import layout
from tidemill.contracts.files import FileEntry, TableSpec
from tidemill.contracts.release import CurrentHint, ReleaseManifest
from tidemill.contracts.snapshot import SnapshotManifest
from tidemill.errors import ConfigError, CorruptError, NotFoundError, StorageError, TidemillError
from tidemill.features.feature_set import FeatureSet
from tidemill.serving.generation import Change, Generation, ServedModel, next_generation
from tidemill.serving.predictor import Predictor
from tidemill.serving.program import load_program
from tidemill.serving.tables import BaseRows, Table, Tables, TablesEdit, base_table
from tidemill.storage.arrays import read_arrays
from tidemill.storage.base import Storage
from tidemill.storage.files import require_bytes

Position = tuple[int, int]
"""(term, sequence)"""

PROBE_TOLERANCE = 1e-4
"""How far a probe's score may lie from the exporter's own: other CPUs round sums of products differently."""


@dataclass(frozen=True, slots=True)
class LineageFolder:
    """A lineage's folder inside a store; `folder` is "" if the store is rooted at it."""

    storage: Storage
    folder: str

    @property
    def name(self) -> str:
        return self.folder or self.storage.url.rstrip("/").rpartition("/")[2]

    def key(self, key: str) -> str:
        return f"{self.folder}/{key}" if self.folder else key

    def read(self, key: str) -> bytes:
        return self.storage.read(self.key(key))

    def read_file(self, entry: FileEntry) -> bytes:
        """A listed file's bytes. Raises CorruptError if they aren't those that the manifest promises."""
        try:
            data = self.read(entry.key)
        except NotFoundError:
            raise CorruptError(f"{self.name}: {entry.key} is listed in a manifest, but isn't there") from None
        require_bytes(data, entry, where=f"{self.name}: {entry.key}")
        return data

    def read_arrays(self, entry: FileEntry) -> dict[str, np.ndarray]:
        """A listed file's arrays, memory-mapped where the store allows. Raises CorruptError like `read_file`."""
        try:
            return read_arrays(self.storage, self.key(entry.key), sha256=entry.sha256, size=entry.size)
        except NotFoundError:
            raise CorruptError(f"{self.name}: {entry.key} is listed in a manifest, but isn't there") from None


def load_generation(storage: Storage, lineage: str, *, up_to: Position | None = None) -> Generation:
    """The snapshot of a lineage's folder with all its releases, or those up to and including (term, sequence).

    `lineage`: the folder inside the store, "" for a store rooted at it. Raises NotFoundError without a snapshot, CorruptError
    for anything that differs from its manifest.
    """
    folder = LineageFolder(storage, lineage)
    generation = load_snapshot(folder)
    news = read_changes(folder, generation, up_to=up_to)
    if news.error is not None:
        raise news.error
    return next_generation(generation, news.changes)


def load_snapshot(folder: LineageFolder, *, digest: str | None = None) -> Generation:
    """The snapshot itself, as a generation of term 0 and sequence 0, checked with its own probe rows.

    Raises NotFoundError without one, CorruptError if `digest` is given and isn't the snapshot's, or if it doesn't score its probe
    rows as its exporter did.
    """
    data = folder.read(layout.SNAPSHOT)
    found = hashlib.sha256(data).hexdigest()
    if digest is not None and found != digest:
        raise CorruptError(f"{folder.name}: snapshot.json has digest {found[:12]}, but {digest[:12]} is deployed")
    manifest = SnapshotManifest.parse(data, where=folder.key(layout.SNAPSHOT))
    program = load_program(folder.read_file(manifest.program))
    generation = Generation(
        model=ServedModel(found, manifest, _feature_set(folder, manifest), read_probes(folder, manifest)),
        deployment=None,
        lineage=folder.name,
        term=0,
        sequence=0,
        step=manifest.checkpoint_step,
        watermark=manifest.watermark,
        tables=_load_tables(folder, manifest),
        program=program.with_weights(folder.read_arrays(manifest.dense)),
        stages=None,
    )
    _check_probes(generation)
    return generation


def read_probes(folder: LineageFolder, manifest: SnapshotManifest) -> pa.Table | None:
    """The snapshot's probe rows, raw columns; None if it has none. Raises CorruptError."""
    return None if manifest.probes is None else _read_table(folder.read_file(manifest.probes.rows))


@dataclass(frozen=True, slots=True)
class News:
    """Releases after a generation, in order, up to the first that can't be read, and why."""

    changes: list[Change]
    error: TidemillError | None


def read_changes(folder: LineageFolder, base: Generation, *, up_to: Position | None = None) -> News:
    """The releases that follow `base`. Sequence numbers have no gaps, so the first that isn't there ends it."""
    changes: list[Change] = []
    position = base.position
    try:
        while up_to is None or position < up_to:
            change = read_change(folder, base.model.digest, position[1] + 1, up_to=up_to)
            if change is None:
                break
            changes.append(change)
            position = change.term, change.sequence
        else:
            return News(changes, None)
        _check_not_cleaned_away(folder, position[1])
    except (CorruptError, StorageError) as error:
        return News(changes, error)
    return News(changes, None)


def read_change(folder: LineageFolder, digest: str, sequence: int, *, up_to: Position | None = None) -> Change | None:
    """One release, all its files checked; None if it isn't there (yet) or lies beyond `up_to`."""
    where = folder.key(layout.release(sequence))
    try:
        manifest = ReleaseManifest.parse(folder.storage.read(where), where=where)
    except NotFoundError:
        return None
    if manifest.sequence != sequence:
        raise CorruptError(f"{where}: says that it is release {manifest.sequence}")
    if manifest.snapshot_digest != digest:
        raise CorruptError(f"{where}: builds on snapshot {manifest.snapshot_digest[:12]}, not on {digest[:12]}, which is served")
    if up_to is not None and (manifest.term, sequence) > up_to:
        return None
    return Change(
        term=manifest.term,
        sequence=sequence,
        step=manifest.step,
        watermark=manifest.watermark,
        segments=_read_segments(folder, manifest, where),
        dense=None if manifest.dense is None else folder.read_arrays(manifest.dense),
        stages=manifest.stages,
    )


def _read_segments(folder: LineageFolder, manifest: ReleaseManifest, where: str) -> list[dict[str, np.ndarray]]:
    files = {entry.key: entry for entry in manifest.files}
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for segment in manifest.segments:
        if segment.file not in files:
            raise CorruptError(f"{where}: a segment of table {segment.table!r} lies in {segment.file}, which isn't listed")
        if segment.file not in arrays:
            arrays[segment.file] = folder.read_arrays(files[segment.file])
        held = arrays[segment.file]
        found = len(held.get(f"{segment.table}/ids", ())), len(held.get(f"{segment.table}/deleted", ()))
        if found != (segment.upserts, segment.deletes):
            raise CorruptError(
                f"{segment.file}: table {segment.table!r} has {found} upserts and deletes,"
                f" {where} says {(segment.upserts, segment.deletes)}"
            )
    return list(arrays.values())


def _check_not_cleaned_away(folder: LineageFolder, sequence: int) -> None:
    """Raises StorageError if release `sequence + 1` isn't there although later ones are.

    Between the reader's look for the next release and this one, a writer may have committed; its next look settles that.
    """
    try:
        hint = CurrentHint.parse(folder.read(layout.CURRENT), where=folder.key(layout.CURRENT))
    except (NotFoundError, CorruptError):
        return
    if hint.sequence <= sequence:
        return
    try:
        folder.read(layout.release(sequence + 1))
    except NotFoundError:
        raise StorageError(
            f"{folder.name}: release {sequence + 1} is gone, but {hint.sequence} is the newest; serve a newer snapshot"
        ) from None


def _load_tables(folder: LineageFolder, manifest: SnapshotManifest) -> Tables:
    parts: dict[str, list[BaseRows]] = {spec.name: [] for spec in manifest.tables}
    changed: list[tuple[str, np.ndarray, np.ndarray]] = []
    files: dict[str, dict[str, np.ndarray]] = {}
    for entry in manifest.table_files:
        if entry.table not in parts:
            raise CorruptError(f"{folder.name}: {entry.file.key} holds table {entry.table!r}, which the snapshot doesn't declare")
        if entry.file.key not in files:
            files[entry.file.key] = folder.read_arrays(entry.file)
        arrays = files[entry.file.key]
        rows = arrays.get(f"{entry.table}/weight")
        if rows is None:
            raise CorruptError(f"{folder.name}: {entry.file.key} has no {entry.table}/weight")
        if entry.subset or entry.row_start is None or entry.row_stop is None:
            changed.append((entry.table, arrays.get(f"{entry.table}/ids", np.empty(0, np.int64)), rows))
        else:
            parts[entry.table].append(BaseRows(entry.row_start, entry.row_stop, rows))
    tables = Tables([_base_table(folder, spec, parts[spec.name]) for spec in manifest.tables])
    return _with_rows(tables.edit(), changed)


def _base_table(folder: LineageFolder, spec: TableSpec, parts: list[BaseRows]) -> Table:
    try:
        return base_table(spec, parts)
    except CorruptError as error:
        raise CorruptError(f"{folder.name}: {error}") from None


def _with_rows(edit: TablesEdit, changed: list[tuple[str, np.ndarray, np.ndarray]]) -> Tables:
    for table, ids, rows in changed:
        edit[table].upsert(ids, rows)
    return edit.tables()


def _feature_set(folder: LineageFolder, manifest: SnapshotManifest) -> FeatureSet:
    try:
        return FeatureSet.from_spec(manifest.features)
    except ConfigError as error:
        raise CorruptError(f"{folder.name}: the snapshot's features can't be used here: {error}") from error


def _read_table(data: bytes) -> pa.Table:
    try:
        return pa.ipc.open_file(data).read_all()
    except pa.ArrowInvalid as error:
        raise CorruptError(f"the snapshot's probe rows aren't an Arrow IPC file: {error}") from None


def _check_probes(generation: Generation) -> None:
    """Raises CorruptError unless the snapshot scores its probe rows as its exporter did."""
    probes = generation.model.manifest.probes
    if probes is None or generation.model.probes is None:
        return
    scores = Predictor(generation).score_table(generation.model.probes)
    for output, expected in probes.scores.items():
        difference = np.abs(scores[output] - np.asarray(expected, np.float64)).max(initial=0.0)
        if not difference <= PROBE_TOLERANCE:
            raise CorruptError(
                f"{generation.lineage}: the snapshot scores its probe rows up to {difference:.2g} away from its exporter ({output})"
            )
