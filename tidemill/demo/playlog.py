"""What the players write down: every request, every impression that the broker acknowledged, and a status for people."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from tidemill.data.click_world import SCHEMA

IMPRESSIONS = "impressions.arrows"
REQUESTS = "requests.arrows"
STATUS = "status.json"
OPTIONS = "options.json"


def impression_schema(rows: pa.Schema) -> pa.Schema:
    """A row as it was produced, where the broker put it, the score that it was ranked with, and wall times (Unix seconds)."""
    return pa.schema(
        [
            *rows,
            pa.field("request", pa.int64()),
            pa.field("partition", pa.int32()),
            pa.field("offset", pa.int64()),
            pa.field("served_score", pa.float32()),
            pa.field("produced_at", pa.float64()),
            pa.field("delivered_at", pa.float64()),
        ]
    )


IMPRESSION_SCHEMA = impression_schema(SCHEMA)
"""Of the click world's rows."""

REQUEST_SCHEMA = pa.schema(
    [
        pa.field("request", pa.int64()),
        pa.field("event_time", pa.float64()),
        pa.field("sent_at", pa.float64()),
        pa.field("latency_s", pa.float64()),
        pa.field("status", pa.int32()),
        pa.field("error", pa.string()),
        pa.field("lineage", pa.string()),
        pa.field("term", pa.int64()),
        pa.field("sequence", pa.int64()),
    ]
)
"""`status`: HTTP's, 0 if there was no answer. `lineage`, `term`, `sequence`: the generation that scored; null if none did."""


@dataclass(frozen=True, slots=True)
class PlayStatus:
    """How the players stand. `complete_until`: every impression of an earlier event time is in the log; None before the start."""

    started_at: float | None = None
    event_time: float | None = None
    complete_until: float | None = None
    requests: int = 0
    failed: int = 0
    impressions: int = 0
    undelivered: int = 0
    latency_p50_s: float | None = None
    latency_p99_s: float | None = None
    last_error: str | None = None


class ArrowLog:
    """Appends record batches to an Arrow IPC stream; each flush is whole batches."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = path.open("wb")
        self._writer = pa.ipc.new_stream(self._file, schema)
        self._schema = schema

    def append(self, rows: list[dict[str, object]]) -> None:
        if rows:
            self._writer.write_batch(pa.RecordBatch.from_pylist(rows, self._schema))
        self._file.flush()

    def close(self) -> None:
        self._writer.close()
        self._file.close()


class ArrowTail:
    """Reads a log of `ArrowLog` while it grows."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []

    def read(self) -> pa.Table:
        """All whole batches so far."""
        self.read_new()
        return pa.Table.from_batches(self._batches, self._schema)

    def read_new(self) -> pa.Table:
        """The batches that have been added since the last read. A batch that is being written is left for the next one."""
        new: list[pa.RecordBatch] = []
        try:
            with pa.memory_map(str(self._path)) as file, pa.ipc.open_stream(file) as stream:
                for number, batch in enumerate(stream):
                    if number >= len(self._batches) + len(new):
                        new.append(batch)
        except (pa.ArrowInvalid, OSError):
            # The end of what is written so far.
            pass
        self._batches += new
        return pa.Table.from_batches(new, self._schema)


def write_status(folder: Path, status: PlayStatus) -> None:
    """Replace the status, whole or not at all."""
    temporary = folder / f".{STATUS}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(status)), encoding="utf-8")
    temporary.replace(folder / STATUS)


def read_status(folder: Path) -> PlayStatus:
    """The players' newest status; an empty one before they have written any."""
    try:
        return PlayStatus(**json.loads((folder / STATUS).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return PlayStatus()
