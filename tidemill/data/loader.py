"""Reads ahead: splits in, batches of one training step each out, every one with its provenance (D3, D11)."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import pyarrow as pa

from tidemill.clock import Clock, SystemClock
from tidemill.data.assignment import Assigned
from tidemill.data.event_times import usable
from tidemill.data.rebatch import Rebatcher
from tidemill.data.source import Source, SplitReader
from tidemill.data.split import Delivery, Provenance, RawBatch, SplitId, keep_rows, with_event_time
from tidemill.errors import DeadlineError

T = TypeVar("T")

# How long one call into a reader may wait: what `close` and a batch that waits for more rows may have to wait for it.
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows read so far by one loader."""

    read: int = 0
    dropped: int = 0
    """before the boundary: they belong to the day's table"""
    refused_times: int = 0
    """rows that lost their event time, since it can't be true"""


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

    A batch is shorter only at the end of a bounded source, or, from an unbounded one, when its oldest row has waited
    `max_wait_s` for company. Batches without rows are never delivered. From a bounded source the boundaries of batches depend
    on `assigned` alone: a run that resumes at a cut sees the batches that the uninterrupted run would have seen.
    `transform(table, batch_size)` runs on `threads` threads; up to `depth` batches are read ahead.
    `drop_before`: rows with an earlier event time aren't delivered (rows without one are). Event times later than now +
    `max_future_s` are taken out of their rows.
    Threading: `take` and `close` belong to one thread; `idle` and `counts` may be called from any.
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
        clock: Clock | None = None,
    ) -> None:
        self._source = source
        self._assigned = list(assigned)
        self._batch_size = batch_size
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
        self._error: BaseException | None = None
        self._counts = RowCounts()
        self._activity = _Activity([part.split.id for part in assigned], self._clock)
        self._threads = [threading.Thread(target=self._read, name="loader-read", daemon=True)]
        self._threads += [threading.Thread(target=self._work, name=f"loader-transform-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def counts(self) -> RowCounts:
        """Rows read so far, ahead of what was taken."""
        return self._counts

    def take(self, timeout_s: float) -> Delivery[T] | None:
        """The next batch; None if none is ready within the timeout (real seconds).

        Raises EOFError when a bounded source has given everything, and an error of the reading or transforming threads once
        all batches before it have been taken; both again on every later call.
        """
        with self._changed:
            self._changed.wait_for(self._settled, timeout_s)
            if not self._settled():
                return None
            if not self._slots:
                raise self._error or EOFError("all rows were delivered")
            slot = self._slots[0]
            if slot.error is not None:
                raise slot.error
            self._slots.popleft()
            self._changed.notify_all()
        # Only a transform that has ended without an error makes a slot ready, so the payload is a T.
        return Delivery(slot.provenance, slot.payload)  # type: ignore[arg-type]

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

    def idle(self, split: SplitId) -> bool:
        """Whether a partition gave no rows for `idle_timeout_s`. Time in which nothing was read because enough was read ahead
        doesn't count, a partition with rows that weren't taken yet isn't idle, and a bounded split never is."""
        if self._source.bounded:
            return False
        with self._changed:
            if any(run.split == split for slot in self._slots for run in slot.provenance.runs):
                return False
            # Until max_wait_s is over, its last rows may still wait for a batch to fill.
            return self._activity.quiet_s(split) >= max(self._idle_timeout_s, self._max_wait_s)

    def close(self, *, deadline_s: float = 10.0) -> None:
        """Stop and join the threads. Idempotent. Raises DeadlineError naming a thread that hasn't stopped in time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
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
            return self._slots[0].ready
        return self._ended or self._error is not None

    def _read(self) -> None:
        """The reading thread."""
        try:
            reader = self._source.open_all(self._assigned)
            try:
                self._cut_batches(reader)
            finally:
                reader.close()
        except BaseException as error:  # noqa: BLE001 - the worker edge: the error goes to whoever takes
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _cut_batches(self, reader: SplitReader) -> None:
        rebatcher = Rebatcher()
        # A bounded source's last full batch waits for the end, so that positions without rows behind it leave with it.
        enough = self._batch_size + 1 if self._source.bounded else self._batch_size
        while not self._closed:
            with self._changed:
                self._activity.go_on()
            try:
                raw = reader.read(self._patience(rebatcher))
            except EOFError:
                while rebatcher.num_rows:
                    self._put(*rebatcher.cut(self._batch_size))
                return
            with self._changed:
                self._activity.pause()
            if raw is not None:
                self._take_in(raw, rebatcher)
            # A partial batch may only go out right after a read: while the queue was full, rows may have come that fill it.
            if rebatcher.num_rows < enough and self._overdue(rebatcher):
                self._put(*rebatcher.cut(self._batch_size))
            while rebatcher.num_rows >= enough:
                self._put(*rebatcher.cut(self._batch_size))

    def _take_in(self, raw: RawBatch, rebatcher: Rebatcher) -> None:
        dropped = refused = 0
        read = raw.num_rows
        if raw.event_time is not None:
            times, refused = usable(raw.event_time, self._clock.time() + self._max_future_s)
            if refused:
                raw = with_event_time(raw, times)
            if self._drop_before is not None:
                raw = keep_rows(raw, ~(times < self._drop_before))
                dropped = read - raw.num_rows
        with self._changed:
            self._activity.seen({run.split for run in raw.runs})
            counts = self._counts
            self._counts = RowCounts(counts.read + read, counts.dropped + dropped, counts.refused_times + refused)
        rebatcher.add(raw, at=self._clock.monotonic())

    def _patience(self, rebatcher: Rebatcher) -> float:
        since = rebatcher.waiting_since
        if since is None or self._source.bounded:
            return _POLL_S
        return min(_POLL_S, max(0.0, since + self._max_wait_s - self._clock.monotonic()))

    def _overdue(self, rebatcher: Rebatcher) -> bool:
        since = rebatcher.waiting_since
        return since is not None and not self._source.bounded and self._clock.monotonic() - since >= self._max_wait_s

    def _put(self, table: pa.Table, provenance: Provenance) -> None:
        slot: _Slot[T] = _Slot(table, provenance)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._slots) < self._depth)
            self._slots.append(slot)
            self._untransformed.append(slot)
            self._changed.notify_all()

    def _work(self) -> None:
        """A transforming thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._untransformed or self._ended)
                if self._closed or not self._untransformed:
                    return
                slot = self._untransformed.popleft()
            table, slot.table = slot.table, None
            try:
                slot.payload = self._transform(table, self._batch_size)
            except BaseException as error:  # noqa: BLE001 - the worker edge: the error goes to whoever takes
                slot.error = error
            with self._changed:
                slot.ready = True
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
