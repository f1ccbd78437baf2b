"""Full export: a checkpoint becomes the snapshot that a lineage starts from. One process, storage only (A15)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidemill.cadence import StopReason
from tidemill.checkpoint.best import best_step
from tidemill.checkpoint.discovery import checkpoint_keys, list_checkpoints, naming_older
from tidemill.checkpoint.leases import held_checkpoint
from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.data.assignment import assign
from tidemill.distributed.runtime import start_runtime
from tidemill.errors import CheckpointError, ConfigError
from tidemill.features.feature_set import FeatureSet
from tidemill.jobs import pipeline
from tidemill.jobs.learner import dense_file
from tidemill.jobs.place import checkpoint_path, place_of
from tidemill.jobs.scoring import restored_step
from tidemill.lineage.records import RunRecorder, RunStart, new_run_id, run_records
from tidemill.models.model import build_model
from tidemill.publish.export import NUM_PROBE_ROWS, Probes, SnapshotOptions, StoredCheckpoint, export_snapshot
from tidemill.serving.loader import LineageFolder, load_snapshot
from tidemill.serving.predictor import Predictor
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What the command line asks for. `checkpoint`: a checkpoint or a folder of them; None: the config's model_dir."""

    pipeline: str
    export_dir: str
    checkpoint: str | None
    overrides: Mapping[str, object]
    edits: str | None = None


def export(request: ExportRequest) -> None:
    """Export the newest, best or named checkpoint into `export_dir`, verified by scoring probe rows as a server would.

    Does nothing if the folder holds that checkpoint's snapshot already. In a lineage of a root it keeps a record. Raises
    CheckpointError without a checkpoint, PublishError if the folder holds another snapshot or the exported program doesn't score
    as the trainer does.
    """
    config = pipeline.load(request.pipeline, overrides=request.overrides, edits=request.edits).config
    folder, step = checkpoint_path(request.checkpoint or config.model_dir)
    source = open_storage(folder)
    with (
        _recorded(request.export_dir),
        held_checkpoint(source, best_checkpoint(config, source) if step is None else step) as (_, manifest),
    ):
        _export(config, request.export_dir, source, manifest)


@contextmanager
def _recorded(export_dir: str) -> Iterator[None]:
    """Keeps the record of an export into a lineage of a root, where whoever schedules the steps reads it."""
    place = place_of(export_dir)
    if place is None:
        yield
        return
    folder = open_storage(f"{place.root}/{layout.cycle(place.date)}")
    recorder = RunRecorder(folder, RunStart(new_run_id(), "export", place.date))
    try:
        yield
    except BaseException as error:
        recorder.finish(StopReason.FAILED, error=error)
        raise
    recorder.finish(StopReason.EXHAUSTED)


def best_checkpoint(config: PipelineConfig, storage: Storage) -> int | None:
    """The step that exporter_type chooses; None: the newest.

    Raises CheckpointError if it is to be the best one, and none of the folder's checkpoints has been evaluated.
    """
    export_config = config.export_config
    if export_config.exporter_type != "best":
        return None
    metric = export_config.best_exporter_metric
    steps = {name.step for name in checkpoint_keys(list_checkpoints(storage))}
    step = best_step(storage, metric, larger=export_config.metric_larger_is_better, steps=steps)
    if step is None:
        raise CheckpointError(
            f"{storage.url}: export_config.exporter_type is best, but {layout.BEST_EVALUATIONS} has no {metric} of any of its"
            " checkpoints: train with eval_input_path, or export the latest"
        )
    return step


def _export(config: PipelineConfig, export_dir: str, source: Storage, manifest: CheckpointManifest) -> None:
    features = pipeline.feature_set(config)
    checkpoint = StoredCheckpoint(source, manifest, dense_file(manifest, config.export_config.use_dense_ema))
    model = build_model(config.model, features, config.train_config.runtime.seed)
    options = SnapshotOptions(
        model_name=config.model.kind,
        boundary=_boundary(config, source),
        probes=_probes(config, features, checkpoint),
        verify=_score_as_served,
    )
    target = open_storage(export_dir)
    with naming_older(source, manifest):
        export_snapshot(checkpoint, target, model, features, options)


def _boundary(config: PipelineConfig, source: Storage) -> float | None:
    """The config's boundary, or the one on record of the daily run."""
    if config.train_config.lineage.boundary is not None:
        return config.train_config.lineage.boundary
    known = [record.boundary for record in run_records(source) if record.boundary is not None]
    return known[-1] if known else None


def _probes(config: PipelineConfig, features: FeatureSet, checkpoint: StoredCheckpoint) -> Probes:
    """The first rows of the training data, scored by the trainer's own model with the checkpoint's weights."""
    runtime = start_runtime(config.train_config.runtime.timeout_s, num_threads=config.train_config.runtime.threads)
    try:
        rows = _first_rows(config, features)
        use_ema = config.export_config.use_dense_ema
        step = restored_step(config, features, runtime, checkpoint.storage, checkpoint.manifest, use_ema)
        scores = step.scores(features.transform(rows, with_labels=False))
    finally:
        runtime.close()
    return Probes(rows, lambda table: {name: values[: table.num_rows] for name, values in scores.items()})


def _first_rows(config: PipelineConfig, features: FeatureSet) -> pa.Table:
    """Raw rows of the training data, the columns that features need."""
    source = pipeline.make_source(config, features, path=config.train_input_path)
    if not source.bounded:
        raise ConfigError("an export takes its probe rows from the day's table: train_input_path must name files, not a stream")
    with closing(source), closing(source.open_all(assign(source.discover(), {}, 1, 0))) as reader:
        raw = reader.read(60.0)
    needed = [column.name for column in features.input_columns if column.role == "feature"]
    if raw is None or raw.num_rows == 0:
        raise ConfigError(f"{config.train_input_path}: holds no rows, so there is nothing to probe the snapshot with")
    return raw.table.select(needed).slice(0, NUM_PROBE_ROWS).combine_chunks()


def _score_as_served(storage: Storage) -> Mapping[str, np.ndarray]:
    """Scores of a snapshot's probe rows by the server's own code."""
    generation = load_snapshot(LineageFolder(storage, ""))
    assert generation.model.probes is not None
    return Predictor(generation).score_table(generation.model.probes)
