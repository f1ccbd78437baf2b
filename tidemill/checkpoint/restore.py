"""Puts a checkpoint back into a model, whatever the number of ranks (D4, D12)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tidemill.checkpoint.chain import overlapping
from tidemill.checkpoint.discovery import naming_older, read_arrays_of
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.contracts.files import TableSpec
from tidemill.distributed.sharding import LocalShard
from tidemill.errors import CheckpointError
from tidemill.storage.base import Storage
from tidemill.storage.shards import TableShard, assemble


def restore_tables(
    storage: Storage,
    manifest: CheckpointManifest,
    shards: Sequence[LocalShard],
    *,
    optimizer: bool = True,
    tables: Sequence[TableSpec] = (),
) -> None:
    """Fill live shards with the checkpoint's rows, and their optimizer state. Every file is checked against its hash.

    `tables`: all tables of the model, if a table whose number of rows has shrunk is to be refused too. Raises CheckpointError
    naming the table if tables or optimizer aren't the checkpoint's, CorruptError naming the file if its bytes have changed, and
    the newest older checkpoint that is whole.
    """
    specs = {spec.name: spec for spec in manifest.tables}
    for table in tables:
        spec = specs.get(table.name)
        if spec is not None and spec.num_embeddings != table.num_embeddings:
            sizes = f"{spec.num_embeddings} rows in the checkpoint, {table.num_embeddings} in the model"
            raise CheckpointError(f"{storage.url}: table {table.name!r} has {sizes}")
    with naming_older(storage, manifest):
        for shard in shards:
            _require_fitting(storage, manifest, specs.get(shard.table), shard)
            _fill_shard(storage, manifest, shard, optimizer=optimizer)


def read_table(storage: Storage, manifest: CheckpointManifest, table: str, tensor: str = "weight") -> np.ndarray:
    """All rows of one table (or of one tensor of its optimizer state)."""
    spec = next((spec for spec in manifest.tables if spec.name == table), None)
    if spec is None:
        raise CheckpointError(f"{storage.url}: step {manifest.step} has no table {table!r}")
    files = manifest.table_files if tensor == "weight" else manifest.optimizer_files
    with naming_older(storage, manifest):
        return assemble(overlapping(storage, files, table, 0, spec.num_embeddings), table, tensor, 0, spec.num_embeddings)


def dense_tensors(storage: Storage, manifest: CheckpointManifest, file: str = "dense") -> dict[str, torch.Tensor]:
    """The dense weights by name, as tensors of their own."""
    return {name: torch.from_numpy(np.array(array)) for name, array in read_arrays_of(storage, manifest, file).items()}


def _require_fitting(storage: Storage, manifest: CheckpointManifest, spec: TableSpec | None, shard: LocalShard) -> None:
    if spec is None:
        names = sorted(table.name for table in manifest.tables)
        raise CheckpointError(f"{storage.url}: step {manifest.step} has no table {shard.table!r}; it has {names}")
    if shard.row_stop > spec.num_embeddings or shard.weight.shape[1] != spec.embedding_dim:
        raise CheckpointError(
            f"{storage.url}: table {shard.table!r} is {spec.num_embeddings} x {spec.embedding_dim} in the checkpoint,"
            f" the model wants rows to {shard.row_stop} x {shard.weight.shape[1]}"
        )


def _fill_shard(storage: Storage, manifest: CheckpointManifest, shard: LocalShard, *, optimizer: bool) -> None:
    weights = overlapping(storage, manifest.table_files, shard.table, shard.row_start, shard.row_stop)
    _fill(storage, shard, "weight", shard.weight, weights)
    if optimizer and shard.optimizer:
        states = overlapping(storage, manifest.optimizer_files, shard.table, shard.row_start, shard.row_stop)
        for name, live in shard.optimizer.items():
            _fill(storage, shard, name, live, states)


def _fill(storage: Storage, shard: LocalShard, tensor: str, live: torch.Tensor, saved: Sequence[TableShard]) -> None:
    if shard.row_start == shard.row_stop:
        return
    if not any(tensor in part.tensors for part in saved):
        raise CheckpointError(
            f"{storage.url}: the checkpoint has no {tensor} of table {shard.table!r}; was it trained with another optimizer?"
        )
    rows = torch.from_numpy(assemble(saved, shard.table, tensor, shard.row_start, shard.row_stop))
    if rows.numel() != live.numel() or rows.dtype != live.dtype:
        raise CheckpointError(
            f"{storage.url}: {tensor} of table {shard.table!r} is {rows.dtype} {tuple(rows.shape)} in the checkpoint,"
            f" the model wants {live.dtype} {tuple(live.shape)}"
        )
    with torch.no_grad():
        live.copy_(rows.reshape(live.shape))
