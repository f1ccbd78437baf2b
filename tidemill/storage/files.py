"""Files that manifests list: written with their hash, read back against it."""

from __future__ import annotations

import hashlib

from tidemill.contracts.files import FileEntry
from tidemill.errors import CorruptError
from tidemill.storage.base import Chunk, Storage


def write_file(storage: Storage, key: str, *chunks: Chunk) -> FileEntry:
    """Write a file, replacing one that is there; what a manifest says of it."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    storage.write(key, *chunks)
    return FileEntry(key=key, size=sum(memoryview(chunk).nbytes for chunk in chunks), sha256=digest.hexdigest())


def read_file(storage: Storage, entry: FileEntry) -> bytes:
    """A listed file's bytes. Raises NotFoundError, or CorruptError if they aren't those that the manifest promises."""
    data = storage.read(entry.key)
    require_bytes(data, entry, where=f"{entry.key!r} in {storage.url}")
    return data


def require_bytes(data: Chunk, entry: FileEntry, *, where: str) -> None:
    """Raise CorruptError, naming `where`, unless the data are what a manifest promises."""
    size = memoryview(data).nbytes
    if size != entry.size:
        raise CorruptError(f"{where}: {size} bytes, where its manifest says {entry.size}")
    if (found := hashlib.sha256(data).hexdigest()) != entry.sha256:
        raise CorruptError(f"{where}: SHA-256 {found}, where its manifest says {entry.sha256}")
