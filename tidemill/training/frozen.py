"""What a model that doesn't learn thinks of the same events: a sample of them, scored beside training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tidemill import logs
from tidemill.clock import Clock, SystemClock
from tidemill.contracts.progress import WindowFigures
from tidemill.data.split import Delivery, Provenance
from tidemill.errors import TidemillError
from tidemill.features.batch import Batch
from tidemill.models.metrics import Scored, scored_rows
from tidemill.training.progressive import Collect, ProgressiveSettings, Tally, select, window_numbers
from tidemill.workers import BackgroundWorker

Score = Callable[[Batch], Mapping[str, np.ndarray]]
"""The frozen model's outputs for a batch's real rows."""

OWN, FROZEN = "own", "frozen"


@dataclass(frozen=True, slots=True)
class SampleFigures:
    """The sampled events of one window. `own`: what the training model made of them before it learnt from them; `frozen`: what the
    frozen model did."""

    rows: int
    own: Mapping[str, float]
    frozen: Mapping[str, float]


class FrozenSample:
    """Scores whole batches with a frozen model on a thread of its own (`training.loop.Observer`).

    The thread works at most `share` of the time, on one batch at once, and takes no batch that would have to wait: training never
    does. Rank 0's batches stand for all; `load` None: another rank's, which only takes part in `close_windows`. A model that can't
    be loaded, or can't score, is told once, and there are no figures. All methods belong to the training thread.
    """

    def __init__(
        self, settings: ProgressiveSettings, load: Callable[[], Score] | None, *, share: float, clock: Clock | None = None
    ) -> None:
        """`load` is called by the thread, before its first batch."""
        self._settings = settings
        self._load = load
        self._share = share
        self._clock = clock or SystemClock()
        self._score: Score | None = None
        self._failed = False
        self._next_at = 0.0
        self._lock = threading.Lock()
        self._windows: dict[int, dict[str, Tally]] = {}
        self._open_from = -(2**62)
        self._worker = BackgroundWorker("frozen-model", self._work) if load else None

    def entering(self, step: int, provenance: Provenance) -> None:
        return

    def trained(self, step: int, delivery: Delivery[Batch], outputs: dict[str, np.ndarray]) -> None:
        if self._worker is None or self._failed or delivery.payload.num_rows == 0:
            return
        if self._clock.monotonic() >= self._next_at and self._worker.ready:
            self._worker.submit((delivery, outputs[self._settings.output]))

    def close_windows(self, windows: Sequence[WindowFigures], collect: Collect) -> list[SampleFigures | None]:
        """The figures of windows that are over, None for one without a sample. Collective: the same windows on all ranks."""
        if not windows:
            return []
        numbers = [round(window.start / self._settings.window_s) for window in windows]
        shared = collect(self._take(max(numbers)))[0]
        return [self._figures(number, shared) for number in numbers]

    def drain(self, *, deadline_s: float) -> None:
        """Wait for the batch that is being scored."""
        if self._worker is not None:
            self._worker.drain(deadline_s=deadline_s)

    def close(self) -> None:
        """Leave the thread. Idempotent."""
        if self._worker is not None:
            self._worker.abort()

    def _work(self, item: tuple[Delivery[Batch], np.ndarray]) -> None:
        began_at = self._clock.monotonic()
        try:
            self._tally(*item)
        except (TidemillError, OSError) as error:
            self._failed = True
            logs.log.warning("quality: the daily model can't be asked, and publication is judged without it: %s", error)
        took_s = self._clock.monotonic() - began_at
        self._next_at = began_at + took_s / self._share

    def _tally(self, delivery: Delivery[Batch], own: np.ndarray) -> None:
        settings, batch = self._settings, delivery.payload
        if self._score is None:
            assert self._load is not None
            self._score = self._load()
        rows = {OWN: scored_rows(batch, own, settings.label)}
        rows[FROZEN] = scored_rows(batch, self._score(batch)[settings.output], settings.label)
        numbers = window_numbers(delivery.provenance, batch.num_rows, settings.window_s)
        with self._lock:
            for number in np.unique(numbers[numbers >= self._open_from]):
                self._add(int(number), {name: select(scored, numbers == number) for name, scored in rows.items()})

    def _add(self, number: int, rows: Mapping[str, Scored]) -> None:
        tallies = self._windows.setdefault(number, {name: self._empty() for name in rows})
        for name, scored in rows.items():
            tallies[name].update(scored)

    def _empty(self) -> Tally:
        # A sample holds too few pairs of a group.
        return Tally([metric for metric in self._settings.make_metrics() if metric.name != "grouped_auc"])

    def _take(self, last: int) -> dict[str, np.ndarray]:
        """This rank's tallies of the windows up to `last`, which are closed."""
        with self._lock:
            self._open_from = max(self._open_from, last + 1)
            due = {number: self._windows.pop(number) for number in sorted(self._windows) if number <= last}
        arrays: dict[str, np.ndarray] = {}
        for number, tallies in due.items():
            for name, tally in tallies.items():
                arrays |= tally.arrays(f"{number}/{name}")
        return arrays

    def _figures(self, number: int, arrays: Mapping[str, np.ndarray]) -> SampleFigures | None:
        if f"{number}/{OWN}/rows" not in arrays:
            return None
        own, frozen = self._empty(), self._empty()
        own.merge(f"{number}/{OWN}", arrays)
        frozen.merge(f"{number}/{FROZEN}", arrays)
        return SampleFigures(own.rows, own.values(), frozen.values())
