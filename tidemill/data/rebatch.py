"""Cuts a stream of raw batches of any size into batches of so many rows, or of so much cost."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidemill.data.split import Provenance, RawBatch, Run, join_runs, scattered_rows, split_rows
from tidemill.errors import DataError, SchemaError


@dataclass(frozen=True, slots=True)
class BatchRule:
    """What fills a batch: `size` rows, or rows whose cost in `cost_column` sums to `max_cost`, whichever comes first.

    `drop_remainder`: what is left at the end and doesn't fill a batch isn't delivered.
    """

    size: int
    cost_column: str = ""
    max_cost: float = math.inf
    drop_remainder: bool = False


class Rebatcher:
    """Rows in, rows out, in order. Not thread-safe.

    Where batches end depends on the rows alone, not on how they were handed in. Runs without rows stay behind the rows they
    follow and leave with them; they never make a batch of their own.
    """

    def __init__(self, rule: BatchRule) -> None:
        self._rule = rule
        self._pieces: deque[tuple[RawBatch, float]] = deque()
        self._costs = np.empty(0)
        self.num_rows = 0
        self.oversized = 0
        """Batches of one row that alone costs more than `max_cost`."""

    @property
    def waiting_since(self) -> float | None:
        """When the oldest row here came in; None if there is none."""
        return next((at for piece, at in self._pieces if piece.num_rows), None)

    def add(self, batch: RawBatch, *, at: float) -> None:
        """Take a raw batch in. `at`: monotonic seconds. Raises DataError for a cost that isn't a number >= 0."""
        if self._rule.cost_column and batch.num_rows:
            self._costs = np.concatenate([self._costs, _costs(batch, self._rule.cost_column)])
        if batch.runs or batch.num_rows:
            self._pieces.append((batch, at))
            self.num_rows += batch.num_rows

    def next_size(self, start: int = 0) -> tuple[int, bool]:
        """(rows of the batch that begins at row `start`, whether it is full). One that isn't may grow with what comes."""
        rows = min(self.num_rows - start, self._rule.size)
        if not self._rule.cost_column or rows == 0:
            return rows, rows == self._rule.size
        fitting = int(np.searchsorted(np.cumsum(self._costs[start : start + rows]), self._rule.max_cost, side="right"))
        return max(fitting, 1), fitting < rows or rows == self._rule.size

    def full_sizes(self, *, is_end: bool) -> list[int]:
        """The sizes of the batches to cut now from a bounded source: those of which it is certain that another one follows, or,
        at the end, all that are to be delivered."""
        sizes: list[int] = []
        start = 0
        while start < self.num_rows:
            size, full = self.next_size(start)
            if not full and (self._rule.drop_remainder or not is_end):
                break
            sizes.append(size)
            start += size
        if not is_end and sizes and (self._rule.drop_remainder or start == self.num_rows):
            sizes.pop()
        return sizes

    def take_empty(self) -> tuple[Run, ...]:
        """The runs that are here, if none of them holds a row: such positions are done with, and needn't wait for one."""
        if self.num_rows:
            return ()
        runs = join_runs(run for piece, _ in self._pieces for run in piece.runs)
        self._pieces.clear()
        return runs

    def cut(self, size: int) -> tuple[pa.Table, Provenance]:
        """The first `size` rows, or all if there are fewer, with the runs they came in."""
        taken: list[RawBatch] = []
        rows = 0
        while self._pieces and (rows < size or self._pieces[0][0].num_rows == 0):
            piece, at = self._pieces.popleft()
            if rows + piece.num_rows > size:
                piece, rest = split_rows(piece, size - rows)
                self._pieces.appendleft((rest, at))
            taken.append(piece)
            rows += piece.num_rows
        self.num_rows -= rows
        if self._rule.cost_column:
            self.oversized += rows == 1 and bool(self._costs[0] > self._rule.max_cost)
            self._costs = self._costs[rows:]
        tables = [piece.table for piece in taken if piece.num_rows] or [taken[0].table]
        runs = join_runs(run for piece in taken for run in piece.runs)
        return pa.concat_tables(tables), Provenance(runs, rows, _newest(taken), scattered_rows(taken), _times(taken))


def _costs(batch: RawBatch, name: str) -> np.ndarray:
    """(num_rows,) float64: what each row costs."""
    if name not in batch.table.column_names:
        raise SchemaError(f"{_place(batch, 0)}: no column {name!r} with the cost of a row (data_config.sample_cost_field)")
    column = batch.table.column(name)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise SchemaError(f"{_place(batch, 0)}: cost column {name!r} is of type {column.type}; it must hold numbers")
    costs = column.cast(pa.float64(), safe=False).to_numpy()
    bad = np.flatnonzero(~(costs >= 0) | np.isinf(costs))
    if len(bad):
        row = int(bad[0])
        raise DataError(f"{_place(batch, row)}: cost {name!r} is {column[row].as_py()!r}; it must be a number, and not negative")
    return costs


def _place(batch: RawBatch, row: int) -> str:
    split, position = Provenance(batch.runs, batch.num_rows, None, scattered_rows([batch])).locate(row)
    return f"{split}, row {position}"


def _times(pieces: list[RawBatch]) -> np.ndarray | None:
    times = [piece.event_time for piece in pieces if piece.event_time is not None and piece.num_rows]
    return np.concatenate(times) if times else None


def _newest(pieces: list[RawBatch]) -> float | None:
    arrivals = [piece.arrived_at for piece in pieces if piece.arrived_at is not None and piece.num_rows]
    if not arrivals:
        return None
    newest = float(np.fmax.reduce(np.concatenate(arrivals)))
    return None if np.isnan(newest) else newest
