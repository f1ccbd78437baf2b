"""Checkpoints that another process is reading, which must not be deleted meanwhile.

A reader writes `readers/<step>/<its name>`, renews it while it reads, and takes it away when it is done. Who deletes first writes
`readers/<step>/going`, and only then looks for readers; a reader first writes its own name, and only then looks for that. So
at least one of them sees the other, whatever their order. How old a lease is, is told by the store's clock alone.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress

from tidemill.checkpoint.discovery import read_checkpoint
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.errors import CheckpointError, StorageError
from tidemill.storage.base import Storage

log = logging.getLogger(__name__)

LEASE_S = 120.0
"""A lease that wasn't renewed for so long is of a reader that died."""
RENEW_S = LEASE_S / 6
_TRIES = 5


@contextmanager
def reading(storage: Storage, step: int, *, renew_s: float = RENEW_S) -> Iterator[None]:
    """Keep the checkpoint of a step from being deleted while the block runs.

    Read its manifest, also again, inside the block. A folder that can't be written to is read without a lease, with a warning.
    Raises CheckpointError if the checkpoint is about to be deleted.
    """
    key = layout.checkpoint_reader(step, uuid.uuid4().hex)
    try:
        storage.write(key, b"reading\n")
    except StorageError as error:
        log.warning("%s: %s may be deleted while it is read: %s", storage.url, layout.checkpoint(step), error)
        yield
        return
    done = threading.Event()
    renewal = threading.Thread(target=_renew, args=(storage, key, done, renew_s), name="checkpoint-lease", daemon=True)
    renewal.start()
    try:
        if storage.list(layout.checkpoint_going(step)):
            raise CheckpointError(f"{storage.url}: {layout.checkpoint(step)} is being deleted; take a newer one")
        yield
    finally:
        done.set()
        renewal.join()
        with suppress(StorageError):
            storage.delete(key)


@contextmanager
def held_checkpoint(storage: Storage, step: int | None = None) -> Iterator[tuple[str, CheckpointManifest]]:
    """Key and manifest of the newest checkpoint, or the newest of a step, which stays while the block runs.

    Raises CheckpointError like `read_checkpoint`.
    """
    with ExitStack() as lease:
        for _ in range(_TRIES):
            key, manifest = read_checkpoint(storage, step)
            with suppress(CheckpointError):
                lease.enter_context(reading(storage, manifest.step))
                if storage.list(key):
                    break
            lease.close()
        else:
            raise CheckpointError(f"{storage.url}: each checkpoint was deleted before it could be read")
        yield key, manifest


def _renew(storage: Storage, key: str, done: threading.Event, renew_s: float) -> None:
    while not done.wait(renew_s):
        try:
            storage.write(key, b"reading\n")
        except StorageError as error:
            log.warning("the lease %s/%s wasn't renewed: %s", storage.url, key, error)


def condemn(storage: Storage, steps: Collection[int], *, now: float) -> set[int]:
    """Mark steps as about to be deleted, and give those of them that must stay, since someone reads them; their marks are taken
    back. `now`: by the store's clock."""
    for step in steps:
        storage.write(layout.checkpoint_going(step), b"going\n")
    read = {step for step in _leased(storage, now) if step in steps}
    for step in read:
        storage.delete(layout.checkpoint_going(step))
    return read


def forget(storage: Storage, steps: Collection[int]) -> None:
    """Take back the marks of steps that are deleted by now."""
    for step in steps:
        storage.delete(layout.checkpoint_going(step))


def _leased(storage: Storage, now: float) -> Iterator[int]:
    """Steps that are being read. Leases of readers that died are cleared away."""
    for info in storage.list(layout.CHECKPOINT_READERS):
        step = layout.checkpoint_of_reader(info.key)
        if step is None:
            continue
        if now - info.modified_at <= LEASE_S:
            yield step
        else:
            storage.delete(info.key)
