import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.config.optimizer import DenseOptimizer
from tidemill.training.schedules import learning_rate


def _rates(schedule, counts, base=1.0):
    config = DenseOptimizer.model_validate({"sgd_optimizer": {"lr": base}, **schedule})
    return [learning_rate(config, count, 0) for count in counts]


def test_without_a_schedule_the_rate_is_constant():
    assert _rates({}, [0, 10, 10_000]) == [1.0] * 3


def test_exponential_decay_after_a_warm_up():
    schedule = {"decay_size": 10, "decay_factor": 0.5, "warmup_size": 4, "warmup_learning_rate": 0.2, "min_learning_rate": 0.2}
    rates = _rates({"exponential_decay_learning_rate": schedule}, [0, 2, 4, 13, 14, 24, 1000])
    assert rates == pytest.approx([0.2, 0.6, 1.0, 1.0, 0.5, 0.25, 0.2])


def test_exponential_decay_without_a_staircase():
    rates = _rates({"exponential_decay_learning_rate": {"decay_size": 10, "decay_factor": 0.25, "staircase": False}}, [5, 10])
    assert rates == pytest.approx([0.5, 0.25])


def test_manual_rates_hold_strictly_past_their_switch_point():
    schedule = {"schedule_sizes": [2, 4], "learning_rates": [0.5, 0.1]}
    assert _rates({"manual_step_learning_rate": schedule}, range(7)) == [1, 1, 1, 0.5, 0.5, 0.1, 0.1]
    warm = _rates({"manual_step_learning_rate": {**schedule, "warmup": True}}, range(4))
    assert warm == pytest.approx([1, 0.75, 0.5, 0.5])


def test_cosine_ends_at_the_minimum_and_stays():
    schedule = {"T_max": 10, "min_learning_rate": 0.2, "warmup_size": 2}
    rates = _rates({"cosine_annealing_learning_rate": schedule}, [0, 1, 2, 7, 12, 50])
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.6, 0.2, 0.2])


def test_cosine_restarts_with_longer_periods():
    rates = _rates({"cosine_annealing_warm_restarts_learning_rate": {"T_0": 2, "T_mult": 2}}, [0, 1, 2, 4, 6, 10])
    assert rates == pytest.approx([1, 0.5, 1, 0.5, 1, 0.5])


@given(st.integers(0, 10**9))
def test_cosine_restarts_of_equal_length_repeat(count):
    schedule = {"cosine_annealing_warm_restarts_learning_rate": {"T_0": 7}}
    assert _rates(schedule, [count]) == _rates(schedule, [count % 7])


def test_passes_count_instead_of_steps():
    schedule = {"exponential_decay_learning_rate": {"decay_size": 1, "decay_factor": 0.5, "by_epoch": True}}
    config = DenseOptimizer.model_validate({"sgd_optimizer": {"lr": 1.0}, **schedule})
    assert [learning_rate(config, steps, passes) for steps, passes in [(500, 0), (900, 2)]] == [1.0, 0.25]


def test_a_rate_of_0_stays_0():
    schedule = {
        "exponential_decay_learning_rate": {"decay_size": 1, "min_learning_rate": 0.1, "warmup_size": 5, "warmup_learning_rate": 1}
    }
    assert _rates(schedule, [0, 3, 100], base=0.0) == [0, 0, 0]


def test_a_vast_count_costs_nothing():
    assert _rates({"cosine_annealing_warm_restarts_learning_rate": {"T_0": 1}}, [10**15]) == [1.0]
