"""The checkpoint's manifest: the trainer's durable truth (D4)."""

from __future__ import annotations

from typing import Any, ClassVar

from tidemill.contracts.base import Document, Part
from tidemill.contracts.files import FileEntry, TableFile, TableSpec
from tidemill.contracts.progress import SplitState


class ParentCheckpoint(Part):
    """The checkpoint that a lineage continued from."""

    url: str
    step: int
    digest: str
    examples: int
    """Cumulative examples trained up to it, over the whole line."""


class RankState(Part):
    """State that belongs to one rank: random generators, touched rows, metrics. Never pickled."""

    rank: int
    arrays: FileEntry | None
    """Safetensors: named "<owner>/<array>"."""
    values: dict[str, Any]
    """JSON state by owner."""


class CheckpointPart(Document):
    """What one rank wrote of a checkpoint; rank 0 waits for all of them before it writes the manifest."""

    schema_name: ClassVar[str] = "checkpoint_part"

    table_files: list[TableFile]
    optimizer_files: list[TableFile]
    files: dict[str, FileEntry]
    """Rank 0 only: "dense" and "dense_optimizer"."""
    splits: list[SplitState]
    state: RankState


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
    """"dense", "dense_optimizer", "dataloader_state" and "pipeline"."""
    rank_states: list[RankState]
    watermark: float | None
    parent: ParentCheckpoint | None
    state: dict[str, Any]
    """Small JSON state that all ranks share: passes, schedules, trigger references, the assignment's base, publish cursor."""

    @property
    def all_files(self) -> list[FileEntry]:
        """Every file that must be there for the checkpoint to be whole."""
        tables = [table.file for table in (*self.table_files, *self.optimizer_files)]
        ranks = [state.arrays for state in self.rank_states if state.arrays is not None]
        return [*tables, *self.files.values(), *ranks]
