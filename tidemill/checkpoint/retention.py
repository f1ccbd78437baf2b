"""Which checkpoints go. Runs on the checkpoint thread of rank 0, never on the training thread."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from tidemill.checkpoint.discovery import checkpoint_keys, list_checkpoints, whole_checkpoint
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.errors import StorageError
from tidemill.storage.base import Storage

log = logging.getLogger(__name__)


def to_delete(found: Collection[tuple[int, int]], whole: Collection[tuple[int, int]], keep: int) -> list[tuple[int, int]]:
    """The (term, step) that go: older than the newest whole checkpoint, and none of the newest `keep` whole ones. Pure.

    Torn and unfinished ones don't count, and go too; what is newer than the newest whole one may still be under way. None if
    `keep` is 0 or nothing is whole.
    """
    if keep <= 0 or not whole:
        return []
    kept = sorted(whole)[-keep:]
    return sorted(checkpoint for checkpoint in found if checkpoint < kept[-1] and checkpoint not in kept)


def prune(storage: Storage, *, keep: int, spare: str | None = None) -> None:
    """Delete old checkpoints, all manifests first, so that no manifest points to files that are gone.

    Files that a checkpoint which stays lists are kept, in whatever folder they are, and all below the folder `spare`. A store that
    fails is logged, and what is left over is tried again at the next call.
    """
    if keep <= 0:
        return
    try:
        _prune(storage, keep, spare)
    except StorageError as error:
        log.warning("old checkpoints not deleted: %s", error)


def _prune(storage: Storage, keep: int, spare: str | None) -> None:
    found = list_checkpoints(storage)
    manifests = checkpoint_keys(found)
    files = _files_of(found)
    whole: dict[tuple[int, int], CheckpointManifest] = {}
    for checkpoint in sorted(manifests, reverse=True):
        if len(whole) < keep and (manifest := whole_checkpoint(storage, manifests[checkpoint], found)) is not None:
            whole[checkpoint] = manifest
    going = to_delete(manifests.keys() | files.keys(), whole, keep)
    for checkpoint in going:
        if checkpoint in manifests:
            storage.delete(manifests[checkpoint])
    # What stays without being whole is newer than all that are, and under way: it can build on the newest whole one only.
    needed = {entry.key for manifest in whole.values() for entry in manifest.all_files}
    for checkpoint in going:
        for key in files.get(checkpoint, []):
            if key not in needed and not (spare and key.startswith(f"{spare}/")):
                storage.delete(key)


def _files_of(found: Iterable[str]) -> dict[tuple[int, int], list[str]]:
    """Keys of files by the (term, step) of the checkpoint that they were written for."""
    files: dict[tuple[int, int], list[str]] = {}
    for key in found:
        if (at := layout.checkpoint_of_file(key)) is not None:
            files.setdefault((at[1], at[0]), []).append(key)
    return files
