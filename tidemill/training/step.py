"""One training step, and scoring without training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from tidemill.config.train import GradClipping
from tidemill.distributed.runtime import translate_peer_errors
from tidemill.distributed.sharding import ShardedModel
from tidemill.features.batch import Batch, IdColumns
from tidemill.models.losses import Loss
from tidemill.training.optimizers import Optimizers


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one rank's part of a step came to."""

    loss_sum: float
    """weighted sum of the losses over this rank's rows, before the step"""
    outputs: dict[str, np.ndarray]
    """name -> (num_rows,), of the weights before the step"""


class TrainStep:
    """Forward, backward, optimizers. Every call is collective: all ranks must call, with batches of one size."""

    def __init__(
        self,
        model: ShardedModel,
        optimizers: Optimizers,
        losses: Sequence[Loss],
        label: str,
        grad_clipping: GradClipping | None = None,
        score_first: bool = False,
    ) -> None:
        """`score_first`: a step's outputs are what `scores` would have given just before it, also if the program has dropout."""
        self._model = model
        self._optimizers = optimizers
        self._losses = losses
        self._label = label
        self._clipping = grad_clipping
        # Without dropout the training forward computes the very same outputs, and no second one is needed.
        self._separate_scores = score_first and _has_dropout(model.program)

    def __call__(self, batch: Batch, global_weight: float) -> StepResult:
        """Train on a batch. `global_weight` is the sum of weights over all ranks' batches, as agreed before the step; > 0.

        The gradient is that of the weighted mean over all ranks' rows. Raises PeerLostError if another rank is gone.
        """
        if not global_weight > 0:
            raise ValueError(f"a step needs a global weight above 0, got {global_weight}; steps without weight are skipped")
        scored = self.scores(batch) if self._separate_scores else None
        on_device = _to(batch, self._model.runtime.device)
        self._model.train()
        with translate_peer_errors(f"all ranks in a step (rank {self._model.runtime.rank})"):
            outputs = self._model(on_device)
            loss_sum = self._loss_sum(outputs, on_device)
            # Gradients are averaged over ranks, hence the factor.
            (loss_sum * (self._model.runtime.world_size / global_weight)).backward()
        self._clip()
        self._optimizers.step()
        return StepResult(float(loss_sum.detach()), scored or _to_numpy(outputs, batch.num_rows))

    def scores(self, batch: Batch) -> dict[str, np.ndarray]:
        """Outputs in eval mode, name -> (num_rows,). Changes nothing: no weight, no random state, no touched row."""
        self._model.eval()
        waiting = translate_peer_errors(f"all ranks in scoring (rank {self._model.runtime.rank})")
        with torch.no_grad(), waiting:
            return _to_numpy(self._model(_to(batch, self._model.runtime.device)), batch.num_rows)

    def _loss_sum(self, outputs: dict[str, Tensor], batch: Batch) -> Tensor:
        labels_b = batch.labels[self._label]
        first, *others = (loss(outputs, labels_b, batch.weights) for loss in self._losses)
        for other in others:
            first = first + other
        return first

    def _clip(self) -> None:
        clipping = self._clipping
        if clipping is None or clipping.clipping_type == "none":
            return
        parameters = self._optimizers.parameters.values()
        if clipping.clipping_type == "norm":
            nn.utils.clip_grad_norm_(parameters, clipping.max_gradient, norm_type=clipping.norm_type)
        else:
            nn.utils.clip_grad_value_(parameters, clipping.max_gradient)


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
