"""What learns: features, tables spread over the ranks, optimizers, and the step that they make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tidemill.checkpoint.restore import dense_tensors, restore_tables
from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.contracts.files import TableSpec
from tidemill.distributed.runtime import Runtime
from tidemill.distributed.sharding import ShardedModel, shard
from tidemill.features.feature_set import FeatureSet
from tidemill.jobs import pipeline
from tidemill.models.losses import build_losses
from tidemill.models.model import build_model
from tidemill.storage.base import Storage
from tidemill.training.optimizers import Optimizers
from tidemill.training.step import Objective, TrainStep, padding_batch


@dataclass(frozen=True, slots=True, eq=False)
class Learner:
    """One rank's part of a model that can be trained. `label`: the column that it learns."""

    features: FeatureSet
    label: str
    tables: list[TableSpec]
    model: ShardedModel
    optimizers: Optimizers
    step: TrainStep

    def dense_files(self) -> dict[str, dict[str, np.ndarray]]:
        """A copy of everything dense that a checkpoint holds, by the names of its files; the same on all ranks."""
        return {
            "dense": {name: np.array(tensor.detach().cpu().numpy()) for name, tensor in self.model.dense_state().items()},
            "dense_optimizer": self.optimizers.dense_optimizer_state(),
        }

    def restore_weights(self, storage: Storage, manifest: CheckpointManifest, *, optimizer: bool = True) -> None:
        """Take a checkpoint's weights. Collective.

        Raises CheckpointError if the checkpoint's tables aren't the model's.
        """
        restore_tables(storage, manifest, self.model.local_shards(), optimizer=optimizer, tables=self.tables)
        self.model.load_dense_state(dense_tensors(storage, manifest))


def build_learner(
    config: PipelineConfig, features: FeatureSet, runtime: Runtime, *, batch_size: int, score_first: bool = False
) -> Learner:
    """The model of a config with its initial weights. Collective.

    `batch_size`: of the batches that pad a rank's missing ones. `score_first`: see TrainStep.
    """
    train_config = config.train_config
    seed = train_config.runtime.seed
    label = pipeline.label_of(config)
    model = build_model(config.model, features, seed)
    sharded = shard(model, runtime, train_config.sparse_optimizer, train_config.runtime.sharding, seed)
    optimizers = Optimizers(sharded, train_config.dense_optimizer, train_config.sparse_optimizer)
    step = TrainStep(
        sharded,
        optimizers,
        Objective(build_losses(config.model.losses), label),
        padding_batch(features, [label], batch_size),
        train_config.grad_clipping,
        score_first=score_first,
    )
    return Learner(features, label, list(model.plan.tables), sharded, optimizers, step)
