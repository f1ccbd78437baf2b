"""Whatever the ranks' feeds, writers and stop requests do: all ranks decide the same, and nothing is lost (D1, D2, D7)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.loop_ranks import (
    HAND_OVER,
    PREEMPT,
    EndOfPass,
    Event,
    Idle,
    Plan,
    Rank,
    Rows,
    Writer,
    run_loops,
    run_well,
)
from tidemill.cadence import EventTimeCrossing, EverySeconds, EverySteps, StopReason
from tidemill.errors import PeerLostError
from tidemill.training.loop import LoopSettings

rows = st.builds(
    Rows,
    weight=st.sampled_from([0.0, 1.0, 2.0, 5.0]),
    at=st.one_of(st.none(), st.integers(0, 50).map(float)),
)
events = st.one_of(rows, rows, rows, st.builds(Idle))
writers = st.builds(
    lambda delays, outcomes: {"delays": delays, "outcomes": [*outcomes, True]},
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.lists(st.booleans(), max_size=4),
)


@st.composite
def scripts(draw, stops: Sequence[Event] = (PREEMPT, HAND_OVER)) -> list[list[Event]]:
    """A bounded script a rank, of the same number of passes, in which some rank may ask to stop."""
    world_size, passes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    made: list[list[Event]] = []
    for _ in range(world_size):
        script: list[Event] = []
        for _ in range(passes):
            script += [*draw(st.lists(events, max_size=8)), EndOfPass()]
        made.append(script)
    if stops and draw(st.booleans()):
        script = made[draw(st.integers(0, world_size - 1))]
        script.insert(draw(st.integers(0, len(script) - 1)), draw(st.sampled_from(stops)))
    return made


@st.composite
def plans(draw, world_size: int) -> list[Plan]:
    """One plan a rank: the same but for how its writers do."""
    loop = LoopSettings(
        steps_per_round=draw(st.integers(1, 4)),
        num_steps=draw(st.one_of(st.none(), st.integers(0, 12))),
        quorum=draw(st.sampled_from([0.3, 0.5, 1.0])),
    )
    every, seconds, bucket = draw(st.integers(1, 5)), draw(st.sampled_from([0.02, 0.1])), draw(st.sampled_from([5.0, 20.0]))
    shared = Plan(
        settings=loop,
        checkpoint=lambda: [EverySteps(every), EventTimeCrossing(bucket)],
        cut=lambda: [EverySeconds(seconds)],
        evaluate=draw(st.sampled_from([None, lambda: [EverySteps(every + 1)]])),
        round_s=0.01,
    )

    def writer(options: dict[str, Any]):
        return lambda: Writer(**options)

    return [
        dataclasses.replace(shared, checkpoint_writer=writer(draw(writers)), cut_writer=writer(draw(writers)))
        for _ in range(world_size)
    ]


def check_same_decisions(ranks: list[Rank]) -> None:
    zero = ranks[0]
    for rank in ranks[1:]:
        assert rank.points == zero.points
        assert rank.actions == zero.actions
        assert rank.settled == zero.settled
        assert rank.step.global_weights == zero.step.global_weights
        assert rank.examples == zero.examples


def check_one_rank(rank: Rank, script: list[Event]) -> None:
    """No row is lost, doubled, or out of order; no step without weight (the step checks that itself)."""
    assert rank.feed.done == rank.feed.taken == list(range(len(rank.feed.done)))
    weighty = [number for number, event in enumerate(e for e in script if isinstance(e, Rows)) if event.weight > 0]
    # Rows of weight 0 enter a step too, if another rank's rows make one.
    entered = [row for _, row in rank.entered]
    assert entered == sorted(set(entered))
    assert {row for row in weighty if row < len(rank.feed.done)} <= set(entered) <= set(rank.feed.done)
    assert [step for step, _ in rank.entered] == sorted({step for step, _ in rank.entered})
    marks = [point.watermark for point in rank.points if point.watermark is not None]
    assert marks == sorted(marks)
    for before, after in zip(rank.points, rank.points[1:], strict=False):
        assert (after.number, after.first_step) == (before.number + 1, before.last_step)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_all_ranks_decide_the_same_and_no_row_is_lost(data):
    made = data.draw(scripts())
    chosen = data.draw(plans(len(made)))
    ranks = run_well(made, chosen)
    check_same_decisions(ranks)
    for rank, script in zip(ranks, made, strict=True):
        check_one_rank(rank, script)
        if rank.outcome.reason is StopReason.EXHAUSTED:
            nothing = rank.outcome.step == 0
            assert nothing or len(rank.feed.done) == sum(isinstance(event, Rows) for event in script) or _empty_pass(made)
    limit = chosen[0].settings.num_steps
    assert limit is None or ranks[0].outcome.step <= limit
    assert len({rank.outcome for rank in ranks}) == 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_failing_rank_takes_all_others_with_it_at_the_same_step(data):
    made = data.draw(scripts(stops=()))
    steps = LoopSettings(data.draw(st.integers(1, 4)))
    chosen = [dataclasses.replace(plan, settings=steps) for plan in data.draw(plans(len(made)))]
    failing = data.draw(st.integers(0, len(made) - 1))
    made[failing].insert(data.draw(st.integers(0, len(made[failing]) - 1)), KeyError("broken"))
    ranks = run_loops(made, chosen)
    if _empty_pass(made):
        return
    check_same_decisions(ranks)
    for number, rank in enumerate(ranks):
        assert isinstance(rank.error, KeyError if number == failing else PeerLostError)
        assert rank.feed.done == list(range(len(rank.feed.done)))


def _empty_pass(made: list[list[Event]]) -> bool:
    """Whether a pass but the first makes no step on any rank: it is the last then, whatever else the scripts hold."""
    passes: dict[int, float] = {}
    for script in made:
        number = 0
        for event in script:
            number += isinstance(event, EndOfPass)
            passes[number] = passes.get(number, 0.0) + (event.weight if isinstance(event, Rows) else 0.0)
    return any(weight == 0 for number, weight in passes.items() if 0 < number < max(passes))
