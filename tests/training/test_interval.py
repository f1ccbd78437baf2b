"""The sums behind a log line go on where a checkpoint left them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tidemill.clock import ManualClock
from tidemill.training.interval import IntervalStats


def trained(stats: IntervalStats, *weights: float) -> None:
    batch = SimpleNamespace(weights=torch.tensor(weights), num_rows=len(weights))
    stats.trained(0, SimpleNamespace(payload=batch), {})


def test_restored_sums_go_on_as_if_nothing_had_happened():
    clock, step = ManualClock(), SimpleNamespace(loss_sum=3.0)
    before = IntervalStats(step, clock)
    trained(before, 1.0, 2.0)
    clock.advance(2.0)
    after = IntervalStats(step, clock)
    after.load_state([before.state()])
    for stats in (before, after):
        trained(stats, 3.0)
    clock.advance(1.0)
    assert after.take() == before.take()
    assert after.take().steps == 0


def test_an_interval_is_a_weighted_mean_and_a_rate():
    clock = ManualClock()
    stats = IntervalStats(SimpleNamespace(loss_sum=3.0), clock)
    trained(stats, 1.0, 2.0)
    trained(stats, 3.0)
    clock.advance(2.0)
    interval = stats.take()
    assert (interval.steps, interval.examples_per_s) == (2, pytest.approx(1.5))
    assert interval.loss == pytest.approx(6.0 / 6.0)
