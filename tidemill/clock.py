"""Time: event time as a checked type, and clocks that tests can turn by hand."""

from __future__ import annotations

import math
import threading
import time as _time
from typing import NewType, Protocol

EventTime = NewType("EventTime", float)
"""When a row happened: finite Unix seconds, made only by `event_time`."""

# 0001-01-01 .. 9999-12-31: what a calendar can show. Milliseconds given as seconds fall outside, and are told apart that way.
EARLIEST, LATEST = -62135596800.0, 253402300799.0


def event_time(value: object) -> EventTime:
    """`value` as event time. Raises ValueError for anything but a finite number of Unix seconds that a calendar can show.

    Bools, text, NaN, infinities, negative sentinels below year 1 and integers too large for a float are refused here, once,
    so that nothing behind this edge needs to check again.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"event time must be a number of Unix seconds, not {type(value).__name__} {value!r:.60}")
    try:
        seconds = float(value)
    except OverflowError:
        raise ValueError("event time is an integer too large for Unix seconds") from None
    if not math.isfinite(seconds):
        raise ValueError(f"event time must be finite, not {seconds}")
    if not EARLIEST <= seconds <= LATEST:
        raise ValueError(f"event time {seconds:.0f} isn't Unix seconds (milliseconds?)")
    return EventTime(seconds)


class Clock(Protocol):
    """Wall time, monotonic time and sleeping, so that a test can inject its own."""

    def time(self) -> float:
        """Unix seconds."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean something."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The machine's clock."""

    def time(self) -> float:
        return _time.time()

    def monotonic(self) -> float:
        return _time.monotonic()

    def sleep(self, seconds: float) -> None:
        _time.sleep(seconds)


class ManualClock:
    """A clock that stands still until it is advanced; `sleep` advances it. Thread-safe."""

    def __init__(self, time: float = 1_700_000_000.0) -> None:
        self._time = time
        self._monotonic = 1_000.0
        self._lock = threading.Lock()

    def time(self) -> float:
        with self._lock:
            return self._time

    def monotonic(self) -> float:
        with self._lock:
            return self._monotonic

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let time pass. Raises ValueError for negative seconds: monotonic time never goes back."""
        if seconds < 0:
            raise ValueError(f"can't advance by {seconds} s")
        with self._lock:
            self._time += seconds
            self._monotonic += seconds

    def set_time(self, time: float) -> None:
        """Jump the wall clock (forward or back), as an operator or NTP would; monotonic time doesn't move."""
        with self._lock:
            self._time = time
