"""The training job, daily or stream: everything that a run is made of, put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console

from tidemill import logs
from tidemill.cadence import ENDINGS, Stateful, StopReason
from tidemill.checkpoint.capture import Staging
from tidemill.checkpoint.manager import CheckpointManager, Increments
from tidemill.clock import EventTime
from tidemill.config.dump import dump
from tidemill.contracts import layout
from tidemill.contracts.files import TableSpec
from tidemill.data.assignment import owner
from tidemill.data.dead_letters import DeadLetters
from tidemill.data.loader import Loader, RowCounts
from tidemill.data.split import Split
from tidemill.distributed.runtime import start_runtime
from tidemill.errors import ConfigError, StorageError
from tidemill.jobs import pipeline
from tidemill.jobs.batching import batch_rule, read_plan, shuffle_of
from tidemill.jobs.dead_letters import DEAD_LETTERS, open_dead_letters, restore_dead_letters
from tidemill.jobs.display import ProgressLine
from tidemill.jobs.duties import Saver, best_of, checkpoint_duty, cut_duty, evaluate_duty
from tidemill.jobs.feed import DataFeed
from tidemill.jobs.learner import Learner, build_learner
from tidemill.jobs.positions import find_positions, renew
from tidemill.jobs.publication import Probes, Publication
from tidemill.jobs.quality import open_frozen, open_quality
from tidemill.jobs.report import Figures, Reporter, open_handover, report_duty, retire_lineage
from tidemill.jobs.restore import Restored, restore, saved_positions
from tidemill.jobs.run import Run, open_recorder, open_run
from tidemill.jobs.signals import StopSignals
from tidemill.lineage.records import RunRecorder
from tidemill.lineage.reporter import HandoverThread
from tidemill.models.metrics import grouping_keys, progressive_metrics
from tidemill.publish.tracker import TouchedRows
from tidemill.training.interval import IntervalStats
from tidemill.training.loop import Duties, LoopSettings, LoopState, Observer, Outcome, TrainingLoop
from tidemill.training.observers import LateRows, ScoreLog, StepLog
from tidemill.training.progressive import ProgressiveMetrics, ProgressiveSettings
from tidemill.training.slices import Slices

CLOSE_DEADLINE_S = 60.0
"""How long an ending waits for what is being written; the loop has waited for all that matters before."""
_READ_AHEAD = 4
"""Batches that are ready, or being made, while one is trained."""


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """What the command line asks for. `overrides`: config field path -> value, None to leave it alone."""

    pipeline: str
    overrides: Mapping[str, object]
    edits: str | None = None
    continue_train: bool = False


def train(request: TrainRequest) -> int:
    """Train as the config says, on this rank; returns the exit code of the ending (D7). Collective.

    Raises TidemillError; what a failed run leaves behind says so in its record.
    """
    config = pipeline.load(request.pipeline, overrides=request.overrides, edits=request.edits).config
    stop = StopSignals()
    runtime = start_runtime(config.train_config.runtime.timeout_s, num_threads=config.train_config.runtime.threads)
    logs.set_up(rank=runtime.rank)
    try:
        with stop.installed(), ExitStack() as resources:
            run = open_run(config, runtime, resources, continue_train=request.continue_train)
            return _train_on_record(run, stop)
    finally:
        runtime.close()


def _train_on_record(run: Run, stop: StopSignals) -> int:
    recorder = open_recorder(run)
    try:
        job = _Job(run, recorder)
        stop.attach(job.loop.preempt)
        outcome = job.loop.run()
        successor = job.close(outcome)
    except BaseException as error:
        if recorder:
            _record_failure(recorder, error)
        raise
    if recorder:
        recorder.finish(outcome.reason, successor=successor)
    return ENDINGS[outcome.reason].exit_code or 0


def _record_failure(recorder: RunRecorder, error: BaseException) -> None:
    """A store that can't take the record either (it is full, say) mustn't hide why the run failed."""
    try:
        recorder.finish(StopReason.FAILED, error=error)
    except StorageError as failed:
        logs.log.warning("the run's record can't be written: %s", failed)


class _Job:
    """The parts of a run around its loop, in the order in which they depend on each other."""

    def __init__(self, run: Run, recorder: RunRecorder | None) -> None:
        self.run = run
        config = run.config.train_config
        self.learner = build_learner(
            run.config,
            pipeline.feature_set(run.config),
            run.runtime,
            batch_size=run.config.data_config.batch_size,
            score_first=run.is_stream,
        )
        torch.manual_seed(config.runtime.seed + run.rank)
        restored = restore(run, self.learner)
        self.dead_letters = _dead_letters(run, restored)
        self.feed = _open_feed(run, self.learner, restored, self.dead_letters)
        self.touched = _touched_rows(run, self.learner)
        self.publication = _open_publication(run, self.learner, restored, self.touched)
        self.handover = open_handover(run)
        measured = _measured(run, self.learner)
        self.progressive = _progressive(run, measured, restored)
        self.quality = open_quality(run, restored)
        self.frozen = open_frozen(run, measured)
        self.manager = _open_manager(run, self.learner)
        self.interval = IntervalStats(self.learner.step)
        restored.load_own("interval", self.interval, run)
        self.late = LateRows(lambda: self.loop.published_watermark)
        self.reporter = Reporter(self._figures(), recorder, self.handover, config.log_step_count_steps, restored.step)
        self.loop = TrainingLoop(
            agreement=run.agreement,
            feed=self.feed,
            step=self.learner.step,
            duties=self._duties(restored),
            settings=LoopSettings(
                steps_per_round=config.steps_per_round,
                num_steps=config.num_steps,
                quorum=config.save_checkpoints_timestamp_quorum,
                refuse_empty=True,
            ),
            observers=self._observers(),
            state=_loop_state(restored),
            checks=self._checks(),
        )

    def _figures(self) -> Figures:
        return Figures(
            self.learner,
            self.manager,
            self.publication.publisher if self.publication else None,
            self.progressive,
            self.interval,
            self.examples,
            self._rows,
            self.feed,
            self.run.agreement.collect,
            self.quality,
            self.frozen,
        )

    def _observers(self) -> list[Observer]:
        run = self.run
        return [
            self.interval,
            self.late,
            *([self.progressive] if run.is_stream else []),
            *([self.frozen] if self.frozen else []),
            *_open_logs(run, self.learner.label),
            *_open_display(run, self.learner, self.feed),
        ]

    def examples(self) -> int:
        """How many examples the line has been trained on."""
        return round(self.loop.examples)

    def _rows(self) -> RowCounts:
        return replace(self.feed.counts, late=self.late.count)

    def close(self, outcome: Outcome) -> str | None:
        """Leave things tidy; for a hand-over, retire the lineage. Returns the successor's name."""
        if self.run.is_stream and outcome.reason is not StopReason.PREEMPTED:
            # What a preempted run has of the open windows is in its checkpoint, for the next run to go on with.
            self.progressive.close_windows(math.inf, self.run.agreement.collect)
        self.manager.close(deadline_s=CLOSE_DEADLINE_S)
        if self.publication:
            self.publication.publisher.close(deadline_s=CLOSE_DEADLINE_S)
        self.reporter.finish(outcome.step, outcome.watermark)
        if outcome.reason is not StopReason.HANDED_OVER or self.handover is None:
            return None
        newest = self.publication.publisher.newest if self.publication else None
        return retire_lineage(self.run, self.handover, newest.sequence if newest else None)

    def _duties(self, restored: Restored) -> Duties:
        run, publication = self.run, self.publication
        stateful: dict[str, Stateful] = {"progressive": self.progressive, "interval": self.interval}
        cut = None
        if self.dead_letters:
            stateful[DEAD_LETTERS] = self.dead_letters
        if self.quality:
            stateful["quality"] = self.quality
        if publication:
            stateful |= {"touched": publication.touched, "cursor": publication.cursor}
            is_paused = self._is_paused
            cut = cut_duty(run, publication, Probes(run, self.learner), self.feed, self.examples, is_paused)
        saver = Saver(
            run,
            self.learner,
            self.feed,
            self.manager,
            Staging(),
            stateful,
            examples=self.examples,
            batches=lambda: self.loop.batches,
            touched=self.touched,
        )
        checkpoint = checkpoint_duty(saver, run.config.train_config, restored)
        return Duties(
            checkpoint=checkpoint,
            cut=cut,
            report=report_duty(run, self.reporter, restored.step),
            evaluate=evaluate_duty(run, self.learner, checkpoint),
        )

    def _checks(self) -> list[Callable[[], None]]:
        checks = [self.manager.check]
        if self.publication:
            checks.append(self.publication.publisher.check)
        if self.handover:
            checks.append(partial(self._take_verdict, self.handover))
        return checks

    def _is_paused(self) -> bool:
        return self.quality is not None and self.quality.paused

    def _take_verdict(self, handover: HandoverThread) -> None:
        if handover.verdict:
            self.loop.hand_over()


def _open_manager(run: Run, learner: Learner) -> CheckpointManager:
    manager = CheckpointManager(
        run.storage,
        run.start.writer,
        tables=learner.tables,
        parent=run.start.parent_record,
        pipeline=dump(run.config),
        keep=run.config.train_config.keep_checkpoint_max,
        best=best_of(run),
        increments=_increments(run, learner),
    )
    run.resources.callback(manager.abort)
    return manager


def _loop_state(restored: Restored) -> LoopState:
    watermark = None if restored.watermark is None else EventTime(restored.watermark)
    return LoopState(step=restored.step, examples=restored.examples, watermark=watermark)


def _dead_letters(run: Run, restored: Restored) -> DeadLetters | None:
    letters = open_dead_letters(run.config, run.folder, run.rank)
    if letters is not None:
        restore_dead_letters(letters, restored, rank=run.rank, world_size=run.runtime.world_size)
    return letters


def _open_feed(run: Run, learner: Learner, restored: Restored, dead_letters: DeadLetters | None) -> DataFeed:
    config, data, writer = run.config, run.config.data_config, run.start.writer
    source = pipeline.make_source(
        config, learner.features, path=config.train_input_path, boundary=run.boundary, dead_letters=dead_letters
    )
    run.resources.callback(source.close)

    num_passes = None if config.train_config.num_steps else config.train_config.num_epochs
    saved = saved_positions(run, source)
    positions = find_positions(source, run.agreement, writer.rank, saved, num_passes=num_passes)

    def open_loader(assigned: list[Any]) -> Loader[Any]:
        stream = config.stream
        return Loader(
            source,
            assigned,
            batch_size=data.batch_size,
            transform=pipeline.labelled(learner.features, learner.label),
            max_wait_s=stream.max_wait_s if stream else 0.0,
            idle_timeout_s=stream.idle_timeout_s if stream else 0.0,
            drop_before=run.boundary if run.is_stream else None,
            max_future_s=pipeline.latest_event_time(config),
            mine=lambda split: owner(split, writer.world_size) == writer.rank,
            depth=max(_READ_AHEAD, 2 * data.transform_threads),
            threads=data.transform_threads,
            rule=batch_rule(config),
            reading=read_plan(config, positions.progress.passes),
            dead_letters=dead_letters,
        )

    def order(splits: Sequence[Split], passes: int) -> Sequence[Split]:
        shuffle = shuffle_of(config, passes)
        return shuffle.splits(splits) if shuffle and not data.is_orderby_partition else splits

    def count_pass() -> None:
        learner.step.passes += 1

    feed = DataFeed(
        positions.splits,
        open_loader,
        rank=writer.rank,
        world_size=writer.world_size,
        progress=positions.progress,
        base=positions.base,
        watermark=restored.watermark,
        num_passes=num_passes,
        on_pass=count_pass,
        order=order,
        commit=source.commit,
        renew=renew(source, run.agreement, writer.rank),
        patience_s=config.train_config.runtime.timeout_s / 4 / config.train_config.steps_per_round,
    )
    run.resources.callback(feed.close)
    if dead_letters is not None:
        run.resources.callback(dead_letters.close)
    return feed


def _increments(run: Run, learner: Learner) -> Increments | None:
    """What incremental checkpoints build on; None if every checkpoint is to be full."""
    config = run.config.train_config
    wanted = run.is_stream if config.incremental_checkpoints is None else config.incremental_checkpoints
    own = run.start.own
    base = own if own and sorted(own.tables, key=_name) == sorted(learner.tables, key=_name) else None
    return Increments(base, config.fold_checkpoints_after) if wanted else None


def _name(table: TableSpec) -> str:
    return table.name


def _touched_rows(run: Run, learner: Learner) -> TouchedRows | None:
    """The rows that steps change from now on; None if nobody wants to know them."""
    if _increments(run, learner) is None and not run.config.train_config.publish.enabled:
        return None
    touched = TouchedRows(learner.model.local_shards())
    learner.model.on_lookup(touched.mark)
    return touched


def _open_publication(run: Run, learner: Learner, restored: Restored, touched: TouchedRows | None) -> Publication | None:
    if touched is None or not run.config.train_config.publish.enabled:
        return None
    if run.start.snapshot is None:
        raise ConfigError(f"train_config.publish: {run.storage.url} holds no snapshot to publish on; export the parent there first")
    publication = Publication(run, learner, restored, touched)
    run.resources.callback(publication.publisher.abort)
    return publication


def _measured(run: Run, learner: Learner) -> ProgressiveSettings:
    metrics, config = run.config.model.metrics, run.config.train_config
    return ProgressiveSettings(
        lambda: progressive_metrics(metrics),
        label=learner.label,
        window_s=config.progressive_window_s,
        keys=grouping_keys(metrics),
        slices=Slices(config.progressive_slices, config.progressive_slice_values),
    )


def _progressive(run: Run, settings: ProgressiveSettings, restored: Restored) -> ProgressiveMetrics:
    progressive = ProgressiveMetrics(settings, rank=run.rank, watermark=restored.watermark)
    if run.rank == 0:
        restored.load("progressive", progressive)
    return progressive


def _open_display(run: Run, learner: Learner, feed: DataFeed) -> list[Observer]:
    """A progress line, if rank 0 runs on a terminal."""
    console = Console(stderr=True)
    if run.rank != 0 or not console.is_terminal:
        return []
    line = ProgressLine(learner.step, feed.rows_left, console)
    run.resources.callback(line.close)
    return [line]


def _open_logs(run: Run, label: str) -> list[Observer]:
    """The step log, and the score log of a stream whose events have ids."""
    if run.folder is None:
        return []
    step_log = StepLog(run.folder / layout.step_log(run.rank))
    run.resources.callback(step_log.close)
    if not (run.config.data_config.id_column and run.is_stream):
        return [step_log]
    score_log = ScoreLog(run.folder / layout.score_log(run.rank), label=label)
    run.resources.callback(score_log.close)
    return [step_log, score_log]
