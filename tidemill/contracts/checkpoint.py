"""The checkpoint's manifest: the trainer's durable truth (D4)."""

from __future__ import annotations

from typing import Any, ClassVar

from tidemill.contracts.base import Document, Part
from tidemill.contracts.files import FileEntry, TableFile, TableSpec


class ParentCheckpoint(Part):
    """The checkpoint that a lineage continued from."""

    url: str
    step: int
    digest: str
    examples: int
    """Cumulative examples trained up to it, over the whole line."""


class CheckpointPart(Document):
    """What one rank wrote of a checkpoint; rank 0 waits for all of them before it writes the manifest."""

    schema_name: ClassVar[str] = "checkpoint_part"

    rank: int
    tables: list[TableFile]
    files: dict[str, FileEntry]
    """State files by name ("dense", "random", "touched", ...)."""


class CheckpointManifest(Document):
    """`manifest-<term>.json`, written last: the checkpoint exists if and only if this file does."""

    schema_name: ClassVar[str] = "checkpoint"

    step: int
    term: int
    run_id: str
    nonce: str
    created_at: float
    world_size: int
    examples: int
    """Cumulative examples trained, the parents' included."""
    tables: list[TableSpec]
    table_files: list[TableFile]
    optimizer_files: list[TableFile]
    """Optimizer state of the tables' rows: files of their own, so that an export can link the weights alone."""
    files: dict[str, FileEntry]
    """"dense", "dense_optimizer", "state", "dataloader_state", "pipeline", and "touched-<rank>", "random-<rank>"."""
    watermark: float | None
    parent: ParentCheckpoint | None = None
    state: dict[str, Any]
    """Small JSON state: schedules, passes, publish cursor, trigger references."""
