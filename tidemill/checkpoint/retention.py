"""Which checkpoints go. Runs on the checkpoint thread of rank 0, never on the training thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping

from tidemill.checkpoint.discovery import CHECKPOINTS, checkpoint_keys, list_checkpoints, whole_checkpoint
from tidemill.checkpoint.leases import condemn, forget
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.contracts.layout import CheckpointName
from tidemill.errors import StorageError
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Storage

log = logging.getLogger(__name__)

UNFINISHED_S = 3600.0
"""A file that is being written, and wasn't touched for so long, belongs to a process that died."""

BestStep = Callable[[Collection[int]], int | None]


def to_delete(
    found: Collection[CheckpointName],
    whole: Collection[CheckpointName],
    keep: int,
    protected: Collection[CheckpointName] = (),
) -> list[CheckpointName]:
    """Those that go: older than the newest whole checkpoint, none of the newest `keep` whole ones, and not protected. Pure.

    `protected` ones are whole, and don't count among the newest. Torn and unfinished ones don't count, and go too; what is newer
    than the newest whole one may still be under way. None if `keep` is 0 or nothing is whole.
    """
    if keep <= 0 or not whole:
        return []
    kept = {*sorted(whole)[-keep:], *protected}
    return sorted(checkpoint for checkpoint in found if checkpoint < max(whole) and checkpoint not in kept)


def prune(storage: Storage, *, keep: int, spare: str | None = None, best: BestStep = lambda steps: None) -> None:
    """Delete old checkpoints, all manifests first, so that no manifest points to files that are gone.

    The best one stays (`best`: steps -> the best of them, if that is known), and those that another process reads. Files that a
    checkpoint which stays lists are kept, in whatever folder they are, and all below the folder `spare`. A store that fails is
    logged, and what is left over is tried again at the next call.
    """
    if keep <= 0:
        return
    try:
        _prune(storage, keep, spare, best)
    except StorageError as error:
        log.warning("old checkpoints not deleted: %s", error)


def sweep(storage: Storage, newest: str) -> None:
    """Delete what saves and writes that died have left; `newest`: key of a manifest that was just written. Once a run is enough.

    That is: files of checkpoints that were never committed, older than the newest whole one, if no checkpoint lists them; and, on a
    local store, unfinished files that nobody has written to for an hour, and empty folders of checkpoints that are as old. A store
    that fails is logged.
    """
    try:
        found = list_checkpoints(storage)
        manifests, files = checkpoint_keys(found), _files_of(found)
        whole = _whole_of(storage, found, manifests)
        # What a damaged manifest lists isn't known, and somebody may want to repair it.
        if whole and len(whole) == len(manifests):
            torn = [at for at in sorted(files) if at not in manifests and at < max(whole)]
            _delete(storage, torn, manifests, files, _needed(whole, None))
        if isinstance(storage, LocalStorage):
            storage.sweep(_modified_at(storage, newest) - UNFINISHED_S, folders=CHECKPOINTS)
    except StorageError as error:
        log.warning("what dead runs left wasn't deleted: %s", error)


def _prune(storage: Storage, keep: int, spare: str | None, best: BestStep) -> None:
    found = list_checkpoints(storage)
    manifests, files = checkpoint_keys(found), _files_of(found)
    whole: dict[CheckpointName, CheckpointManifest] = {}
    for checkpoint in sorted(manifests, reverse=True):
        if len(whole) < keep and (manifest := whole_checkpoint(storage, manifests[checkpoint], found)) is not None:
            whole[checkpoint] = manifest
    if not whole:
        return
    best_of_all = best({name.step for name in manifests})
    protected = _whole_of(storage, found, {at: manifests[at] for at in manifests if at not in whole and at.step == best_of_all})
    condemned = to_delete(manifests.keys() | files.keys(), whole, keep, protected)
    steps = {at.step for at in condemned if at in manifests}
    read = condemn(storage, steps, now=_modified_at(storage, manifests[max(whole)]))
    protected |= _whole_of(storage, found, {at: manifests[at] for at in condemned if at in manifests and at.step in read})
    _delete(storage, [at for at in condemned if at not in protected], manifests, files, _needed({**whole, **protected}, spare))
    forget(storage, steps - read)


def _whole_of(
    storage: Storage, found: Mapping[str, int], manifests: Mapping[CheckpointName, str]
) -> dict[CheckpointName, CheckpointManifest]:
    """The manifests of those that are whole: what is torn is of no use to anyone."""
    read = {at: whole_checkpoint(storage, key, found) for at, key in manifests.items()}
    return {at: manifest for at, manifest in read.items() if manifest is not None}


def _needed(kept: Mapping[CheckpointName, CheckpointManifest], spare: str | None) -> Callable[[str], bool]:
    # What stays without being whole is newer than all that are, and under way: it can build on the newest whole one only.
    listed = {entry.key for manifest in kept.values() for entry in manifest.all_files}
    return lambda key: key in listed or bool(spare and key.startswith(f"{spare}/"))


def _delete(
    storage: Storage,
    going: Collection[CheckpointName],
    manifests: Mapping[CheckpointName, str],
    files: Mapping[CheckpointName, Collection[str]],
    needed: Callable[[str], bool],
) -> None:
    for checkpoint in going:
        if checkpoint in manifests:
            storage.delete(manifests[checkpoint])
    for checkpoint in going:
        for key in files.get(checkpoint, ()):
            if not needed(key):
                storage.delete(key)


def _modified_at(storage: Storage, key: str) -> float:
    """When an object was written, by the store's clock; that is now, more or less, for what was just written."""
    return max((info.modified_at for info in storage.list(key)), default=0.0)


def _files_of(found: Iterable[str]) -> dict[CheckpointName, list[str]]:
    """Keys of files by the checkpoint that they were written for."""
    files: dict[CheckpointName, list[str]] = {}
    for key in found:
        if (at := layout.checkpoint_of_file(key)) is not None:
            files.setdefault(at, []).append(key)
    return files
