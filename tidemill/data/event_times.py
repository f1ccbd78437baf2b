"""Event times of many rows at once: float64 Unix seconds, NaN where a row has none."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidemill.clock import EARLIEST, LATEST
from tidemill.errors import SchemaError


def column_times(column: pa.ChunkedArray, *, where: str) -> np.ndarray:
    """(n,) float64: a column of timestamps, or of Unix seconds as numbers. Raises SchemaError naming `where` for another type."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        return column.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64()).to_numpy() / 1e6
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return column.cast(pa.float64(), safe=False).to_numpy().astype(np.float64, copy=False)
    raise SchemaError(f"{where} is of type {kind}: event time must be a timestamp, or a number of Unix seconds")


def usable(times: np.ndarray, latest: float) -> tuple[np.ndarray, int]:
    """The times with NaN in place of those that can't be true, and how many those were.

    Refused: infinities, what a calendar can't show (milliseconds given as seconds), and times beyond `latest`: one event that
    claims to come from next year would otherwise carry the watermark there.
    """
    with np.errstate(invalid="ignore"):
        refused = (times < EARLIEST) | (times > min(latest, LATEST))
    count = int(np.count_nonzero(refused))
    return (np.where(refused, np.nan, times), count) if count else (times, 0)
