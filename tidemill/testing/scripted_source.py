"""A source whose every read is written down beforehand."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.clock import Clock, SystemClock
from tidemill.data.intervals import IntervalSet
from tidemill.data.source import Source, SplitReader
from tidemill.data.split import RawBatch, Run, Split, SplitId, largest
from tidemill.errors import SourceChangedError


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that one read gives. `event_time`, `arrived_at`: one Unix second for each row, NaN for none."""

    table: pa.Table
    event_time: Sequence[float] | None = None
    arrived_at: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing arrives for so many seconds of the source's clock. Waiting lets a ManualClock move on."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Abort:
    """The read fails. Once: whoever opens the split again gets past it."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Eof:
    """The split ends here, also an unbounded one."""


Event = Rows | Idle | Abort | Eof


class ScriptedSource(Source):
    """Plays one script a split, keyed by the split's name. Positions are row numbers within the split.

    A bounded split ends with its script; an unbounded one stays silent after it, unless the script ends with Eof.
    """

    kind = "scripted"

    def __init__(self, scripts: Mapping[str, Sequence[Event]], *, bounded: bool = True, clock: Clock | None = None) -> None:
        self.bounded = bounded
        self._scripts = {SplitId(self.kind, name): list(script) for name, script in scripts.items()}
        self.clock = clock or SystemClock()
        self.aborted: set[tuple[SplitId, int]] = set()

    def discover(self) -> list[Split]:
        return [Split(split, self._num_rows(split) if self.bounded else None, self._fingerprint(split)) for split in self._scripts]

    def open(self, split: Split, remaining: IntervalSet | None, done: IntervalSet) -> SplitReader:
        self.verify(split, split.fingerprint)
        return _ScriptReader(split.id, self._scripts[split.id], remaining, done, self)

    def verify(self, split: Split, fingerprint: dict[str, Any]) -> None:
        found = self._fingerprint(split.id)
        if found != fingerprint:
            raise SourceChangedError(f"{split.id} changed: was {fingerprint}, is {found}")

    def _num_rows(self, split: SplitId) -> int:
        return sum(event.table.num_rows for event in self._scripts[split] if isinstance(event, Rows))

    def _fingerprint(self, split: SplitId) -> dict[str, Any]:
        return {"rows": self._num_rows(split)}


class _ScriptReader(SplitReader):
    def __init__(
        self, split: SplitId, script: list[Event], remaining: IntervalSet | None, done: IntervalSet, source: ScriptedSource
    ) -> None:
        self._split = split
        self._script = script
        self._remaining = remaining
        self._done = done
        self._source = source
        self._at = 0
        self._row = 0
        self._idle_left: float | None = None
        self._silence = threading.Event()

    def read(self, timeout_s: float) -> RawBatch | None:
        while self._at < len(self._script):
            event = self._script[self._at]
            if isinstance(event, Eof):
                raise EOFError
            if isinstance(event, Idle):
                if self._wait(event, timeout_s):
                    return None
                continue
            self._at += 1
            if isinstance(event, Abort):
                self._abort(event)
            elif event.table.num_rows:
                raw = self._rows(event)
                if raw.num_rows:
                    return raw
        if self._source.bounded:
            raise EOFError
        self._silence.wait(timeout_s)
        return None

    def close(self) -> None:
        self._at = len(self._script)

    def _wait(self, event: Idle, timeout_s: float) -> bool:
        """Pass some of an idle time; whether this read is to give nothing."""
        left = event.seconds if self._idle_left is None else self._idle_left
        if left <= 0:
            self._idle_left = None
            self._at += 1
            return False
        step = min(timeout_s, left)
        self._source.clock.sleep(step)
        self._idle_left = left - step
        return True

    def _abort(self, event: Abort) -> None:
        key = (self._split, self._at)
        if key not in self._source.aborted:
            self._source.aborted.add(key)
            raise event.error

    def _rows(self, event: Rows) -> RawBatch:
        """The event's rows that are wanted; positions that aren't are left out of its runs, not covered by them."""
        count = event.table.num_rows
        start, self._row = self._row, self._row + count
        times = None if event.event_time is None else np.asarray(event.event_time, np.float64)
        arrivals = None if event.arrived_at is None else np.asarray(event.arrived_at, np.float64)
        here = IntervalSet.of([(start, start + count)])
        wanted = here - self._done if self._remaining is None else here & self._remaining
        mask = wanted.holds(np.arange(start, start + count))
        runs = tuple(Run(self._split, a, b, b - a, event_time=largest(times, a - start, b - start)) for a, b in wanted)
        return RawBatch(
            event.table.filter(pa.array(mask)),
            runs,
            None if times is None else times[mask],
            None if arrivals is None else arrivals[mask],
        )
