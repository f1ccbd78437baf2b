"""One training step, and scoring without training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tidemill.distributed.runtime import translate_peer_errors
from tidemill.distributed.sharding import ShardedModel
from tidemill.features.batch import Batch, IdColumns
from tidemill.features.feature_set import FeatureSet
from tidemill.models.losses import Loss
from tidemill.training.optimizers import Optimizers
from tidemill.training.precision import DTYPES


@dataclass(frozen=True, slots=True)
class Objective:
    """What training minimises: the sum of the losses of the model's outputs against one label."""

    losses: Sequence[Loss]
    label: str

    def loss_sum(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        """The weighted sum over the batch's rows."""
        labels_b = batch.labels[self.label]
        return torch.stack([loss(outputs, labels_b, batch.weights) for loss in self.losses]).sum()


class TrainStep:
    """Schedules, forward, backward, optimizers. Every call is collective: all ranks must call, with batches of one size."""

    def __init__(
        self,
        model: ShardedModel,
        optimizers: Optimizers,
        objective: Objective,
        padding: Batch,
        score_first: bool = False,
        mixed_precision: str = "",
    ) -> None:
        """`padding`: what this rank trains on when it has nothing, see `padding_batch`.

        `score_first`: the outputs of a step are what `scores` would have given just before it, also if the program has dropout.
        `mixed_precision`: "BF16" or "FP16": the training pass runs under autocast; losses and scores don't.
        """
        self._model = model
        self._optimizers = optimizers
        self._objective = objective
        self._padding = padding
        self._dtype = DTYPES.get(mixed_precision)
        # Without dropout the training forward computes the very same outputs, and no second one is needed.
        self._separate_scores = score_first and (self._dtype is not None or _has_dropout(model.program))
        # Scaled here, divided again where gradients leave the program for the tables.
        optimizers.scale.descale_tables(model.model.get_submodule("embeddings"))
        self.steps = 0
        """Steps that the schedules have seen, the parents' included."""
        self.passes = 0
        """Whole passes over the data; whoever begins the next pass counts."""
        self.learning_rates = (0.0, 0.0)
        """(dense, sparse), of the last step."""
        self.loss_sum = 0.0
        """Weighted sum of the losses over this rank's rows in the last step, before the update."""

    def __call__(self, batch: Batch, global_weight: float) -> dict[str, np.ndarray]:
        """Train on a batch; its outputs before the update, name -> (num_rows,).

        `global_weight` is the sum of weights over all ranks' batches, as agreed before the step; > 0. The gradient is that of the
        weighted mean over all ranks' rows. Raises PeerLostError if another rank is gone.
        """
        if not global_weight > 0:
            raise ValueError(f"a step needs a global weight above 0, got {global_weight}; steps without weight are skipped")
        scored = self.scores(batch) if self._separate_scores else None
        self.learning_rates = self._optimizers.set_rates(self.steps, self.passes)
        on_device = _to(batch, self._model.runtime.device)
        self._set_training(True)
        with translate_peer_errors(f"all ranks in a step (rank {self._model.runtime.rank})"):
            outputs = self._forward(on_device)
            loss_sum = self._objective.loss_sum(outputs, on_device)
            # Gradients are averaged over ranks, hence the first factor.
            factor = self._model.runtime.world_size / global_weight / self._optimizers.options.accumulation
            (loss_sum * (factor * self._optimizers.scale.value)).backward()
        self._optimizers.step()
        self.steps += 1
        self.loss_sum = float(loss_sum.detach())
        return scored or _to_numpy(outputs, batch.num_rows)

    def padding(self) -> Batch:
        """A batch of the right size without a real row."""
        return self._padding

    def state(self) -> dict[str, Any]:
        """Where schedules, accumulation and loss scale stand, as JSON; the same on all ranks."""
        return {"steps": self.steps, "passes": self.passes, "update": self._optimizers.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.steps, self.passes = int(state["steps"]), int(state["passes"])
        if "update" in state:
            self._optimizers.load_state(state["update"])

    def scores(self, batch: Batch) -> dict[str, np.ndarray]:
        """Outputs in eval mode, name -> (num_rows,). Changes nothing: no weight, no random state, no touched row."""
        self._set_training(False)
        waiting = translate_peer_errors(f"all ranks in scoring (rank {self._model.runtime.rank})")
        with torch.no_grad(), waiting:
            return _to_numpy(self._model(_to(batch, self._model.runtime.device)), batch.num_rows)

    def _forward(self, batch: Batch) -> dict[str, Tensor]:
        if self._dtype is None:
            return self._model(batch)
        with torch.autocast(self._model.runtime.device.type, self._dtype):
            outputs = self._model(batch)
        return {name: output.float() for name, output in outputs.items()}

    def _set_training(self, training: bool) -> None:
        # Walking all modules costs a light model's step 7 %.
        if self._model.training != training:
            self._model.train(training)


def padding_batch(features: FeatureSet, labels: Sequence[str], size: int) -> Batch:
    """`size` rows of padding: no ids, weight 0."""
    pooled = tuple(spec.name for spec in features.id_features if not spec.is_sequence)
    sequences = tuple(spec.name for spec in features.id_features if spec.is_sequence)
    return Batch(
        num_rows=0,
        size=size,
        dense=torch.zeros(size, sum(spec.dim for spec in features.dense)),
        ids=_no_ids(pooled, size),
        sequences=_no_ids(sequences, size),
        labels={label: torch.zeros(size) for label in labels},
        weights=torch.zeros(size),
        extras={},
    )


def _no_ids(keys: tuple[str, ...], size: int) -> IdColumns:
    return IdColumns(keys, torch.empty(0, dtype=torch.int64), torch.zeros(len(keys) * size, dtype=torch.int32))


def _has_dropout(program: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in program.modules())


def _to_numpy(outputs: dict[str, Tensor], num_rows: int) -> dict[str, np.ndarray]:
    return {name: output.detach()[:num_rows].cpu().numpy() for name, output in outputs.items()}


def _to(batch: Batch, device: torch.device) -> Batch:
    """The same batch on the device; itself if it is there."""
    if batch.dense.device == device or device.type == "cpu":
        return batch
    return dataclasses.replace(
        batch,
        dense=batch.dense.to(device),
        ids=_columns_to(batch.ids, device),
        sequences=_columns_to(batch.sequences, device),
        labels={name: label.to(device) for name, label in batch.labels.items()},
        weights=batch.weights.to(device),
    )


def _columns_to(columns: IdColumns, device: torch.device) -> IdColumns:
    return dataclasses.replace(columns, values=columns.values.to(device), lengths=columns.lengths.to(device))
