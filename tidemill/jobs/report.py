"""How far a training run is: for the log, the events, the record, and the hand-over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidemill import logs
from tidemill.cadence import EverySeconds, EverySteps, SyncPoint, Trigger
from tidemill.checkpoint.manager import CheckpointManager
from tidemill.data.loader import RowCounts
from tidemill.data.split import SplitId
from tidemill.jobs.feed import DataFeed
from tidemill.jobs.learner import Learner
from tidemill.jobs.place import place_of
from tidemill.jobs.quality import observe_windows
from tidemill.jobs.run import Run
from tidemill.lineage.handover import validate_handover
from tidemill.lineage.quality import QualityWatch
from tidemill.lineage.records import Retirement, RunRecorder, retire
from tidemill.lineage.reporter import HandoverThread, Point, Successor, handover_settings
from tidemill.lineage.watches import PAUSED
from tidemill.publish.publisher import Publisher
from tidemill.storage.open import open_storage
from tidemill.training.frozen import FrozenSample
from tidemill.training.interval import IntervalStats
from tidemill.training.loop import Duty
from tidemill.training.progressive import Collect, ProgressiveMetrics

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
"""How often a stream tells its record and its predecessor how far it is, besides every log_step_count_steps."""


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """Where the figures of a report come from."""

    learner: Learner
    manager: CheckpointManager
    publisher: Publisher | None
    progressive: ProgressiveMetrics
    interval: IntervalStats
    examples: Callable[[], int]
    rows: Callable[[], RowCounts]
    feed: DataFeed
    collect: Collect
    """Every rank's arrays; collective."""
    quality: QualityWatch | None
    frozen: FrozenSample | None


class Reporter:
    """Tells everyone how far the run is. Belongs to the training thread. `recorder`, `handover`: on rank 0 only."""

    def __init__(
        self, figures: Figures, recorder: RunRecorder | None, handover: HandoverThread | None, log_steps: int, first_step: int
    ) -> None:
        self._figures = figures
        self._recorder = recorder
        self._handover = handover
        self._log_steps = log_steps
        self._logged_step = first_step
        self._idle: list[SplitId] = []

    def report(self, point: SyncPoint) -> int:
        """After a round; a line in the log every `log_steps`. Collective: a window that is over is made of all ranks' rows."""
        windows = self._figures.progressive.close_windows(point.watermark, self._figures.collect)
        if self._figures.quality is not None:
            observe_windows(self._figures.quality, windows, self._figures.frozen, self._figures.collect)
        self._tell_idle()
        if self._handover is not None:
            self._handover.report(self._point(point.last_step, point.watermark))
        self.record(point.last_step, point.watermark)
        if point.last_step - self._logged_step >= self._log_steps:
            self._logged_step = point.last_step
            self._log(point)
        return 0

    def finish(self, step: int, watermark: float | None) -> None:
        """The run has ended there: what the record and progress.json say last."""
        self.record(step, watermark)
        if self._handover is not None:
            self._handover.finish(self._point(step, watermark))

    def _point(self, step: int, watermark: float | None) -> Point:
        newest = self._figures.publisher.newest if self._figures.publisher else None
        progressive = self._figures.progressive
        return Point(watermark, step, newest.watermark if newest else None, progressive.last, progressive.windows)

    def record(self, step: int, watermark: float | None) -> None:
        """Note in the run's record how far it is."""
        if self._recorder is None:
            return
        figures = self._figures
        saved = figures.manager.newest
        newest = figures.publisher.newest if figures.publisher else None
        self._recorder.update(
            step=step,
            examples=figures.examples(),
            watermark=watermark,
            checkpoint=saved[0] if saved else None,
            sequence=newest.sequence if newest else None,
            details=self._data() | ({PAUSED: figures.quality.paused} if figures.quality else {}),
        )

    def _log(self, point: SyncPoint) -> None:
        interval = self._figures.interval.take()
        dense_rate, sparse_rate = self._figures.learner.step.learning_rates
        log.info("step %d: loss %.4f, %.0f examples/s", point.last_step, interval.loss, interval.examples_per_s)
        logs.event(
            "train.progress",
            step=point.last_step,
            watermark=point.watermark,
            loss=interval.loss,
            examples_per_s=interval.examples_per_s,
            dense_rate=dense_rate,
            sparse_rate=sparse_rate,
            batches_in_hand=self._figures.feed.batches_in_hand,
            **self._data(),
        )

    def _data(self) -> dict[str, Any]:
        """How this rank's data stand: what the boundary has dropped, what came late, event times that nobody believed, how far
        each partition is, and which are idle."""
        counts, feed = self._figures.rows(), self._figures.feed
        return {
            "rows_before_boundary": counts.dropped,
            "rows_skipped": counts.poison,
            "rows_late": counts.late,
            "rows_oversized": counts.oversized,
            "rows_remainder": counts.remainder,
            "event_times_refused": counts.refused_times,
            "event_times": {split.name: time for split, time in feed.partition_times.items() if time is not None},
            "idle_partitions": [split.name for split in feed.idle_partitions],
        }

    def _tell_idle(self) -> None:
        """An event whenever another set of partitions is idle."""
        feed = self._figures.feed
        idle = feed.idle_partitions
        if idle != self._idle:
            names = [split.name for split in idle]
            self._idle = idle
            log.info("idle partitions, which don't hold back the watermark: %s", ", ".join(names) or "none")
            logs.event("partitions.idle", partitions=names, of=len(feed.partition_times))


def report_duty(run: Run, reporter: Reporter, first_step: int) -> Duty:
    """Every log_step_count_steps; a stream, which may be idle, also by the clock."""
    config = run.config.train_config
    triggers: list[Trigger] = [EverySteps(config.log_step_count_steps, first_step)]
    if run.is_stream:
        triggers.append(EverySeconds(config.handover.report_interval_s or REPORT_INTERVAL_S))
    return Duty(act=reporter.report, triggers=triggers)


def open_handover(run: Run) -> HandoverThread | None:
    """Rank 0 of a stream tells how far it is, and watches its successor if it has one.

    Raises ConfigError, on every rank, for settings that can't be meant.
    """
    config = run.config.train_config.handover
    validate_handover(config.successor_dir, run.config.model_dir, config.tolerance_s)
    if not run.is_stream:
        return None
    successor = None
    if config.successor_dir:
        place = place_of(config.successor_dir)
        root = open_storage(place.root) if place else None
        successor = Successor(open_storage(config.successor_dir), root, place.key if place else None)
    writer = run.start.writer
    # Made on every rank, since it refuses settings that can't be meant; only rank 0's is started.
    thread = HandoverThread(run.storage, writer.run_id, writer.term, handover_settings(config), successor)
    if run.rank != 0:
        return None
    thread.start()
    run.resources.callback(thread.stop)
    return thread


def retire_lineage(run: Run, handover: HandoverThread, last_sequence: int | None) -> str:
    """Retire the run's lineage in favour of its successor; the successor's name."""
    successor = run.config.train_config.handover.successor_dir
    place = place_of(successor)
    name = place.key if place else successor
    lag_s = handover.decision.lag_s
    retire(run.storage, run.start.writer.term, Retirement(name, lag_s, last_sequence))
    log.info("retired in favour of %s, which trailed by %.1f s", name, lag_s or 0.0)
    return name
