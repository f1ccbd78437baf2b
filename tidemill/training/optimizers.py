"""The optimizers of a run: torch's for the dense program, and the rates of the one that is fused into the lookups."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from tidemill.config.optimizer import DenseOptimizer, SparseOptimizer
from tidemill.distributed.sharding import ShardedModel
from tidemill.errors import CheckpointError, ConfigError
from tidemill.training.schedules import learning_rate


class Optimizers:
    """Applies gradients and schedules. The tables' own state lives in the model's shards."""

    def __init__(self, model: ShardedModel, dense: DenseOptimizer, sparse: SparseOptimizer) -> None:
        """Raises ConfigError for an optimizer that isn't supported."""
        self._model = model
        self._dense, self._sparse = dense, sparse
        self.parameters = dict(model.program.named_parameters())
        self._optimizer = _dense_optimizer(dense, list(self.parameters.values()))

    def set_rates(self, steps: int, passes: int) -> tuple[float, float]:
        """Set and return the (dense, sparse) learning rates of the step that follows `steps` steps and `passes` whole passes."""
        rates = learning_rate(self._dense, steps, passes), learning_rate(self._sparse, steps, passes)
        for group in self._optimizer.param_groups:
            group["lr"] = rates[0]
        self._model.set_sparse_learning_rate(rates[1])
        return rates

    def step(self) -> None:
        """Apply the dense gradients and drop them; tables were changed by the backward pass."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

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
