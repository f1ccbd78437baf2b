"""Cuts a stream of raw batches of any size into batches of exactly so many rows."""

from __future__ import annotations

from collections import deque

import numpy as np
import pyarrow as pa

from tidemill.data.split import Provenance, RawBatch, cut_runs, join_runs


class Rebatcher:
    """Rows in, rows out, in order. Not thread-safe.

    Runs without rows stay behind the rows they follow and leave with them; they never make a batch of their own.
    """

    def __init__(self) -> None:
        self._pieces: deque[tuple[RawBatch, float]] = deque()
        self.num_rows = 0

    @property
    def waiting_since(self) -> float | None:
        """When the oldest row here came in; None if there is none."""
        return next((at for piece, at in self._pieces if piece.num_rows), None)

    def add(self, batch: RawBatch, *, at: float) -> None:
        """Take a raw batch in. `at`: monotonic seconds."""
        if batch.runs:
            self._pieces.append((batch, at))
            self.num_rows += batch.num_rows

    def cut(self, size: int) -> tuple[pa.Table, Provenance]:
        """The first `size` rows, or all if there are fewer, with the runs they came in."""
        taken: list[RawBatch] = []
        rows = 0
        while self._pieces and (rows < size or self._pieces[0][0].num_rows == 0):
            piece, at = self._pieces.popleft()
            if rows + piece.num_rows > size:
                piece, rest = _split(piece, size - rows)
                self._pieces.appendleft((rest, at))
            taken.append(piece)
            rows += piece.num_rows
        self.num_rows -= rows
        tables = [piece.table for piece in taken if piece.num_rows] or [taken[0].table]
        runs = join_runs(run for piece in taken for run in piece.runs)
        return pa.concat_tables(tables), Provenance(runs, rows, _newest(taken))


def _split(batch: RawBatch, rows: int) -> tuple[RawBatch, RawBatch]:
    head, tail = cut_runs(batch.runs, rows, batch.event_time)
    times, arrivals = batch.event_time, batch.arrived_at
    return (
        RawBatch(batch.table.slice(0, rows), head, _slice(times, 0, rows), _slice(arrivals, 0, rows)),
        RawBatch(batch.table.slice(rows), tail, _slice(times, rows, None), _slice(arrivals, rows, None)),
    )


def _slice(values: np.ndarray | None, start: int, stop: int | None) -> np.ndarray | None:
    return None if values is None else values[start:stop]


def _newest(pieces: list[RawBatch]) -> float | None:
    arrivals = [piece.arrived_at for piece in pieces if piece.arrived_at is not None and piece.num_rows]
    if not arrivals:
        return None
    newest = float(np.fmax.reduce(np.concatenate(arrivals)))
    return None if np.isnan(newest) else newest
