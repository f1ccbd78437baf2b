"""The seam that every source implements: discover splits, open a reader on what is left of one."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tidemill.data.intervals import IntervalSet
from tidemill.data.split import RawBatch, Split


class SplitReader(ABC):
    """Reads the rows of one split that were asked for, in order of position. Used by one thread at a time."""

    @abstractmethod
    def read(self, timeout_s: float) -> RawBatch | None:
        """The next rows, as many as are cheap to give at once; None if nothing arrived within the timeout.

        Raises EOFError when everything asked for has been given. Rows that are dropped are still covered by the runs given,
        at the latest by one of 0 rows.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up what was opened. Idempotent."""


class Source(ABC):
    """Where rows come from. Cheap to construct; `discover` and `open` do the I/O. Each class has a `Config`.

    Threading: `open` may be called from several threads; each reader belongs to one thread.
    """

    kind: str
    bounded: bool

    @abstractmethod
    def discover(self) -> list[Split]:
        """All splits, in an order that depends on the data alone. Rank 0 calls it and shares the answer."""

    @abstractmethod
    def open(self, split: Split, remaining: IntervalSet | None, done: IntervalSet) -> SplitReader:
        """A reader of the split; the one path for new and restored splits, which also takes whatever lease reading needs.

        Bounded: gives exactly the positions in `remaining`. Unbounded (`remaining` None): starts behind `done`, or where the config
        says for an untouched split, and never gives a position in `done` again.
        Raises SourceChangedError naming split and difference if the split can't be what `done` was read from.
        """

    @abstractmethod
    def verify(self, split: Split, fingerprint: dict) -> None:
        """Compare a split with the fingerprint that an earlier run saved. Raises SourceChangedError naming both."""

    def close(self) -> None:
        """Give up shared connections. Idempotent."""
        return
