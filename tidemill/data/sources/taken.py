"""Which files of a folder one split has taken, each with a number of its own: what positions in a folder are made of."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tidemill.contracts.progress import FILE_ROW_BITS
from tidemill.data.intervals import IntervalSet

# A file that no listing has shown for so long is gone for good; one that a store hides for a moment mustn't be taken twice.
_FORGET_AFTER_S = 600.0


@dataclass(frozen=True, slots=True)
class TakenFile:
    """A file that was taken. `name`: below the folder; `number`: from 0, in the order of taking; `etag`: if the store gives one."""

    name: str
    number: int
    size: int
    etag: str | None = None

    @property
    def start(self) -> int:
        """The position of its first row."""
        return self.number << FILE_ROW_BITS

    @property
    def stop(self) -> int:
        """Where the next file's positions begin."""
        return (self.number + 1) << FILE_ROW_BITS


class TakenFiles:
    """The files that one split has taken and that the folder still holds. Thread-safe.

    A file keeps its number for ever; one that was trained to its end and has left the folder is forgotten, so there are about as
    many here as the folder holds.
    """

    def __init__(self, described: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self._next = int(described.get("next", 0))
        # [number, size], and the etag if there is one, as they are described: a checkpoint copies the dict, and must not cost more
        # for many files.
        self._files: dict[str, list[Any]] = dict(described.get("files", {}))
        self._absent_since: dict[str, float] = {}

    def take(self, name: str, size: int, etag: str | None = None) -> TakenFile:
        """Give a new file its number."""
        with self._lock:
            file = TakenFile(name, self._next, size, etag)
            self._files[name] = [file.number, size, etag] if etag else [file.number, size]
            self._next += 1
            return file

    def get(self, name: str) -> TakenFile | None:
        """The file, if it was taken."""
        with self._lock:
            return self._file(name) if name in self._files else None

    def name(self, number: int) -> str | None:
        """The name of the file with a number; None if it was forgotten."""
        with self._lock:
            return next((name for name, (taken, *_) in self._files.items() if taken == number), None)

    def left(self, done: IntervalSet) -> list[TakenFile]:
        """Files that were taken and aren't done, in the order of taking."""
        with self._lock:
            files = [self._file(name) for name in self._files]
        return sorted((file for file in files if not _is_done(file, done)), key=lambda file: file.number)

    def listed(self, names: Collection[str], now: float) -> None:
        """Note what the folder holds now (monotonic seconds)."""
        with self._lock:
            absent = self._files.keys() - names
            self._absent_since = {name: self._absent_since.get(name, now) for name in absent}

    def describe(self, done: IntervalSet, now: float) -> dict[str, Any]:
        """As JSON values, from which the next run goes on. Forgets what is done and gone."""
        with self._lock:
            long_gone = [name for name, since in self._absent_since.items() if now - since >= _FORGET_AFTER_S]
            for name in long_gone:
                if _is_done(self._file(name), done):
                    del self._files[name], self._absent_since[name]
            return {"next": self._next, "files": dict(self._files)}

    def _file(self, name: str) -> TakenFile:
        return TakenFile(name, *self._files[name])


def _is_done(file: TakenFile, done: IntervalSet) -> bool:
    return done.first_gap(file.start) >= file.stop
