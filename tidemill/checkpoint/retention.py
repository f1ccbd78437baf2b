"""Which checkpoints go. Runs on the checkpoint thread of rank 0, never on the training thread."""

from __future__ import annotations

import logging
from collections.abc import Collection

from tidemill.contracts import layout
from tidemill.errors import StorageError
from tidemill.storage.base import Storage

log = logging.getLogger(__name__)


def to_delete(checkpoints: Collection[tuple[int, int]], keep: int) -> list[tuple[int, int]]:
    """The (term, step) of all but the newest `keep` checkpoints; none if `keep` is 0. Pure."""
    return sorted(checkpoints)[:-keep] if keep > 0 else []


def prune(storage: Storage, *, keep: int) -> None:
    """Delete old checkpoints, each one's manifest first, so that no manifest ever points to files that are gone.

    A store that fails is tried again at the next save: what is left over costs space only.
    """
    if keep <= 0:
        return
    try:
        keys = [info.key for info in storage.list("model.ckpt-")]
        manifests = {(at[1], at[0]): key for key in keys if (at := layout.checkpoint_of_manifest(key)) is not None}
        for term, step in to_delete(manifests, keep):
            storage.delete(manifests[term, step])
            prefix = layout.checkpoint_files(step, term) + "/"
            for key in keys:
                if key.startswith(prefix):
                    storage.delete(key)
    except StorageError as error:
        log.warning("old checkpoints not deleted: %s", error)
