"""Progressive validation: every row is scored before it is trained on, and the metrics are kept by event time.

"Progressive validation" after Blum, Kalai and Langford, "Beating the hold-out" (COLT 1999): each row tests the model that all
earlier rows have made, so no data is held back. Windows begin at multiples of their length and hold the rows whose own event
times lie in them, so that the windows of two lineages hold the same events, however each of them batched and read.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tidemill import logs
from tidemill.contracts.progress import WindowFigures
from tidemill.data.split import Delivery, Provenance
from tidemill.features.batch import Batch
from tidemill.models.metrics import Metric, Scored, scored_rows
from tidemill.training.slices import WHOLE, SliceKey, Slices

log = logging.getLogger(__name__)

HISTORY = 48
"""How many windows are remembered and shown to other lineages: two days of hours."""

GRACE = 0.1
"""A window closes this part of its length after its end: the watermark is a quorum's, and other ranks may trail it."""

Collect = Callable[[Mapping[str, np.ndarray]], list[dict[str, np.ndarray]]]
"""Every rank's named arrays, in rank order; collective (`Agreement.collect`)."""


@dataclass(frozen=True, slots=True)
class ProgressiveSettings:
    """What is measured. `keys`: the columns of grouped metrics; `slices`: see `Slices`."""

    make_metrics: Callable[[], list[Metric]]
    """A fresh list of what a window is measured by."""
    label: str
    window_s: float
    keys: Sequence[str] = ()
    slices: Slices = field(default_factory=Slices)
    output: str = "probs"


class Tally:
    """The metrics of one window, or of one slice of it."""

    def __init__(self, metrics: list[Metric]) -> None:
        self.metrics = metrics
        self.rows = 0

    def update(self, rows: Scored) -> None:
        self.rows += len(rows.labels)
        for metric in self.metrics:
            metric.update(rows)

    def values(self) -> dict[str, float]:
        """By name; without those that are undefined."""
        return {metric.name: value for metric in self.metrics if not math.isnan(value := metric.compute())}

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        arrays = {f"{prefix}/{metric.name}.{key}": np.asarray(v) for metric in self.metrics for key, v in metric.state().items()}
        return {f"{prefix}/rows": np.array([self.rows]), **arrays}

    def merge(self, prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Add what `arrays` gave elsewhere under this prefix."""
        self.rows += int(arrays[f"{prefix}/rows"][0])
        for metric in self.metrics:
            start = f"{prefix}/{metric.name}."
            state = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
            if state:
                metric.merge(state)


class ProgressiveMetrics:
    """Metrics over windows of event time, of all ranks together (`training.loop.Observer`, `cadence.Stateful`).

    A window is over once the watermark has passed its end by `GRACE`; rows that come later don't count. For each
    one rank 0 writes the event `progressive.window` and, for each slice of it, `progressive.slice`. Belongs to the training thread.

    `watermark`: where the run begins; it must be the same on all ranks.
    """

    def __init__(self, settings: ProgressiveSettings, *, rank: int = 0, watermark: float | None = None) -> None:
        self._settings = settings
        self._rank = rank
        self._windows: dict[int, dict[SliceKey, Tally]] = {}
        self._open_from = -1 if watermark is None else self._first_open(watermark)
        # None: not looked at in this run; the checkpoint may hold a window that is due.
        self._closed_until: float | None = None
        self._history: deque[WindowFigures] = deque(maxlen=HISTORY)

    @property
    def windows(self) -> tuple[WindowFigures, ...]:
        """The newest windows that are over, in order; the same on all ranks but for those of an earlier run, which rank 0 knows."""
        return tuple(self._history)

    @property
    def last(self) -> dict[str, float]:
        """The metrics of the last window that is over."""
        return dict(self._history[-1].metrics) if self._history else {}

    def entering(self, step: int, provenance: Provenance) -> None:
        return

    def trained(self, step: int, delivery: Delivery[Batch], outputs: dict[str, np.ndarray]) -> None:
        settings, batch = self._settings, delivery.payload
        numbers = window_numbers(delivery.provenance, batch.num_rows, settings.window_s)
        scored = scored_rows(batch, outputs[settings.output], settings.label, settings.keys)
        slices = settings.slices.of(batch)
        for number in np.unique(numbers[numbers >= self._open_from]):
            window = self._windows.setdefault(int(number), {})
            chosen = numbers == number
            self._tally(window, WHOLE).update(select(scored, chosen))
            for feature, ids in slices.items():
                self._update_slices(window, feature, ids, scored, chosen)

    def close_windows(self, watermark: float | None, collect: Collect) -> tuple[WindowFigures, ...]:
        """Close what the watermark has passed, and tell; returns what was closed.

        Collective: all ranks give the same watermark. Infinite: close everything.
        """
        if watermark is None:
            return ()
        until = math.inf if math.isinf(watermark) else self._first_open(watermark)
        if self._closed_until is not None and until <= self._closed_until:
            return ()
        self._closed_until = until
        due = {number: self._windows.pop(number) for number in sorted(self._windows) if number < until}
        self._open_from = max(self._open_from, int(until)) if math.isfinite(until) else self._open_from
        merged = self._merged(collect(_arrays(due)))
        return tuple(self._tell(number, merged[number]) for number in sorted(merged))

    def state(self) -> dict[str, Any]:
        return {
            "window_s": self._settings.window_s,
            **_arrays(self._windows),
            "history": [window.model_dump(mode="json") for window in self._history],
        }

    def load_state(self, states: list[dict[str, Any]]) -> None:
        """The open windows of all ranks that saved become rank 0's; the caller loads them there only.

        Windows of another length than ours, which a changed config may bring, can't be gone on with, and are dropped.
        """
        states = [state for state in states if state.get("window_s") == self._settings.window_s]
        if states:
            # All ranks remember the same windows, but rank 0 knows those of earlier runs too.
            self._history.extend(WindowFigures.model_validate(window) for window in states[0].get("history", ()))
        self._windows = self._merged({name: array for name, array in state.items() if "/" in name} for state in states)

    def _first_open(self, watermark: float) -> int:
        return math.floor(watermark / self._settings.window_s - GRACE)

    def _tally(self, window: dict[SliceKey, Tally], key: SliceKey) -> Tally:
        if key not in window:
            metrics = self._settings.make_metrics()
            # The columns that group are for the whole: a slice of a group has other pairs.
            window[key] = Tally(metrics if key == WHOLE else [metric for metric in metrics if metric.name != "grouped_auc"])
        return window[key]

    def _update_slices(
        self, window: dict[SliceKey, Tally], feature: str, ids: np.ndarray, scored: Scored, chosen: np.ndarray
    ) -> None:
        named = self._settings.slices.named([value for known, value in window if known == feature], ids[chosen])
        for value in np.unique(named):
            self._tally(window, (feature, str(value))).update(select(select(scored, chosen), named == value))

    def _merged(self, states: Iterable[Mapping[str, np.ndarray]]) -> dict[int, dict[SliceKey, Tally]]:
        """Windows as `_arrays` gave them on some ranks, added up."""
        windows: dict[int, dict[SliceKey, Tally]] = {}
        for arrays in states:
            for prefix in sorted({name.rsplit("/", 1)[0] for name in arrays}):
                number, key = prefix.split("/", 1)
                feature, value = key.rsplit("/", 1)
                self._tally(windows.setdefault(int(number), {}), (feature, value)).merge(prefix, arrays)
        return windows

    def _tell(self, number: int, window: Mapping[SliceKey, Tally]) -> WindowFigures:
        start, window_s = number * self._settings.window_s, self._settings.window_s
        whole = window[WHOLE]
        figures = WindowFigures(start=start, stop=start + window_s, rows=whole.rows, metrics=whole.values())
        self._history.append(figures)
        if self._rank == 0:
            shown = ", ".join(f"{name} {value:.4f}" for name, value in figures.metrics.items())
            log.info("window [%.0f, %.0f): %d rows, %s", figures.start, figures.stop, figures.rows, shown)
            logs.event("progressive.window", start=start, stop=figures.stop, rows=figures.rows, **figures.metrics)
            for (feature, value), tally in self._settings.slices.shown(window):
                logs.event(
                    "progressive.slice",
                    feature=feature,
                    value=value,
                    start=start,
                    stop=figures.stop,
                    rows=tally.rows,
                    **tally.values(),
                )
        return figures


def _arrays(windows: Mapping[int, Mapping[SliceKey, Tally]]) -> dict[str, np.ndarray]:
    """`<number>/<feature>/<value>/<metric>.<key>` -> array."""
    found: dict[str, np.ndarray] = {}
    for number, tallies in windows.items():
        for (feature, value), tally in tallies.items():
            found |= tally.arrays(f"{number}/{feature}/{value}")
    return found


def select(rows: Scored, chosen: np.ndarray) -> Scored:
    """Some of the rows, by a mask."""
    groups = {key: values[chosen] for key, values in rows.groups.items()}
    return Scored(rows.probs[chosen], rows.labels[chosen], rows.weights[chosen], groups)


def window_numbers(provenance: Provenance, num_rows: int, window_s: float) -> np.ndarray:
    """The window of each row. A row whose own time isn't known goes with the newest of its batch; without any: window 0."""
    newest = max((time for _, _, time in provenance.parts() if not math.isnan(time)), default=0.0)
    times = np.full(num_rows, newest) if provenance.event_time is None else provenance.event_time[:num_rows]
    return np.floor(np.where(np.isnan(times), newest, times) / window_s).astype(np.int64)
