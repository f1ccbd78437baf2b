"""One rank of the validating trainer: `python -m tidemill.testing.validating.trainer SPEC MEETING_POINT RANK WORLD_SIZE OPERATION`.

Everything between the source and the step is what the training job uses; the step counts ids instead of learning from them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from pydantic import Field

from tidemill.cadence import ENDINGS, EverySteps, SyncPoint
from tidemill.checkpoint.capture import Capture
from tidemill.checkpoint.discovery import read_dataloader_state, read_rank_states
from tidemill.checkpoint.manager import CheckpointManager
from tidemill.clock import EventTime
from tidemill.config.base import Config
from tidemill.contracts import layout
from tidemill.contracts.lineage import RunKind
from tidemill.data.assignment import Assigned, AssignmentBase, owner
from tidemill.data.loader import Loader, ReadPlan
from tidemill.data.shuffle import Shuffle
from tidemill.data.source import Source
from tidemill.data.split import Delivery, Provenance
from tidemill.errors import TidemillError
from tidemill.jobs.feed import DataFeed
from tidemill.jobs.positions import Saved, find_positions, renew
from tidemill.jobs.signals import StopSignals
from tidemill.jobs.start import from_rank_zero, start_run
from tidemill.lineage.records import RunRecorder, RunStart
from tidemill.storage.backends.local import LocalStorage
from tidemill.storage.base import Chunk, ObjectInfo, Storage
from tidemill.testing.validating.agreement import SocketAgreement
from tidemill.testing.validating.sources import make_source
from tidemill.training.loop import Duties, Duty, LoopSettings, LoopState, TrainingLoop
from tidemill.training.observers import StepLog

MODEL = "ids"
"""Under which name a checkpoint holds what has been counted."""


class TrainerSpec(Config):
    """What a validating trainer trains on, as JSON."""

    folder: str
    """Checkpoints, terms, records and logs."""
    source: dict[str, Any]
    """`kind`, and the source's own config."""
    columns: dict[str, str] = Field(default_factory=lambda: {"id": "int64"})
    """Name -> Arrow type of what is read."""
    id_column: str = "id"
    event_time_column: str | None = None
    batch_size: int = 16
    threads: int = 1
    reader_threads: int = 1
    in_order: bool = True
    shuffle_rows: int = 0
    """Rows of a block within which rows are shuffled; 0: as they lie. Not to change while a pass is under way."""
    steps_per_round: int = 1
    checkpoint_steps: int = 5
    num_passes: int | None = 1
    boundary: float | None = None
    quorum: float = 1.0
    max_wait_s: float = 0.05
    idle_timeout_s: float = 2.0
    timeout_s: float = 20.0
    step_s: float = 0.0
    """How long a step takes."""


@dataclass(frozen=True, slots=True)
class Ids:
    """The rows of a batch: `ids` (num_rows,) int64, `weights` all ones."""

    ids: np.ndarray
    weights: np.ndarray


class CountingStep:
    """The model: how many ids it has seen, and their sum modulo 2^64; each rank counts its own (`training.loop.Step`)."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.rows = 0
        self.sum = 0

    def __call__(self, batch: Any, global_weight: float) -> dict[str, np.ndarray]:
        if self._step_s:
            time.sleep(self._step_s)
        self.rows += len(batch.ids)
        self.sum = (self.sum + int(batch.ids.astype(np.uint64).sum(dtype=np.uint64))) % 2**64
        return {}

    def padding(self) -> Any:
        return Ids(np.empty(0, np.int64), np.empty(0, np.float32))

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows, "sum": str(self.sum)}

    def load_state(self, states: list[dict[str, Any]]) -> None:
        """All that any rank had counted."""
        self.rows = sum(state["rows"] for state in states)
        self.sum = sum(int(state["sum"]) for state in states) % 2**64


class IdLog:
    """`ids-<rank>.jsonl`: the ids of each step, written before any checkpoint can hold it."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def entering(self, step: int, provenance: Provenance) -> None:
        return

    def trained(self, step: int, delivery: Delivery[Any], outputs: dict[str, np.ndarray]) -> None:
        os.write(self._fd, id_line(step, delivery.payload.ids.tolist()))


class DyingStorage(Storage):
    """A store in which this process is killed as it begins its n-th operation (SIGKILL: nothing is tidied up)."""

    def __init__(self, inner: Storage, operation: int) -> None:
        self.url = inner.url
        self._inner = inner
        self._left = operation
        self._lock = threading.Lock()

    def read(self, key: str) -> bytes:
        self._count()
        return self._inner.read(key)

    def write(self, key: str, *chunks: Chunk) -> None:
        self._count()
        self._inner.write(key, *chunks)

    def create(self, key: str, *chunks: Chunk) -> None:
        self._count()
        self._inner.create(key, *chunks)

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        self._count()
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self._count()
        self._inner.delete(key)

    def local_path(self, key: str) -> Path | None:
        return self._inner.local_path(key)

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class ValidatingTrainer:
    """One rank of one run, put together as `jobs.train` puts a training job together."""

    def __init__(self, spec: TrainerSpec, storage: Storage, agreement: SocketAgreement, resources: ExitStack) -> None:
        self._spec = spec
        self._agreement = agreement
        self._resources = resources
        self._storage = storage
        self._step = CountingStep(spec.step_s)
        start = start_run(
            storage,
            agreement,
            resources,
            rank=agreement.rank,
            world_size=agreement.world_size,
            continue_train=True,
            fine_tune_checkpoint="",
        )
        self._start = start
        self._writer = start.writer
        own = start.own
        states = read_rank_states(storage, own) if own else []
        if agreement.rank == 0:
            self._step.load_state([state[MODEL] for state in states])
        self._manager = CheckpointManager(storage, start.writer, tables=[], keep=2, part_timeout_s=spec.timeout_s)
        resources.callback(self._manager.abort)
        self._recorder = self._record()
        # What a feed that is being opened asks for: the passes that the checkpoint has behind it.
        passes = read_dataloader_state(storage, own).passes_completed if own else 0
        self._passes: Callable[[], int] = lambda: passes
        self._feed = self._open_feed()
        self.loop = self._open_loop()

    def run(self) -> int:
        """Train to the end; the exit code of the ending."""
        outcome = self.loop.run()
        self._manager.close(deadline_s=self._spec.timeout_s)
        if self._recorder:
            self._recorder.finish(outcome.reason)
        return ENDINGS[outcome.reason].exit_code or 0

    def _record(self) -> RunRecorder | None:
        own, writer = self._start.own, self._writer
        kind: RunKind = "train"
        start = RunStart(
            writer.run_id, kind, term=writer.term, world_size=writer.world_size, resumed=(own.term, own.step) if own else None
        )
        opened: list[RunRecorder] = []
        from_rank_zero(self._agreement, writer.rank, lambda: opened.append(RunRecorder(self._storage, start)))
        return opened[0] if opened else None

    def _open_feed(self) -> DataFeed:
        spec, own, writer = self._spec, self._start.own, self._writer
        source = make_source(spec.source, spec.columns, event_time_column=spec.event_time_column, boundary=spec.boundary)
        self._resources.callback(source.close)
        saved = None
        if own:
            base = AssignmentBase.from_json(own.state["assignment"])
            saved = Saved(read_dataloader_state(self._storage, own), base)
        positions = find_positions(source, self._agreement, writer.rank, saved, num_passes=spec.num_passes)
        feed = DataFeed(
            positions.splits,
            lambda assigned: self._loader(source, assigned),
            rank=writer.rank,
            world_size=writer.world_size,
            progress=positions.progress,
            base=positions.base,
            watermark=own.watermark if own else None,
            num_passes=spec.num_passes,
            order=lambda splits, passes: self._shuffle(passes).splits(splits) if spec.shuffle_rows else splits,
            commit=source.commit,
            renew=renew(source, self._agreement, writer.rank),
            patience_s=spec.timeout_s / 4,
        )
        self._passes = lambda: feed.progress.passes
        self._resources.callback(feed.close)
        return feed

    def _loader(self, source: Source, assigned: list[Assigned]) -> Loader[Any]:
        spec, writer = self._spec, self._writer
        return Loader(
            source,
            assigned,
            batch_size=spec.batch_size,
            transform=partial(_take_ids, column=spec.id_column),
            max_wait_s=spec.max_wait_s,
            idle_timeout_s=spec.idle_timeout_s,
            threads=spec.threads,
            drop_before=spec.boundary,
            mine=lambda split: owner(split, writer.world_size) == writer.rank,
            reading=ReadPlan(spec.reader_threads, self._shuffle(self._passes()) if spec.shuffle_rows else None, spec.in_order),
        )

    def _shuffle(self, passes: int) -> Shuffle:
        return Shuffle(0, passes, self._spec.shuffle_rows)

    def _open_loop(self) -> TrainingLoop:
        spec, own = self._spec, self._start.own
        first_step = own.step if own else 0
        logs = Path(spec.folder) / layout.run(self._writer.run_id)
        step_log, id_log = StepLog(logs / layout.step_log(self._writer.rank)), IdLog(logs / id_log_name(self._writer.rank))
        manager = self._manager
        checkpoint = Duty(
            act=self._save,
            triggers=[EverySteps(spec.checkpoint_steps, first_step)],
            ready=lambda: manager.ready,
            settled=lambda: manager.settled,
            committed_step=first_step if own else -1,
        )
        watermark = None if own is None or own.watermark is None else EventTime(own.watermark)
        return TrainingLoop(
            agreement=self._agreement,
            feed=self._feed,
            step=self._step,
            duties=Duties(checkpoint=checkpoint),
            settings=LoopSettings(steps_per_round=spec.steps_per_round, quorum=spec.quorum, finish_timeout_s=spec.timeout_s),
            observers=[step_log, id_log],
            state=LoopState(step=first_step, examples=float(own.examples) if own else 0.0, watermark=watermark),
            checks=[manager.check],
        )

    def _save(self, point: SyncPoint) -> int:
        return self._manager.save(
            Capture(
                step=point.last_step,
                examples=round(self.loop.examples),
                watermark=point.watermark,
                full=True,
                tables=[],
                dense_files={},
                splits=self._feed.states(),
                rank_state={MODEL: self._step.state()},
                shared_state={"passes_completed": self._feed.progress.passes, "assignment": self._feed.base.to_json()},
            )
        )


def id_log_name(rank: int) -> str:
    """Name of a rank's id log in its run's folder."""
    return f"ids-{rank:05d}.jsonl"


def id_line(step: int, ids: list[int]) -> bytes:
    """A line of an id log."""
    return orjson.dumps({"step": step, "ids": ids}, option=orjson.OPT_APPEND_NEWLINE)


def _take_ids(rows: pa.Table, size: int, *, column: str) -> Ids:
    ids = rows.column(column).to_numpy()
    return Ids(ids, np.ones(len(ids), np.float32))


def main(arguments: Sequence[str]) -> int:
    """SPEC: a file. MEETING_POINT: a file that isn't there yet, by which the ranks meet. OPERATION: at which one of the store's
    to die; 0: at none."""
    spec_path, meeting_point, rank, world_size, operation = arguments
    spec = TrainerSpec.model_validate_json(Path(spec_path).read_bytes())
    stop = StopSignals()
    with stop.installed(), ExitStack() as resources:
        agreement = SocketAgreement(int(rank), int(world_size), Path(meeting_point), timeout_s=spec.timeout_s)
        resources.callback(agreement.close)
        storage: Storage = LocalStorage(Path(spec.folder))
        if int(operation):
            storage = DyingStorage(storage, int(operation))
        try:
            trainer = ValidatingTrainer(spec, storage, agreement, resources)
            stop.attach(trainer.loop.preempt)
            return trainer.run()
        except TidemillError as error:
            print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
            return error.exit_code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
