"""Progress lines while training or scoring runs on a terminal; elsewhere the log's own lines are enough."""

from __future__ import annotations

import logging
import time
from typing import Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tidemill.data.split import Delivery, Provenance
from tidemill.features.batch import Batch
from tidemill.logs import log
from tidemill.training.step import TrainStep

_EVERY_S = 10.0


class ProgressLine:
    """Rows trained on this rank, of how many, with the step and its loss (`training.loop.Observer`).

    `total`: rows of this rank's share of a pass; None for a stream. While the line stands, the log prints above it.
    """

    def __init__(self, step: TrainStep, total: int | None, console: Console) -> None:
        self._step = step
        self._console = console
        known = [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()] if total is not None else [TimeElapsedColumn()]
        self._progress = Progress(TextColumn("{task.description}"), *known, console=console, transient=True, refresh_per_second=4)
        self._task = self._progress.add_task("training", total=total)
        self._handlers = log.handlers[:]
        log.handlers[:] = [_Above(handler, console) for handler in self._handlers]
        self._progress.start()

    def entering(self, step: int, provenance: Provenance) -> None:
        return

    def trained(self, step: int, delivery: Delivery[Batch], outputs: dict[str, np.ndarray]) -> None:
        rows = max(delivery.payload.num_rows, 1)
        text = f"step {step + 1}, loss {self._step.loss_sum / rows:.4f}"
        self._progress.update(self._task, advance=delivery.payload.num_rows, description=text)

    def close(self) -> None:
        """Take the line away, and give the log its place back."""
        self._progress.stop()
        log.handlers[:] = self._handlers


class RowCount:
    """How many rows of all are done: a line that stands on a terminal, elsewhere one in the log every `_EVERY_S`.

    `what`: what is done with rows ("scored"). `console` None: nothing is said. A context manager; `update` may be called within.
    """

    def __init__(self, what: str, total: int, console: Console | None) -> None:
        self._what = what
        self._total = total
        self._console = console
        self._started = self._said = time.monotonic()
        self._handlers = log.handlers[:]
        self._progress: Progress | None = None

    def __enter__(self) -> Self:
        if self._console is not None and self._console.is_terminal:
            known = [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
            self._progress = Progress(TextColumn("{task.description}"), *known, console=self._console, transient=True)
            self._progress.add_task(self._what, total=self._total)
            log.handlers[:] = [_Above(handler, self._console) for handler in self._handlers]
            self._progress.start()
        return self

    def update(self, rows: int) -> None:
        """So many rows are done now, of all ranks."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=rows)
            return
        now = time.monotonic()
        if self._console is not None and now - self._said >= _EVERY_S:
            self._said = now
            log.info("%s %d of %d rows, %.0f a second", self._what, rows, self._total, rows / (now - self._started))

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            log.handlers[:] = self._handlers


class _Above(logging.Handler):
    """Prints what another handler would have written, above the progress line."""

    def __init__(self, inner: logging.Handler, console: Console) -> None:
        super().__init__(inner.level)
        self.setFormatter(inner.formatter)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)
