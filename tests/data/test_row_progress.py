"""Progress: advanced by what was trained, merged, saved, verified."""

import math

import pytest

from tidemill.contracts.progress import SplitState
from tidemill.data.intervals import IntervalSet
from tidemill.data.progress import Progress, verify_splits
from tidemill.data.split import Provenance, Run, Split, SplitId
from tidemill.errors import SourceChangedError
from tidemill.testing.scripted_source import Rows, ScriptedSource
from tidemill.testing.source_contract import numbered

A, B = SplitId("scripted", "a"), SplitId("scripted", "b")


def trained(*runs):
    return Provenance(runs, sum(run.rows for run in runs))


def test_first_worker_that_delivered_nothing_loses_no_rows():
    """Rows 500.. of 1000 trained by the second rank only: rows 0-499 are still to be read."""
    first, second = Progress(), Progress()
    second.advance(trained(Run(A, 500, 600, 100)))
    merged = Progress.merge([first, second])
    assert IntervalSet.of([(0, 1000)]) - merged.done[A] == IntervalSet.of([(0, 500), (600, 1000)])


def test_event_time_is_the_largest_trained():
    progress = Progress()
    for time in (5.0, math.nan, 3.0):
        progress.advance(trained(Run(A, 0, 1, 1, event_time=time)))
    other = Progress()
    other.advance(trained(Run(A, 1, 2, 1, event_time=9.0)))
    assert progress.max_event_time == {A: 5.0}
    assert Progress.merge([other, progress]).max_event_time == {A: 9.0}


def test_states_list_untouched_splits_and_come_back():
    progress = Progress(passes=2)
    progress.advance(trained(Run(A, 0, 3, 3, event_time=7.0)))
    splits = [Split(A, 10, {"rows": 10}), Split(B, 5, {"rows": 5})]
    states = progress.to_states(splits)
    assert [(s.split, s.intervals, s.num_rows) for s in states] == [("a", [(0, 3)], 10), ("b", [], 5)]
    back = Progress.from_states([SplitState.model_validate(s.model_dump()) for s in states], passes=2)
    assert (back.done, back.max_event_time, back.passes) == (progress.done, progress.max_event_time, 2)


def test_copy_doesnt_follow():
    progress = Progress()
    kept = progress.copy()
    progress.advance(trained(Run(A, 0, 3, 3)))
    assert kept.done == {}


def test_pass_begins_anew_and_passes_dont_mix():
    progress = Progress()
    progress.advance(trained(Run(A, 0, 3, 3)))
    progress.complete_pass()
    assert (progress.passes, progress.done) == (1, {})
    with pytest.raises(ValueError, match="different passes"):
        Progress.merge([progress, Progress()])


def source_and_state(intervals, name="a"):
    source = ScriptedSource({"a": [Rows(numbered(0, 4))]})
    return source, SplitState(kind="scripted", split=name, intervals=intervals, num_rows=4, fingerprint={"rows": 4})


def test_split_read_in_part_must_still_be_there():
    source, state = source_and_state([(0, 2)], name="gone")
    with pytest.raises(SourceChangedError, match="gone"):
        verify_splits(source, source.discover(), [state])


@pytest.mark.parametrize("intervals", [[], [(0, 4)]])
def test_split_read_whole_or_not_at_all_may_be_gone(intervals):
    source, state = source_and_state(intervals, name="gone")
    verify_splits(source, source.discover(), [state])


def test_other_fingerprint_is_refused():
    source, state = source_and_state([])
    changed = state.model_copy(update={"fingerprint": {"rows": 5}})
    with pytest.raises(SourceChangedError, match="scripted a"):
        verify_splits(source, source.discover(), [changed])


def test_split_that_was_read_whole_stays_known_as_such_after_it_is_gone():
    source, state = source_and_state([(0, 4)], name="gone")
    for _ in range(3):
        splits = source.discover()
        verify_splits(source, splits, [state])
        *_, state = Progress.merge([Progress.from_states([state])]).to_states(splits)
    assert (state.split, state.num_rows, state.fingerprint) == ("gone", 4, {"rows": 4})
