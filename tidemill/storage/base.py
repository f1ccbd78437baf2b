"""The one seam to bytes at rest: a store rooted at a URL, with six methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from tidemill.errors import StorageError

Chunk = bytes | bytearray | memoryview

TEMPORARY_PREFIX = ".tmp-"
"""How the name of an unfinished write starts; no key may have a part that starts so."""


def check_key(key: str) -> str:
    """The key itself, if it is one. Raises StorageError for anything that could leave the store's root or isn't in normal form.

    Keys also come out of manifests that another process wrote, so "..", absolute paths and the like are refused here.
    """
    if any(part in ("", ".", "..") or part.startswith(TEMPORARY_PREFIX) for part in key.split("/")) or "\0" in key:
        raise StorageError(f"{key!r} isn't a storage key: give a relative path without '.', '..' or empty parts")
    return key


def check_prefix(prefix: str) -> str:
    """The prefix itself, if keys can start with it; its last part may be cut short or empty. Raises StorageError otherwise."""
    parts = prefix.split("/")
    if any(part in ("", ".", "..") for part in parts[:-1]) or parts[-1] == ".." or "\0" in prefix:
        raise StorageError(f"no storage key starts with {prefix!r}: give the start of a relative path")
    return prefix


@dataclass(frozen=True, slots=True, order=True)
class ObjectInfo:
    """One stored object: its key, its size in bytes, and when it was last written (Unix seconds by the store's clock)."""

    key: str
    size: int
    modified_at: float


class Storage(ABC):
    """Objects below one root. Keys are relative POSIX paths ("releases/00000003.json"); the key of an object
    is never also a folder of others.

    Writes are whole-object atomic: a reader sees the old bytes or the new ones, never a part. Methods may be called from any
    thread. Failures raise `StorageError`; a missing object raises `NotFoundError`.
    """

    url: str

    @abstractmethod
    def read(self, key: str) -> bytes:
        """All bytes of an object."""

    @abstractmethod
    def write(self, key: str, *chunks: Chunk) -> None:
        """Write an object from consecutive chunks, replacing one that is there. Durable on return."""

    @abstractmethod
    def create(self, key: str, *chunks: Chunk) -> None:
        """Write an object that must not exist. Raises `AlreadyExistsError` if it does; exactly one of several racing writers wins.

        Any other error leaves the outcome unknown; `create_once` settles it.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """All objects whose key starts with the prefix, sorted by key, unfinished writes left out."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object. Deleting what isn't there is no error."""

    @abstractmethod
    def local_path(self, key: str) -> Path | None:
        """The object's path on this machine, for memory mapping and hard links; None if the store isn't local."""
