"""A store in memory that outlives the processes, and each process's own way to it: slow, failing, or the place where it dies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tidemill.errors import AlreadyExistsError, NotFoundError, StorageError
from tidemill.storage.base import Chunk, ObjectInfo, Storage, check_key, check_prefix
from tidemill.testing.simulation.scheduler import Scheduler

T = TypeVar("T")


class MemoryStorage(Storage):
    """Objects in a dictionary; `append` is for logs, which aren't objects of the seam."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.url = "memory://story"
        self._scheduler = scheduler
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._logs: dict[str, bytearray] = {}
        self.history: list[tuple[float, str]] = []
        """when each object was made that had to be new, and its key"""

    def read(self, key: str) -> bytes:
        if key in self._logs:
            return bytes(self._logs[key])
        if check_key(key) not in self._objects:
            raise NotFoundError(f"no object {key!r}")
        return self._objects[key][0]

    def write(self, key: str, *chunks: Chunk) -> None:
        self._objects[check_key(key)] = (b"".join(chunks), self._scheduler.now)

    def create(self, key: str, *chunks: Chunk) -> None:
        if check_key(key) in self._objects:
            raise AlreadyExistsError(f"{key!r} is there already")
        self.write(key, *chunks)
        self.history.append((self._scheduler.now, key))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        check_prefix(prefix)
        found = [ObjectInfo(key, len(data), at) for key, (data, at) in self._objects.items() if key.startswith(prefix)]
        found += [ObjectInfo(key, len(data), 0.0) for key, data in self._logs.items() if key.startswith(prefix)]
        return sorted(found)

    def delete(self, key: str) -> None:
        self._objects.pop(check_key(key), None)

    def local_path(self, key: str) -> None:
        return None

    def append(self, key: str, data: bytes) -> None:
        """Add to a log."""
        self._logs.setdefault(key, bytearray()).extend(data)


@dataclass(frozen=True, slots=True)
class StoreFaults:
    """What may go wrong. `failing`: how likely an operation fails, before it happens or after; `slowest_s`: how long it takes."""

    failing: float = 0.0
    slowest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fate:
    """A process is killed at its n-th operation, from 1, or freezes there for a while. `saving`: only what it writes, makes and
    deletes of checkpoints counts."""

    operation: int
    before: bool
    saving: bool
    freeze_s: float | None = None


class ProcessStorage(Storage):
    """One process's way to the store. Each operation is a point where others may come first, before and after it happens.

    `fate`: what happens to the process around one of its operations, before or after that one happens.
    """

    def __init__(self, inner: MemoryStorage, scheduler: Scheduler, faults: StoreFaults, fate: Fate | None = None) -> None:
        self.url = inner.url
        self._inner = inner
        self._scheduler = scheduler
        self._faults = faults
        self._fate = fate
        self._count = 0

    def read(self, key: str) -> bytes:
        return self._operate("read", key, lambda: self._inner.read(key))

    def write(self, key: str, *chunks: Chunk) -> None:
        self._operate("write", key, lambda: self._inner.write(key, *chunks))

    def create(self, key: str, *chunks: Chunk) -> None:
        self._operate("create", key, lambda: self._inner.create(key, *chunks))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return self._operate("list", prefix, lambda: self._inner.list(prefix))

    def delete(self, key: str) -> None:
        self._operate("delete", key, lambda: self._inner.delete(key))

    def local_path(self, key: str) -> None:
        return None

    def _operate(self, method: str, key: str, call: Callable[[], T]) -> T:
        if not (self._fate and self._fate.saving) or (key.startswith("model.ckpt-") and method not in ("read", "list")):
            self._count += 1
        self._wait()
        self._meet_fate(before=True)
        fails = self._scheduler.rng.random() < self._faults.failing
        happens = not fails or self._scheduler.rng.random() < 0.5
        if not key.startswith(("runs/", "probe-")):  # those are named at random
            self._scheduler.note(f"{self._scheduler.current.name}: {method} {key}" + " fails" * fails)
        result = call() if happens else None
        self._meet_fate(before=False)
        self._wait()
        if fails:
            raise StorageError(f"{method} of {key!r} failed on purpose, {'after' if happens else 'before'} it happened")
        return result  # type: ignore[return-value]

    def _meet_fate(self, *, before: bool) -> None:
        fate = self._fate
        if fate is None or fate.operation != self._count or fate.before != before:
            return
        self._fate = None
        process = self._scheduler.current.process
        if fate.freeze_s is None:
            self._scheduler.kill(process)
        else:
            self._scheduler.freeze(process, fate.freeze_s)
            self._scheduler.sleep(0.0)

    def _wait(self) -> None:
        slowest = self._faults.slowest_s
        if slowest and self._scheduler.rng.random() < 0.3:
            self._scheduler.sleep(self._scheduler.rng.random() * slowest)
        else:
            self._scheduler.pause()
