"""What has been trained, as documents: split states, and the progress report that lineages show each other."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import orjson

from tidemill.clock import EventTime, event_time
from tidemill.contracts.base import Document, Part, canonical, parse_object
from tidemill.contracts.positions import position_keys, splits_with_keys
from tidemill.errors import CorruptError

ROW_BITS = 20
"""A Kafka position is `offset << ROW_BITS | row within the message`; in files positions are row numbers."""
FILE_ROW_BITS = 32
"""A position in a streamed folder is `number of the file << FILE_ROW_BITS | row`."""


class SplitState(Part):
    """Progress of one split. `intervals`: half-open trained positions. Untouched splits are listed with none."""

    kind: str
    """The source's kind: "parquet", "kafka", ..."""
    split: str
    """The split's stable name within the source: a file's path, "topic:partition"."""
    intervals: list[tuple[int, int]]
    num_rows: int | None = None
    """Rows of a bounded split; None: unbounded."""
    fingerprint: dict[str, Any]
    """What must be unchanged when a later run resumes: size and rows of a file, the cluster's id of a topic."""
    max_event_time: float | None = None
    """The largest event time trained."""


class DataloaderState(Document):
    """`dataloader_state.json`: where the data stands, for people and for the next run."""

    schema_name: ClassVar[str] = "dataloader_state"

    passes_completed: int
    splits: list[SplitState]
    watermark: float | None
    """The quorum's event time."""

    def to_bytes(self) -> bytes:
        """Canonical JSON; `positions` shows what was read of MaxCompute's sessions by tzrec's text keys, if there are any."""
        body = orjson.loads(super().to_bytes())
        keys = position_keys(body["splits"])
        return canonical({**body, "positions": keys}) if keys else canonical(body)

    @classmethod
    def parse(cls, data: bytes, *, where: str) -> Self:
        body = parse_object(data, where=where)
        keys = body.pop("positions", None)
        state = super().parse(canonical(body), where=where)
        if keys is None:
            return state
        splits = splits_with_keys(state.model_dump(mode="json")["splits"], keys, where=where)
        return super().parse(canonical({**body, "splits": splits}), where=where)


class WindowFigures(Part):
    """Progressive metrics over the rows whose event times lie in [start, stop): each was scored before it was trained on."""

    start: float
    stop: float
    rows: int
    metrics: dict[str, float]


class ProgressReport(Document):
    """`progress.json`: what a running stream tells its predecessor and successor. `data_ts` is the quorum's event time (A3, D8).

    Foreign files may hold `data_ts` alone; `read_progress` takes them.
    """

    schema_name: ClassVar[str] = "progress"

    data_ts: float
    run_id: str | None = None
    term: int | None = None
    heartbeat: int | None = None
    """A counter that only a live writer moves on."""
    step: int | None = None
    released_watermark: float | None = None
    """Event time up to which releases are committed."""
    handover_mark: float | None = None
    """A predecessor's data_ts as fixed at the first check within tolerance."""
    metrics: dict[str, float] | None = None
    """Progressive metrics over the last window."""
    windows: list[WindowFigures] | None = None
    """The newest windows that are over, in order; what the policy `healthy` compares."""


def read_progress(data: bytes, *, where: str) -> ProgressReport:
    """Another lineage's progress. Raises CorruptError for anything that must not lead to a hand-over (A9)."""
    body = parse_object(data, where=where)
    try:
        data_ts: EventTime = event_time(body.get("data_ts"))
    except ValueError as error:
        raise CorruptError(f"{where}: data_ts: {error}") from None
    if data_ts < 0:
        raise CorruptError(f"{where}: data_ts: {data_ts} is before 1970; writers use a negative number for 'none'")
    if "schema" in body:
        return ProgressReport.parse(data, where=where)
    return ProgressReport(data_ts=data_ts)
