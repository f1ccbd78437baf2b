"""Generations: what one server serves at one moment, and how the next one follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.contracts.release import Stages
from tidemill.contracts.snapshot import SnapshotManifest
from tidemill.errors import CorruptError
from tidemill.features.feature_set import FeatureSet
from tidemill.serving.program import Program
from tidemill.serving.tables import Tables, TablesEdit


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """What all generations of one snapshot share."""

    digest: str
    """of snapshot.json"""
    manifest: SnapshotManifest
    features: FeatureSet
    probes: pa.Table | None
    """The snapshot's probe rows, raw columns."""

    @property
    def feature_columns(self) -> frozenset[str]:
        """Raw columns that a request must have."""
        return frozenset(column.name for column in self.features.input_columns if column.role == "feature")


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """Snapshot plus releases up to (term, sequence). Immutable: any thread may score with it while the next one is built."""

    model: ServedModel
    deployment: int | None
    """Number of the deployment that asked for it; None if a snapshot or lineage was named directly."""
    lineage: str
    term: int
    sequence: int
    """0: the snapshot itself."""
    step: int
    """The stream's step; the checkpoint's for the snapshot itself."""
    watermark: float | None
    tables: Tables
    program: Program
    """The dense graph with this generation's weights."""
    stages: Stages | None
    """When the newest release passed each stage; None for the snapshot itself."""

    @property
    def position(self) -> tuple[int, int]:
        """(term, sequence): what generations of one lineage are ordered by."""
        return self.term, self.sequence

    def name(self) -> dict[str, Any]:
        """What an answer says about who scored it."""
        return {
            "deployment": self.deployment,
            "lineage": self.lineage,
            "snapshot": self.model.digest,
            "term": self.term,
            "sequence": self.sequence,
            "step": self.step,
            "watermark": self.watermark,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """One release's content, committed or about to be."""

    term: int
    sequence: int
    step: int
    watermark: float | None
    segments: Sequence[Mapping[str, np.ndarray]]
    """Arrays of each segment file: `<table>/ids` with `<table>/rows`, `<table>/deleted`."""
    dense: Mapping[str, np.ndarray] | None
    """All dense weights by name; None: unchanged."""
    stages: Stages | None = None

    def num_rows(self) -> int:
        """Upserts and deletes together."""
        return sum(len(array) for arrays in self.segments for name, array in arrays.items() if not name.endswith("/rows"))


def next_generation(base: Generation, changes: Sequence[Change]) -> Generation:
    """The generation after `changes`, in order. `base` stays as it is; tables that nothing touches are shared with it.

    Raises CorruptError if a change doesn't fit the model or goes back in (term, sequence).
    """
    if not changes:
        return base
    edit = base.tables.edit()
    dense = None
    position = base.position
    for change in changes:
        if (change.term, change.sequence) <= position or change.term < position[0]:
            raise CorruptError(f"release {change.sequence} of term {change.term} doesn't follow (term, sequence) {position}")
        position = change.term, change.sequence
        for arrays in change.segments:
            _apply_segment(edit, arrays)
        dense = change.dense if change.dense is not None else dense
    newest = changes[-1]
    return replace(
        base,
        term=newest.term,
        sequence=newest.sequence,
        step=newest.step,
        watermark=newest.watermark,
        tables=edit.tables(),
        program=base.program if dense is None else base.program.with_weights(dense),
        stages=newest.stages,
    )


def _apply_segment(edit: TablesEdit, arrays: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        table, _, part = name.rpartition("/")
        if part == "ids":
            rows = arrays.get(f"{table}/rows")
            if rows is None:
                raise CorruptError(f"a segment has {name!r} without {table}/rows")
            edit[table].upsert(array, rows)
        elif part == "deleted":
            edit[table].delete(array)
        elif part != "rows" or f"{table}/ids" not in arrays:
            raise CorruptError(f"a segment holds {name!r}, which is neither ids with rows nor deleted")
