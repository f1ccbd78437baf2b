"""Splits, runs of rows, and batches that know where their rows came from (D3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa

T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=True)
class SplitId:
    """The stable identity of an independently readable part: `kind` of the source and a name ("clicks:3", a file's path)."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Split:
    """A split as discovered. `num_rows` None: unbounded. `fingerprint`: what must not change between runs.

    `in_turn`: every rank reads a share of it before any of them goes on to the next split.
    """

    id: SplitId
    num_rows: int | None
    fingerprint: dict[str, Any] = field(default_factory=dict)
    in_turn: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of one split inside a batch.

    Covers positions [start, stop). Row k (0 <= k < rows) lies at `start + gap + k * stride`; its own positions end where the next
    row's begin. `gap` positions at the front hold no row (dropped, compacted, poisoned), but are done with once the run is trained.
    Files: stride 1, positions are row numbers. Kafka: see `data.sources.kafka`.
    `event_time`: the largest among the run's rows, NaN if it has none.
    """

    split: SplitId
    start: int
    stop: int
    rows: int
    stride: int = 1
    gap: int = 0
    event_time: float = float("nan")


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """Where each row of a shuffled raw batch lies. `index`: (n,) int32, into `splits`; `positions`: (n,) int64."""

    splits: tuple[SplitId, ...]
    index: np.ndarray
    positions: np.ndarray

    def rows(self, start: int, stop: int | None) -> Scatter:
        """Rows [start, stop) only."""
        return Scatter(self.splits, self.index[start:stop], self.positions[start:stop])


@dataclass(frozen=True, slots=True, eq=False)
class Scattered:
    """Shuffled rows of one split inside a batch: as arrays, since runs of them would be about as many as rows.

    `rows`: (n,) int64, ascending, which rows of the batch they are; `positions`: (n,) int64, where each of them lies.
    `event_time`: the largest among them, NaN if there is none.
    """

    split: SplitId
    rows: np.ndarray
    positions: np.ndarray
    event_time: float

    def spans(self) -> tuple[np.ndarray, np.ndarray]:
        """The positions as sorted intervals: (starts, stops)."""
        return spans(self.positions)


def spans(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct positions, at least one, in any order as sorted intervals: (starts, stops)."""
    ordered = np.sort(numbers)
    edges = np.flatnonzero(np.diff(ordered) != 1)
    return ordered[np.append(0, edges + 1)], ordered[np.append(edges, len(ordered) - 1)] + 1


@dataclass(frozen=True, slots=True)
class RawBatch:
    """Rows as read: a table, the runs that its rows came in (in row order; sum of `rows` = table rows), and event times.

    `event_time`: (num_rows,) float64 Unix seconds, NaN where a row has none; None: the source has no event time.
    `arrived_at`: the same shape, when the source took the row in (broker timestamp); None if unknown.
    `scatter`: the rows are shuffled and lie there; `runs` then hold no row.
    """

    table: pa.Table
    runs: tuple[Run, ...]
    event_time: np.ndarray | None = None
    arrived_at: np.ndarray | None = None
    scatter: Scatter | None = None

    @property
    def num_rows(self) -> int:
        return self.table.num_rows


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the rows of one delivered batch came from, and the times that the loop needs; no Python object per row.

    `scattered`: the rows of a shuffled batch; its `runs` then hold no row. `event_time`: (num_rows,) as in RawBatch.
    """

    runs: tuple[Run, ...]
    num_rows: int
    newest_arrival: float | None = None
    scattered: tuple[Scattered, ...] = ()
    event_time: np.ndarray | None = field(default=None, compare=False, repr=False)

    def parts(self) -> Iterator[tuple[SplitId, int, float]]:
        """(split, how many positions are done with, largest event time) of each run, and of each split's shuffled rows."""
        for run in self.runs:
            yield run.split, run.stop - run.start, run.event_time
        for rows in self.scattered:
            yield rows.split, len(rows.positions), rows.event_time

    def places(self) -> str:
        """Where the batch's rows lie, in short, for a message."""
        places = [f"{run.split} [{run.start}, {run.stop})" for run in self.runs]
        places += [f"{r.split}, {len(r.positions)} rows of [{r.positions.min()}, {r.positions.max()}]" for r in self.scattered]
        return ", ".join(places[:3])

    def locate(self, row: int) -> tuple[SplitId, int]:
        """Split and position of one row of the batch. Raises IndexError if it has no such row."""
        before = 0
        for run in self.runs:
            if before <= row < before + run.rows:
                return run.split, run.start + run.gap + (row - before) * run.stride
            before += run.rows
        for rows in self.scattered:
            at = int(np.searchsorted(rows.rows, row))
            if at < len(rows.rows) and rows.rows[at] == row:
                return rows.split, int(rows.positions[at])
        raise IndexError(f"a batch of {self.num_rows} rows has no row {row}")


@dataclass(frozen=True, slots=True)
class Delivery(Generic[T]):
    """One batch for one training step: its provenance and what the transform made of its rows.

    `is_last`: nothing follows it in this pass.
    """

    provenance: Provenance
    payload: T
    is_last: bool = False


def cut_runs(runs: Sequence[Run], rows: int, event_time: np.ndarray | None) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Split runs behind the first `rows` rows. Both halves' event times are recomputed from `event_time` (all rows of `runs`)."""
    head: list[Run] = []
    tail: list[Run] = []
    first = 0
    for run in runs:
        take = min(run.rows, rows - first)
        if take == run.rows and not (tail and run.rows == 0):
            head.append(run)
        elif take <= 0:
            tail.append(run)
        else:
            middle = run.start + run.gap + take * run.stride
            times = None if event_time is None else event_time[first : first + run.rows]
            head.append(Run(run.split, run.start, middle, take, run.stride, run.gap, largest(times, 0, take)))
            tail.append(Run(run.split, middle, run.stop, run.rows - take, run.stride, 0, largest(times, take, run.rows)))
        first += run.rows
    return tuple(head), tuple(tail)


def split_rows(batch: RawBatch, rows: int) -> tuple[RawBatch, RawBatch]:
    """A batch's first `rows` rows, and the others. Of a shuffled one, runs without rows go with the first."""
    times, arrivals, scatter = batch.event_time, batch.arrived_at, batch.scatter
    head, tail = (batch.runs, ()) if scatter else cut_runs(batch.runs, rows, times)
    return (
        RawBatch(
            batch.table.slice(0, rows),
            head,
            None if times is None else times[:rows],
            None if arrivals is None else arrivals[:rows],
            scatter.rows(0, rows) if scatter else None,
        ),
        RawBatch(
            batch.table.slice(rows),
            tail,
            None if times is None else times[rows:],
            None if arrivals is None else arrivals[rows:],
            scatter.rows(rows, None) if scatter else None,
        ),
    )


def scattered_rows(pieces: Sequence[RawBatch]) -> tuple[Scattered, ...]:
    """The shuffled rows of pieces that follow each other in one batch, by split."""
    found: dict[SplitId, list[tuple[np.ndarray, np.ndarray, float]]] = {}
    before = 0
    for piece in pieces:
        if piece.scatter is not None:
            for number, rows in _by_value(piece.scatter.index):
                times = None if piece.event_time is None else piece.event_time[rows]
                part = (rows + before, piece.scatter.positions[rows], largest(times, 0, len(rows)))
                found.setdefault(piece.scatter.splits[number], []).append(part)
        before += piece.num_rows
    return tuple(
        Scattered(
            split,
            np.concatenate([rows for rows, _, _ in parts]),
            np.concatenate([at for _, at, _ in parts]),
            float(np.fmax.reduce([time for _, _, time in parts])),
        )
        for split, parts in found.items()
    )


def _by_value(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each value, with the ascending indices at which it stands. A block may hold rows of very many small files."""
    order = np.argsort(values, kind="stable")
    edges = np.flatnonzero(np.diff(values[order])) + 1
    for rows in np.split(order, edges):
        if len(rows):
            yield int(values[rows[0]]), rows


def join_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same rows and positions in as few runs as their form allows; the order of rows stays."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is None or last.split != run.split or last.stop != run.start:
            joined.append(run)
        elif last.rows == 0:
            joined[-1] = replace(run, start=last.start, gap=run.gap + run.start - last.start)
        elif run.gap == 0 and run.stride == last.stride and run.start == last.start + last.gap + last.rows * last.stride:
            time = float(np.fmax(last.event_time, run.event_time))
            joined[-1] = replace(last, stop=run.stop, rows=last.rows + run.rows, event_time=time)
        else:
            joined.append(run)
    return tuple(joined)


def with_event_time(batch: RawBatch, event_time: np.ndarray) -> RawBatch:
    """A batch with other event times, in its runs too."""
    runs: list[Run] = []
    first = 0
    for run in batch.runs:
        runs.append(replace(run, event_time=largest(event_time, first, first + run.rows)))
        first += run.rows
    return replace(batch, runs=tuple(runs), event_time=event_time)


def positions(run: Run) -> np.ndarray:
    """(rows,) int64: where each row of a run lies."""
    return run.start + run.gap + run.stride * np.arange(run.rows, dtype=np.int64)


def keep_rows(batch: RawBatch, keep: np.ndarray) -> RawBatch:
    """A batch without the rows whose `keep` is False; their positions are still covered by its runs."""
    if keep.all():
        return batch
    runs: list[Run] = []
    first = 0
    for run in batch.runs:
        times = None if batch.event_time is None else batch.event_time[first : first + run.rows]
        runs.extend(_thin(run, keep[first : first + run.rows], times))
        first += run.rows
    return RawBatch(
        batch.table.filter(pa.array(keep)),
        join_runs(runs),
        None if batch.event_time is None else batch.event_time[keep],
        None if batch.arrived_at is None else batch.arrived_at[keep],
    )


def _thin(run: Run, keep: np.ndarray, event_time: np.ndarray | None) -> list[Run]:
    """The stretches of a run's rows that are kept, each with the dropped ones before it as its gap; then what is left over."""
    edges = np.flatnonzero(np.diff(keep.astype(np.int8), prepend=0, append=0)).tolist()
    first = run.start + run.gap
    thinned: list[Run] = []
    start = run.start
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        stop = run.stop if end == run.rows else first + end * run.stride
        gap = first + begin * run.stride - start
        thinned.append(Run(run.split, start, stop, end - begin, run.stride, gap, largest(event_time, begin, end)))
        start = stop
    if start < run.stop:
        thinned.append(Run(run.split, start, run.stop, 0, run.stride, run.stop - start))
    return thinned


def largest(event_time: np.ndarray | None, start: int, stop: int) -> float:
    """The largest event time among rows [start, stop), NaN if there is none."""
    if event_time is None or stop <= start:
        return float("nan")
    rows = event_time[start:stop]
    finite = rows[~np.isnan(rows)]
    return float(finite.max()) if len(finite) else float("nan")
