"""The snapshot: a full export, everything that a server needs to start."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from tidemill.contracts.base import Document, Part, Upgrade
from tidemill.contracts.files import FileEntry, TableFile, TableSpec


class PooledLookup(Part):
    """One feature's pooled embedding: rows of `table` for the feature's ids, summed or averaged; no id gives zeros."""

    feature: str
    table: str
    pooling: Literal["sum", "mean"]


class StepLookup(Part):
    """One feature's embeddings without pooling: one row of `table` a step."""

    feature: str
    table: str


class SequenceInput(Part):
    """A sequence group: its query features (one id each) and its sequence features (same number of steps)."""

    group: str
    query: list[StepLookup]
    steps: list[StepLookup]
    max_steps: int
    """Steps after padding."""


class ProgramInputs(Part):
    """How the dense program's inputs are made from a batch. The program takes a dict of float32 tensors (int64 lengths):

    `dense` (B, num_dense); `pooled` (B, sum of dims, in the order of `pooled`); for each sequence group g: `g.query` (B, sum of
    query dims), `g.sequence` (B, max_steps, sum of step dims; zero-padded), `g.lengths` (B,) int64. Empty inputs are left out.
    """

    num_dense: int
    pooled: list[PooledLookup]
    sequences: list[SequenceInput]


class ProbeRows(Part):
    """Rows stored with the snapshot, and the exporter's own scores for them."""

    rows: FileEntry
    """An Arrow IPC file with raw columns."""
    scores: dict[str, list[float]]


class SnapshotManifest(Document):
    """`snapshot.json`, written last. Lists every file; never points outside its lineage folder."""

    schema_name: ClassVar[str] = "snapshot"
    schema_version: ClassVar[int] = 2
    upgrades: ClassVar[dict[int, Upgrade]] = {1: lambda body: body}
    sealed_from: ClassVar[int | None] = 2

    model: str
    """The model's name in requests: the config's model kind unless set."""
    checkpoint_step: int
    checkpoint_term: int
    checkpoint_digest: str
    """Digest of the checkpoint's manifest; a stream that starts from the snapshot requires its parent's to be equal."""
    examples: int
    created_at: float
    watermark: float | None
    boundary: float | None
    """Event time at which the day's table ends and its stream begins."""
    features: dict[str, Any]
    """The feature set's spec: columns, kinds, hashes."""
    inputs: ProgramInputs
    outputs: list[str]
    """Names of the program's outputs, e.g. "probs"."""
    tables: list[TableSpec]
    table_files: list[TableFile]
    dense: FileEntry
    """Safetensors: the program's parameters and buffers by name."""
    program: FileEntry
    """torch.export archive of the dense graph."""
    pipeline: FileEntry
    probes: ProbeRows | None
