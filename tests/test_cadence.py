"""The agreement's pure decisions: quorum, precedence, rounds, triggers (D1, D2)."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cadence import (
    NO_BATCH,
    EventTimeCrossing,
    EverySeconds,
    EverySteps,
    RankReport,
    StopReason,
    SyncPoint,
    agree,
    quorum,
)
from tidemill.clock import EventTime


def report(**fields) -> RankReport:
    given_fields = {"event_time": None, "abstains": False, "stop": StopReason.NONE, "writer_ready": True, "weights": (1.0,)}
    return RankReport(**{**given_fields, **fields})


def point(reports, *, first_step=0, share=1.0, watermark=None, max_steps=8) -> SyncPoint:
    return agree(reports, number=0, first_step=first_step, share=share, watermark=watermark, max_steps=max_steps)


@pytest.mark.parametrize(("share", "expected"), [(0.2, 50), (0.21, 40), (0.5, 30), (0.6, 30), (1.0, 10), (1e-12, 50)])
def test_quorum_is_the_largest_time_that_enough_ranks_reached(share, expected):
    """DCL 9.16."""
    assert quorum([10.0, 20.0, 30.0, 40.0, 50.0], [False] * 5, share) == expected


def test_a_rank_that_has_not_reached_counts_against_the_quorum():
    assert quorum([1000.0, None], [False, False], 0.5) == 1000.0
    assert quorum([1000.0, None], [False, False], 1.0) is None
    assert quorum([1000.0, None, None], [False] * 3, 0.5) is None


def test_an_abstaining_rank_does_not_count():
    assert quorum([1000.0, None], [False, True], 1.0) == 1000.0
    assert quorum([None, None], [True, True], 1.0) is None


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e9)), min_size=1, max_size=8), st.floats(0.01, 1.0))
def test_quorum_against_its_definition(values, share):
    k = min(max(math.ceil(share * len(values) - 1e-9), 1), len(values))
    candidates = [t for t in values if t is not None and sum(1 for v in values if v is not None and v >= t) >= k]
    assert quorum(values, [False] * len(values), share) == (max(candidates) if candidates else None)


def test_the_watermark_never_goes_back_and_stays_when_all_abstain():
    assert point([report(event_time=5.0)], watermark=EventTime(9.0)).watermark == 9.0
    assert point([report(abstains=True)], watermark=EventTime(9.0)).watermark == 9.0
    assert point([report(event_time=12.0)], watermark=EventTime(9.0)).watermark == 12.0


@given(
    st.builds(
        report,
        event_time=st.one_of(st.none(), st.floats(-1e9, 1e9)),
        abstains=st.booleans(),
        stop=st.sampled_from(StopReason),
        writer_ready=st.booleans(),
        weights=st.lists(st.floats(-1, 1e6), min_size=1, max_size=4).map(tuple),
        clock=st.floats(0, 1e10),
        handover=st.booleans(),
        settled_cut=st.integers(0, 2**40),
        settled_cut_ok=st.booleans(),
    )
)
def test_a_report_survives_the_wire(one):
    assert RankReport.from_array(one.to_array()) == one
    assert one.to_array().dtype == np.float64


def test_urgent_reasons_stop_all_ranks_as_soon_as_one_reports_them():
    for stop in (StopReason.FAILED, StopReason.PREEMPTED, StopReason.HANDED_OVER):
        assert point([report(), report(stop=stop)]).stop is stop
    assert point([report(handover=True), report()]).stop is StopReason.HANDED_OVER
    assert point([report(), report(handover=True)]).stop is StopReason.NONE, "the verdict is rank 0's alone"


def test_exhausted_only_when_every_rank_is():
    assert point([report(stop=StopReason.EXHAUSTED), report()]).stop is StopReason.NONE
    assert point([report(stop=StopReason.EXHAUSTED)] * 2).stop is StopReason.EXHAUSTED


def test_precedence():
    order = [StopReason.EXHAUSTED, StopReason.PREEMPTED, StopReason.HANDED_OVER, StopReason.FAILED]
    for lower, higher in pairwise(order):
        assert point([report(stop=lower), report(stop=higher)]).stop is higher


def test_steps_of_a_round_are_the_largest_count_in_hand_up_to_the_limit():
    reports = [report(weights=(4.0, 4.0, NO_BATCH)), report(weights=(2.0, NO_BATCH, NO_BATCH))]
    assert point(reports).weights == (6.0, 4.0)
    assert point(reports, max_steps=1).weights == (6.0,)
    assert point([report(weights=(NO_BATCH,) * 3)] * 2).weights == ()


def test_a_batch_of_weight_zero_is_done_with_but_is_no_step():
    decided = point([report(weights=(3.0, 0.0, 2.0))], first_step=10)
    assert decided.weights == (3.0, 0.0, 2.0)
    assert decided.last_step == 12


def sync(step: int = 0, clock: float = 0.0, watermark: float | None = None) -> SyncPoint:
    mark = None if watermark is None else EventTime(watermark)
    return SyncPoint(0, step, (), StopReason.NONE, mark, clock, True, 0, False, 0, False)


def test_every_steps_fires_once_per_multiple_whatever_the_round_skips():
    trigger = EverySteps(10)
    assert not trigger.due(sync(9))
    assert trigger.due(sync(10))
    trigger.fired(sync(10))
    assert not trigger.due(sync(19))
    assert trigger.due(sync(23))
    assert EverySteps(10, start=23).due(sync(29)) is False
    assert [trigger.steps_to_next(step) for step in (0, 1, 9, 10)] == [10, 9, 1, 10]


def test_every_seconds_takes_a_reference_first_and_survives_a_clock_set_back():
    trigger = EverySeconds(5.0)
    assert not trigger.due(sync(clock=100.0))
    assert trigger.due(sync(clock=105.0))
    trigger.fired(sync(clock=105.0))
    assert not trigger.due(sync(clock=20.0))
    assert trigger.due(sync(clock=25.0))


def test_event_time_crossing_by_bucket_and_target():
    """DCL 9.16."""
    trigger = EventTimeCrossing(interval_s=100.0, targets=[450.0])
    assert not trigger.due(sync(watermark=None))
    assert not trigger.due(sync(watermark=399.0)), "the first value only sets the reference"
    assert trigger.due(sync(watermark=401.0))
    trigger.fired(sync(watermark=401.0))
    assert not trigger.due(sync(watermark=449.9))
    assert trigger.due(sync(watermark=450.0)), "a target is inclusive on the right"
    trigger.fired(sync(watermark=460.0))
    assert not trigger.due(sync(watermark=410.0)), "a watermark that fell back changes nothing"
    assert not EventTimeCrossing(interval_s=100.0, reference=460.0).due(sync(watermark=470.0))
    assert EventTimeCrossing(interval_s=100.0, reference=460.0).due(sync(watermark=500.0))
