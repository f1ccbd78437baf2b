"""The one seam to bytes at rest: a store rooted at a URL, with six methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

Chunk = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, order=True)
class ObjectInfo:
    """One stored object: its key, its size in bytes, and when it was last written (Unix seconds by the store's clock)."""

    key: str
    size: int
    modified_at: float


class Storage(ABC):
    """Objects below one root. Keys are relative POSIX paths ("releases/00000003.json").

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
