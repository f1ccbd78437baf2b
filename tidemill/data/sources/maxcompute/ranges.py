"""Ranges of rows, read ahead by several threads and given in order; every row of a range once, whatever breaks on the way."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import pyarrow as pa

from tidemill import logs
from tidemill.clock import Clock
from tidemill.data.event_times import column_times
from tidemill.data.intervals import IntervalSet
from tidemill.data.source import SplitReader
from tidemill.data.sources.maxcompute.faults import is_transient, shown
from tidemill.data.sources.maxcompute.session import INIT, NORMAL, TableClient
from tidemill.data.sources.outage import pause_s
from tidemill.data.split import RawBatch, Run, SplitId, largest
from tidemill.errors import DataError, DeadlineError, SchemaError, SourceChangedError
from tidemill.logs import log

# Rows that wait for the training thread, for each range that is read ahead; with 2 readers 96 MB at most.
_BYTES_AHEAD = 32 << 20
# A clean end without a single row is no network fault, and waiting doesn't mend it.
_MOST_EMPTY_ANSWERS = 5
_JOIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Range:
    """Rows [start, stop) of a session of a table."""

    split: SplitId
    client: TableClient
    session: str
    start: int
    stop: int

    def __str__(self) -> str:
        return f"{self.split.name}, rows {self.start} to {self.stop} of read session {self.session}"


def cut_ranges(whole: Range, rows: IntervalSet, most: int) -> Iterator[Range]:
    """The rows of a session in ranges of at most `most`, in order."""
    for low, high in rows:
        for start in range(low, high, most):
            yield replace(whole, start=start, stop=min(start + most, high))


class RangeRows:
    """Iterates (first row, batch) over a range; what arrives is counted, and what is missing is asked for again.

    A broken connection, a service error, a body that ends too early (cleanly too: the client takes that for the end) are followed
    by a pause and a request from the next unread row, as long as at least one new row comes within `outage_timeout_s`.
    Raises SourceChangedError if the session can't be read any more, DeadlineError or DataError naming the range otherwise.
    """

    def __init__(self, rows: Range, *, outage_timeout_s: float, clock: Clock) -> None:
        self._client = rows.client
        self._rows = rows
        self._outage_timeout_s = outage_timeout_s
        self._clock = clock
        self._at = rows.start
        self._failures = 0
        self._failing_since: float | None = None

    def __iter__(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        while self._at < self._rows.stop:
            answer = self._client.read(self._rows.session, self._at, self._rows.stop - self._at)
            with closing(answer):
                problem, is_clean = yield from self._take(answer)
            if self._at < self._rows.stop:
                self._pause(problem, is_clean)

    def _take(self, answer: Generator[pa.RecordBatch, None, None]) -> Generator[tuple[int, pa.RecordBatch], None, tuple[str, bool]]:
        """Give what one answer holds; then how it ended, and whether cleanly."""
        before = self._at
        while True:
            try:
                batch = next(answer, None)
            except Exception as error:  # noqa: BLE001 - the plug-in call: what can't pass by itself is raised again
                self._require_passing(error)
                return shown(error), False
            if batch is None:
                return f"the answer ended after {self._at - before} rows", True
            if batch.num_rows:
                yield self._count(batch), batch

    def _count(self, batch: pa.RecordBatch) -> int:
        """Take a batch in; the row it begins at."""
        first, self._at = self._at, self._at + batch.num_rows
        if self._at > self._rows.stop:
            raise DataError(f"{self._rows}: the service gave more rows than it was asked for")
        self._failures = 0
        self._failing_since = None
        return first

    def _pause(self, problem: str, is_clean: bool) -> None:
        now = self._clock.monotonic()
        self._failing_since = now if self._failing_since is None else self._failing_since
        self._failures += 1
        where = f"{self._rows}: broken off at row {self._at}: {problem}"
        if is_clean and self._failures > _MOST_EMPTY_ANSWERS:
            raise DataError(f"{where}; {self._failures} answers in a row; the session has fewer rows than it says")
        pause = pause_s(self._failures)
        if now + pause - self._failing_since > self._outage_timeout_s:
            raise DeadlineError(f"{where}; no new row for {self._outage_timeout_s:g} s (data_config.maxcompute.outage_timeout_s)")
        log.warning("%s; going on from there", where)
        logs.event("maxcompute.range_retried", split=self._rows.split.name, row=self._at, problem=problem)
        self._clock.sleep(pause)

    def _require_passing(self, error: Exception) -> None:
        """Raise unless the request may succeed when it is made again."""
        if is_transient(error):
            return
        try:
            status = self._client.describe(self._rows.session, refresh=False).status
        except Exception as failed:  # noqa: BLE001 - the plug-in call: it only says how the session is
            if is_transient(failed):
                return
            status = shown(failed)
        if status == INIT:
            return
        if status != NORMAL:
            raise SourceChangedError(
                f"{self._rows}: from row {self._at} on they are lost: the session is {status}. Its row order is lost with it:"
                " restart from scratch in an empty model_dir (--fine_tune_checkpoint without --continue_train keeps the weights)"
            ) from error
        raise DataError(f"{self._rows}: refused at row {self._at}: {shown(error)}") from error


class _Slot:
    """One range on its way. Guarded by the reader's lock."""

    def __init__(self, rows: Range) -> None:
        self.rows = rows
        self.batches: deque[tuple[int, pa.RecordBatch]] = deque()
        self.num_bytes = 0
        self.is_done = False
        self.error: BaseException | None = None


class RangeReader(SplitReader):
    """Gives all rows of the ranges in their order, while threads read the next ones.

    `rows_of` makes the iterator of a range; `columns`: what a batch holds, in order; None: what the session gives.
    """

    def __init__(
        self,
        ranges: Iterator[Range],
        rows_of: Callable[[Range], RangeRows],
        *,
        readers: int,
        columns: list[str] | None,
        time_column: str | None,
    ) -> None:
        self._ranges = ranges
        self._rows_of = rows_of
        self._most_slots = readers + 1
        self._columns = columns
        self._time_column = time_column
        self._changed = threading.Condition()
        self._slots: deque[_Slot] = deque()
        self._all_taken = False
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"maxcompute-read-{n}", daemon=True) for n in range(readers)]
        for thread in self._threads:
            thread.start()

    def read(self, timeout_s: float) -> RawBatch | None:
        with self._changed:
            self._changed.wait_for(self._settled, timeout_s)
            self._drop_finished()
            if not self._slots:
                if self._all_taken:
                    raise EOFError
                return None
            slot = self._slots[0]
            if not slot.batches:
                if slot.error is not None:
                    raise slot.error
                return None
            taken, slot.batches, slot.num_bytes = slot.batches, deque(), 0
            self._changed.notify_all()
        return self._raw(slot.rows.split, taken[0][0], [batch for _, batch in taken])

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._slots.clear()
            self._changed.notify_all()
        for thread in self._threads:
            # A thread may be in a request; it ends with it, and isn't waited for.
            thread.join(_JOIN_S / len(self._threads))

    def _settled(self) -> bool:
        """Whether `read` has an answer. Called with the lock held."""
        self._drop_finished()
        if not self._slots:
            return self._all_taken
        return bool(self._slots[0].batches) or self._slots[0].error is not None

    def _drop_finished(self) -> None:
        while self._slots and self._slots[0].is_done and not self._slots[0].batches and self._slots[0].error is None:
            self._slots.popleft()
            self._changed.notify_all()

    def _raw(self, split: SplitId, first: int, batches: list[pa.RecordBatch]) -> RawBatch:
        """Consecutive batches as one."""
        table = pa.Table.from_batches(batches)
        names = table.column_names if self._columns is None else self._columns
        missing = [name for name in names if name not in table.column_names]
        if missing:
            raise SchemaError(f"{split.name}: the read session gives no column {missing[0]!r}")
        table = table.select(names)
        times = None
        if self._time_column is not None:
            times = column_times(table.column(self._time_column), where=f"{split.name}: column {self._time_column!r}")
        run = Run(split, first, first + table.num_rows, table.num_rows, event_time=largest(times, 0, table.num_rows))
        return RawBatch(table, (run,), times)

    def _work(self) -> None:
        """A reading thread: takes the next range as long as there is one."""
        while True:
            slot = self._take()
            if slot is None:
                return
            error: BaseException | None = None
            try:
                self._fill(slot)
            except BaseException as raised:  # noqa: BLE001 - the worker edge: the error goes to whoever reads
                error = raised
            with self._changed:
                slot.error = error
                slot.is_done = True
                self._changed.notify_all()
            if error is not None:
                return

    def _take(self) -> _Slot | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._all_taken or len(self._slots) < self._most_slots)
            if self._closed or self._all_taken:
                return None
            rows = next(self._ranges, None)
            if rows is None:
                self._all_taken = True
                self._changed.notify_all()
                return None
            slot = _Slot(rows)
            self._slots.append(slot)
            return slot

    def _fill(self, slot: _Slot) -> None:
        for first, batch in self._rows_of(slot.rows):
            with self._changed:
                slot.batches.append((first, batch))
                slot.num_bytes += batch.nbytes
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or slot.num_bytes < _BYTES_AHEAD)
                if self._closed:
                    return
