"""The seam that every source implements: discover splits, open a reader on what is left of one."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tidemill.contracts.progress import SplitState
from tidemill.data.assignment import Assigned
from tidemill.data.intervals import IntervalSet
from tidemill.data.progress import verify_splits
from tidemill.data.split import RawBatch, Split, SplitId


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

    def found(self) -> list[Split]:
        """Splits that were added to what is read since the last call; none of their rows has been given yet."""
        return []

    def is_caught_up(self, split: SplitId) -> bool:
        """Whether silence of an unbounded split means that there is nothing to read, as far as the source knows. Any thread."""
        return True


class _OneAfterAnother(SplitReader):
    """Bounded splits in the order given, each opened when the one before has ended."""

    def __init__(self, source: Source, assigned: Sequence[Assigned]) -> None:
        self._source = source
        self._left = deque(assigned)
        self._reader: SplitReader | None = None

    def read(self, timeout_s: float) -> RawBatch | None:
        while self._reader is not None or self._left:
            if self._reader is None:
                part = self._left[0]
                self._reader = self._source.open(part.split, part.remaining, part.done)
                self._left.popleft()
            try:
                return self._reader.read(timeout_s)
            except EOFError:
                self._reader.close()
                self._reader = None
        raise EOFError

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class _InTurn(SplitReader):
    """Unbounded splits, each read in turn; a read waits only when none of them has anything."""

    def __init__(self, source: Source, assigned: Sequence[Assigned]) -> None:
        self._readers: deque[SplitReader] = deque()
        self._pause = threading.Event()
        try:
            for part in assigned:
                self._readers.append(source.open(part.split, part.remaining, part.done))
        except BaseException:
            self.close()
            raise
        self._opened = len(self._readers)

    def read(self, timeout_s: float) -> RawBatch | None:
        for _ in range(len(self._readers)):
            raw = self._next(0.0)
            if raw is not None:
                return raw
        if not self._opened:
            self._pause.wait(timeout_s)
            return None
        return self._next(timeout_s)

    def _next(self, timeout_s: float) -> RawBatch | None:
        if not self._readers:
            raise EOFError
        reader = self._readers[0]
        self._readers.rotate(-1)
        try:
            return reader.read(timeout_s)
        except EOFError:
            self._readers.remove(reader)
            reader.close()
            return None

    def close(self) -> None:
        while self._readers:
            self._readers.popleft().close()


class Source(ABC):
    """Where rows come from. Cheap to construct; `discover` and `open` do the I/O. Each class has a `Config`.

    Threading: `open` may be called from several threads; each reader belongs to one thread.
    """

    kind: str
    bounded: bool
    continues_parent = False
    """Whether a run that continues from another run's checkpoint goes on behind that run's positions too (tzrec's --continue_train
    with a fine_tune_checkpoint); else it reads everything that it is given."""

    @abstractmethod
    def discover(self) -> list[Split]:
        """All splits, in an order that depends on the data alone. Rank 0 calls it and shares the answer."""

    def resume(self, saved: Sequence[SplitState]) -> list[Split]:
        """The splits with which a run goes on from what an earlier one saved of them. Rank 0 calls it, instead of `discover`, and
        shares the answer or the error.

        A split of which some was read keeps its id, its number of rows and what reading it takes; all else is the source's own
        decision. Raises SourceChangedError naming a split that isn't what it was.
        """
        return verify_splits(self, self.discover(), saved)

    def renew(self, splits: Sequence[Split]) -> list[Split]:
        """The same splits for one more pass over them. Rank 0 calls it before each pass but the first, and shares the answer.

        Ids and numbers of rows stay. Raises SourceChangedError naming a split that can't be read once more.
        """
        return list(splits)

    @abstractmethod
    def open(self, split: Split, remaining: IntervalSet | None, done: IntervalSet) -> SplitReader:
        """A reader of the split; the one path for new and restored splits, which also takes whatever lease reading needs.

        Bounded: gives exactly the positions in `remaining`. Unbounded (`remaining` None): starts behind `done`, or where the config
        says for an untouched split, and never gives a position in `done` again.
        Raises SourceChangedError naming split and difference if the split can't be what `done` was read from.
        """

    def open_all(self, assigned: Sequence[Assigned], mine: Callable[[SplitId], bool] | None = None) -> SplitReader:
        """One reader of everything that a rank reads.

        Bounded: one split after the other, in the order given. Unbounded: all at once, none of them starved; it ends when all
        of them have. A source that reads many splits through one connection overrides this.
        `mine`: whether this rank reads a split that appears later, from its beginning; None: such splits wait for the next run.
        Sources to which no split is added don't look.
        """
        return _OneAfterAnother(self, assigned) if self.bounded else _InTurn(self, assigned)

    @abstractmethod
    def verify(self, split: Split, fingerprint: dict[str, Any]) -> None:
        """Compare a split with the fingerprint that an earlier run saved. Raises SourceChangedError naming both."""

    def resumed(self, splits: Sequence[Split], states: Mapping[SplitId, SplitState]) -> list[Split]:
        """Splits as a run reads them that goes on from `states`: with what the earlier run had decided about them."""
        return list(splits)

    def replaced(self, splits: Sequence[Split], states: Mapping[SplitId, SplitState]) -> set[SplitId]:
        """Which splits of an earlier run others have taken the place of, by the same names, so that what was read of them is to be
        forgotten. Depends on what it is given alone: every rank asks."""
        return set()

    def describe(self, split: Split, done: IntervalSet) -> dict[str, Any]:
        """What a checkpoint that holds `done` says of a split beside its positions; the next run gets it as the split's fingerprint
        (`resumed`). Called by the training thread."""
        return split.fingerprint

    def commit(self, done: Mapping[SplitId, IntervalSet]) -> None:
        """Show outside how far a committed checkpoint has come. Best effort, never waits; nothing reads it back."""
        return

    def interrupt(self) -> None:
        """The run ends: let an `open` or a `read` that waits for what is away fail within a few seconds. Idempotent; any thread may
        call. Nothing can be opened afterwards."""
        return

    def place_of(self, split: SplitId, position: int) -> dict[str, Any]:
        """The place of a row in words that the source's owners know; the same for the same row, whoever reads it."""
        return {"split": split.name, "row": position}

    def close(self) -> None:
        """Give up shared connections. Idempotent."""
        return
