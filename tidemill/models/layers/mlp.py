"""Fully connected layers."""

from __future__ import annotations

import ast

from torch import Tensor, nn

from tidemill.config import model as messages
from tidemill.errors import ConfigError


class MLP(nn.Module):
    """Linear, layer norm, activation and dropout for each of `hidden_units`; on the last dimension of its input."""

    def __init__(self, in_features: int, config: messages.MLP, where: str) -> None:
        """`where` names the config section in errors."""
        super().__init__()
        if config.use_bn:
            # A short batch is padded to full size: padding rows would enter the statistics, and they would differ between ranks.
            raise ConfigError(f"{where}: use_bn isn't supported, since batches hold padding rows; use use_ln")
        layers: list[nn.Module] = []
        for width, dropout in zip(config.hidden_units, _dropouts(config, where), strict=True):
            layers.append(nn.Linear(in_features, width, bias=config.bias))
            if config.use_ln:
                layers.append(nn.LayerNorm(width))
            layers.append(activation(config.activation, where))
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
            in_features = width
        self.layers = nn.Sequential(*layers)
        self.out_features = in_features

    def forward(self, x_f: Tensor) -> Tensor:
        return self.layers(x_f)


def activation(text: str, where: str) -> nn.Module:
    """A class of torch.nn by its path, with literal arguments if need be: "nn.ReLU", "nn.LeakyReLU(0.1)", "torch.nn.GELU"."""
    try:
        node = ast.parse(text, mode="eval").body
        call = node if isinstance(node, ast.Call) else None
        name = ast.unparse(call.func if call else node).removeprefix("torch.").removeprefix("nn.")
        positional = [ast.literal_eval(value) for value in call.args] if call else []
        named = {str(pair.arg): ast.literal_eval(pair.value) for pair in call.keywords} if call else {}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{where}: activation {text!r} can't be read ({error}); write nn.ReLU or nn.LeakyReLU(0.1)") from None
    cls = getattr(nn.modules.activation, name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(f"{where}: activation {text!r} isn't a class of torch.nn, such as nn.ReLU; Dice isn't supported")
    try:
        return cls(*positional, **named)
    except TypeError as error:
        raise ConfigError(f"{where}: activation {text!r}: {error}") from None


def _dropouts(config: messages.MLP, where: str) -> list[float]:
    ratios, layers = list(config.dropout_ratio), len(config.hidden_units)
    if len(ratios) <= 1:
        return (ratios or [0.0]) * layers
    if len(ratios) != layers:
        raise ConfigError(f"{where}: dropout_ratio has {len(ratios)} values for {layers} layers; give none, one, or one a layer")
    return ratios
