"""Shows and verifies any document or folder of ours. Reads contracts and storage only: no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tidemill.contracts import layout
from tidemill.contracts.base import Document, parse_object
from tidemill.contracts.checkpoint import CheckpointManifest, CheckpointPart
from tidemill.contracts.files import FileEntry
from tidemill.contracts.lineage import Deployment, LineageRecord, RunRecord, TermRecord
from tidemill.contracts.output import OutputManifest
from tidemill.contracts.positions import MAXCOMPUTE
from tidemill.contracts.progress import FILE_ROW_BITS, ROW_BITS, DataloaderState, ProgressReport, SplitState, read_progress
from tidemill.contracts.release import CurrentHint, CutPart, ReleaseManifest
from tidemill.contracts.serving import ServingStatus
from tidemill.contracts.snapshot import SnapshotManifest
from tidemill.data.intervals import IntervalSet
from tidemill.errors import CorruptError, NotFoundError, TidemillError
from tidemill.lineage.records import snapshot_digest
from tidemill.storage.arrays import read_arrays
from tidemill.storage.base import ObjectInfo, Storage
from tidemill.storage.commit import view
from tidemill.storage.files import require_bytes
from tidemill.storage.open import open_storage

DOCUMENTS: tuple[type[Document], ...] = (
    CheckpointManifest,
    CheckpointPart,
    CurrentHint,
    CutPart,
    DataloaderState,
    Deployment,
    LineageRecord,
    OutputManifest,
    ProgressReport,
    ReleaseManifest,
    RunRecord,
    ServingStatus,
    SnapshotManifest,
    TermRecord,
)

# Folders between a document's own and the one that the keys inside it are relative to.
_DEPTH = {CheckpointManifest: 1, ReleaseManifest: 1}
_NEWEST_EVENTS = 10
_SHOWN_INTERVALS = 4


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, and rows of text; `columns` names them."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(slots=True)
class Inspection:
    """What was found at a path. `faults`: each names what is torn, missing or corrupt."""

    path: str
    kind: str
    sections: list[Section] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    files_checked: int = 0
    verdicts: dict[FileEntry, str | None] = field(default_factory=dict)
    """What is wrong with a file: incremental checkpoints share theirs, and no file is read twice."""

    def fields(self, title: str, rows: Iterable[tuple[str, Any]]) -> None:
        """Add names with values; None is left out."""
        shown = [(name, _text(name, value)) for name, value in rows if value is not None]
        self.sections.append(Section(title, ("field", "value"), shown))

    def table(self, title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
        """Add a table, unless it has no rows."""
        listed = list(rows)
        if listed:
            self.sections.append(Section(title, columns, listed))


def inspect(path: str) -> Inspection:
    """Look at a file or folder, and check everything that it promises. Raises NotFoundError if it is nothing of ours."""
    path = (path if "://" in path else os.path.abspath(path)).rstrip("/") or "/"
    folder, _, name = path.rpartition("/")
    if name:
        parent = open_storage(folder or "/")
        try:
            data = parent.read(name)
        except NotFoundError:
            pass
        else:
            return _inspect_file(path, name, data)
    storage = open_storage(path)
    found = storage.list()
    if not found:
        raise NotFoundError(f"{path}: there is no such file, and no folder with files")
    keys = {info.key for info in found}
    for kind, belongs, look in _FOLDERS:
        if belongs(name, keys):
            inspection = Inspection(path, kind)
            look(inspection, storage, found)
            return inspection
    raise NotFoundError(f"{path}: isn't a root, lineage, daily job, checkpoint, run or output of ours")


# --- documents


def _inspect_file(path: str, name: str, data: bytes) -> Inspection:
    inspection = Inspection(path, "document")
    try:
        document = _parse(name, data, path)
    except CorruptError as error:
        inspection.faults.append(str(error))
        return inspection
    inspection.kind = document.schema_id()
    _show(inspection, document)
    storage = open_storage(_above(path, 1 + _DEPTH.get(type(document), 0)))
    _check_files(inspection, storage, _files(document))
    return inspection


def _parse(name: str, data: bytes, where: str) -> Document:
    body = parse_object(data, where=where)
    schema = str(body.get("schema", ""))
    for kind in DOCUMENTS:
        if schema.rpartition("/")[0] == f"tidemill.{kind.schema_name}":
            return kind.parse(data, where=where)
    if not schema and (name == layout.PROGRESS or "data_ts" in body):
        return read_progress(data, where=where)
    raise CorruptError(f"{where}: schema {schema!r} isn't one of ours")


def _above(path: str, levels: int) -> str:
    """The folder that many levels up; `path` is absolute or a URL."""
    return path.rsplit("/", levels)[0] or "/"


def _files(document: Document) -> list[FileEntry]:
    if isinstance(document, CheckpointManifest):
        return document.all_files
    if isinstance(document, SnapshotManifest):
        tables = [table.file for table in document.table_files]
        probes = [document.probes.rows] if document.probes else []
        return [*tables, document.dense, document.program, document.pipeline, *probes]
    if isinstance(document, ReleaseManifest):
        return _once([*document.files, *([document.dense] if document.dense else [])])
    return document.files if isinstance(document, OutputManifest) else []


def _once(entries: list[FileEntry]) -> list[FileEntry]:
    return list({entry.key: entry for entry in entries}.values())


def _check_files(inspection: Inspection, storage: Storage, entries: Iterable[FileEntry]) -> None:
    """Sizes and hashes of all files that a manifest lists, and the form of those that hold arrays."""
    for entry in entries:
        if entry not in inspection.verdicts:
            inspection.files_checked += 1
            inspection.verdicts[entry] = _fault(storage, entry)
        if fault := inspection.verdicts[entry]:
            inspection.faults.append(fault)


def _fault(storage: Storage, entry: FileEntry) -> str | None:
    try:
        if entry.key.endswith(".safetensors"):
            read_arrays(storage, entry.key, sha256=entry.sha256, size=entry.size)
        else:
            require_bytes(view(storage, entry.key), entry, where=f"{entry.key!r} in {storage.url}")
    except NotFoundError:
        return f"{entry.key}: listed, but isn't there"
    except TidemillError as error:
        return str(error)
    return None


def _show(inspection: Inspection, document: Document) -> None:
    body = document.model_dump(mode="json").items()
    inspection.fields(document.schema_id(), ((name, value) for name, value in body if not isinstance(value, list | dict)))
    if isinstance(document, SnapshotManifest | CheckpointManifest):
        _show_tables(inspection, document)
    splits = getattr(document, "splits", None)
    if splits is not None:
        _show_splits(inspection, splits)
    if isinstance(document, ReleaseManifest):
        _show_release(inspection, document)
    if isinstance(document, CheckpointManifest) and document.parent:
        inspection.fields("parent", document.parent.model_dump().items())
    if isinstance(document, RunRecord | ProgressReport):
        inspection.fields("details", (getattr(document, "details", None) or getattr(document, "metrics", None) or {}).items())
    total = sum(entry.size for entry in _files(document))
    if total:
        inspection.fields("files", [("files", len(_files(document))), ("total", _size(total))])


def _show_tables(inspection: Inspection, document: SnapshotManifest | CheckpointManifest) -> None:
    rows = ((spec.name, f"{spec.num_embeddings:,}", str(spec.embedding_dim), spec.dtype) for spec in document.tables)
    inspection.table("tables", ("table", "rows", "dim", "type"), rows)


def _show_release(inspection: Inspection, release: ReleaseManifest) -> None:
    rows = ((part.table, f"{part.upserts:,}", f"{part.deletes:,}", part.file) for part in release.segments)
    inspection.table("segments", ("table", "upserts", "deletes", "file"), rows)
    inspection.fields("stages", release.stages.model_dump().items())
    if release.dense is not None:
        inspection.fields("dense", [("file", release.dense.key), ("size", _size(release.dense.size))])


def _show_splits(inspection: Inspection, splits: list[SplitState]) -> None:
    rows = ((state.kind, state.split, *_progress(state)) for state in splits)
    inspection.table("progress", ("kind", "split", "done", "left"), rows)
    tables = [state for state in splits if state.kind == MAXCOMPUTE]
    sessions = (
        (state.split, str(state.fingerprint.get("sess_idx", "none")), state.fingerprint.get("session", "")) for state in tables
    )
    inspection.table("read sessions", ("split", "index", "session"), sessions)


def _progress(state: SplitState) -> tuple[str, str]:
    """What is done of a split, and what is left."""
    if state.kind == "kafka":
        done = [f"{_offset(start)} to {_offset(stop)}" for start, stop in state.intervals]
        return _some(done) or "nothing", _kafka_left(state)
    if state.kind == "folder":
        return _progress_of_folder(state)
    count = sum(stop - start for start, stop in state.intervals)
    if state.num_rows is None:
        return f"{count:,} positions: {_spans(state.intervals)}" if count else "nothing", "unbounded"
    gaps = _gaps(state.intervals, state.num_rows)
    missing = sum(stop - start for start, stop in gaps)
    return f"{count:,} of {state.num_rows:,} rows", f"{missing:,} rows: {_spans(gaps)}" if missing else "nothing"


def _progress_of_folder(state: SplitState) -> tuple[str, str]:
    """Which files a split of a streamed folder has read to their end, and which are begun or waiting."""
    files = sorted((number, name) for name, (number, *_) in state.fingerprint.get("files", {}).items())
    done = IntervalSet.of(state.intervals)
    begun = []
    for number, name in files:
        position = done.first_gap(number << FILE_ROW_BITS)
        if position >> FILE_ROW_BITS == number:
            begun.append(f"{name} from row {position & ((1 << FILE_ROW_BITS) - 1):,}")
    finished = sum((stop >> FILE_ROW_BITS) - (start >> FILE_ROW_BITS) for start, stop in state.intervals)
    return f"{finished:,} files", _some([*begun, "what appears"])


def _kafka_left(state: SplitState) -> str:
    """What is left of a partition: from its position on, to its end if there is one."""
    start, end = state.fingerprint.get("start"), state.fingerprint.get("end")
    if state.intervals:
        position = state.intervals[0][1]
    elif isinstance(start, int):
        position = start << ROW_BITS
    else:
        return "all"
    if end is None:
        return f"from {_offset(position)}"
    return f"{_offset(position)} to {end}" if position < end << ROW_BITS else "nothing"


def _offset(position: int) -> str:
    """A Kafka position as offset and row; the row of whole messages, 0, is left out."""
    offset, row = position >> ROW_BITS, position & ((1 << ROW_BITS) - 1)
    return f"{offset}+{row}" if row else str(offset)


def _gaps(intervals: list[tuple[int, int]], stop: int) -> list[tuple[int, int]]:
    edges = [0, *(edge for pair in sorted(intervals) for edge in pair), stop]
    return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]


def _spans(intervals: list[tuple[int, int]]) -> str:
    return _some([f"{start:,} to {stop:,}" for start, stop in intervals])


def _some(texts: list[str]) -> str:
    more = f", and {len(texts) - _SHOWN_INTERVALS} more" if len(texts) > _SHOWN_INTERVALS else ""
    return ", ".join(texts[:_SHOWN_INTERVALS]) + more


# --- folders


def _read(inspection: Inspection, storage: Storage, key: str, kind: type[Document]) -> Any:
    """A document, or None and a fault."""
    try:
        return kind.parse(storage.read(key), where=key)
    except TidemillError as error:
        inspection.faults.append(str(error))
        return None


def _checkpoint_folder(inspection: Inspection, storage: Storage, found: list[ObjectInfo]) -> None:
    above = open_storage(_above(inspection.path, 1))
    name = inspection.path.rpartition("/")[2]
    manifests = [f"{name}/{info.key}" for info in found if layout.checkpoint_of_manifest(f"{name}/{info.key}")]
    if not manifests:
        inspection.faults.append(f"{inspection.path}: no manifest, so the checkpoint was never committed")
    for key in manifests:
        manifest = _read(inspection, above, key, CheckpointManifest)
        if manifest is None:
            continue
        _show(inspection, manifest)
        _check_files(inspection, above, manifest.all_files)
        entry = manifest.files.get("dataloader_state")
        state = _read(inspection, above, entry.key, DataloaderState) if entry else None
        if state is not None:
            _show(inspection, state)


def _run_folder(inspection: Inspection, storage: Storage, found: list[ObjectInfo]) -> None:
    record = _read(inspection, storage, layout.RECORD, RunRecord)
    if record is not None:
        _show(inspection, record)
    if any(info.key == layout.EVENTS for info in found):
        inspection.table("newest events", ("at", "event", "fields"), _events(inspection, storage))


def _events(inspection: Inspection, storage: Storage) -> Iterator[tuple[str, ...]]:
    *lines, _ = storage.read(layout.EVENTS).split(b"\n")
    for line in lines[-_NEWEST_EVENTS:]:
        try:
            event = parse_object(line, where=layout.EVENTS)
            rest = " ".join(f"{name}={value}" for name, value in event.items() if name not in ("at", "event"))
            yield _text("at", event["at"]), str(event["event"]), rest
        except (CorruptError, KeyError) as error:
            inspection.faults.append(f"{layout.EVENTS}: a line isn't an event ({error})")


def _output_folder(inspection: Inspection, storage: Storage, found: list[ObjectInfo]) -> None:
    manifest = _read(inspection, storage, layout.SUCCESS, OutputManifest)
    if manifest is None:
        return
    _show(inspection, manifest)
    _check_files(inspection, storage, manifest.files)
    listed = {entry.key for entry in manifest.files}
    extra = [info.key for info in found if layout.output_part_number(info.key) is not None and info.key not in listed]
    inspection.faults += [f"{key}: isn't listed in {layout.SUCCESS}" for key in extra]


def _job_folder(inspection: Inspection, storage: Storage, found: list[ObjectInfo]) -> None:
    """A lineage's folder, or a daily job's: everything in it."""
    keys = {info.key for info in found}
    snapshot = _read(inspection, storage, layout.SNAPSHOT, SnapshotManifest) if layout.SNAPSHOT in keys else None
    record = _read(inspection, storage, layout.LINEAGE, LineageRecord) if layout.LINEAGE in keys else None
    if record is not None:
        _show(inspection, record)
    if snapshot is not None:
        inspection.fields("snapshot", [(name, getattr(snapshot, name)) for name in _SNAPSHOT_FIELDS])
        _check_files(inspection, storage, _files(snapshot))
    _show_progress_file(inspection, storage, keys)
    _show_terms(inspection, storage, found)
    _show_checkpoints(inspection, storage, found)
    _show_releases(inspection, storage, found, snapshot)
    _show_runs(inspection, storage, found)
    _show_disk_use(inspection, found)


_SNAPSHOT_FIELDS = ("model", "checkpoint_step", "checkpoint_digest", "examples", "created_at", "watermark", "boundary")


def _show_progress_file(inspection: Inspection, storage: Storage, keys: set[str]) -> None:
    if layout.PROGRESS not in keys:
        return
    try:
        progress = read_progress(storage.read(layout.PROGRESS), where=layout.PROGRESS)
    except TidemillError as error:
        inspection.faults.append(str(error))
        return
    inspection.fields(layout.PROGRESS, progress.model_dump(exclude={"metrics"}).items())


def _show_terms(inspection: Inspection, storage: Storage, found: list[ObjectInfo]) -> None:
    rows = []
    for info in found:
        if layout.term_number(info.key) is not None:
            term = _read(inspection, storage, info.key, TermRecord)
            if term is not None:
                rows.append((str(term.term), term.run_id, _text("at", term.created_at)))
    inspection.table("terms", ("term", "run", "opened"), rows)


def _show_checkpoints(inspection: Inspection, storage: Storage, found: list[ObjectInfo]) -> None:
    rows: list[tuple[str, ...]] = []
    keyed = [(name, info.key) for info in found if (name := layout.checkpoint_of_manifest(info.key)) is not None]
    for name, key in sorted(keyed):
        manifest = _read(inspection, storage, key, CheckpointManifest)
        if manifest is None:
            continue
        before = len(inspection.faults)
        _check_files(inspection, storage, manifest.all_files)
        total = sum(entry.size for entry in manifest.all_files)
        state = "whole" if len(inspection.faults) == before else "torn"
        watermark = "" if manifest.watermark is None else _text("watermark", manifest.watermark)
        increments = str(manifest.increments) if manifest.increments else ""
        rows.append((str(name.step), str(name.term), f"{manifest.examples:,}", watermark, _size(total), increments, state))
    inspection.table("checkpoints", ("step", "term", "examples", "watermark", "size", "increments", "state"), rows)


def _show_releases(inspection: Inspection, storage: Storage, found: list[ObjectInfo], snapshot: SnapshotManifest | None) -> None:
    numbered = [(number, info.key) for info in found if (number := layout.release_sequence(info.key)) is not None]
    if not numbered:
        return
    # The bytes on disk, not their canonical form, are what releases and deployments name.
    digest = snapshot_digest(storage) if snapshot is not None else None
    before: ReleaseManifest | None = None
    expected = min(number for number, _ in numbered)
    for number, key in sorted(numbered):
        inspection.faults += [f"releases: {missing} is missing" for missing in range(expected, number)]
        expected = number + 1
        release = _read(inspection, storage, key, ReleaseManifest)
        if release is None:
            continue
        _check_release(inspection, key, release, before, digest)
        _check_files(inspection, storage, _files(release))
        before = release
    if before is None:
        return
    head = [
        ("releases", len(numbered)),
        *((name, getattr(before, name)) for name in ("sequence", "term", "step", "examples", "watermark")),
    ]
    inspection.fields("head", [*head, ("committed_at", before.stages.committed_at)])
    _show_splits(inspection, before.splits)


def _check_release(
    inspection: Inspection, key: str, release: ReleaseManifest, before: ReleaseManifest | None, digest: str | None
) -> None:
    if layout.release_sequence(key) != release.sequence:
        inspection.faults.append(f"{key}: says that it is release {release.sequence}")
    if digest is not None and release.snapshot_digest != digest:
        inspection.faults.append(f"{key}: builds on snapshot {release.snapshot_digest[:12]}, but the folder's is {digest[:12]}")
    if before is not None and release.term < before.term:
        inspection.faults.append(f"{key}: its term {release.term} is lower than that of the release before, {before.term}")


def _show_runs(inspection: Inspection, storage: Storage, found: list[ObjectInfo]) -> None:
    rows: list[tuple[str, ...]] = []
    for info in found:
        if info.key.startswith("runs/") and info.key.endswith(f"/{layout.RECORD}"):
            record = _read(inspection, storage, info.key, RunRecord)
            if record is not None:
                rows.append(
                    (
                        record.run_id,
                        str(record.term or ""),
                        record.status,
                        record.reason or "",
                        str(record.step),
                        record.error or "",
                    )
                )
    inspection.table("runs", ("run", "term", "status", "reason", "step", "error"), rows)


def _show_disk_use(inspection: Inspection, found: list[ObjectInfo]) -> None:
    sums: dict[str, int] = {}
    for info in found:
        part = info.key.partition("/")[0]
        part = "model.ckpt-*" if part.startswith("model.ckpt-") else part
        sums[part] = sums.get(part, 0) + info.size
    rows = [(part, _size(size)) for part, size in sorted(sums.items())]
    inspection.table("disk use", ("part", "size"), [*rows, ("all", _size(sum(sums.values())))])


def _root_folder(inspection: Inspection, storage: Storage, found: list[ObjectInfo]) -> None:
    deployments: list[Deployment] = []
    for info in found:
        if layout.deployment_number(info.key) is not None:
            deployment = _read(inspection, storage, info.key, Deployment)
            if deployment is not None:
                _check_deployment(inspection, storage, info.key, deployment)
                deployments.append(deployment)
    rows = ((str(d.number), d.lineage, d.snapshot_digest[:12], _pin(d), _text("at", d.created_at), d.reason) for d in deployments)
    inspection.table("deployments", ("number", "lineage", "snapshot", "pin", "created", "reason"), rows)
    for part in ("daily", "lineages"):
        _show_dated(inspection, storage, found, part)
    _show_servers(inspection, storage, found)
    _show_disk_use(inspection, found)


def _check_deployment(inspection: Inspection, storage: Storage, key: str, deployment: Deployment) -> None:
    if layout.deployment_number(key) != deployment.number:
        inspection.faults.append(f"{key}: says that it is deployment {deployment.number}")
    try:
        digest = snapshot_digest(storage, deployment.lineage)
    except NotFoundError:
        inspection.faults.append(f"{key}: deploys {deployment.lineage}, which has no snapshot")
        return
    if digest != deployment.snapshot_digest:
        inspection.faults.append(
            f"{key}: deploys snapshot {deployment.snapshot_digest[:12]}, but {deployment.lineage} holds {digest[:12]}"
        )


def _pin(deployment: Deployment) -> str:
    return "" if deployment.pin_sequence is None else f"{deployment.pin_term}:{deployment.pin_sequence}"


def _show_dated(inspection: Inspection, storage: Storage, found: list[ObjectInfo], part: str) -> None:
    """Each lineage or daily job is inspected in full; the root shows one line of it, and all its faults."""
    dates = sorted({info.key.split("/")[1] for info in found if info.key.startswith(f"{part}/") and info.key.count("/") > 1})
    rows: list[tuple[str, ...]] = []
    for date in dates:
        prefix = f"{part}/{date}/"
        inside = [ObjectInfo(i.key.removeprefix(prefix), i.size, i.modified_at) for i in found if i.key.startswith(prefix)]
        nested = Inspection(prefix.rstrip("/"), part)
        _job_folder(nested, open_storage(f"{inspection.path}/{nested.path}"), inside)
        inspection.faults += [f"{nested.path}: {fault}" for fault in nested.faults]
        inspection.files_checked += nested.files_checked
        count = {kind: sum(1 for i in inside if of(i.key) is not None) for kind, of in _COUNTED.items()}
        size = _size(sum(info.size for info in inside))
        rows.append((date, str(count["checkpoints"]), str(count["releases"]), size, str(len(nested.faults))))
    inspection.table(part, ("date", "checkpoints", "releases", "size", "faults"), rows)


_COUNTED: dict[str, Callable[[str], object]] = {
    "checkpoints": layout.checkpoint_of_manifest,
    "releases": layout.release_sequence,
}


def _show_servers(inspection: Inspection, storage: Storage, found: list[ObjectInfo]) -> None:
    rows: list[tuple[str, ...]] = []
    for info in found:
        if info.key.startswith("serving/") and info.key.endswith(".json"):
            status = _read(inspection, storage, info.key, ServingStatus)
            if status is not None:
                generation = f"{status.lineage} {status.term}:{status.sequence}" if status.ready else "none"
                rows.append((status.server, status.url, generation, _text("at", status.updated_at), status.error or ""))
    inspection.table("servers", ("server", "url", "generation", "updated", "error"), rows)


def _is_root(name: str, keys: set[str]) -> bool:
    return layout.ACTIVE in keys or any(key.startswith(("deployments/", "daily/", "lineages/")) for key in keys)


def _is_job(name: str, keys: set[str]) -> bool:
    return layout.SNAPSHOT in keys or any(key.startswith(("terms/", "releases/", "runs/", "model.ckpt-")) for key in keys)


_FOLDERS: tuple[tuple[str, Callable[[str, set[str]], bool], Callable[[Inspection, Storage, list[ObjectInfo]], None]], ...] = (
    ("checkpoint", lambda name, keys: name.startswith("model.ckpt-"), _checkpoint_folder),
    ("run", lambda name, keys: layout.RECORD in keys, _run_folder),
    ("root", _is_root, _root_folder),
    ("lineage", lambda name, keys: layout.SNAPSHOT in keys, _job_folder),
    ("job", _is_job, _job_folder),
    ("output", lambda name, keys: layout.SUCCESS in keys, _output_folder),
)


# --- text


def _text(name: str, value: Any) -> str:
    is_time = name == "at" or name.endswith(("_at", "watermark", "boundary", "data_ts", "data_timestamp", "handover_mark"))
    if is_time and isinstance(value, int | float):
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S} ({value})"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and name == "examples" else str(value)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
