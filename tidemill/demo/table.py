"""Day T's table: the rows that the players produced on that day."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidemill.data.click_world import SCHEMA

_NUM_FILES = 2


def rows_between(impressions: pa.Table, start: float, stop: float) -> pa.Table:
    """The rows with an event time in [start, stop)."""
    times = impressions["event_time"]
    return impressions.filter(pc.and_(pc.greater_equal(times, start), pc.less(times, stop)))


def write_table(impressions: pa.Table, boundaries: tuple[float, float], folder: Path) -> int:
    """Write the rows between two boundaries as `part-<n>.parquet`, by event time; their number."""
    rows = (
        rows_between(impressions, *boundaries)
        .select(SCHEMA.names)
        .sort_by([("event_time", "ascending"), ("event_id", "ascending")])
    )
    folder.mkdir(parents=True)
    for number in range(_NUM_FILES):
        start, stop = rows.num_rows * number // _NUM_FILES, rows.num_rows * (number + 1) // _NUM_FILES
        pq.write_table(rows.slice(start, stop - start), folder / f"part-{number}.parquet", compression="zstd")
    return rows.num_rows
