"""Runs survive being cut, thinned and joined: each row keeps its position, and all positions stay covered."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tidemill.data.intervals import IntervalSet
from tidemill.data.rebatch import BatchRule, Rebatcher
from tidemill.data.split import RawBatch, Run, SplitId, join_runs, keep_rows, positions

A, B = SplitId("kafka", "clicks:0"), SplitId("kafka", "clicks:1")


@st.composite
def raw_batches(draw):
    """Batches of two splits, with gaps, strides and runs without rows; a row's value is (split, position)."""
    ends = {A: 0, B: 0}
    batches = []
    for _ in range(draw(st.integers(1, 4))):
        runs = []
        for _ in range(draw(st.integers(1, 3))):
            split, gap, rows, stride = draw(
                st.tuples(st.sampled_from([A, B]), st.integers(0, 3), st.integers(0, 6), st.integers(1, 4))
            )
            start = ends[split]
            ends[split] = stop = start + gap + rows * stride + (0 if rows else draw(st.integers(0, 2)))
            if stop > start:
                runs.append(Run(split, start, stop, rows, stride, gap if rows else stop - start))
        values = [f"{run.split.name}@{p}" for run in runs for p in positions(run)]
        times = np.array([float(v.rpartition("@")[2]) for v in values])
        runs = [
            Run(r.split, r.start, r.stop, r.rows, r.stride, r.gap, float(positions(r).max()) if r.rows else np.nan) for r in runs
        ]
        batches.append(RawBatch(pa.table({"at": pa.array(values, pa.string())}), tuple(runs), times, times))
    return batches


def labels(runs):
    return [f"{run.split.name}@{p}" for run in runs for p in positions(run)]


def covered(runs):
    return {split: IntervalSet.of((r.start, r.stop) for r in runs if r.split == split) for split in (A, B)}


def consistent(table, runs, times=None):
    assert table.column("at").to_pylist() == labels(runs)
    for run in runs:
        assert run.stop >= run.start + run.gap + max(run.rows - 1, 0) * run.stride + (1 if run.rows else 0)
        np.testing.assert_equal(run.event_time, float(positions(run).max()) if run.rows else np.nan)


@given(raw_batches(), st.integers(1, 7))
def test_rebatching_keeps_rows_positions_and_cover(batches, size):
    rebatcher = Rebatcher(BatchRule(size))
    for batch in batches:
        rebatcher.add(batch, at=0.0)
    rows, runs, sizes = [], [], []
    while rebatcher.num_rows:
        table, provenance = rebatcher.cut(size)
        consistent(table, provenance.runs)
        assert provenance.num_rows == table.num_rows
        assert provenance.newest_arrival == max(float(v.rpartition("@")[2]) for v in table.column("at").to_pylist())
        rows += table.column("at").to_pylist()
        runs += provenance.runs
        sizes.append(table.num_rows)
    given_runs = [run for batch in batches for run in batch.runs]
    assert rows == labels(given_runs)
    assert all(count == size for count in sizes[:-1])
    if rows:
        assert covered(runs) == covered(given_runs)


@given(raw_batches(), st.data())
def test_dropped_rows_stay_covered(batches, data):
    for batch in batches:
        keep = np.array(data.draw(st.lists(st.booleans(), min_size=batch.num_rows, max_size=batch.num_rows)), dtype=bool)
        kept = keep_rows(batch, keep)
        consistent(kept.table, kept.runs)
        assert kept.event_time.tolist() == batch.event_time[keep].tolist()
        assert covered(kept.runs) == covered(batch.runs)


@given(raw_batches())
def test_joining_changes_nothing_but_the_number_of_runs(batches):
    runs = [run for batch in batches for run in batch.runs]
    joined = join_runs(runs)
    assert labels(joined) == labels(runs)
    assert covered(joined) == covered(runs)


def test_consecutive_one_row_messages_become_one_run():
    step = 1 << 20
    runs = [Run(A, i * step, (i + 1) * step, 1, step, 0, float(i)) for i in range(5)]
    assert join_runs(runs) == (Run(A, 0, 5 * step, 5, step, 0, 4.0),)
