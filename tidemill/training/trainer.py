"""What the loop calls a step, and the sums that log lines are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tidemill.clock import Clock, SystemClock
from tidemill.features.batch import Batch
from tidemill.training.step import TrainStep


@dataclass(frozen=True, slots=True)
class Interval:
    """What was trained since the last look: this rank's mean loss, all ranks' examples a second, and the dense and sparse rates."""

    steps: int
    loss: float
    examples_per_s: float
    dense_rate: float
    sparse_rate: float


class Trainer:
    """Trains, and sums up (`training.loop.Step`). Belongs to the training thread.

    `passes`: whole passes over the data so far, for the schedules; asked before each step.
    """

    def __init__(self, step: TrainStep, passes: Callable[[], int], *, clock: Clock | None = None) -> None:
        self._step = step
        self._passes = passes
        self._clock = clock or SystemClock()
        self._reset()

    @property
    def steps(self) -> int:
        """Optimizer steps over the whole line, the parents' included."""
        return self._step.steps

    def __call__(self, batch: Batch, global_weight: float) -> dict[str, np.ndarray]:
        self._step.passes = self._passes()
        outputs = self._step(batch, global_weight)
        self._interval_steps += 1
        self._loss_sum += self._step.loss_sum
        self._weight_sum += float(batch.weights.sum())
        self._global_weight += global_weight
        return outputs

    def padding(self) -> Batch:
        """A batch without a real row."""
        return self._step.padding()

    def interval(self) -> Interval:
        """What was trained since the last call."""
        seconds = max(self._clock.monotonic() - self._since, 1e-9)
        dense_rate, sparse_rate = self._step.learning_rates
        interval = Interval(
            steps=self._interval_steps,
            loss=self._loss_sum / self._weight_sum if self._weight_sum else 0.0,
            examples_per_s=self._global_weight / seconds,
            dense_rate=dense_rate,
            sparse_rate=sparse_rate,
        )
        self._reset()
        return interval

    def _reset(self) -> None:
        self._since = self._clock.monotonic()
        self._interval_steps = 0
        self._loss_sum = self._weight_sum = self._global_weight = 0.0
