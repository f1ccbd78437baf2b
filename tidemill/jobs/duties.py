"""What follows a training round: checkpoints, cuts of releases, evaluations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from tidemill import logs
from tidemill.cadence import AtStart, EventTimeCrossing, EverySeconds, EverySteps, Stateful, SyncPoint, Trigger
from tidemill.checkpoint.best import best_step, record_evaluation
from tidemill.checkpoint.capture import Capture, Staging
from tidemill.checkpoint.manager import CheckpointManager
from tidemill.checkpoint.retention import BestStep
from tidemill.config.train import TrainConfig
from tidemill.jobs import pipeline
from tidemill.jobs.evaluate import Evaluation
from tidemill.jobs.feed import DataFeed
from tidemill.jobs.learner import Learner
from tidemill.jobs.publication import Probes, Publication
from tidemill.jobs.restore import RANDOM, Restored, random_state
from tidemill.jobs.run import Run
from tidemill.publish.cut import Moment
from tidemill.publish.tracker import TouchedRows
from tidemill.training.loop import Duty

log = logging.getLogger(__name__)


class EveryPasses:
    """Due each time the number of completed passes passes a multiple of n (`cadence.Trigger`).

    `passes` is the same on all ranks: they begin each pass in the same round.
    """

    def __init__(self, n: int, passes: Callable[[], int]) -> None:
        self._n = n
        self._passes = passes
        self._last = passes()

    def due(self, point: SyncPoint) -> bool:
        return self._passes() // self._n > self._last // self._n

    def fired(self, point: SyncPoint) -> None:
        self._last = self._passes()

    def steps_to_next(self, step: int) -> int | None:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Saver:
    """Captures this rank's share of a checkpoint. `stateful`: what else is saved, by the name that it is restored under.

    `examples`: how many examples the line has been trained on. `batches`: how many batches this run is done with. `touched`: the
    rows for incremental checkpoints.
    """

    run: Run
    learner: Learner
    feed: DataFeed
    manager: CheckpointManager
    staging: Staging
    stateful: Mapping[str, Stateful]
    examples: Callable[[], int]
    batches: Callable[[], int]
    touched: TouchedRows | None = None

    def save(self, point: SyncPoint) -> int:
        """Begin a checkpoint; its number."""
        began = time.monotonic()
        self.feed.saving()
        capture = self._capture(point)
        return self.manager.save(replace(capture, blocked_s=time.monotonic() - began))

    def _capture(self, point: SyncPoint) -> Capture:
        shards = self.learner.model.local_shards()
        full = self.manager.wants_full
        touched = self.touched.take_unsaved() if self.touched else {}
        return Capture(
            step=point.last_step,
            examples=self.examples(),
            watermark=point.watermark,
            full=full,
            tables=self.staging.copy(shards) if full else self.staging.copy_rows(shards, touched),
            dense_files=self.learner.dense_files() if self.run.rank == 0 else {},
            splits=self.feed.states(),
            rank_state={
                RANDOM: random_state(self.run.runtime.device),
                **{name: owner.state() for name, owner in self.stateful.items()},
            },
            shared_state={
                "passes_completed": self.feed.progress.passes,
                "schedule": self.learner.step.state(),
                "served_dense": self.learner.served_file(self.run.config.export_config.use_dense_ema),
                "assignment": self.feed.base.to_json(),
            },
        )


def checkpoint_duty(saver: Saver, config: TrainConfig, restored: Restored) -> Duty:
    """Checkpoints as the config says; an own checkpoint that was restored isn't written again."""
    triggers: list[Trigger] = []
    if config.save_checkpoints_epochs:
        triggers.append(EveryPasses(config.save_checkpoints_epochs, lambda: saver.feed.progress.passes))
    elif config.save_checkpoints_steps:
        triggers.append(EverySteps(config.save_checkpoints_steps, restored.step))
    if config.save_checkpoints_timestamp_interval or config.save_checkpoints_timestamps:
        times = config.save_checkpoints_timestamps
        triggers.append(EventTimeCrossing(config.save_checkpoints_timestamp_interval, times, reference=restored.watermark))
    if config.save_checkpoints_secs is not None:
        triggers.append(EverySeconds(config.save_checkpoints_secs))
    manager = saver.manager

    def save(point: SyncPoint) -> int:
        """Nothing, if a trigger that doesn't count steps is due where there is a checkpoint already."""
        return 0 if duty.is_done(point) else saver.save(point)

    def on_settled(number: int, committed: bool) -> None:
        manager.on_settled(number, committed)
        if committed:
            saver.feed.committed()

    duty = Duty(
        act=save,
        triggers=triggers,
        ready=lambda: manager.ready,
        settled=lambda: manager.settled,
        on_settled=on_settled,
        # A pass may end, and rows without weight be done with, though no step follows.
        position=lambda: (saver.batches(), saver.feed.progress.passes),
    )
    if saver.run.start.own:
        duty.committed_step, duty.committed_position = restored.step, (0, saver.feed.progress.passes)
    return duty


def cut_duty(
    run: Run,
    publication: Publication,
    probes: Probes,
    feed: DataFeed,
    examples: Callable[[], int],
    is_paused: Callable[[], bool],
) -> Duty:
    """Releases as the config says. While paused there is none, the last one included; what has changed waits for the next cut.

    `is_paused`: the same on all ranks at the same SyncPoint.
    """
    publish, publisher = run.config.train_config.publish, publication.publisher
    first_step = run.start.own.step if run.start.own else 0

    def cut(point: SyncPoint) -> int:
        if is_paused():
            return 0
        moment = Moment(
            step=point.last_step,
            examples=examples(),
            watermark=point.watermark,
            event_time=feed.trained_event_time,
            splits=feed.positions(),
            probe_scores=probes.scores(),
            newest_event_at=feed.take_newest_arrival(),
        )
        return publisher.cut(moment)

    # What an earlier run had released after our checkpoint must be set right at once, whether a step comes or not.
    triggers: list[Trigger] = [AtStart()]
    if publish.interval_steps:
        triggers.append(EverySteps(publish.interval_steps, first_step))
    if publish.interval_s is not None:
        triggers.append(EverySeconds(publish.interval_s))
    return Duty(
        act=cut,
        triggers=triggers,
        ready=lambda: publisher.ready,
        settled=lambda: publisher.settled,
        on_settled=publisher.on_settled,
        max_tries=3,
    )


class AfterSave:
    """Due where a checkpoint was begun in the same round (`cadence.Trigger`)."""

    def __init__(self, checkpoint: Duty) -> None:
        self._checkpoint = checkpoint
        self._last = -1

    def due(self, point: SyncPoint) -> bool:
        return self._last < point.last_step == self._checkpoint.last_step

    def fired(self, point: SyncPoint) -> None:
        self._last = point.last_step

    def steps_to_next(self, step: int) -> int | None:
        return None


def evaluate_duty(run: Run, learner: Learner, checkpoint: Duty) -> Duty | None:
    """An evaluation at the end, if there is data for it, and one of each checkpoint if the best is wanted. A stream has none."""
    config = run.config
    if not config.eval_input_path or run.is_stream:
        return None

    def evaluate(point: SyncPoint) -> int:
        values = pipeline.evaluate_source(
            pipeline.make_source(config, learner.features, path=config.eval_input_path),
            config,
            learner.features,
            scores=learner.served_scores(config.eval_config.use_dense_ema),
            agreement=run.agreement,
            runtime=run.runtime,
        )
        log.info("evaluation at step %d: %s", point.last_step, ", ".join(f"{k} {v:.4f}" for k, v in values.items()))
        logs.event("evaluated", step=point.last_step, **values)
        if run.rank == 0:
            record_evaluation(run.storage, Evaluation(point.last_step, values).line())
        return 0

    return Duty(act=evaluate, triggers=[AfterSave(checkpoint)] if config.export_config.exporter_type == "best" else [])


def best_of(run: Run) -> BestStep:
    """Which checkpoint is to be kept as the best: steps -> one of them, or None."""
    export_config = run.config.export_config
    if export_config.exporter_type != "best":
        return lambda steps: None

    def best(steps: Collection[int]) -> int | None:
        larger = export_config.metric_larger_is_better
        return best_step(run.storage, export_config.best_exporter_metric, larger=larger, steps=steps)

    return best
