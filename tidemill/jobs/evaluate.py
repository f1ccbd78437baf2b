"""Stand-alone evaluation: the metrics of a checkpoint over a bounded source."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import orjson

from tidemill import logs
from tidemill.checkpoint.leases import held_checkpoint
from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts import layout
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.distributed.agreement import Agreement
from tidemill.distributed.runtime import Runtime, start_runtime
from tidemill.errors import ConfigError, NotFoundError
from tidemill.jobs import pipeline
from tidemill.jobs.place import checkpoint_path
from tidemill.jobs.scoring import restored_step
from tidemill.jobs.start import from_rank_zero
from tidemill.storage.base import Storage
from tidemill.storage.open import open_storage


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """What the command line asks for. `checkpoint`: a checkpoint or a folder of them; None: the config's model_dir.

    `result_filename`: the file in model_dir that the result's line is appended to.
    """

    pipeline: str
    overrides: Mapping[str, object]
    edits: str | None = None
    checkpoint: str | None = None
    result_filename: str = layout.EVALUATIONS


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Metrics of one checkpoint."""

    step: int
    metrics: dict[str, float]

    def line(self) -> bytes:
        """One line of a result file: tzrec's form, with metrics sorted by name; a metric that is undefined is null."""
        return orjson.dumps({"global_step": self.step, **dict(sorted(self.metrics.items()))}, option=orjson.OPT_APPEND_NEWLINE)


def evaluate(request: EvaluateRequest) -> Evaluation | None:
    """Evaluate on all ranks of this run, and append the result's line; None above rank 0, which says nothing. Collective.

    Raises ConfigError without evaluation data, CheckpointError without a whole checkpoint.
    """
    config = pipeline.load(request.pipeline, overrides=request.overrides, edits=request.edits).config
    if not config.eval_input_path:
        raise ConfigError("nothing to evaluate on: set eval_input_path in the config, or pass --eval_input_path")
    runtime = start_runtime(config.train_config.runtime.timeout_s, num_threads=config.train_config.runtime.threads)
    logs.set_up(rank=runtime.rank)
    try:
        with ExitStack() as held:
            evaluation = _evaluate(config, request, runtime, held)
    finally:
        runtime.close()
    if runtime.rank != 0:
        return None
    _append(open_storage(config.model_dir), request.result_filename, evaluation.line())
    return evaluation


def _evaluate(config: PipelineConfig, request: EvaluateRequest, runtime: Runtime, held: ExitStack) -> Evaluation:
    agreement = Agreement(runtime)
    folder, step = checkpoint_path(request.checkpoint or config.model_dir)
    storage = open_storage(folder)
    # One rank chooses: a checkpoint that is committed meanwhile must not be the newest for some ranks only.
    key = from_rank_zero(agreement, runtime.rank, lambda: held.enter_context(held_checkpoint(storage, step))[0])
    manifest = CheckpointManifest.parse(storage.read(key), where=f"{storage.url}/{key}")
    features = pipeline.feature_set(config)
    model = restored_step(config, features, runtime, storage, manifest, config.eval_config.use_dense_ema)
    metrics = pipeline.evaluate_source(
        pipeline.make_source(config, features, path=config.eval_input_path),
        config,
        features,
        scores=model.scores,
        agreement=agreement,
        runtime=runtime,
    )
    return Evaluation(manifest.step, metrics)


def _append(storage: Storage, key: str, line: bytes) -> None:
    try:
        before = storage.read(key)
    except NotFoundError:
        before = b""
    storage.write(key, before, line)
