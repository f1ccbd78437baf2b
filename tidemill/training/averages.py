"""The moving average of dense weights (EMA): what is evaluated, exported and served instead of the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class DenseAverages:
    """average = decay * average + (1 - decay) * weight after each update of the dense weights; the first one copies them.

    Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992), with exponential weights.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        self._parameters = dict(parameters)
        self._decay = decay
        self._values: dict[str, Tensor] = {}

    @property
    def begun(self) -> bool:
        """Whether there has been an update."""
        return bool(self._values)

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights in."""
        if not self._values:
            self._values = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
            return
        names = list(self._parameters)
        averages = [self._values[name] for name in names]
        torch._foreach_lerp_(averages, [self._parameters[name].detach() for name in names], 1.0 - self._decay)

    def values(self) -> dict[str, Tensor]:
        """By parameter, live; empty before the first update."""
        return dict(self._values)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take back what `values` gave; what isn't a parameter is ignored. Raises KeyError for a parameter without a value."""
        self._values = {name: values[name].to(parameter.device).clone() for name, parameter in self._parameters.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the program computes with the averages. The weights come back untouched; nothing may train meanwhile."""
        if not self._values:
            yield
            return
        kept = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = self._values[name]
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = kept[name]
