"""Who is alive: judged by a counter's change on the reader's own monotonic clock, never by comparing two machines' clocks (D2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tidemill.clock import Clock, SystemClock


class Liveness(StrEnum):
    """UNKNOWN: not watched for long enough to tell."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _Watched:
    writer: str
    counter: int
    since: float
    """When the counter was last seen to move; when it was first seen, if it hasn't."""
    moved: bool


class LivenessTracker:
    """Watches heartbeat counters, each under a name.

    ALIVE once a counter has been seen to move, for `liveness_s` after each move. A counter that was seen only once may be
    a leftover of a writer that is gone: UNKNOWN at first, DEAD after `liveness_s`. Another writer under the same name is a
    move; a counter of the same writer that goes back is a stale read and none. Not thread-safe.
    """

    def __init__(self, liveness_s: float, clock: Clock | None = None) -> None:
        self.liveness_s = liveness_s
        self._clock = clock or SystemClock()
        self._watched: dict[str, _Watched] = {}

    def observe(self, name: str, counter: int, *, writer: str = "") -> Liveness:
        """Take note of a counter as just read, and judge. `writer`: the run that writes it."""
        now = self._clock.monotonic()
        watched = self._watched.get(name)
        if watched is None:
            self._watched[name] = _Watched(writer, counter, now, moved=False)
        elif writer != watched.writer or counter > watched.counter:
            self._watched[name] = _Watched(writer, counter, now, moved=True)
        return self.judge(name)

    def judge(self, name: str) -> Liveness:
        """The state by what has been observed so far, also if nothing could be read just now."""
        watched = self._watched.get(name)
        if watched is None:
            return Liveness.UNKNOWN
        if self._clock.monotonic() - watched.since > self.liveness_s:
            return Liveness.DEAD
        return Liveness.ALIVE if watched.moved else Liveness.UNKNOWN
