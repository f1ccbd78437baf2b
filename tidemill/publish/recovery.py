"""Opening a term for publishing: close the door behind all earlier terms, and take up the keys that they released (D4, D6).

After a crash the trainer goes back to its checkpoint, while servers hold whatever was released up to the crash. The keys of
every release that the checkpoint doesn't know to be acknowledged are therefore released again, with the values that they have now.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tidemill.clock import Clock, SystemClock
from tidemill.contracts import layout
from tidemill.contracts.files import TableSpec
from tidemill.contracts.release import ReleaseManifest, Stages
from tidemill.contracts.snapshot import SnapshotManifest
from tidemill.errors import CorruptError, NotFoundError, StorageError
from tidemill.lineage.terms import Writer, require_unfenced
from tidemill.publish.tracker import TouchedRows
from tidemill.storage.arrays import read_arrays
from tidemill.storage.base import Storage
from tidemill.storage.commit import create_once
from tidemill.storage.numbered import newest_number

_MAX_RACES = 64


class PublishCursor:
    """The newest release that this lineage's trainer knows to be committed; part of every checkpoint (`Stateful`).

    A lineage is known by its snapshot's digest: the cursor of another one is ignored.
    """

    def __init__(self, snapshot_digest: str) -> None:
        self.snapshot_digest = snapshot_digest
        self.sequence = 0

    def state(self) -> dict[str, Any]:
        return {"snapshot": self.snapshot_digest, "sequence": self.sequence}

    def load_state(self, states: list[dict[str, Any]]) -> None:
        """Ranks above 0 don't learn sequences, so the largest one is rank 0's."""
        own = [state for state in states if state.get("snapshot") == self.snapshot_digest]
        self.sequence = max((int(state["sequence"]) for state in own), default=0)


def newest_sequence(storage: Storage) -> int:
    """The newest committed release; 0 if there is none."""
    return newest_number(storage, "releases", layout.release_sequence)


def read_release(storage: Storage, sequence: int) -> ReleaseManifest:
    """A committed release. Raises NotFoundError, or CorruptError."""
    key = layout.release(sequence)
    manifest = ReleaseManifest.parse(storage.read(key), where=f"{storage.url}/{key}")
    if manifest.sequence != sequence:
        raise CorruptError(f"{storage.url}/{key} says that it is release {manifest.sequence}")
    return manifest


def open_releases(storage: Storage, writer: Writer, *, clock: Clock | None = None) -> int:
    """Commit the term's first release, which changes nothing, and return its sequence. Rank 0 only, after `open_term`.

    A run of an earlier term that still lives may have looked for newer terms just before ours was opened, and commit just after.
    Sequences have no gaps, and each run takes the one after the newest that it knows, so all such commits either come before this
    one and are found by `absorb`, or lose against it. Raises FencedError if a newer term has been opened.
    """
    clock = clock or SystemClock()
    for _ in range(_MAX_RACES):
        newest = newest_sequence(storage)
        manifest = _unchanged(storage, newest, writer, clock.time())
        # After the sequence was chosen: a term opened later can't have committed anything that the choice took into account.
        require_unfenced(storage, writer.term)
        if create_once(storage, layout.release(manifest.sequence), manifest.to_bytes(), clock=clock):
            return manifest.sequence
    raise StorageError(
        f"{storage.url}: lost the race for a release {_MAX_RACES} times; are many runs being started on this lineage?"
    )


def absorb(storage: Storage, touched: TouchedRows, tables: Sequence[TableSpec], *, after: int, up_to: int) -> dict[str, np.ndarray]:
    """Mark the keys of releases after + 1 .. up_to, each rank in its own row ranges, before training starts.

    Returns the keys that the trainer's tables no longer have, sorted by table: rank 0 releases them as deletes. Raises CorruptError
    or NotFoundError if a release can't be read whole: servers can't go past it either.
    """
    num_rows = {spec.name: spec.num_embeddings for spec in tables}
    gone: dict[str, list[np.ndarray]] = {}
    for sequence in range(after + 1, up_to + 1):
        for table, ids in released_keys(storage, read_release(storage, sequence)):
            touched.mark_global(table, ids)
            lost = ids[ids >= num_rows.get(table, 0)]
            if len(lost):
                gone.setdefault(table, []).append(lost)
    return {table: np.unique(np.concatenate(parts)) for table, parts in gone.items()}


def released_keys(storage: Storage, manifest: ReleaseManifest) -> Iterator[tuple[str, np.ndarray]]:
    """(table, ids) of all rows that a release upserts or deletes, file by file."""
    where = f"{storage.url}/{layout.release(manifest.sequence)}"
    for entry in manifest.files:
        if manifest.dense is not None and entry.key == manifest.dense.key:
            continue
        try:
            arrays = read_arrays(storage, entry.key, sha256=entry.sha256, size=entry.size)
        except NotFoundError:
            raise CorruptError(f"{where} lists {entry.key}, which isn't there") from None
        for name, array in arrays.items():
            table, _, kind = name.rpartition("/")
            if kind in ("ids", "deleted"):
                yield table, array


def _unchanged(storage: Storage, newest: int, writer: Writer, now: float) -> ReleaseManifest:
    """A release after `newest` with the same content."""
    data = storage.read(layout.SNAPSHOT)
    snapshot = SnapshotManifest.parse(data, where=f"{storage.url}/{layout.SNAPSHOT}")
    before = read_release(storage, newest) if newest else None
    return ReleaseManifest(
        sequence=newest + 1,
        term=writer.term,
        cut=0,
        run_id=writer.run_id,
        nonce=uuid.uuid4().hex,
        snapshot_digest=hashlib.sha256(data).hexdigest(),
        step=before.step if before else 0,
        examples=before.examples if before else snapshot.examples,
        watermark=before.watermark if before else snapshot.watermark,
        segments=[],
        files=[],
        dense=None,
        splits=before.splits if before else [],
        stages=Stages(cut_at=now, written_at=now, gated_at=now, committed_at=now),
    )
