"""Interval sets agree with sets of numbers."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidemill.data.intervals import IntervalSet

pairs = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda p: (p[0], p[0] + p[1])), max_size=6)


def members(intervals: IntervalSet) -> set[int]:
    return {position for start, stop in intervals for position in range(start, stop)}


def well_formed(intervals: IntervalSet) -> bool:
    edges = [edge for pair in intervals for edge in pair]
    return all(a < b for a, b in pairwise(edges))


@given(pairs, pairs)
def test_algebra_is_that_of_sets(one, other):
    a, b = IntervalSet.of(one), IntervalSet.of(other)
    for result, expected in ((a | b, members(a) | members(b)), (a - b, members(a) - members(b)), (a & b, members(a) & members(b))):
        assert members(result) == expected
        assert well_formed(result)


@given(pairs, st.integers(0, 50), st.integers(0, 50))
def test_slice_takes_by_rank(one, first, stop):
    intervals = IntervalSet.of(one)
    taken = intervals.slice(first, stop)
    assert members(taken) == set(sorted(members(intervals))[first:stop])
    assert well_formed(taken)


@given(pairs)
def test_holds_and_contains_tell_members(one):
    intervals = IntervalSet.of(one)
    expected = [position in members(intervals) for position in range(60)]
    assert intervals.holds(np.arange(60)).tolist() == expected
    assert [position in intervals for position in range(60)] == expected


@given(pairs, st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=30))
def test_adding_many_is_the_union(one, many):
    one = IntervalSet.of(one)
    added = [(start, start + size) for start, size in many]
    starts, stops = (np.array([pair[i] for pair in added], dtype=np.int64) for i in range(2))
    assert one.add_many(starts, stops) == one | IntervalSet.of(added)


@given(pairs)
def test_ranks_count_the_smaller_members(one):
    one = IntervalSet.of(one)
    members = np.array([position for start, stop in one for position in range(start, stop)], dtype=np.int64)
    if len(members):
        assert one.ranks(members).tolist() == list(range(len(members)))
