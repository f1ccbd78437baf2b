"""Releases: publications on top of a snapshot, each one commit (D6)."""

from __future__ import annotations

from typing import ClassVar

from tidemill.contracts.base import Document, Part
from tidemill.contracts.files import FileEntry
from tidemill.contracts.progress import SplitState


class SegmentEntry(Part):
    """Changed rows of one table in one file, sorted by id.

    Tensors inside: `<table>/ids` int64 and `<table>/rows` (rows, dim) for upserts, `<table>/deleted` int64 for deletions.
    """

    table: str
    file: str
    """Key of an entry of `ReleaseManifest.files`."""
    upserts: int
    deletes: int


class Stages(Part):
    """When a cut passed each stage, Unix seconds by rank 0's clock; the freshness waterfall is made of these."""

    newest_event_at: float | None = None
    """Largest arrival time (broker timestamp) among the rows of the cut; None if the source has none."""
    cut_at: float
    written_at: float
    gated_at: float
    committed_at: float


class CutPart(Document):
    """What one rank wrote of a cut: `part-<rank>.json`."""

    schema_name: ClassVar[str] = "cut_part"

    rank: int
    term: int
    cut: int
    step: int
    segments: list[SegmentEntry]
    files: list[FileEntry]
    splits: list[SplitState]
    """This rank's trained positions."""
    event_time: float | None
    dense: FileEntry | None = None
    """Rank 0 only, and only if the bytes changed since the last cut."""
    probe_scores: dict[str, list[float]] | None = None
    """Rank 0 only: the trainer's scores of the stored probe rows, by output."""
    newest_event_at: float | None = None


class ReleaseManifest(Document):
    """`releases/<sequence>.json`, created exclusively. Order is (term, sequence), never step."""

    schema_name: ClassVar[str] = "release"

    sequence: int
    term: int
    cut: int
    run_id: str
    nonce: str
    snapshot_digest: str
    """Digest of the snapshot that the lineage's releases build on."""
    step: int
    examples: int
    watermark: float | None
    segments: list[SegmentEntry]
    files: list[FileEntry]
    dense: FileEntry | None
    """The dense weights as of this release; None: as of the newest earlier release that has them, or the snapshot's."""
    splits: list[SplitState]
    """The progress cut: an event is in this release once its position is covered."""
    stages: Stages


class CurrentHint(Document):
    """`dense_hot_export/current.json`: a hint for pollers, written after the commit.

    `version`, `checkpoint_step`, `data_timestamp` and `created_at` are tzrec's keys.
    """

    schema_name: ClassVar[str] = "current"

    version: str
    checkpoint_step: int
    data_timestamp: float | None
    created_at: str
    sequence: int
    term: int
