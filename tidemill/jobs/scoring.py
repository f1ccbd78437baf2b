"""A checkpoint's model put together for scoring, on every rank of a run."""

from __future__ import annotations

from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.distributed.runtime import Runtime
from tidemill.features.feature_set import FeatureSet
from tidemill.jobs.learner import build_learner, dense_file
from tidemill.storage.base import Storage
from tidemill.training.step import TrainStep


def restored_step(
    config: PipelineConfig,
    features: FeatureSet,
    runtime: Runtime,
    storage: Storage,
    manifest: CheckpointManifest,
    use_ema: bool | None = None,
) -> TrainStep:
    """The model of a config with a checkpoint's weights, see `dense_file`; only its `scores` are of use. Collective.

    Raises CheckpointError if the checkpoint's tables aren't the model's.
    """
    learner = build_learner(config, features, runtime, batch_size=1)
    learner.restore_weights(storage, manifest, optimizer=False, dense=dense_file(manifest, use_ema))
    return learner.step
