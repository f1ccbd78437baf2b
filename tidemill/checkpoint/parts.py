"""Writes one rank's files of a checkpoint, and the part that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tidemill.checkpoint.capture import Capture
from tidemill.contracts.checkpoint import CheckpointPart, RankState
from tidemill.contracts.files import TableFile
from tidemill.storage.arrays import write_arrays
from tidemill.storage.base import Storage
from tidemill.storage.shards import TableShard, write_shards

WEIGHTS, OPTIMIZER = "tables", "optimizer"
"""Folders of the two kinds of table files."""


def write_capture(storage: Storage, folder: str, rank: int, capture: Capture, damage: str | None = None) -> CheckpointPart:
    """Write a capture's files below `folder`. The same keys and bytes each time, so that trying again does no harm."""
    files = {
        name: write_arrays(storage, f"{folder}/{name}.safetensors", arrays) for name, arrays in sorted(capture.dense_files.items())
    }
    # A file is named by its first row: one without a row could have the name of another rank's.
    tables = [table for table in capture.tables if len(table.weight)]
    return CheckpointPart(
        table_files=[write_rows(storage, folder, WEIGHTS, table.shard({"weight": table.weight})) for table in tables],
        optimizer_files=[
            write_rows(storage, folder, OPTIMIZER, table.shard(table.optimizer)) for table in tables if table.optimizer
        ],
        files=files,
        splits=capture.splits,
        state=_write_rank_state(storage, f"{folder}/state-{rank:05d}.safetensors", rank, capture.rank_state),
        damage=damage,
    )


def write_rows(storage: Storage, folder: str, kind: str, shard: TableShard) -> TableFile:
    """Write a shard's weights or optimizer state into a file of its own."""
    key = f"{folder}/{kind}/{shard.table}-{shard.row_start:012d}.safetensors"
    return TableFile(
        table=shard.table,
        file=write_shards(storage, key, [shard]),
        row_start=shard.row_start,
        row_stop=shard.row_stop,
        subset=shard.ids is not None,
    )


def _write_rank_state(storage: Storage, key: str, rank: int, state: Mapping[str, Mapping[str, Any]]) -> RankState:
    arrays: dict[str, np.ndarray] = {}
    values: dict[str, Any] = {}
    for owner, fields in state.items():
        if "/" in owner:
            raise ValueError(f"state owner {owner!r}: '/' separates owner and array in the file")
        arrays |= {f"{owner}/{name}": value for name, value in fields.items() if isinstance(value, np.ndarray)}
        values[owner] = {name: value for name, value in fields.items() if not isinstance(value, np.ndarray)}
    stored = write_arrays(storage, key, arrays) if arrays else None
    return RankState(rank=rank, arrays=stored, values=values)
