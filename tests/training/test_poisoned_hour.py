"""A poisoned hour as the running lineage sees it: a stream that scores, learns, and notices."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from tidemill.data.split import Delivery, Provenance, Run, SplitId
from tidemill.features.batch import Batch, IdColumns
from tidemill.lineage.quality import QualityBounds, QualityWatch
from tidemill.models.metrics import progressive_metrics
from tidemill.training.progressive import GRACE, ProgressiveMetrics, ProgressiveSettings

NO_IDS = IdColumns((), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32))
WINDOW_S, ROWS_PER_S = 300.0, 20
HOLD_S = 4200.0
POISONED_FROM, POISONED_UNTIL = 2 * 3600.0 + 100.0, 3 * 3600.0 + 100.0
TRUE_WEIGHTS = np.array([1.6, -1.2, 0.8, -1.0])


class OnlineModel:
    """Logistic regression by gradient steps: small, but it learns from whatever it is fed, poison too."""

    def __init__(self) -> None:
        self.weights = np.zeros(5)

    def step(self, features: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The scores from before the step."""
        inputs = np.column_stack([features, np.ones(len(features))])
        scores = 1 / (1 + np.exp(-inputs @ self.weights))
        self.weights -= 0.2 * inputs.T @ (scores - labels) / len(labels)
        return scores


def flip_labels(features, labels):
    return features, 1 - labels


def constant_column(features, labels):
    return np.column_stack([np.full(len(features), 3.0), features[:, 1:]]), labels


def shifted_schema(features, labels):
    return np.roll(features, 1, axis=1), labels


def untouched(features, labels):
    return features, labels


def delivery(times: np.ndarray, labels: np.ndarray) -> Delivery[Batch]:
    rows = len(times)
    batch = Batch(
        num_rows=rows,
        size=rows,
        dense=torch.zeros(rows, 0),
        ids=NO_IDS,
        sequences=NO_IDS,
        labels={"click": torch.tensor(labels, dtype=torch.float32)},
        weights=torch.ones(rows),
        extras={},
    )
    run = Run(SplitId("kafka", "clicks:0"), 0, rows, rows, event_time=float(times[-1]))
    return Delivery(Provenance((run,), rows, event_time=times), batch)


def play(poison, hours: float = 5.5) -> list[tuple[float, bool]]:
    """(event time, whether publication waits), each 10 s of a stream that is poisoned for an hour."""
    random = np.random.default_rng(3)
    model = OnlineModel()
    settings = ProgressiveSettings(lambda: progressive_metrics([]), label="click", window_s=WINDOW_S)
    progressive = ProgressiveMetrics(settings)
    watch = QualityWatch(QualityBounds(1000, 0.05, 0.1, 0.3, hold_s=HOLD_S), reference_windows=24)
    states = []
    for start in np.arange(3600.0 - 600.0, hours * 3600.0, 10.0):
        times = start + np.sort(random.uniform(0, 10, 10 * ROWS_PER_S))
        features = random.normal(size=(len(times), 4))
        labels = (random.uniform(size=len(times)) < 1 / (1 + np.exp(1.0 - features @ TRUE_WEIGHTS))).astype(float)
        if POISONED_FROM <= start < POISONED_UNTIL:
            features, labels = poison(features, labels)
        progressive.trained(0, delivery(times, labels), {"probs": model.step(features, labels)})
        # The model's first minutes aren't what a lineage begins with: it continues a daily model.
        for window in progressive.close_windows(float(times[-1]), lambda arrays: [dict(arrays)]):
            if window.start >= 3600.0:
                watch.observe(window)
        states.append((float(times[-1]), watch.paused))
    return states


@pytest.mark.parametrize("poison", [flip_labels, constant_column, shifted_schema])
def test_a_poisoned_hour_is_noticed_within_two_windows_and_publication_goes_on_after_it(poison) -> None:
    states = play(poison)
    noticed_at = next(time for time, paused in states if paused)
    assert POISONED_FROM <= noticed_at <= POISONED_FROM + (2 + GRACE) * WINDOW_S + 20.0
    print(f"{poison.__name__}: noticed after {noticed_at - POISONED_FROM:.0f} s of event time")
    resumed_at = next(time for time, paused in states if time > noticed_at and not paused)
    assert POISONED_UNTIL <= resumed_at <= POISONED_UNTIL + HOLD_S + 4 * WINDOW_S
    assert sum(one[1] != next_one[1] for one, next_one in pairwise(states)) == 2


def test_a_good_stream_is_never_paused() -> None:
    assert not any(paused for _, paused in play(untouched))
