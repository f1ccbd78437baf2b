"""The table of endings (D7), row by row, and the ways in which an ending can go wrong."""

from __future__ import annotations

import pytest

from tests.training.loop_ranks import (
    HAND_OVER,
    PREEMPT,
    Do,
    EndOfPass,
    Idle,
    Plan,
    Rows,
    Writer,
    all_duties,
    run_loops,
    run_well,
)
from tidemill.cadence import EverySteps, StopReason
from tidemill.errors import DeadlineError, PeerLostError
from tidemill.training.loop import LoopSettings, LoopState

END = EndOfPass()
THREE = [Rows()] * 3

ROWS = [
    (StopReason.EXHAUSTED, [*THREE, END], 10, ["evaluate", "checkpoint", "cut"]),
    (StopReason.STEP_LIMIT, [Rows()] * 9, 3, ["evaluate", "checkpoint", "cut"]),
    (StopReason.HANDED_OVER, [Rows(), Rows(), HAND_OVER, *THREE], 10, ["cut"]),
    (StopReason.PREEMPTED, [Rows(), Rows(), PREEMPT, *THREE], 10, ["checkpoint", "cut"]),
]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("reason", "script", "num_steps", "actions"), ROWS, ids=[row[0].name for row in ROWS])
def test_the_table(reason, script, num_steps, actions, world_size):
    """Rank 0 gives the reason; the others would go on, but where all must be at their end."""
    others = [*THREE, END] if reason is StopReason.EXHAUSTED else [Rows()] * 9
    ranks = run_well([script, *[others] * (world_size - 1)], all_duties(settings=LoopSettings(num_steps=num_steps)))
    for rank in ranks:
        assert rank.outcome.reason is reason
        assert rank.actions == [(action, 3) for action in actions]
        assert len(rank.step.global_weights) == 3
        assert rank.feed.done == rank.feed.taken, "what was taken is trained"


def test_the_row_of_a_failed_run():
    ranks = run_loops([[*THREE, ValueError("bad row")], [Rows()] * 9], all_duties())
    assert [type(rank.error) for rank in ranks] == [ValueError, PeerLostError]
    assert [rank.actions for rank in ranks] == [[], []]


@pytest.mark.parametrize("rank", [0, 1])
def test_any_rank_may_be_preempted(rank):
    scripts = [[Rows()] * 9, [Rows()] * 9]
    scripts[rank] = [Rows(), PREEMPT, *[Rows()] * 8]
    ranks = run_well(scripts, all_duties())
    assert [one.outcome.reason for one in ranks] == [StopReason.PREEMPTED] * 2
    assert [one.outcome.step for one in ranks] == [2, 2], "the round in whose report it came is trained"


def test_a_round_of_several_steps_is_trained_whole_before_a_stop():
    ranks = run_well([[Rows()] * 5 + [HAND_OVER] + [Rows()] * 9, [Rows()] * 20], all_duties(settings=LoopSettings(4)))
    assert [one.outcome.step for one in ranks] == [8, 8]


def test_of_two_reasons_the_stronger_one_ends_the_run():
    hand_over = [Rows(), HAND_OVER, PREEMPT, Rows(), Rows(), END]
    ranks = run_well([hand_over, [Rows(), PREEMPT, *THREE]], all_duties())
    assert {rank.outcome.reason for rank in ranks} == {StopReason.HANDED_OVER}
    limit = run_well([[Rows(), Rows(), END]], all_duties(settings=LoopSettings(num_steps=2)))
    assert limit[0].outcome.reason is StopReason.STEP_LIMIT
    preempted = run_well([[Rows(), PREEMPT, Rows()]], all_duties(settings=LoopSettings(num_steps=2)))
    assert preempted[0].outcome.reason is StopReason.PREEMPTED


def test_ranks_tick_until_the_final_save_is_settled():
    plan = all_duties(checkpoint_writer=lambda: Writer(delays=[20]), cut_writer=lambda: Writer(delays=[10]))
    ranks = run_well([[*THREE, END]] * 2, plan)
    assert ranks[0].actions == ranks[1].actions == [("evaluate", 3), ("checkpoint", 3), ("cut", 3)]
    assert [name for name, _, _, _ in ranks[1].settled] == ["checkpoint", "cut"]
    assert len(ranks[0].points) > 30
    assert ranks[0].points[-1].weights == ()


def test_what_was_done_at_the_last_step_is_not_done_again():
    three = lambda: [EverySteps(3)]  # noqa: E731
    plan = Plan(checkpoint=three, cut=three, evaluate=three)
    (rank,) = run_well([[*THREE, Idle(), Idle(), END]], plan)
    assert rank.actions == [("checkpoint", 3), ("cut", 3), ("evaluate", 3)]


def test_an_ending_waits_for_what_is_under_way_and_then_saves_the_last_step():
    plan = Plan(checkpoint=lambda: [EverySteps(2)], checkpoint_writer=lambda: Writer(delays=[9, 1]))
    (rank,) = run_well([[*THREE, END]], plan)
    assert rank.actions == [("checkpoint", 2), ("checkpoint", 3)]
    assert [committed for _, _, committed, _ in rank.settled] == [True, True]


def test_a_save_under_way_that_is_of_the_last_step_is_enough():
    plan = Plan(checkpoint=lambda: [EverySteps(3)], checkpoint_writer=lambda: Writer(delays=[9]))
    (rank,) = run_well([[*THREE, END]], plan)
    assert rank.actions == [("checkpoint", 3)]
    assert len(rank.settled) == 1


def test_a_failed_final_save_is_tried_again_with_a_pause():
    plan = all_duties(checkpoint_writer=lambda: Writer(delays=[0], outcomes=[False, False, True]), round_s=0.3)
    ranks = run_well([[*THREE, END]] * 2, plan)
    for rank in ranks:
        assert [name for name, _ in rank.actions] == ["evaluate", "checkpoint", "checkpoint", "checkpoint", "cut"]
        assert [committed for name, _, committed, _ in rank.settled if name == "checkpoint"] == [False, False, True]
    begun = [number for name, _, _, number in ranks[0].settled if name == "checkpoint"]
    assert begun[1] - begun[0] >= 3, "a second by rank 0's clock"


def test_a_final_release_that_never_passes_its_gate_is_given_up():
    plan = all_duties(cut_writer=lambda: Writer(outcomes=[False]), max_cut_tries=3)
    ranks = run_well([[*THREE, END]] * 2, plan)
    assert [len(rank.of("cut")) for rank in ranks] == [3, 3]
    assert [rank.outcome.reason for rank in ranks] == [StopReason.EXHAUSTED] * 2


def test_a_final_save_that_fails_says_at_once_how_long_it_will_be_tried(caplog):
    plan = all_duties(settings=LoopSettings(finish_timeout_s=30.0), checkpoint_writer=lambda: Writer(outcomes=[False, False, True]))
    run_well([[*THREE, END]], plan)
    (message,) = [record.getMessage() for record in caplog.records if "trying again" in record.getMessage()]
    assert message.startswith("the final checkpoint failed")
    assert "s; the run fails if none succeeds" in message


def test_a_save_that_never_succeeds_ends_at_the_deadline():
    plan = all_duties(settings=LoopSettings(finish_timeout_s=30.0), checkpoint_writer=lambda: Writer(outcomes=[False]))
    (rank,) = run_loops([[*THREE, END]], plan)
    assert isinstance(rank.error, DeadlineError)
    assert "the final checkpoint wasn't done within 30 s" in str(rank.error)
    assert 5 < len(rank.of("checkpoint")) < 31


@pytest.mark.parametrize("hasty", [0, 1])
def test_a_deadline_that_only_one_rank_has_reached_ends_all_ranks(hasty):
    """Ranks' clocks differ: none may leave without telling the others."""
    plans = [
        all_duties(
            settings=LoopSettings(finish_timeout_s=30.0),
            checkpoint_writer=lambda: Writer(delays=[10**6]),
            round_s=100.0 if rank == hasty else 0.0,
        )
        for rank in (0, 1)
    ]
    ranks = run_loops([[*THREE, END]] * 2, plans)
    assert isinstance(ranks[hasty].error, DeadlineError)
    assert isinstance(ranks[1 - hasty].error, PeerLostError)
    assert f"rank {hasty} failed" in str(ranks[1 - hasty].error)


def test_a_long_final_evaluation_leaves_the_save_its_time():
    (rank,) = run_well([[*THREE, END]], all_duties(settings=LoopSettings(finish_timeout_s=30.0), evaluate_s=1000.0))
    assert [name for name, _ in rank.actions] == ["evaluate", "checkpoint", "cut"]


def test_a_stop_signal_during_the_final_save_drops_nothing_that_it_needs():
    """Whoever asks from outside sees "interrupted", and the save that was under way isn't begun again."""
    writer = lambda: Writer(delays=[12])  # noqa: E731
    ranks = run_well(
        [[Rows()] * 3, [Rows()] * 3],
        [
            all_duties(settings=LoopSettings(num_steps=3), checkpoint_writer=writer, at_report={10: lambda loop: loop.preempt()}),
            all_duties(settings=LoopSettings(num_steps=3), checkpoint_writer=writer),
        ],
    )
    assert {rank.outcome.reason for rank in ranks} == {StopReason.PREEMPTED}
    assert [len(rank.of("checkpoint")) for rank in ranks] == [1, 1]
    assert [len(rank.of("cut")) for rank in ranks] == [1, 1]


def test_a_verdict_during_the_final_save_skips_what_is_left_of_it():
    plan = all_duties(checkpoint_writer=lambda: Writer(delays=[10**6]), at_report={12: lambda loop: loop.hand_over()})
    (rank,) = run_well([[Rows(), PREEMPT, Rows()]], plan)
    assert rank.outcome.reason is StopReason.HANDED_OVER
    assert [name for name, _ in rank.actions] == ["checkpoint", "cut"]


def test_an_ending_without_anything_to_do_ends():
    (rank,) = run_well([[Rows(), PREEMPT, Rows()]], Plan())
    assert rank.outcome.reason is StopReason.PREEMPTED


def test_the_preempted_run_that_has_not_trained_saves_what_it_started_with_once():
    plan = all_duties(state=LoopState(step=7), committed_step=7)
    (rank,) = run_well([[PREEMPT]], plan)
    assert rank.actions == [("cut", 7)]


def test_progress_is_reported_until_the_end():
    plan = all_duties(checkpoint_writer=lambda: Writer(delays=[20]))
    (rank,) = run_well([[*THREE, END]], plan)
    assert [point.number for point in rank.points] == list(range(len(rank.points)))
    assert sum(1 for point in rank.points if point.first_step == 3) > 20


def test_signals_may_interrupt_each_other():
    """A handler runs in the middle of another one: asking twice, from inside, must not wait for a lock."""
    asked = Do(lambda loop: (loop.preempt(), loop.preempt(), loop.hand_over()))
    (rank,) = run_well([[Rows(), asked, Rows()]], Plan())
    assert rank.outcome.reason is StopReason.HANDED_OVER


def _batches(loop):
    return loop.batches if loop else 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_batches_without_weight_behind_the_last_checkpoint_are_in_a_final_one(world_size):
    """Issue 4: what is done with is noted, though no step followed; a checkpoint that holds it all isn't made again."""
    plan = Plan(checkpoint=lambda: [EverySteps(3)], position=_batches)
    ranks = run_well([[*THREE, Idle(), Rows(0.0), END]] * world_size, plan)
    assert [rank.actions for rank in ranks] == [[("checkpoint", 3), ("checkpoint", 3)]] * world_size
    ranks = run_well([[*THREE, Idle(), END]] * world_size, plan)
    assert [rank.actions for rank in ranks] == [[("checkpoint", 3)]] * world_size


def test_a_restored_checkpoint_counts_until_something_is_done_with():
    plan = Plan(checkpoint=list, position=_batches, state=LoopState(step=5), committed_step=5)
    (rank,) = run_well([[Idle(), END]], plan)
    assert rank.actions == []
    (rank,) = run_well([[Rows(0.0), END]], plan)
    assert rank.actions == [("checkpoint", 5)]
