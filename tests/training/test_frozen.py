"""A frozen model beside a stream: the same events, a thread of its own, and training that never waits."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest

from tests.training.test_poisoned_hour import delivery
from tidemill.clock import ManualClock
from tidemill.contracts.progress import WindowFigures
from tidemill.errors import CorruptError
from tidemill.models.metrics import progressive_metrics
from tidemill.training.frozen import FrozenSample
from tidemill.training.progressive import ProgressiveSettings

SETTINGS = ProgressiveSettings(lambda: progressive_metrics([]), label="click", window_s=60.0)
TIMES = np.array([10.0, 20.0, 50.0, 70.0])
LABELS = np.array([0.0, 1.0, 1.0, 0.0])
RIGHT, WRONG = np.array([0.1, 0.9, 0.8, 0.2], np.float32), np.array([0.9, 0.1, 0.2, 0.8], np.float32)


def window(number: int) -> WindowFigures:
    return WindowFigures(start=number * 60.0, stop=number * 60.0 + 60.0, rows=3, metrics={})


def alone(arrays):
    return [dict(arrays)]


@pytest.fixture
def sample():
    made = FrozenSample(SETTINGS, lambda: lambda batch: {"probs": RIGHT[: batch.num_rows]}, share=0.5)
    yield made
    made.close()


def test_both_models_are_measured_on_the_same_events_of_each_window(sample: FrozenSample) -> None:
    sample.trained(0, delivery(TIMES, LABELS), {"probs": WRONG})
    sample.drain(deadline_s=20.0)
    first, second, none = sample.close_windows([window(0), window(1), window(2)], alone)
    assert first is not None
    assert second is not None
    assert none is None
    assert (first.rows, second.rows) == (3, 1)
    assert (first.own["auc"], first.frozen["auc"]) == (0.0, 1.0)
    assert first.own["label_mean"] == first.frozen["label_mean"] == pytest.approx(2 / 3)


def test_what_is_scored_after_its_window_was_closed_does_not_count(sample: FrozenSample) -> None:
    sample.close_windows([window(0)], alone)
    sample.trained(0, delivery(TIMES, LABELS), {"probs": WRONG})
    sample.drain(deadline_s=20.0)
    assert sample.close_windows([window(0)], alone) == [None]
    (found,) = sample.close_windows([window(1)], alone)
    assert found is not None


def test_training_never_waits_for_a_frozen_model_that_hangs() -> None:
    let_go, calls = threading.Event(), []

    def score(batch):
        calls.append(batch)
        assert let_go.wait(30.0)
        return {"probs": RIGHT}

    sample = FrozenSample(SETTINGS, lambda: score, share=0.5)
    try:
        for step in range(500):
            sample.trained(step, delivery(TIMES, LABELS), {"probs": WRONG})
        assert sample.close_windows([window(0)], alone) == [None]
        let_go.set()
        sample.drain(deadline_s=20.0)
        assert len(calls) == 1
    finally:
        let_go.set()
        sample.close()


def test_the_thread_works_for_no_more_than_its_share_of_the_time() -> None:
    clock = ManualClock()
    scored = []

    def score(batch):
        scored.append(clock.monotonic())
        clock.advance(2.0)
        return {"probs": RIGHT}

    sample = FrozenSample(SETTINGS, lambda: score, share=0.1, clock=clock)
    try:
        for _ in range(60):
            sample.trained(0, delivery(TIMES, LABELS), {"probs": WRONG})
            sample.drain(deadline_s=20.0)
            clock.advance(1.0)
    finally:
        sample.close()
    assert np.diff(scored).min() >= 20.0
    assert len(scored) >= 3


def test_a_model_that_cannot_be_loaded_is_told_once_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def load():
        raise CorruptError("snapshot.json: truncated")

    sample = FrozenSample(SETTINGS, load, share=1.0)
    try:
        with caplog.at_level(logging.WARNING, "tidemill"):
            for step in range(3):
                sample.trained(step, delivery(TIMES, LABELS), {"probs": WRONG})
                sample.drain(deadline_s=20.0)
        assert [record.getMessage().endswith("snapshot.json: truncated") for record in caplog.records] == [True]
        assert sample.close_windows([window(0)], alone) == [None]
    finally:
        sample.close()


def test_another_rank_has_no_thread_and_hears_rank_zeros_figures(sample: FrozenSample) -> None:
    sample.trained(0, delivery(TIMES, LABELS), {"probs": WRONG})
    sample.drain(deadline_s=20.0)
    shared: list = []
    (zero,) = sample.close_windows([window(0)], lambda arrays: shared.append(dict(arrays)) or shared)
    other = FrozenSample(SETTINGS, None, share=0.5)
    other.trained(0, delivery(TIMES, LABELS), {"probs": WRONG})
    assert other.close_windows([window(0)], lambda arrays: [*shared, dict(arrays)]) == [zero]
