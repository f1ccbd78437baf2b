"""What learns: features, tables spread over the ranks, optimizers, and the step that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tidemill.checkpoint.discovery import read_arrays_of
from tidemill.checkpoint.restore import dense_tensors, restore_tables
from tidemill.config.pipeline import PipelineConfig
from tidemill.contracts.checkpoint import CheckpointManifest
from tidemill.contracts.files import TableSpec
from tidemill.distributed.runtime import Runtime
from tidemill.distributed.sharding import ShardedModel, shard
from tidemill.errors import CheckpointError
from tidemill.features.batch import Batch
from tidemill.features.feature_set import FeatureSet
from tidemill.jobs import pipeline
from tidemill.models.losses import build_losses
from tidemill.models.model import build_model
from tidemill.storage.base import Storage
from tidemill.training.averages import DenseAverages
from tidemill.training.optimizers import Optimizers, UpdateOptions
from tidemill.training.step import Objective, TrainStep, padding_batch

DENSE, DENSE_EMA = "dense", "dense_ema"
"""A checkpoint's files of dense weights: as trained, and averaged."""


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
        files = {DENSE: _arrays(self.model.dense_state()), "dense_optimizer": self.optimizers.dense_optimizer_state()}
        if gradients := self.optimizers.gradients():
            files["dense_gradients"] = gradients
        if self.averages and self.averages.begun:
            files[DENSE_EMA] = _arrays(self.model.dense_state() | self.averages.values())
        return files

    @property
    def averages(self) -> DenseAverages | None:
        """The averaged dense weights, if the config asks for them."""
        return self.optimizers.averages

    def restore(self, storage: Storage, manifest: CheckpointManifest) -> None:
        """Take all that a checkpoint knows of weights, optimizers and schedules. Collective. Raises like `restore_weights`."""
        self.restore_weights(storage, manifest)
        self.optimizers.load_dense_optimizer_state(read_arrays_of(storage, manifest, "dense_optimizer"))
        if "dense_gradients" in manifest.files:
            self.optimizers.load_gradients(read_arrays_of(storage, manifest, "dense_gradients"))
        if self.averages and DENSE_EMA in manifest.files:
            self.averages.load(dense_tensors(storage, manifest, DENSE_EMA))
        self.step.load_state(manifest.state["schedule"])

    def restore_weights(
        self, storage: Storage, manifest: CheckpointManifest, *, optimizer: bool = True, dense: str = DENSE
    ) -> None:
        """Take a checkpoint's weights; `dense`: from which of its files. Collective.

        Raises CheckpointError if the checkpoint's tables aren't the model's.
        """
        restore_tables(storage, manifest, self.model.local_shards(), optimizer=optimizer, tables=self.tables)
        self.model.load_dense_state(dense_tensors(storage, manifest, dense))

    def served_file(self, use_ema: bool | None) -> str:
        """Under which name a checkpoint of this moment holds what `served_dense` gives."""
        return DENSE_EMA if use_ema is not False and self.averages and self.averages.begun else DENSE

    def served_dense(self, use_ema: bool | None) -> dict[str, Tensor]:
        """The dense weights that are served, live: the averages, unless there are none or `use_ema` is False."""
        averages = self.averages if use_ema is not False else None
        return self.model.dense_state() | (averages.values() if averages else {})

    def served_scores(self, use_ema: bool | None) -> Callable[[Batch], dict[str, np.ndarray]]:
        """`step.scores` with the weights of `served_dense`."""
        averages = self.averages
        if averages is None or use_ema is False:
            return self.step.scores

        def scores(batch: Batch) -> dict[str, np.ndarray]:
            with averages.applied():
                return self.step.scores(batch)

        return scores


def dense_file(manifest: CheckpointManifest, use_ema: bool | None) -> str:
    """Which of a checkpoint's files has the dense weights to score with: the averages, unless it has none or `use_ema` is False.

    Raises CheckpointError if `use_ema` is True and it has none.
    """
    if use_ema and DENSE_EMA not in manifest.files:
        raise CheckpointError(
            f"use_dense_ema: the checkpoint of step {manifest.step} has no averaged weights;"
            " train with train_config.dense_optimizer.ema"
        )
    return DENSE_EMA if use_ema is not False and DENSE_EMA in manifest.files else DENSE


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: np.array(tensor.detach().cpu().numpy()) for name, tensor in tensors.items()}


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
    update = UpdateOptions(train_config.gradient_accumulation_steps or 1, train_config.grad_clipping, train_config.grad_scaler)
    optimizers = Optimizers(sharded, train_config.dense_optimizer, train_config.sparse_optimizer, update)
    step = TrainStep(
        sharded,
        optimizers,
        Objective(build_losses(config.model.losses), label),
        padding_batch(features, [label], batch_size),
        score_first=score_first,
        mixed_precision=train_config.mixed_precision,
    )
    return Learner(features, label, list(model.plan.tables), sharded, optimizers, step)
