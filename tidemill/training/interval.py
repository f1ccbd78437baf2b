"""The sums that log lines are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill.clock import Clock, SystemClock
from tidemill.data.split import Delivery, Provenance
from tidemill.features.batch import Batch
from tidemill.training.step import TrainStep


@dataclass(frozen=True, slots=True)
class Interval:
    """What this rank trained since the last look."""

    steps: int
    loss: float
    """weighted mean; NaN without rows"""
    examples_per_s: float


class IntervalStats:
    """Sums over the steps of this rank's own batches (`training.loop.Observer`, `cadence.Stateful`)."""

    def __init__(self, step: TrainStep, clock: Clock | None = None) -> None:
        self._step = step
        self._clock = clock or SystemClock()
        self._reset()

    def entering(self, step: int, provenance: Provenance) -> None:
        return

    def trained(self, step: int, delivery: Delivery[Batch], outputs: dict[str, np.ndarray]) -> None:
        self._steps += 1
        self._loss_sum += self._step.loss_sum
        self._weight += float(delivery.payload.weights.sum())
        self._rows += delivery.payload.num_rows

    def take(self) -> Interval:
        """What was trained since the last call."""
        seconds = max(self._clock.monotonic() - self._since, 1e-9)
        loss = self._loss_sum / self._weight if self._weight else float("nan")
        interval = Interval(self._steps, loss, self._rows / seconds)
        self._reset()
        return interval

    def state(self) -> dict[str, Any]:
        """The sums since the last look."""
        return {
            "steps": self._steps,
            "rows": self._rows,
            "loss_sum": self._loss_sum,
            "weight": self._weight,
            "seconds": self._clock.monotonic() - self._since,
        }

    def load_state(self, states: list[dict[str, Any]]) -> None:
        """Go on with the sums of one rank, this one's own."""
        (state,) = states
        self._steps, self._rows = int(state["steps"]), int(state["rows"])
        self._loss_sum, self._weight = float(state["loss_sum"]), float(state["weight"])
        self._since = self._clock.monotonic() - float(state["seconds"])

    def _reset(self) -> None:
        self._since = self._clock.monotonic()
        self._steps = self._rows = 0
        self._loss_sum = self._weight = 0.0
