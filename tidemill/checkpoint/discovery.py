"""Finds the newest whole checkpoint of a folder, and reads what it says besides its tables (D4, D5)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from tidemill import logs
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest, RankState
from tidemill.contracts.files import FileEntry
from tidemill.contracts.layout import CheckpointName
from tidemill.contracts.progress import DataloaderState
from tidemill.errors import CheckpointError, CorruptError, NotFoundError, StorageError
from tidemill.storage.arrays import read_arrays
from tidemill.storage.base import Storage
from tidemill.storage.commit import view
from tidemill.storage.files import read_file, require_bytes

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
        older = "" if step is None else _older_than_lost(storage, step)
        raise CheckpointError(f"{storage.url}: no whole checkpoint{of_step} (model.ckpt-N/manifest-*.json){older}")
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
    with naming_older(storage, manifest):
        return read_arrays(storage, entry.key, sha256=entry.sha256, size=entry.size)


def read_pipeline(storage: Storage, manifest: CheckpointManifest) -> str:
    """The config that it was trained with (YAML); checked against its hash."""
    with naming_older(storage, manifest):
        return read_file(storage, manifest.files["pipeline"]).decode()


def read_dataloader_state(storage: Storage, manifest: CheckpointManifest) -> DataloaderState:
    """Where the data stood; checked against its hash."""
    entry = manifest.files.get("dataloader_state")
    if entry is None:
        raise CheckpointError(f"{storage.url}: step {manifest.step} has no dataloader_state file")
    with naming_older(storage, manifest):
        return DataloaderState.parse(read_file(storage, entry), where=f"{storage.url}/{entry.key}")


def read_rank_states(storage: Storage, manifest: CheckpointManifest) -> list[dict[str, dict[str, Any]]]:
    """Each saving rank's state by owner, in rank order, as `Stateful.state` gave it."""
    with naming_older(storage, manifest):
        return [_rank_state(storage, state) for state in sorted(manifest.rank_states, key=lambda state: state.rank)]


def _rank_state(storage: Storage, state: RankState) -> dict[str, dict[str, Any]]:
    owners: dict[str, dict[str, Any]] = {owner: dict(values) for owner, values in state.values.items()}
    if state.arrays is not None:
        arrays = read_arrays(storage, state.arrays.key, sha256=state.arrays.sha256, size=state.arrays.size)
        for name, array in arrays.items():
            owner, _, key = name.partition("/")
            owners.setdefault(owner, {})[key] = array
    return owners


@contextmanager
def naming_older(storage: Storage, manifest: CheckpointManifest) -> Iterator[None]:
    """Adds to a CorruptError of the block which older checkpoint of the folder is whole, or that none is, and what to do.

    An error that no damaged file of this checkpoint explains is raised as it is. Reads the files of this one, and of older ones
    until one is whole: about as long as restoring takes, on the way to an error only.
    """
    try:
        yield
    except CorruptError as error:
        try:
            contents = _Contents(storage)
            advice = "" if contents.are_whole(manifest) else _advice(contents, (manifest.term, manifest.step), manifest.nonce)
        except StorageError as failure:
            advice = f"; which older checkpoint is whole can't be told: {failure}"
        if not advice:
            raise
        raise CorruptError(f"{error}{advice}") from error


class _Contents:
    """Compares files with their hashes, each once: checkpoints of a chain share files."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._whole: dict[FileEntry, bool] = {}

    def are_whole(self, manifest: CheckpointManifest) -> bool:
        return not any(self._whole.get(entry) is False for entry in manifest.all_files) and all(
            self._is_whole(entry) for entry in manifest.all_files
        )

    def _is_whole(self, entry: FileEntry) -> bool:
        if entry not in self._whole:
            try:
                require_bytes(view(self.storage, entry.key), entry, where=entry.key)
                self._whole[entry] = True
            except (CorruptError, NotFoundError):
                self._whole[entry] = False
        return self._whole[entry]


def _advice(contents: _Contents, at: tuple[int, int], nonce: str | None = None) -> str:
    """How to go on without the damaged checkpoint of a term and step; `nonce`: its manifest's, if that can be read."""
    storage = contents.storage
    found = list_checkpoints(storage)
    manifests = checkpoint_keys(found)
    lost: list[str] = []
    lost_steps = {at[1]}
    for name in sorted((name for name in manifests if name[:2] <= at), reverse=True):
        older = whole_checkpoint(storage, manifests[name], found)
        # A path names a step, and so the newest one of that.
        if older is not None and name.step not in lost_steps and older.nonce != nonce and contents.are_whole(older):
            is_newest = max(manifests)[:2] <= at
            return _how_to_take(storage, older.step, lost if is_newest else [])
        lost.append(manifests[name])
        lost_steps.add(name.step)
    return (
        f"; no checkpoint before it in {storage.url} is whole: put the damaged file back from a copy, or begin again in an empty"
        " model_dir"
    )


def _how_to_take(storage: Storage, step: int, lost: Collection[str]) -> str:
    """`lost`: manifests that stand in the way of going on from the step in the same folder."""
    in_place = f"; to go on from it here, move {', '.join(lost)} out of the folder and train with --continue_train" if lost else ""
    return (
        f"; the newest checkpoint before it that is whole, all its bytes compared, is {storage.url}/{layout.checkpoint(step)}:"
        f" give it as --checkpoint_path, or train in an empty model_dir with it as train_config.fine_tune_checkpoint{in_place}"
    )


def _older_than_lost(storage: Storage, step: int) -> str:
    """What `read_checkpoint` adds if there are manifests of a step, but none of a whole checkpoint."""
    of_step = [name for name in checkpoint_keys(list_checkpoints(storage)) if name.step == step]
    return f", the log says how it is damaged{_advice(_Contents(storage), max(of_step)[:2])}" if of_step else ""


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
