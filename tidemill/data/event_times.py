"""Event times of many rows at once: float64 Unix seconds, NaN where a row has none."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidemill.clock import EARLIEST, LATEST
from tidemill.errors import DataError, SchemaError

_MANY = 100
"""So many times at once that are all wrong are wrong by design."""
_UNITS = {"milliseconds": 1000, "microseconds": 1_000_000, "nanoseconds": 1_000_000_000}
# 1990: a guess at the unit should lead to a likely time.
_OLDEST = 631152000.0


def column_times(column: pa.ChunkedArray, *, where: str) -> np.ndarray:
    """(n,) float64: a column of timestamps, or of Unix seconds as numbers; nulls and NaN are NaN.

    Raises SchemaError naming `where` for another type, DataError if the numbers can't be Unix seconds: not one of many is.
    """
    kind = column.type
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64()).to_numpy() / 1e6
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        times = column.cast(pa.float64(), safe=False).to_numpy().astype(np.float64, copy=False)
        _require_seconds(times, where)
        return times
    raise SchemaError(f"{where} is of type {kind}: event time must be a timestamp, or a number of Unix seconds")


class FirstTimes:
    """Looks at a source's first event times until one of them can be Unix seconds: each read alone may have few."""

    def __init__(self) -> None:
        self._given = np.empty(0)
        self._is_over = False

    def look(self, times: np.ndarray, *, where: str) -> None:
        """Raises DataError naming `where` once there are many, and none of them can be."""
        if self._is_over:
            return
        self._given = np.concatenate([self._given, times[~np.isnan(times)]])
        self._is_over = _any_seconds(self._given)
        _require_seconds(self._given, where)


def _any_seconds(times: np.ndarray) -> bool:
    return bool(((times >= EARLIEST) & (times <= LATEST)).any())


def _require_seconds(times: np.ndarray, where: str) -> None:
    """Fewer than `_MANY` wrong ones are left to `usable`, which counts them: a producer may err now and then."""
    given = times[~np.isnan(times)]
    if len(given) < _MANY or _any_seconds(given):
        return
    example = float(given[0])
    unit = next((name for name, per_second in _UNITS.items() if _OLDEST <= example / per_second <= LATEST), None)
    guess = f"they look like {unit}; divide by {_UNITS[unit]:,}, or" if unit else "Give Unix seconds, or"
    wrong = f"none of {len(given)} event times can be Unix seconds, for example {example:.0f}"
    raise DataError(f"{where}: {wrong}: {guess} store them as timestamps")


def usable(times: np.ndarray, latest: float) -> tuple[np.ndarray, int]:
    """The times with NaN in place of those that can't be true, and how many those were.

    Refused: infinities, what a calendar can't show (milliseconds given as seconds), and times beyond `latest`: one event that
    claims to come from next year would otherwise carry the watermark there.
    """
    with np.errstate(invalid="ignore"):
        refused = (times < EARLIEST) | (times > min(latest, LATEST))
    count = int(np.count_nonzero(refused))
    return (np.where(refused, np.nan, times), count) if count else (times, 0)
