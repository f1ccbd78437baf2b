"""What the loop calls a step: learning rates, the step itself, and the sums that log lines are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tidemill.clock import Clock, SystemClock
from tidemill.features.batch import Batch
from tidemill.training.optimizers import Optimizers
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
    """Applies the schedules and trains (`training.loop.Step`). Belongs to the training thread.

    `steps`: optimizer steps taken over the whole line, so that schedules go on where the parent's checkpoint left them.
    """

    def __init__(
        self,
        step: TrainStep,
        optimizers: Optimizers,
        padding: Callable[[], Batch],
        passes: Callable[[], int],
        *,
        steps: int = 0,
        clock: Clock | None = None,
    ) -> None:
        self._step = step
        self._optimizers = optimizers
        self._make_padding = padding
        self._padding: Batch | None = None
        self._passes = passes
        self.steps = steps
        self._clock = clock or SystemClock()
        self._rates = (0.0, 0.0)
        self._reset()

    def __call__(self, batch: Batch, global_weight: float) -> dict[str, np.ndarray]:
        self._rates = self._optimizers.set_rates(self.steps, self._passes())
        result = self._step(batch, global_weight)
        self.steps += 1
        self._interval_steps += 1
        self._loss_sum += result.loss_sum
        self._weight_sum += float(batch.weights.sum())
        self._global_weight += global_weight
        return result.outputs

    def padding(self) -> Batch:
        """A batch without a real row; made once, since a step never changes its batch."""
        if self._padding is None:
            self._padding = self._make_padding()
        return self._padding

    def interval(self) -> Interval:
        """What was trained since the last call."""
        seconds = max(self._clock.monotonic() - self._since, 1e-9)
        interval = Interval(
            steps=self._interval_steps,
            loss=self._loss_sum / self._weight_sum if self._weight_sum else 0.0,
            examples_per_s=self._global_weight / seconds,
            dense_rate=self._rates[0],
            sparse_rate=self._rates[1],
        )
        self._reset()
        return interval

    def _reset(self) -> None:
        self._since = self._clock.monotonic()
        self._interval_steps = 0
        self._loss_sum = self._weight_sum = self._global_weight = 0.0
