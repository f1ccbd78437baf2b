"""The optimizers of a run: torch's for the dense program, and the rates of the one that is fused into the lookups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer

from tidemill.config.optimizer import DenseOptimizer, SparseOptimizer
from tidemill.config.train import GradClipping, GradScaler
from tidemill.distributed.sharding import ShardedModel
from tidemill.errors import CheckpointError, ConfigError
from tidemill.training.averages import DenseAverages
from tidemill.training.precision import LossScale
from tidemill.training.schedules import learning_rate


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """How dense gradients become an update. `accumulation`: of how many steps' gradients, averaged."""

    accumulation: int = 1
    clipping: GradClipping | None = None
    scaler: GradScaler | None = None


class Optimizers:
    """Applies gradients and schedules. The tables' own state lives in the model's shards."""

    def __init__(
        self, model: ShardedModel, dense: DenseOptimizer, sparse: SparseOptimizer, options: UpdateOptions | None = None
    ) -> None:
        """Raises ConfigError for an optimizer that isn't supported."""
        self._model = model
        self._dense, self._sparse = dense, sparse
        self.options = options or UpdateOptions()
        self.parameters = dict(model.program.named_parameters())
        self._optimizer = _dense_optimizer(dense, list(self.parameters.values()))
        self._gradients: dict[str, Tensor] = {}
        """Sums of the steps since the last update, if there were any."""
        self._accumulated = 0
        self.scale = LossScale(self.options.scaler)
        self.averages = DenseAverages(self.parameters, dense.ema.decay) if dense.ema else None

    def set_rates(self, steps: int, passes: int) -> tuple[float, float]:
        """Set and return the (dense, sparse) learning rates of the step that follows `steps` steps and `passes` whole passes."""
        rates = learning_rate(self._dense, steps, passes), learning_rate(self._sparse, steps, passes)
        for group in self._optimizer.param_groups:
            group["lr"] = rates[0]
        self._model.set_sparse_learning_rate(rates[1])
        return rates

    def step(self) -> bool:
        """Take in the dense gradients of a step, and apply them if enough have come; whether they were applied.

        Tables were changed by the backward pass, in every step. Gradients that aren't finite are dropped if a scaler is configured.
        """
        self._accumulated += 1
        if self.options.accumulation > 1 or self._gradients:
            self._accumulate()
        if self._accumulated < self.options.accumulation:
            self._optimizer.zero_grad(set_to_none=True)
            return False
        for name, gradient in self._gradients.items():
            self.parameters[name].grad = gradient
        applied = self.scale.unscale(parameter.grad for parameter in self.parameters.values() if parameter.grad is not None)
        if applied:
            self._clip()
            self._optimizer.step()
            if self.averages:
                self.averages.update()
        self._optimizer.zero_grad(set_to_none=True)
        self._accumulated, self._gradients = 0, {}
        return applied

    def _accumulate(self) -> None:
        """Move the gradients into sums of our own: how DDP adds to gradients that are there depends on where they come from."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            if name in self._gradients:
                self._gradients[name] += parameter.grad
            else:
                self._gradients[name] = parameter.grad.clone()

    def _clip(self) -> None:
        clipping = self.options.clipping
        if clipping is None or clipping.clipping_type == "none":
            return
        if clipping.clipping_type == "norm":
            nn.utils.clip_grad_norm_(self.parameters.values(), clipping.max_gradient, norm_type=clipping.norm_type)
        else:
            nn.utils.clip_grad_value_(self.parameters.values(), clipping.max_gradient)

    def state(self) -> dict[str, Any]:
        """Where accumulation and scale stand, as JSON; the same on all ranks."""
        return {"accumulated": self._accumulated, **self.scale.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave; after `load_gradients`, since an accumulation without its gradients begins anew."""
        self._accumulated = int(state["accumulated"]) if self._gradients else 0
        self.scale.load_state(state)

    def gradients(self) -> dict[str, np.ndarray]:
        """A copy of the sums of gradients that wait for their update, by parameter; empty if none do."""
        return {name: np.array(gradient.cpu().numpy()) for name, gradient in self._gradients.items()}

    def load_gradients(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take back what `gradients` gave. Raises CheckpointError if they belong to other parameters."""
        for name, array in arrays.items():
            if name not in self.parameters or array.shape != self.parameters[name].shape:
                raise CheckpointError(f"accumulated gradient {name!r}: the model has no such parameter of shape {array.shape}")
        self._gradients = {name: torch.from_numpy(np.array(a)).to(self.parameters[name].device) for name, a in arrays.items()}

    def dense_optimizer_state(self) -> dict[str, np.ndarray]:
        """A copy of the dense optimizer's state, `<parameter>/<key>`; empty before the first step if the optimizer starts so."""
        return {
            f"{name}/{key}": np.array(value.detach().cpu().numpy())
            for name, parameter in self.parameters.items()
            for key, value in self._optimizer.state[parameter].items()
            if isinstance(value, Tensor)
        }

    def load_dense_optimizer_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take back what `dense_optimizer_state` gave. Raises CheckpointError if it belongs to other parameters."""
        states: dict[str, dict[str, Tensor]] = {name: {} for name in self.parameters}
        for path, array in arrays.items():
            name, _, key = path.rpartition("/")
            if name not in states:
                raise CheckpointError(f"dense optimizer state {path!r}: the model has no parameter of that name")
            states[name][key] = torch.from_numpy(np.array(array))
        if len({frozenset(state) for state in states.values()}) > 1:
            lacking = sorted(name for name, state in states.items() if len(state) < max(map(len, states.values())))
            raise CheckpointError(f"dense optimizer state lacks entries of {', '.join(lacking)}")
        for name, parameter in self.parameters.items():
            self._load(name, parameter, states[name])

    def _load(self, name: str, parameter: Tensor, state: dict[str, Tensor]) -> None:
        for key, value in state.items():
            if key != "step" and value.shape != parameter.shape:
                shape, wanted = tuple(value.shape), tuple(parameter.shape)
                raise CheckpointError(f"dense optimizer state {name}/{key} has shape {shape}, the parameter {wanted}")
        self._optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}


def _dense_optimizer(config: DenseOptimizer, parameters: list[torch.nn.Parameter]) -> Optimizer:
    name, chosen = config.optimizer
    match name:
        case "adam_optimizer":
            return Adam(
                parameters,
                lr=chosen.lr,
                betas=(chosen.beta1, chosen.beta2),
                eps=chosen.eps,
                weight_decay=chosen.weight_decay,
                amsgrad=chosen.amsgrad,
                fused=True,
            )
        case "adagrad_optimizer":
            return Adagrad(
                parameters,
                lr=chosen.lr,
                weight_decay=chosen.weight_decay,
                initial_accumulator_value=chosen.initial_accumulator_value,
                eps=chosen.eps,
            )
        case "sgd_optimizer":
            return SGD(
                parameters,
                lr=chosen.lr,
                momentum=chosen.momentum,
                weight_decay=chosen.weight_decay,
                dampening=chosen.dampening,
                nesterov=chosen.nesterov,
            )
    raise ConfigError(f"dense_optimizer: {name} isn't supported yet; use adam_optimizer, adagrad_optimizer or sgd_optimizer")
