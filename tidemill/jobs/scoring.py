"""A checkpoint's model put together for scoring, on every rank of a run."""

from __future__ import annotations

import numpy as np
import torch

from tidemill.checkpoint.restore import read_file, restore_tables
from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.distributed.runtime import Runtime
from tidemill.distributed.sharding import shard
from tidemill.features.feature_set import FeatureSet
from tidemill.jobs import pipeline
from tidemill.models.losses import build_losses
from tidemill.models.model import build_model
from tidemill.storage.base import Storage
from tidemill.training.optimizers import Optimizers
from tidemill.training.step import Objective, TrainStep, padding_batch


def restored_step(
    config: PipelineConfig, features: FeatureSet, runtime: Runtime, storage: Storage, manifest: CheckpointManifest
) -> TrainStep:
    """The model of a config with a checkpoint's weights; only its `scores` are of use. Collective.

    Raises CheckpointError if the checkpoint's tables aren't the model's.
    """
    train_config = config.train_config
    seed = train_config.runtime.seed
    model = shard(
        build_model(config.model, features, seed), runtime, train_config.sparse_optimizer, train_config.runtime.sharding, seed
    )
    restore_tables(storage, manifest, model.local_shards(), optimizer=False)
    dense = read_file(storage, manifest, "dense")
    model.load_dense_state({name: torch.from_numpy(np.array(array)) for name, array in dense.items()})
    label = pipeline.label_of(config)
    return TrainStep(
        model,
        Optimizers(model, train_config.dense_optimizer, train_config.sparse_optimizer),
        Objective(build_losses(config.model.losses), label),
        padding_batch(features, [label], 1),
    )
