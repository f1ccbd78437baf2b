"""The checkpoint's manifest: the trainer's durable truth (D4)."""

from __future__ import annotations

from typing import Any, ClassVar

from tidemill.contracts.base import Document, Part, Upgrade
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
    schema_version: ClassVar[int] = 2
    upgrades: ClassVar[dict[int, Upgrade]] = {1: lambda body: {**body, "damage": None}}

    table_files: list[TableFile]
    optimizer_files: list[TableFile]
    files: dict[str, FileEntry]
    """Rank 0 only: the dense ones of the manifest's."""
    splits: list[SplitState]
    state: RankState
    damage: str | None
    """What this rank found wrong with the files that an incremental checkpoint would build on."""


class FoldPart(Document):
    """One rank's full shards, folded from a checkpoint's files; a later checkpoint lists all ranks' in their place."""

    schema_name: ClassVar[str] = "checkpoint_fold"

    table_files: list[TableFile]
    optimizer_files: list[TableFile]


class CheckpointManifest(Document):
    """`manifest-<term>.json`, written last: the checkpoint exists if and only if this file does.

    An incremental checkpoint lists files of earlier ones too: full shards first, then touched rows from the oldest to the newest.
    """

    schema_name: ClassVar[str] = "checkpoint"
    schema_version: ClassVar[int] = 2
    upgrades: ClassVar[dict[int, Upgrade]] = {1: lambda body: {**body, "increments": 0}}
    sealed_from: ClassVar[int | None] = 2

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
    """In order: rows of a later file replace those of an earlier one."""
    optimizer_files: list[TableFile]
    """Optimizer state of the tables' rows, in order: files of their own, so that an export can link the weights alone."""
    increments: int
    """How many sets of touched rows follow the full shards."""
    files: dict[str, FileEntry]
    """"dense", "dense_optimizer", "dataloader_state" and "pipeline"; "dense_gradients" within an accumulation; "dense_ema": the
    averaged weights, complete, if they are kept."""
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
