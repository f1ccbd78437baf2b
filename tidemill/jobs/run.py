"""One rank of one training run: who it is, where it writes, and what its record says."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tidemill import logs
from tidemill.config.dump import dump
from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts import layout
from tidemill.contracts.lineage import RunKind
from tidemill.distributed.agreement import Agreement
from tidemill.distributed.runtime import Runtime
from tidemill.jobs import pipeline
from tidemill.jobs.place import Place, place_of
from tidemill.jobs.start import Start, from_rank_zero, start_run
from tidemill.lineage.records import RunRecorder, RunStart, open_lineage
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What all parts of a training job share.

    `boundary`: event time at which the day's table ends and the stream begins. `folder`: where this run keeps its logs; None if the
    store isn't on this machine. `resources`: closed when the run ends, however it does.
    """

    config: PipelineConfig
    runtime: Runtime
    agreement: Agreement
    storage: Storage
    place: Place | None
    start: Start
    is_stream: bool
    boundary: float | None
    folder: Path | None
    resources: ExitStack

    @property
    def rank(self) -> int:
        return self.runtime.rank


def open_run(config: PipelineConfig, runtime: Runtime, resources: ExitStack, *, continue_train: bool) -> Run:
    """Open a term and send events to the run's own file. Collective. Raises like `start_run`."""
    agreement = Agreement(runtime)
    storage = open_storage(config.model_dir)
    start = start_run(
        storage,
        agreement,
        resources,
        rank=runtime.rank,
        world_size=runtime.world_size,
        continue_train=continue_train,
        fine_tune_checkpoint=config.train_config.fine_tune_checkpoint,
    )
    boundary = config.train_config.lineage.boundary
    if boundary is None and start.snapshot is not None:
        boundary = start.snapshot.boundary
    run = Run(
        config=config,
        runtime=runtime,
        agreement=agreement,
        storage=storage,
        place=place_of(config.model_dir),
        start=start,
        is_stream=pipeline.is_stream(config),
        boundary=boundary,
        folder=storage.local_path(layout.run(start.writer.run_id)),
        resources=resources,
    )
    _open_events(run)
    return run


def _open_events(run: Run) -> None:
    if run.folder is None:
        return
    sink = logs.EventLog(run.folder / (layout.EVENTS if run.rank == 0 else f"events-{run.rank:05d}.jsonl"), rank=run.rank)
    logs.send_events_to(sink)
    run.resources.callback(sink.close)
    run.resources.callback(logs.send_events_to, None)


def open_recorder(run: Run) -> RunRecorder | None:
    """Begin the run's record, and keep its config beside it; None above rank 0. Collective.

    Raises RetiredError or LineageError, on every rank, if the lineage isn't open for this run.
    """
    opened: list[RunRecorder] = []
    from_rank_zero(run.agreement, run.rank, lambda: opened.append(_open_recorder(run)))
    return opened[0] if opened else None


def _open_recorder(run: Run) -> RunRecorder:
    writer = run.start.writer
    kind: RunKind = "train_stream" if run.is_stream else "train_daily" if run.place else "train"
    date = run.place.date if run.place else None
    own = run.start.own
    resumed = (own.term, own.step) if own else None
    start = RunStart(writer.run_id, kind, date, writer.term, run.boundary, writer.world_size, resumed)
    if run.is_stream and run.start.snapshot:
        open_lineage(run.storage, date, run.boundary)
    config = dump(run.config).encode()
    run.storage.write(f"{layout.run(writer.run_id)}/{layout.PIPELINE}", config)
    if not run.start.snapshot:
        run.storage.write(layout.PIPELINE, config)
    # Last: whatever fails behind it is for the record to tell.
    return RunRecorder(run.storage, start)
