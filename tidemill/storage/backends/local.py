"""A folder on this machine (or a mounted POSIX file system) as a store."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tidemill.errors import AlreadyExistsError, NotFoundError, StorageError, UnsafeStoreError
from tidemill.storage.base import TEMPORARY_PREFIX, Chunk, ObjectInfo, Storage, check_key, check_prefix

_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class LocalStorage(Storage):
    """Objects are files below `root`, which is created by the first write.

    Writes go to a hidden file in the target's folder, are synced, and take their name in one step: `os.replace` for `write`,
    `os.link` for `create` (exclusive between processes, on NFS too). The folder is synced before a write returns. A process
    that dies in between leaves a hidden file, which nothing lists or reads.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self.url = self.root.as_uri()

    def read(self, key: str) -> bytes:
        try:
            return self.local_path(key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            raise NotFoundError(f"no object {key!r} in {self.url}") from error
        except OSError as error:
            raise _failure(error, key, self.url) from error

    def write(self, key: str, *chunks: Chunk) -> None:
        path = self.local_path(key)
        try:
            with _temporary_file(path, chunks) as temporary:
                os.replace(temporary, path)
            _sync_folder(path.parent)
        except OSError as error:
            raise _failure(error, key, self.url) from error

    def create(self, key: str, *chunks: Chunk) -> None:
        path = self.local_path(key)
        try:
            with _temporary_file(path, chunks) as temporary:
                _link(temporary, path)
        except OSError as error:
            raise _create_failure(error, key, self.url) from error

    def adopt(self, path: Path, key: str) -> None:
        """Hard-link the file at `path` (on the same file system) as a new object.

        Raises AlreadyExistsError if the key is taken, UnsafeStoreError if the file system has no hard links, and StorageError
        for any other failure, a different file system among them.
        """
        target = self.local_path(key)
        try:
            _make_folder(target.parent)
            _link(path.resolve(strict=True), target)
        except OSError as error:
            raise _create_failure(error, key, self.url) from error

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        check_prefix(prefix)
        folder = prefix.rpartition("/")[0]
        try:
            return sorted(info for info in _walk(self.root / folder, f"{folder}/" if folder else "", prefix))
        except OSError as error:
            raise _failure(error, prefix, self.url) from error

    def delete(self, key: str) -> None:
        try:
            self.local_path(key).unlink(missing_ok=True)
        except (IsADirectoryError, NotADirectoryError):
            return
        except OSError as error:
            if not self.local_path(key).is_dir():
                raise _failure(error, key, self.url) from error

    def local_path(self, key: str) -> Path:
        return self.root / check_key(key)

    def sweep(self, before: float, *, folders: str | None = None) -> int:
        """Delete the files of writes that died; how many. `before`: those last written before then, by the store's clock.

        A write under way touches its file all the time, so an hour ago is safe. `folders`: also delete those below the root whose
        names start with this, and those in them, that hold nothing, if nothing was put into or taken from them since `before`. A
        write that finds its folder gone at this very moment fails, and makes it anew when it is tried again.
        """
        try:
            return sum(
                _sweep(Path(entry), before, folders is not None and entry.name.startswith(folders)).files
                for entry in _in(self.root)
            )
        except OSError as error:
            raise _failure(error, TEMPORARY_PREFIX, self.url) from error


@contextmanager
def _temporary_file(target: Path, chunks: tuple[Chunk, ...]) -> Iterator[Path]:
    """A synced hidden file beside the target that holds the chunks; gone afterwards, unless it was renamed."""
    _make_folder(target.parent)
    path = target.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    try:
        with path.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)


def _link(path: Path, target: Path) -> None:
    """Link, and make the target's name durable; also a name that is already there, since the caller may take it for its own."""
    try:
        os.link(path, target)
    finally:
        _sync_folder(target.parent)


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, each made durable in its own parent."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(f"{folder} is an object, so no key can lie below it") from None
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _walk(folder: Path, parent: str, prefix: str) -> Iterator[ObjectInfo]:
    """Objects in `folder`, whose keys start with `parent`, that match the prefix. What vanishes meanwhile is left out."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        key = parent + entry.name
        if entry.name.startswith(TEMPORARY_PREFIX):
            continue
        if entry.is_dir():
            if f"{key}/".startswith(prefix):
                yield from _walk(folder / entry.name, f"{key}/", prefix)
        elif key.startswith(prefix):
            try:
                stat = entry.stat()
            except FileNotFoundError:
                continue
            yield ObjectInfo(key, stat.st_size, stat.st_mtime)


class _Swept(NamedTuple):
    """What became of a path: whether it is gone, and how many files of dead writes went."""

    gone: bool
    files: int


def _sweep(path: Path, before: float, folders: bool) -> _Swept:
    """Delete what is old and unfinished at or below `path`; with `folders` also folders that are old and empty."""
    try:
        # Taken first: what goes from a folder changes its time.
        status = path.lstat()
        old = status.st_mtime < before
        if not stat.S_ISDIR(status.st_mode):
            died = old and stat.S_ISREG(status.st_mode) and path.name.startswith(TEMPORARY_PREFIX)
            if died:
                path.unlink()
            return _Swept(died, int(died))
        swept = [_sweep(Path(entry), before, folders) for entry in _in(path)]
        gone = folders and old and all(one.gone for one in swept) and _remove_if_empty(path)
        return _Swept(gone, sum(one.files for one in swept))
    except FileNotFoundError:
        return _Swept(True, 0)


def _remove_if_empty(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError as error:
        # Somebody has just put something into it.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _in(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing if it isn't there."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _failure(error: OSError, key: str, url: str) -> StorageError:
    return StorageError(f"{key!r} in {url}: {error}")


def _create_failure(error: OSError, key: str, url: str) -> StorageError:
    if isinstance(error, FileExistsError):
        return AlreadyExistsError(f"{key!r} is already in {url}")
    if error.errno in _NO_HARD_LINKS:
        return UnsafeStoreError(f"{url} has no hard links ({error}), so it can't create exclusively: use another folder")
    return _failure(error, key, url)
