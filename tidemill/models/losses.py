"""Losses as weighted sums over rows, so that padding of weight 0 adds nothing and ranks' sums can be added."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional

from tidemill.config.model import LossConfig
from tidemill.errors import ConfigError

Loss = Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]
"""(outputs, labels (B,), weights (B,)) -> the weighted sum over the rows, a scalar"""


def build_losses(configs: Sequence[LossConfig]) -> list[Loss]:
    """The losses to add up. Raises ConfigError for one that isn't supported, and if there are none."""
    if not configs:
        raise ConfigError("model_config.losses is empty; use binary_cross_entropy")
    return [_build(config, index) for index, config in enumerate(configs)]


def binary_cross_entropy(outputs: dict[str, Tensor], labels_b: Tensor, weights_b: Tensor) -> Tensor:
    """Σ w · (-y log p - (1 - y) log(1 - p)), from logits."""
    return functional.binary_cross_entropy_with_logits(outputs["logits"], labels_b, weight=weights_b, reduction="sum")


def _build(config: LossConfig, index: int) -> Loss:
    found = config.one_of("loss")
    if found is None or found[0] != "binary_cross_entropy":
        name = found[0] if found else "nothing"
        raise ConfigError(f"model_config.losses[{index}]: {name} isn't supported yet; use binary_cross_entropy")
    return binary_cross_entropy
