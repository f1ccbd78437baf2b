"""The proof that every row was trained exactly once in the surviving line, against the producer's own list."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidemill.contracts import layout
from tidemill.contracts.progress import ROW_BITS
from tidemill.data.split import SplitId, positions
from tidemill.demo.plan import TOPIC
from tidemill.demo.table import rows_between
from tidemill.jobs.ledger import Ledger, TrainedRun, check_ledger, read_steps, surviving
from tidemill.storage.base import Storage


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows that the producer lists, and what became of them."""

    in_stream: int
    trained_once: int
    lost: int
    doubled: int

    def __add__(self, other: RowCounts) -> RowCounts:
        return RowCounts(
            self.in_stream + other.in_stream,
            self.trained_once + other.trained_once,
            self.lost + other.lost,
            self.doubled + other.doubled,
        )

    @property
    def is_clean(self) -> bool:
        return self.lost == self.doubled == 0 and self.trained_once == self.in_stream


@dataclass(frozen=True, slots=True)
class RowsProof:
    """The surviving line in its parts: day T-1's table, day T's table, and the stream of day T; and the retired stream."""

    first_table: RowCounts
    second_table: RowCounts
    stream: RowCounts
    retired: RowCounts

    @property
    def played(self) -> RowCounts:
        """What the players produced, in the surviving line: day T's table and the stream behind it."""
        return self.second_table + self.stream

    @property
    def is_clean(self) -> bool:
        return self.first_table.is_clean and self.played.is_clean and self.retired.is_clean

    def to_json(self) -> dict[str, object]:
        parts = {name: asdict(getattr(self, name)) for name in ("first_table", "second_table", "stream", "retired")}
        return {**asdict(self.played), **parts}


def prove_rows(root: Storage, tables: tuple[Path, Path], boundaries: tuple[float, float], impressions: pa.Table) -> RowsProof:
    """Hold what was trained against what was produced. `tables`: the folders of day T-1's and day T's tables; `boundaries`: where
    they end; `impressions`: all that the producer has delivered."""
    dates = tables[0].name, tables[1].name
    produced = rows_between(impressions, *boundaries)
    streamed = rows_between(impressions, boundaries[1], np.inf)
    return RowsProof(
        first_table=_table(root, tables[0]),
        second_table=_produced_table(root, tables[1], produced),
        stream=_counts(check_ledger(read_steps(root, prefix=layout.lineage(dates[1])), _offsets(streamed))),
        retired=_retired(read_steps(root, prefix=layout.lineage(dates[0])), impressions),
    )


def _table(root: Storage, folder: Path) -> RowCounts:
    expected = {
        SplitId("parquet", str(path)): np.arange(pq.read_metadata(path).num_rows, dtype=np.int64)
        for path in sorted(folder.glob("*.parquet"))
    }
    return _counts(check_ledger(read_steps(root, prefix=layout.daily(folder.name)), expected))


def _produced_table(root: Storage, folder: Path, produced: pa.Table) -> RowCounts:
    """Day T's table row by row: what its job trained, by event id, against the ids that the players produced on that day."""
    trained = surviving(read_steps(root, prefix=layout.daily(folder.name)))
    ids: list[pa.Array] = []
    for path in sorted(folder.glob("*.parquet")):
        column = pq.read_table(path, columns=["event_id"])["event_id"].combine_chunks()
        entries = [positions(entry.rows) for entry in trained if entry.rows.split == SplitId("parquet", str(path))]
        ids.append(column.take(pa.array(np.concatenate(entries) if entries else np.empty(0, np.int64))))
    listed = produced["event_id"].combine_chunks()
    found = pc.index_in(pa.concat_arrays(ids), listed)
    counts = np.bincount(found.drop_null().to_numpy(), minlength=len(listed))
    once, more = int(np.count_nonzero(counts == 1)), int(np.count_nonzero(counts > 1))
    # A row that nobody produced on that day belongs elsewhere, and is trained there too.
    return RowCounts(len(listed), once, int(np.count_nonzero(counts == 0)), more + found.null_count)


def _retired(trained: list[TrainedRun], impressions: pa.Table) -> RowCounts:
    """The retired stream, up to where it stopped in each partition."""
    stops: dict[str, int] = {}
    for entry in surviving(trained):
        stops[entry.rows.split.name] = max(stops.get(entry.rows.split.name, 0), entry.rows.stop)
    expected = {split: listed[listed < stops.get(split.name, 0)] for split, listed in _offsets(impressions).items()}
    return _counts(check_ledger(trained, expected))


def _offsets(rows: pa.Table) -> dict[SplitId, np.ndarray]:
    """By split, the position of each row: one row a message."""
    partitions, offsets = rows["partition"].to_numpy(), rows["offset"].to_numpy()
    return {
        SplitId("kafka", f"{TOPIC}:{partition}"): np.sort(offsets[partitions == partition]) << ROW_BITS
        for partition in np.unique(partitions).tolist()
    }


def _counts(ledger: Ledger) -> RowCounts:
    """Trained rows that the producer doesn't list count as doubled: they belong to another part of the line."""
    return RowCounts(ledger.rows, ledger.trained_once, ledger.lost, ledger.doubled + ledger.unlisted)
