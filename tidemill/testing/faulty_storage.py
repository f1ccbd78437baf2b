"""A store that fails when told to."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from tidemill.clock import Clock, SystemClock
from tidemill.errors import StorageError
from tidemill.storage.base import Chunk, ObjectInfo, Storage

T = TypeVar("T")
Method = Literal["read", "write", "create", "list", "delete"]


class SimulatedCrash(BaseException):
    """The process "died" here. Not an Exception, so that no error handling of the code under test survives it."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call that reached the store: the method, and the key (for `list` the prefix)."""

    method: Method
    key: str


class FaultyStorage(Storage):
    """Wraps a store, counts and records its operations, and fails at chosen ones.

    Operations are numbered from 1 in the order in which they begin, over all threads. `local_path` is always None, so that every
    byte passes through a counted operation. After a crash every further operation crashes too: a dead process writes no more;
    recover with the inner store, or another wrapper around it. Thread-safe.
    """

    def __init__(self, inner: Storage, *, clock: Clock | None = None) -> None:
        self.inner = inner
        self.url = inner.url
        self.operations: list[Operation] = []
        self._delay_s = 0.0
        self._clock = clock or SystemClock()
        self._fail_before: set[int] = set()
        self._fail_after: set[int] = set()
        self._crash_at: int | None = None
        self._flips: dict[str, set[int]] = defaultdict(set)
        self._lock = threading.Lock()

    @property
    def num_operations(self) -> int:
        """How many operations have begun."""
        return len(self.operations)

    def fail_at(self, *numbers: int) -> None:
        """Operations with these numbers raise StorageError and don't happen."""
        self._fail_before.update(numbers)

    def fail_after(self, *numbers: int) -> None:
        """Operations with these numbers happen, then raise StorageError: to the caller the outcome is unknown."""
        self._fail_after.update(numbers)

    def crash_at(self, number: int) -> None:
        """The operation with this number doesn't happen and raises SimulatedCrash, and so does every later one."""
        self._crash_at = number

    def flip_byte(self, key: str, offset: int) -> None:
        """Every read of the object returns it with the byte at `offset` inverted."""
        self._flips[key].add(offset)

    def delay(self, seconds: float) -> None:
        """Every operation from now on takes this much longer, by the injected clock."""
        self._delay_s = seconds

    def read(self, key: str) -> bytes:
        data = self._operate("read", key, lambda: self.inner.read(key))
        if key not in self._flips:
            return data
        flipped = bytearray(data)
        for offset in self._flips[key]:
            flipped[offset] ^= 0xFF
        return bytes(flipped)

    def write(self, key: str, *chunks: Chunk) -> None:
        self._operate("write", key, lambda: self.inner.write(key, *chunks))

    def create(self, key: str, *chunks: Chunk) -> None:
        self._operate("create", key, lambda: self.inner.create(key, *chunks))

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        return self._operate("list", prefix, lambda: self.inner.list(prefix))

    def delete(self, key: str) -> None:
        self._operate("delete", key, lambda: self.inner.delete(key))

    def local_path(self, key: str) -> None:
        self.inner.local_path(key)

    def _operate(self, method: Method, key: str, call: Callable[[], T]) -> T:
        with self._lock:
            self.operations.append(Operation(method, key))
            number = len(self.operations)
        if self._delay_s:
            self._clock.sleep(self._delay_s)
        what = f"operation {number}, {method} of {key!r}"
        if self._crash_at is not None and number >= self._crash_at:
            raise SimulatedCrash(f"crashed at {what}")
        if number in self._fail_before:
            raise StorageError(f"{what}: failed on purpose, before it happened")
        result = call()
        if number in self._fail_after:
            raise StorageError(f"{what}: failed on purpose, after it happened")
        return result
