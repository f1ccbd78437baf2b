"""The program's side of a feature group: its columns out of the program's inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tidemill.config import model as messages
from tidemill.errors import ConfigError
from tidemill.models.embedding_groups import GroupPlan
from tidemill.models.layers.din import DINAttention
from tidemill.models.layers.mlp import MLP


class DeepGroup(nn.Module):
    """E(g): the features of a DEEP group side by side, in the order of the config."""

    def __init__(self, plan: GroupPlan, group: str, where: str) -> None:
        super().__init__()
        if group not in plan.deep:
            raise ConfigError(f"{where}: input {group!r} isn't a DEEP feature group; known: {', '.join(plan.deep) or 'none'}")
        self._columns = plan.deep[group]
        self.out_features = plan.width(group)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """(B, width)"""
        parts = [inputs[part.input][:, part.start : part.stop] for part in self._columns]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


class Tower(nn.Module):
    """MLP(E(g)), or E(g) without an MLP."""

    def __init__(self, plan: GroupPlan, config: messages.Tower) -> None:
        super().__init__()
        where = f"tower {config.input!r}"
        self.group = DeepGroup(plan, config.input, where)
        self.mlp = MLP(self.group.out_features, config.mlp, where) if config.mlp else None
        self.out_features = self.mlp.out_features if self.mlp else self.group.out_features

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x_bf = self.group(inputs)
        return self.mlp(x_bf) if self.mlp is not None else x_bf


class DINTower(nn.Module):
    """DIN attention over a SEQUENCE group."""

    def __init__(self, plan: GroupPlan, config: messages.DINTower) -> None:
        super().__init__()
        where = f"din tower {config.input!r}"
        known = [sequence.group for sequence in plan.inputs.sequences]
        if config.input not in known:
            raise ConfigError(f"{where}: input isn't a SEQUENCE feature group; known: {', '.join(known) or 'none'}")
        sequence = plan.sequence(config.input)
        if not sequence.query:
            raise ConfigError(f"{where}: the group needs a query, a feature that is no sequence")
        self._group = config.input
        self.out_features = sum(plan.dims[lookup.table] for lookup in sequence.steps)
        query_dim = sum(plan.dims[lookup.table] for lookup in sequence.query)
        self.attention = DINAttention(query_dim, self.out_features, config.attn_mlp, where)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        group = self._group
        return self.attention(inputs[f"{group}.query"], inputs[f"{group}.sequence"], inputs[f"{group}.lengths"])
