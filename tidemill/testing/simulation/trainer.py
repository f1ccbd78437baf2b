"""One rank of a simulated run: what `jobs.train` puts together, with rows of the story's world and a table of counts as a model."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from tidemill.cadence import EventTimeCrossing, EverySeconds, EverySteps, SyncPoint, Trigger
from tidemill.checkpoint.capture import Capture
from tidemill.checkpoint.discovery import read_dataloader_state, read_rank_states
from tidemill.checkpoint.manager import CheckpointManager, Increments
from tidemill.clock import EventTime
from tidemill.contracts import layout
from tidemill.data.assignment import Assigned, AssignmentBase, owner
from tidemill.data.loader import Loader, ReadPlan
from tidemill.data.rebatch import BatchRule
from tidemill.data.shuffle import Shuffle
from tidemill.data.split import Delivery, Provenance
from tidemill.jobs.feed import DataFeed
from tidemill.jobs.positions import Saved, find_positions, renew
from tidemill.jobs.start import Start, from_rank_zero, start_run
from tidemill.lineage.records import RunRecorder, RunStart
from tidemill.testing.rank_threads import ThreadAgreement, ThreadGroup
from tidemill.testing.simulation.model import CountingModel, CountShard, read_counts, table_spec, take_ids, trained_ids
from tidemill.testing.simulation.scheduler import Scheduler
from tidemill.testing.simulation.store import MemoryStorage, ProcessStorage
from tidemill.testing.simulation.world import WorldSource
from tidemill.testing.validating.trainer import MODEL, Ids, id_line, id_log_name
from tidemill.training.loop import Duties, Duty, LoopSettings, LoopState, Outcome, TrainingLoop
from tidemill.training.observers import step_line

TIMEOUT_S = 20.0
"""How long ranks wait for each other."""


@dataclass(frozen=True, slots=True)
class LineSettings:
    """What is the same in all runs of a story."""

    num_passes: int = 1
    shuffle_rows: int = 0
    quorum: float = 1.0
    idle_timeout_s: float = float("inf")
    cost: bool = False
    drop_remainder: bool = False
    incremental: bool = False


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What may be another in each run."""

    world_size: int = 1
    batch_size: int = 4
    threads: int = 1
    readers: int = 1
    in_order: bool = True
    steps_per_round: int = 1
    checkpoint_steps: int = 0
    checkpoint_s: float = 0.0
    checkpoint_times: float = 0.0
    keep: int = 0
    fold_after: int = 2
    max_wait_s: float = 0.2


@dataclass(slots=True, eq=False)
class SimulatedRun:
    """What the ranks of a run share, and what it shows of itself.

    `points`: the SyncPoints, which are the same on all ranks; `parts`: by point, the partitions of each rank; `trained`: the ids.
    """

    name: str
    settings: RunSettings
    group: ThreadGroup
    began_at: float
    points: list[SyncPoint] = field(default_factory=list)
    parts: list[dict[int, tuple[str, ...]]] = field(default_factory=list)
    restored: tuple[int, int] | None = None
    """(term, step)"""
    watermark: float | None = None
    known: set[int] = field(default_factory=set)
    """ids trained by the checkpoint that it went on from"""
    trained: list[tuple[int, int]] = field(default_factory=list)
    """(step, id)"""
    loops: dict[int, TrainingLoop] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)


class MemoryLog:
    """The step log and the id log of one rank, in the store."""

    def __init__(self, store: MemoryStorage, run: SimulatedRun, run_id: str, rank: int, scheduler: Scheduler) -> None:
        self._store = store
        self._run = run
        self._scheduler = scheduler
        folder = layout.run(run_id)
        self._steps, self._ids = f"{folder}/{layout.step_log(rank)}", f"{folder}/{id_log_name(rank)}"
        self._who = f"{run.name} rank {rank}"

    def entering(self, step: int, provenance: Provenance) -> None:
        self._store.append(self._steps, step_line(step, self._scheduler.now, provenance))

    def trained(self, step: int, delivery: Delivery[Ids], outputs: dict[str, object]) -> None:
        ids = delivery.payload.ids.tolist()
        self._store.append(self._ids, id_line(step, ids))
        self._run.trained += [(step, one) for one in ids]
        self._scheduler.note(f"{self._who}: step {step} trains {ids}")


class EveryRound:
    """Due after each round (`cadence.Trigger`)."""

    def due(self, point: SyncPoint) -> bool:
        return True

    def fired(self, point: SyncPoint) -> None:
        return

    def steps_to_next(self, step: int) -> int | None:
        return None


class SimulatedTrainer:
    """One rank of one run. Raises what a training job raises."""

    def __init__(
        self, line: LineSettings, run: SimulatedRun, rank: int, source: WorldSource, storage: ProcessStorage, store: MemoryStorage
    ) -> None:
        self._line = line
        self._run = run
        self._rank = rank
        self._source = source
        self._storage = storage
        self._store = store
        self._scheduler = source.scheduler
        self._agreement = ThreadAgreement(run.group, rank)
        self._reported: list[tuple[str, ...]] = []

    def train(self) -> Outcome:
        """Start, train to the end, and close."""
        with ExitStack() as resources:
            start = start_run(
                self._storage,
                self._agreement,  # type: ignore[arg-type]
                resources,
                rank=self._rank,
                world_size=self._run.settings.world_size,
                continue_train=True,
                fine_tune_checkpoint="",
            )
            self._model = self._restore(start)
            self._manager = self._open_manager(start)
            resources.callback(self._manager.abort)
            recorder = self._record(start)
            self._feed = self._open_feed(start)
            resources.callback(self._feed.close)
            loop = self._loop = self._open_loop(start)
            self._run.loops[self._rank] = loop
            outcome = loop.run()
            self._manager.close(deadline_s=60.0)
            if recorder:
                recorder.finish(outcome.reason)
            return outcome

    def _restore(self, start: Start) -> CountingModel:
        run, own = self._run, start.own
        size = self._source.world.table_size
        shard = CountShard.of_rank(size, self._rank, run.settings.world_size)
        model = CountingModel(shard, run.group, self._rank, own.step if own else 0, self._scheduler)
        if own:
            shard.restore(self._storage, own)
            if self._rank == 0:
                model.ids.load_state([state[MODEL] for state in read_rank_states(self._storage, own)])
                run.restored, run.watermark = (own.term, own.step), own.watermark
                run.known = trained_ids(read_counts(self._store, own)[0])
        return model

    def _open_manager(self, start: Start) -> CheckpointManager:
        settings = self._run.settings
        return CheckpointManager(
            self._storage,
            start.writer,
            tables=[table_spec(self._source.world.table_size)],
            keep=settings.keep,
            increments=Increments(start.own, settings.fold_after) if self._line.incremental else None,
            part_timeout_s=TIMEOUT_S,
        )

    def _record(self, start: Start) -> RunRecorder | None:
        own, writer = start.own, start.writer
        resumed = (own.term, own.step) if own else None
        begun = RunStart(writer.run_id, "train", term=writer.term, world_size=writer.world_size, resumed=resumed)
        opened: list[RunRecorder] = []
        from_rank_zero(self._agreement, self._rank, lambda: opened.append(RunRecorder(self._storage, begun)))  # type: ignore[arg-type]
        return opened[0] if opened else None

    def _open_feed(self, start: Start) -> DataFeed:
        line, own, source = self._line, start.own, self._source
        base = AssignmentBase.from_json(own.state["assignment"]) if own else None
        saved = Saved(read_dataloader_state(self._storage, own), base) if own else None
        positions = find_positions(source, self._agreement, self._rank, saved, num_passes=line.num_passes)  # type: ignore[arg-type]
        progress = positions.progress
        return DataFeed(
            positions.splits,
            lambda assigned: self._open_loader(assigned, progress.passes),  # type: ignore[arg-type, return-value]
            rank=self._rank,
            world_size=self._run.settings.world_size,
            progress=progress,
            base=positions.base,
            watermark=own.watermark if own else None,
            num_passes=line.num_passes,
            order=lambda splits, passes: self._shuffle(passes).splits(splits) if line.shuffle_rows else splits,
            commit=source.commit,
            renew=renew(source, self._agreement, self._rank),  # type: ignore[arg-type]
            patience_s=TIMEOUT_S / 4,
        )

    def _shuffle(self, passes: int) -> Shuffle:
        return Shuffle(0, passes, self._line.shuffle_rows)

    def _open_loader(self, assigned: list[Assigned], passes: int) -> Loader[Ids]:
        line, settings, world = self._line, self._run.settings, self._source.world
        cost = ("cost", 8.0) if line.cost else ("", float("inf"))
        return Loader(
            self._source,
            assigned,
            batch_size=settings.batch_size,
            transform=self._transform,
            max_wait_s=settings.max_wait_s,
            idle_timeout_s=line.idle_timeout_s,
            threads=settings.threads,
            drop_before=world.boundary,
            rule=BatchRule(settings.batch_size, *cost, drop_remainder=line.drop_remainder),
            reading=ReadPlan(settings.readers, self._shuffle(passes) if line.shuffle_rows else None, settings.in_order),
            mine=lambda split: owner(split, settings.world_size) == self._rank,
        )

    def _transform(self, rows: pa.Table, size: int) -> Ids:
        if self._scheduler.rng.random() < 0.2:
            self._scheduler.sleep(self._scheduler.rng.random() * 0.1)
        return take_ids(rows)

    def _open_loop(self, start: Start) -> TrainingLoop:
        own, settings = start.own, self._run.settings
        return TrainingLoop(
            agreement=self._agreement,
            feed=self._feed,
            step=self._model,  # type: ignore[arg-type]
            duties=Duties(checkpoint=self._checkpoint_duty(start), report=Duty(act=self._observe, triggers=[EveryRound()])),
            settings=LoopSettings(settings.steps_per_round, quorum=self._line.quorum, finish_timeout_s=TIMEOUT_S * 3),
            observers=[MemoryLog(self._store, self._run, start.writer.run_id, self._rank, self._scheduler)],  # type: ignore[list-item]
            state=LoopState(
                step=own.step if own else 0,
                examples=float(own.examples) if own else 0.0,
                watermark=None if own is None or own.watermark is None else EventTime(own.watermark),
            ),
            checks=[self._manager.check, self._reporting],
        )

    def _checkpoint_duty(self, start: Start) -> Duty:
        own, settings, manager = start.own, self._run.settings, self._manager
        triggers: list[Trigger] = []
        if settings.checkpoint_steps:
            triggers.append(EverySteps(settings.checkpoint_steps, own.step if own else 0))
        if settings.checkpoint_s:
            triggers.append(EverySeconds(settings.checkpoint_s))
        if settings.checkpoint_times:
            triggers.append(EventTimeCrossing(settings.checkpoint_times, reference=own.watermark if own else None))
        duty = Duty(
            act=lambda point: 0 if duty.is_done(point) else self._save(point),
            triggers=triggers,
            ready=lambda: manager.ready,
            settled=lambda: manager.settled,
            on_settled=self._settled,
            position=lambda: (self._loop.batches, self._feed.progress.passes),
            committed_step=own.step if own else -1,
            committed_position=(0, self._feed.progress.passes),
        )
        return duty

    def _settled(self, number: int, committed: bool) -> None:
        self._manager.on_settled(number, committed)
        if committed:
            self._feed.committed()

    def _save(self, point: SyncPoint) -> int:
        self._feed.saving()
        model, full = self._model, self._manager.wants_full
        touched = model.touched.take_unsaved().get(model.shard.table)
        rows = None if full else touched if touched is not None else np.empty(0, np.int64)
        return self._manager.save(
            Capture(
                step=point.last_step,
                examples=round(self._loop.examples),
                watermark=point.watermark,
                full=full,
                tables=[model.shard.capture(rows)],
                dense_files={},
                splits=self._feed.states(),
                rank_state={MODEL: model.ids.state()},
                shared_state={"passes_completed": self._feed.progress.passes, "assignment": self._feed.base.to_json()},
            )
        )

    def _reporting(self) -> None:
        """The partitions that the rank knew as it reported; it may have found another one when the round is over."""
        self._reported.append(tuple(split.name for split in self._feed.partition_times))

    def _observe(self, point: SyncPoint) -> int:
        """What an onlooker sees of a round, the same on all ranks."""
        run = self._run
        if point.number == len(run.points):
            run.points.append(point)
            run.parts.append({})
        assert run.points[point.number] == point, f"ranks differ: {run.points[point.number]} and {point}"
        run.parts[point.number][self._rank] = self._reported[point.number]
        step = self._model.step
        assert step == point.last_step, f"rank {self._rank} is at step {step}, the others at {point.last_step}"
        return 0
