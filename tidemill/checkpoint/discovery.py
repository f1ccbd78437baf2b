"""Finds the newest whole checkpoint of a folder, and reads what it says besides its tables (D4, D5)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from tidemill import logs
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest, RankState
from tidemill.contracts.layout import CheckpointName
from tidemill.contracts.progress import DataloaderState
from tidemill.errors import CheckpointError, CorruptError, NotFoundError
from tidemill.storage.arrays import read_arrays
from tidemill.storage.base import Storage
from tidemill.storage.files import read_file

log = logging.getLogger(__name__)

CHECKPOINTS = "model.ckpt-"
"""How the names of checkpoints' folders begin."""


def latest_checkpoint(storage: Storage) -> tuple[str, CheckpointManifest] | None:
    """Key and manifest of the newest whole checkpoint of a folder, by (term, step, save); None if there is none.

    One whose manifest is torn or missing, or which lacks a file, is named in the log and skipped. Raises CheckpointError if
    some were saved, and all of them are damaged: what they held mustn't be begun again unasked.
    """
    found = list_checkpoints(storage)
    manifests = checkpoint_keys(found)
    _name_unfinished(storage, found, manifests.values())
    newest = _newest_whole(storage, manifests, found)
    if newest is None and manifests:
        damaged = ", ".join(dict.fromkeys(layout.checkpoint(name.step) for name in sorted(manifests, reverse=True)))
        raise CheckpointError(
            f"{storage.url}: {damaged}: saved, but damaged (the log says how), and there is no other;"
            " restore one, or move them away"
        )
    return newest


def read_checkpoint(storage: Storage, step: int | None = None) -> tuple[str, CheckpointManifest]:
    """The newest checkpoint, or the newest of a step. Raises CheckpointError if there is none."""
    if step is None:
        newest = latest_checkpoint(storage)
    else:
        # An incremental one lists files of others.
        found = list_checkpoints(storage)
        newest = _newest_whole(storage, {at: key for at, key in checkpoint_keys(found).items() if at.step == step}, found)
    if newest is None:
        of_step = "" if step is None else f" of step {step}"
        raise CheckpointError(f"{storage.url}: no whole checkpoint{of_step} (model.ckpt-N/manifest-*.json)")
    return newest


def list_checkpoints(storage: Storage) -> dict[str, int]:
    """Size by key, of everything in the folders of checkpoints."""
    return {info.key: info.size for info in storage.list(CHECKPOINTS)}


def checkpoint_keys(keys: Iterable[str]) -> dict[CheckpointName, str]:
    """The manifests among the keys, by name; the greatest is the newest."""
    return {name: key for key in keys if (name := layout.checkpoint_of_manifest(key)) is not None}


def whole_checkpoint(storage: Storage, key: str, found: Mapping[str, int]) -> CheckpointManifest | None:
    """The manifest, if it is one and all its files are there with their sizes; else None, and the log says what is wrong.

    `found`: size by key of what is there. Contents are checked when they are read.
    """
    try:
        manifest = CheckpointManifest.parse(storage.read(key), where=f"{storage.url}/{key}")
    except (CorruptError, NotFoundError) as error:
        _skip(key, str(error))
        return None
    name = layout.checkpoint_of_manifest(key)
    if name is None or name[:2] != (manifest.term, manifest.step):
        _skip(key, f"{storage.url}/{key} is the manifest of step {manifest.step}, term {manifest.term}")
        return None
    missing = [entry.key for entry in manifest.all_files if found.get(entry.key) != entry.size]
    if missing:
        _skip(key, f"{storage.url}/{key}: {missing[0]} is missing or has another size")
        return None
    return manifest


def read_arrays_of(storage: Storage, manifest: CheckpointManifest, name: str) -> dict[str, np.ndarray]:
    """The arrays of one of the checkpoint's files ("dense", "dense_optimizer"), checked against its hash."""
    entry = manifest.files.get(name)
    if entry is None:
        raise CheckpointError(f"{storage.url}: step {manifest.step} has no {name} file")
    return read_arrays(storage, entry.key, sha256=entry.sha256, size=entry.size)


def read_dataloader_state(storage: Storage, manifest: CheckpointManifest) -> DataloaderState:
    """Where the data stood; checked against its hash."""
    entry = manifest.files.get("dataloader_state")
    if entry is None:
        raise CheckpointError(f"{storage.url}: step {manifest.step} has no dataloader_state file")
    return DataloaderState.parse(read_file(storage, entry), where=f"{storage.url}/{entry.key}")


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


def _newest_whole(
    storage: Storage, manifests: Mapping[CheckpointName, str], found: Mapping[str, int]
) -> tuple[str, CheckpointManifest] | None:
    for checkpoint in sorted(manifests, reverse=True):
        manifest = whole_checkpoint(storage, manifests[checkpoint], found)
        if manifest is not None:
            return manifests[checkpoint], manifest
    return None


def _name_unfinished(storage: Storage, found: Iterable[str], manifests: Iterable[str]) -> None:
    """Say which folders look like checkpoints and aren't. Files that a later, incremental one lists are part of that one."""
    manifests = list(manifests)
    folders = {key.partition("/")[0] for key in found} - {key.partition("/")[0] for key in manifests}
    for key in manifests if folders else []:
        # A damaged manifest is named where checkpoints are chosen.
        with suppress(CorruptError, NotFoundError):
            listed = CheckpointManifest.parse(storage.read(key), where=f"{storage.url}/{key}").all_files
            folders -= {entry.key.partition("/")[0] for entry in listed}
    for folder in sorted(folders):
        _skip(folder, f"{storage.url}/{folder} has no manifest: its save was never finished, or it isn't one of ours")


def _skip(key: str, why: str) -> None:
    log.warning("checkpoint skipped: %s", why)
    logs.event("checkpoint.skipped", key=key, error=why)
