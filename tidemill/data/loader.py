"""Reads ahead: splits in, batches of one training step each out, every one with its provenance (D3, D11)."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar

import pyarrow as pa

from tidemill.clock import Clock, SystemClock
from tidemill.data.assignment import Assigned
from tidemill.data.blocks import BlockReader
from tidemill.data.dead_letters import DeadLetter, DeadLetters
from tidemill.data.event_times import FirstTimes, usable
from tidemill.data.intervals import IntervalSet
from tidemill.data.rebatch import BatchRule, Rebatcher
from tidemill.data.salvage import bad_rows, covering, without_rows
from tidemill.data.shuffle import Shuffle
from tidemill.data.source import Source, SplitReader
from tidemill.data.split import Delivery, Provenance, RawBatch, Run, Split, SplitId, join_runs, keep_rows, with_event_time
from tidemill.errors import DataError, DeadlineError
from tidemill.logs import log

T = TypeVar("T")

# How long one call into a reader may wait: what `close` and a batch that waits for more rows may have to wait for it.
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows read so far by one loader, or by one rank."""

    read: int = 0
    dropped: int = 0
    """before the boundary: they belong to the day's table"""
    refused_times: int = 0
    """rows that lost their event time, since it can't be true"""
    oversized: int = 0
    """rows that made a batch of their own, since each costs more than a batch may"""
    remainder: int = 0
    """rows at the end of a pass that didn't fill a batch, and were left out (drop_remainder)"""
    poison: int = 0
    """messages and rows that couldn't be used, and were skipped"""
    late: int = 0
    """rows whose event time lay below the watermark that was published when they were trained"""

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How a loader reads a bounded source. `readers`: threads, each of which reads a stretch of the rank's rows of its own.

    `shuffle` None: rows come as they lie. Without `in_order` batches come as they get ready, so that no two runs are alike. A
    stream always comes in order: what is trained of a partition must be all up to some position, and event time must not promise
    rows that aren't.
    """

    readers: int = 1
    shuffle: Shuffle | None = None
    in_order: bool = True


class _Slot(Generic[T]):
    """One batch on its way: cut, then transformed."""

    def __init__(self, table: pa.Table, provenance: Provenance) -> None:
        self.table: pa.Table | None = table
        self.provenance = provenance
        self.ready = False
        self.payload: T | None = None
        self.error: BaseException | None = None


class Loader(Generic[T]):
    """Delivers batches of exactly `batch_size` rows, in order, read and transformed by threads of its own.

    A batch is shorter only at the end of a bounded source, if `rule` limits its cost, or, from an unbounded source, when its
    oldest row has waited `max_wait_s` for company. Batches without rows are never delivered. From a bounded source the
    boundaries of batches depend on `assigned` alone: a run that resumes at a cut sees the batches that the uninterrupted run
    would have seen.
    `transform(table, batch_size)` runs on `threads` threads; up to `depth` batches are read ahead.
    `drop_before`: rows with an earlier event time aren't delivered (rows without one are). Event times later than now +
    `max_future_s` are taken out of their rows. `rule`, if given, is what fills a batch, of `batch_size` rows at most. `reading`
    is for bounded sources; others are read by one thread. `mine`: see `Source.open_all`. `dead_letters`: takes rows that
    `transform` raises DataError for, and their batch is delivered without them; None: the error is raised, with the row's place.
    Threading: `take` and `close` belong to one thread; the others may be called from any.
    """

    def __init__(
        self,
        source: Source,
        assigned: Sequence[Assigned],
        *,
        batch_size: int,
        transform: Callable[[pa.Table, int], T],
        max_wait_s: float = 1.0,
        idle_timeout_s: float = 10.0,
        depth: int = 4,
        threads: int = 1,
        drop_before: float | None = None,
        max_future_s: float = math.inf,
        rule: BatchRule | None = None,
        reading: ReadPlan | None = None,
        dead_letters: DeadLetters | None = None,
        mine: Callable[[SplitId], bool] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._source = source
        self._assigned = list(assigned)
        self._batch_size = batch_size
        self._rule = rule or BatchRule(batch_size)
        self._reading = reading or ReadPlan()
        self._dead_letters = dead_letters
        self._mine = mine
        self._transform = transform
        self._max_wait_s = max_wait_s
        self._idle_timeout_s = idle_timeout_s
        self._depth = depth
        self._drop_before = drop_before
        self._max_future_s = max_future_s
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._slots: deque[_Slot[T]] = deque()
        self._untransformed: deque[_Slot[T]] = deque()
        self._closed = False
        self._ended = False
        self._all_cut = False
        self._error: BaseException | None = None
        self._counts = RowCounts()
        self._first_times = FirstTimes()
        self._reader: SplitReader | None = None
        self._found: list[Split] = []
        self._covered: list[Run] = []
        self._activity = _Activity([part.split.id for part in assigned], self._clock)
        self._threads = [threading.Thread(target=self._read, name="loader-read", daemon=True)]
        self._threads += [threading.Thread(target=self._work, name=f"loader-transform-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def counts(self) -> RowCounts:
        """Rows read so far, ahead of what was taken."""
        return self._counts if self._dead_letters is None else replace(self._counts, poison=self._dead_letters.count)

    @property
    def keeps_order(self) -> bool:
        """Whether a split's rows are delivered in the order in which they lie."""
        reading = self._reading
        return not self._source.bounded or (reading.readers == 1 and reading.shuffle is None and reading.in_order)

    def take(self, timeout_s: float) -> Delivery[T] | None:
        """The next batch; None if none is ready within the timeout (real seconds).

        Raises EOFError when a bounded source has given everything, and an error of the reading or transforming threads once
        all batches before it have been taken; both again on every later call.
        """
        with self._changed:
            self._changed.wait_for(self._settled, timeout_s)
            if not self._settled():
                return None
            slot = self._ready_slot()
            if slot is None:
                raise self._error or EOFError("all rows were delivered")
            if slot.error is not None:
                raise slot.error
            self._slots.remove(slot)
            is_last = self._all_cut and not self._slots
            self._changed.notify_all()
        # Only a transform that has ended without an error makes a slot ready, so the payload is a T.
        return Delivery(slot.provenance, slot.payload, is_last)  # type: ignore[arg-type]

    @property
    def in_hand(self) -> int:
        """How many batches `take` would give at once."""
        with self._changed:
            count = 0
            for slot in self._slots:
                if not slot.ready or slot.error is not None:
                    break
                count += 1
            return count

    def take_found(self) -> list[Split]:
        """Splits that have been added to this rank's since the last call; rows of theirs are only in later deliveries."""
        with self._changed:
            found, self._found = self._found, []
        return found

    def take_covered(self) -> Provenance:
        """Positions of an unbounded source that are done with although no row follows: all that came there was dropped, or is a
        gap. Those before a row come with it. They count once all batches that were taken before are trained: what is done of a
        partition must be all up to some position."""
        with self._changed:
            covered, self._covered = join_runs(self._covered), []
        return Provenance(covered, 0)

    def describe(self, split: Split, done: IntervalSet) -> Split:
        """A split as a checkpoint that holds `done` describes it (`Source.describe`)."""
        return replace(split, fingerprint=self._source.describe(split, done))

    def idle(self, split: SplitId) -> bool:
        """Whether a partition has been read to its end and gave no rows for `idle_timeout_s`. Time in which nothing was read
        because enough was read ahead doesn't count, a partition with rows that weren't taken yet isn't idle, nor is one of which
        the source can't say that there is nothing to read, and a bounded split never is."""
        if self._source.bounded or self._reader is None or not self._reader.is_caught_up(split):
            return False
        with self._changed:
            # Until max_wait_s is over, its last rows may still wait for a batch to fill.
            if self._activity.quiet_s(split) < max(self._idle_timeout_s, self._max_wait_s):
                return False
            return not any(run.split == split for slot in self._slots for run in slot.provenance.runs)

    def close(self, *, deadline_s: float = 10.0) -> None:
        """Stop and join the threads. Idempotent. Raises DeadlineError naming a thread that hasn't stopped in time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not self._ended:
            self._source.interrupt()
        until = threading.TIMEOUT_MAX if math.isinf(deadline_s) else deadline_s
        for thread in self._threads:
            started = self._clock.monotonic()
            thread.join(until)
            until = max(0.0, until - (self._clock.monotonic() - started))
        stuck = [thread.name for thread in self._threads if thread.is_alive()]
        if stuck:
            raise DeadlineError(f"{self._source.kind} loader: {', '.join(stuck)} still busy after {deadline_s:g} s")

    def _settled(self) -> bool:
        """Whether `take` has an answer. Called with the lock held."""
        if self._slots:
            return self._ready_slot() is not None
        return self._ended or self._error is not None

    def _ready_slot(self) -> _Slot[T] | None:
        """The batch to give next, if it is ready. Called with the lock held."""
        if self._reading.in_order or not self._source.bounded:
            return self._slots[0] if self._slots and self._slots[0].ready else None
        return next((slot for slot in self._slots if slot.ready), None)

    def _read(self) -> None:
        """The reading thread."""
        try:
            reader = self._reader = self._open()
            try:
                self._cut_batches(reader)
            finally:
                reader.close()
        except BaseException as error:  # noqa: BLE001 - the worker edge: the error goes to whoever takes
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _open(self) -> SplitReader:
        reading = self._reading
        if not self._source.bounded or (reading.readers == 1 and reading.shuffle is None):
            return self._source.open_all([part for part in self._assigned if not part.is_finished], self._mine)
        return BlockReader(
            self._source,
            self._assigned,
            readers=reading.readers,
            block_rows=reading.shuffle.block_rows if reading.shuffle else self._batch_size,
            shuffle=reading.shuffle,
            in_order=reading.in_order,
        )

    def _cut_batches(self, reader: SplitReader) -> None:
        rebatcher = Rebatcher(self._rule)
        while not self._closed:
            with self._changed:
                self._activity.go_on()
            try:
                raw = reader.read(self._patience(rebatcher))
            except EOFError:
                self._cut_rest(rebatcher)
                return
            found = reader.found()
            with self._changed:
                self._activity.pause()
                self._activity.seen({split.id for split in found})
                self._found += found
            if raw is not None:
                self._take_in(raw, rebatcher)
            if self._source.bounded:
                for size in rebatcher.full_sizes(is_end=False):
                    self._put(rebatcher, size)
            else:
                self._cut_stream(rebatcher)

    def _cut_stream(self, rebatcher: Rebatcher) -> None:
        size, full = rebatcher.next_size()
        # A partial batch may only go out right after a read: while the queue was full, rows may have come that fill it.
        if not full and self._overdue(rebatcher):
            self._put(rebatcher, size)
        while full:
            self._put(rebatcher, size)
            size, full = rebatcher.next_size()
        self._cover(rebatcher)

    def _cover(self, rebatcher: Rebatcher) -> None:
        with self._changed:
            self._cover_behind(len(self._slots), rebatcher.take_empty())

    def _cover_behind(self, slots: int, runs: Sequence[Run]) -> None:
        """Cover runs that hold no rows with the batch that they follow, the last of the first `slots` here; alone if it was taken.
        Called with the lock held."""
        if runs and slots:
            before = self._slots[slots - 1]
            before.provenance = covering(before.provenance, runs)
        else:
            self._covered += runs

    def _cut_rest(self, rebatcher: Rebatcher) -> None:
        sizes = rebatcher.full_sizes(is_end=True)
        for number, size in enumerate(sizes, start=1):
            self._put(rebatcher, size, is_last=number == len(sizes))
        if not self._source.bounded:
            self._cover(rebatcher)
        with self._changed:
            self._counts = replace(self._counts, remainder=rebatcher.num_rows)
        if rebatcher.num_rows:
            log.info("%d rows at the end don't fill a batch and are left out (drop_remainder)", rebatcher.num_rows)

    def _take_in(self, raw: RawBatch, rebatcher: Rebatcher) -> None:
        dropped = refused = 0
        read = raw.num_rows
        if raw.event_time is not None:
            self._first_times.look(raw.event_time, where=f"{self._source.kind}: event time")
            times, refused = usable(raw.event_time, self._clock.time() + self._max_future_s)
            if refused:
                raw = with_event_time(raw, times)
            if self._drop_before is not None:
                raw = keep_rows(raw, ~(times < self._drop_before))
                dropped = read - raw.num_rows
        with self._changed:
            self._activity.seen({run.split for run in raw.runs})
            self._counts += RowCounts(read, dropped, refused)
        rebatcher.add(raw, at=self._clock.monotonic())

    def _patience(self, rebatcher: Rebatcher) -> float:
        since = rebatcher.waiting_since
        if since is None or self._source.bounded:
            return _POLL_S
        return min(_POLL_S, max(0.0, since + self._max_wait_s - self._clock.monotonic()))

    def _overdue(self, rebatcher: Rebatcher) -> bool:
        since = rebatcher.waiting_since
        return since is not None and not self._source.bounded and self._clock.monotonic() - since >= self._max_wait_s

    def _put(self, rebatcher: Rebatcher, size: int, *, is_last: bool = False) -> None:
        """Hand on the next batch. `is_last`: it is known that nothing follows."""
        oversized = rebatcher.oversized
        slot: _Slot[T] = _Slot(*rebatcher.cut(size))
        if rebatcher.oversized > oversized and not self._counts.oversized:
            log.warning("%s: a row costs more than batch_cost_size; it is a batch of its own", next(slot.provenance.parts())[0])
        with self._changed:
            self._counts = replace(self._counts, oversized=rebatcher.oversized)
            self._changed.wait_for(lambda: self._closed or len(self._slots) < self._depth)
            self._slots.append(slot)
            self._untransformed.append(slot)
            self._all_cut = is_last
            self._changed.notify_all()

    def _work(self) -> None:
        """A transforming thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._untransformed or self._ended)
                if self._closed or not self._untransformed:
                    return
                slot = self._untransformed.popleft()
            try:
                self._fill(slot)
            except BaseException as error:  # noqa: BLE001 - the worker edge: the error goes to whoever takes
                slot.error = error
            with self._changed:
                slot.ready = True
                self._changed.notify_all()

    def _fill(self, slot: _Slot[T]) -> None:
        table, slot.table = slot.table, None
        assert table is not None
        try:
            slot.payload = self._transform(table, self._batch_size)
        except DataError as error:
            if self._dead_letters is None or slot.provenance.scattered:
                raise self._placed(slot, table, error) from None
            self._salvage(slot, table, error, self._dead_letters)

    def _placed(self, slot: _Slot[T], table: pa.Table, error: DataError) -> DataError:
        """The error with the place of the first row at fault; as it is if no row is, on its own."""
        try:
            row, why = next(bad_rows(table, lambda rows: self._transform(rows, self._batch_size), error))
        except DataError as of_all:
            return of_all
        return DataError(str(DeadLetter(self._source.place_of(*slot.provenance.locate(row)), why)))

    def _salvage(self, slot: _Slot[T], table: pa.Table, error: DataError, dead_letters: DeadLetters) -> None:
        """Transform the rows of a batch that can be; the others become dead letters, one by one, so that a budget ends it."""
        bad: list[int] = []
        for row, why in bad_rows(table, lambda rows: self._transform(rows, self._batch_size), error):
            place = self._source.place_of(*slot.provenance.locate(row))
            dead_letters.add([DeadLetter(place, why, values=table.slice(row, 1).to_pylist()[0])])
            bad.append(row)
        with self._changed:
            table, slot.provenance = without_rows(table, slot.provenance, bad)
            if not table.num_rows:
                self._leave_out(slot)
        if table.num_rows:
            slot.payload = self._transform(table, self._batch_size)

    def _leave_out(self, slot: _Slot[T]) -> None:
        """Deliver nothing for a batch without rows. Called with the lock held."""
        at = self._slots.index(slot)
        del self._slots[at]
        self._cover_behind(at, slot.provenance.runs)
        self._changed.notify_all()


class _Activity:
    """When each split last gave rows, on a clock that runs only while the source is being read. Not thread-safe."""

    def __init__(self, splits: Sequence[SplitId], clock: Clock) -> None:
        self._clock = clock
        self._read_s = 0.0
        self._reading_since: float | None = None
        self._seen = dict.fromkeys(splits, 0.0)

    def go_on(self) -> None:
        self._reading_since = self._clock.monotonic()

    def pause(self) -> None:
        self._read_s = self._now()
        self._reading_since = None

    def _now(self) -> float:
        return self._read_s + (0.0 if self._reading_since is None else self._clock.monotonic() - self._reading_since)

    def seen(self, splits: set[SplitId]) -> None:
        self._seen.update(dict.fromkeys(splits, self._now()))

    def quiet_s(self, split: SplitId) -> float:
        """Seconds without rows; infinite for a split that isn't read here."""
        return self._now() - self._seen.get(split, -math.inf)
