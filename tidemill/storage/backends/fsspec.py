"""Any fsspec URL (s3://, gs://, abfs://, memory://, ...) as a store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, ClassVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from tidemill.errors import (
    AlreadyExistsError,
    ConfigError,
    MissingExtraError,
    NotFoundError,
    StorageError,
    TidemillError,
    UnsafeStoreError,
)
from tidemill.storage.base import Chunk, ObjectInfo, Storage, check_key, check_prefix

_MODIFIED_FIELDS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")


class FsspecStorage(Storage):
    """Objects below an fsspec URL; credentials and endpoints come from fsspec's own configuration files and environment.

    Whole-object writes are the driver's `pipe_file`; exclusive creation is its `mode="create"` (a conditional put on S3, GCS and
    Azure). File systems without a put of their own (fsspec then opens and writes, after a look whether the file is there) would
    show half-written objects and let two writers win: they can be read, and refuse to write with UnsafeStoreError. Whether a
    driver heeds the mode is for `probe_exclusive_create` to find out. `memory://` is exclusive among the threads of one process.
    """

    # fsspec's memory store is one dictionary for the whole process, so its lock is too.
    _memory_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, root = _file_system(url)
        self._root = root.rstrip("/")

    def read(self, key: str) -> bytes:
        path = self._path(key)
        with _errors(key, self.url):
            return self._fs.cat_file(path)

    def write(self, key: str, *chunks: Chunk) -> None:
        path = self._path(key)
        self._check_writable()
        with _errors(key, self.url):
            self._fs.pipe_file(path, _joined(chunks))

    def create(self, key: str, *chunks: Chunk) -> None:
        path = self._path(key)
        self._check_writable()
        with _errors(key, self.url):
            try:
                if isinstance(self._fs, MemoryFileSystem):
                    with self._memory_lock:
                        self._fs.pipe_file(path, _joined(chunks), mode="create")
                else:
                    self._fs.pipe_file(path, _joined(chunks), mode="create")
            except (NotImplementedError, TypeError) as error:
                raise UnsafeStoreError(f"the driver of {self.url} has no exclusive create: {error}") from error

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        folder = check_prefix(prefix).rpartition("/")[0]
        with _errors(prefix, self.url):
            # Drivers cache listings; other processes write here.
            self._fs.invalidate_cache()
            try:
                found: Mapping[str, Mapping[str, Any]] = self._fs.find(f"{self._root}/{folder}".rstrip("/"), detail=True)
            except FileNotFoundError:
                return []
            return sorted(
                ObjectInfo(key, int(info["size"]), self._modified_at(path, info))
                for path, info in found.items()
                if (key := path[len(self._root) :].lstrip("/")).startswith(prefix) and info["type"] == "file"
            )

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _errors(key, self.url):
            try:
                self._fs.rm_file(path)
            except FileNotFoundError:
                return

    def local_path(self, key: str) -> None:
        check_key(key)

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _check_writable(self) -> None:
        if not _puts_whole_objects(self._fs):
            raise UnsafeStoreError(f"{self.url} can't put whole objects, so a reader could see half of one: use another store")

    def _modified_at(self, path: str, info: Mapping[str, Any]) -> float:
        value = next((info[field] for field in _MODIFIED_FIELDS if info.get(field) is not None), None)
        if value is None:
            value = self._fs.modified(path)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            value = (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
        return float(value)


def _file_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the root's path in it."""
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingExtraError(f"{url} needs a storage driver that isn't installed: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{url} isn't a storage URL that fsspec knows: {error}") from error
    return fs, str(root)


def _puts_whole_objects(fs: Any) -> bool:
    """Whether the driver has a put of its own, instead of fsspec's open, write and close."""
    if isinstance(fs, AsyncFileSystem) and fs.async_impl:
        return type(fs)._pipe_file is not AsyncFileSystem._pipe_file
    return type(fs).pipe_file is not fsspec.AbstractFileSystem.pipe_file


def _joined(chunks: tuple[Chunk, ...]) -> bytes:
    return chunks[0] if len(chunks) == 1 and isinstance(chunks[0], bytes) else b"".join(chunks)


@contextmanager
def _errors(key: str, url: str) -> Iterator[None]:
    """Translate what a driver raises; each has exceptions of its own, so all of them become StorageError."""
    try:
        yield
    except TidemillError:
        raise
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFoundError(f"no object {key!r} in {url}") from error
    except FileExistsError as error:
        raise AlreadyExistsError(f"{key!r} is already in {url}") from error
    except Exception as error:
        raise StorageError(f"{key!r} in {url}: {type(error).__name__}: {error}") from error
