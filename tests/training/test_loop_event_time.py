"""Checkpoints by event time, as the loop takes them (DCL 9.16)."""

from __future__ import annotations

import math

import pytest

from tests.training.loop_ranks import T0, EndOfPass, Plan, Rows, run_well
from tidemill.cadence import EventTimeCrossing, EverySteps
from tidemill.clock import EventTime
from tidemill.training.loop import LoopSettings, LoopState

# T0 is a multiple of 100 s, as buckets are of their length since 1970.
assert T0 % 100 == 0


def saved_steps(times, *, interval_s=0.0, targets=(), steps=0, state=None, settings=None):
    """The steps at which one rank saves, without the ending's own save."""
    state = state or LoopState()

    def triggers():
        found = [EventTimeCrossing(interval_s, [T0 + target for target in targets], reference=state.watermark)]
        return [EverySteps(steps, state.step), *found] if steps else found

    script = [*(Rows(at=at) for at in times), Rows(at=times[-1]), EndOfPass()]
    (rank,) = run_well([script], Plan(settings or LoopSettings(), checkpoint=triggers, state=state))
    *saves, ending = rank.of("checkpoint")
    assert ending[1] == state.step + len(times) + 1
    return [step for _, step in saves]


@pytest.mark.parametrize(
    ("times", "options", "expected"),
    [
        pytest.param([10, 20, 90], {"interval_s": 100}, [], id="one bucket"),
        pytest.param([110, 120], {"interval_s": 100}, [], id="the first value never saves"),
        pytest.param([10, 99.9, 100, 150, 199], {"interval_s": 100}, [3], id="a new bucket saves once"),
        pytest.param([10, 450, 460], {"interval_s": 100}, [2], id="several buckets at once save once"),
        pytest.param([10, 20, 100, 50, 99, 100, 200], {"interval_s": 100}, [3, 7], id="a time that falls back changes nothing"),
        pytest.param([10, 49.9, 50, 60], {"targets": [50]}, [3], id="a target is inclusive on the right"),
        pytest.param([50, 60], {"targets": [50]}, [], id="a target that the first value has reached is past"),
        pytest.param([10, 70, 80], {"targets": [50, 60]}, [2], id="two targets passed at once save once"),
        pytest.param([10, 60, 60, 60, 100, 120], {"interval_s": 100, "targets": [55]}, [2, 5], id="buckets and targets"),
        pytest.param(
            [10, 20, 110, 120, 120, 120, 150], {"interval_s": 100, "steps": 3}, [3, 6], id="a crossing on a step save is one save"
        ),
        pytest.param([10, 20, 110, 120, 130, 140], {"interval_s": 100, "steps": 3}, [3, 6], id="a step save moves the reference"),
        pytest.param([None, 10, None, 110], {"interval_s": 100}, [4], id="rows without a time"),
        pytest.param([math.nan, 10, math.nan, 110], {"interval_s": 100}, [4], id="NaN, which is what the loader makes of infinity"),
    ],
)
def test_when_a_save_is_due(times, options, expected):
    assert saved_steps(times, **options) == expected


def test_a_resumed_run_does_not_save_again_for_what_was_saved():
    resumed = LoopState(step=7, watermark=EventTime(T0 + 110))
    assert saved_steps([110, 150, 199], interval_s=100, state=resumed) == []
    assert saved_steps([110, 150, 200], interval_s=100, state=resumed) == [10]
    assert saved_steps([110, 150], targets=[105, 110], state=resumed) == []
    assert saved_steps([60, 130], targets=[120], state=resumed) == [9]


@pytest.mark.parametrize(("share", "expected"), [(1 / 3, [3]), (2 / 3, [4]), (1.0, [5])])
def test_the_quorum_decides_when_a_bucket_is_entered(share, expected):
    """Three ranks enter the bucket one after the other."""
    ahead = [[10, 20, 110, 120, 130], [10, 20, 30, 110, 120], [10, 20, 30, 40, 110]]
    scripts = [[*(Rows(at=at) for at in times), Rows(at=times[-1]), EndOfPass()] for times in ahead]
    ranks = run_well(scripts, Plan(LoopSettings(quorum=share), checkpoint=lambda: [EventTimeCrossing(100)]))
    for rank in ranks:
        assert [step for _, step in rank.of("checkpoint")[:-1]] == expected
