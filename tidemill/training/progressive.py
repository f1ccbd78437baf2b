"""Progressive validation: every row is scored before it is trained on, and the metrics are kept by event time.

"Progressive validation" after Blum, Kalai and Langford, "Beating the hold-out" (COLT 1999): each row tests the model that all
earlier rows have made, so no data is held back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tidemill import logs
from tidemill.data.split import Delivery, Provenance
from tidemill.features.batch import Batch
from tidemill.models.metrics import Metric, scored_rows


class ProgressiveMetrics:
    """This rank's metrics over windows of event time (`training.loop.Observer`, `cadence.Stateful`).

    A batch belongs to the window of its newest row. When a batch opens a later window, the one before is written as the event
    `progressive.window`: start, stop, rows, and each metric. Batches that come late count in the open window.
    """

    def __init__(
        self,
        make_metrics: Callable[[], list[Metric]],
        *,
        label: str,
        window_s: float,
        keys: Sequence[str] = (),
        output: str = "probs",
    ) -> None:
        self._make_metrics = make_metrics
        self._label = label
        self._window_s = window_s
        self._keys = keys
        self._output = output
        self._metrics = make_metrics()
        self._window: int | None = None
        self._rows = 0
        self.last: dict[str, float] = {}
        """The metrics of the last window that was closed."""

    def entering(self, step: int, provenance: Provenance) -> None:
        return

    def trained(self, step: int, delivery: Delivery[Batch], outputs: dict[str, np.ndarray]) -> None:
        times = [time for _, _, time in delivery.provenance.parts() if not math.isnan(time)]
        window = int(max(times) // self._window_s) if times else 0
        if self._window is None:
            self._window = window
        if window > self._window:
            self.close_window()
            self._window = window
        rows = scored_rows(delivery.payload, outputs[self._output], self._label, self._keys)
        self._rows += delivery.payload.num_rows
        for metric in self._metrics:
            metric.update(rows)

    def close_window(self) -> None:
        """Write the open window, if it has rows, and begin with none."""
        if self._rows and self._window is not None:
            self.last = {metric.name: value for metric in self._metrics if not math.isnan(value := metric.compute())}
            start = self._window * self._window_s
            logs.event("progressive.window", start=start, stop=start + self._window_s, rows=self._rows, **self.last)
        self._metrics = self._make_metrics()
        self._rows = 0

    def state(self) -> dict[str, Any]:
        arrays = {f"{metric.name}.{key}": value for metric in self._metrics for key, value in metric.state().items()}
        return {"window": self._window, "rows": self._rows, **arrays}

    def load_state(self, states: list[dict[str, Any]]) -> None:
        """The open window of all ranks that saved becomes rank 0's; the caller loads it there only."""
        windows = [state["window"] for state in states if state["window"] is not None]
        if not windows:
            return
        self._window = max(windows)
        open_states = [state for state in states if state["window"] == self._window]
        self._rows = sum(int(state["rows"]) for state in open_states)
        for metric in self._metrics:
            prefix = f"{metric.name}."
            for state in open_states:
                metric.merge({key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)})
