from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidemill.publish.tracker import TouchedRows


def shard(table: str, start: int, stop: int) -> SimpleNamespace:
    return SimpleNamespace(table=table, row_start=start, row_stop=stop, weight=torch.zeros(stop - start, 1), optimizer={})


def test_rows_are_taken_once_sorted_and_without_repeats():
    touched = TouchedRows([shard("a", 10, 20), shard("b", 0, 5)])
    touched.mark("a", torch.tensor([7, 2, 7, 2]))
    touched.mark("a", np.array([3]))
    taken = touched.take()
    assert list(taken) == ["a"]
    assert taken["a"].tolist() == [2, 3, 7]
    assert taken["a"].dtype == np.int64
    touched.acknowledge()
    assert touched.take() == {}


def test_rows_in_flight_come_back_with_those_touched_meanwhile():
    touched = TouchedRows([shard("a", 10, 20)])
    touched.mark("a", np.array([1, 2]))
    touched.take()
    touched.mark("a", np.array([2, 5]))
    assert touched.count() == 2
    assert touched.state()["a"].tolist() == [11, 12, 15]
    touched.put_back()
    assert touched.take()["a"].tolist() == [1, 2, 5]


def test_acknowledging_keeps_what_was_touched_meanwhile():
    touched = TouchedRows([shard("a", 10, 20)])
    touched.mark("a", np.array([1, 2]))
    touched.take()
    touched.mark("a", np.array([2]))
    touched.acknowledge()
    assert touched.state()["a"].tolist() == [12]


def test_a_second_take_before_the_first_is_settled_is_a_bug():
    touched = TouchedRows([shard("a", 0, 3)])
    touched.take()
    with pytest.raises(RuntimeError, match="in flight"):
        touched.take()


def test_two_ranges_of_one_table_on_a_rank_are_refused():
    with pytest.raises(ValueError, match="one row range"):
        TouchedRows([shard("a", 0, 3), shard("a", 6, 9)])


def test_global_ids_of_other_ranks_and_tables_are_ignored():
    touched = TouchedRows([shard("a", 10, 20)])
    touched.mark_global("a", np.array([9, 10, 19, 20, -1]))
    touched.mark_global("z", np.array([11]))
    assert touched.state()["a"].tolist() == [10, 19]


@given(
    rows=st.sets(st.integers(0, 49)),
    later=st.sets(st.integers(0, 49)),
    ranks=st.integers(1, 4),
    new_ranks=st.integers(1, 4),
)
def test_state_survives_another_number_of_ranks(rows, later, ranks, new_ranks):
    old = [TouchedRows([shard("a", *bounds)]) for bounds in _ranges(ranks)]
    for touched in old:
        touched.mark_global("a", np.array(sorted(rows), np.int64))
        touched.take()
        touched.mark_global("a", np.array(sorted(later), np.int64))
    new = [TouchedRows([shard("a", *bounds)]) for bounds in _ranges(new_ranks)]
    for touched in new:
        touched.load_state([each.state() for each in old])
    found = [touched.state().get("a", np.empty(0, np.int64)) for touched in new]
    assert np.concatenate(found).tolist() == sorted(rows | later)


def _ranges(ranks: int) -> list[tuple[int, int]]:
    step = -(-50 // ranks)
    return [(min(rank * step, 50), min((rank + 1) * step, 50)) for rank in range(ranks)]
