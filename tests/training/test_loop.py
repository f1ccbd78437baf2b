"""The training loop on several ranks: rounds, ticks, triggers, passes (D1, D2)."""

from __future__ import annotations

import math

import pytest

from tests.training.loop_ranks import (
    HAND_OVER,
    PREEMPT,
    T0,
    Do,
    EndOfPass,
    EveryRound,
    Idle,
    Plan,
    Rows,
    Writer,
    all_duties,
    run_loops,
    run_well,
)
from tidemill.cadence import EverySeconds, EverySteps, StopReason
from tidemill.clock import EventTime
from tidemill.errors import DataError, FencedError, PeerLostError
from tidemill.training.loop import LoopSettings, LoopState

K4 = LoopSettings(steps_per_round=4)
END = EndOfPass()


def test_the_gather_of_a_round_is_issued_before_the_round_ahead_of_it_is_trained():
    (rank,) = run_well([[Rows()] * 3 + [END]], Plan())
    assert rank.order == ["report 0", "report 1", "step 0", "report 2", "step 1", "report 3", "step 2", "report 4"]


def test_what_arrives_after_the_report_waits_for_the_next_round():
    """Rank 1 has nothing when the round is agreed on, and a batch when it is trained."""
    first = [Rows(5.0), Rows(6.0), END]
    second = [Idle(), Rows(7.0), END]
    ranks = run_well([first, second], Plan())
    assert [rank.step.global_weights for rank in ranks] == [[5.0, 13.0]] * 2
    assert ranks[1].entered == [(1, 0)]
    assert ranks[1].step.padded == [0]


def test_a_batch_that_meets_a_round_without_weight_is_not_lost():
    """Rank 0's batch weighs nothing, so no step is made; rank 1's batch came too late for that round."""
    ranks = run_well([[Rows(0.0), Idle(), END], [Idle(), Rows(3.0), END]], Plan())
    assert ranks[1].entered == [(0, 0)]
    assert ranks[0].feed.done == [0], "rows without weight are done with"
    assert ranks[0].entered == []
    assert [rank.step.global_weights for rank in ranks] == [[3.0]] * 2


def test_a_rank_without_data_pads_and_a_round_without_any_is_a_tick():
    """DCL 9.7, 9.10."""
    ranks = run_well([[Rows(), Idle(), Idle(), Rows(), END], [END]], Plan())
    assert [len(rank.step.global_weights) for rank in ranks] == [2, 2]
    assert ranks[1].step.padded == [0, 1]
    assert [point.weights for point in ranks[0].points].count(()) >= 2
    assert [rank.outcome.reason for rank in ranks] == [StopReason.EXHAUSTED] * 2


def test_rounds_of_several_steps_end_where_a_step_trigger_is_due():
    plan = Plan(K4, evaluate=lambda: [EverySteps(3), EverySteps(5)])
    ranks = run_well([[Rows()] * 11 + [END], [Rows()] * 7 + [END]], plan)
    for rank in ranks:
        assert rank.of("evaluate") == [("evaluate", step) for step in (3, 5, 6, 9, 10, 11)]
        assert len(rank.step.global_weights) == 11
    assert max(len(point.weights) for point in ranks[0].points) == 3


def test_the_step_limit_is_met_exactly_and_what_lies_beyond_is_not_taken():
    plan = Plan(LoopSettings(steps_per_round=4, num_steps=6), checkpoint=list)
    ranks = run_well([[Rows()] * 20, [Rows()] * 20], plan)
    for rank in ranks:
        assert len(rank.step.global_weights) == 6
        assert rank.feed.taken == rank.feed.done == list(range(6))
        assert rank.outcome.reason is StopReason.STEP_LIMIT
        assert (rank.outcome.step, rank.examples) == (6, 12.0)
        assert rank.of("checkpoint") == [("checkpoint", 6)]


def test_steps_without_weight_do_not_count_towards_the_limit():
    (rank,) = run_well([[Rows(), Rows(0.0), Rows(), Rows(0.0), Rows(), Rows()]], Plan(LoopSettings(4, num_steps=3)))
    assert rank.outcome.step == len(rank.step.global_weights) == 3
    assert rank.feed.done == [0, 1, 2, 3, 4]


def test_a_restored_run_goes_on_where_it_was():
    state = LoopState(step=10, examples=70.0, watermark=EventTime(T0 + 9.0))
    plan = Plan(LoopSettings(num_steps=12), checkpoint=lambda: [EverySteps(11, start=10)], state=state)
    (rank,) = run_well([[Rows(3.0, at=1.0)] * 5], plan)
    assert [step for step, _ in rank.entered] == [10, 11]
    assert rank.examples == 76.0
    assert rank.outcome.watermark == T0 + 9.0, "it never goes back"
    assert rank.of("checkpoint") == [("checkpoint", 11), ("checkpoint", 12)]


def test_a_run_that_starts_at_its_limit_trains_nothing_and_saves_nothing_again():
    plan = Plan(LoopSettings(num_steps=5), checkpoint=list, state=LoopState(step=5), committed_step=5)
    (rank,) = run_well([[Rows()] * 3], plan)
    assert rank.outcome.reason is StopReason.STEP_LIMIT
    assert (rank.feed.taken, rank.actions) == ([], [])


def test_passes_follow_each_other_once_all_ranks_are_done():
    long, short = [Rows()] * 3, [Rows()]
    ranks = run_well([[*long, END, *long, END], [*short, END, *short, END]], Plan(K4))
    assert [rank.feed.done for rank in ranks] == [list(range(6)), [0, 1]]
    assert [rank.feed.passes for rank in ranks] == [2, 2]
    assert ranks[0].step.global_weights == [2.0, 1.0, 1.0] * 2, "no step holds rows of two passes"


def test_endless_passes_over_nothing_end():
    ranks = run_well([[END] * 5, [END] * 5], Plan())
    assert [rank.outcome.reason for rank in ranks] == [StopReason.EXHAUSTED] * 2
    assert ranks[0].feed.passes == 1
    assert ranks[0].feed.counted == [0], "those that are left count as made"


@pytest.mark.parametrize("rows", [[], [Rows(0.0)]])
def test_a_run_that_never_trained_a_row_is_an_error_on_every_rank(rows):
    """DCL 9.17: empty input gives a non-zero exit."""
    ranks = run_loops([[*rows, END], [END]], Plan(LoopSettings(refuse_empty=True), checkpoint=list))
    for rank in ranks:
        assert isinstance(rank.error, DataError)
        assert rank.error.exit_code != 0
        assert rank.actions == []
    again = Plan(LoopSettings(refuse_empty=True), checkpoint=list, state=LoopState(step=5), committed_step=5)
    assert run_well([[END]], again)[0].outcome.reason is StopReason.EXHAUSTED, "a finished job that goes on isn't empty"


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_pass_counts_before_anything_follows_its_last_step(rounds):
    """DCL 9.17: a checkpoint at the last step of a pass says that the pass is complete."""
    scripts = [[*[Rows()] * 3, END, Rows(), END], [Rows(), END, Rows(), END]]
    ranks = run_well(scripts, Plan(LoopSettings(rounds), checkpoint=lambda: [EverySteps(1)]))
    for rank, rows in zip(ranks, ([3, 4], [1, 2]), strict=True):
        assert rank.feed.counted == rows
        assert [point.last_step for point in rank.points if point.ends_pass] == [3, 4]


def test_event_time_is_as_of_the_end_of_the_round():
    (rank,) = run_well([[Rows(at=1.0), Rows(at=5.0), Rows(at=3.0), END]], Plan())
    assert [point.watermark for point in rank.points][:3] == [T0 + 1.0, T0 + 5.0, T0 + 5.0]
    assert rank.outcome.watermark == T0 + 5.0


def test_the_watermark_is_the_quorums():
    scripts = [[Rows(at=10.0), END], [Rows(at=20.0), END], [Rows(at=30.0), END]]
    assert run_well(scripts, Plan())[0].outcome.watermark == T0 + 10.0
    assert run_well(scripts, Plan(LoopSettings(quorum=0.5)))[2].outcome.watermark == T0 + 20.0


def test_checkpoint_and_cut_of_one_round_come_in_that_order():
    plan = Plan(checkpoint=lambda: [EverySteps(2)], cut=lambda: [EverySteps(2)])
    (rank,) = run_well([[Rows()] * 2 + [Idle()] * 4 + [END]], plan)
    assert rank.actions == [("checkpoint", 2), ("cut", 2)]


def test_windows_coalesce_while_one_is_under_way():
    """A cut that begins after round n settles at round n + 4 here; until then nothing new begins."""
    plan = Plan(cut=lambda: [EverySteps(1)], cut_writer=lambda: Writer(delays=[2]))
    ranks = run_well([[Rows()] * 12 + [END], [Rows()] * 12 + [END]], plan)
    for rank in ranks:
        steps = [step for _, step in rank.of("cut")]
        assert steps == [1, 5, 9, 12]
    assert ranks[0].actions == ranks[1].actions


def test_every_rank_settles_what_rank_zero_settled_at_the_same_round():
    plans = [
        Plan(cut=lambda: [EverySteps(2)], cut_writer=lambda: Writer(delays=[3, 1], outcomes=[False, True])),
        Plan(cut=lambda: [EverySteps(2)], cut_writer=lambda: Writer(delays=[0])),
    ]
    ranks = run_well([[Rows()] * 20 + [END]] * 2, plans)
    assert ranks[0].settled == ranks[1].settled
    assert [committed for _, _, committed, _ in ranks[0].settled][:2] == [False, True]
    assert ranks[0].actions == ranks[1].actions


def test_nothing_begins_while_a_rank_is_not_ready():
    """Rank 1 is slower than rank 0, which gave the first cut up: the next one waits for both."""
    plans = [
        Plan(cut=lambda: [EverySteps(1)], cut_writer=lambda: Writer(delays=[0], outcomes=[False, True])),
        Plan(cut=lambda: [EverySteps(1)], cut_writer=lambda: Writer(delays=[6, 0])),
    ]
    ranks = run_well([[Rows()] * 14 + [END]] * 2, plans)
    assert [step for _, step in ranks[0].of("cut")][:2] == [1, 9]
    assert ranks[0].actions == ranks[1].actions


def test_a_slow_checkpoint_does_not_hold_up_releases():
    plan = Plan(
        checkpoint=lambda: [EverySteps(2)],
        checkpoint_writer=lambda: Writer(delays=[30, 1]),
        cut=lambda: [EverySteps(2)],
        cut_writer=lambda: Writer(delays=[0]),
    )
    (rank,) = run_well([[Rows()] * 20 + [END]], plan)
    assert [step for _, step in rank.of("cut")] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    assert [step for _, step in rank.of("checkpoint")] == [2, 20]


def test_triggers_by_time_fire_on_ticks_too_and_by_rank_zeros_clock():
    """DCL 9.19: so a hand-over is looked for while a stream is idle."""
    plans = [Plan(evaluate=lambda: [EverySeconds(1.0)], round_s=0.6), Plan(evaluate=lambda: [EverySeconds(1.0)], round_s=1e6)]
    ranks = run_well([[Rows(), *[Idle()] * 8, PREEMPT], [Idle()] * 20], plans)
    assert ranks[0].of("evaluate") == ranks[1].of("evaluate")
    assert 3 <= len(ranks[0].of("evaluate")) <= 8


@pytest.mark.parametrize("failing", [0, 1])
def test_a_feeds_error_stops_all_ranks_together(failing):
    scripts = [[Rows()] * 9, [Rows()] * 9]
    scripts[failing] = [Rows(), Rows(), OSError("disk on fire")]
    ranks = run_loops(scripts, Plan(checkpoint=list))
    assert isinstance(ranks[failing].error, OSError)
    other = ranks[1 - failing]
    assert isinstance(other.error, PeerLostError)
    assert f"rank {failing} failed at step 2" in str(other.error)
    assert len(other.step.global_weights) == 2
    assert not other.actions, "nothing is saved"


class FailingObserver:
    """Fails at a step, like a log on a full disk."""

    def __init__(self, at: int) -> None:
        self._at = at

    def entering(self, step, provenance) -> None:
        if step == self._at:
            raise OSError("no space left")

    def trained(self, step, delivery, outputs) -> None:
        return


def test_an_observers_error_stops_all_ranks_together():
    ranks = run_loops([[Rows()] * 9] * 2, [Plan(), Plan(observers=[FailingObserver(3)])])
    assert str(ranks[1].error) == "no space left"
    assert "rank 1 failed" in str(ranks[0].error)
    assert len(ranks[0].step.global_weights) == len(ranks[1].step.global_weights)


def test_a_check_that_raises_stops_all_ranks_together():
    def check() -> None:
        raise FencedError("term 7 has taken over")

    ranks = run_loops([[Rows()] * 9] * 2, [Plan(checks=[check]), Plan()])
    assert isinstance(ranks[0].error, FencedError)
    assert isinstance(ranks[1].error, PeerLostError)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_weights_that_no_step_can_be_made_of_are_refused(weight):
    ranks = run_loops([[Rows(), Rows(weight)], [Rows()] * 5], Plan())
    assert isinstance(ranks[0].error, DataError)
    assert "scripted 0 [1, 2)" in str(ranks[0].error)
    assert isinstance(ranks[1].error, PeerLostError)


def test_a_step_that_raises_ends_its_rank_at_once():
    def fail(loop) -> None:
        def step(batch, global_weight):
            raise ArithmeticError("exploded")

        loop._step = step

    ranks = run_loops([[Rows(), Do(fail), Rows(), Rows(), END]], Plan())
    assert isinstance(ranks[0].error, ArithmeticError)


def test_the_verdict_counts_on_rank_zero_only():
    """DCL 9.19."""
    ranks = run_well([[Rows()] * 6 + [END], [Rows(), HAND_OVER, *[Rows()] * 5, END]], all_duties())
    assert [rank.outcome.reason for rank in ranks] == [StopReason.EXHAUSTED] * 2


def test_rounds_are_numbered_without_holes_ticks_included():
    (rank,) = run_well([[Rows(), Idle(), Rows(), END]], Plan(evaluate=lambda: [EveryRound()]))
    assert [point.number for point in rank.points] == list(range(len(rank.points)))
    assert len(rank.of("evaluate")) == 3, "after each round until the ending, which has no more to do"
