"""Commits: create an object exactly once, whatever the store's answer was; probe a store for exclusivity; copy objects."""

from __future__ import annotations

import mmap
import os
import uuid
from contextlib import suppress

from tidemill.clock import Clock, SystemClock
from tidemill.errors import AlreadyExistsError, NotFoundError, StorageError, UnsafeStoreError
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Chunk, Storage

TRIES = 5
DEADLINE_S = 30.0
_FIRST_PAUSE_S = 0.1


def create_once(storage: Storage, key: str, data: Chunk, *, deadline_s: float = DEADLINE_S, clock: Clock | None = None) -> bool:
    """Create an object and settle the outcome: True if it now holds `data`, False if another writer's other bytes hold the key.

    An unknown outcome (the store failed, and may or may not have written) is settled by trying the same bytes again, at most
    `TRIES` times within `deadline_s`; a conflict with identical bytes is a success. So `data` must be unique to its writer (a run
    id and a nonce inside) wherever two writers could mean different things by the same bytes. Raises StorageError if the
    outcome is still unknown, UnsafeStoreError at once if the store can't create exclusively.
    """
    clock = clock or SystemClock()
    deadline = clock.monotonic() + deadline_s
    for attempt in range(1, TRIES + 1):
        try:
            return _try_create(storage, key, data)
        except UnsafeStoreError:
            raise
        except StorageError as error:
            pause = _FIRST_PAUSE_S * 2 ** (attempt - 1)
            if attempt == TRIES or clock.monotonic() + pause > deadline:
                message = f"creating {key!r} in {storage.url}: outcome unknown after {attempt} tries: {error}"
                raise StorageError(message) from error
        clock.sleep(pause)
    raise AssertionError("the last try returns or raises")


def probe_exclusive_create(storage: Storage) -> None:
    """Create a probe object twice. Raises UnsafeStoreError if the store reports no conflict; leaves nothing behind.

    It catches stores that overwrite or ignore the mode. A store that looks first and then writes passes: only its driver can rule
    that out.
    """
    key = f"probe-{uuid.uuid4().hex}"
    try:
        storage.create(key, b"first")
        storage.create(key, b"second")
    except AlreadyExistsError:
        if storage.read(key) != b"first":
            raise UnsafeStoreError(f"{storage.url} reported a conflict, yet overwrote the object: not a lineage root") from None
    else:
        raise UnsafeStoreError(f"{storage.url} created the same object twice, so two writers could both commit: not a lineage root")
    finally:
        with suppress(StorageError):
            storage.delete(key)


def copy_object(source: Storage, source_key: str, target: Storage, target_key: str) -> None:
    """Make `target_key` hold the source's bytes: a hard link if both are files of one file system, else a copy.

    Idempotent. Raises AlreadyExistsError if the target holds other bytes, NotFoundError if there is no source. Objects are
    never changed in place, so a link is as good as a copy.
    """
    path = source.local_path(source_key)
    if path is not None and not path.is_file():
        raise NotFoundError(f"no object {source_key!r} in {source.url}")
    if path is not None and isinstance(target, LocalStorage):
        # No hard links, or another file system: copied below; a taken key is compared there.
        with suppress(StorageError):
            target.adopt(path, target_key)
            return
    if not create_once(target, target_key, view(source, source_key)):
        raise AlreadyExistsError(f"{target_key!r} in {target.url} holds other bytes than {source_key!r} in {source.url}")


def view(storage: Storage, key: str) -> memoryview:
    """An object's bytes, read-only: memory-mapped if the store is local, else read. A mapped view stays valid after a delete."""
    path = storage.local_path(key)
    if path is None:
        return memoryview(storage.read(key)).toreadonly()
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # an empty file can't be mapped
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise NotFoundError(f"no object {key!r} in {storage.url}") from error
    except OSError as error:
        raise StorageError(f"{key!r} in {storage.url}: {error}") from error


def _try_create(storage: Storage, key: str, data: Chunk) -> bool:
    try:
        storage.create(key, data)
    except AlreadyExistsError:
        return view(storage, key) == data
    return True
