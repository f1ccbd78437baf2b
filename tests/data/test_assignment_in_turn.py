"""Splits that are read in turn: every rank gets a share of each, and all reach the next one at the same step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.data.assignment import assign
from tidemill.data.intervals import NOTHING, IntervalSet
from tidemill.data.split import Split, SplitId


@given(rows=st.lists(st.integers(0, 40), min_size=1, max_size=6), world_size=st.integers(1, 8), data=st.data())
def test_each_row_is_dealt_once_and_ranks_keep_step(rows: list[int], world_size: int, data: st.DataObject):
    splits = [Split(SplitId("maxcompute", f"p{number}"), count, in_turn=True) for number, count in enumerate(rows)]
    done = {
        split.id: IntervalSet.of([sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))])  # type: ignore[list-item]
        for split, count in zip(splits, rows, strict=True)
    }
    dealt = [{part.split.id: part.remaining for part in assign(splits, done, world_size, rank)} for rank in range(world_size)]
    totals = [0] * world_size
    for split in splits:
        left = IntervalSet.of([(0, split.num_rows or 0)]) - done[split.id]
        parts = [of_rank.get(split.id) or NOTHING for of_rank in dealt]
        assert IntervalSet.of([pair for part in parts for pair in part]) == left
        assert sum(part.count() for part in parts) == left.count()
        totals = [total + part.count() for total, part in zip(totals, parts, strict=True)]
        assert max(totals) - min(totals) <= 1
