"""Finds the newest whole checkpoint, and puts one back into a model, whatever the number of ranks (D4, D12)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from tidemill import logs
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest, RankState
from tidemill.contracts.files import FileEntry, TableFile
from tidemill.contracts.progress import DataloaderState
from tidemill.distributed.sharding import LocalShard
from tidemill.errors import CheckpointError, CorruptError, NotFoundError
from tidemill.storage.arrays import read_arrays
from tidemill.storage.base import Storage
from tidemill.storage.shards import TableShard, assemble, read_shards

log = logging.getLogger(__name__)


def latest_checkpoint(storage: Storage) -> tuple[str, CheckpointManifest] | None:
    """Key and manifest of the newest whole checkpoint of a folder, by (term, step); None if there is none.

    One whose manifest is torn, or which lacks a file, is named in the log and skipped.
    """
    found = {info.key: info.size for info in storage.list("model.ckpt-")}
    candidates = [(at[1], at[0], key) for key in found if (at := layout.checkpoint_of_manifest(key)) is not None]
    for _, _, key in sorted(candidates, reverse=True):
        manifest = _whole(storage, key, found)
        if manifest is not None:
            return key, manifest
    return None


def read_checkpoint(storage: Storage, step: int | None = None) -> tuple[str, CheckpointManifest]:
    """The newest checkpoint, or the newest of a step. Raises CheckpointError if there is none."""
    if step is None:
        newest = latest_checkpoint(storage)
        if newest is None:
            raise CheckpointError(f"{storage.url}: no whole checkpoint (model.ckpt-N/manifest-*.json)")
        return newest
    found = {info.key: info.size for info in storage.list(f"{layout.checkpoint(step)}/")}
    for key in sorted((key for key in found if layout.checkpoint_of_manifest(key)), reverse=True):
        manifest = _whole(storage, key, found)
        if manifest is not None:
            return key, manifest
    raise CheckpointError(f"{storage.url}: no whole checkpoint of step {step}")


def restore_tables(storage: Storage, manifest: CheckpointManifest, shards: Sequence[LocalShard], *, optimizer: bool = True) -> None:
    """Fill live shards with the checkpoint's rows, and their optimizer state. Every row is checked against its file's hash.

    Raises CheckpointError naming table and shape if the model's tables aren't the checkpoint's.
    """
    specs = {spec.name: spec for spec in manifest.tables}
    for shard in shards:
        spec = specs.get(shard.table)
        if spec is None:
            raise CheckpointError(f"{storage.url}: step {manifest.step} has no table {shard.table!r}; it has {sorted(specs)}")
        if shard.row_stop > spec.num_embeddings or shard.weight.shape[1] != spec.embedding_dim:
            raise CheckpointError(
                f"{storage.url}: table {shard.table!r} is {spec.num_embeddings} x {spec.embedding_dim} in the checkpoint,"
                f" the model wants rows to {shard.row_stop} x {shard.weight.shape[1]}"
            )
        _fill(shard.weight, _rows(storage, manifest.table_files, shard, "weight"))
        if optimizer:
            for name, live in shard.optimizer.items():
                _fill(live, _rows(storage, manifest.optimizer_files, shard, name))


def read_table(storage: Storage, manifest: CheckpointManifest, table: str, tensor: str = "weight") -> np.ndarray:
    """All rows of one table (or of one tensor of its optimizer state)."""
    spec = next((spec for spec in manifest.tables if spec.name == table), None)
    if spec is None:
        raise CheckpointError(f"{storage.url}: step {manifest.step} has no table {table!r}")
    files = manifest.table_files if tensor == "weight" else manifest.optimizer_files
    return assemble(_overlapping(storage, files, table, 0, spec.num_embeddings), table, tensor, 0, spec.num_embeddings)


def read_file(storage: Storage, manifest: CheckpointManifest, name: str) -> dict[str, np.ndarray]:
    """The arrays of one of the checkpoint's files ("dense", "dense_optimizer"), checked against its hash."""
    entry = manifest.files.get(name)
    if entry is None:
        raise CheckpointError(f"{storage.url}: step {manifest.step} has no {name} file")
    return read_arrays(storage, entry.key, sha256=entry.sha256, size=entry.size)


def read_dataloader_state(storage: Storage, manifest: CheckpointManifest) -> DataloaderState:
    """Where the data stood."""
    entry = manifest.files["dataloader_state"]
    return DataloaderState.parse(storage.read(entry.key), where=f"{storage.url}/{entry.key}")


def read_rank_states(storage: Storage, manifest: CheckpointManifest) -> list[dict[str, dict[str, Any]]]:
    """Each saving rank's state by owner, in rank order, as `Stateful.state` gave it."""
    return [_rank_state(storage, state) for state in sorted(manifest.rank_states, key=lambda state: state.rank)]


def _rank_state(storage: Storage, state: RankState) -> dict[str, dict[str, Any]]:
    owners: dict[str, dict[str, Any]] = {owner: dict(values) for owner, values in state.values.items()}
    if state.arrays is not None:
        arrays = read_arrays(storage, state.arrays.key, sha256=state.arrays.sha256, size=state.arrays.size)
        for name, array in arrays.items():
            owner, _, key = name.partition("/")
            owners.setdefault(owner, {})[key] = array
    return owners


def _whole(storage: Storage, key: str, found: dict[str, int]) -> CheckpointManifest | None:
    try:
        manifest = CheckpointManifest.parse(storage.read(key), where=f"{storage.url}/{key}")
    except (CorruptError, NotFoundError) as error:
        log.warning("checkpoint skipped: %s", error)
        logs.event("checkpoint.skipped", key=key, error=str(error))
        return None
    missing = [entry.key for entry in manifest.all_files if found.get(entry.key) != entry.size]
    if missing:
        log.warning("checkpoint %s/%s skipped: %s is missing or has another size", storage.url, key, missing[0])
        logs.event("checkpoint.skipped", key=key, error=f"{missing[0]} is missing or has another size")
        return None
    return manifest


def _rows(storage: Storage, files: Iterable[TableFile], shard: LocalShard, tensor: str) -> np.ndarray:
    shards = _overlapping(storage, files, shard.table, shard.row_start, shard.row_stop)
    return assemble(shards, shard.table, tensor, shard.row_start, shard.row_stop)


def _overlapping(storage: Storage, files: Iterable[TableFile], table: str, start: int, stop: int) -> list[TableShard]:
    return [shard for file in files if _overlaps(file, table, start, stop) for shard in _read(storage, file.file)]


def _overlaps(file: TableFile, table: str, start: int, stop: int) -> bool:
    if file.table != table:
        return False
    return file.row_start is None or file.row_stop is None or (file.row_start < stop and file.row_stop > start)


def _read(storage: Storage, entry: FileEntry) -> list[TableShard]:
    return read_shards(storage, entry.key, sha256=entry.sha256, size=entry.size)


def _fill(live: torch.Tensor, rows: np.ndarray) -> None:
    with torch.no_grad():
        live.copy_(torch.from_numpy(rows).reshape(live.shape))
