"""The training job, daily or stream: everything that a run is made of, put together."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill import logs
from tidemill.cadence import ENDINGS, AtStart, EventTimeCrossing, EverySeconds, EverySteps, StopReason, SyncPoint, Trigger
from tidemill.checkpoint.capture import Capture, Staging
from tidemill.checkpoint.manager import CheckpointManager
from tidemill.checkpoint.restore import read_dataloader_state, read_file, read_rank_states, restore_tables
from tidemill.clock import EventTime
from tidemill.config.dump import dump
from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.data.assignment import AssignmentBase
from tidemill.data.loader import Loader
from tidemill.data.progress import Progress, verify_splits
from tidemill.data.source import Source
from tidemill.data.split import Split, SplitId
from tidemill.distributed.agreement import Agreement
from tidemill.distributed.runtime import Runtime, start_runtime
from tidemill.distributed.sharding import ShardedModel, shard
from tidemill.errors import ConfigError
from tidemill.features.feature_set import FeatureSet
from tidemill.jobs import pipeline
from tidemill.jobs.feed import DataFeed
from tidemill.jobs.place import Place, place_of
from tidemill.jobs.publication import Probes, Publication
from tidemill.jobs.start import Start, from_rank_zero, start_run
from tidemill.lineage.records import Retirement, RunRecorder, RunStart, open_lineage, retire
from tidemill.lineage.reporter import HandoverSettings, HandoverThread, Point, Successor
from tidemill.models.losses import build_losses
from tidemill.models.metrics import build_metrics, grouping_keys
from tidemill.models.model import build_model
from tidemill.publish.cut import Moment
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage
from tidemill.training.interval import IntervalStats
from tidemill.training.loop import Duties, Duty, LoopSettings, LoopState, Outcome, TrainingLoop
from tidemill.training.observers import ScoreLog, StepLog
from tidemill.training.optimizers import Optimizers
from tidemill.training.progressive import ProgressiveMetrics
from tidemill.training.step import Objective, TrainStep, padding_batch

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 1.0
"""How often a stream tells its record and its predecessor how far it is."""


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
    stop = _StopSignals()
    runtime = start_runtime(config.train_config.runtime.timeout_s, num_threads=config.train_config.runtime.threads)
    logs.set_up(rank=runtime.rank)
    try:
        with stop.installed(), ExitStack() as resources:
            return _Run(config, request, runtime, resources).train(stop)
    finally:
        runtime.close()


class _StopSignals:
    """SIGTERM and SIGINT ask the loop to stop, also if they come before there is one."""

    def __init__(self) -> None:
        self._loop: TrainingLoop | None = None
        self._asked = threading.Event()

    @contextmanager
    def installed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def attach(self, loop: TrainingLoop) -> None:
        self._loop = loop
        if self._asked.is_set():
            loop.preempt()

    def _ask(self, number: int, frame: object) -> None:
        self._asked.set()
        if self._loop is not None:
            self._loop.preempt()


class _Run:
    """One rank of one training run."""

    def __init__(self, config: PipelineConfig, request: TrainRequest, runtime: Runtime, resources: ExitStack) -> None:
        self._config = config
        self._train_config = config.train_config
        self._runtime = runtime
        self._resources = resources
        self._agreement = Agreement(runtime)
        self._place: Place | None = place_of(config.model_dir)
        self._storage: Storage = open_storage(config.model_dir)
        self._start: Start = start_run(
            self._storage,
            self._agreement,
            rank=runtime.rank,
            world_size=runtime.world_size,
            continue_train=request.continue_train,
            fine_tune_checkpoint=self._train_config.fine_tune_checkpoint,
        )
        self._is_stream = pipeline.is_stream(config)
        self._boundary = self._find_boundary()

    def train(self, stop: _StopSignals) -> int:
        recorder = self._open_records()
        try:
            outcome, successor = self._train(stop, recorder)
        except BaseException as error:
            if recorder:
                recorder.finish(StopReason.FAILED, error=error)
            raise
        if recorder:
            recorder.finish(outcome.reason, successor=successor)
        return ENDINGS[outcome.reason].exit_code or 0

    def _train(self, stop: _StopSignals, recorder: RunRecorder | None) -> tuple[Outcome, str | None]:
        self._build_model()
        self._restore()
        self._open_data()
        self._open_publication()
        self._open_handover()
        self._open_observers()
        loop = self._make_loop(recorder)
        stop.attach(loop)
        outcome = loop.run()
        return outcome, self._close(outcome)

    def _find_boundary(self) -> float | None:
        """Where the day's table ends and the stream begins: the config's word, or the snapshot's."""
        given = self._train_config.lineage.boundary
        return given if given is not None else self._start.snapshot.boundary if self._start.snapshot else None

    def _open_records(self) -> RunRecorder | None:
        writer = self._start.writer
        folder = layout.run(writer.run_id)
        local = self._storage.local_path(folder)
        self._run_folder: Path | None = local
        if local is not None:
            sink = logs.EventLog(
                local / (layout.EVENTS if writer.rank == 0 else f"events-{writer.rank:05d}.jsonl"), rank=writer.rank
            )
            logs.send_events_to(sink)
            self._resources.callback(sink.close)
            self._resources.callback(logs.send_events_to, None)
        if writer.rank != 0:
            return None
        date = self._place.date if self._place else None
        kind = "train_stream" if self._is_stream else "train_daily" if self._place else "train"
        recorder = RunRecorder(
            self._storage,
            RunStart(writer.run_id, kind, date, writer.term, self._boundary, writer.world_size),  # type: ignore[arg-type]
        )
        if self._is_stream and self._start.snapshot:
            open_lineage(self._storage, date, self._boundary)
        self._storage.write(f"{folder}/{layout.PIPELINE}", dump(self._config).encode())
        if not self._start.snapshot:
            self._storage.write(layout.PIPELINE, dump(self._config).encode())
        return recorder

    def _build_model(self) -> None:
        train_config, runtime = self._train_config, self._runtime
        seed = train_config.runtime.seed
        self._features: FeatureSet = pipeline.feature_set(self._config)
        self._label = pipeline.label_of(self._config)
        model = build_model(self._config.model, self._features, seed)
        self._tables = list(model.plan.tables)
        self._model: ShardedModel = shard(model, runtime, train_config.sparse_optimizer, train_config.runtime.sharding, seed)
        self._optimizers = Optimizers(self._model, train_config.dense_optimizer, train_config.sparse_optimizer)
        self._step = TrainStep(
            self._model,
            self._optimizers,
            Objective(build_losses(self._config.model.losses), self._label),
            padding_batch(self._features, [self._label], self._config.data_config.batch_size),
            train_config.grad_clipping,
            score_first=self._is_stream,
        )
        self._interval = IntervalStats(self._step)
        torch.manual_seed(seed + runtime.rank)

    def _restore(self) -> None:
        """Weights, optimizers, schedules and examples from own checkpoint or parent; the rest of own state from own only."""
        start = self._start
        self._progress = Progress()
        self._base: AssignmentBase | None = None
        self._watermark: float | None = None
        self._rank_states: list[dict[str, dict[str, Any]]] = []
        self._first_step, self._examples = 0, 0.0
        manifest, storage = (start.own, self._storage) if start.own else (start.parent, start.parent_storage)
        if manifest is None or storage is None:
            return
        self._restore_weights(storage, manifest)
        self._examples = float(manifest.examples)
        self._step.load_state(manifest.state["schedule"])
        if start.own is None:
            log.info("continuing from %s, step %d", storage.url, manifest.step)
            return
        self._first_step = manifest.step
        self._watermark = manifest.watermark
        self._base = AssignmentBase.from_json(manifest.state["assignment"])
        self._saved = read_dataloader_state(storage, manifest)
        self._progress = Progress.from_states(self._saved.splits, passes=self._saved.passes_completed)
        self._rank_states = read_rank_states(storage, manifest)
        if len(self._rank_states) == self._runtime.world_size:
            torch.set_rng_state(torch.from_numpy(np.array(self._rank_states[self._runtime.rank]["random"]["torch"])))
        log.info("resuming at step %d", manifest.step)

    def _restore_weights(self, storage: Storage, manifest: CheckpointManifest) -> None:
        restore_tables(storage, manifest, self._model.local_shards())
        self._model.load_dense_state(
            {name: torch.from_numpy(np.array(a)) for name, a in read_file(storage, manifest, "dense").items()}
        )
        self._optimizers.load_dense_optimizer_state(read_file(storage, manifest, "dense_optimizer"))

    def _open_data(self) -> None:
        config, writer = self._config, self._start.writer
        self._source: Source = pipeline.make_source(config, self._features, path=config.train_input_path, boundary=self._boundary)
        self._resources.callback(self._source.close)

        def discover() -> list[dict[str, Any]]:
            splits = self._source.discover()
            if self._start.own:
                verify_splits(self._source, splits, self._saved.splits)
            return [{"kind": s.id.kind, "name": s.id.name, "num_rows": s.num_rows, "fingerprint": s.fingerprint} for s in splits]

        found = from_rank_zero(self._agreement, writer.rank, discover)
        splits = [Split(SplitId(s["kind"], s["name"]), s["num_rows"], s["fingerprint"]) for s in found]
        self._feed = DataFeed(
            splits,
            self._open_loader,
            rank=writer.rank,
            world_size=writer.world_size,
            progress=self._progress,
            base=self._base,
            watermark=self._watermark,
            num_passes=None if self._train_config.num_steps else self._train_config.num_epochs,
            on_pass=self._count_pass,
            patience_s=self._train_config.runtime.timeout_s / 4,
        )
        self._resources.callback(lambda: self._feed.close())

    def _count_pass(self) -> None:
        self._step.passes += 1

    def _open_loader(self, assigned: list[Any]) -> Loader[Any]:
        config = self._config
        return Loader(
            self._source,
            assigned,
            batch_size=config.data_config.batch_size,
            transform=lambda table, size: self._features.transform(table, size=size),
            max_wait_s=config.kafka.max_wait_s if config.kafka else 0.0,
            idle_timeout_s=config.kafka.idle_timeout_s if config.kafka else 0.0,
            drop_before=self._boundary if self._is_stream else None,
            max_future_s=pipeline.latest_event_time(config),
        )

    def _open_publication(self) -> None:
        self._publication: Publication | None = None
        self._probes: Probes | None = None
        if not self._train_config.publish.enabled:
            return
        if self._start.snapshot is None:
            raise ConfigError(
                f"train_config.publish: {self._storage.url} holds no snapshot to publish on; export the parent there first"
            )
        self._publication = Publication(
            self._storage,
            self._start,
            self._model,
            self._agreement,
            self._tables,
            rank_states=self._rank_states,
            part_timeout_s=self._train_config.publish.part_timeout_s,
        )
        self._probes = Probes(self._storage, self._features, self._step, self._runtime.rank)
        self._resources.callback(self._publication.publisher.abort)

    def _open_handover(self) -> None:
        """Rank 0 of a stream tells how far it is, and watches its successor if it has one."""
        self._handover: HandoverThread | None = None
        handover = self._train_config.handover
        if self._runtime.rank != 0 or not self._is_stream:
            return
        successor = None
        if handover.successor_dir:
            place = place_of(handover.successor_dir)
            root = open_storage(place.root) if place else None
            successor = Successor(open_storage(handover.successor_dir), root, place.key if place else None)
        writer = self._start.writer
        settings = HandoverSettings(
            policy=handover.policy,
            tolerance_s=handover.tolerance_s,
            confirm_timeout_s=handover.confirm_timeout_s,
            report_interval_s=handover.report_interval_s or REPORT_INTERVAL_S,
        )
        self._handover = HandoverThread(self._storage, writer.run_id, writer.term, settings, successor)
        self._handover.start()
        self._resources.callback(self._handover.stop)

    def _open_observers(self) -> None:
        data, metrics = self._config.data_config, self._config.model.metrics
        self._observers: list[Any] = [self._interval]
        self._progressive = ProgressiveMetrics(
            lambda: build_metrics(metrics),
            label=self._label,
            window_s=self._train_config.progressive_window_s,
            keys=grouping_keys(metrics),
        )
        if self._runtime.rank == 0:
            self._progressive.load_state([state["progressive"] for state in self._rank_states if "progressive" in state])
        if self._is_stream:
            self._observers.append(self._progressive)
        folder, rank = self._run_folder, self._runtime.rank
        if folder is not None:
            step_log = StepLog(folder / layout.step_log(rank))
            self._observers.append(step_log)
            self._resources.callback(step_log.close)
        if folder is not None and data.id_column and self._is_stream:
            score_log = ScoreLog(folder / layout.score_log(rank), label=self._label)
            self._observers.append(score_log)
            self._resources.callback(score_log.close)

    def _make_loop(self, recorder: RunRecorder | None) -> TrainingLoop:
        self._manager = CheckpointManager(
            self._storage,
            self._start.writer,
            tables=self._tables,
            parent=self._start.parent_record,
            pipeline=dump(self._config),
            keep=self._train_config.keep_checkpoint_max,
        )
        self._resources.callback(self._manager.abort)
        self._staging = Staging()
        checks: list[Callable[[], None]] = [self._manager.check]
        if self._publication:
            checks.append(self._publication.publisher.check)
        self._loop = TrainingLoop(
            agreement=self._agreement,
            feed=self._feed,
            step=self._step,
            duties=Duties(
                checkpoint=self._checkpoint_duty(),
                cut=self._cut_duty(),
                report=self._report_duty(recorder),
                evaluate=self._evaluate_duty(),
            ),
            settings=LoopSettings(
                steps_per_round=self._train_config.steps_per_round,
                num_steps=self._train_config.num_steps,
                quorum=self._train_config.save_checkpoints_timestamp_quorum,
            ),
            observers=self._observers,
            state=LoopState(
                step=self._first_step,
                examples=self._examples,
                watermark=None if self._watermark is None else EventTime(self._watermark),
            ),
            checks=checks,
        )
        return self._loop

    def _checkpoint_duty(self) -> Duty:
        config = self._train_config
        triggers: list[Trigger] = []
        if config.save_checkpoints_steps and not config.save_checkpoints_epochs:
            triggers.append(EverySteps(config.save_checkpoints_steps, self._first_step))
        if config.save_checkpoints_timestamp_interval or config.save_checkpoints_timestamps:
            triggers.append(
                EventTimeCrossing(
                    config.save_checkpoints_timestamp_interval, config.save_checkpoints_timestamps, reference=self._watermark
                )
            )
        duty = Duty(act=self._save, triggers=triggers, ready=lambda: self._manager.ready, settled=lambda: self._manager.settled)
        if self._start.own:
            duty.committed_step = self._first_step
        return duty

    def _save(self, point: SyncPoint) -> int:
        rank_zero = self._runtime.rank == 0
        dense = self._model.dense_state() if rank_zero else {}
        rank_state: dict[str, dict[str, Any]] = {
            "random": {"torch": torch.get_rng_state().numpy().copy()},
            "progressive": self._progressive.state(),
        }
        if self._publication:
            rank_state["touched"] = self._publication.touched.state()
            rank_state["cursor"] = self._publication.cursor.state()
        return self._manager.save(
            Capture(
                step=point.last_step,
                examples=round(self._loop.examples),
                watermark=point.watermark,
                tables=self._staging.copy(self._model.local_shards()),
                dense={name: np.array(t.detach().cpu().numpy()) for name, t in dense.items()} if rank_zero else None,
                dense_optimizer=self._optimizers.dense_optimizer_state() if rank_zero else None,
                splits=self._feed.states(),
                rank_state=rank_state,
                shared_state={
                    "passes_completed": self._progress.passes,
                    "schedule": self._step.state(),
                    "assignment": self._feed.base.to_json(),
                },
            )
        )

    def _cut_duty(self) -> Duty | None:
        if self._publication is None:
            return None
        publish, publisher = self._train_config.publish, self._publication.publisher
        # What an earlier run had released after our checkpoint must be set right at once, whether a step comes or not.
        triggers: list[Trigger] = [AtStart()]
        if publish.interval_steps:
            triggers.append(EverySteps(publish.interval_steps, self._first_step))
        if publish.interval_s is not None:
            triggers.append(EverySeconds(publish.interval_s))
        return Duty(
            act=self._cut,
            triggers=triggers,
            ready=lambda: publisher.ready,
            settled=lambda: publisher.settled,
            on_settled=publisher.on_settled,
            max_tries=3,
        )

    def _cut(self, point: SyncPoint) -> int:
        assert self._publication is not None
        assert self._probes is not None
        moment = Moment(
            step=point.last_step,
            examples=round(self._loop.examples),
            watermark=point.watermark,
            event_time=self._feed.event_time([])[0],
            splits=self._feed.states(),
            probe_scores=self._probes.scores(),
            newest_event_at=self._feed.take_newest_arrival(),
        )
        return self._publication.publisher.cut(moment)

    def _report_duty(self, recorder: RunRecorder | None) -> Duty:
        steps = self._train_config.log_step_count_steps
        triggers: list[Trigger] = [EverySteps(steps, self._first_step)]
        if self._is_stream:
            triggers.append(EverySeconds(self._train_config.handover.report_interval_s or REPORT_INTERVAL_S))
        self._reporter = _Reporter(self, recorder, steps)
        return Duty(act=self._reporter.report, triggers=triggers)

    def _evaluate_duty(self) -> Duty | None:
        config = self._config
        if not config.eval_input_path or self._is_stream:
            return None
        return Duty(act=self._evaluate)

    def _evaluate(self, point: SyncPoint) -> int:
        config = self._config
        source = pipeline.make_source(config, self._features, path=config.eval_input_path)
        values = pipeline.evaluate_source(
            source,
            config,
            self._features,
            scores=self._step.scores,
            agreement=self._agreement,
            runtime=self._runtime,
        )
        log.info("evaluation at step %d: %s", point.last_step, ", ".join(f"{k} {v:.4f}" for k, v in values.items()))
        logs.event("evaluated", step=point.last_step, **values)
        return 0

    def _close(self, outcome: Outcome) -> str | None:
        """Leave things tidy; for a hand-over, retire the lineage. Returns the successor's name."""
        self._progressive.close_window()
        self._manager.close(deadline_s=60.0)
        if self._publication:
            self._publication.publisher.close(deadline_s=60.0)
        self._reporter.record(outcome.step, outcome.watermark)
        successor = self._train_config.handover.successor_dir
        if outcome.reason is not StopReason.HANDED_OVER or self._runtime.rank != 0 or self._handover is None:
            return None
        place = place_of(successor)
        name = place.key if place else successor
        newest = self._publication.publisher.newest if self._publication else None
        lag_s = self._handover.decision.lag_s
        retire(self._storage, self._start.writer.term, Retirement(name, lag_s, newest.sequence if newest else None))
        log.info("retired in favour of %s, which trailed by %.1f s", name, lag_s or 0.0)
        return name


class _Reporter:
    """Says how far a run is: to the log, the events, the record, and the hand-over thread."""

    def __init__(self, run: _Run, recorder: RunRecorder | None, log_steps: int) -> None:
        self._run = run
        self._recorder = recorder
        self._log_steps = log_steps
        self._logged_step = run._first_step

    def report(self, point: SyncPoint) -> int:
        run = self._run
        if run._handover is not None:
            run._handover.report(Point(point.watermark, point.last_step, self._released_watermark(), run._progressive.last))
            if run._handover.verdict:
                run._loop.hand_over()
        self.record(point.last_step, point.watermark)
        if point.last_step - self._logged_step >= self._log_steps:
            self._logged_step = point.last_step
            self._log(point)
        return 0

    def record(self, step: int, watermark: float | None) -> None:
        """Note in the run's record how far it is."""
        if self._recorder is None:
            return
        run = self._run
        saved = run._manager.newest
        newest = run._publication.publisher.newest if run._publication else None
        self._recorder.update(
            step=step,
            examples=round(run._loop.examples),
            watermark=watermark,
            checkpoint=saved[0] if saved else None,
            sequence=newest.sequence if newest else None,
        )

    def _released_watermark(self) -> float | None:
        publication = self._run._publication
        newest = publication.publisher.newest if publication else None
        return newest.watermark if newest else None

    def _log(self, point: SyncPoint) -> None:
        interval = self._run._interval.take()
        dense_rate, sparse_rate = self._run._step.learning_rates
        log.info("step %d: loss %.4f, %.0f examples/s", point.last_step, interval.loss, interval.examples_per_s)
        logs.event(
            "train.progress",
            step=point.last_step,
            watermark=point.watermark,
            loss=interval.loss,
            examples_per_s=interval.examples_per_s,
            dense_rate=dense_rate,
            sparse_rate=sparse_rate,
        )
