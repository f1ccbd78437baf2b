"""Optimizers that FBGEMM fuses into the backward pass of a lookup."""

from __future__ import annotations

from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from tidemill.config.optimizer import SparseOptimizer
from tidemill.errors import ConfigError

_TYPES = {
    "sgd_optimizer": EmbOptimType.EXACT_SGD,
    "adagrad_optimizer": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad_optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def fused_parameters(config: SparseOptimizer, device: torch.device) -> dict[str, Any]:
    """TorchRec's `fused_params`. Raises ConfigError for an optimizer without a kernel."""
    name, optimizer = config.optimizer
    if name not in _TYPES:
        known = ", ".join(_TYPES)
        raise ConfigError(f"sparse_optimizer: {name} isn't supported on {device.type} (FBGEMM has no kernel); use {known}")
    parameters: dict[str, Any] = {
        "optimizer": _TYPES[name],
        "learning_rate": optimizer.lr,
        "gradient_clipping": optimizer.gradient_clipping,
        "max_gradient": optimizer.max_gradient,
        # Features keep ids within their table; the check turns a mistake into a warning instead of a write outside it.
        "bounds_check_mode": BoundsCheckMode.WARNING,
    }
    if name == "rowwise_adagrad_optimizer":
        parameters["weight_decay"] = optimizer.weight_decay
        parameters["weight_decay_mode"] = WeightDecayMode[optimizer.weight_decay_mode]
    return parameters


def initial_accumulator(config: SparseOptimizer) -> float:
    """What the optimizer's state begins with."""
    name, optimizer = config.optimizer
    return float(optimizer.initial_accumulator_value) if name == "adagrad_optimizer" else 0.0
