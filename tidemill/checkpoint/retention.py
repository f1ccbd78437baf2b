"""Which checkpoints go. Runs on the checkpoint thread of rank 0, never on the training thread."""

from __future__ import annotations

import logging
from collections.abc import Collection

from tidemill.checkpoint.discovery import checkpoint_keys, whole_checkpoint
from tidemill.contracts import layout
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


def prune(storage: Storage, *, keep: int) -> None:
    """Delete old checkpoints, all manifests first, so that no manifest points to files that are gone.

    A store that fails is logged, and what is left over is tried again at the next call.
    """
    if keep <= 0:
        return
    try:
        _prune(storage, keep)
    except StorageError as error:
        log.warning("old checkpoints not deleted: %s", error)


def _prune(storage: Storage, keep: int) -> None:
    found = {info.key: info.size for info in storage.list("model.ckpt-")}
    manifests = checkpoint_keys(found)
    files: dict[tuple[int, int], list[str]] = {}
    for key in found:
        if (at := layout.checkpoint_of_file(key)) is not None:
            files.setdefault((at[1], at[0]), []).append(key)
    whole: list[tuple[int, int]] = []
    for checkpoint in sorted(manifests, reverse=True):
        if len(whole) < keep and whole_checkpoint(storage, manifests[checkpoint], found) is not None:
            whole.append(checkpoint)
    going = to_delete(manifests.keys() | files.keys(), whole, keep)
    for checkpoint in going:
        if checkpoint in manifests:
            storage.delete(manifests[checkpoint])
    for checkpoint in going:
        for key in files.get(checkpoint, []):
            storage.delete(key)
