"""Verification: what servers get from a lineage's folder, against the trainer's checkpoint, key by key and byte for byte."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.checkpoint.discovery import read_arrays_of, read_checkpoint, read_rank_states
from tidemill.checkpoint.restore import read_table
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.contracts.release import ReleaseManifest
from tidemill.errors import CheckpointError
from tidemill.lineage.records import run_records
from tidemill.serving.generation import Generation
from tidemill.serving.loader import load_generation
from tidemill.serving.tables import Table
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage

_BLOCK_ROWS = 1 << 16
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Difference:
    """A row, or a dense weight (`id` None), that isn't the same."""

    table: str
    id: int | None

    def __str__(self) -> str:
        return f"dense weight {self.table}" if self.id is None else f"table {self.table}, id {self.id}"


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared, and what came of it. Keys: rows of tables.

    `term`, `sequence`: the release, (0, 0) for the snapshot itself. `keys_excluded`: rows touched between release and checkpoint,
    which nobody says to be equal. `dense_compared` 0: the dense weights have moved on between the two.
    """

    lineage: str
    checkpoint_step: int
    checkpoint_term: int
    term: int
    sequence: int
    step: int
    keys_compared: int
    keys_different: int
    keys_excluded: int
    dense_compared: int
    dense_different: int
    differences: tuple[Difference, ...]
    """The first few."""

    @property
    def is_equal(self) -> bool:
        return self.keys_different == 0 and self.dense_different == 0

    def scope(self) -> str:
        """What was compared with what, for people."""
        served = f"release {self.sequence} (term {self.term}, step {self.step})" if self.sequence else "the snapshot"
        checkpoint = f"checkpoint {self.checkpoint_step} (term {self.checkpoint_term})"
        if self.dense_compared:
            return f"{served} with {checkpoint}: all rows and all dense weights"
        return (
            f"{served}, the newest that {checkpoint} knows to be committed: no release holds this checkpoint's very step, so the"
            f" {self.keys_excluded} rows touched in between and the dense weights are left out"
        )


def verify(folder: str, *, step: int | None = None) -> Verification:
    """Compare a stream lineage's newest checkpoint (or that of `step`) with what its releases serve.

    If the run that saved the checkpoint cut a release at the same step, all rows and dense weights must be equal. Otherwise the
    newest release that the checkpoint knows to be committed is compared: rows that weren't touched since must be equal. Raises
    CheckpointError if the folder's checkpoints aren't a publishing stream's, NotFoundError without a snapshot, CorruptError for
    anything that isn't what its manifest says.
    """
    storage = open_storage(folder)
    _, manifest = read_checkpoint(storage, step)
    release = same_moment(manifest, _releases(storage), _continued(storage, manifest))
    if release is not None:
        generation = load_generation(storage, "", up_to=(release.term, release.sequence))
        return _compare(storage, manifest, generation, {}, with_dense=True)
    states = read_rank_states(storage, manifest)
    acknowledged = max((int(state["cursor"]["sequence"]) for state in states if "cursor" in state), default=None)
    if acknowledged is None:
        raise CheckpointError(f"{storage.url}: the checkpoint of step {manifest.step} isn't of a run that publishes releases")
    generation = load_generation(storage, "", up_to=_position(storage, acknowledged))
    return _compare(storage, manifest, generation, _touched(states), with_dense=False)


def same_moment(
    checkpoint: CheckpointManifest, releases: Sequence[ReleaseManifest], continued: Collection[str] = ()
) -> ReleaseManifest | None:
    """The newest release that was cut at the very moment of a checkpoint; None if there is none. `releases`: by sequence.

    `continued`: runs that went on from the checkpoint; what they cut before their first step is the checkpoint's moment too. The
    same step alone isn't enough: after a crash, another run counts the lost steps anew, and what a run commits on opening its term
    (cut 0) only repeats what was served before.
    """
    runs = {checkpoint.run_id, *continued}
    own = [release for release in releases if release.run_id in runs and release.cut > 0]
    return next((release for release in reversed(own) if release.step == checkpoint.step), None)


def _continued(storage: Storage, checkpoint: CheckpointManifest) -> set[str]:
    """Runs whose records say that they went on from the checkpoint."""
    at = (checkpoint.term, checkpoint.step)
    return {record.run_id for record in run_records(storage) if (record.resumed_term, record.resumed_step) == at}


def _releases(storage: Storage) -> list[ReleaseManifest]:
    keys = [info.key for info in storage.list("releases/") if layout.release_sequence(info.key) is not None]
    return [ReleaseManifest.parse(storage.read(key), where=f"{storage.url}/{key}") for key in sorted(keys)]


def _position(storage: Storage, sequence: int) -> tuple[int, int]:
    if sequence == 0:
        return 0, 0
    key = layout.release(sequence)
    return ReleaseManifest.parse(storage.read(key), where=f"{storage.url}/{key}").term, sequence


def _touched(states: Sequence[dict[str, dict[str, np.ndarray]]]) -> dict[str, np.ndarray]:
    ids: dict[str, list[np.ndarray]] = {}
    for state in states:
        for table, rows in state.get("touched", {}).items():
            ids.setdefault(table, []).append(np.asarray(rows, np.int64))
    return {table: np.unique(np.concatenate(parts)) for table, parts in ids.items()}


def _compare(
    storage: Storage, manifest: CheckpointManifest, served: Generation, excluded: dict[str, np.ndarray], *, with_dense: bool
) -> Verification:
    _require_same_tables(storage, manifest, served)
    differences: list[Difference] = []
    compared = different = left_out = 0
    for spec in manifest.tables:
        mask = np.zeros(spec.num_embeddings, np.bool_)
        mask[excluded.get(spec.name, np.empty(0, np.int64))] = True
        left_out += int(mask.sum())
        compared += spec.num_embeddings - int(mask.sum())
        for ids in _different_rows(read_table(storage, manifest, spec.name), served.tables[spec.name], mask):
            different += len(ids)
            differences += [Difference(spec.name, int(row)) for row in ids[: _SHOWN - len(differences)]]
    dense = read_arrays_of(storage, manifest, manifest.state.get("served_dense", "dense")) if with_dense else {}
    weights = {name: tensor.numpy() for name, tensor in served.program.weights.items()}
    odd = [name for name in sorted(dense) if name not in weights or not _same_bytes(dense[name], weights[name])]
    return Verification(
        lineage=storage.url,
        checkpoint_step=manifest.step,
        checkpoint_term=manifest.term,
        term=served.term,
        sequence=served.sequence,
        step=served.step,
        keys_compared=compared,
        keys_different=different,
        keys_excluded=left_out,
        dense_compared=len(dense),
        dense_different=len(odd),
        differences=tuple(differences + [Difference(name, None) for name in odd[:_SHOWN]]),
    )


def _require_same_tables(storage: Storage, manifest: CheckpointManifest, served: Generation) -> None:
    saved = {spec.name: spec for spec in manifest.tables}
    if saved != {name: served.tables[name].spec for name in served.tables}:
        raise CheckpointError(
            f"{storage.url}: the checkpoint of step {manifest.step} has tables {sorted(saved)}, or other sizes than the snapshot,"
            f" which has {sorted(served.tables)}"
        )


def _different_rows(saved: np.ndarray, table: Table, excluded: np.ndarray) -> Iterator[np.ndarray]:
    """Ids whose bytes differ, block by block."""
    for start in range(0, len(saved), _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, len(saved))
        ids = np.arange(start, stop, dtype=np.int64)[~excluded[start:stop]]
        # Bytes, not values: NaN isn't equal to itself, and 0.0 is equal to -0.0.
        odd = (_bytes(saved[ids]) != _bytes(table.lookup(ids))).any(axis=1)
        yield ids[odd]


def _bytes(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), rows.shape[1] * rows.itemsize)


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
