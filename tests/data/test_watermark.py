"""One rank's event time."""

import math

import numpy as np
import pytest

from tidemill.data.event_times import usable
from tidemill.data.split import Provenance, Run, SplitId
from tidemill.data.watermark import Watermark

A, B = SplitId("kafka", "clicks:0"), SplitId("kafka", "clicks:1")


def at(split, time):
    return Provenance((Run(split, 0, 1, 1, event_time=time),), 1)


def never(split):
    return False


def test_minimum_over_partitions_of_the_largest_trained():
    mark = Watermark([A, B])
    for split, time in ((A, 10.0), (A, 8.0), (B, 5.0)):
        mark.advance(at(split, time))
    assert mark.report([], never) == (5.0, False)


def test_partition_without_time_counts_as_not_reached():
    mark = Watermark([A, B])
    mark.advance(at(A, 10.0))
    mark.advance(at(B, math.nan))
    assert mark.report([], never) == (None, False)


def test_idle_partition_doesnt_hold_it_back_and_never_pulls_it_back():
    mark = Watermark([A, B])
    mark.advance(at(A, 10.0))
    assert mark.report([], lambda split: split == B) == (10.0, False)
    mark.advance(at(B, 4.0))
    assert mark.report([], never) == (10.0, False)


def test_abstains_when_all_are_idle_or_none_is_here():
    mark = Watermark([A])
    mark.advance(at(A, 10.0))
    assert mark.report([], never) == (10.0, False)
    assert mark.report([], lambda split: True) == (10.0, True)
    assert Watermark([]).report([], never) == (None, True)


def test_batches_in_hand_count_for_the_coming_round_but_arent_trained():
    mark = Watermark([A, B], reached={A: 1.0, B: 1.0})
    assert mark.report([at(A, 20.0), at(B, 10.0)], lambda split: True) == (10.0, False)
    assert Watermark([A], reached={A: 3.0}).report([at(A, 2.0)], never) == (3.0, False)


def test_resumes_where_it_was():
    mark = Watermark([A, B], reached={A: 10.0, B: 7.0, SplitId("kafka", "other:0"): 1.0}, value=8.0)
    assert mark.report([], never) == (8.0, False)


@pytest.mark.parametrize("time", [math.inf, -math.inf, 1.7e12, 2_000.0])
def test_times_that_cant_be_true_are_refused(time):
    times, refused = usable(np.array([1_000.0, time, math.nan]), 1_500.0)
    assert refused == 1
    np.testing.assert_array_equal(times, [1_000.0, math.nan, math.nan])


def test_a_file_read_to_its_end_holds_nothing_back():
    """The daily job's data time is the end of its day, not the end of its earliest file."""
    mark = Watermark([A, B], left={A: 1, B: 2})
    assert mark.report([], never) == (None, False)
    mark.advance(at(A, 10.0))
    assert mark.report([], never) == (None, False), "B has not begun"
    mark.advance(at(B, 20.0))
    assert mark.report([], never) == (20.0, False), "A is done, B is under way"
    assert mark.report([at(B, 30.0)], never) == (30.0, False)
    mark.advance(at(B, 30.0))
    assert mark.report([], never) == (30.0, False), "all done: the largest"


def test_files_read_in_any_order_have_no_time_before_their_ends():
    mark = Watermark([A, B], left={A: 2, B: 1}, in_order=False)
    for split, time in ((A, 30.0), (B, 20.0)):
        mark.advance(at(split, time))
        assert mark.report([], never) == (None, False), "an earlier row of A may still come"
    assert mark.report([at(A, 10.0)], never) == (30.0, False)
