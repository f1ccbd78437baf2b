"""Half precision: forward passes under autocast, and the scale that keeps FP16 gradients from vanishing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tidemill.config.train import GradScaler

DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}


class LossScale:
    """What the loss is multiplied by. Grows after so many good updates, and shrinks after one whose gradients overflowed.

    The tables' gradients are taken back to their own size where they leave the program, since the tables are updated within the
    backward pass; those of them that overflowed are dropped. Without a config the scale is 1 and nothing is looked at.
    """

    def __init__(self, config: GradScaler | None) -> None:
        self._config = config
        self.value = config.init_scale if config else 1.0
        self._good = 0

    def descale_tables(self, embeddings: nn.Module) -> None:
        """Have the gradients of what `embeddings` gives (a dict of tensors) divided by the scale."""
        if self._config:
            embeddings.register_forward_hook(self._descaled)

    def unscale(self, gradients: Iterable[Tensor]) -> bool:
        """Divide gradients by the scale, in place; whether all are finite. Takes note of it, so call it once an update."""
        if self._config is None:
            return True
        tensors = list(gradients)
        torch._foreach_mul_(tensors, 1.0 / self.value)
        finite = all(math.isfinite(float(tensor.sum())) for tensor in tensors)
        self._update(finite, self._config)
        return finite

    def state(self) -> dict[str, Any]:
        """JSON; the same on all ranks."""
        return {"scale": self.value, "good": self._good}

    def load_state(self, state: dict[str, Any]) -> None:
        if self._config:
            self.value, self._good = float(state["scale"]), int(state["good"])

    def _update(self, finite: bool, config: GradScaler) -> None:
        if not finite:
            self.value, self._good = self.value * config.backoff_factor, 0
            return
        self._good += 1
        if self._good >= config.growth_interval:
            self.value, self._good = self.value * config.growth_factor, 0

    def _descaled(self, module: nn.Module, arguments: Any, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if not torch.is_grad_enabled():
            return outputs
        return {name: _Descale.apply(tensor, self.value) if tensor.requires_grad else tensor for name, tensor in outputs.items()}


class _Descale(torch.autograd.Function):
    """The identity, whose gradient is divided by a scale; zero if any of it isn't finite."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        own = gradient / ctx.scale
        return torch.where(torch.isfinite(own).all(), own, torch.zeros((), dtype=own.dtype, device=own.device)), None
